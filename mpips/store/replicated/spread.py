"""Long values spread over the workers of a node: whose memory the block of each is in, told once, at `init`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from collectives.fabric.arena import Region
from collectives.schedule.model import cut
from mpips.store.keys.key import Key
from mpips.store.replicated.replica import Replica

Array = NDArray[Any]
LEAST_BYTES = 64 << 10
"""Of values that are longer, a list's sum leaves a worker its own block. Shorter ones are copied as fast."""
WORDS = 2 * len(Region._fields)


def long(key: Key) -> bool:
    """Whether the value of a key may be spread."""
    return key.nbytes > LEAST_BYTES


def regions(replicas: Sequence[Replica]) -> Array:
    """Where this worker's arrays of these keys lie, (keys, WORDS) numbers."""
    found = [[number for array in replica.arrays() for number in _region(array)] for replica in replicas]
    return np.array(found, np.int64).reshape(len(replicas), WORDS)


def share(replicas: Sequence[Replica], table: Array, rank: int) -> None:
    """Give the replicas of worker `rank` the other workers' blocks: `table` holds every worker's `regions`."""
    workers = len(table)
    for number, replica in enumerate(replicas):
        key, others = replica.key, []
        for worker in range(workers):
            if worker != rank:
                first, second = (
                    arena.attach(Region(*words)).view(key.dtype) for words in _halves(table[worker, number])
                )
                others.append((cut(key.size, workers, worker), cut(key.size, workers, worker + 1), (first, second)))
        replica.share(others)


def _region(array: Array) -> Region:
    region = arena.locate(array)
    assert region is not None
    return region


def _halves(words: Array) -> tuple[list[int], list[int]]:
    numbers = words.tolist()
    return numbers[: WORDS // 2], numbers[WORDS // 2 :]
