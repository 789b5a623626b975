"""Make, forget and recover keys on all workers and servers.

Rank 0 sends the requests to the servers. The other workers wait for rank 0 in a rendezvous. There rank 0 also tells
them where the keys' memory is. A key exists once the rendezvous is over on all workers. If the generation ends before
that, the next generation begins without the key. (A generation is the life of a store between two failures.)

Servers store a key in *units*. Each unit is one shard of the key, with a number of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from mpips.collectives.errors import CollectiveError, of_caller
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.tasks import Task
from mpips.store.keys.cutting import Cards, Cutting
from mpips.store.keys.key import Array, Key, Name, Shard
from mpips.store.remote.link import ServerLink
from mpips.store.roles import Layout
from mpips.store.runtime.errors import ServerMemoryError
from mpips.store.runtime.generation import Generation
from mpips.store.transport import frames
from mpips.store.transport.frames import UnitCard


class Setup:
    """The keys of one worker. `keys` has only keys that all workers and servers have finished making."""

    def __init__(self, layout: Layout, generation: Generation, link: ServerLink) -> None:
        self._layout = layout
        self._generation = generation
        self._link = link
        self.cutting = Cutting(layout, True, False)
        self.keys: dict[Name, Key] = {}
        # keys that are being removed; some servers may have removed them already
        self._going: set[Name] = set()

    def at_rank_0(self, do: Callable[[], Task[bytes]], what: str) -> Task[bytes]:
        """Let rank 0 run a task, and return its result on all workers. Collective.

        If a server refuses, the task raises ValueError on rank 0. Then all workers raise that error, and nothing has
        changed.
        """
        done, failure, lacks_memory = b"", "", False
        if self._layout.rank == 0:
            try:
                done = yield from do()
            except ValueError as error:
                if isinstance(error, CollectiveError):
                    raise
                failure, lacks_memory = str(error), isinstance(error, MemoryError)
        answers = yield from self._generation.meeting(msgspec.msgpack.encode((failure, lacks_memory, done)), what)
        failure, lacks_memory, done = msgspec.msgpack.decode(answers[0], type=tuple[str, bool, bytes])
        if failure:
            raise of_caller((ServerMemoryError if lacks_memory else ValueError)(failure))
        return done

    def tell_all(self, request: msgspec.Struct) -> Task[bytes]:
        """Send a request to all servers. Called only on rank 0.

        Raise ValueError if the first server refuses. If only a later server refuses, the servers now differ. In that
        case raise CollectiveError, which ends the generation.
        """
        yield from self._link.request(0, request)
        for server in range(1, self._layout.num_servers):
            yield from self._surely(server, request)
        return b""

    def _surely(self, server: int, request: msgspec.Struct) -> Task[Any]:
        """Send a request to a server after another server has accepted it.

        Raise CollectiveError if this server refuses.
        """
        try:
            return (yield from self._link.request(server, request))
        except ValueError as error:
            where = f"server rank {self._layout.server_rank(server)}"
            raise CollectiveError(f"{where} refuses what others have done: {error}") from error

    # ---- creating and forgetting keys

    def init(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Make keys on the servers with rank 0's values. Collective."""
        cutting = self.cutting.copy()
        cards: Cards = {server: [] for server in range(self._layout.num_servers)}
        for key in keys:
            cutting.cut(key, self._link.lines, cards)
        answers = yield from self.at_rank_0(lambda: self._make(keys, values, cards), "init")
        if self._layout.rank:
            self._know(keys, cards, answers)
        self.cutting = cutting
        self.keys.update((key.name, key) for key in keys)

    def _make(self, keys: Sequence[Key], values: Sequence[Array], cards: Cards) -> Task[bytes]:
        """On rank 0, make the units on servers and send first values. Return the memory that each server has chosen."""
        answers: list[frames.Created | None] = []
        for server, new in cards.items():
            try:
                answers.append((yield from self._link.request(server, frames.Create(new))) if new else None)
            except ValueError as error:
                for earlier in range(server):
                    yield from self._surely(earlier, frames.Forget([card.number for card in cards[earlier]]))
                names = ", ".join(repr(key.name) for key in keys[:4]) + ", ..." * (len(keys) > 4)
                raise type(error)(f"init of keys {names}: {error}") from error
        encoded = msgspec.msgpack.encode(answers)
        self._know(keys, cards, encoded)
        yield from self._write(keys, values)
        if self._layout.options.mirrors:
            # This message tells servers that all values have arrived. Now they may copy the values to the mirrors.
            yield from self._set_torn(keys, False)
        return encoded

    def store_values(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        """Overwrite keys with rank 0's values, while no operation runs on them. Collective.

        Keys that were torn (left half updated by a failure) are whole afterwards.
        """
        yield from self.at_rank_0(lambda: self._put(keys, values), "load")

    def _put(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[bytes]:
        # Mark the keys as torn until all values have arrived, because a failure now would leave them half written.
        yield from self._set_torn(keys, True)
        yield from self._write(keys, values)
        yield from self._set_torn(keys, False)
        return b""

    def _set_torn(self, keys: Sequence[Key], torn: bool) -> Task[None]:
        for server, shards in self._by_server(keys).items():
            yield from self._surely(server, frames.SetTorn([shard.number for shard in shards], torn))

    def _write(self, keys: Sequence[Key], values: Sequence[Array]) -> Task[None]:
        flat = (np.ascontiguousarray(value).reshape(-1) for value in values)
        yield from self._link.set_first_values(zip(keys, flat, strict=True))

    def _know(self, keys: Sequence[Key], cards: Cards, told: bytes) -> None:
        """Register keys that the servers have made. Map the memory of units on this node."""
        created = msgspec.msgpack.decode(told, type=list[frames.Created | None])
        shards = {shard.number: shard for key in keys for shard in key.shards}
        for server, new in cards.items():
            where = created[server]
            if where is not None and self._link.lines[server].local:
                _attach([shards[card.number] for card in new], new, where)
        for key in keys:
            self._link.add(key)

    def forget(self, keys: Sequence[Key]) -> Task[None]:
        """Remove keys. Collective. All workers have agreed to do so, and have no unfinished operation on the keys."""
        self._going.update(key.name for key in keys)
        yield from self.at_rank_0(lambda: self._forget(keys), "forget")
        self._going.difference_update(key.name for key in keys)
        for key in keys:
            self._link.remove(key)
            del self.keys[key.name]
        self.cutting.free(keys)

    def _forget(self, keys: Sequence[Key]) -> Task[bytes]:
        for server, shards in self._by_server(keys).items():
            yield from self._surely(server, frames.Forget([shard.number for shard in shards]))
        return b""

    def _by_server(self, keys: Iterable[Key]) -> dict[int, list[Shard]]:
        """Return server -> the shards of the keys on that server."""
        shards: dict[int, list[Shard]] = {}
        for key in keys:
            for shard in key.shards:
                shards.setdefault(shard.server, []).append(shard)
        return shards

    # ---- the next generation

    def known_keys(self, known: Container[Name]) -> list[Key]:
        """Return the keys whose names are in `known`, except keys that a call of `forget` has not finished removing."""
        return [key for name, key in self.keys.items() if name in known and name not in self._going]

    def begin(self, keys: Sequence[Key], cutting: Cutting, cut: Cards, placed: Sequence[frames.Created | None]) -> None:
        """Begin the next generation with these keys, over the new link.

        Args:
            cut: The units of each server.
            placed: The memory in which each server keeps its units, or None for a server without units.
        """
        for key in keys:
            for shard in key.shards:
                shard.told = key.round
        shards = {shard.number: shard for key in keys for shard in key.shards}
        for server, where in enumerate(placed):
            if where is not None and self._link.lines[server].local:
                cards = cut[server]
                _attach([shards[card.number] for card in cards], cards, where)
        self.keys = {key.name: key for key in keys}
        self.cutting = cutting
        for key in keys:
            self._link.add(key)


def _attach(shards: Sequence[Shard], cards: Sequence[UnitCard], where: frames.Created) -> None:
    """Map the memory of a server on this node into these shards."""
    first_words, _ = frames.arrange_words(cards)
    words = arena.attach(Region(*where.words)).view(np.uint64)
    for shard, card, word, values in zip(shards, cards, first_words, where.values, strict=True):
        shard.words = memoryview(words[word : word + 1 + len(card.contributors)])  # type: ignore[arg-type]
        shard.stored = arena.attach(Region(*values)).view(frames.dtype_of(card.dtype))
