"""Keys of a store with servers are made, forgotten and recovered, on all workers and servers alike.

Rank 0 tells the servers; the others wait for it in one rendezvous, in which they learn where their memory lies. A key
is there once this is over on all workers. Where the epoch ends before, `recover` forgets it on all.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError, of_caller
from collectives.node import arena
from collectives.node.arena import Region
from mpips.keys.key import Key, Name
from mpips.keys.shard import Shard
from mpips.layout import Layout
from mpips.runtime import rendezvous
from mpips.runtime.epoch import Epoch
from mpips.runtime.tasks import Task
from mpips.served.cutting import Cards, Cutting
from mpips.served.link import Link
from mpips.transport import frames
from mpips.transport.frames import UnitCard

Array = NDArray[Any]
State = dict[Name, tuple[int, bool]]
"""Of each key the round at which it stands, and whether it is torn."""


class Setup:
    """The keys of one worker. `keys`: those that are complete on all workers."""

    def __init__(self, layout: Layout, epoch: Epoch, link: Link, cutting: Cutting) -> None:
        self._layout, self._epoch, self._link, self._cutting = layout, epoch, link, cutting
        self.keys: dict[Name, Key] = {}
        self._torn: set[Name] = set()
        """Keys that were torn when the epoch began, and have not been overwritten since."""

    def at_rank_0(self, do: Callable[[], Task[bytes]], what: str) -> Task[bytes]:
        """Rank 0 does it; all workers learn what it returns. Collective.

        ValueError on all of them, where a server refuses (ValueError on rank 0): nothing has changed.
        """
        done, failure = b"", ""
        if self._layout.rank == 0:
            try:
                done = yield from do()
            except ValueError as error:
                if isinstance(error, CollectiveError):
                    raise
                failure = str(error)
        told = yield from self._epoch.met(msgspec.msgpack.encode((failure, done)), what)
        failure, done = msgspec.msgpack.decode(told[0], type=tuple[str, bytes])
        if failure:
            raise of_caller(ValueError(failure))
        return done

    def tell_all(self, request: frames.Request) -> Task[bytes]:
        """For rank 0: tell all servers. ValueError where the first refuses; where only later ones do, servers differ:
        CollectiveError."""
        yield from self._link.request(0, request)
        for server in range(1, self._layout.num_servers):
            yield from self._surely(server, request)
        return b""

    def _surely(self, server: int, request: frames.Request) -> Task[Any]:
        """Ask a server what it cannot refuse any more."""
        try:
            return (yield from self._link.request(server, request))
        except ValueError as error:
            where = f"server rank {self._layout.server_rank(server)}"
            raise CollectiveError(f"{where} refuses what others have done: {error}") from error

    # ---- new keys, and keys no more

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Make the keys on the servers, with rank 0's values. Collective."""
        cutting = self._cutting.copy()
        cards: Cards = {server: [] for server in range(self._layout.num_servers)}
        for key in keys:
            cutting.cut(key, self._link.lines, cards)
        told = yield from self.at_rank_0(lambda: self._make(keys, values, cards), "init")
        if self._layout.rank:
            self._know(keys, cards, told)
        self._cutting = cutting
        self.keys.update((key.name, key) for key in keys)

    def _make(self, keys: Sequence[Key], values: Sequence[Array], cards: Cards) -> Task[bytes]:
        """Tell the servers, and give the keys their first values; where each server has put its units."""
        answers: list[frames.Created | None] = []
        for server, new in cards.items():
            try:
                answers.append((yield from self._link.request(server, frames.Create(new))) if new else None)
            except ValueError as error:
                for earlier in range(server):
                    yield from self._surely(earlier, frames.Forget([card.number for card in cards[earlier]]))
                names = ", ".join(repr(key.name) for key in keys[:4]) + ", ..." * (len(keys) > 4)
                where = f"server rank {self._layout.server_rank(server)}"
                raise ValueError(f"init of keys {names}: {where}: {error}") from error
        told = msgspec.msgpack.encode(answers)
        self._know(keys, cards, told)
        yield from self._write(keys, values)
        return told

    def put(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Overwrite what is stored by rank 0's values, while nothing is under way: no key is torn any more.
        Collective."""
        yield from self.at_rank_0(lambda: self._put(keys, values), "load")
        for key in keys:
            self._torn.discard(key.name)

    def _put(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[bytes]:
        yield from self._write(keys, values)
        torn = [key for key in keys if key.name in self._torn]
        yield from self._set_rounds({key.name: (key.round, False) for key in torn})
        return b""

    def _write(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        flat = (np.ascontiguousarray(value).reshape(-1) for value in values)
        yield from self._link.set(zip(keys, flat, strict=True))

    def _know(self, keys: Sequence[Key], cards: Cards, told: bytes) -> None:
        """The servers have made these keys."""
        created = msgspec.msgpack.decode(told, type=list[frames.Created | None])
        shards = {shard.number: shard for key in keys for shard in key.shards}
        for server, new in cards.items():
            where = created[server]
            if where is not None and self._link.lines[server].local:
                _attach([shards[card.number] for card in new], new, where)
        for key in keys:
            self._link.add(key)

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        """Give up keys. Collective; all workers have come to it, and have nothing under way on them."""
        yield from self.at_rank_0(lambda: self._forget(keys), "forget")
        for key in keys:
            self._link.remove(key)
            del self.keys[key.name]
        self._cutting.free(keys)

    def _forget(self, keys: Sequence[Key]) -> Task[bytes]:
        for server, shards in self._by_server(keys).items():
            yield from self._surely(server, frames.Forget([shard.number for shard in shards]))
        return b""

    def _by_server(self, keys: Iterable[Key]) -> dict[int, list[Shard]]:
        """The shards of keys on each server that has any."""
        found: dict[int, list[Shard]] = {}
        for key in keys:
            for shard in key.shards:
                found.setdefault(shard.server, []).append(shard)
        return found

    # ---- the next epoch

    def recover(self, known: Container[Name]) -> Task[State]:
        """Keep the keys that all workers have, forget all others; the round of each. Collective; the link is new."""
        here = {name: key for name, key in self.keys.items() if name in known}
        mine = {repr(name): [shard.number for shard in key.shards] for name, key in here.items()}
        told = rendezvous.exchange(self._epoch, msgspec.msgpack.encode(mine), "recover")
        everybody = [msgspec.msgpack.decode(data, type=dict[str, list[int]]) for data in told]
        kept = {
            name: key for name, key in here.items()
            if all(other.get(repr(name)) == mine[repr(name)] for other in everybody)
        }  # fmt: skip
        for key in [*self._link.keys()]:
            if kept.get(key.name) is not key:
                self._link.remove(key)
        self.keys = kept
        self._cutting = self._cutting.only(kept.values())
        data = yield from self.at_rank_0(self._ask_rounds, "recover")
        state = msgspec.msgpack.decode(data, type=dict[int | str, tuple[int, bool]])
        self._torn = {name for name, (_, torn) in state.items() if torn}
        for name, key in kept.items():
            key.round = state[name][0]
            for shard in key.shards:
                shard.told = key.round
        return {name: state[name] for name in kept}

    def _ask_rounds(self) -> Task[bytes]:
        """Rank 0 asks each server at which rounds it stands, and lets it forget what is not asked for; then all shards
        of a key count from one round on."""
        by_server = self._by_server(self.keys.values())
        rounds: dict[int, tuple[int, bool]] = {}
        for server in range(self._layout.num_servers):
            numbers = [shard.number for shard in by_server.get(server, [])]
            answer = yield from self._surely(server, frames.Rounds(numbers))
            rounds.update(zip(numbers, zip(answer.rounds, answer.torn, strict=True), strict=True))
        state = {name: self._joined(key, rounds) for name, key in self.keys.items()}
        yield from self._set_rounds(state)
        return msgspec.msgpack.encode(state)

    def _set_rounds(self, state: State) -> Task[None]:
        """Let all units of these keys count from one round on."""
        by_server: dict[int, list[tuple[int, int, bool]]] = {}
        for name, (round_, torn) in state.items():
            for shard in self.keys[name].shards:
                by_server.setdefault(shard.server, []).append((shard.number, round_, torn))
        for server, units in by_server.items():
            numbers, rounds, torn_ = (list(column) for column in zip(*units, strict=True))
            yield from self._surely(server, frames.SetRounds(numbers, rounds, torn_))

    def _joined(self, key: Key, rounds: dict[int, tuple[int, bool]]) -> tuple[int, bool]:
        """The last round of a key, and whether it is torn: its shards stand at different rounds, or one is itself."""
        of = [rounds[shard.number] for shard in key.shards]
        highest = max(round_ for round_, _ in of)
        differ = not self._layout.asynchronous and any(round_ != highest for round_, _ in of)
        return highest, differ or any(torn for _, torn in of)


def _attach(shards: Sequence[Shard], cards: Sequence[UnitCard], created: frames.Created) -> None:
    """Map the memory of new units of a server on this node."""
    dtypes = [frames.dtype_of(card.dtype) for card in cards]
    first_words, _, first_bytes, _ = frames.arrange(list(cards), [dtype.itemsize for dtype in dtypes])
    words = arena.attach(Region(*created.words)).view(np.uint64)
    values = arena.attach(Region(*created.values))
    for shard, card, dtype, word, byte in zip(shards, cards, dtypes, first_words, first_bytes, strict=True):
        shard.words = memoryview(words[word : word + 1 + len(card.contributors)])  # type: ignore[arg-type]
        shard.stored = values[byte : byte + (card.stop - card.start) * dtype.itemsize].view(dtype)
