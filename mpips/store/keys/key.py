"""A worker's record of a key: its shape, its parts on servers (*shards*), its round, and its fast path.

The server's name for a shard is *unit*. The server sums a shard block by block. The *words* of a unit are counters in
memory that workers on the server's node can read. An *outbox* is memory into which a worker copies arrays that a server
cannot read in place.
"""

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
# largest number of keys that an error message names
SHOWN = 4
NO_MARKS = {"push": 0, "pull": 0, "pushpull": 0}


class Fast(Protocol):
    """The fast path of one key, chosen at `init`, for C-contiguous arrays of the key's shape and dtype.

    A call waits only for a moment. It returns None if it has finished. Otherwise it returns a task that does the
    remaining work, or all of it if the call could not begin. The fast path is used only while no other operation runs.
    """

    # True if a call with a list of keys may use this fast path. Such a call runs `post` for all keys, then
    # `wait_until_read` for all, then `pull`.
    lists: bool

    def push(self, array: Array, priority: int) -> Task[None] | None:
        """Contribute to the next round. Once the push has finished, the array may be overwritten."""

    def post(self, array: Array, priority: int) -> Task[None] | None:
        """Contribute to the next round, without waiting until servers have read the array (see `wait_until_read`)."""

    def wait_until_read(self) -> Task[None] | None:
        """Wait until the servers have read the array, after a `post` that returned None."""

    def pull(self, out: Array) -> Task[None] | None:
        """Write the key's value into `out`."""

    def pushpull(self, array: Array, out: Array, priority: int) -> Task[None] | None:
        """Push, then pull into `out`, which may be `array`.

        Summed blocks are read while the servers sum later blocks.
        """


class FastList(Protocol):
    """The fast path of a list of keys, for all of them in one step.

    Its methods return None or a task, as `Fast` does.
    """

    def push(self, keys: Sequence[Key], arrays: Sequence[Array], priority: int) -> Task[None] | None: ...

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None] | None: ...

    def pushpull(
        self, keys: Sequence[Key], arrays: Sequence[Array], outs: Sequence[Array], priority: int
    ) -> Task[None] | None:
        """Push, then pull. The arrays in `outs` and in `arrays` may overlap in any way."""


class Rounds(dict[Name, int]):
    """Name of a key or collection -> its round after `recover`, which is the last complete round.

    In an asynchronous store the number is instead the number of applied pushes of this worker or its client.

    Attributes:
        step: In a synchronous store the common round of all keys and collections that were ever pushed, or None if
            their rounds differ. In an asynchronous store the smallest of the numbers.
        torn: Keys and collections whose last round was applied only in part. They must be loaded from a checkpoint.
    """

    step: int | None = None
    torn: tuple[Name, ...] = ()


class Pushed(Protocol):
    """Anything that workers push to in rounds: a key, or a collection of a service (`worker.interface`)."""

    # number of rounds that this worker has pushed; after `recover`, the number of those rounds that still count
    round: int

    @property
    def name(self) -> Name: ...

    @property
    def noun(self) -> str:
        """The word for this kind of thing in error messages, such as "key"."""


@dataclass
class Key:
    """A worker's record of one key."""

    name: Name
    shape: tuple[int, ...]
    dtype: np.dtype
    # number of pushes that this worker has begun; after `recover`, the last complete round
    round: int = 0
    shards: list[Shard] = field(default_factory=list)
    # the shards that this worker contributes to
    pushes: list[Shard] = field(default_factory=list)
    # The parts of the key that a client sums, pushes and pulls one by one. A piece is one server's part of the key, or
    # a chunk of such a part.
    pieces: list[Piece] = field(default_factory=list)
    # the fast path, or None if the key has none
    fast: Fast | None = None
    # the weight of this worker's next push in a store with a quorum; other stores ignore it
    quorum_weight: int = 1
    # True if something other than a round may have changed the value since the last pull that returned a version
    replaced: bool = True
    # Name of an operation -> the number that shows other processes that this worker is in this operation of the key
    # (see `worker.route.CallMarks`). It is 0 if no call has been made yet, or if calls are timed.
    marks: dict[str, int] = field(default_factory=NO_MARKS.copy, compare=False, repr=False)
    noun = "key"

    def __post_init__(self) -> None:
        # Calls of long keys are always timed.
        self.is_long = self.nbytes >= LONG_BYTES

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def floats(self) -> bool:
        """True if the elements are floats, bfloat16 included. Only float keys can have optimizers and compression."""
        return self.dtype.kind not in "iu"

    @property
    def nbytes(self) -> int:
        """Size of the whole array in bytes."""
        return self.size * self.dtype.itemsize


