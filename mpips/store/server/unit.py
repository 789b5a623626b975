"""A unit on its server: the elements that it keeps, who has pushed, and how far the open round is. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSequence, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from collectives.errors import CollectiveError
from mpips.optimizers.base import Optimizer, State, initial
from mpips.store.keys.row_sparse import RowSparse, update_rows
from mpips.store.recovery.memory.undo import Undo

Array = NDArray[Any]


class Source(Protocol):
    """A contribution's payload, wherever it lies."""

    local: bool
    """Whether it lies in memory of this node."""
    coded: bool
    """Whether it is compressed or row-sparse: then `ready(0)` is asked and it is taken whole, else block by block."""
    sparse: bool
    """Whether it is row-sparse."""
    empty: bool
    """Whether it counts as a round only."""
    steady: Array | None
    """All elements of the unit, where they lie in memory of this node and are there."""

    def ready(self, block: int) -> bool:
        """Whether this block can be read; asking may start to fetch it."""
        ...

    def part(self, block: int, start: int, stop: int) -> Array:
        """Elements [start, stop) of the unit, which are of this block; plain payloads only. To be used at once: what
        came as a message is forgotten when the next block is looked for."""
        ...

    def add_to(self, out: Array) -> None:
        """Add all elements to `out`. Coded payloads only."""
        ...

    def rows(self) -> RowSparse:
        """The payload as rows. Sparse payloads only."""
        ...

    def drop(self) -> None:
        """Nobody will ask for it."""
        ...


class Reply(NamedTuple):
    """Something a worker must hear. `what` names an `Op`: CONSUMED, GRANT or WARNING."""

    what: str
    worker: int
    unit: int
    round: int = 0
    text: str = ""
    rows: Array | None = None
    """GRANT: the rows that were asked for, all where None."""


Replies = list[Reply]


class Mirrors(Protocol):
    """Where a unit is sent that has changed; `mirrored` is False until it is there."""

    @property
    def quiet(self) -> bool:
        """Whether all units are there."""
        ...

    def changed(self, unit: Unit) -> None:
        """What the unit holds has changed."""
        ...

    def forget(self, units: Sequence[Unit]) -> None:
        """Units that nobody will use again."""
        ...


class Frozen:
    """Values and state of a unit as they were: the unit's own arrays until it is about to write there, then copies."""

    def __init__(self, unit: Unit) -> None:
        self.round, self.step = unit.round, unit.step
        self.arrays: list[Array] = [unit.stored, *(unit.state or ())]

    def copy(self) -> None:
        self.arrays = [array.copy() for array in self.arrays]


