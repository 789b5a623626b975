"""One table on one server: collect pushes into rounds, apply the rounds, and answer requests. No MPI.

In a synchronous store every worker contributes to every round on every server, even if its push has no ids for that
server. As soon as the last worker has pushed, the server applies the round: it sums the gradients of a row in the order
of the workers.

A call of `set` or `remove` also counts as a push. A round in which all workers call `set` sets rows instead of updating
them.

In an asynchronous store every push is an update of its own. If a worker is more than `staleness` pushes ahead of the
slowest one, its pushes and pulls wait. Workers that wait for all others in a barrier do not count as slow.

A push is answered once no earlier push of that worker is waiting. So at most two pushes of a worker wait on a server.

New rows need memory, and no server may apply a round that another server cannot apply:

1. In its answer to a push, a server grants *room*: the number of ids that the worker may push next without asking for
   memory. If memory is short, the server grants no room.
2. If the next push has more ids for a server than its room, the worker first asks all servers (`AskForRoom`). A server
   answers once all earlier pushes of that worker are applied.
3. If a server refuses, the worker tells all servers to drop the round (`RefuseRound`).
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
from mpips.store.keys.row_sums import Ids, last_places, summed
from mpips.store.server.late import BEFORE_LEAVING, Wait
from mpips.store.server.service import Answers, Asker, Payload
from mpips.store.transport import frames
from mpips.tables import admission, halves, messages, row_optimizers
from mpips.tables.eviction import SCORE
from mpips.tables.journal import HERE, REFUSALS, TORN, RowsRound
from mpips.tables.mirror import RowMirror
from mpips.tables.rows import Array, TableRows, arrays_of

NOTHING, NO_IDS = np.zeros(0, np.uint8), np.zeros(0, np.int64)
NO_ROWS: Array = np.zeros((0, 0), np.float32)


class TablePush(NamedTuple):
    """A push that is not applied yet."""

    # the request that is answered once this push is the worker's oldest waiting push
    asker: Asker
    ids: Ids
    gradients: Array
    # number of new rows for which the server has promised memory to this push
    rows: int
    # what happens to the rows: "push" updates them with the gradients, "set" sets them to these values, "remove"
    call: str = "push"
    # a score for each id, if the table evicts by score
    scores: Array | None = None
    # time on the worker's wall clock
    time: int = 0


Read = messages.PullRows | messages.HasRows | messages.GetTableStats | messages.AskForRoom


class TableRead(NamedTuple):
    """A request that is answered once the worker's own pushes up to a round are applied."""

    worker: int
    asker: Asker
    request: Read
    ids: Ids
    # the array into which the rows of a pull are written; None if the answer contains the rows
    out: Array | None


class PushRoom(NamedTuple):
    """Room that a server has granted to a worker for its next push."""

    # maximum number of ids in the push
    ids: int
    # maximum number of new rows that the push makes
    rows: int


NO_ROOM = PushRoom(0, 0)
# While memory is not short, a worker gets room for at least this many ids.
LEAST_ROOM = 1 << 10


class ServerTable:
    """One table on one server: its rows, and the requests that wait.

    Args:
        card: The description of the table.
        workers: Number of workers.
        staleness: In an asynchronous store, the largest number of pushes by which a worker may be ahead, or -1 without
            a limit. None in a synchronous store.
        limit: This server's share of the table's limit on rows.
        seen_counts: The table that counts updates of ids without a row, or None if `admit` needs no counts.
        file: The file in which rows are stored.
        survives: True to keep the previous round for a recovery.
        rank: The rank of this server.
        mirror: Sends rounds to this server's mirror. None without a mirror.
        checks_finite: True to raise an error if an update makes a row of float16 or bfloat16 infinite.
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
        checks_finite: bool,
    ) -> None:
        self._rank = rank
        self._checks_finite = checks_finite
        self._mirror = mirror
        self.card = card
        self._staleness = staleness
        self._limit = limit
        self.seen_counts = seen_counts
        self._file = file
        self._survives = survives
        # number of gradients that were dropped because their id got no row
        self.refused = 0
        # time of the last update (see `RowsRound`)
        self.time = 0
        # for each worker, the number of its applied pushes
        self._done = [0] * workers
        # `_done` at the last barrier of all workers
        self._met = [0] * workers
        self.rows = self._new_rows()
        self.updates = 0
        # The journal of this generation. `rows.journal` may already be the journal of the next generation.
        self.journal = self.rows.journal
        # The old rows during a load. If this server dies now, other processes may still read them.
        self._before_load: TableRows | None = None
        self.key = card.table
        self.contributors = range(workers)
        self.lane = 0
        self.queues: list[deque[TablePush]] = [deque() for _ in range(workers)]
        # the time at which the open round began to wait; None if it has not been set yet
        self.opened: float | None = None
        self.warned = False
        # in an asynchronous store the workers of waiting pushes, in the order of arrival
        self._arrivals: deque[int] = deque()
        self._reads: list[TableRead] = []
        # for each worker, the room that this server has granted for its next push
        self._rooms = [NO_ROOM] * workers
        # number of ids in the largest push so far
        self._largest = 0
        # the last refusal
        self._refusal = messages.RoundRefused(0, 0, "")
        # workers that have not been told of the last refusal yet
        self._to_hear: set[int] = set()

    @property
    def round(self) -> int:
        """The last complete round, in a synchronous store."""
        return min(self._done)

    @property
    def refusals(self) -> int:
        """The number of rounds that were refused."""
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
        """Return a `Wait` for each worker that asks for room and must wait until others know of the last refusal."""
        asks = [read for read in self._reads if isinstance(read.request, messages.AskForRoom)] if self._to_hear else []
        behind = tuple(sorted(self._to_hear))
        return [Wait(read.worker, self.key, read.request.round + 1, behind, self.noun) for read in asks]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The table's figures, in the order in which a rank's page shows them to other processes."""
        rows, counts = self.rows, self.seen_counts
        nbytes = rows.nbytes + (counts.rows.nbytes if counts else 0)
        counted = counts.rows.count if counts else 0
        return rows.count, nbytes, self.updates, rows.evicted, self.refused, counted, rows.removed

    @property
    def _counts(self) -> tuple[int, ...]:
        """The counts of a `RowsRound`, in its order."""
        rows = self.rows
        drops = rows.evicted, self.refused, rows.expired_rows, rows.excess_rows, rows.removed
        return self.updates, *drops, self.time

    @property
    def queued(self) -> int:
        """The number of pushes and reads that wait."""
        return len(self._reads) + sum(map(len, self.queues))

    def reset(self, updates: int, time: int) -> None:
        """Drop all rows for a load, and set the number and the time of updates. The table is torn until `end_load`."""
        self.journal.words[HERE] = 0
        self.updates, self.time = updates, time
        at = RowsRound(self.journal.available_rounds()[0].round, *self._counts)
        self._before_load, self.rows = self.rows, self._new_rows()
        self._rooms = [NO_ROOM] * len(self._rooms)
        self.rows.begin(at, self._done, True)
        self.journal = self.rows.journal

    def end_load(self) -> None:
        self._before_load = None
        self.journal.words[TORN] = 0

    def set_numbers(self, numbers: bytes) -> None:
        """Use other hyperparameters of the optimizer from now on."""
        self.card.numbers = numbers
        self.rows.optimizer = row_optimizers.decode(self.card.optimizer, numbers)

    def begin(self, at: RowsRound, done: Sequence[int], torn: bool) -> None:
        """Begin a generation with the current content of `rows`.

        Args:
            at: The round of the rows, with the table's counts.
            done: The number of pushes of each worker that the rows contain.
            torn: True if the rows are not those of a whole round.
        """
        self._done = list(done)
        self.updates = at.updates
        self.refused = at.refused
        self.time = at.time
        self.rows.begin(at, done, torn)
        self.set_numbers(self.card.numbers)
        self.journal = self.rows.journal

    def all_met(self) -> None:
        """Count from 0 again how far each worker is ahead, because all workers have passed a barrier."""
        self._met = list(self._done)

    def _new_rows(self) -> TableRows:
        return TableRows(self.card, self._limit, self._file, self._survives, len(self._done), self._checks_finite)

    @property
    def array_names(self) -> list[str]:
        """The names of the table's arrays."""
        return list(arrays_of(self.card))

    def put_rows(self, arrays: Mapping[str, bytes]) -> None:
        """Set rows. `arrays` has the values of these rows for each array of the table, by name."""
        kinds = arrays_of(self.card)
        self.rows.put_rows(
            {name: np.frombuffer(arrays[name], dtype).reshape(-1, *shape) for name, (dtype, shape) in kinds.items()}
        )

    def parts(self, payload: Payload, count: int) -> tuple[Ids, Array]:
        """Split a payload into `count` ids and rows (count, dim), without a copy."""
        rows = self.rows_in(payload, count)
        return messages.ids_in(payload, count, self.card.dim * rows.itemsize), rows

    def rows_in(self, payload: Payload, count: int, at: int = 0) -> Array:
        """Return the `count` rows at offset `at` of a payload, without a copy."""
        dtype, dim = np.dtype(self.card.dtype), self.card.dim
        return payload[at:][: count * dim * dtype.itemsize].view(dtype).reshape(count, dim)

    def push(
        self,
        worker: int,
        asker: Asker,
        request: messages.PushRows | messages.RemoveRows,
        payload: Payload,
        gone: set[int],
    ) -> Answers:
        """Accept a push. Return the answers that are due now. `gone` are the workers that make no more pushes."""
        if request.refusals < self.refusals:
            return [(asker, self._refusal)]
        queue = self.queues[worker]
        if isinstance(request, messages.RemoveRows):
            ids = np.frombuffer(request.ids, np.int64)
            queue.append(TablePush(asker, ids, NO_ROWS, 0, "remove", time=request.time))
        else:
            count, row_bytes = request.count, np.dtype(self.card.dtype).itemsize * self.card.dim
            rows = min(count, self._rooms[worker].rows)
            scores = messages.scores_in(payload, count, row_bytes) if self.card.evict_by == SCORE else None
            call = "set" if request.sets else "push"
            queue.append(TablePush(asker, *self.parts(payload, count), rows, call, scores, request.time))
            self._largest = max(self._largest, count)
        self._rooms[worker] = NO_ROOM
        self._arrivals.append(worker)
        there: Answers = [self._answer_push(worker)] if len(queue) == 1 else []
        return [*there, *self.go_on(gone)]

    def read(self, read: TableRead, gone: set[int]) -> Answers:
        """Accept a request that may have to wait for the worker's own pushes. Return the answers that are due now."""
        self._reads.append(read)
        return self.go_on(gone)

    def refuse(self, worker: int, refusal: messages.RoundRefused, gone: set[int]) -> Answers:
        """Drop all pushes that are not applied yet. Answer the requests that wait for them with the refusal.

        Every worker sends each refusal once. Only the first of these messages drops anything.
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
        """Answer the worker's oldest waiting push. Grant room for the next push if the server has memory."""
        wanted = max(LEAST_ROOM, 2 * self._largest)
        if self._has_room(worker, wanted):
            self._rooms[worker] = PushRoom(wanted, wanted)
        return self.queues[worker][0].asker, messages.RoomGranted(self._rooms[worker].ids)

    def _has_room(self, worker: int, rows: int) -> bool:
        """True if the server has memory for `rows` new rows of a worker's next push.

        Memory that was promised to other pushes does not count as free.
        """
        promised = sum(push.rows for queue in self.queues for push in queue)
        promised += sum(room.rows for other, room in enumerate(self._rooms) if other != worker)
        tables = [self] if self.seen_counts is None else [self.seen_counts, self]
        return all(table.rows.positions.has_room(promised + rows) for table in tables)

    def _room_for(self, read: TableRead) -> messages.TableAnswer:
        """Grant a worker room for the ids of its request, or refuse the round."""
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
        """Apply all pushes that can be applied now, and answer the requests that waited for them.

        Raises MismatchError if a round can never end, because a worker has left the store.
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
            case messages.PullRows() | messages.HasRows():
                waits = self._too_far(read.worker, round_, gone)
            # Grant room only when all workers know of the last refusal. Otherwise a second refusal could follow at
            # once, and some workers would know of one refusal, others of two.
            case messages.AskForRoom():
                waits = not self._to_hear <= set(gone)
            case _:
                waits = False
        return self._done[read.worker] >= round_ and not waits

    def _next(self, gone: set[int]) -> Sequence[int]:
        """Return the workers whose oldest pushes can be applied together now.

        Return an empty list if pushes have to wait.
        """
        if self._staleness is None:
            return range(len(self.queues)) if all(self.queues) else ()
        for worker in self._arrivals:
            if not self._too_far(worker, self._done[worker], gone):
                self._arrivals.remove(worker)
                return (worker,)
        return ()

    def _too_far(self, worker: int, steps: int, gone: Collection[int]) -> bool:
        """True if `worker`, after `steps` pushes, would be more than `staleness` pushes ahead of the slowest worker."""
        if self._staleness is None or self._staleness < 0:
            return False
        steps -= self._met[worker]
        present = (done - met for other, (done, met) in enumerate(zip(self._done, self._met)) if other not in gone)
        return steps - min(present, default=steps) > self._staleness

    def _apply(self, workers: Sequence[int], pushes: Sequence[TablePush]) -> None:
        """Apply one push of each of these workers, all together as one round of the journal."""
        self._check_calls(workers, pushes)
        begun = self._begin_record(self._done[workers[0]] + 1, pushes) if recorder.is_traced else None
        self.opened, self.warned = None, False
        self.updates += 1
        # Use the clock of the first worker on all servers. If that clock is set back, keep the last time.
        self.time = max(self.time, pushes[0].time)
        # First the table of counts completes the round, then this table. If this server dies in between, a recovery
        # chooses a round that both tables have.
        tables = [self] if self.seen_counts is None else [self.seen_counts, self]
        for table in tables:
            table.updates, table.time = self.updates, self.time
            table.journal.open()
            table.rows.begin_update(self.updates, self.time)
        try:
            if pushes[0].call == "push":
                self._update(pushes)
            else:
                self._set_or_remove(pushes)
            self.rows.drop_due_rows()
        except Exception as error:
            raise CollectiveError(f"table {self.card.table!r}: update {self.updates} failed: {error}") from error
        for worker in workers:
            self._done[worker] += 1
        for table in tables:
            table.journal.close(table._counts, self._done)
            if self._mirror is not None:
                self._mirror.round_over(table.card.table, table.journal)
        if begun is not None:
            begun[0].end(begun[1])

    def _check_calls(self, workers: Sequence[int], pushes: Sequence[TablePush]) -> None:
        """Raise MismatchError if the pushes of a round are different calls."""
        for worker, push in zip(workers, pushes):
            if push.call != pushes[0].call:
                raise MismatchError(
                    f"table {self.card.table!r}: round {self._done[worker] + 1} is a {pushes[0].call} on rank "
                    f"{workers[0]} and a {push.call} on rank {worker}: make the same call on all workers, if need be "
                    "without ids"
                )

    def _update(self, pushes: Sequence[TablePush]) -> None:
        sum_up = halves.summed if halves.is_half(pushes[0].gradients.dtype) else summed
        ids, gradients = sum_up([(push.ids, push.gradients) for push in pushes])
        scores = self._scores_of(ids, pushes)
        if self.seen_counts is not None or self.card.chance < 1:
            admitted = self._admitted(ids)
            self.refused += len(ids) - len(admitted)
            ids, gradients = ids[admitted], gradients[admitted]
            scores = None if scores is None else scores[admitted]
        self.rows.change_rows(ids, gradients, scores)

    def _set_or_remove(self, pushes: Sequence[TablePush]) -> None:
        """Set or remove rows, as the program has requested.

        The rule `admit` is not applied, so its counts of these ids are dropped.
        """
        ids, last = last_places(np.concatenate([push.ids for push in pushes]))
        if pushes[0].call == "set":
            values = np.concatenate([push.gradients for push in pushes])
            self.rows.set_rows(ids, values[last], self._scores_of(ids, pushes))
        else:
            self.rows.removed += self.rows.remove(ids)
        if self.seen_counts is not None:
            self.seen_counts.rows.remove(ids)
            self.seen_counts.rows.drop_due_rows()

    def _scores_of(self, ids: Ids, pushes: Sequence[TablePush]) -> Array | None:
        """Return the last score that the pushes give to each id, in the order of the workers. None without scores."""
        if self.card.evict_by != SCORE:
            return None
        every, last = last_places(np.concatenate([push.ids for push in pushes]))
        scores = np.concatenate([push.scores for push in pushes if push.scores is not None])
        latest: Array = scores[last[np.searchsorted(every, ids)]]
        return latest

    def _begin_record(self, round_: int, pushes: Sequence[TablePush]) -> tuple[RecordRing, int]:
        """Begin the timing record of an update. Return the record's ring, and the argument for the ring's `end`."""
        nbytes, size = (sum(getattr(push.gradients, word) for push in pushes) for word in ("nbytes", "size"))
        into, made = recorder.ring, form(self.lane, "update", f"table {self.key!r}", nbytes, size, self.card.dtype)
        return into, into.begin(made, 0, round_)

    def _admitted(self, ids: Ids) -> NDArray[np.int64]:
        """Return the indices of ids that already have a row or get one now."""
        there = self.rows.positions.find(ids) >= 0
        new = np.flatnonzero(~there)
        if self.seen_counts is not None:
            there[new] = admission.often_named(self.seen_counts.rows, ids[new], self.card.seen)
        else:
            there[new] = admission.lucky(self.card.key, ids[new], self.updates, self.card.chance)
        return np.flatnonzero(there)

    def _answer(self, read: TableRead) -> messages.TableAnswer:
        if isinstance(read.request, messages.AskForRoom):
            return self._room_for(read)
        if isinstance(read.request, messages.GetTableStats):
            rows, positions = self.rows, self.rows.positions
            figures = rows.count, positions.top, rows.nbytes, self.updates, rows.evicted, self.refused
            drops = rows.expired_rows, rows.excess_rows, rows.removed
            return messages.TableStats(*figures, rows.drops.exports, *drops)
        if isinstance(read.request, messages.HasRows):
            return frames.Bytes((self.rows.positions.find(read.ids) >= 0).tobytes())
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
