"""Tables on one server: requests of workers in, answers out. No MPI.

Every worker contributes to every round on every server, be it nothing. What one table does with rounds, pushes and
memory for rows stands in `rounds`.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric.arena import SparseFile
from mpips.store.server.late import Late, Wait
from mpips.store.server.service import Answers, Asker, Payload, Surroundings
from mpips.store.server.unit import Known, UnknownError
from mpips.store.transport import frames
from mpips.tables import admission, kernels
from mpips.tables.initial import owners_of
from mpips.tables.journal import HERE, TORN, Journal
from mpips.tables.mirror import RowMirror
from mpips.tables.places import room
from mpips.tables.plan import TableEntry, TableHolding, TablePlan, holding_of_table
from mpips.tables.rounds import NO_IDS, NOTHING, ServerTable, TableRead
from mpips.tables.rows import FrozenRows, TableRows

WITHOUT_TABLE = frames.FreezeTables | frames.ThawTables
"""Requests that name no table."""


class ServerTables:
    """All tables of one server in one generation. `staleness`: None where rounds are synchronous; -1: any.

    `server`: which of `servers` it is, from 0; a table's `limit` is spread over them. `file`: where rows lie.
    `survives`: others can have them, and the round before, when this server has died. `mirror`: to which they go.
    `late`: looks at long waits."""

    requests = frames.TableRequest

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
    ) -> None:
        self._mirror, self._rank, self._late = mirror, workers + server, late or Late()
        self._held: dict[str, list[tuple[Asker, frames.Answer]]] = {}
        """By tables what is answered once the mirror has them."""
        self._workers, self._staleness, self._server, self._servers = workers, staleness, server, servers
        self._file, self._survives = SparseFile() if file is None else file, survives
        self._tables: Known[str, ServerTable] = Known("table")
        self._gone: set[int] = set()
        self._meeting: set[int] = set()
        self._frozen: Known[int, Known[str, tuple[TableRows, FrozenRows]]] = Known("frozen state")
        """By number what was frozen of tables."""
        self.lane = 0
        """The store's, of records."""
        self._changed = False
        self._taken: dict[int, int] = {}
        """Bytes that each worker has pushed since `take_counts`."""

    @classmethod
    def of(cls, server: Surroundings) -> ServerTables:
        """Return the tables of a server, none so far."""
        mirror = None if server.mirror is None else server.mirror.tables
        place = server.staleness, server.server, server.servers
        made = cls(server.workers, *place, server.file, server.survives, mirror, server.late)
        made.lane = server.lane
        return made

    def take_counts(self) -> dict[int, int]:
        """Return how many bytes of rows each worker has pushed since the last such call."""
        taken, self._taken = self._taken, {}
        return taken

    def take_changed(self) -> bool:
        """Return whether those who outlive this server must be told of other tables, or of rows in other places."""
        changed, self._changed = self._changed, False
        return changed

    def figures(self) -> tuple[dict[str, tuple[int, ...]], dict[str, object]]:
        """Return each table's numbers, and the room that this process has for rows of all stores."""
        tables = self.known()
        return {table.key: table.numbers for table in tables}, {"room": room()} if tables else {}

    def waits_to_hear(self) -> list[Wait]:
        """Return who waits until others have heard that a round was refused."""
        return [wait for table in self.open for wait in table.waits_to_hear()]

    def known(self) -> list[ServerTable]:
        """Return all tables, but for those that count the ids of others."""
        counting = [table.counts for table in self._tables.values()]
        return [table for table in self._tables.values() if table not in counting]

    @property
    def open(self) -> list[ServerTable]:
        """Return the tables that anybody has pushed to, or waits to; none where nobody waits for another's push."""
        return [table for table in self._tables.values() if table.queued] if self._staleness is None else []

    @property
    def queued(self) -> int:
        """Return how many pushes and pulls wait."""
        return sum(table.queued for table in self._tables.values())

    def answer(self, worker: int, asker: Asker, request: frames.TableRequest, payload: Payload = NOTHING) -> Answers:
        """Take a worker's request; return what can be answered by now, to whomever it is. `payload`: rows and ids of a
        push or a pull, which lie where the worker has them.

        ValueError or MemoryError where a table cannot be made, or is unknown: nothing has changed. MismatchError where
        a worker that has left is waited for. CollectiveError where rows cannot be updated."""
        answers = self._answers_to(worker, asker, request, payload)
        self._changed |= isinstance(request, frames.MakeTable | frames.ResetTable)
        if isinstance(request, frames.MakeTable | frames.ResetTable | frames.EndLoad):
            self._mirror_all(self._tables[request.table])
        return answers if isinstance(request, WITHOUT_TABLE) else self._hold(request.table, answers)

    def waits(self, request: frames.TableRequest) -> bool:
        """Return whether a request is to be heard only when the mirror has its table."""
        return self._mirror is not None and not (isinstance(request, WITHOUT_TABLE) or self._mirror.has(request.table))

    def take_mirrored(self) -> Answers:
        """Return the answers of tables that the mirror has by now; to be called after each look at it."""
        mirror = self._mirror
        ready = [table for table in self._held if mirror is None or mirror.has(table)]
        return [answer for table in ready for answer in self._held.pop(table)]

    def _hold(self, table: str, answers: Answers) -> Answers:
        if self._mirror is None or self._mirror.has(table):
            return answers
        self._held.setdefault(table, []).extend(answers)
        return []

    def _mirror_all(self, table: ServerTable) -> None:
        if self._mirror is not None:
            self._mirror.begin(table.card, table.rows.capacity, table.journal)

    def _answers_to(self, worker: int, asker: Asker, request: frames.TableRequest, payload: Payload) -> Answers:
        answer: frames.Answer = frames.RequestDone()
        match request:
            case frames.FreezeTables() | frames.ReadTable() | frames.ReadDropped() | frames.ThawTables():
                return [(asker, self._answer_of_frozen(request))]
            case frames.MakeTable():
                self._make(request)
                kernels.load(np.dtype(request.dtype), [*kernels.OF_SERVERS, kernels.OF_OPTIMIZERS[request.optimizer]])
                return [(asker, answer)]
            case frames.WaitForTable() if request.table not in self._tables:
                return []  # as nothing is answered
        table = self._tables[request.table]
        match request:
            case frames.UpdateTable():
                table.set_numbers(request.numbers)
            case frames.LocateTable():
                table.journal.words[HERE] = not table.journal.words[TORN]
                answer = frames.TablePlaces(tuple(self._file.region), dict(table.rows.places), table.rows.capacity)
            case frames.ResetTable():
                table.reset(request.updates)
            case frames.EndLoad():
                table.end_load()
            case frames.PutRows():
                if lacks := [name for name in table.array_names if name not in request.arrays]:
                    raise UnknownError(f"rows of table {request.table!r} came without the array {lacks[0]!r}")
                table.put_rows(request.arrays)
            case frames.PushRows():
                self._taken[worker] = self._taken.get(worker, 0) + payload.nbytes
                return table.push(worker, asker, request, payload, self._absent)
            case frames.PullRows():
                ids, out = table.parts(payload, request.count) if request.shared else (payload.view(np.int64), None)
                return table.read(TableRead(worker, asker, request, ids, out), self._absent)
            case frames.GetTableStats():
                return table.read(TableRead(worker, asker, request, NO_IDS, None), self._absent)
            case frames.AskForRoom():
                ids = np.frombuffer(request.ids, np.int64)
                return table.read(TableRead(worker, asker, request, ids, None), self._absent)
            case frames.RefuseRound():
                if request.refusals > table.refusals:
                    self._late.forget([table])  # who waits hears of this
                refused = frames.RoundRefused(request.round, request.refusals, request.why, request.step)
                return [*table.refuse(worker, refused, self._absent), (asker, answer)]
            case frames.WaitForTable():
                if request.refusals >= table.refusals:
                    self._late.note_wait(table, worker, request.round)
                return []
        return [(asker, answer)]

    def _answer_of_frozen(
        self, request: frames.FreezeTables | frames.ReadTable | frames.ReadDropped | frames.ThawTables
    ) -> frames.Answer:
        match request:
            case frames.FreezeTables():
                return self._freeze(request)
            case frames.ReadTable():
                frozen = self._frozen[request.number][request.table][1]
                if unknown := [name for name in request.arrays if name not in frozen.names]:
                    raise UnknownError(f"table {request.table!r} has no array {unknown[0]!r}")
                parts = frozen.read(request.start, request.stop, request.arrays)
                return frames.PutRows(request.table, {name: part.tobytes() for name, part in parts.items()})
            case frames.ReadDropped():
                return frames.Bytes(self._frozen[request.number][request.table][1].dropped.tobytes())
            case frames.ThawTables():
                for rows_of, one in self._frozen[request.number].values():
                    rows_of.thaw(one)
                del self._frozen[request.number]
                return frames.RequestDone()

    def _freeze(self, request: frames.FreezeTables) -> frames.FrozenTables:
        taken, told = self._frozen.setdefault(request.number, Known("frozen table")), []
        for name, table in [(name, self._tables[name]) for name in request.tables]:
            frozen = table.rows.freeze(request.since, request.export)
            taken[name] = table.rows, frozen
            told.append(frames.FrozenTable(frozen.count, frozen.top, table.updates))
        return frames.FrozenTables(told)

    def _make(self, card: frames.MakeTable) -> ServerTable:
        limit = (card.limit + self._servers - 1 - self._server) // self._servers
        counts = self._tables[card.table + admission.COUNTS] if card.seen else None
        made = ServerTable(
            card, self._workers, self._staleness, limit, counts, self._file, self._survives, self._rank, self._mirror
        )
        made.lane, self._tables[card.table] = self.lane, made
        return made

    # ---- the end of a generation, and the beginning of the next one

    def holdings(self) -> list[TableHolding]:
        """Return what this server has of each table."""
        return [holding_of_table(name, one.journal, self._rank, self._rank) for name, one in self._tables.items()]

    def entries(self) -> list[TableEntry]:
        """Return where others find the tables when this server has died."""
        return [
            TableEntry(table.card, dict(table.rows.places), table.rows.capacity, self._workers)
            for table in self._tables.values()
        ]

    def journal(self, name: str) -> Journal:
        """Return what a table has at rounds that can be had."""
        return self._tables[name].journal

    def restore(self, plan: TablePlan, old: ServerTables | None, mine: int) -> None:
        """Have a table from the last generation on, until `begin` without a round.

        Its rows are those that this server, as rank `mine`, has in `old`; None: those that `put_rows` brings next."""
        table = self._make(plan.card)
        if old is not None:
            table.rows = old._tables[plan.card.table].rows
            table.rows.go_to(old.journal(plan.card.table), plan.rounds[mine])

    def put_rows(self, table: str, arrays: Mapping[str, bytes]) -> None:
        """Set rows that belong to this server, of all arrays by name. CollectiveError where they do not, or where the
        machine has no memory for them."""
        ids = np.frombuffer(arrays["ids"], np.int64)
        if (owners_of(ids, self._servers) != self._server).any():
            raise CollectiveError(f"table {table!r}: rows of another server have come: call recover() again")
        try:
            self._tables[table].put_rows(arrays)
        except MemoryError as error:
            raise CollectiveError(f"table {table!r}: rows cannot be taken from other memory: {error}") from error

    def begin(self, plan: TablePlan) -> None:
        """Let a table stand at its round, as all of its rows are there."""
        table = self._tables[plan.card.table]
        counts = plan.counts if not self._server else (0, 0)
        table.begin((plan.round, plan.updates, *counts), plan.pushes, plan.torn)
        self._mirror_all(table)

    def left(self, worker: int) -> Answers:
        """A worker has left: return what can be answered without it. MismatchError where a round waits for it."""
        self._gone.add(worker)
        return self._go_on()

    def meets(self, worker: int) -> Answers:
        """A worker waits for all, in an asynchronous store: return what can be answered as it pushes nothing."""
        self._meeting.add(worker)
        return self._go_on()

    def all_met(self) -> None:
        """Count anew how far workers are ahead, as all have waited for all."""
        self._meeting.clear()
        for table in self._tables.values():
            table.all_met()

    def _go_on(self) -> Answers:
        tables = self._tables.items()
        return [answer for name, table in tables for answer in self._hold(name, table.go_on(self._absent))]

    @property
    def _absent(self) -> set[int]:
        return self._gone | self._meeting
