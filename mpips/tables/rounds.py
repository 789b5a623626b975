"""One table on one server: rounds of pushes, or pushes as they come within `staleness`. No MPI.

Every worker contributes to every round on every server, if only with no ids. As soon as the last worker has pushed, the
round is applied: the gradients of a row are summed in the order of the workers. In an asynchronous store every push is
an update of its own. A push or pull of a worker that is too far ahead waits; workers that wait for all others do not
count as behind.

A push is answered once no earlier push of that worker is waiting, so a server holds at most two pushes of a worker.

New rows need memory, and no server may apply a round that another server cannot apply:

1. With its answer to a push a server grants room: a number of ids that the worker may push next without asking. It
   grants none if memory is short.
2. If the next push exceeds its room on any server, the worker first asks all servers (`AskForRoom`). A server answers
   once all earlier pushes of that worker are applied.
3. If a server refuses, the worker has all servers drop the round (`RefuseRound`).
4. Each other worker gets the refusal as the answer to its next request that concerns the round.
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
from mpips.collectives.recorder.ring import RecordRing, form
from mpips.store.keys.row_sums import Ids, summed
from mpips.store.server.late import BEFORE_LEAVING, Wait
from mpips.store.server.service import Answers, Asker, Payload
from mpips.store.transport import frames
from mpips.tables import admission, messages, row_optimizers
from mpips.tables.journal import HERE, REFUSALS, TORN, RowsRound
from mpips.tables.mirror import RowMirror
from mpips.tables.rows import Array, TableRows, arrays_of

NOTHING, NO_IDS = np.zeros(0, np.uint8), np.zeros(0, np.int64)


class TablePush(NamedTuple):
    """A push that is not applied yet."""

    # the request to answer when this push is the worker's oldest
    asker: Asker
    ids: Ids
    gradients: Array
    # number of new rows that were promised to it
    rows: int


Read = messages.PullRows | messages.GetTableStats | messages.AskForRoom


class TableRead(NamedTuple):
    """A request that is answered once some of the worker's own pushes are applied."""

    worker: int
    asker: Asker
    request: Read
    ids: Ids
    # where to write the rows of a pull; None: into the answer
    out: Array | None


class PushRoom(NamedTuple):
    """Room granted to a worker for its next push: how many ids it may have, and how many new rows it makes at most."""

    ids: int
    rows: int


NO_ROOM = PushRoom(0, 0)
# room, in ids, that a worker gets at least while memory is not short
LEAST_ROOM = 1 << 10


