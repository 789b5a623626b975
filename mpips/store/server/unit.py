"""A unit on its server: its values and optimizer state, the sum and update of a block, queues of pushes. No I/O."""

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
# how many known names an error message shows
SHOWN = 8


class UnknownError(ValueError):
    """A worker's message names something that this server does not have. The sender is told."""


class Known(dict[K, V]):
    """Units and the like, by number or name. UnknownError for a name that is not among them."""

    def __init__(self, noun: str) -> None:
        super().__init__()
        self._noun = noun

    def __missing__(self, name: K) -> NoReturn:
        some = ", ".join(map(repr, list(self)[:SHOWN])) + ", ..." * (len(self) > SHOWN) or "none"
        raise UnknownError(f"there is no {self._noun} {name!r} in this store, which has {some}")


class Contribution:
    """Base class of pushes to a unit. Subclasses (`server.sources`) know where the payload lies and how it is coded.

    The defaults here are those of a payload that is complete, and in memory of this node.
    """

    # True if it lies in memory of this node
    local = True
    # True if it is compressed or row-sparse. It is then taken as a whole once `ready(0)`, and else block by block.
    coded = False
    # True if it is row-sparse
    sparse = False
    # True if it holds nothing and only counts as a round
    empty = False
    # all elements of the unit, if they are complete and in memory of this node
    steady: Array | None = None
    # its weight in a round that a quorum closes
    weight = 1

    def ready(self, block: int) -> bool:
        """True if this block can be read. The call may start to fetch the block."""
        return True

    def part(self, block: int, start: int, stop: int) -> Array:
        """Return elements [start, stop) of the unit, which belong to this block. Plain payloads only.

        They must be used at once: a block that came as a message is forgotten when the next one is looked for.
        """
        raise TypeError("the payload has no plain elements")

    def add_to(self, out: Array) -> None:
        """Add all elements to `out`. Coded payloads only."""
        raise TypeError("the payload is not coded")

    def rows(self) -> RowSparse:
        """Return the payload as rows. Sparse payloads only."""
        raise TypeError("the payload is not row-sparse")

    def whole(self) -> Array:
        """Return all elements, in memory of their own. Only in stores with a quorum, once all of it has arrived."""
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
    # of a GRANT: the rows that were asked for; None: all
    rows: Array | None = None


Replies = list[Reply]


class UnitMirror:
    """Interface that sends changed units to another server, which keeps copies of them (`recovery.mirror`)."""

    @property
    def quiet(self) -> bool:
        """True if the other server has everything that was sent."""
        raise NotImplementedError

    def changed(self, unit: Unit) -> None:
        """Send a unit that has changed."""
        raise NotImplementedError

    def forget(self, units: Iterable[Unit]) -> None:
        """Let the other server forget units that no longer exist."""
        raise NotImplementedError


class FrozenUnit:
    """Values and state of a unit at one moment: the unit's own arrays until it is about to be written, then copies."""

    def __init__(self, unit: Unit) -> None:
        self.round = unit.round
        self.step = unit.step
        self.arrays: list[Array] = [unit.stored, *(unit.state or ())]

    def copy(self) -> None:
        self.arrays = [array.copy() for array in self.arrays]


