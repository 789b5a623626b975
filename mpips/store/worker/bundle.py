"""Small keys of one call that workers sum together as one vector.

A collective of a small key takes its latency, whatever the key's size, so a list of many would take that many times it:
those of one dtype are laid one behind the other and go through one collective (as MG-WFBP merges gradients, section 4,
here of what is there at once). Servers and optimizers still see every key by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from mpips.store.keys.key import Key

SMALL_BYTES = {True: 1 << 14, False: 1 << 16}
"""Of a key with a fast route, and of one without: longer ones go alone, as to copy them takes as long as they save."""
MOST_BYTES = 1 << 20
"""Of one vector."""
Array = NDArray[Any]


def steps(keys: Sequence[Key]) -> list[list[int]]:
    """Which keys of a list (by their places there) go together, in which order: the same on every worker."""
    result: list[list[int]] = []
    open_: dict[np.dtype, tuple[list[int], int]] = {}
    for place, key in enumerate(keys):
        if not 0 < key.nbytes <= SMALL_BYTES[key.fast is not None]:
            result.append([place])
            continue
        step, nbytes = open_.get(key.dtype, ([], 0))
        if not step or nbytes + key.nbytes > MOST_BYTES:
            step, nbytes = [], 0
            result.append(step)
        step.append(place)
        open_[key.dtype] = step, nbytes + key.nbytes
    return result


class Vectors:
    """Memory for one vector at a time, and for its sum; `shared`: the first lies where all processes of the node can
    read it."""

    def __init__(self, shared: bool) -> None:
        self._empty = arena.empty if shared else np.empty
        self._memory: dict[np.dtype, tuple[Array, Array]] = {}

    def room(self, like: Sequence[Array]) -> tuple[Array, Array, list[slice]]:
        """A vector as long as these 1-D arrays of one dtype, another for its sum, and where each one lies there."""
        dtype, cuts = like[0].dtype, [0, *accumulate(array.size for array in like)]
        if dtype not in self._memory or self._memory[dtype][0].size < cuts[-1]:
            size = max(cuts[-1], MOST_BYTES // dtype.itemsize)
            try:
                vector = self._empty(size, dtype)
            except MemoryError:  # of what the node shares: sums take any
                vector = np.empty(size, dtype)
            self._memory[dtype] = vector, np.empty(size, dtype)
        vector, total = (memory[: cuts[-1]] for memory in self._memory[dtype])
        return vector, total, [slice(*ends) for ends in pairwise(cuts)]

    def leave(self) -> None:
        """Take other memory from now on: messages of a generation that has ended may yet read or write this."""
        self._memory.clear()

    def lay(self, values: Sequence[Array]) -> tuple[Array, Array, list[Array]]:
        """Arrays one behind the other, room for the sum of that vector, and the parts of the sum."""
        vector, total, slices = self.room(values)
        np.concatenate(values, out=vector)
        return vector, total, [total[each] for each in slices]
