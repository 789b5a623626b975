"""Move table rows to the servers that `plan` chooses, piece by piece, after a death.

If a server can map the memory that has the rows, it reads them itself. Otherwise it receives messages from a rank that
can map this memory (see `RowSource`). Pieces are short, even for a large table, and only a limited number of bytes is
in flight at a time. Each piece has a number and a checksum. A piece that is damaged or out of order is an error.
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

# tag of the messages, on the store's communicator
TAG = 7
# A rank stops sending while more bytes than this are in flight.
UNDER_WAY_BYTES = 32 << 20
# A rank works for this long before it checks again whether the generation has ended.
LOOK_SECONDS = 0.02


class RowsSent(msgspec.Struct, array_like=True):
    """A message with one piece of the rows that one server had."""

    table: str
    # the server that had the rows, by its rank in the last generation
    owner: int
    # number of this piece, counted from 0
    number: int
    # True in the message after the last piece. This message has no rows.
    last: bool
    arrays: dict[str, bytes]
    # checksum of `arrays`
    check: int


class NewRows(Protocol):
    """The new tables of a server, into which the rows are written."""

    def put_rows(self, table: str, arrays: Mapping[str, bytes]) -> None:
        """Set rows of a table. `arrays` has the values of these rows for each array of the table, by name."""


def takers_from(table: TablePlan, rank: int) -> dict[RowSource, list[int]]:
    """Return source -> the servers that need its rows, for all sources that this rank must read.

    If the rows of a source are sent in messages, its holder reads the source. Otherwise the server reads it itself.
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
    """Moves rows for one rank in one recovery: sends rows, receives rows, and reads rows into its own new tables.

    Args:
        plans: The plan of each table.
        comm: The store's communicator.
        journal: Returns the journal of a table in the memory of a source. This rank must be able to map that memory.
        tables: The new tables of this server, already made. None on ranks that are not servers.
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
        # (table, owner, holder) of rows that arrive in messages -> number of the next piece
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
        # number of bytes that this rank has sent and received
        self.nbytes = 0

    def is_over(self) -> bool:
        """Move rows for a moment. Return True when all rows have been sent and received.

        Raises CollectiveError if a piece is damaged or arrives out of order.
        """
        until = time.monotonic() + LOOK_SECONDS
        # Use `|` instead of `or`, because both functions must be called each time.
        while (self._take_in() | self._give()) and time.monotonic() < until:
            pass
        return self._gone and not self.under_way and not self._due

    def _give(self) -> bool:
        """Read one more piece and pass it on, unless too many bytes are in flight. Return True if that was done."""
        left = [(request, size) for request, size in zip(self.under_way, self._sizes) if not request.Test()]
        self.under_way, self._sizes = [request for request, _ in left], [size for _, size in left]
        if self._gone or sum(self._sizes) > UNDER_WAY_BYTES:
            return False
        self._gone = next(self._going, True)
        return not self._gone

    def _go(self) -> Iterator[bool]:
        """Read all rows that this rank must read for itself or for other servers, one piece at each step."""
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
        """Put one piece that has arrived into this server's tables. Return False if no piece has arrived."""
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
