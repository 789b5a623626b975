"""Send rows of tables to the servers that `plan` names, piece by piece, from the memory where they lie.

A server reads itself what it can map. Everything else comes in messages from a rank that can map it (`RowSource`).
Pieces are short, however large the table is, and only some are under way at a time. Each has a number and a checksum,
so that a piece that is damaged or out of turn is refused.
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
from mpips.store.keys.row_sums import owners_of
from mpips.tables.journal import Journal
from mpips.tables.plan import RowSource, TablePlan

# on the store's communicator
TAG = 7
# No further piece is sent while more bytes than this are under way.
UNDER_WAY_BYTES = 32 << 20
# A rank works for this long before it looks again whether the generation has ended.
LOOK_SECONDS = 0.02


class RowsSent(msgspec.Struct, array_like=True):
    """A message with some rows of a table that the server `owner` had. `owner` is its rank in the last generation."""

    table: str
    owner: int
    # number of this piece, from 0
    number: int
    # True for the message after the last piece; it has no rows
    last: bool
    arrays: dict[str, bytes]
    # checksum of `arrays`
    check: int


class NewRows(Protocol):
    """The tables that received rows are put into."""

    def put_rows(self, table: str, arrays: Mapping[str, bytes]) -> None:
        """Set rows that were sent."""


def takers_from(table: TablePlan, rank: int) -> dict[RowSource, list[int]]:
    """Return the sources from which this rank must read rows, each with the servers that it reads them for.

    A source whose rows are sent is read by its holder. Any other is read by the server itself.
    """
    takers: dict[RowSource, list[int]] = {}
    for server, sources in table.sources.items():
        for source in sources or ():
            if rank == (source.holder if source.sent else server):
                takers.setdefault(source, []).append(server)
    return takers


def check_of(arrays: Mapping[str, bytes]) -> int:
    """Return a checksum of arrays."""
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(arrays[name], zlib.crc32(name.encode(), total))
    return total


class RowMover:
    """The rows that one rank sends, reads into its own new tables, and receives, in one recovery.

    Args:
        journal: Returns the journal of a table at a source that this rank can map.
        tables: The new tables of this server, already made; None on other ranks.
    """

    def __init__(
        self,
        plans: Sequence[TablePlan],
        comm: MPI.Intracomm,
        journal: Callable[[RowSource, str], Journal],
        tables: NewRows | None,
    ) -> None:
        self._plans = plans
        self._comm = comm
        self._rank = comm.Get_rank()
        self._tables = tables
        self._journal = journal
        # (table, owner, holder) of what comes in messages -> number of the next piece
        self._due = {
            (table.card.table, source.owner, source.holder): 0
            for table in plans
            for source in table.sources.get(self._rank) or ()
            if source.sent
        }
        self._going = self._go()
        self._gone = False
        self.under_way: list[MPI.Request] = []
        self._sizes: list[int] = []
        # bytes that this rank has sent and received
        self.nbytes = 0

    def is_over(self) -> bool:
        """Work for a moment. Return True when all rows have been sent and received.

        Raises CollectiveError if a piece comes damaged or out of turn.
        """
        until = time.monotonic() + LOOK_SECONDS
        # `|` and not `or`: both must be called each time.
        while (self._take_in() | self._give()) and time.monotonic() < until:
            pass
        return self._gone and not self.under_way and not self._due

    def _give(self) -> bool:
        """Read and pass on one more piece if there is room for it. Return True if that was done."""
        left = [(request, size) for request, size in zip(self.under_way, self._sizes) if not request.Test()]
        self.under_way, self._sizes = [request for request, _ in left], [size for _, size in left]
        if self._gone or sum(self._sizes) > UNDER_WAY_BYTES:
            return False
        self._gone = next(self._going, True)
        return not self._gone

    def _go(self) -> Iterator[bool]:
        """Read the rows that this rank must read, for itself or for others, one piece at each step."""
        for table in self._plans:
            name, every = table.card.table, sorted(table.sources)
            for source, takers in takers_from(table, self._rank).items():
                number = 0
                for piece in self._journal(source, name).pieces(table.rounds[source.owner]):
                    owners = owners_of(piece["ids"], len(every))
                    for server in takers:
                        belong = owners == every.index(server)
                        arrays = {array: values[belong].tobytes() for array, values in piece.items()}
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
        """Put one piece that has arrived into this server's tables. Return True if there was one."""
        if not self._due or (received := requests.receive_next(self._comm, TAG)) is None:
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
