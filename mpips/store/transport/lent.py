"""Pushes of arrays in node-shared memory, which servers read where they lie."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from collectives.fabric import arena
from mpips.store.keys.shard import Shard
from mpips.store.transport.line import Repeated

Array = NDArray[Any]


class Lent:
    """The pushes of one array to these shards; kept, as a training loop pushes the same again."""

    __slots__ = ("_last", "_pushes", "_shards")

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = shards
        self._last: Callable[[], Array | None] = lambda: None
        self._pushes: list[Repeated] = []

    def of(self, array: Array) -> list[Repeated]:
        """For every shard its push of its part of the array, which holds the whole key, C-contiguous. Empty where the
        array lies in other memory."""
        if self._last() is not array:
            region = arena.locate(array)
            size = array.itemsize
            pushes = [] if region is None else [
                Repeated(shard.line, shard.number, region._replace(
                    offset=region.offset + shard.start * size, nbytes=(shard.stop - shard.start) * size
                ))
                for shard in self._shards
            ]  # fmt: skip
            last = weakref.ref(array)
            self._last, self._pushes = last, pushes  # at once, whenever an interrupt comes
        return self._pushes
