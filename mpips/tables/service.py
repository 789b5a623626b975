"""All tables on one server: handles requests of workers, and returns the answers. No MPI calls.

Every worker contributes to every round on every server, even if its push has no ids for that server. The module
`rounds` handles the rounds, the pushes and the memory of a single table. A *mirror* is another server that keeps a copy
of this server's rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, cast

import msgspec
import numpy as np

from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric.arena import SparseFile
from mpips.store.keys.row_sums import owners_of
from mpips.store.server.late import Late, Wait
from mpips.store.server.service import Answers, Asker, OldMemory, Payload, Surroundings
from mpips.store.server.unit import Known, UnknownError
from mpips.store.transport import frames
from mpips.tables import kernels, messages
from mpips.tables.journal import HERE, TORN, Journal, RowsRound
from mpips.tables.mirror import RowMirror
from mpips.tables.places import room
from mpips.tables.plan import RowsCopy, TableEntry, TablesPlan, describe_rows
from mpips.tables.rounds import NO_IDS, NOTHING, ServerTable, TableRead
from mpips.tables.rows import FrozenRows, TableRows

# requests that do not name a single table
WITHOUT_TABLE = messages.FreezeTables | messages.ThawTables | messages.PullTables


class PullTogether(NamedTuple):
    """A PullTables that is not answered yet."""

    asker: Asker
    # the answer to each pull; None until it is known
    answers: list[messages.TableAnswer | None]


class ServerTables:
    """All tables of one server in one generation.

    Args:
        workers: Number of workers.
        staleness: In an asynchronous store, the largest number of pushes by which a worker may be ahead, or -1 without
            a limit. None in a synchronous store.
        server: Number of this server, from 0.
        servers: Number of servers. A table's `limit` is divided among them.
        file: The file in which rows are stored. None makes a new file.
        survives: True if the store survives deaths. Other processes can then read the rows, also at the previous round,
            after this server has died.
        mirror: Sends rows to this server's mirror. None without a mirror.
        late: Checks for waits that have become too long.
        checks_finite: True to raise an error if an update makes a row of float16 or bfloat16 infinite.
    """

    name = "tables"
    requests = messages.TableRequest

    def __init__(
        self,
        workers: int,
        staleness: int | None = None,
        server: int = 0,
        servers: int = 1,
        file: SparseFile | None = None,
        survives: bool = False,
        mirror: RowMirror | None = None,
        late: Late | None = None,
        checks_finite: bool = False,
    ) -> None:
        self._mirror = mirror
        self._checks_finite = checks_finite
        self._rank = workers + server
        self._late = late or Late()
        # table -> answers that wait until the mirror has the rows
        self._held: dict[str, list[tuple[Asker, msgspec.Struct]]] = {}
        self._workers = workers
        self._staleness = staleness
        self._server = server
        self._servers = servers
        self._file = SparseFile() if file is None else file
        self._survives = survives
        self._tables: Known[str, ServerTable] = Known("table")
        # workers that have left the store
        self._gone: set[int] = set()
        # in an asynchronous store, the workers that wait for all other workers
        self._meeting: set[int] = set()
        # number of a freeze -> table -> its rows, and their frozen copy
        self._frozen: Known[int, Known[str, tuple[TableRows, FrozenRows]]] = Known("frozen state")
        # the number of the store in timing records
        self.lane = 0
        # True if tables are new or have moved in memory, and other processes have not been told yet
        self._changed = False
        # worker -> bytes pushed since `take_counts`
        self._taken: dict[int, int] = {}

    @classmethod
    def of(cls, server: Surroundings) -> ServerTables:
        """Make the service of a server, without tables."""
        place = server.staleness, server.server, server.servers
        rest = server.mirror, server.late, server.checks_finite
        made = cls(server.workers, *place, server.file, server.survives, *rest)
        made.lane = server.lane
        return made

    def take_counts(self) -> dict[int, int]:
        """Return the number of bytes that each worker has pushed since the last call."""
        taken, self._taken = self._taken, {}
        return taken

    def take_changed(self) -> bool:
        """True if tables were made or have moved in memory since the last call.

        The server must then tell the processes that may read the tables after its death.
        """
        changed, self._changed = self._changed, False
        return changed

    def figures(self) -> tuple[dict[str, tuple[int, ...]], dict[str, object]]:
        """Return the figures of each table, and the memory that is free for new rows of all stores in this process."""
        tables = self.known()
        return {table.key: table.numbers for table in tables}, {"room": room()} if tables else {}

    def waits_to_hear(self) -> list[Wait]:
        """Return the workers that wait until other workers know of a refused round."""
        return [wait for table in self.open for wait in table.waits_to_hear()]

    def known(self) -> list[ServerTable]:
        """Return all tables except the hidden tables of counts."""
        counting = [table.seen_counts for table in self._tables.values()]
        return [table for table in self._tables.values() if table not in counting]

    @property
    def open(self) -> list[ServerTable]:
        """The tables with waiting pushes or reads.

        Always empty in an asynchronous store, because in such a store no worker waits for a push by another worker.
        """
        return [table for table in self._tables.values() if table.queued] if self._staleness is None else []

    @property
    def queued(self) -> int:
        """The number of pushes and reads that wait."""
        return sum(table.queued for table in self._tables.values())

    def answer(self, worker: int, asker: Asker, request: messages.TableRequest, payload: Payload = NOTHING) -> Answers:
        """Handle a worker's request. Return the answers that are due now, to this worker or to others.

        Args:
            asker: The request to answer, as the server identifies it.
            payload: Rows and ids of a push or pull, in the worker's memory or received with the message.

        Raises:
            ValueError, MemoryError: A table is unknown or cannot be made. Nothing has changed.
            MismatchError: A round waits for a worker that has left.
            CollectiveError: Rows cannot be updated.
        """
        answers = self._answers_to(worker, asker, request, payload)
        self._changed |= isinstance(request, messages.MakeTable | messages.ResetTable)
        if isinstance(request, messages.MakeTable | messages.ResetTable | messages.EndLoad):
            self._mirror_all(self._tables[request.table])
        return self._gather(answers if isinstance(request, WITHOUT_TABLE) else self._hold(request.table, answers))

    def waits(self, request: messages.TableRequest) -> bool:
        """True if the server must not handle a request before the mirror has all rows of its table."""
        return self._mirror is not None and not (isinstance(request, WITHOUT_TABLE) or self._mirror.has(request.table))

    def take_mirrored(self) -> Answers:
        """Return the waiting answers of tables whose rows the mirror now has. Called after each check of the mirror."""
        mirror = self._mirror
        ready = [table for table in self._held if mirror is None or mirror.has(table)]
        return self._gather([answer for table in ready for answer in self._held.pop(table)])

    def _hold(self, table: str, answers: Answers) -> Answers:
        """Return the answers if the mirror has the table's rows. Otherwise keep them, and return an empty list."""
        if self._mirror is None or self._mirror.has(table):
            return answers
        self._held.setdefault(table, []).extend(answers)
        return []

    def _gather(self, answers: Answers) -> Answers:
        """Combine the answers to the pulls of a PullTables into one answer, once all of them are known."""
        ready: list[tuple[Asker, msgspec.Struct]] = []
        for asker, answer in answers:
            if isinstance(asker[0], PullTogether):
                whole, number = asker
                whole.answers[number] = answer
                if None in whole.answers:
                    continue
                asker, answer = whole.asker, messages.TablesPulled(whole.answers)
            ready.append((asker, answer))
        return ready

    def _mirror_all(self, table: ServerTable) -> None:
        if self._mirror is not None:
            self._mirror.begin(table.card, table.rows.capacity, table.journal)

    def _answers_to(self, worker: int, asker: Asker, request: messages.TableRequest, payload: Payload) -> Answers:
        answer: messages.TableAnswer = frames.RequestDone()
        match request:
            case messages.FreezeTables() | messages.ReadTable() | messages.ReadDropped() | messages.ThawTables():
                return [(asker, self._answer_of_frozen(request))]
            case messages.MakeTable():
                rows = self._make(request).rows
                optimizer = [rows.optimizer.kernel, *([kernels.clip] if rows.optimizer.clipnorm else [])]
                kernels.load(np.dtype(request.dtype), [*kernels.OF_SERVERS, *rows.first_values.loops, *optimizer])
                return [(asker, answer)]
            case messages.WaitForTable() if request.table not in self._tables:
                # WaitForTable has no answer.
                return []
            case messages.PullTables():
                return self._pull_together(worker, asker, request.pulls, payload)
        table = self._tables[request.table]
        match request:
            case messages.UpdateTable():
                table.set_numbers(request.numbers)
            case messages.LocateTable():
                # From now on the worker may read rows in place, unless a load is replacing them.
                table.journal.words[HERE] = not table.journal.words[TORN]
                answer = messages.TablePlaces(tuple(self._file.region), dict(table.rows.places), table.rows.capacity)
            case messages.ResetTable():
                table.reset(request.updates, request.time)
            case messages.EndLoad():
                table.end_load()
            case messages.PutRows():
                if lacks := [name for name in table.array_names if name not in request.arrays]:
                    raise UnknownError(f"rows of table {request.table!r} came without the array {lacks[0]!r}")
                table.put_rows(request.arrays)
            case messages.PushRows() | messages.RemoveRows():
                self._taken[worker] = self._taken.get(worker, 0) + payload.nbytes
                return table.push(worker, asker, request, payload, self._absent)
            case messages.PullRows():
                ids, out = table.parts(payload, request.count) if request.shared else (payload.view(np.int64), None)
                return table.read(TableRead(worker, asker, request, ids, out), self._absent)
            case messages.GetTableStats():
                return table.read(TableRead(worker, asker, request, NO_IDS, None), self._absent)
            case messages.AskForRoom() | messages.HasRows():
                ids = np.frombuffer(request.ids, np.int64)
                return table.read(TableRead(worker, asker, request, ids, None), self._absent)
            case messages.RefuseRound():
                if request.refusals > table.refusals:
                    # Stop watching workers that waited for this table, because they now get the refusal as answer.
                    self._late.forget([table])
                refused = messages.RoundRefused(request.round, request.refusals, request.why, request.step)
                return [*table.refuse(worker, refused, self._absent), (asker, answer)]
            case messages.WaitForTable():
                if request.refusals >= table.refusals:
                    self._late.note_wait(table, worker, request.round)
                return []
        return [(asker, answer)]

    def _pull_together(
        self, worker: int, asker: Asker, pulls: list[messages.PullRows], payload: Payload
    ) -> list[tuple[Asker, msgspec.Struct]]:
        """Accept pulls of several tables. Their askers are (PullTogether, number of the pull) until `_gather`."""
        tables = [self._tables[pull.table] for pull in pulls]
        whole = PullTogether(asker, [None] * len(pulls))
        ids_at = payload.nbytes - 8 * sum(pull.count for pull in pulls)
        answers: list[tuple[Asker, msgspec.Struct]] = []
        for number, (table, pull) in enumerate(zip(tables, pulls)):
            ids = payload[ids_at:][: 8 * pull.count].view(np.int64)
            out = table.rows_in(payload, pull.count, pull.rows_at) if pull.shared else None
            ids_at += 8 * pull.count
            part = cast(Asker, (whole, number))
            answers += self._hold(pull.table, table.read(TableRead(worker, part, pull, ids, out), self._absent))
        return answers

    def _answer_of_frozen(
        self, request: messages.FreezeTables | messages.ReadTable | messages.ReadDropped | messages.ThawTables
    ) -> messages.TableAnswer:
        match request:
            case messages.FreezeTables():
                return self._freeze(request)
            case messages.ReadTable():
                frozen = self._frozen[request.number][request.table][1]
                if unknown := [name for name in request.arrays if name not in frozen.names]:
                    raise UnknownError(f"table {request.table!r} has no array {unknown[0]!r}")
                parts = frozen.read(request.start, request.stop, request.arrays)
                return messages.PutRows(request.table, {name: part.tobytes() for name, part in parts.items()})
            case messages.ReadDropped():
                return frames.Bytes(self._frozen[request.number][request.table][1].dropped.tobytes())
            case messages.ThawTables():
                for rows_of, one in self._frozen[request.number].values():
                    rows_of.thaw(one)
                del self._frozen[request.number]
                return frames.RequestDone()

    def _freeze(self, request: messages.FreezeTables) -> messages.FrozenTables:
        taken, told = self._frozen.setdefault(request.number, Known("frozen table")), []
        for name, table in [(name, self._tables[name]) for name in request.tables]:
            frozen = table.rows.freeze(request.since, request.export)
            taken[name] = table.rows, frozen
            told.append(messages.FrozenTable(frozen.count, frozen.top, table.updates, table.time))
        return messages.FrozenTables(told)

    def _make(self, card: messages.MakeTable) -> ServerTable:
        limit = (card.limit + self._servers - 1 - self._server) // self._servers
        counts = self._tables[card.table_of_counts] if card.seen else None
        made = ServerTable(
            card,
            self._workers,
            self._staleness,
            limit,
            counts,
            self._file,
            self._survives,
            self._rank,
            self._mirror,
            self._checks_finite,
        )
        made.lane, self._tables[card.table] = self.lane, made
        return made

    # ---- the end of a generation, and the beginning of the next one

    def describe(self) -> list[RowsCopy]:
        """Describe this server's rows of each table, with the rounds that can be restored."""
        return [describe_rows(name, table.journal, self._rank, self._rank) for name, table in self._tables.items()]

    def ledger_entry(self) -> bytes:
        """Return encoded `TableEntry` records, with which other processes find the tables if this server dies."""
        entries = [
            TableEntry(table.card, dict(table.rows.places), table.rows.capacity, self._workers)
            for table in self._tables.values()
        ]
        return msgspec.msgpack.encode(entries) if entries else b""

    def journal(self, name: str) -> Journal:
        """Return the journal of a table."""
        return self._tables[name].journal

    def restore(self, plan: TablesPlan, old: OldMemory, rank: int) -> None:
        """Make the tables of the plan, with this server's rows of the last generation if it keeps them.

        If the server does not keep its rows, calls of `put_rows` follow. The tables have no round until `begin`.
        """
        for planned in plan.tables:
            table, name = self._make(planned.card), planned.card.table
            if planned.sources[rank] is None:
                table.rows = old.service._tables[name].rows
                table.rows.go_to(old.service.journal(name), planned.rounds[old.rank])

    def put_rows(self, table: str, arrays: Mapping[str, bytes]) -> None:
        """Set rows that belong to this server. `arrays` has values for every array of the table, by name.

        Raises CollectiveError if a row belongs to another server, or if the machine has no memory for the rows.
        """
        ids = np.frombuffer(arrays["ids"], np.int64)
        if (owners_of(ids, self._servers) != self._server).any():
            raise CollectiveError(f"table {table!r}: rows of another server have come: call recover() again")
        try:
            self._tables[table].put_rows(arrays)
        except MemoryError as error:
            raise CollectiveError(f"table {table!r}: rows cannot be taken from other memory: {error}") from error

    def begin(self, plan: TablesPlan) -> None:
        """Begin the generation, with all tables at the rounds of the plan. All rows must have arrived."""
        for planned in plan.tables:
            table = self._tables[planned.card.table]
            counts = planned.counts if not self._server else (0,) * len(planned.counts)
            at = RowsRound(planned.round, planned.updates, *counts)._replace(time=planned.time)
            table.begin(at, planned.pushes, planned.torn)
            self._mirror_all(table)

    def left(self, worker: int) -> Answers:
        """Note that a worker has left the store. Return the answers that no longer have to wait for this worker.

        Raises MismatchError if a round still needs the worker.
        """
        self._gone.add(worker)
        return self._go_on()

    def meets(self, worker: int) -> Answers:
        """Note that a worker of an asynchronous store waits for all other workers. Return the answers that are now due.

        The waiting worker pushes nothing, so workers that are ahead of it need not wait for it.
        """
        self._meeting.add(worker)
        return self._go_on()

    def all_met(self) -> None:
        """Count from 0 again how far each worker is ahead, because all workers have passed a barrier."""
        self._meeting.clear()
        for table in self._tables.values():
            table.all_met()

    def _go_on(self) -> Answers:
        tables = self._tables.items()
        return self._gather(
            [answer for name, table in tables for answer in self._hold(name, table.go_on(self._absent))]
        )

    @property
    def _absent(self) -> set[int]:
        return self._gone | self._meeting
