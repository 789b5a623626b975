"""A unit on its server: its values and optimizer's state, the sum and update of a block, who has pushed. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableSequence, Sequence
from typing import NamedTuple, NoReturn, TypeVar

from mpips.collectives.errors import CollectiveError
from mpips.collectives.kernels.sums import add_parts
from mpips.optimizers.base import Optimizer, State, initial
from mpips.optimizers.equation import update_by_sum
from mpips.store.keys.key import Array
from mpips.store.keys.row_sparse import RowSparse, sum_of, update_rows
from mpips.store.recovery.undo import Undo

K = TypeVar("K")
V = TypeVar("V")
SHOWN = 8
"""Names that a sentence shows of all that are known."""


class UnknownError(ValueError):
    """A worker's message names what this server does not have. Its sender hears the sentence."""


class Known(dict[K, V]):
    """Units, tables and their like by number or name. UnknownError where a message names another one."""

    def __init__(self, noun: str) -> None:
        super().__init__()
        self._noun = noun

    def __missing__(self, name: K) -> NoReturn:
        some = ", ".join(map(repr, list(self)[:SHOWN])) + ", ..." * (len(self) > SHOWN) or "none"
        raise UnknownError(f"there is no {self._noun} {name!r} in this store, which has {some}")


class Contribution:
    """A contribution's payload, wherever it lies (`server.sources`). As it stands here nothing has to be fetched."""

    local = True
    """Whether it lies in memory of this node."""
    coded = False
    """Whether it is compressed or row-sparse: then `ready(0)` is asked and it is taken whole, else block by block."""
    sparse = False
    """Whether it is row-sparse."""
    empty = False
    """Whether it counts as a round only."""
    steady: Array | None = None
    """All elements of the unit, where they lie in memory of this node and are there."""
    weight = 1
    """How much it counts in a round that a quorum closes."""

    def ready(self, block: int) -> bool:
        """Return whether this block can be read; asking may start to fetch it."""
        return True

    def part(self, block: int, start: int, stop: int) -> Array:
        """Return elements [start, stop) of the unit, which are of this block; plain payloads only. To be used at once:
        what came as a message is forgotten when the next block is looked for."""
        raise TypeError("the payload has no plain elements")

    def add_to(self, out: Array) -> None:
        """Add all elements to `out`. Coded payloads only."""
        raise TypeError("the payload is not coded")

    def rows(self) -> RowSparse:
        """Return the payload as rows. Sparse payloads only."""
        raise TypeError("the payload is not row-sparse")

    def whole(self) -> Array:
        """Return all elements in memory of their own. Payloads of a quorum only; all of it is there."""
        raise TypeError("the payload is taken block by block")

    def drop(self) -> None:
        """Drop it: nobody will ask for it."""


class Reply(NamedTuple):
    """Something a worker must hear. `what` names an `Op`: CONSUMED, GRANT, HELD or WARNING."""

    what: str
    worker: int
    unit: int
    round: int = 0
    text: str = ""
    rows: Array | None = None
    """GRANT: the rows that were asked for, all where None."""


Replies = list[Reply]


class UnitMirror:
    """The way of changed units to another server, which keeps a copy (`recovery.mirror`)."""

    @property
    def quiet(self) -> bool:
        """Return whether it has all that was sent."""
        raise NotImplementedError

    def changed(self, unit: Unit) -> None:
        """Send a unit that has changed."""
        raise NotImplementedError

    def forget(self, units: Iterable[Unit]) -> None:
        """Let it forget units that are no more."""
        raise NotImplementedError


class FrozenUnit:
    """Values and state of a unit as they were: the unit's own arrays until it is about to write there, then copies."""

    def __init__(self, unit: Unit) -> None:
        self.round, self.step = unit.round, unit.step
        self.arrays: list[Array] = [unit.stored, *(unit.state or ())]

    def copy(self) -> None:
        self.arrays = [array.copy() for array in self.arrays]


