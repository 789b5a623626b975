"""Keep a second copy of each server's table rows on its *mirror*, which is another server on another host.

When a generation begins, and when a table is made or loaded, the server sends all rows to its mirror. After each round
it sends only the rows that the round has changed. The journal has the positions of these rows (see `journal`). In the
copy, rows are at the same positions, and the copy has a journal of its own. So if a round arrives only in part, the
mirror can undo it.

A server sends no answer about a round to a worker before the mirror has the round. Requests for the table wait until
then (see `server.requests`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Union

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric import requests
from mpips.collectives.fabric.arena import SparseFile
from mpips.collectives.fabric.failure import is_death
from mpips.collectives.machine import free_memory
from mpips.store.keys.key import Name
from mpips.tables.journal import CLOSED, COUNTS, OPENED, ROWS, TORN, WORDS, Journal, Positions, RowsRound, kept_arrays
from mpips.tables.messages import MakeTable
from mpips.tables.plan import RowsCopy, describe_rows
from mpips.tables.rows import arrays_of

# tag of all messages of this module, on the servers' communicator
TAG = 4
# A server sends no more while the mirror has not acknowledged this many bytes.
UNDER_WAY_BYTES = 32 << 20
# The mirror checks its free memory for this many bytes of rows at a time.
SEEN_BYTES = 1 << 26
# (table, number of the server that has these rows, number of servers)
Place = tuple[str, int, int]


class TableBegins(msgspec.Struct, array_like=True, tag=0):
    """Message: a new copy of a table begins. All rows of the table follow in other messages."""

    card: MakeTable
    capacity: int
    workers: int


class RoundEnd(msgspec.Struct, array_like=True):
    """The state of a table's journal at the end of a round.

    Attributes:
        counts: The counts of `RowsRound`.
        done: The number of applied pushes of each worker.
        torn: True if no whole round can be restored.
    """

    round: int
    counts: tuple[int, ...]
    done: list[int]
    torn: bool


class RowsChanged(msgspec.Struct, array_like=True, tag=1):
    """Message: the new content of some positions.

    Attributes:
        rows: Number of positions in use.
        at: The positions (int64, as bytes).
        arrays: Name of an array -> its values at these positions, as bytes.
        end: In the last message of a round, the state of the journal; None in all other messages.
    """

    table: str
    rows: int
    at: bytes
    arrays: dict[str, bytes]
    end: RoundEnd | None


class RowsKept(msgspec.Struct, array_like=True, tag=2):
    """Message from the mirror: the mirror has applied `count` more messages."""

    count: int


Message = Union[TableBegins, RowsChanged, RowsKept]  # noqa: UP007 (msgspec reads it)
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)  # type: ignore[arg-type]


def _changes(table: str, journal: Journal, count: int, at: Positions | None = None) -> Iterator[RowsChanged]:
    """Yield messages with `count` rows, a few rows in each. The last message has the state of the journal.

    `at` are the positions of the rows. None means the first `count` positions.
    """
    words, at_once = journal.words, journal.rows_at_once
    for start in range(0, max(count, 1), at_once):
        stop = min(start + at_once, count)
        some = np.arange(start, stop) if at is None else at[start:stop]
        arrays = {name: array.tobytes() for name, array in journal.read(some).items()}
        closed = int(words[CLOSED])
        end = RoundEnd(closed, tuple(words[COUNTS]), journal.pushes_in(closed), bool(words[TORN]))
        yield RowsChanged(table, int(words[ROWS]), some.tobytes(), arrays, end if stop == count else None)


# ---- the copies on a mirror


class MirroredTable:
    """A mirror's copy of one server's rows of a table. It can restore the last two rounds."""

    def __init__(self, file: SparseFile, begins: TableBegins, generation: int) -> None:
        card, capacity, self._file = begins.card, begins.capacity, file
        self._arrays = arrays_of(card)
        arrays = {name: file.zeros((capacity, *shape), kind)[0] for name, (kind, shape) in self._arrays.items()}
        kept = {
            name: file.zeros((capacity, *shape), kind)[0] for name, (kind, shape) in kept_arrays(self._arrays).items()
        }
        words = file.zeros((WORDS,), np.uint64)[0]
        self.journal = Journal(arrays, words, file.zeros((2, begins.workers), np.uint64)[0], kept)
        self.name = card.table
        self.generation = generation
        # True once all rows have arrived
        self.whole = False
        # the first position for which free memory has not been checked yet
        self._sure = 0

    def apply(self, rows: RowsChanged) -> None:
        """Write the rows of a message into the copy. Raises CollectiveError if the message is not the next one."""
        self._check_memory(rows.rows)
        journal, words, end = self.journal, self.journal.words, rows.end
        if self.whole and not journal.is_open:
            journal.open()
        arrays = {
            name: np.frombuffer(rows.arrays[name], kind).reshape(-1, *shape)
            for name, (kind, shape) in self._arrays.items()
        }
        journal.write(np.frombuffer(rows.at, np.int64), arrays, rows.rows)
        if end is None:
            return
        if self.whole:
            if words[OPENED] != end.round:
                raise CollectiveError(
                    f"table {self.name!r}: round {end.round} has come to its mirror, where round {words[OPENED]} was "
                    "due: call recover()"
                )
            journal.close(end.counts, end.done)
        else:
            journal.begin(rows.rows, RowsRound(end.round, *end.counts), end.done, end.torn)
            self.whole = True

    def go_to(self, round_: int | None) -> bool:
        """Go back to the round at which a generation begins. Return False if this round cannot be restored.

        If `round_` is None, stay at the newest whole round.
        """
        self.journal.undo()
        rounds = [available.round for available in self.journal.available_rounds()]
        if round_ in rounds[1:]:
            self.journal.go_back()
        return round_ is None or round_ in rounds

    def _check_memory(self, rows: int) -> None:
        """Raise CollectiveError if the machine lacks memory for `rows` rows."""
        if rows <= self._sure:
            return
        row_bytes = sum(kind.itemsize * int(np.prod(shape)) for kind, shape in self._arrays.values())
        more = max(rows - self._sure, SEEN_BYTES // row_bytes)
        if more * row_bytes > min(free_memory(), self._file.room):
            raise CollectiveError(
                f"table {self.name!r}: the mirror's machine has no memory for {rows} rows of another server: give the "
                "table limit= or evict=, or the store more servers"
            )
        self._sure += more


class MirroredTables:
    """All table rows that one server keeps as the mirror of other servers.

    The rows are in the server's sparse file. They are kept from one generation to the next.
    """

    def __init__(self, file: SparseFile) -> None:
        self._file = file
        self._copies: dict[Place, MirroredTable] = {}
        # new copies that do not have all rows yet; until they have, the older copies stay in `_copies`
        self._coming: dict[Place, MirroredTable] = {}

    def connect(self, comm: MPI.Intracomm, mirror: int | None, generation: int) -> RowMirror:
        """Connect this server to its mirror, and to the servers whose rows it keeps.

        `mirror` is the rank of the mirror, or None if this server has no mirror.
        """
        return RowMirror(comm, mirror, self, generation)

    def apply_message(self, server: int, servers: int, message: TableBegins | RowsChanged, generation: int) -> None:
        """Apply a message of server number `server`. `servers` is the number of servers."""
        if isinstance(message, TableBegins):
            table = message.card.table
            try:
                self._coming[table, server, servers] = MirroredTable(self._file, message, generation)
            except MemoryError as error:
                raise CollectiveError(f"table {table!r}: its mirror cannot keep it: {error}") from error
            return
        place = message.table, server, servers
        copy = self._coming.get(place) or self._copies[place]
        copy.apply(message)
        if copy.whole and place in self._coming:
            self._copies[place] = self._coming.pop(place)

    def begin(self, rounds: Mapping[Name, int] | None) -> None:
        """Begin a generation with tables at these rounds. Drop copies that cannot restore their round.

        In an asynchronous store `rounds` is None, and every copy stays at its newest round.
        """
        self._coming.clear()
        stay = {}
        for place, copy in self._copies.items():
            if (rounds is None or place[0] in rounds) and copy.go_to(None if rounds is None else rounds[place[0]]):
                stay[place] = copy
        self._copies = stay

    def drop_before(self, generation: int) -> None:
        """Drop the copies of earlier generations. Called once all servers have sent their rows in this generation."""
        self._copies = {place: copy for place, copy in self._copies.items() if copy.generation >= generation}

    def describe(self, first: int, servers: int, memory: int) -> list[RowsCopy]:
        """Describe the copies that come from a generation with `servers` servers.

        Args:
            first: The rank of the first server of that generation.
            memory: The number of this memory (see `plan`).
        """
        return [
            describe_rows(copy.name, copy.journal, first + server, memory)
            for (_, server, of), copy in self._copies.items()
            if of == servers
        ]

    def journal(self, table: str, server: int, servers: int) -> Journal:
        """Return the journal of the copy of a table's rows on server number `server`."""
        return self._copies[table, server, servers].journal


