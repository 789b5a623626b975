"""One table on one server: rounds of pushes, or pushes as they come within `staleness`. No MPI.

Every worker contributes to every round on every server, be it nothing. A round is applied at once when the last worker
has pushed it: gradients of a row are summed in the order of the workers. In an asynchronous store every push is an
update of its own; one of a worker too far ahead waits, as do its pulls, but not for workers that wait for all.

A push is answered when none of that worker's waits before it, so a server holds at most two of each worker.

A push needs memory for rows that are new, and no server may apply a round that another cannot. So a server answers with
room for the worker's next push, or with none where memory is short. A push that exceeds its room on any server is asked
for on all of them first; where one says no, the worker has all drop the round (`RefuseRound`). All rounds before it are
applied by then, as a question waits for them. Each worker hears of it in its next call that the round concerns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError, MismatchError
from mpips.collectives.fabric.arena import SparseFile
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder.ring import Ring, form
from mpips.store.server.late import BEFORE_LEAVING, Wait
from mpips.store.server.service import Answers, Asker, Payload
from mpips.store.transport import frames
from mpips.tables import admission, row_optimizers
from mpips.tables.initial import Ids
from mpips.tables.journal import HERE, REFUSALS, TORN, Standing
from mpips.tables.merge import summed
from mpips.tables.mirror import RowMirror
from mpips.tables.rows import Array, TableRows, arrays_of

NOTHING, NO_IDS = np.zeros(0, np.uint8), np.zeros(0, np.int64)


class TablePush(NamedTuple):
    """Keep a push that is not applied yet: who waits for room behind it, its ids and gradients.

    `rows`: that it makes at most."""

    asker: Asker
    ids: Ids
    gradients: Array
    rows: int


Read = frames.PullRows | frames.GetTableStats | frames.AskForRoom


class TableRead(NamedTuple):
    """Keep a request that is answered after some of the worker's own pushes."""

    worker: int
    asker: Asker
    request: Read
    ids: Ids
    out: Array | None
    """Where the rows of a pull go; None: into the answer."""


class PushRoom(NamedTuple):
    """Say of a worker's next push how many ids it may have without a question, and how many rows it makes at most."""

    ids: int
    rows: int


NO_ROOM = PushRoom(0, 0)
LEAST_ROOM = 1 << 10
"""Ids for which a worker has room, where there is memory."""


