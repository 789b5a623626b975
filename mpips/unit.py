"""A unit on its server: stored elements, who has pushed, how far the open round is; what the state reads and says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, MutableSequence, Sequence
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from mpips.optimizers import State
from mpips.row_sparse import RowSparse

Array = NDArray[Any]


class Source(Protocol):
    """A contribution's payload, wherever it lies."""

    local: bool
    """Whether it lies in memory of this node."""
    coded: bool
    """Whether it is compressed or row-sparse: then `ready(0)` is asked and it is taken whole, else block by block."""
    sparse: bool
    """Whether it is row-sparse."""
    steady: Array | None
    """All elements of the unit, where they lie in memory of this node and are there."""

    complete: bool
    """Whether all of it comes, even if its worker takes it back."""

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
        """Nobody will ask for it: its round has failed."""
        ...


def drop(contributions: Iterable[Source | str]) -> None:
    """Let go of contributions that nobody will read."""
    for source in contributions:
        if not isinstance(source, str):
            source.drop()


class Reply(NamedTuple):
    """Something a worker must hear. `what` names an `Op`: CONSUMED, GRANT, FAILED or WARNING."""

    what: str
    worker: int
    unit: int
    round: int = 0
    text: str = ""
    timed_out: bool = False
    rows: Array | None = None
    """GRANT: the rows that were asked for, all where None."""


class Unit:
    """One unit on its server. `words[0]` counts finished blocks over all rounds (asynchronous: see `reads`),
    `words[1 + i]` the rounds of contributor i that have been read; all that readers on the same node need to see."""

    def __init__(
        self, number: int, key: int | str, stored: Array, words: MutableSequence[int] | memoryview,
        contributors: Sequence[int], block_elements: int, row_elements: int = 1,
    ) -> None:  # fmt: skip
        self.number, self.key, self.stored, self.words = number, key, stored, words
        self.contributors = tuple(contributors)
        self.position = {worker: index for index, worker in enumerate(self.contributors)}
        self.block_elements = max(1, block_elements)
        self.blocks = max(1, -(-stored.size // self.block_elements))
        self.row_elements = row_elements
        self.queues: list[deque[Source | str]] = [deque() for _ in self.contributors]  # str: why a push cannot come
        self.missing = len(self.contributors)  # contributors with an empty queue
        self.arrivals: deque[int] = deque()  # asynchronous: positions in order of arrival
        self.done = [0] * len(self.contributors)  # rounds of each contributor that are finished
        self.round = 0
        self.block = 0
        self.part = 0  # contributors already summed into the scratch of this block
        self.ahead = 0  # contributors already in `rows` or `accumulator`, whole
        self.ahead_block = 0
        self.accumulator: Array | None = None
        self.total: Array | None = None  # sum of a block so far, kept while the next contributor's is awaited
        self.rows: RowSparse | None = None  # in place of the accumulator as long as all contribute rows
        self.active = -1  # asynchronous: the contributor whose push is being applied
        self.readers: list[int] = []  # workers that read now
        self.poison = ""
        self.opened: float | None = 0.0  # when the open round began to wait; None: since the next look at the clock
        self.warned = False
        self.state: State | None = None
        self.step = 0
        self.priority = 0
        self.pulls: list[tuple[int, int, Array | None]] = []  # (worker, its rounds, rows) that wait for a grant

    def push(self, index: int, item: Source | str) -> None:
        """Queue a contribution of the contributor at `index`."""
        queue = self.queues[index]
        if not queue:
            self.missing -= 1
        queue.append(item)

    def counts(self, index: int) -> bool:
        """Whether blocks are updated already by the next contribution of the contributor at `index`, and all of it
        comes: then it is too late to take it back."""
        if not self.block or not self.queues[index] or self.active not in (-1, index):
            return False
        source = self.queues[index][0]
        return not isinstance(source, str) and source.complete

    def withdraw(self, index: int, place: int, sentence: str) -> None:
        """Replace a contribution in the queue of the contributor at `index`."""
        queue = self.queues[index]
        if not isinstance(queue[place], str):
            drop([queue[place]])
            queue[place] = sentence

    def pop(self) -> None:
        """Take the first contribution of every contributor that has one."""
        self.missing = 0
        for queue in self.queues:
            if queue:
                queue.popleft()
            if not queue:
                self.missing += 1

    @property
    def waits(self) -> bool:
        """Whether anybody's contribution is here."""
        return self.missing < len(self.queues)

    @property
    def turn(self) -> int:
        """Position of the contributor whose next block is awaited."""
        if self.active >= 0:
            return self.active
        return self.part or self.ahead

    def bounds(self, block: int) -> tuple[int, int]:
        """Elements [start, stop) of a block."""
        start = block * self.block_elements
        return start, min(start + self.block_elements, self.stored.size)