class Unit:
    """One unit on its server.

    Readers on the same node see its progress in `words`. `words[0]` counts finished blocks over all rounds (in an
    asynchronous store, see `state`). `words[1 + i]` is the number of rounds of contributor i that have been read.
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
        # its first element in the key
        self.start = start
        # the old values of the open round, if the store survives deaths
        self.undo = undo
        self.optimizer: Optimizer | None = None
        self.state: State | None = None
        self.step = 0
        # snapshots of it that have to be copied before the next write
        self.frozen: list[FrozenUnit] = []
        # with a quorum: a copy of the stored values, which workers read
        self.copy: Array | None = None
        # True if some blocks are of a round that was never finished
        self.torn = False
        # False while its mirror has yet to receive the stored values. Until then they must not change, and workers must
        # not hear of them.
        self.mirrored = True
        # synchronous: number of complete rounds
        self.round = 0
        # asynchronous: for each contributor, the number of its rounds that are applied
        self.done = [0] * len(self.contributors)
        # the same numbers when all workers met last
        self.met = [0] * len(self.contributors)
        self.priority = 0
        # workers that are reading
        self.readers: list[int] = []
        # (worker, its rounds, rows) of pulls that wait for a grant
        self.pulls: list[tuple[int, int, Array | None]] = []
        # (worker, pushes) of workers that want to hold it once it has this many pushes in it
        self.holds: list[tuple[int, int]] = []
        # when the open round began to wait; None: set it at the next look at the clock
        self.opened: float | None = 0.0
        self.warned = False
        # the marks by which other processes see that it is being summed, or read
        self.token = self.token_of_pulls = 0
        # the form of records of its rounds
        self.form = b""
        # is_long: its rounds are always recorded; is_timed: they are recorded at present
        self.is_long = self.is_timed = False
        # number of pushes of each contributor at the last `uncounted`
        self._counted: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Begin without contributions, and with no block of a round applied."""
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
        # True if the optimizer's step has been counted for the open round
        self.stepped = False
        # number of blocks that are applied
        self.block = 0
        # Number of contributors whose payload, or whose part of the present block, has been added to `total` or `rows`.
        # Of the next contributor `part_block` blocks have been added.
        self.part = 0
        self.part_block = 0
        # the running sum of the present block, or of all blocks
        self.total: Array | None = None
        # used instead of `total` as long as all contributions are rows
        self.rows: list[RowSparse] = []

    def uncounted(self, asynchronous: bool) -> list[int]:
        """Return the number of pushes of each contributor that were applied since the last such call. At first 0."""
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

    # ---- what is stored. With an undo copy (`recovery.undo`) the round before can be restored after a death.

    @property
    def stands_at(self) -> int | None:
        """The optimizer's step, or None while there is no state."""
        return None if self.state is None else self.step

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Update by this optimizer from now on, with new state."""
        self.optimizer, self.state, self.step = optimizer, None, 0
        if self.undo is not None:
            self.undo = with_state(self.undo, state_dtypes(optimizer, self.stored.dtype))

    def put_state(self, state: State | None, step: int) -> None:
        """Set the optimizer's state from outside. None: it begins anew."""
        if self.undo is not None:
            # If the server is killed meanwhile, the unit has no state.
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
        """Note that values are being overwritten from outside (`torn`), or that all of them have been (not `torn`)."""
        self.torn = torn
        if self.undo is not None:
            self.undo.note_overwrite(torn)

    def give_up(self) -> None:
        """Give up the open round. Without an undo copy its changes stay, and the unit is marked as torn."""
        if self.undo is not None:
            self.undo.undo()
            self.go_to_undo_copy()
        elif self.writes:
            self.torn = True
        elif self.stepped:
            self.step -= 1

    def go_to_undo_copy(self) -> None:
        """Set the optimizer's step and state to those of the stored values, after the undo copy has changed these."""
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
        """Keep what `write` is about to overwrite in elements [start, stop). Those before them must have been kept."""
        if self.undo is not None:
            self.undo.keep_old(start, stop)

    def thaw(self) -> None:
        """Copy the arrays of snapshots, so that they stay while this unit is written.

        Drop the copy that workers read.
        """
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
        """Update the rows of a sum, in which none repeats, as part of the current optimizer step.

        Without an optimizer the sum replaces all elements, and rows that it does not name become 0.
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
        """Return the exception to raise after an update has failed."""
        refused = isinstance(error, (TypeError, ValueError))
        checked = self.state is None or type(self.optimizer).__module__.startswith("mpips.optimizers.")
        # Built-in optimizers check their arguments before they change anything. After any other error the unit is torn.
        if not (refused and checked):
            self.writes += 1
        why = str(error) if refused else f"{type(error).__name__}: {error}"
        return CollectiveError(f"key {self.key!r}: the server could not apply what was pushed: {why}")

    def begin_at(self, round_: int, pushes: Sequence[int] | None, state: State | None, step: int, torn: bool) -> None:
        """Begin a generation with this content.

        Args:
            round_: The number of complete rounds, which is also the number of rounds read of each contributor.
            pushes: In an asynchronous store, the number of pushes of each contributor instead.
        """
        self.round, self.done = round_, [round_] * len(self.contributors) if pushes is None else list(pushes)
        self.met = [0] * len(self.contributors)
        self.state, self.step, self.torn = state, step, torn
        for index, count in enumerate(self.done):
            self.words[1 + index] = count
        self.words[0] = round_ * self.blocks if pushes is None else 0
        if self.undo is not None:
            self.undo.begin_at(round_ if pushes is None else 0, self.stands_at, torn)
