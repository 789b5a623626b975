"""The distributed test of MXNet's store (facts: 7 workers, exact equality), as a function of the store."""

from __future__ import annotations

import numpy as np

import mpips
from mpips.optimizers import Add

RATE = 2
REPEATS = 3
SHAPES = ((2, 3), (1200, 1200), (1211, 1211))
SMALLER = ((2, 3), (120, 100), (411, 411))
BIG = 100_000  # elements from which on servers share an array of SMALLER


def exact(kv: mpips.KVStore, dtypes: tuple[str, ...] = ("float32", "float16"), shapes: tuple = SHAPES) -> None:
    """Every worker pushes rank + 1; with w += rate * sum the value after repeat i is (n + 1) n rate / 2 (i + 1) + 1."""
    n = kv.num_workers
    for dtype in dtypes:
        for shape in shapes:
            kv.init(f"{dtype} {shape}", np.ones(shape, dtype))
    names = [(f"{dtype} {shape}", dtype, shape) for dtype in dtypes for shape in shapes]
    for name, dtype, shape in names:
        check(kv, name, dtype, shape, [n * (n + 1) / 2] * REPEATS)
        kv.push(name, np.full(shape, 1 / n if n in (1, 2, 4) else kv.rank == 0, dtype))
        kv.barrier()
    kv.set_optimizer(Add(rescale=RATE))
    for name, dtype, shape in names:
        check(kv, name, dtype, shape, [(n + 1) * n * RATE / 2 * (i + 1) + 1 for i in range(REPEATS)])


def check(kv: mpips.KVStore, name: str, dtype: str, shape: tuple[int, ...], expected: list[float]) -> None:
    """Push rank + 1 as often as there are expected values; every other time from an array of `mpips.empty`."""
    out = np.zeros(shape, dtype)
    for i, value in enumerate(expected):
        gradient = mpips.empty(shape, dtype) if i % 2 else np.empty(shape, dtype)
        gradient[...] = kv.rank + 1
        if i == 1:
            kv.pushpull(name, gradient, out)
        else:
            kv.push(name, gradient)
            gradient[...] = 99  # a push has returned: the array is the caller's again
            kv.pull(name, out)
        assert (out == value).all(), (kv.type, name, i, value, np.unique(out))
