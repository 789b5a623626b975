"""One key on a worker: its shape, where its elements lie on the servers, how often it was pushed, its fast path."""

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
# how many keys an error message names
SHOWN = 4
NO_MARKS = {"push": 0, "pull": 0, "pushpull": 0}


class Fast(Protocol):
    """The fast path of one key, bound at `init`, for C-contiguous arrays of the key's shape and dtype.

    Each call waits for a moment at most. It returns None when it is done, or a task that does the rest. A call that
    could not begin at all returns a task that does everything. Used only while no other operation is under way.
    """

    # True if keys of a list take it too: `post` for all, `wait_until_read` for all, `pull` for all
    lists: bool

    def push(self, array: Array, priority: int) -> Task[None] | None:
        """Contribute to the next round. When it is over the array may be overwritten."""

    def post(self, array: Array, priority: int) -> Task[None] | None:
        """Contribute to the next round, without waiting until the servers have read arrays that they read in place."""

    def wait_until_read(self) -> Task[None] | None:
        """Wait until the servers have read the array, after a `post` that returned None."""

    def pull(self, out: Array) -> Task[None] | None:
        """Write the key's value into `out`."""

    def pushpull(self, array: Array, out: Array, priority: int) -> Task[None] | None:
        """Push and pull. `out` may be `array`. Blocks may be read while the servers still sum later ones."""


class FastList(Protocol):
    """The fast path of a list of keys that each have a fast path, in one step. Returns None or tasks as `Fast` does."""

    def push(self, keys: Sequence[Key], arrays: Sequence[Array], priority: int) -> Task[None] | None: ...

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None] | None: ...

    def pushpull(
        self, keys: Sequence[Key], arrays: Sequence[Array], outs: Sequence[Array], priority: int
    ) -> Task[None] | None:
        """Push and pull. Arrays of `outs` and `arrays` may overlap in any way."""


class Rounds(dict[Name, int]):
    """The last complete round of every key and table, which it holds after `recover`.

    In an asynchronous store: the number of pushes of this worker, or of its client, that are in it.

    Attributes:
        step: The round that all keys and tables hold that were ever pushed. None if they hold different rounds. In an
            asynchronous store, the lowest of them.
        torn: Keys of whose last round some blocks were applied and others were not: load a checkpoint of them.
    """

    step: int | None = None
    torn: tuple[Name, ...] = ()


@dataclass
class Key:
    """One key, as a worker knows it."""

    name: Name
    shape: tuple[int, ...]
    dtype: np.dtype
    # number of pushes that this worker has begun; after `recover`, the last round that is complete
    round: int = 0
    shards: list[Shard] = field(default_factory=list)
    # the shards that this worker contributes to
    pushes: list[Shard] = field(default_factory=list)
    # the parts of the key that go through the pipeline inside a client one by one: each server's part, or chunks of it
    pieces: list[Piece] = field(default_factory=list)
    # the fast path, or None if it has none
    fast: Fast | None = None
    # the weight of this worker's next push in a round that a quorum closes
    weight: int = 1
    # True if its value may have changed other than by rounds since it was last pulled with its version
    replaced: bool = True
    # Operation -> the mark by which others see a call of it on this rank's page. 0: not known yet, or the call is
    # timed.
    marks: dict[str, int] = field(default_factory=NO_MARKS.copy, compare=False, repr=False)
    noun = "key"

    def __post_init__(self) -> None:
        # each call of a long key is timed
        self.is_long = self.nbytes >= LONG_BYTES

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def floats(self) -> bool:
        """True if its elements are floats, bfloat16 included. Only such keys can have optimizers and compression."""
        return self.dtype.kind not in "iu"

    @property
    def nbytes(self) -> int:
        """Size of the whole array in bytes."""
        return self.size * self.dtype.itemsize


def label(what: str, names: Sequence[Name]) -> str:
    """Return the text by which workers compare calls, and which messages show, such as "push of key 'w'".

    For more than a few keys it has their number and a checksum, so that different lists have different texts.
    """
    keys = f"key{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:SHOWN]))}"
    if len(names) > SHOWN:
        checksum = zlib.crc32(repr(list(names)).encode())
        keys += f", ... ({len(names)} in all, {checksum:08x})"
    return f"{what} of {keys}"


class LineToServer(Protocol):
    """Sends frames to a server (`transport.lines`). Fields as in `transport.frames.Frame`."""

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

    # the number of the unit on its server
    number: int
    server: int
    start: int
    stop: int
    # the line to the server; None in a plan that a server makes
    line: LineToServer
    # ranks of the workers that push it
    contributors: tuple[int, ...]
    block_elements: int
    blocks: int
    # number of blocks that a pull on a node waits for before it copies them, while enough are left (see
    # `sharding.pulled_at_once`)
    least: int = 1
    # index of the word that counts this worker's pushes read by the server; -1 if it does not contribute
    mine: int = -1
    # on one node: the unit's words in the server's memory; word 0 counts the blocks summed over all rounds
    words: Any = None
    # on one node: the unit's values in the server's memory
    stored: Array | None = None
    # on one node: the outbox for arrays that the server cannot read in place
    outbox: Any = None
    # on one node: the push of the outbox's content
    copy: Any = None
    # on one node: the compressed or row-sparse payload that the server may still read
    kept: Array | None = None
    # between nodes: blocks that the server has asked for
    credits: list[int] = field(default_factory=list)
    # between nodes: number of pushes that the server has read
    told: int = 0
    # in an asynchronous store: number of pushes in it, while the server holds it unchanged for this worker
    held: int = -1
    # True once the server has granted this worker's read, or (between nodes) has received its first value
    granted: bool = False

    def __post_init__(self) -> None:
        # True if the server is on this worker's node
        self.local = self.line is not None and self.line.local

    def enough(self, done: int) -> int:
        """Return the number of blocks that a pull waits for after it has copied `done` blocks."""
        return done + self.least if self.blocks - done >= 2 * self.least else self.blocks

    def consumed(self) -> int:
        """Return the number of this worker's pushes that the server has read."""
        return int(self.words[self.mine]) if self.local else self.told


@dataclass
class Piece:
    """Elements [cuts[0], cuts[-1]) of a key, on one server. Member i of this client owns [cuts[i], cuts[i+1])."""

    cuts: list[int]
    pushes: list[Shard]
    # its index among the pieces of the key
    number: int
    # memory for the client's sum of the part that this worker owns
    reduced: Array | None = None
