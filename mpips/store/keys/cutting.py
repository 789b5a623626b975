"""Cut a new key into parts for the servers, by the rules in `sharding`.

A key is cut in three steps:

    key into parts      one part for each server that stores elements of the key
    part into pieces    a client, which is a group of workers that sum before they push, sums one piece at a time
    piece into units    a unit always has the same contributors, which are the workers that push it

A unit has two descriptions. A *shard* describes it to a worker, and a *card* describes it to its server.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np

from mpips.collectives.machine import past_caches
from mpips.store.keys.key import Key, LineToServer, Piece, Shard
from mpips.store.keys.sharding import Interval, Placement, block_bytes, grain_of, pulled_at_once, split, units
from mpips.store.roles import Layout
from mpips.store.transport.frames import UnitCard
from mpips.store.transport.pending import UnitNumbers

# largest number of chunks into which one server's part of a key is cut
MOST_CHUNKS = 32
# server -> its new units
Cards = dict[int, list[UnitCard]]


class Cutting:
    """Knows which server has which elements, and cuts new keys.

    Args:
        one_node: True if all ranks of the store are on one node.
        side_by_side: True if every process has a core of its own. Then a server sums one block while workers copy the
            next one.
    """

    def __init__(
        self,
        layout: Layout,
        one_node: bool,
        side_by_side: bool,
        placement: Placement | None = None,
        numbers: UnitNumbers | None = None,
    ) -> None:
        self._layout = layout
        self._one_node = one_node
        self._side_by_side = side_by_side
        self._grouped = layout.kind.startswith("mpi_")
        self._past_caches = past_caches(os.environ)
        self._groups = layout.groups()
        self._placement = placement or Placement(layout.num_servers, layout.options.big_array)
        self._numbers = numbers or UnitNumbers()

    def copy(self) -> Cutting:
        """Return a copy. A caller first cuts keys with the copy, and keeps the copy only if nothing fails."""
        placement, numbers = self._placement.copy(), self._numbers.copy()
        return Cutting(self._layout, self._one_node, self._side_by_side, placement, numbers)

    def free(self, keys: Iterable[Key]) -> None:
        """Release the unit numbers of removed keys, and subtract the keys from the loads of servers."""
        for key in keys:
            self._placement.remove_load(_parts(key), key.dtype.itemsize)
            self._numbers.release(shard.number for shard in key.shards)

    def cut(
        self, key: Key, lines: Sequence[LineToServer], cards: Cards, parts: Sequence[tuple[int, Interval]] | None = None
    ) -> None:
        """Cut a key into parts, the parts into pieces, and the pieces into units. Local.

        Sets the pieces of the key (`key.pieces`), a shard for each unit (`key.shards`), and the shards that this worker
        pushes (`key.pushes`).

        Args:
            lines: The connection to each server. On ranks without connections, a None for each server.
            cards: server -> a list, to which a card for each new unit of the server is appended.
            parts: (server, interval of elements) for each part, if servers already have the key. None: choose the
                servers.

        Raises:
            ValueError: The store has too many units.
        """
        options = self._layout.options
        sharers = max(map(len, self._groups))
        grain = grain_of(key.shape, self._layout.num_servers * (sharers * MOST_CHUNKS if sharers > 1 else 1))
        if self._one_node and sharers > 1:
            # The members of a client use `collectives.reduce_scatter`, which may cut between any two elements.
            grain = 1
        by_server = []
        if parts is None:
            parts = self._placement.place(key.shape, key.dtype.itemsize)
        else:
            self._placement.add_load(parts, key.dtype.itemsize)
        for server, part in parts:
            first, chunks = len(key.pieces), 1
            if not self._one_node:
                chunks = max(1, min(MOST_CHUNKS, part.size * key.dtype.itemsize // options.chunk_bytes))
            for chunk in split(part, chunks, grain):
                if chunk.size or not part.size:
                    self._cut_piece(key, server, chunk, grain, lines[server], cards[server])
            by_server.append(key.pieces[first:])
        # Alternate between the servers, so that the few pieces in progress keep all servers busy. All workers must use
        # the same order, because a server receives only a few pieces at a time.
        key.pieces = [piece for row in zip_longest(*by_server) for piece in row if piece is not None]
        key.pushes = [shard for piece in key.pieces for shard in piece.pushes]
        if self._one_node and self._grouped and options.masters == "one":
            # One collective sums the whole key.
            key.pieces = [Piece([0, key.size], key.pushes, 0)]

    def _cut_piece(
        self, key: Key, server: int, chunk: Interval, grain: int, line: LineToServer, cards: list[UnitCard]
    ) -> None:
        rank, itemsize = self._layout.rank, key.dtype.itemsize
        worker = rank < self._layout.num_workers
        members = self._groups[self._layout.client_number] if self._grouped and worker else [rank]
        slices = split(chunk, len(members), grain)
        piece = Piece([each.start for each in slices] + [chunk.stop], [], len(key.pieces))
        row_elements = int(np.prod(key.shape[1:], dtype=np.int64)) if key.shape else 1
        for unit in units(0, server, chunk, self._groups, grain):
            block = self._block_elements(unit.size, itemsize)
            number = self._numbers.assign(key.name)
            card = UnitCard(
                number, key.name, key.dtype.name, unit.start, unit.stop, max(1, row_elements), block, unit.contributors
            )
            cards.append(card)
            least = pulled_at_once(unit.size * itemsize, block * itemsize, self._past_caches)
            blocks = max(1, -(-unit.size // block))
            shard = Shard(number, server, unit.start, unit.stop, line, unit.contributors, block, blocks, least)
            key.shards.append(shard)
            if rank in unit.contributors:
                shard.mine = 1 + unit.contributors.index(rank)
                piece.pushes.append(shard)
        key.pieces.append(piece)

    def _block_elements(self, size: int, itemsize: int) -> int:
        """Return the block size, in elements, of a unit with `size` elements.

        Between nodes each block is one message.
        """
        options = self._layout.options
        nbytes = options.chunk_bytes
        if self._one_node:
            nbytes = block_bytes(size * itemsize, options.block_bytes, self._side_by_side)
        return max(1, nbytes // itemsize)


def _parts(key: Key) -> list[tuple[int, int]]:
    return [(shard.server, shard.stop - shard.start) for shard in key.shards]