class Unit:
    """One unit on its server. `words[0]` counts finished blocks over all rounds (asynchronous: see `state`),
    `words[1 + i]` the rounds of contributor i that have been read; all that readers on the same node need to see."""

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
        self.number, self.key, self.stored, self.words = number, key, stored, words
        self.contributors = tuple(contributors)
        self.position = {worker: index for index, worker in enumerate(self.contributors)}
        self.block_elements = max(1, block_elements)
        self.blocks = max(1, -(-stored.size // self.block_elements))
        self.row_elements = row_elements
        self.start = start  # its first element in the key
        self.undo = undo
        """Where the store survives deaths."""
        self.optimizer: Optimizer | None = None
        self.state: State | None = None
        self.step = 0
        self.frozen: list[FrozenUnit] = []  # to be copied before the next write
        self.copy: Array | None = None  # with a quorum: of what is stored, which workers read
        self.torn = False  # some blocks are of a round that was never finished
        self.mirrored = True  # False: its mirror is to have what is stored before that changes, or is told to workers
        self.round = 0  # synchronous: rounds that are complete
        self.done = [0] * len(self.contributors)  # asynchronous: rounds of each contributor that are applied,
        self.met = [0] * len(self.contributors)  # and that were when all workers met last
        self.priority = 0
        self.readers: list[int] = []  # workers that read now
        self.pulls: list[tuple[int, int, Array | None]] = []  # (worker, its rounds, rows) that wait for a grant
        self.holds: list[tuple[int, int]] = []  # (worker, pushes) that wait for so many to be in it
        self.opened: float | None = 0.0  # when the open round began to wait; None: since the next look at the clock
        self.warned = False
        self.token = self.token_of_pulls = 0  # by which others see that it is summed, or read
        self.form = b""  # of records of its rounds
        self.is_long = self.is_timed = False  # whether its rounds are recorded always, and now
        self._counted: list[int] = []  # of each contributor's pushes
        self.reset()

    def reset(self) -> None:
        """Begin without contributions, and with no block of a round applied."""
        self.queues: list[deque[Contribution]] = [deque() for _ in self.contributors]
        self.missing = len(self.contributors)  # contributors with an empty queue
        self.arrivals: deque[int] = deque()  # asynchronous: positions in order of arrival
        self.active = -1  # asynchronous: the contributor whose push is being applied
        self.begin()

    def begin(self) -> None:
        """Begin the next round."""
        self.writes = 0  # parts of what is stored that the open round has changed
        self.stepped = False  # whether the optimizer's step has been counted up for it
        self.block = 0  # blocks that are applied
        self.part = 0  # contributors whose payload, or block, has been added to what follows
        self.part_block = 0  # blocks of the next one that have
        self.total: Array | None = None  # sum of a block, or of all blocks, so far
        self.rows: list[RowSparse] = []  # what is summed, in its place as long as all contribute rows

    def uncounted(self, asynchronous: bool) -> list[int]:
        """Return how many pushes of each contributor were applied since the last such call; 0 at the first one."""
        now = list(self.done) if asynchronous else [self.round] * len(self.contributors)
        before, self._counted = self._counted or now, now
        return [new - old for new, old in zip(now, before)]

    @property
    def queued(self) -> int:
        """Return how many contributions wait for others', or for their turn."""
        return sum(map(len, self.queues))

    @property
    def waits(self) -> bool:
        """Return whether anybody's contribution is here."""
        return self.missing < len(self.queues)

    @property
    def turn(self) -> int:
        """Return the position of the contributor whose next block is awaited."""
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
        """Drop all contributions, as the generation is over. What an open round has changed goes back, where
        the unit has an undo copy; else the unit is marked as torn."""
        for queue in self.queues:
            for source in queue:
                source.drop()
        self.give_up()
        self.readers, self.pulls, self.holds = [], [], []
        self.reset()

    # ---- what is stored; `recovery.memory` does more

    @property
    def stands_at(self) -> int | None:
        """Return the optimizer's step; None where there is no state yet."""
        return None if self.state is None else self.step

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Update by this optimizer from now on; its state begins anew."""
        self.optimizer, self.state, self.step = optimizer, None, 0

    def begin_state(self, state: State) -> None:
        """Take the optimizer's first state."""
        self.state, self.step = state, 0

    def put_state(self, state: State | None, step: int) -> None:
        """Take another state of the optimizer, from outside; None: it begins anew."""
        self.state, self.step = state, step

    def note_overwrite(self, torn: bool) -> None:
        """Note that values are being overwritten from outside, or (not `torn`) all of them have been."""
        self.torn = torn

    def give_up(self) -> None:
        """Give the open round up. What it has begun to change stays, and is marked."""
        if self.writes:
            self.torn = True
        elif self.stepped:
            self.step -= 1

    def open_write(self, start: int = 0, stop: int = 0) -> None:
        """Begin to change what is stored, in another step of the optimizer; first elements [start, stop)."""
        if self.frozen:
            self.thaw()
        if self.optimizer is not None:
            if self.state is None:
                self.begin_state(initial(self.optimizer, self.stored))
            self.step += 1
            self.stepped = True

    def pass_round(self) -> None:
        """Let a round pass that changes nothing: all its contributions are empty."""

    def keep_old(self, start: int, stop: int) -> None:
        """Prepare to write elements [start, stop), as those before have been; to be called before `write`."""

    def keep_old_rows(self, parts: Sequence[RowSparse]) -> Sequence[RowSparse]:
        """Prepare to write rows of the sum of gradients; return these as they are to be summed."""
        return parts

    def thaw(self) -> None:
        """Copy what is frozen, so that it stays while this is written to; workers read no older copy any more."""
        self.copy = None
        for frozen in self.frozen:
            frozen.copy()
        self.frozen = []

    def write(self, start: int, stop: int, parts: Sequence[Array]) -> None:
        """Update stored elements [start, stop) by the sum of gradients, in the step that has begun.

        They are added from first to last. Without optimizer the sum replaces the elements."""
        stored = self.stored[start:stop]
        if self.optimizer is None:
            self.writes += 1
            add_parts(parts, stored)
        else:
            assert self.state is not None
            state = [array[start:stop] for array in self.state]
            update_by_sum(self.optimizer, stored, parts, state, self.step)
            self.writes += 1

    def write_rows(self, parts: Sequence[RowSparse]) -> None:
        """Update the rows of gradients by their sum, in the step that has begun; without optimizer: replace all, those
        of other rows by 0."""
        table = self.stored.reshape(parts[0].shape)
        if self.optimizer is None:
            self.keep_old(0, self.stored.size)
            total = sum_of(parts)
            table[...] = 0
            table[total.rows] = total.values
        else:
            assert self.state is not None
            update_rows(self.optimizer, table, self.keep_old_rows(parts), self.state, self.step)
        self.writes += 1

    def failed(self, error: Exception) -> CollectiveError:
        """Return what is raised where an update has raised an error."""
        refused = isinstance(error, (TypeError, ValueError))
        checked = self.state is None or type(self.optimizer).__module__.startswith("mpips.optimizers.")
        if not (refused and checked):  # built-in ones look at their arguments before they change anything
            self.writes += 1
        why = str(error) if refused else f"{type(error).__name__}: {error}"
        return CollectiveError(f"key {self.key!r}: the server could not apply what was pushed: {why}")

    def begin_at(self, round_: int, pushes: Sequence[int] | None, state: State | None, step: int, torn: bool) -> None:
        """Begin a generation with so many rounds complete, and read of every contributor; or, where asynchronous, with
        so many `pushes` of each."""
        self.round, self.done = round_, [round_] * len(self.contributors) if pushes is None else list(pushes)
        self.met = [0] * len(self.contributors)
        self.state, self.step, self.torn = state, step, torn
        for index, count in enumerate(self.done):
            self.words[1 + index] = count
        self.words[0] = round_ * self.blocks if pushes is None else 0