class ServerTable:
    """One table on one server, of this rank: its rows, and what waits. `counts`: of ids that have no row yet."""

    noun, number = "table", 0

    def __init__(
        self,
        card: frames.MakeTable,
        workers: int,
        staleness: int | None,
        limit: int,
        counts: ServerTable | None,
        file: SparseFile,
        survives: bool,
        rank: int,
        mirror: RowMirror | None,
    ) -> None:
        self._rank, self._mirror = rank, mirror
        self.card, self._staleness, self._limit, self.counts, self._file = card, staleness, limit, counts, file
        self._survives = survives
        self.refused = 0
        """How many gradients were of ids that got no row."""
        self._optimizer = row_optimizers.decode(card.optimizer, card.numbers)
        self._done = [0] * workers
        """Of each worker how many pushes are applied,"""
        self._met = [0] * workers
        """and were when all workers met last."""
        self.rows, self.updates = self._new_rows(), 0
        self.journal = self.rows.journal
        """That of this generation, also where the next one has rows by now."""
        self._before_load: TableRows | None = None
        """The rows that a load has replaced, as long as those who outlive this server may look there."""
        self.key, self.contributors, self.lane = card.table, range(workers), 0
        self.queues: list[deque[TablePush]] = [deque() for _ in range(workers)]
        self.opened: float | None = None
        """When the open round began to wait; None: since the next look at the clock."""
        self.warned = False
        self._arrivals: deque[int] = deque()
        """In an asynchronous store: whose pushes wait, as they came."""
        self._reads: list[TableRead] = []
        self._rooms = [NO_ROOM] * workers
        """Of each worker what it was given for its next push."""
        self._largest = 0
        """The ids of the largest push."""
        self._refusal = frames.RoundRefused(0, 0, "")
        """The last round that was refused,"""
        self._to_hear: set[int] = set()
        """and the workers that have not heard of it."""

    @property
    def round(self) -> int:
        """Return the last round that is complete, in a synchronous store."""
        return min(self._done)

    @property
    def refusals(self) -> int:
        """Return how many rounds were refused."""
        return self._refusal.refusals

    @property
    def waits(self) -> bool:
        """Return whether anybody's push is here."""
        return any(self.queues)

    @property
    def missing(self) -> int:
        """Return how many workers have not pushed to the open round."""
        return len(self.absent())

    def absent(self) -> list[int]:
        """Return the workers that have not pushed to the open round."""
        return [worker for worker, queue in enumerate(self.queues) if not queue]

    def waits_to_hear(self) -> list[Wait]:
        """Return who waits to push anew, until others have heard that a round of theirs was refused."""
        asks = [read for read in self._reads if isinstance(read.request, frames.AskForRoom)] if self._to_hear else []
        behind = tuple(sorted(self._to_hear))
        return [Wait(read.worker, self.key, read.request.round + 1, behind, self.noun) for read in asks]

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return what it has and has counted, in the order in which pages of ranks name it."""
        rows, counts = self.rows, self.counts
        nbytes = rows.nbytes + (counts.rows.nbytes if counts else 0)
        return rows.count, nbytes, self.updates, rows.evicted, self.refused, counts.rows.count if counts else 0

    @property
    def queued(self) -> int:
        """Return how many pushes and pulls wait."""
        return len(self._reads) + sum(map(len, self.queues))

    def reset(self, updates: int) -> None:
        """Begin without rows, after so many updates; until `end_load` the table is torn."""
        self.journal.words[HERE] = 0
        self._before_load, self.rows = self.rows, self._new_rows()
        self._rooms = [NO_ROOM] * len(self._rooms)
        standing = self.journal.standings()[0][0], updates, self._before_load.evicted, self.refused
        self.rows.begin(standing, self._done, True)
        self.updates, self.journal = updates, self.rows.journal

    def end_load(self) -> None:
        """All rows of a load have come."""
        self._before_load = None
        self.journal.words[TORN] = 0

    def set_numbers(self, numbers: bytes) -> None:
        """Update rows with other numbers of the optimizer from now on."""
        self.card.numbers = numbers
        self.rows.optimizer = self._optimizer = row_optimizers.decode(self.card.optimizer, numbers)

    def begin(self, standing: Standing, done: Sequence[int], torn: bool) -> None:
        """Begin a generation with the rows that are there."""
        self._done, (_, self.updates, _, self.refused) = list(done), standing
        self.rows.begin(standing, done, torn)
        self.rows.optimizer = self._optimizer
        self.journal = self.rows.journal

    def all_met(self) -> None:
        """Count from here how far workers are ahead."""
        self._met = list(self._done)

    def _new_rows(self) -> TableRows:
        card = self.card
        kind, life = np.dtype(card.dtype), (card.evict, self._limit)
        return TableRows(
            card.dim, kind, card.key, card.bound, self._optimizer, *life, self._file, self._survives, len(self._done)
        )

    @property
    def array_names(self) -> list[str]:
        """The arrays that its rows have."""
        return list(arrays_of(self.card.dim, np.dtype(self.card.dtype), self._optimizer))

    def put_rows(self, arrays: Mapping[str, bytes]) -> None:
        """Set rows that were sent."""
        kinds = arrays_of(self.card.dim, np.dtype(self.card.dtype), self._optimizer)
        self.rows.put_rows(
            {name: np.frombuffer(arrays[name], dtype).reshape(-1, *shape) for name, (dtype, shape) in kinds.items()}
        )

    def parts(self, payload: Payload, count: int) -> tuple[Ids, Array]:
        """Return so many ids, and their rows, (count, dim), as they lie in a payload."""
        dtype, dim = np.dtype(self.card.dtype), self.card.dim
        row_bytes = dtype.itemsize * dim
        rows = payload[: count * row_bytes].view(dtype).reshape(count, dim)
        return frames.ids_in(payload, count, row_bytes), rows

    def push(self, worker: int, asker: Asker, request: frames.PushRows, payload: Payload, gone: set[int]) -> Answers:
        """Take a push; return what is answered by now."""
        if request.refusals < self.refusals:
            return [(asker, self._refusal)]
        rows = min(request.count, self._rooms[worker].rows)
        self._rooms[worker], self._largest = NO_ROOM, max(self._largest, request.count)
        queue = self.queues[worker]
        queue.append(TablePush(asker, *self.parts(payload, request.count), rows))
        self._arrivals.append(worker)
        there: Answers = [self._answer_push(worker)] if len(queue) == 1 else []
        return [*there, *self.go_on(gone)]

    def read(self, read: TableRead, gone: set[int]) -> Answers:
        """Take a request that is answered after the worker's own pushes; return what is answered by now."""
        self._reads.append(read)
        return self.go_on(gone)

    def refuse(self, worker: int, refusal: frames.RoundRefused, gone: set[int]) -> Answers:
        """Drop all pushes that are not applied yet; tell those who wait for one of them. Every worker says it once."""
        if refusal.refusals <= self.refusals:
            if refusal.refusals == self.refusals:
                self._to_hear.discard(worker)
            return self.go_on(gone)
        self._to_hear = set(range(len(self.queues))) - {worker}
        self.journal.words[REFUSALS] = refusal.refusals
        self._refusal, told = refusal, [push.asker for queue in self.queues for push in [*queue][1:]]
        for queue in self.queues:
            queue.clear()
        self._arrivals.clear()
        self.opened, self.warned = None, False
        self._rooms = [NO_ROOM] * len(self._rooms)
        late = [read for read in self._reads if read.request.round >= refusal.round]
        self._reads = [read for read in self._reads if read.request.round < refusal.round]
        return [(asker, refusal) for asker in (*told, *(read.asker for read in late))]

    # ---- memory for rows

    def _answer_push(self, worker: int) -> tuple[Asker, frames.Answer]:
        """Answer the worker's first push that waits, with room for the next one where there is memory."""
        wanted = max(LEAST_ROOM, 2 * self._largest)
        if self._has_room(worker, wanted):
            self._rooms[worker] = PushRoom(wanted, wanted)
        return self.queues[worker][0].asker, frames.RoomGranted(self._rooms[worker].ids)

    def _has_room(self, worker: int, rows: int) -> bool:
        """Return whether there is memory for so many rows of a worker's next push, and all that was promised."""
        promised = sum(push.rows for queue in self.queues for push in queue)
        promised += sum(room.rows for other, room in enumerate(self._rooms) if other != worker)
        tables = [self] if self.counts is None else [self.counts, self]
        return all(table.rows.positions.has_room(promised + rows) for table in tables)

    def _room_for(self, read: TableRead) -> frames.Answer:
        """Give a worker room for a push of ids, or say why there is none."""
        new = int(np.count_nonzero(self.rows.positions.find(read.ids) < 0))
        if not self._has_room(read.worker, new):
            round_ = read.request.round + 1
            words = f"push {round_} of table {self.card.table!r} counts on no server, as server rank {self._rank} has"
            why = f"{words} {self.rows.positions.no_room(new)}; save and export go on"
            return frames.RoundRefused(round_, read.request.refusals + 1, why)
        self._rooms[read.worker] = PushRoom(len(read.ids), new)
        return frames.RoomGranted(len(read.ids))

    # ---- rounds

    def go_on(self, gone: set[int]) -> Answers:
        """Apply what can be applied, and answer who waited for it. MismatchError where a round can never end."""
        answers: list[tuple[Asker, frames.Answer]] = []
        while workers := self._next(gone):
            self._apply(workers, [self.queues[worker].popleft() for worker in workers])
            answers += [self._answer_push(worker) for worker in workers if self.queues[worker]]
        waiting = []
        for read in self._reads:
            asks = isinstance(read.request, frames.AskForRoom)
            if (asks or self._done[read.worker] < read.request.round) and read.request.refusals < self.refusals:
                answers.append((read.asker, self._refusal))
            elif self._may_read(read, gone):
                answers.append((read.asker, self._answer(read)))
            else:
                waiting.append(read)
        self._reads = waiting
        if self._staleness is None and any(self.queues):
            self._see_gone(gone)
        return answers

    def _may_read(self, read: TableRead, gone: Collection[int]) -> bool:
        round_ = read.request.round
        match read.request:
            case frames.PullRows():
                waits = self._too_far(read.worker, round_, gone)
            case frames.AskForRoom():  # the next refusal is of another round: all hear as often
                waits = not self._to_hear <= set(gone)
            case _:
                waits = False
        return self._done[read.worker] >= round_ and not waits

    def _next(self, gone: set[int]) -> Sequence[int]:
        """Return the workers whose next pushes are applied now, together; nobody where that has to wait."""
        if self._staleness is None:
            return range(len(self.queues)) if all(self.queues) else ()
        for worker in self._arrivals:
            if not self._too_far(worker, self._done[worker], gone):
                self._arrivals.remove(worker)
                return (worker,)
        return ()

    def _too_far(self, worker: int, steps: int, gone: Collection[int]) -> bool:
        """Return whether a worker after so many pushes is more than `staleness` ahead of the slowest."""
        if self._staleness is None or self._staleness < 0:
            return False
        steps -= self._met[worker]
        present = (done - met for other, (done, met) in enumerate(zip(self._done, self._met)) if other not in gone)
        return steps - min(present, default=steps) > self._staleness

    def _apply(self, workers: Sequence[int], pushes: Sequence[TablePush]) -> None:
        """Apply a push of each of these workers, together, as one round of the journal."""
        begun = self._begin_record(self._done[workers[0]] + 1, pushes) if recorder.is_traced else None
        ids, gradients = summed([(push.ids, push.gradients) for push in pushes])
        self.opened, self.warned = None, False
        self.updates += 1
        tables = [self] if self.counts is None else [self.counts, self]
        for table in tables:
            table.updates = self.updates
            table.journal.open()
        try:
            if self.counts is not None or self.card.chance < 1:
                admitted = self._admitted(ids)
                self.refused += len(ids) - len(admitted)
                ids, gradients = ids[admitted], gradients[admitted]
            self.rows.update(ids, gradients, self.updates)
        except Exception as error:
            raise CollectiveError(f"table {self.card.table!r}: update {self.updates} failed: {error}") from error
        for worker in workers:
            self._done[worker] += 1
        for table in tables:
            table.journal.close((self.updates, table.rows.evicted, table.refused), self._done)
            if self._mirror is not None:
                self._mirror.round_over(table.card.table, table.journal)
        if begun is not None:
            begun[0].end(begun[1])

    def _begin_record(self, round_: int, pushes: Sequence[TablePush]) -> tuple[Ring, int]:
        """Begin the record of an update; return its ring, and what `end` takes."""
        nbytes, size = (sum(getattr(push.gradients, word) for push in pushes) for word in ("nbytes", "size"))
        into, made = recorder.ring, form(self.lane, "update", f"table {self.key!r}", nbytes, size, self.card.dtype)
        return into, into.begin(made, 0, round_)

    def _admitted(self, ids: Ids) -> NDArray[np.int64]:
        """Return the places of ids that have a row, or get one now."""
        there = self.rows.positions.find(ids) >= 0
        new = np.flatnonzero(~there)
        if self.counts is not None:
            there[new] = admission.often_named(self.counts.rows, ids[new], self.updates, self.card.seen)
        else:
            there[new] = admission.lucky(self.card.key, ids[new], self.updates, self.card.chance)
        return np.flatnonzero(there)

    def _answer(self, read: TableRead) -> frames.Answer:
        if isinstance(read.request, frames.AskForRoom):
            return self._room_for(read)
        if isinstance(read.request, frames.GetTableStats):
            rows, positions = self.rows, self.rows.positions
            return frames.TableStats(
                rows.count, positions.top, rows.nbytes, self.updates, rows.evicted, self.refused, rows.drops.exports
            )
        try:
            found = self.rows.pull(read.ids, read.out)
            return frames.RequestDone() if read.out is not None else frames.Bytes(found.tobytes())
        except Exception as error:
            raise CollectiveError(f"table {self.card.table!r}: rows cannot be made: {error}") from error

    def _see_gone(self, gone: Iterable[int]) -> None:
        for worker in gone:
            if not self.queues[worker]:
                round_ = f"table {self.card.table!r}: round {self.updates + 1}"
                raise MismatchError(f"{round_} needs rank {worker}, which has left the store: {BEFORE_LEAVING}")
