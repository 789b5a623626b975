"""Pushes and pulls of a store, timed; every round pushes other values, and what comes back is looked at."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from collectives.fabric.arena import empty
from mpips.store.api import KVStore

MARKS = 64
"""Elements of an array that tell one round from another."""


def names(n: int, keys: int) -> list[str]:
    """Names of `keys` keys with n elements each."""
    return [f"{n} {key}" for key in range(keys)]


class Rounds:
    """Rounds of `keys` keys with n elements each, and how long their calls took. What they sum to is compared."""

    def __init__(self, kv: KVStore, n: int, array: str, keys: int) -> None:
        self._kv, self._numbers = kv, itertools.count(1)
        self._values, self._outs = ([_made(n, array) for _ in range(keys)] for _ in range(2))
        called: list[Any] = [names(n, keys), self._values, self._outs]
        self._key, self._value, self._out = called if keys > 1 else [one[0] for one in called]
        self.pushes: list[float] = []
        self.pulls: list[float] = []
        self.fused: list[float] = []

    def apart(self) -> None:
        """A push, then a pull."""
        number = self._begin()
        start = time.perf_counter()
        self._kv.push(self._key, self._value)
        pushed = time.perf_counter()
        self._kv.pull(self._key, self._out)
        pulled = time.perf_counter()
        self.pushes.append(pushed - start)
        self.pulls.append(pulled - pushed)
        self._end(number)

    def together(self) -> None:
        """A pushpull."""
        number = self._begin()
        start = time.perf_counter()
        self._kv.pushpull(self._key, self._value, self._out)
        self.fused.append(time.perf_counter() - start)
        self._end(number)

    def _begin(self) -> int:
        number = next(self._numbers)
        mark(self._values, self._kv.rank + number)
        return number

    def _end(self, number: int) -> None:
        if self._kv.type.endswith("_sync"):
            total = sum(worker + number for worker in range(self._kv.num_workers))
            compare(self._outs, total, f"{self._kv.type}, round {number}")


def _made(n: int, array: str) -> np.ndarray:
    made: np.ndarray = empty(n) if array == "empty" else np.empty(n, np.float32)
    made[...] = 0
    return made


def measure(
    kv: KVStore, n: int, array: str, keys: int, seconds: float
) -> tuple[int, float, float, float, float]:
    """Repeats and medians of push, pull, both after each other, and pushpull, of `keys` keys with n elements each."""
    rounds = Rounds(kv, n, array, keys)
    for _ in range(3):
        rounds.apart()
        rounds.together()
    pushes, pulls, fused = rounds.pushes, rounds.pulls, rounds.fused
    assert kv.layout.workers is not None
    count = np.array([max(5, min(2000, int(seconds / 2 / (pushes[-1] + pulls[-1]))))], np.int64)
    kv.layout.workers.Bcast(count)
    repeats = int(count[0])
    for sample in (pushes, pulls, fused):
        sample.clear()
    for one in (rounds.apart, rounds.together):
        kv.barrier()
        for _ in range(repeats):
            one()
    both = statistics.median(map(sum, zip(pushes, pulls)))
    return repeats, statistics.median(pushes), statistics.median(pulls), both, statistics.median(fused)


def mark(arrays: Sequence[np.ndarray], number: float) -> None:
    """Some elements of each array, all over it, become `number`: no two rounds push the same."""
    for array in arrays:
        marked(array)[:] = number


def marked(array: np.ndarray) -> np.ndarray:
    """The elements that `mark` writes, a view."""
    return array[:: max(1, array.size // MARKS)]


def compare(arrays: Sequence[np.ndarray], number: float, what: str) -> None:
    """RuntimeError unless the elements that `mark` writes are `number`."""
    for array in arrays:
        found = marked(array)
        if wrong := found[found != number].tolist():
            raise RuntimeError(f"{what}: of {array.nbytes} bytes, an element came back as {wrong[0]:g}, not {number:g}")
