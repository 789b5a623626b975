"""Keys as a worker knows them: what all agreed on, where the elements are, how often they were pushed. No I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpips.lines import Line, Repeated
from mpips.outbox import Outbox

if TYPE_CHECKING:
    from mpips.short import Short

Array = NDArray[Any]


@dataclass
class Part:
    """One unit of a key, as a worker sees it."""

    number: int
    server: int
    start: int
    stop: int
    line: Line
    contributors: tuple[int, ...]
    block_elements: int
    blocks: int
    least: int = 1
    """Blocks that a pull on a node waits for before it copies them, if so many are left (`sharding.pulled_at_once`)."""
    mine: int = -1
    """Word that counts this worker's pushes read by the server; -1 where it does not contribute."""
    words: Any = None
    stored: Array | None = None
    outbox: Outbox | None = None
    """Through which ordinary arrays go to a server of this node."""
    copy: Repeated | None = None
    """The push of what lies there."""
    kept: Array | None = None
    credits: list[int] = field(default_factory=list)
    """Blocks that the server of another node has asked for."""
    sending: int = -1
    """The round whose blocks this worker sends to a server of another node."""
    said: int = 0
    """The last round to which this worker, where it does not go the short way, has contributed or refused to."""
    told: int = 0
    """Between nodes: pushes that the server said it has read."""
    granted: bool = False
    given_up: int = 0
    """Grants still to come that nobody waits for any more."""
    failed: int = 0
    """The last round that failed on this unit."""

    @property
    def local(self) -> bool:
        return self.line.local

    def enough(self, done: int) -> int:
        """Of how many blocks a pull waits that has copied `done`."""
        return done + self.least if self.blocks - done >= 2 * self.least else self.blocks

    def consumed(self) -> int:
        """How many of this worker's pushes the server has read."""
        return int(self.words[self.mine]) if self.local else self.told

    def settled(self) -> int:
        """The last of this worker's pushes between nodes that the server has read, or for which it has no use."""
        return max(self.told, self.failed)


@dataclass
class Piece:
    """Elements [cuts[0], cuts[-1]) of a key, on one server; member i of this client owns [cuts[i], cuts[i+1])."""

    cuts: list[int]
    pushes: list[Part]
    number: int
    """Its place among the pieces of the key: the tag of its messages inside the client."""
    reduced: Array | None = None


class Failure(NamedTuple):
    """Why a round failed."""

    text: str
    event: str
    """Names the bad call that made it fail: its failures of several keys are raised once. "" where there was none."""
    timed_out: bool


@dataclass
class Key:
    """One key, as a worker knows it: what all agreed on, its parts, and how often it was pushed."""

    name: int | str
    shape: tuple[int, ...]
    dtype: np.dtype
    parts: list[Part] = field(default_factory=list)
    pushes: list[Part] = field(default_factory=list)
    """Parts that this worker contributes to."""
    pieces: list[Piece] = field(default_factory=list)
    """What a server has of the key, or a chunk of that; the step of the pipeline inside a client."""
    short: Short | None = None
    """The short way, where it has one (`mpips.short`)."""
    round: int = 0
    excused: int = 0
    """The last round whose failure this worker has raised, or caused and raised by itself."""
    excuse: Failure | None = None
    """That failure."""
    raised: int = 0
    """The last round begun when a failure was last raised: that error stood for all rounds up to it, but for those that
    have waited too long, of which a later push must hear, as it would wait for them."""
    failed: dict[int, Failure] = field(default_factory=dict)
    """Rounds that failed and were not yet raised."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize
