"""Pushes and pulls of a store, timed; every round pushes other values, and what comes back is looked at."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import mpips

MARKS = 64
"""Elements of an array that tell one round from another."""


def names(n: int, keys: int) -> list[str]:
    """Names of `keys` keys with n elements each."""
    return [f"{n} {key}" for key in range(keys)]


def measure(
    kv: mpips.KVStore, n: int, array: str, keys: int, seconds: float
) -> tuple[int, float, float, float, float]:
    """Repeats and medians of push, pull, both after each other, and pushpull, of `keys` keys with n elements each."""
    make: Callable[[], np.ndarray] = (lambda: mpips.empty(n)) if array == "empty" else (lambda: np.empty(n, np.float32))
    key: Any = names(n, keys)
    values, outs = [make() for _ in key], [make() for _ in key]
    for one, other in zip(values, outs):
        one[...], other[...] = 0, 0
    rounds = itertools.count(1)
    value: Any = values
    out: Any = outs
    if keys == 1:
        key, value, out = key[0], values[0], outs[0]
    pushes, pulls, fused = [], [], []

    def begin() -> int:
        number = next(rounds)
        mark(values, kv.rank + number)
        return number

    def end(number: int) -> None:
        if kv.type.endswith("_sync"):
            compare(outs, sum(worker + number for worker in range(kv.num_workers)), f"{kv.type}, round {number}")

    def once() -> None:
        number = begin()
        start = time.perf_counter()
        kv.push(key, value)
        pushed = time.perf_counter()
        kv.pull(key, out)
        pulled = time.perf_counter()
        pushes.append(pushed - start)
        pulls.append(pulled - pushed)
        end(number)

    def once_fused() -> None:
        number = begin()
        start = time.perf_counter()
        kv.pushpull(key, value, out)
        fused.append(time.perf_counter() - start)
        end(number)

    for _ in range(3):
        once()
        once_fused()
    assert kv.layout.workers is not None
    repeats = kv.layout.workers.bcast(max(5, min(2000, int(seconds / 2 / (pushes[-1] + pulls[-1])))), 0)
    for sample in (pushes, pulls, fused):
        sample.clear()
    for once_more in (once, once_fused):
        kv.barrier()
        for _ in range(repeats):
            once_more()
    both = statistics.median(map(sum, zip(pushes, pulls)))
    return repeats, statistics.median(pushes), statistics.median(pulls), both, statistics.median(fused)


def mark(arrays: Sequence[np.ndarray], number: float) -> None:
    """Some elements of each array, all over it, become `number`: no two rounds push the same."""
    for array in arrays:
        array[:: max(1, array.size // MARKS)] = number


def compare(arrays: Sequence[np.ndarray], number: float, what: str) -> None:
    """RuntimeError unless the elements that `mark` writes are `number`."""
    for array in arrays:
        found = array[:: max(1, array.size // MARKS)]
        if wrong := found[found != number].tolist():
            raise RuntimeError(f"{what}: of {array.nbytes} bytes, an element came back as {wrong[0]:g}, not {number:g}")
