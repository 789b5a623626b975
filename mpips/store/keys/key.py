"""A key as a worker knows it: what all agreed on, where its elements are, how often it was pushed. No I/O."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mpips.store.keys.shard import Piece, Shard
from mpips.store.runtime.tasks import Task

Array = NDArray[Any]
Name = int | str
SHOWN = 4
"""Keys that a sentence names."""


class Fast(Protocol):
    """The fast route of one key, bound at `init`, for C-contiguous arrays of the key's shape and dtype.

    Every call does at once what takes no more than a moment, and returns None, or the task of what is left. Nothing
    has been begun where a call returns a task that does all of it. Used only while no other operation is under way.
    """

    lists: bool
    """Whether keys of lists take it, too: `post` all, `read` all, `pull` all."""

    def push(self, array: Array, priority: int) -> Task[None] | None:
        """Contribute; when it is over the array may be overwritten."""
        ...

    def post(self, array: Array, priority: int) -> Task[None] | None:
        """Push, but without waiting until the servers have read what they read in place."""
        ...

    def read(self) -> Task[None] | None:
        """Wait until they have, after a `post` that left nothing."""
        ...

    def pull(self, out: Array) -> Task[None] | None:
        """Write the key's value into `out`."""
        ...

    def pushpull(self, array: Array, out: Array, priority: int) -> Task[None] | None:
        """Both; `out` may be `array`. It may read the result behind the servers, while they sum what follows."""
        ...


class FastList(Protocol):
    """The fast route of a list of keys that each have one, in one step; `None` and tasks as in `Fast`."""

    def push(self, keys: Sequence[Key], arrays: Sequence[Array], priority: int) -> Task[None] | None: ...

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> Task[None] | None: ...

    def pushpull(
        self, keys: Sequence[Key], arrays: Sequence[Array], outs: Sequence[Array], priority: int
    ) -> Task[None] | None:
        """Both, wherever `outs` and `arrays` lie."""
        ...


class Rounds(dict[Name, int]):
    """What `recover` found: of every key the last complete round, which it stands at; in an asynchronous store, how
    many pushes of this worker, or of its client, are in it."""

    step: int | None = None
    """The round that all keys stand at which were ever pushed; None where they stand at several. In an asynchronous
    store, the lowest of them."""
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
    """The fast route, where it has one."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def floats(self) -> bool:
        """Whether its elements are floats, bfloat16 among them: optimizers and compression are for such keys."""
        return self.dtype.kind not in "iu"

    @property
    def nbytes(self) -> int:
        """Bytes of a host array of it."""
        return self.size * self.dtype.itemsize


def label(what: str, names: Sequence[Name]) -> str:
    """What workers compare, and sentences show: "push of key 'w'"; of more than a few keys their number, and a
    checksum that tells apart whatever is not shown."""
    keys = f"key{'' if len(names) == 1 else 's'} {', '.join(map(repr, names[:SHOWN]))}"
    if len(names) > SHOWN:
        checksum = zlib.crc32(repr(list(names)).encode())
        keys += f", ... ({len(names)} in all, {checksum:08x})"
    return f"{what} of {keys}"
