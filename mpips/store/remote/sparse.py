"""Row-sparse pushes and pulls in a store with servers: only the rows that the call names are moved.

If pushes are compressed, or if shards of a key begin or end within a row, the whole key is moved instead.

The members of a client (workers that push as a group) first exchange their rows. Then each member pushes the sum to the
shards that it contributes to. Each member pulls separately, because the members mostly want different rows. A worker
reads rows from the memory of a server on its node. To a server of another node it sends the row numbers, and the server
sends the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mpips.collectives.fabric import arena
from mpips.collectives.fabric.tasks import Task, run_together
from mpips.store.keys.key import Array, Key, Piece
from mpips.store.keys.row_sparse import EmptyPush, RowGather, RowSparse, packed, sum_of
from mpips.store.remote.members import Members, label
from mpips.store.remote.transfers import Part, Pull, Push
from mpips.store.roles import Layout
from mpips.store.transport.frames import Coding


def elements(key: Key) -> int:
    """Return the number of elements of one row."""
    return math.prod(key.shape[1:])


def whole(key: Key) -> bool:
    """True if every shard of the key consists of whole rows, and the key has any elements."""
    row = elements(key)
    return key.size > 0 and all(shard.start % row == 0 and shard.stop % row == 0 for shard in key.shards)


class RowTransfers:
    """Pushes and pulls rows for one worker. Subclasses add methods for whole keys.

    Args:
        members: The members of this worker's client, or None if it is not in a client.
    """

    def __init__(self, layout: Layout, push: Push, pull: Pull, members: Members | None) -> None:
        self._push = push
        self._pull = pull
        self._members = members
        self._asynchronous = layout.asynchronous
        self._gather = None if members is None else RowGather(members.rank, members.size)

    def push(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        raise NotImplementedError

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        raise NotImplementedError

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task[None]:
        """Contribute rows to the key's next round."""
        # Either all members of a client make an empty push, or no member does. So an empty push needs no collective.
        nothing = isinstance(rows, EmptyPush)
        if not nothing and (self._push.residuals is not None or not whole(key)):
            yield from self.push([key], [rows.to_dense().reshape(-1)], priority)
            return
        key.round += 1
        if not nothing:
            rows = rows.merged() if self._members is None else (yield from self._sum_of_members(key, rows))
        yield from self._push.wait_until_read(key.round - 1, key.pushes)
        coding, row = Coding.NOTHING if nothing else Coding.ROWS, max(1, elements(key))
        parts = [(shard, rows.between(shard.start // row, shard.stop // row)) for shard in key.pushes]
        yield from run_together(
            [
                self._push.push_coded(
                    key,
                    key.round,
                    shard,
                    packed(part, arena.empty if shard.local else np.empty),
                    coding,
                    priority,
                )
                for shard, part in parts
            ]
        )

    def _sum_of_members(self, key: Key, rows: RowSparse) -> Task[RowSparse]:
        """Return the members' sum of rows, added in the order of members.

        A member that does not push any part of the key gets its own rows back, which nobody uses.
        """
        assert self._members is not None and self._gather is not None
        call, size = self._members.call(label("push of rows", [key])), self._members.size
        every: list[RowSparse] = []

        def allgather(x: Array) -> Task[None]:
            return call.allgather(Piece([x.size // size * rank for rank in range(size + 1)], [], 0), x)

        yield from call.run(self._gather.gather(rows, allgather, every))
        return sum_of(every) if key.pushes else rows

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task[None]:
        """Read rows `ids` of the key into `out` of shape (len(ids), ...), after the pushes of this worker's client."""
        if not whole(key):
            dense = np.empty(key.shape, key.dtype)
            yield from self.pull([key], [dense.reshape(-1)])
            out[...] = dense[ids]
            return
        row, others = elements(key), self._members if self._asynchronous else None
        wanted, places = np.unique(ids, return_inverse=True)
        table = np.empty((len(wanted), row), key.dtype)
        parts: list[Part] = []
        for shard in key.shards:
            start, stop = np.searchsorted(wanted, [shard.start // row, shard.stop // row])
            if stop > start or (others is not None and shard.mine >= 0):
                parts.append((shard, wanted[start:stop] - shard.start // row, table[start:stop]))
        if others is not None:
            # An asynchronous server answers a read only after it has applied the earlier pushes of the worker that
            # reads. So each member first reads the shards that it pushes to, even if it wants no rows of them. When all
            # members have done so, all pushes are applied, and each member reads from the remaining shards.
            yield from self._pull.ask(key, [part for part in parts if part[0].mine >= 0])
            call = others.call(label("pull of rows", [key]))
            yield from call.run(call.met())
            parts = [part for part in parts if part[0].mine < 0]
        yield from self._pull.ask(key, parts)
        out[...] = table[places.reshape(-1)].reshape(out.shape)
