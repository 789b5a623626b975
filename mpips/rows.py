"""Row-sparse pushes and pulls of a worker with servers: only rows that somebody names move.

For keys of which every unit is whole rows. On a node, rows are read from the server's memory. A server of another node
is told which rows are wanted and answers those. Inside a client a row belongs to the member that exchanges it with the
servers, its owner: members send owners what they push, or which rows they want; the owner adds the rows up in the order
of the members, or asks the servers once for what anybody wants.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError
from mpips.keys import Key, Part
from mpips.layout import Layout
from mpips.messages import Coding
from mpips.row_sparse import RowSparse, merge
from mpips.session import Session, Task, together

if TYPE_CHECKING:
    from mpi4py import MPI

Array = NDArray[Any]
TAG = 32001  # of a client's messages with rows; those with pieces of keys have the pieces' numbers


def elements(key: Key) -> int:
    """Elements of one row."""
    return math.prod(key.shape[1:])


def whole(key: Key) -> bool:
    """Whether every unit of the key is whole rows, and has any elements."""
    row = elements(key)
    return key.size > 0 and all(part.start % row == 0 and part.stop % row == 0 for part in key.parts)


def swap(
    comm: MPI.Comm, sends: Mapping[int, Array], sources: Sequence[int]
) -> Generator[bool | None, None, dict[int, Array]]:
    """Send each rank its bytes (uint8) and receive from each source what it sends, of whatever size."""
    from mpi4py import MPI

    requests = [comm.Isend(data, to, TAG) for to, data in sends.items()]
    received: dict[int, Array] = {}
    status = MPI.Status()
    while len(received) < len(sources) or not MPI.Request.Testall(requests):
        for source in sources:
            if source not in received and (message := comm.Improbe(source, TAG, status)) is not None:
                received[source] = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                requests.append(message.Irecv(received[source]))
        yield False
    return received


def packed(rows: RowSparse) -> Array:
    """Row numbers (int64), then their values, as bytes."""
    values = np.ascontiguousarray(rows.values).reshape(-1)
    return np.concatenate([rows.rows.view(np.uint8), values.view(np.uint8)])


def unpacked(data: Array, key: Key) -> RowSparse:
    """What `packed` made."""
    count = data.size // (8 + elements(key) * key.dtype.itemsize)
    values = data[8 * count :].view(key.dtype).reshape(count, *key.shape[1:])
    return RowSparse(data[: 8 * count].view(np.int64), values, key.shape)


class Rows:
    """One worker's row-sparse traffic. `agreed(key, what, pushes)`: all members of the client do the same now."""

    def __init__(self, layout: Layout, session: Session, agreed: Callable[[Key, str, bool], Task]) -> None:
        self._layout, self._session, self._agreed = layout, session, agreed
        self._comm = layout.client
        self._size = 1 if layout.client is None or layout.kind.startswith("dist_") else layout.client.Get_size()
        self._rank = 0 if layout.client is None or self._size == 1 else layout.client.Get_rank()

    # ---- owners

    def _owners(self, key: Key, ids: Array) -> Array:
        """The member of the client that exchanges each of these rows with the servers."""
        if self._layout.options.masters == "one":
            return np.zeros(len(ids), np.int64)
        slices = [(member, *cuts) for piece in key.pieces for member, cuts in enumerate(pairwise(piece.cuts))]
        starts = sorted((start, member) for member, start, stop in slices if stop > start)
        first = np.array([start for start, _ in starts]) // elements(key)
        return np.array([member for _, member in starts])[np.searchsorted(first, ids, side="right") - 1]

    def _split(self, key: Key, ids: Array) -> list[Array]:
        """The places in `ids` of every owner's rows."""
        owners = self._owners(key, ids)
        return [np.flatnonzero(owners == member) for member in range(self._size)]

    @property
    def _masters(self) -> list[int]:
        return [0] if self._layout.options.masters == "one" else list(range(self._size))

    # ---- pushes

    def push(self, key: Key, round_: int, rows: RowSparse, priority: int) -> Task:
        """Contribute rows to a round of the key."""
        merged = rows.merged()
        if self._size > 1:
            yield from self._agreed(key, "push of rows", True)
            merged = yield from self._add_up(key, merged)
        row = elements(key)
        for part in key.pushes:
            yield from self._session.drained(key, round_ - 1, [part], alone=False)
        chosen = [merged.between(part.start // row, part.stop // row) for part in key.pushes]
        pushes = [
            self._session.push_coded(
                key, round_, part, packed(rows), Coding.ROWS, priority, len(rows.rows), self._size == 1
            )
            for part, rows in zip(key.pushes, chosen)
        ]
        yield from together(pushes)  # all units, whatever fails

    def _add_up(self, key: Key, rows: RowSparse) -> Generator[bool | None, None, RowSparse]:
        """The members' sum of the rows that this one owns."""
        assert self._comm is not None
        places = self._split(key, rows.rows)
        parts = [RowSparse(rows.rows[chosen], rows.values[chosen], key.shape) for chosen in places]
        sends = {to: packed(parts[to]) for to in self._masters if to != self._rank}
        others = [rank for rank in range(self._size) if rank != self._rank] if self._rank in self._masters else []
        received = yield from swap(self._comm, sends, others)
        everyone = {source: unpacked(data, key) for source, data in received.items()} | {self._rank: parts[self._rank]}
        return reduce(merge, [everyone[rank] for rank in sorted(everyone)])

    # ---- pulls

    def pull(self, key: Key, out: Array, ids: Array, direct: bool) -> Task:
        """Rows `ids` of the key to `out`, (len(ids), ...). `direct`: each member reads by itself."""
        wanted, places = np.unique(ids, return_inverse=True)
        table = np.empty((len(wanted), elements(key)), key.dtype)
        if direct or self._size == 1:
            yield from self._read(key, wanted, table)
        else:
            yield from self._ask_owners(key, wanted, table)
        out[...] = table[places.reshape(-1)].reshape(out.shape)

    def _ask_owners(self, key: Key, ids: Array, table: Array) -> Task:
        """`table` = rows `ids`, which ascend, through their owners."""
        assert self._comm is not None
        yield from self._agreed(key, "pull of rows", False)
        masters, owner, failure = self._masters, self._rank in self._masters, None
        others = [rank for rank in range(self._size) if rank != self._rank]
        places = self._split(key, ids)
        sends = {to: ids[places[to]].view(np.uint8) for to in masters if to != self._rank}
        asked = yield from swap(self._comm, sends, others if owner else [])
        answers: dict[int, Array] = {}
        if owner:
            wanted = {source: data.view(np.int64) for source, data in asked.items()}
            wanted[self._rank] = ids[places[self._rank]]
            union = reduce(np.union1d, wanted.values())
            rows = np.zeros((len(union), elements(key)), key.dtype)
            try:
                yield from self._read(key, union, rows)
            except CollectiveError as error:  # raised when the others have got an answer, so that they do not wait
                failure = error
            answers = {to: rows[np.searchsorted(union, chosen)] for to, chosen in wanted.items()}
        mine = answers.pop(self._rank, None)
        sends = {to: answer.reshape(-1).view(np.uint8) for to, answer in answers.items()}
        received = yield from swap(self._comm, sends, [rank for rank in masters if rank != self._rank])
        for source, data in received.items():
            table[places[source]] = data.view(key.dtype).reshape(-1, elements(key))
        if mine is not None:
            table[places[self._rank]] = mine
        if failure is not None:
            raise failure
        self._session.check(key)

    def _read(self, key: Key, ids: Array, table: Array) -> Task:
        """`table` = rows `ids`, which ascend, from the servers, after this worker's pushes."""
        row = elements(key)
        wanted: list[tuple[Part, Array, Array]] = []
        for part in key.parts:
            start, stop = np.searchsorted(ids, [part.start // row, part.stop // row])
            if stop > start:
                wanted.append((part, ids[start:stop] - part.start // row, table[start:stop]))
        yield from self._session.pull_rows(key, row, wanted)
