"""Keys of a store with servers: which server keeps what, in which units and pieces, and how it gets there."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collectives.errors import of_caller
from collectives.machine.caches import past_caches
from collectives.node import arena
from collectives.node.arena import Region
from mpips import messages, short
from mpips.compression import Compressor
from mpips.keys import Key, Part, Piece
from mpips.layout import Layout
from mpips.lines import Line
from mpips.members import Members
from mpips.messages import UnitCard
from mpips.session import Task
from mpips.sharding import Interval, Placement, block_bytes, grain_of, pulled_at_once, split, units
from mpips.tags import Numbers

Array = NDArray[Any]
MOST_CHUNKS = 32  # of what a server has of a key


class Placing(Members):
    """Makes and forgets keys, the same on every worker."""

    def __init__(self, layout: Layout, lines: list[Line], cores_shared: bool) -> None:
        super().__init__(layout, lines)
        self._side_by_side = not (cores_shared or layout.asynchronous)
        self._past_caches = past_caches(os.environ)
        self._placement = Placement(layout.num_servers, layout.options.big_array)
        self._groups = layout.groups()
        self._numbers = Numbers()
        self._updated = not layout.asynchronous
        """Whether pushes have something that applies them."""
        self._compressor: Compressor | None = None
        self._residuals: dict[int, Array] = {}

    def init(self, keys: list[Key], values: list[Array]) -> Task:
        """Make the keys on the servers, with rank 0's values. Collective over the workers."""
        cards: dict[int, list[UnitCard]] = {server: [] for server in range(self.layout.num_servers)}
        try:
            for key in keys:
                self._plan(key, cards)
            told = yield from self._from_rank_0(self._create(keys, cards), "init")
            created = msgspec.msgpack.decode(told, type=list[messages.Created | None])
            for key in keys:
                self.session.add(key)
            for server, new in cards.items():
                if self.session.lines[server].local and (where := created[server]) is not None:
                    self._attach(new, where)
            for key in keys:
                self._shorten(key)
            flat = (value.reshape(-1) for value in values)
            yield from self._from_rank_0(self.session.set(zip(keys, flat, strict=True)), "init")
        except BaseException:
            self._undo(keys, cards)
            raise

    def _create(self, keys: Sequence[Key], cards: dict[int, list[UnitCard]]) -> Generator[bool | None, None, bytes]:
        """Tell the servers; where each has put its units. ValueError where one cannot."""
        answers: list[Any] = []
        for server, new in cards.items():
            try:
                answers.append((yield from self.session.request(server, messages.Create(new))) if new else None)
            except ValueError as error:
                names = ", ".join(repr(key.name) for key in keys[:4]) + ", ..." * (len(keys) > 4)
                where = f"server rank {self.layout.server_rank(server)}"
                raise ValueError(f"init of keys {names}: {where}: {error}") from error
        return msgspec.msgpack.encode(answers)

    def _undo(self, keys: Sequence[Key], cards: dict[int, list[UnitCard]]) -> None:
        """Nobody has used these keys: the servers forget what they may have made of them."""
        for key in keys:
            self.session.abandon(key)
        for server, new in cards.items() if self.layout.rank == 0 else ():
            if new:
                self.session.order(server, messages.Forget([card.number for card in new]))
        self._drop(keys)

    def _from_rank_0(
        self, task: Generator[bool | None, None, bytes | None], what: str
    ) -> Generator[bool | None, None, bytes]:
        """Rank 0 does it; every worker learns what it returns, or raises what made it fail."""
        assert self.layout.meetings is not None
        done, failure = b"", ""
        if self.layout.rank == 0:
            try:
                done = (yield from task) or b""
            except ValueError as error:
                failure = str(error)
            except BaseException as error:
                self.layout.meetings.refuse(what, error)
                raise
        told = self._exchange(msgspec.msgpack.encode((failure, done)), what)[0]
        failure, done = msgspec.msgpack.decode(told, type=tuple[str, bytes])
        if failure:
            raise of_caller(ValueError(failure))
        return done

    def _exchange(self, payload: bytes, what: str) -> list[bytes]:
        """All workers' payloads; collective over them, blocking."""
        assert self.layout.meetings is not None
        return self.layout.meetings.exchange(payload, what)

    def forget(self, keys: Sequence[Key]) -> Task:
        """Give up keys. Collective over the workers, who have nothing under way on them."""
        self._exchange(b"", "forget")
        try:
            yield from self._forget(keys)
        except BaseException as error:
            assert self.layout.meetings is not None
            self.layout.meetings.refuse("forget", error)  # in which the others wait
            raise
        self._exchange(b"", "forget")

    def _forget(self, keys: Sequence[Key]) -> Task:
        for server in range(self.layout.num_servers) if self.layout.rank == 0 else ():
            units = [part.number for key in keys for part in key.parts if part.server == server]
            if units:
                yield from self.session.request(server, messages.Forget(units))
        for key in keys:
            self.session.remove(key)
            for part in key.parts:
                self._residuals.pop(part.number, None)
        self._drop(keys)

    def _drop(self, keys: Sequence[Key]) -> None:
        """Take back what `_plan` gave."""
        for key in keys:
            self._placement.free([(part.server, part.stop - part.start) for part in key.parts], key.dtype.itemsize)
            self._numbers.give(part.number for part in key.parts)

    def _plan(self, key: Key, cards: dict[int, list[UnitCard]]) -> None:
        """Cut a key into pieces and units, the same on every worker."""
        options = self.layout.options
        sharers = max(map(len, self._groups))
        grain = grain_of(key.shape, self.layout.num_servers * (sharers * MOST_CHUNKS if sharers > 1 else 1))
        if self.one_node and sharers > 1:
            grain = 1  # as `collectives.reduce_scatter` cuts
        by_server = []
        for server, part in self._placement.place(key.shape, key.dtype.itemsize):
            first = len(key.pieces)
            chunks = 1
            if not self.one_node:
                chunks = max(1, min(MOST_CHUNKS, part.size * key.dtype.itemsize // options.chunk_bytes))
            for chunk in split(part, chunks, grain):
                if chunk.size or not part.size:
                    self._plan_piece(key, server, chunk, grain, cards[server])
            by_server.append(key.pieces[first:])
        # In turn, so that the few pieces under way keep all servers busy; in one order everywhere, as servers take few.
        key.pieces = [piece for row in zip_longest(*by_server) for piece in row if piece is not None]
        key.pushes = [part for piece in key.pieces for part in piece.pushes]

    def _plan_piece(self, key: Key, server: int, chunk: Interval, grain: int, cards: list[UnitCard]) -> None:
        rank = self.layout.rank
        members = self._groups[self.layout.client_number] if self._grouped else [rank]
        slices = split(chunk, len(members), grain)
        piece = Piece([s.start for s in slices] + [chunk.stop], [], len(key.pieces))
        row_elements = int(np.prod(key.shape[1:], dtype=np.int64)) if key.shape else 1
        for unit in units(0, server, chunk, self._groups, grain):
            block = self._block_elements(unit.size, key.dtype.itemsize)
            card = UnitCard(
                self._numbers.take(key.name), key.name, key.dtype.name, unit.start, unit.stop, max(1, row_elements),
                block, unit.contributors,
            )  # fmt: skip
            cards.append(card)
            part = Part(
                card.number, server, unit.start, unit.stop, self.session.lines[server], unit.contributors,
                block, max(1, -(-unit.size // block)),
                pulled_at_once(unit.size * key.dtype.itemsize, block * key.dtype.itemsize, self._past_caches),
            )  # fmt: skip
            key.parts.append(part)
            if rank in unit.contributors:
                part.mine = 1 + unit.contributors.index(rank)
                key.pushes.append(part)
                piece.pushes.append(part)
        key.pieces.append(piece)

    def _block_elements(self, size: int, itemsize: int) -> int:
        """Elements of a block of a unit of `size` elements, which is also a message's between nodes."""
        options = self.layout.options
        nbytes = options.chunk_bytes
        if self.one_node:
            nbytes = block_bytes(size * itemsize, options.block_bytes, self._side_by_side)
        return max(1, nbytes // itemsize)

    def _attach(self, cards: list[UnitCard], created: messages.Created) -> None:
        dtypes = [messages.dtype_of(card.dtype) for card in cards]
        first_words, _, first_bytes, _ = messages.arrange(cards, [dtype.itemsize for dtype in dtypes])
        words = arena.attach(Region(*created.words)).view(np.uint64)
        values = arena.attach(Region(*created.values))
        for card, dtype, word, byte in zip(cards, dtypes, first_words, first_bytes, strict=True):
            part = self.session.part(card.number)
            part.words = memoryview(words[word : word + 1 + len(card.contributors)])  # type: ignore[arg-type]
            part.stored = values[byte : byte + (card.stop - card.start) * dtype.itemsize].view(dtype)

    def _shorten(self, key: Key) -> None:
        """Find out whether pushes and pulls of the key can take the short way."""
        layout, options = self.layout, self.layout.options
        plain = not self._grouped and self._compressor is None and options.staleness < 0
        near = plain and self.session.all_local and self._updated
        key.short = short.make(self.session, key, options.small_bytes, layout.asynchronous) if near else None