class Unit:
    """One unit on its server. `words[0]` counts finished blocks over all rounds (asynchronous: see `updates`),
    `words[1 + i]` the rounds of contributor i that have been read; all that readers on the same node need to see."""

    def __init__(
        self, number: int, key: int | str, stored: Array, words: MutableSequence[int] | memoryview,
        contributors: Sequence[int], block_elements: int, row_elements: int = 1, start: int = 0,
        undo: Undo | None = None,
    ) -> None:  # fmt: skip
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
        self.frozen: list[Frozen] = []  # to be copied before the next write
        self.torn = False  # some blocks are of a round that was never finished
        self.mirrored = True  # False: its mirror is to have what is stored before that changes, or is told to workers
        self.round = 0  # synchronous: rounds that are complete
        self.done = [0] * len(self.contributors)  # asynchronous: rounds of each contributor that are applied
        self.priority = 0
        self.readers: list[int] = []  # workers that read now
        self.pulls: list[tuple[int, int, Array | None]] = []  # (worker, its rounds, rows) that wait for a grant
        self.opened: float | None = 0.0  # when the open round began to wait; None: since the next look at the clock
        self.warned = False
        self.reset()

    def reset(self) -> None:
        """No contribution is there, and no block of a round is applied."""
        self.queues: list[deque[Source]] = [deque() for _ in self.contributors]
        self.missing = len(self.contributors)  # contributors with an empty queue
        self.arrivals: deque[int] = deque()  # asynchronous: positions in order of arrival
        self.active = -1  # asynchronous: the contributor whose push is being applied
        self.begin()

    def begin(self) -> None:
        """The next round begins."""
        self.writes = 0  # parts of what is stored that the open round has changed
        self.stepped = False  # whether the optimizer's step has been counted up for it
        self.block = 0  # blocks that are applied
        self.part = 0  # contributors whose payload, or block, has been added to what follows
        self.part_block = 0  # blocks of the next one that have
        self.total: Array | None = None  # sum of a block, or of all blocks, so far
        self.rows: RowSparse | None = None  # in its place as long as all contribute rows

    @property
    def waits(self) -> bool:
        """Whether anybody's contribution is here."""
        return self.missing < len(self.queues)

    @property
    def turn(self) -> int:
        """Position of the contributor whose next block is awaited."""
        return self.active if self.active >= 0 else self.part

    def bounds(self, block: int) -> tuple[int, int]:
        """Elements [start, stop) of a block."""
        start = block * self.block_elements
        return start, min(start + self.block_elements, self.stored.size)

    # ---- contributions

    def push(self, index: int, source: Source) -> None:
        """Queue a contribution of the contributor at `index`."""
        queue = self.queues[index]
        if not queue:
            self.missing -= 1
        queue.append(source)

    def pop(self) -> None:
        """Take the first contribution of every contributor."""
        missing = 0
        for queue in self.queues:
            queue.popleft()
            if not queue:
                missing += 1
        self.missing = missing

    def absent(self) -> list[int]:
        """Contributors that have not pushed to the open round."""
        return [worker for worker, queue in zip(self.contributors, self.queues) if not queue]

    def abandon(self) -> None:
        """The generation is over: no contribution will be read. What a round has begun to change stays, and is
        marked."""
        for queue in self.queues:
            for source in queue:
                source.drop()
        self.give_up()
        self.readers, self.pulls = [], []
        self.reset()

    # ---- what is stored; `recovery.memory.surviving` does more

    @property
    def stands_at(self) -> int | None:
        """The optimizer's step; None where there is no state yet."""
        return None if self.state is None else self.step

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """From the next update on; its state begins anew."""
        self.optimizer, self.state, self.step = optimizer, None, 0

    def begin_state(self, state: State) -> None:
        """The optimizer's first state."""
        self.state, self.step = state, 0

    def put_state(self, state: State | None, step: int) -> None:
        """Another state of the optimizer, from outside; None: it begins anew."""
        self.state, self.step = state, step

    def overwritten(self, torn: bool) -> None:
        """Values are being overwritten from outside, or (not `torn`) all of them have been."""
        self.torn = torn

    def give_up(self) -> None:
        """The open round is given up. What it has begun to change stays, and is marked."""
        if self.writes:
            self.torn = True
        elif self.stepped:
            self.step -= 1

    def open_write(self, start: int = 0, stop: int = 0) -> None:
        """What follows changes what is stored, in another step of the optimizer; first elements [start, stop)."""
        if self.frozen:
            self.thaw()
        if self.optimizer is not None:
            if self.state is None:
                self.begin_state(initial(self.optimizer, self.stored))
            self.step += 1
            self.stepped = True

    def pass_round(self) -> None:
        """The round, of which all contributions are empty, changes nothing."""

    def keep(self, start: int, stop: int) -> None:
        """Elements [start, stop) are about to be written, those before have been: to be called before `write`."""

    def keep_rows(self, gradient: RowSparse) -> RowSparse:
        """The same of the rows of a gradient, which is to be written as it comes back."""
        return gradient

    def thaw(self) -> None:
        """Copy what is frozen, so that it stays while this is written to."""
        for frozen in self.frozen:
            frozen.copy()
        self.frozen = []

    def write(self, start: int, stop: int, gradient: Array) -> None:
        """Update stored elements [start, stop) in the step that has begun; without optimizer: replace them."""
        if self.optimizer is None:
            self.stored[start:stop] = gradient
        else:
            assert self.state is not None
            state = [array[start:stop] for array in self.state]
            self.optimizer.update(self.stored[start:stop], gradient, state, self.step)
        self.writes += 1

    def write_rows(self, gradient: RowSparse) -> None:
        """Update the rows of a gradient, in the step that has begun; without optimizer: replace all, elsewhere by 0."""
        table = self.stored.reshape(gradient.shape)
        if self.optimizer is None:
            self.keep(0, self.stored.size)
            table[...] = 0
            table[gradient.rows] = gradient.values
        else:
            assert self.state is not None
            update_rows(self.optimizer, table, self.keep_rows(gradient), self.state, self.step)
        self.writes += 1

    def failed(self, error: Exception) -> CollectiveError:
        """What is raised where an update has raised an error."""
        refused = isinstance(error, (TypeError, ValueError))
        checked = self.state is None or type(self.optimizer).__module__.startswith("mpips.optimizers.")
        if not (refused and checked):  # built-in ones look at their arguments before they change anything
            self.writes += 1
        why = str(error) if refused else f"{type(error).__name__}: {error}"
        return CollectiveError(f"key {self.key!r}: the server could not apply what was pushed: {why}")

    def stands(
        self, round_: int, pushes: Sequence[int] | None, state: State | None, step: int, torn: bool
    ) -> None:  # fmt: skip
        """The unit begins a generation: so many rounds are complete, and have been read of every contributor; or, where
        asynchronous, so many `pushes` of each."""
        self.round, self.done = round_, [round_] * len(self.contributors) if pushes is None else list(pushes)
        self.state, self.step, self.torn = state, step, torn
        for index, count in enumerate(self.done):
            self.words[1 + index] = count
        self.words[0] = round_ * self.blocks if pushes is None else 0