def label(what: str, names: Sequence[Name]) -> str:
    """Describe a call, for example "push of key 'w'". Used in error messages, and to compare the calls of workers.

    A description of more than SHOWN keys has their number and a checksum, so that different lists of keys have
    different descriptions.
    """
    keys = f"key{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:SHOWN]))}"
    if len(names) > SHOWN:
        checksum = zlib.crc32(repr(list(names)).encode())
        keys += f", ... ({len(names)} in all, {checksum:08x})"
    return f"{what} of {keys}"


class LineToServer(Protocol):
    """A connection that sends frames to a server (`transport.lines`).

    The arguments of `post` become fields of the frame (`transport.frames.Frame`).
    """

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
    """Elements [start, stop) of a key's flattened array, which one server keeps as one unit."""

    # the number of the unit on its server
    number: int
    server: int
    start: int
    stop: int
    # the connection to the server; None on servers and spares, which make shards only to plan a recovery
    line: LineToServer
    # ranks of the workers that push it
    contributors: tuple[int, ...]
    block_elements: int
    blocks: int
    # On one node, a pull waits until this many blocks are ready and copies them together (`sharding.pulled_at_once`).
    # If fewer than 2 * least blocks are left, the pull waits for all remaining blocks.
    least: int = 1
    # Index in `words` of the counter of this worker's pushes that the server has read. -1 if this worker does not push
    # the shard.
    mine: int = -1
    # on one node: the unit's words in the server's memory; word 0 is the number of blocks summed in all rounds so far
    words: Any = None
    # on one node: the unit's values in the server's memory
    stored: Array | None = None
    # on one node: the outbox for arrays that the server cannot read in place
    outbox: Any = None
    # on one node: the `RepeatedPush` of the outbox
    outbox_push: Any = None
    # on one node: the compressed or row-sparse payload of the last push, which the server may still read
    kept: Array | None = None
    # between nodes: numbers of the blocks that the server has asked for
    credits: list[int] = field(default_factory=list)
    # between nodes: number of this worker's pushes that the server has reported as read
    told: int = 0
    # In an asynchronous store: the number of pushes that the shard contains, while the server keeps it unchanged for
    # this worker. Otherwise -1.
    held: int = -1
    # True once the server has granted this worker's read. Between nodes: True once the server has received the first
    # value.
    granted: bool = False

    def __post_init__(self) -> None:
        # True if the server is on this worker's node
        self.local = self.line is not None and self.line.local

    def enough(self, done: int) -> int:
        """Return the number of blocks that must be ready before a pull that has copied `done` blocks copies more."""
        return done + self.least if self.blocks - done >= 2 * self.least else self.blocks

    def consumed(self) -> int:
        """Return the number of this worker's pushes that the server has read."""
        return int(self.words[self.mine]) if self.local else self.told


@dataclass
class Piece:
    """Elements [cuts[0], cuts[-1]) of a key, on one server. Member i of this client owns [cuts[i], cuts[i+1])."""

    cuts: list[int]
    pushes: list[Shard]
    # index of the piece among the pieces of the key
    number: int
    # memory for the elements that this worker owns, summed over the client's members
    reduced: Array | None = None
