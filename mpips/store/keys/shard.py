"""A key's shards as a worker sees them: where on the servers its elements are, and how far their rounds are. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Shard:
    """Elements [start, stop) of a key's flattened array: one unit of the state of one server."""

    number: int
    """The unit's number on its server."""
    server: int
    start: int
    stop: int
    line: Any
    """To that server: a `transport` line."""
    contributors: tuple[int, ...]
    """Ranks of the workers that push it."""
    block_elements: int
    blocks: int
    least: int = 1
    """Blocks that a pull on a node waits for before it copies them, if so many are left (`sharding.pulled_at_once`)."""
    mine: int = -1
    """Word that counts this worker's pushes read by the server; -1 where it does not contribute."""
    words: Any = None
    """The unit's words in the server's memory, on one node: word 0 counts blocks summed over all rounds."""
    stored: Array | None = None
    """The unit's values in the server's memory, on one node."""
    outbox: Any = None
    """Through which ordinary arrays go to a server of this node."""
    copy: Any = None
    """The push of what lies there."""
    kept: Array | None = None
    """Between nodes: this worker's copy of what it pushed, until the server has asked for all of it."""
    credits: list[int] = field(default_factory=list)
    """Blocks that the server of another node has asked for."""
    sending: int = -1
    """The round whose blocks this worker sends to a server of another node."""
    told: int = 0
    """Between nodes: pushes that the server said it has read."""
    granted: bool = False
    """Between nodes: whether the server has let this worker's pull go on."""

    @property
    def local(self) -> bool:
        """Whether its server shares this worker's node."""
        return bool(self.line.local)

    def enough(self, done: int) -> int:
        """Of how many blocks a pull waits that has copied `done`."""
        return done + self.least if self.blocks - done >= 2 * self.least else self.blocks

    def consumed(self) -> int:
        """How many of this worker's pushes the server has read."""
        return int(self.words[self.mine]) if self.local else self.told


@dataclass
class Piece:
    """Elements [cuts[0], cuts[-1]) of a key, on one server; member i of this client owns [cuts[i], cuts[i+1])."""

    cuts: list[int]
    pushes: list[Shard]
    number: int
    """Its place among the pieces of the key."""
    reduced: Array | None = None
    """Memory for the client's sum of what this worker owns of it."""
