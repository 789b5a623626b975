"""A unit on its server: its values and optimizer state, the sum and update of a block, and queues of pushes. No I/O.

A unit is a part of a key on one server. The same workers, its contributors, always push to it. A unit is summed and
updated in blocks, which fit into the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableSequence, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from mpips.collectives.errors import CollectiveError
from mpips.collectives.kernels.sums import add_parts
from mpips.optimizers.base import Optimizer, State, initial, state_dtypes
from mpips.optimizers.equation import update_by_sum
from mpips.store.keys.key import Array
from mpips.store.keys.row_sparse import RowSparse, update_rows
from mpips.store.recovery.undo import Undo, with_state

K = TypeVar("K")
V = TypeVar("V")
# maximum number of known names that an error message shows
SHOWN = 8


class UnknownError(ValueError):
    """A worker's message names something that this server does not have. The server reports it to the worker."""


class Known(dict[K, V]):
    """A dict of things that workers can name in messages, such as units. A missing name raises UnknownError.

    Args:
        noun: The word for these things in error messages, such as "unit".
    """

    def __init__(self, noun: str) -> None:
        super().__init__()
        self._noun = noun

    def __missing__(self, name: K) -> NoReturn:
        some = ", ".join(map(repr, list(self)[:SHOWN])) + ", ..." * (len(self) > SHOWN) or "none"
        raise UnknownError(f"there is no {self._noun} {name!r} in this store, which has {some}")


class Contribution:
    """Base class of pushes to a unit. Subclasses (`server.sources`) know the place and the encoding of the payload.

    The defaults are for a payload that is complete, and is in memory of this node.
    """

    # True if the payload is in memory of this node
    local = True
    # True if the payload is compressed or row-sparse. A coded payload is read as a whole, once `ready(0)` is True. Any
    # other payload is read block by block.
    coded = False
    # True if the payload is row-sparse
    sparse = False
    # True if the push has no values, and only counts as a contribution to the round
    empty = False
    # all elements of the unit, if they are complete and in memory of this node; otherwise None
    steady: Array | None = None
    # the weight of the push, in a store with a quorum
    quorum_weight = 1

    def ready(self, block: int) -> bool:
        """True if this block can be read. The call may start to fetch the block."""
        return True

    def part(self, block: int, start: int, stop: int) -> Array:
        """Return elements [start, stop) of the unit, which belong to this block. Only for payloads that are not coded.

        Use the elements at once: if the block came as a message, its memory is reused when the next block is asked for.
        """
        raise TypeError("the payload has no plain elements")

    def add_to(self, out: Array) -> None:
        """Add all elements of the push to `out`. Only for coded payloads."""
        raise TypeError("the payload is not coded")

    def rows(self) -> RowSparse:
        """Return the payload as rows. Only for row-sparse payloads."""
        raise TypeError("the payload is not row-sparse")

    def whole(self) -> Array:
        """Return all elements of the push. The array stays valid, because no other message is received into its memory.

        Only pushes to a store with a quorum have this method. Such a store may close a round before all workers have
        pushed. Call it only after `ready(0)` has returned True.
        """
        raise TypeError("the payload is taken block by block")

    def drop(self) -> None:
        """Forget the payload, which nobody will read."""


class Reply(NamedTuple):
    """A message to a worker. `what` names an `Op`: CONSUMED, GRANT, HELD or WARNING."""

    what: str
    worker: int
    unit: int
    round: int = 0
    text: str = ""
    # in a GRANT: the rows that the worker has asked for; None: all rows
    rows: Array | None = None


Replies = list[Reply]


class UnitMirror:
    """Interface for sending changed units to the mirror: another server, which keeps copies (`recovery.mirror`)."""

    @property
    def quiet(self) -> bool:
        """True if the mirror has everything that was sent."""
        raise NotImplementedError

    def changed(self, unit: Unit) -> None:
        """Send a unit that has changed."""
        raise NotImplementedError

    def forget(self, units: Iterable[Unit]) -> None:
        """Let the mirror forget units that no longer exist."""
        raise NotImplementedError