# ---- messages to the mirror, and from the servers that this one mirrors


class RowMirror:
    """The connection of one server to its mirror, and to the servers whose mirror it is, in one generation.

    Args:
        to: The rank of the mirror, or None if this server has no mirror.
        copies: The rows that this server keeps for other servers.
    """

    def __init__(self, comm: MPI.Intracomm, to: int | None, copies: MirroredTables, generation: int) -> None:
        self._comm = comm
        self._to = to
        self._copies = copies
        self._generation = generation
        # (table, its messages that have not been sent yet)
        self._due: deque[tuple[str, Iterator[TableBegins | RowsChanged]]] = deque()
        # (bytes, send request, table) of each message that the mirror has not acknowledged. The table is "" except for
        # the last message of a round.
        self._under_way: deque[tuple[int, MPI.Request, str]] = deque()
        self._nbytes = 0
        # True while a message is being applied. If that fails, it stays True.
        self._broken = False
        # table -> number of its rounds that the mirror has not acknowledged
        self._open: Counter[str] = Counter()

    @property
    def quiet(self) -> bool:
        """True if the mirror has acknowledged all messages."""
        return not self._due and not self._under_way

    def has(self, table: str) -> bool:
        """True if the mirror has all rounds of this table."""
        return not self._open[table]

    def begin(self, card: MakeTable, capacity: int, journal: Journal) -> None:
        """Queue all rows of a table for the mirror. The rows must not change until `has` is True for the table."""
        begins: list[TableBegins | RowsChanged] = [TableBegins(card, capacity, journal.workers)]
        self._queue(card.table, chain(begins, _changes(card.table, journal, int(journal.words[ROWS]))))

    def round_over(self, table: str, journal: Journal) -> None:
        """Queue, for the mirror, the rows that the last round of a table has changed. `turn` sends them."""
        if self._to is not None:
            at = journal.changed()
            # Make a list, because this copies the rows now, before the next round changes them.
            self._queue(table, iter(list(_changes(table, journal, len(at), at))))

    def turn(self) -> bool:
        """Handle messages that have arrived, and send as much as the limit allows. Return True if anything was done."""
        worked = self._receive()
        while self._due and self._nbytes < UNDER_WAY_BYTES:
            table, pieces = self._due[0]
            piece = next(pieces)
            last = isinstance(piece, RowsChanged) and piece.end is not None
            if last:
                self._due.popleft()
            self._send(msgspec.msgpack.encode(piece), table if last else "")
            worked = True
        return worked

    def stop(self) -> None:
        """Close this connection, because the generation has ended. Local.

        Messages that have arrived are still handled. Messages that have not been sent are dropped. Messages that are
        being sent keep their memory until MPI has sent them. The server does not wait for the mirror's acknowledgements
        any more, because it drops the requests of workers that waited for them.
        """
        with suppress(CollectiveError):
            self._receive()
        requests.keep_until_complete(request for _, request, _ in self._under_way)
        self._due.clear()
        self._under_way.clear()

    def _queue(self, table: str, pieces: Iterator[TableBegins | RowsChanged]) -> None:
        if self._to is not None:
            self._due.append((table, pieces))
            self._open[table] += 1

    def _send(self, data: bytes, table: str) -> None:
        assert self._to is not None
        request = MPI.REQUEST_NULL
        try:
            request = requests.send(self._comm, data, self._to, TAG)
        except MPI.Exception as error:
            if not is_death(error):
                raise
        self._under_way.append((len(data), request, table))
        self._nbytes += len(data)

    def _receive(self) -> bool:
        """Handle messages that have arrived. Return True if any had arrived.

        After an error no further message is handled, because the copy lacks the content of the message that failed.
        """
        taken: Counter[int] = Counter()
        worked = False
        while not self._broken and (received := requests.receive_next(self._comm, TAG)) is not None:
            worked = self._broken = True
            server, message = received[0], _decoder.decode(received[1])
            if isinstance(message, RowsKept):
                self._note_kept(message.count)
            else:
                self._copies.apply_message(server, self._comm.Get_size(), message, self._generation)
                taken[server] += 1
            self._broken = False
        for server, count in taken.items():
            requests.send_to_all(self._comm, msgspec.msgpack.encode(RowsKept(count)), [server], TAG)
        return worked

    def _note_kept(self, count: int) -> None:
        for _ in range(count):
            nbytes, request, table = self._under_way.popleft()
            if not requests.is_over(request):
                requests.keep_until_complete([request])
            self._nbytes -= nbytes
            self._open[table] -= 1
