"""Record one key on a worker: what all agreed on, where its elements lie on the servers, how often it was pushed."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric.tasks import Task
from mpips.collectives.recorder.own import LONG_BYTES

Array = NDArray[Any]
Name = int | str
SHOWN = 4
"""Keys that a sentence names."""
NO_MARKS = {"push": 0, "pull": 0, "pushpull": 0}


class Fast(Protocol):
    """The fast path of one key, bound at `init`, for C-contiguous arrays of the key's shape and dtype.

    Every call does at once what takes no more than a moment, and returns None, or the task of what is left. Nothing
    has been begun where a call returns a task that does all of it. Used only while no other operation is under way.
    """

    lists: bool
    """Whether keys of lists take it, too: `post` all, `read` all, `pull` all."""

    def push(self, array: Array, priority: int) -> Task[None] | None:
        """Contribute; when it is over the array may be overwritten."""

    def post(self, array: Array, priority: int) -> Task[None] | None:
        """Push, but without waiting until the servers have read what they read in place."""

    def wait_until_read(self) -> Task[None] | None:
        """Wait until they have, after a `post` that left nothing."""

    def pull(self, out: Array) -> Task[None] | None:
        """Write the key's value into `out`."""

    def pushpull(self, array: Array, out: Array, priority: int) -> Task[None] | None:
        """Both; `out` may be `array`. It may read the result behind the servers, while they sum what follows."""


class FastList(Protocol):
    """The fast path of a list of keys that each have one, in one step; `None` and tasks as in `Fast`."""

    def push(self, keys: Sequence[Key], arrays: Sequence[Array], priority: int) -> Task[None] | None: ...

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None] | None: ...

    def pushpull(
        self, keys: Sequence[Key], arrays: Sequence[Array], outs: Sequence[Array], priority: int
    ) -> Task[None] | None:
        """Both, wherever `outs` and `arrays` lie."""


class Rounds(dict[Name, int]):
    """Map every key and table to the last complete round, at which it stands after `recover`.

    In an asynchronous store: how many pushes of this worker, or of its client, are in it."""

    step: int | None = None
    """The round that all keys and tables stand at which were ever pushed; None where they stand at several. In an
    asynchronous store, the lowest of them."""
    torn: tuple[Name, ...] = ()
    """Keys of whose last round some blocks were applied and others not: load a checkpoint of them."""


@dataclass
class Key:
    """One key, as a worker knows it."""

    name: Name
    shape: tuple[int, ...]
    dtype: np.dtype
    round: int = 0
    """How often this worker has begun to push it; with `recover`, the last round that is complete."""
    shards: list[Shard] = field(default_factory=list)
    pushes: list[Shard] = field(default_factory=list)
    """Shards that this worker contributes to."""
    pieces: list[Piece] = field(default_factory=list)
    """What a server has of the key, or a chunk of that: the step of the pipeline inside a client."""
    fast: Fast | None = None
    """The fast path, where it has one."""
    weight: int = 1
    """How much this worker's next push counts in a round that a quorum closes."""
    replaced: bool = True
    """Whether its value may have changed otherwise than by rounds, since it was last pulled by its version."""
    marks: dict[str, int] = field(default_factory=NO_MARKS.copy, compare=False, repr=False)
    """By which word others see each call of it on this rank's page; 0: not known yet, or the call is timed."""
    noun = "key"

    def __post_init__(self) -> None:
        self.is_long = self.nbytes >= LONG_BYTES
        """Whether each call of it is timed."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def floats(self) -> bool:
        """Return whether its elements are floats, bfloat16 among them: optimizers and compression are for such keys."""
        return self.dtype.kind not in "iu"

    @property
    def nbytes(self) -> int:
        """Bytes of a host array of it."""
        return self.size * self.dtype.itemsize


def label(what: str, names: Sequence[Name]) -> str:
    """Return what workers compare, and sentences show: "push of key 'w'".

    Of more than a few keys it tells their number, and a checksum that tells apart whatever is not shown."""
    keys = f"key{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:SHOWN]))}"
    if len(names) > SHOWN:
        checksum = zlib.crc32(repr(list(names)).encode())
        keys += f", ... ({len(names)} in all, {checksum:08x})"
    return f"{what} of {keys}"


class LineToServer(Protocol):
    """Send frames to a server (`transport.lines`); fields as in `transport.frames.Frame`."""

    local: bool

    def post(
        self,
        op: int,
        unit: int = 0,
        round_: int = 0,
        region: tuple[int, ...] = ...,
        coding: int = 0,
        priority: int = 0,
        aux: int = 0,
        token: int = 0,
        flags: int = 0,
    ) -> None: ...

    def repost(self, frame: bytes, round_: int) -> None: ...

    def post_body(
        self, body: bytes, op: int, unit: int = 0, round_: int = 0, token: int = 0, flags: int = 0
    ) -> None: ...

    def waiting(self) -> bool: ...

    def stopped(self) -> bool: ...


@dataclass
class Shard:
    """Elements [start, stop) of a key's flattened array: one unit of the state of one server."""

    number: int
    """The unit's number on its server."""
    server: int
    start: int
    stop: int
    line: LineToServer
    """To that server; None in a plan that a server makes."""
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
    held: int = -1
    """Asynchronous: how many pushes are in it, while the server keeps it as it is for this worker."""
    granted: bool = False
    """Between nodes: whether the server has let this worker's pull go on."""

    def __post_init__(self) -> None:
        self.local = self.line is not None and self.line.local
        """Whether its server shares this worker's node."""

    def enough(self, done: int) -> int:
        """Of how many blocks a pull waits that has copied `done`."""
        return done + self.least if self.blocks - done >= 2 * self.least else self.blocks

    def consumed(self) -> int:
        """Return how many of this worker's pushes the server has read."""
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
