"""Send rows of tables to the servers that `plan` names, piece by piece, from the memory where they lie.

A server reads what it reaches itself. All else comes from a rank that reaches it (`RowSource`). A piece is short,
whatever the table holds, and few are under way. Each says which one it is, and a sum over its bytes: what comes out of
turn or broken is refused.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec
from mpi4py import MPI

from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric import requests
from mpips.tables.initial import owners_of
from mpips.tables.journal import Journal
from mpips.tables.plan import RowSource, TablePlan

TAG = 7
"""On the store's communicator."""
UNDER_WAY_BYTES = 32 << 20
"""At this many bytes under way no other piece goes."""
LOOK_SECONDS = 0.02
"""After which a rank looks again whether the generation has ended."""


class RowsSent(msgspec.Struct, array_like=True):
    """Some rows of a table, of all arrays by name, which the server `owner` had; by its rank then."""

    table: str
    owner: int
    number: int
    """Of this piece, from 0."""
    last: bool
    """Nothing comes behind this one, which has no rows."""
    arrays: dict[str, bytes]
    check: int
    """A sum over their bytes."""


class NewRows(Protocol):
    """Tables that rows are put into."""

    def put_rows(self, table: str, arrays: Mapping[str, bytes]) -> None:
        """Set rows that were sent."""


def takers_from(table: TablePlan, rank: int) -> dict[RowSource, list[int]]:
    """Return which servers have rows by this rank: others by its messages, itself from memory that it reaches."""
    takers: dict[RowSource, list[int]] = {}
    for server, sources in table.sources.items():
        for source in sources or ():
            if rank == (source.holder if source.sent else server):
                takers.setdefault(source, []).append(server)
    return takers


def check_of(arrays: Mapping[str, bytes]) -> int:
    """Return a sum over the bytes of arrays."""
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name], zlib.crc32(name.encode(), total))
    return total


class RowTransfer:
    """The rows that one rank sends, puts into its own new tables, and takes in."""

    def __init__(
        self,
        plans: Sequence[TablePlan],
        comm: MPI.Intracomm,
        journal: Callable[[RowSource, str], Journal],
        tables: NewRows | None,
    ) -> None:
        """`journal`: of a source that this rank reaches, and a table. `tables`: this server's, which are made already;
        None on other ranks."""
        self._plans, self._comm, self._rank, self._tables = plans, comm, comm.Get_rank(), tables
        self._journal = journal
        self._due = {
            (table.card.table, source.owner, source.holder): 0
            for table in plans
            for source in table.sources.get(self._rank) or ()
            if source.sent
        }
        """Of what comes from others the number of the next piece."""
        self._going = self._go()
        self._gone = False
        self.under_way: list[MPI.Request] = []
        self._sizes: list[int] = []
        self.nbytes = 0
        """Bytes that this rank has sent and received."""

    def is_over(self) -> bool:
        """Go on for a moment; return whether all rows have come and gone. CollectiveError where they come wrong."""
        until = time.monotonic() + LOOK_SECONDS
        while (self._take_in() | self._give()) and time.monotonic() < until:
            pass
        return self._gone and not self.under_way and not self._due

    def _give(self) -> bool:
        """Read one more piece, if there is room; return whether it was so."""
        left = [(one, size) for one, size in zip(self.under_way, self._sizes) if not one.Test()]
        self.under_way, self._sizes = [one for one, _ in left], [size for _, size in left]
        if self._gone or sum(self._sizes) > UNDER_WAY_BYTES:
            return False
        self._gone = next(self._going, True)
        return not self._gone

    def _go(self) -> Iterator[bool]:
        """Read what this rank reaches and others or it need, a piece at each step."""
        for table in self._plans:
            name, every = table.card.table, sorted(table.sources)
            for source, takers in takers_from(table, self._rank).items():
                number = 0
                for piece in self._journal(source, name).pieces(table.rounds[source.owner]):
                    owners = owners_of(piece["ids"], len(every))
                    for server in takers:
                        mine = owners == every.index(server)
                        arrays = {array: values[mine].tobytes() for array, values in piece.items()}
                        self._deal(server, name, source, number, arrays)
                    number += 1
                    yield False
                for server in takers if source.sent else ():
                    self._send(server, RowsSent(name, source.owner, number, True, {}, 0))

    def _deal(self, server: int, table: str, source: RowSource, number: int, arrays: dict[str, bytes]) -> None:
        if source.sent:
            self._send(server, RowsSent(table, source.owner, number, False, arrays, check_of(arrays)))
        else:
            assert self._tables is not None
            self._tables.put_rows(table, arrays)

    def _send(self, server: int, rows: RowsSent) -> None:
        data = msgspec.msgpack.encode(rows)
        self.under_way.append(requests.send(self._comm, data, server, TAG))
        self._sizes.append(len(data))
        self.nbytes += len(data)

    def _take_in(self) -> bool:
        """Put one piece that has come into this server's tables; return whether one has."""
        if not self._due or (received := requests.received(self._comm, TAG)) is None:
            return False
        rank, data = received
        rows = msgspec.msgpack.decode(data, type=RowsSent)
        self.nbytes += len(data)
        self._take(rank, rows)
        return True

    def _take(self, rank: int, rows: RowsSent) -> None:
        place = rows.table, rows.owner, rank
        due = self._due.get(place)
        if rows.number != due or check_of(rows.arrays) != rows.check:
            raise CollectiveError(
                f"recover: rows of table {rows.table!r}, which server rank {rows.owner} had, came from rank {rank} as "
                f"piece {rows.number}, broken or where piece {due} was due: call recover() again"
            )
        if rows.last:
            del self._due[place]
            return
        assert self._tables is not None
        self._tables.put_rows(rows.table, rows.arrays)
        self._due[place] = due + 1