class FrozenUnit:
    """The values and the optimizer state that a unit had at one moment.

    `arrays` are the unit's own arrays until the unit is written again. Before that write, `copy` replaces them with
    copies.
    """

    def __init__(self, unit: Unit) -> None:
        self.round = unit.round
        self.step = unit.step
        self.arrays: list[Array] = [unit.stored, *(unit.state or ())]

    def copy(self) -> None:
        self.arrays = [array.copy() for array in self.arrays]


class Unit:
    """One unit on its server.

    Workers on the same node read the unit's progress in `words`, which are in shared memory. `words[0]` counts finished
    blocks over all rounds (for asynchronous stores, see `state`). `words[1 + i]` is the number of rounds of contributor
    i that the server has read.

    Args:
        number: The unit's number on its server.
        stored: Its values.
        contributors: The workers that push to it.
        block_elements: Number of elements of a block.
        row_elements: Number of elements of a row of the key.
        start: The first element of the unit in its key.
        undo: The unit's undo copy (`recovery.undo`), if the store survives deaths.
    """

    noun = "key"

    def __init__(
        self,
        number: int,
        key: int | str,
        stored: Array,
        words: MutableSequence[int] | memoryview,
        contributors: Sequence[int],
        block_elements: int,
        row_elements: int = 1,
        start: int = 0,
        undo: Undo | None = None,
    ) -> None:
        self.number = number
        self.key = key
        self.stored = stored
        self.words = words
        self.contributors = tuple(contributors)
        self.position = {worker: index for index, worker in enumerate(self.contributors)}
        self.block_elements = max(1, block_elements)
        self.blocks = max(1, -(-stored.size // self.block_elements))
        self.row_elements = row_elements
        self.start = start
        self.undo = undo
        self.optimizer: Optimizer | None = None
        self.state: State | None = None
        self.step = 0
        # snapshots of the unit, which must be copied before its next write
        self.frozen: list[FrozenUnit] = []
        # with a quorum: the copy of the stored values that workers read
        self.copy: Array | None = None
        # True if some blocks belong to a round that was never finished
        self.torn = False
        # False while the mirror has not received the stored values yet. Meanwhile the values must not change, and
        # workers must not be told that the round is complete.
        self.mirrored = True
        # synchronous: number of complete rounds
        self.round = 0
        # asynchronous: for each contributor, the number of its pushes that are applied
        self.done = [0] * len(self.contributors)
        # the value of `done` when all workers last met in a barrier
        self.met = [0] * len(self.contributors)
        self.priority = 0
        # workers that are reading
        self.readers: list[int] = []
        # pulls that wait for a grant: (worker, number of its pushes that must be in the unit, rows)
        self.pulls: list[tuple[int, int, Array | None]] = []
        # requests to hold the unit unchanged: (worker, number of pushes that must be in the unit)
        self.holds: list[tuple[int, int]] = []
        # time at which the open round began to wait; None until the next `Late.tick` sets it
        self.opened: float | None = 0.0
        self.warned = False
        # numbers that show other processes that this unit is being summed, or is being pulled
        self.token = self.token_of_pulls = 0
        # the text that all timing records of the unit's rounds share
        self.form = b""
        # is_long: the unit's rounds are always timed. is_timed: its rounds are timed now.
        self.is_long = self.is_timed = False
        # the number of pushes of each contributor at the last call of `uncounted`
        self._counted: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Start with empty queues and a new round."""
        self.queues: list[deque[Contribution]] = [deque() for _ in self.contributors]
        # number of contributors whose queue is empty
        self.missing = len(self.contributors)
        # asynchronous: positions of contributors, in the order of their pushes' arrival
        self.arrivals: deque[int] = deque()
        # asynchronous: position of the contributor whose push is being applied, or -1
        self.active = -1
        self.begin()

    def begin(self) -> None:
        """Begin the next round."""
        # number of writes to the stored values in the open round
        self.writes = 0
        # True if the optimizer's step has been increased for the open round
        self.stepped = False
        # number of blocks of the open round that are applied
        self.block = 0
        # Number of contributors that have been added to `total` or `rows`: with their whole payload if any payload is
        # coded, otherwise with their part of the current block.
        self.part = 0
        # if any payload is coded: number of blocks of the next contributor that have been added
        self.part_block = 0
        # the running sum: of all blocks if any payload is coded, otherwise of the current block
        self.total: Array | None = None
        # the row-sparse contributions so far; kept instead of `total` as long as all contributions are row-sparse
        self.rows: list[RowSparse] = []

    def uncounted(self, asynchronous: bool) -> list[int]:
        """Return how many pushes of each contributor were applied since the last call. The first call returns zeros."""
        now = list(self.done) if asynchronous else [self.round] * len(self.contributors)
        before, self._counted = self._counted or now, now
        return [new - old for new, old in zip(now, before)]

    @property
    def queued(self) -> int:
        """Number of contributions that wait for others, or for their turn."""
        return sum(map(len, self.queues))

    @property
    def waits(self) -> bool:
        """True if any contributor has pushed to the open round."""
        return self.missing < len(self.queues)

    @property
    def turn(self) -> int:
        """Position of the contributor whose next block is awaited."""
        return self.active if self.active >= 0 else self.part

    def bounds(self, block: int) -> tuple[int, int]:
        """Return the elements [start, stop) of a block."""
        start = block * self.block_elements
        return start, min(start + self.block_elements, self.stored.size)

    # ---- contributions

    def absent(self) -> list[int]:
        """Return the contributors that have not pushed to the open round."""
        return [worker for worker, queue in zip(self.contributors, self.queues) if not queue]

    def abandon(self) -> None:
        """Drop all contributions at the end of a generation.

        Changes of an open round are undone if the unit has an undo copy. Otherwise the unit is marked as torn.
        """
        for queue in self.queues:
            for source in queue:
                source.drop()
        self.give_up()
        self.readers, self.pulls, self.holds = [], [], []
        self.reset()

    # ---- the stored values; with an undo copy (`recovery.undo`), the previous round can be restored after a death

    @property
    def stands_at(self) -> int | None:
        """The optimizer's step, or None while there is no state."""
        return None if self.state is None else self.step

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Use this optimizer from now on, with new state."""
        self.optimizer, self.state, self.step = optimizer, None, 0
        if self.undo is not None:
            self.undo = with_state(self.undo, state_dtypes(optimizer, self.stored.dtype))

    def put_state(self, state: State | None, step: int) -> None:
        """Replace the optimizer's state. None: the next update begins with new state."""
        if self.undo is not None:
            # If the server is killed while the state is being copied, the unit must count as having no state.
            self.undo.note_state(None)
        self.state, self.step = None if state is None else self._in_undo_memory(state), step
        if self.undo is not None:
            self.undo.note_state(self.stands_at)

    def _in_undo_memory(self, state: State) -> State:
        """Return the state, in memory that outlives the process if there is an undo copy."""
        if self.undo is None:
            return state
        for array, values in zip(self.undo.state, state, strict=True):
            array[...] = values
        return self.undo.state

    def note_overwrite(self, torn: bool) -> None:
        """Note in the unit, and in its undo copy, that something other than a push replaces its values.

        Call it with True before the replacement and with False after it. If the replacement is interrupted, the unit
        stays marked as torn: a part of its values may be old and a part new.
        """
        self.torn = torn
        if self.undo is not None:
            self.undo.note_overwrite(torn)

    def give_up(self) -> None:
        """Give up the open round.

        With an undo copy, everything that the round has changed is restored. Without an undo copy, values that the
        round has changed stay changed, and the unit is then marked as torn.
        """
        if self.undo is not None:
            self.undo.undo()
            self.go_to_undo_copy()
        elif self.writes:
            self.torn = True
        elif self.stepped:
            self.step -= 1

    def go_to_undo_copy(self) -> None:
        """Set the optimizer's step and state to those of the undo copy, after it has restored the stored values."""
        assert self.undo is not None
        step = self.undo.available_rounds()[0].step
        self.state, self.step = (None, 0) if step is None else (self.undo.state, step)

    def open_write(self) -> None:
        """Begin a round that changes stored values, and with it the next optimizer step."""
        if self.frozen:
            self.thaw()
        if self.optimizer is not None:
            if self.state is None:
                self.state = self._in_undo_memory(initial(self.optimizer, self.stored))
            self.step += 1
            self.stepped = True
        if self.undo is not None:
            self.undo.open()

    def pass_round(self) -> None:
        """Begin a round that changes nothing, because all its contributions are empty."""
        if self.undo is not None:
            self.undo.open()

    def keep_old(self, start: int, stop: int) -> None:
        """Copy elements [start, stop), which `write` is about to overwrite, to the undo copy, if there is one.

        All elements before `start` must have been copied in this round.
        """
        if self.undo is not None:
            self.undo.keep_old(start, stop)

    def thaw(self) -> None:
        """Prepare for a write: copy arrays for snapshots, and discard the copy that workers read (with a quorum)."""
        self.copy = None
        for frozen in self.frozen:
            frozen.copy()
        self.frozen = []

    def write(self, start: int, stop: int, parts: Sequence[Array]) -> None:
        """Update elements [start, stop) with the sum of `parts`, as part of the current optimizer step.

        The parts are added from first to last. Without an optimizer the sum replaces the elements.
        """
        stored = self.stored[start:stop]
        if self.optimizer is None:
            self.writes += 1
            add_parts(parts, stored)
        else:
            assert self.state is not None
            state = [array[start:stop] for array in self.state]
            update_by_sum(self.optimizer, stored, parts, state, self.step)
            self.writes += 1

    def write_rows(self, total: RowSparse) -> None:
        """Update the rows that a sum names, as part of the current optimizer step. No row occurs twice in the sum.

        Without an optimizer the sum replaces all elements, and rows that the sum does not name become 0.
        """
        rows = self.stored.reshape(total.shape)
        if self.optimizer is None:
            self.keep_old(0, self.stored.size)
            rows[...] = 0
            rows[total.rows] = total.values
        else:
            assert self.state is not None
            if self.undo is not None:
                self.undo.keep_old_rows(total.rows)
            update_rows(self.optimizer, rows, total, self.state, self.step)
        self.writes += 1

    def failed(self, error: Exception) -> CollectiveError:
        """Return the exception to raise after an update has failed with `error`, and count the update as a write.

        A unit is torn if some of its blocks belong to a round that was never finished. The update may have changed a
        part of its block before it failed, so it is counted in `writes`. `give_up` later sees the count, and marks the
        unit as torn unless an undo copy can restore it. The update is not counted if it has certainly changed nothing,
        because the optimizer refused its arguments.
        """
        refused = isinstance(error, (TypeError, ValueError))
        checked = self.state is None or type(self.optimizer).__module__.startswith("mpips.optimizers.")
        # Built-in optimizers check their arguments before they change anything. Without state, no update has begun yet.
        if not (refused and checked):
            self.writes += 1
        why = str(error) if refused else f"{type(error).__name__}: {error}"
        return CollectiveError(f"key {self.key!r}: the server could not apply what was pushed: {why}")

    def begin_at(self, round_: int, pushes: Sequence[int] | None, state: State | None, step: int, torn: bool) -> None:
        """Begin a generation with this content.

        Args:
            round_: The number of complete rounds.
            pushes: In an asynchronous store, the number of applied pushes of each contributor; otherwise None.
            state: The optimizer's state, or None.
            step: The optimizer's step.
            torn: True if some blocks of the values belong to a round that was never finished.
        """
        self.round, self.done = round_, [round_] * len(self.contributors) if pushes is None else list(pushes)
        self.met = [0] * len(self.contributors)
        self.state, self.step, self.torn = state, step, torn
        for index, count in enumerate(self.done):
            self.words[1 + index] = count
        self.words[0] = round_ * self.blocks if pushes is None else 0
        if self.undo is not None:
            self.undo.begin_at(round_ if pushes is None else 0, self.stands_at, torn)