class ServerTable:
    """One table on one server: its rows, and the requests that wait.

    Args:
        staleness: None in a synchronous store; -1 for any number of pushes ahead.
        limit: This server's share of the table's limit.
        seen_counts: The table that counts updates of ids without a row, if `admit` needs one.
        file: Where rows lie.
        survives: Keep the round before, for a recovery.
        rank: The rank of this server.
        mirror: Sends rounds to this server's mirror.
    """

    noun, number = "table", 0

    def __init__(
        self,
        card: messages.MakeTable,
        workers: int,
        staleness: int | None,
        limit: int,
        seen_counts: ServerTable | None,
        file: SparseFile,
        survives: bool,
        rank: int,
        mirror: RowMirror | None,
    ) -> None:
        self._rank = rank
        self._mirror = mirror
        self.card = card
        self._staleness = staleness
        self._limit = limit
        self.seen_counts = seen_counts
        self._file = file
        self._survives = survives
        # number of gradients dropped because their id got no row
        self.refused = 0
        # for each worker the number of its pushes that are applied
        self._done = [0] * workers
        # the same when all workers last waited for all
        self._met = [0] * workers
        self.rows = self._new_rows()
        self.updates = 0
        # The journal of this generation. `rows` may already have the one of the next generation.
        self.journal = self.rows.journal
        # The rows that a load has replaced. They stay as long as processes that outlive this server may read them.
        self._before_load: TableRows | None = None
        self.key = card.table
        self.contributors = range(workers)
        self.lane = 0
        self.queues: list[deque[TablePush]] = [deque() for _ in range(workers)]
        # when the open round began to wait; None: set at the next look at the clock
        self.opened: float | None = None
        self.warned = False
        # in an asynchronous store the workers whose pushes wait, in order of arrival
        self._arrivals: deque[int] = deque()
        self._reads: list[TableRead] = []
        # for each worker the room that it was granted for its next push
        self._rooms = [NO_ROOM] * workers
        # number of ids in the largest push
        self._largest = 0
        # the last refusal
        self._refusal = messages.RoundRefused(0, 0, "")
        # workers that have not been told of the last refusal
        self._to_hear: set[int] = set()

    @property
    def round(self) -> int:
        """The last complete round, in a synchronous store."""
        return min(self._done)

    @property
    def refusals(self) -> int:
        """The number of rounds refused."""
        return self._refusal.refusals

    @property
    def waits(self) -> bool:
        """True if a push is waiting."""
        return any(self.queues)

    @property
    def missing(self) -> int:
        """The number of workers that have not pushed to the open round."""
        return len(self.absent())

    def absent(self) -> list[int]:
        """Return the workers that have not pushed to the open round."""
        return [worker for worker, queue in enumerate(self.queues) if not queue]

    def waits_to_hear(self) -> list[Wait]:
        """Return the workers that ask for room, and must wait until others have heard of the last refusal."""
        asks = [read for read in self._reads if isinstance(read.request, messages.AskForRoom)] if self._to_hear else []
        behind = tuple(sorted(self._to_hear))
        return [Wait(read.worker, self.key, read.request.round + 1, behind, self.noun) for read in asks]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The table's figures, in the order in which the pages of ranks list them."""
        rows, counts = self.rows, self.seen_counts
        nbytes = rows.nbytes + (counts.rows.nbytes if counts else 0)
        return rows.count, nbytes, self.updates, rows.evicted, self.refused, counts.rows.count if counts else 0

    @property
    def queued(self) -> int:
        """The number of pushes and reads that wait."""
        return len(self._reads) + sum(map(len, self.queues))

    def reset(self, updates: int) -> None:
        """Drop all rows for a load, and count `updates` from now on. The table is torn until `end_load`."""
        self.journal.words[HERE] = 0
        self._before_load, self.rows = self.rows, self._new_rows()
        self._rooms = [NO_ROOM] * len(self._rooms)
        round_ = self.journal.available_rounds()[0].round
        self.rows.begin(RowsRound(round_, updates, self._before_load.evicted, self.refused), self._done, True)
        self.updates, self.journal = updates, self.rows.journal

    def end_load(self) -> None:
        self._before_load = None
        self.journal.words[TORN] = 0

    def set_numbers(self, numbers: bytes) -> None:
        """Use other numbers of the optimizer from now on."""
        self.card.numbers = numbers
        self.rows.optimizer = row_optimizers.decode(self.card.optimizer, numbers)

    def begin(self, at: RowsRound, done: Sequence[int], torn: bool) -> None:
        """Begin a generation with the rows that are here.

        `done` is the number of pushes of each worker that are in the rows. `torn`: no whole round is here.
        """
        self._done = list(done)
        self.updates = at.updates
        self.refused = at.refused
        self.rows.begin(at, done, torn)
        self.set_numbers(self.card.numbers)
        self.journal = self.rows.journal

    def all_met(self) -> None:
        """Count from here how far workers are ahead, because all have waited for all."""
        self._met = list(self._done)

    def _new_rows(self) -> TableRows:
        return TableRows(self.card, self._limit, self._file, self._survives, len(self._done))

    @property
    def array_names(self) -> list[str]:
        """The names of the arrays of its rows."""
        return list(arrays_of(self.card))

    def put_rows(self, arrays: Mapping[str, bytes]) -> None:
        """Set rows that were sent."""
        kinds = arrays_of(self.card)
        self.rows.put_rows(
            {name: np.frombuffer(arrays[name], dtype).reshape(-1, *shape) for name, (dtype, shape) in kinds.items()}
        )

    def parts(self, payload: Payload, count: int) -> tuple[Ids, Array]:
        """Split a payload into `count` ids and their rows (count, dim), without a copy."""
        dtype, dim = np.dtype(self.card.dtype), self.card.dim
        row_bytes = dtype.itemsize * dim
        rows = payload[: count * row_bytes].view(dtype).reshape(count, dim)
        return messages.ids_in(payload, count, row_bytes), rows

    def push(self, worker: int, asker: Asker, request: messages.PushRows, payload: Payload, gone: set[int]) -> Answers:
        """Take a push. Return the answers that are due now. `gone` are workers that no longer push."""
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
        """Take a request that may have to wait for the worker's own pushes. Return the answers that are due now."""
        self._reads.append(read)
        return self.go_on(gone)

    def refuse(self, worker: int, refusal: messages.RoundRefused, gone: set[int]) -> Answers:
        """Drop all pushes that are not applied yet, and answer requests that wait for one of them with the refusal.

        Every worker sends each refusal once; only the first of them drops anything.
        """
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

    def _answer_push(self, worker: int) -> tuple[Asker, messages.TableAnswer]:
        """Answer the worker's oldest waiting push, with room for the next one if there is memory."""
        wanted = max(LEAST_ROOM, 2 * self._largest)
        if self._has_room(worker, wanted):
            self._rooms[worker] = PushRoom(wanted, wanted)
        return self.queues[worker][0].asker, messages.RoomGranted(self._rooms[worker].ids)

    def _has_room(self, worker: int, rows: int) -> bool:
        """True if there is memory for `rows` new rows of a worker's next push.

        What other pushes were promised is left to them.
        """
        promised = sum(push.rows for queue in self.queues for push in queue)
        promised += sum(room.rows for other, room in enumerate(self._rooms) if other != worker)
        tables = [self] if self.seen_counts is None else [self.seen_counts, self]
        return all(table.rows.positions.has_room(promised + rows) for table in tables)

    def _room_for(self, read: TableRead) -> messages.TableAnswer:
        """Grant a worker room for these ids, or refuse the round."""
        new = int(np.count_nonzero(self.rows.positions.find(read.ids) < 0))
        if not self._has_room(read.worker, new):
            round_ = read.request.round + 1
            words = f"push {round_} of table {self.card.table!r} counts on no server, as server rank {self._rank} has"
            why = f"{words} {self.rows.positions.no_room(new)}; save and export go on"
            return messages.RoundRefused(round_, read.request.refusals + 1, why)
        self._rooms[read.worker] = PushRoom(len(read.ids), new)
        return messages.RoomGranted(len(read.ids))

    # ---- rounds

    def go_on(self, gone: set[int]) -> Answers:
        """Apply all pushes that can be applied, and answer the requests that waited for them.

        Raises MismatchError if a round can never end, because a worker has left.
        """
        answers: list[tuple[Asker, messages.TableAnswer]] = []
        while workers := self._next(gone):
            self._apply(workers, [self.queues[worker].popleft() for worker in workers])
            answers += [self._answer_push(worker) for worker in workers if self.queues[worker]]
        waiting = []
        for read in self._reads:
            asks = isinstance(read.request, messages.AskForRoom)
            if (asks or self._done[read.worker] < read.request.round) and read.request.refusals < self.refusals:
                answers.append((read.asker, self._refusal))
            elif self._may_read(read, gone):
                answers.append((read.asker, self._answer(read)))
            else:
                waiting.append(read)
        self._reads = waiting
        if self._staleness is None and any(self.queues):
            self._check_gone(gone)
        return answers

    def _may_read(self, read: TableRead, gone: Collection[int]) -> bool:
        round_ = read.request.round
        match read.request:
            case messages.PullRows():
                waits = self._too_far(read.worker, round_, gone)
            # A worker may push anew only when all have heard of the last refusal. Otherwise a second one could come
            # before, and workers would have heard of different numbers of refusals.
            case messages.AskForRoom():
                waits = not self._to_hear <= set(gone)
            case _:
                waits = False
        return self._done[read.worker] >= round_ and not waits

    def _next(self, gone: set[int]) -> Sequence[int]:
        """Return the workers whose oldest pushes are applied together now. Empty if that has to wait."""
        if self._staleness is None:
            return range(len(self.queues)) if all(self.queues) else ()
        for worker in self._arrivals:
            if not self._too_far(worker, self._done[worker], gone):
                self._arrivals.remove(worker)
                return (worker,)
        return ()

    def _too_far(self, worker: int, steps: int, gone: Collection[int]) -> bool:
        """True if a worker would be more than `staleness` pushes ahead of the slowest after `steps` pushes."""
        if self._staleness is None or self._staleness < 0:
            return False
        steps -= self._met[worker]
        present = (done - met for other, (done, met) in enumerate(zip(self._done, self._met)) if other not in gone)
        return steps - min(present, default=steps) > self._staleness

    def _apply(self, workers: Sequence[int], pushes: Sequence[TablePush]) -> None:
        """Apply one push of each of these workers together, as one round of the journal."""
        begun = self._begin_record(self._done[workers[0]] + 1, pushes) if recorder.is_traced else None
        ids, gradients = summed([(push.ids, push.gradients) for push in pushes])
        self.opened, self.warned = None, False
        self.updates += 1
        # Counts and rows complete the round one after the other. If this server dies in between, a recovery takes a
        # round that both have.
        tables = [self] if self.seen_counts is None else [self.seen_counts, self]
        for table in tables:
            table.updates = self.updates
            table.journal.open()
        try:
            if self.seen_counts is not None or self.card.chance < 1:
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

    def _begin_record(self, round_: int, pushes: Sequence[TablePush]) -> tuple[RecordRing, int]:
        """Begin the record of an update. Return its ring, and the argument for the ring's `end`."""
        nbytes, size = (sum(getattr(push.gradients, word) for push in pushes) for word in ("nbytes", "size"))
        into, made = recorder.ring, form(self.lane, "update", f"table {self.key!r}", nbytes, size, self.card.dtype)
        return into, into.begin(made, 0, round_)

    def _admitted(self, ids: Ids) -> NDArray[np.int64]:
        """Return the indices of ids that have a row or get one now."""
        there = self.rows.positions.find(ids) >= 0
        new = np.flatnonzero(~there)
        if self.seen_counts is not None:
            there[new] = admission.often_named(self.seen_counts.rows, ids[new], self.updates, self.card.seen)
        else:
            there[new] = admission.lucky(self.card.key, ids[new], self.updates, self.card.chance)
        return np.flatnonzero(there)

    def _answer(self, read: TableRead) -> messages.TableAnswer:
        if isinstance(read.request, messages.AskForRoom):
            return self._room_for(read)
        if isinstance(read.request, messages.GetTableStats):
            rows, positions = self.rows, self.rows.positions
            return messages.TableStats(
                rows.count, positions.top, rows.nbytes, self.updates, rows.evicted, self.refused, rows.drops.exports
            )
        try:
            found = self.rows.pull(read.ids, read.out)
            return frames.RequestDone() if read.out is not None else frames.Bytes(found.tobytes())
        except Exception as error:
            raise CollectiveError(f"table {self.card.table!r}: rows cannot be made: {error}") from error

    def _check_gone(self, gone: Iterable[int]) -> None:
        for worker in gone:
            if not self.queues[worker]:
                round_ = f"table {self.card.table!r}: round {self.updates + 1}"
                raise MismatchError(f"{round_} needs rank {worker}, which has left the store: {BEFORE_LEAVING}")
