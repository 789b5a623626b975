"""Row-sparse pushes and pulls of a worker with servers: only rows that are named move.

A key moves as a whole if it is compressed or its shards cut rows. On a node rows are read from the server's memory. A
server of another node is told which rows are wanted, and sends those. Inside a client each row has an owner, the member
that exchanges it with the servers. Members send the owners their pushes, or the numbers of the rows they want. An owner
adds up rows in the order of the members, and asks the servers once for the rows that any member wants.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from mpips.collectives.fabric.requests import send
from mpips.collectives.fabric.tasks import Task, run_in_turn, run_together
from mpips.store.keys.key import Array, Key
from mpips.store.keys.row_sparse import EmptyPush, RowSparse, merge, packed, unpacked
from mpips.store.remote.members import Members, label
from mpips.store.remote.transfers import Pull, Push, Rows
from mpips.store.roles import Layout
from mpips.store.transport.frames import Coding
from mpips.store.transport.pending import ROWS_TAG


def elements(key: Key) -> int:
    """Return the number of elements of one row."""
    return math.prod(key.shape[1:])


def whole(key: Key) -> bool:
    """True if every shard of the key consists of whole rows, and the key has any elements."""
    row = elements(key)
    return key.size > 0 and all(shard.start % row == 0 and shard.stop % row == 0 for shard in key.shards)


class RowTransfers:
    """Pushes and pulls rows for one worker. Subclasses push and pull whole keys.

    Args:
        members: The members of its client, or None if it is alone.
        direct: Each member pulls by itself.
    """

    def __init__(self, layout: Layout, push: Push, pull: Pull, members: Members | None, direct: bool) -> None:
        self._push = push
        self._pull = pull
        self._members = members
        self._direct = direct or members is None
        self._size = 1 if members is None else members.size
        self._rank = 0 if members is None else members.rank
        self._all = layout.options.masters == "all"
        self._masters = list(range(self._size)) if self._all else [0]

    def push(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task[None]:
        raise NotImplementedError

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None]:
        raise NotImplementedError

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task[None]:
        """Contribute rows to the key's next round."""
        if isinstance(rows, EmptyPush):
            yield from self._push_nothing(key, priority)
            return
        if self._push.residuals is not None or not whole(key):
            yield from self.push([key], [rows.to_dense().reshape(-1)], priority)
            return
        key.round += 1
        merged = rows.merged()
        if self._members is not None:
            call = self._members.call(label("push of rows", [key]))
            totals: list[RowSparse] = []
            yield from call.run(run_in_turn(call.met(), self._add_up(key, merged, totals)))
            merged = totals[0]
        row = elements(key)
        yield from self._push.wait_until_read(key.round - 1, key.pushes)
        chosen = [merged.between(shard.start // row, shard.stop // row) for shard in key.pushes]
        yield from run_together(
            [
                self._push.push_coded(key, key.round, shard, packed(rows), Coding.ROWS, priority, len(rows.rows))
                for shard, rows in zip(key.pushes, chosen, strict=True)
            ]
        )

    def _push_nothing(self, key: Key, priority: int) -> Task[None]:
        """Count the key's next round without values. All members of a client do so, and need not meet for it."""
        key.round += 1
        yield from self._push.wait_until_read(key.round - 1, key.pushes)
        nothing = np.empty(0, np.uint8)
        yield from run_together(
            [self._push.push_coded(key, key.round, shard, nothing, Coding.NOTHING, priority) for shard in key.pushes]
        )

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task[None]:
        """Read rows `ids` of the key into `out` of shape (len(ids), ...)."""
        if not whole(key):
            dense = np.empty(key.shape, key.dtype)
            yield from self.pull([key], [dense.reshape(-1)])
            out[...] = dense[ids]
            return
        wanted, places = np.unique(ids, return_inverse=True)
        table = np.empty((len(wanted), elements(key)), key.dtype)
        if self._direct or self._members is None:
            yield from self._read_rows(key, wanted, table)
        else:
            call = self._members.call(label("pull of rows", [key]))
            yield from call.run(run_in_turn(call.met(), self._ask_owners(key, wanted, table)))
        out[...] = table[places.reshape(-1)].reshape(out.shape)

    # ---- owners

    def _split_rows(self, key: Key, ids: Array) -> list[Array]:
        """Return, for each member, the indices in `ids` of the rows that it owns."""
        if len(self._masters) == 1:
            owners = np.zeros(len(ids), np.int64)
        else:
            slices = [(member, *cuts) for piece in key.pieces for member, cuts in enumerate(pairwise(piece.cuts))]
            starts = sorted((start, member) for member, start, stop in slices if stop > start)
            first = np.array([start for start, _ in starts]) // elements(key)
            owners = np.array([member for _, member in starts])[np.searchsorted(first, ids, side="right") - 1]
        return [np.flatnonzero(owners == member) for member in range(self._size)]

    def _add_up(self, key: Key, rows: RowSparse, totals: list[RowSparse]) -> Task[None]:
        """Sum the rows that this member owns over all members, and append the sum to `totals`."""
        places = self._split_rows(key, rows.rows)
        parts = [RowSparse(rows.rows[chosen], rows.values[chosen], key.shape) for chosen in places]
        sends = {to: packed(parts[to]) for to in self._masters if to != self._rank}
        others = [rank for rank in range(self._size) if rank != self._rank] if self._rank in self._masters else []
        received = yield from self._swap(sends, others)
        everyone = {source: unpacked(data, key.shape, key.dtype) for source, data in received.items()}
        everyone[self._rank] = parts[self._rank]
        totals.append(reduce(merge, [everyone[rank] for rank in sorted(everyone)]))

    def _ask_owners(self, key: Key, ids: Array, table: Array) -> Task[None]:
        """Read rows `ids` (ascending) into `table`, through their owners."""
        owner = self._rank in self._masters
        others = [rank for rank in range(self._size) if rank != self._rank]
        places = self._split_rows(key, ids)
        sends = {to: ids[places[to]].view(np.uint8) for to in self._masters if to != self._rank}
        asked = yield from self._swap(sends, others if owner else [])
        answers: dict[int, Array] = {}
        if owner:
            wanted = {source: data.view(np.int64) for source, data in asked.items()}
            wanted[self._rank] = ids[places[self._rank]]
            union = reduce(np.union1d, wanted.values())
            rows = np.zeros((len(union), elements(key)), key.dtype)
            yield from self._read_rows(key, union, rows)
            answers = {to: rows[np.searchsorted(union, chosen)] for to, chosen in wanted.items()}
            table[places[self._rank]] = answers.pop(self._rank)
        sends = {to: answer.reshape(-1).view(np.uint8) for to, answer in answers.items()}
        received = yield from self._swap(sends, [rank for rank in self._masters if rank != self._rank])
        for source, data in received.items():
            table[places[source]] = data.view(key.dtype).reshape(-1, elements(key))

    def _swap(self, sends: Mapping[int, Array], sources: Sequence[int]) -> Task[dict[int, Array]]:
        """Send bytes (uint8) to members, and receive what each source sends, of whatever size."""
        assert self._members is not None
        comm, under_way = self._members.comm, self._members.under_way
        exchanges = [under_way.begin([], [send(comm, data, to, ROWS_TAG) for to, data in sends.items()])]
        received: dict[int, Array] = {}
        status = MPI.Status()
        while len(received) < len(sources) or any(exchange.pending() for exchange in exchanges):
            for source in sources:
                if source not in received and (message := comm.Improbe(source, ROWS_TAG, status)) is not None:
                    received[source] = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                    exchanges.append(under_way.begin([message.Irecv(received[source])]))
            yield False
        return received

    def _read_rows(self, key: Key, ids: Array, table: Array) -> Task[None]:
        """Read rows `ids` (ascending) from the servers into `table`, after this worker's pushes."""
        row = elements(key)
        wanted: list[Rows] = []
        for shard in key.shards:
            start, stop = np.searchsorted(ids, [shard.start // row, shard.stop // row])
            if stop > start:
                wanted.append((shard, ids[start:stop] - shard.start // row, table[start:stop]))
        yield from self._pull.pull_rows(key, row, wanted)
