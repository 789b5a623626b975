"""A tiny model whose training is exact: what each round of it gives, in plain NumPy.

Gradients are whole multiples of 2^-10, so that their sum has the same bits in every order. Updates are NumPy's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mpips import optimizers

SIZES = {"block": 37, "split": 70_001, "adam": 4099, "short": 3}
"""Elements of each key. Both servers share one of them, in several blocks."""
ADAM = "adam"
OPTIONS = {"big_array": 20_000, "block_bytes": 32_768, "small_bytes": 8192}
STEPS, SAVE_EVERY = 30, 9
GRAIN, SPAN = 1024, 2001
Weights = dict[str, np.ndarray]


def start() -> Weights:
    """The first weights."""
    return {key: ((np.arange(n) * 37 % 101 - 50) / 64).astype(np.float32) for key, n in SIZES.items()}


def optimizer(key: str) -> optimizers.Optimizer:
    """How a key is updated."""
    if key == ADAM:
        return optimizers.Adam(learning_rate=0.01)
    return optimizers.SGD(learning_rate=0.05, momentum=0.9)


def gradient(key: str, w: np.ndarray, step: int, rank: int, workers: int) -> np.ndarray:
    """What a worker pushes: of weights, step, rank and number of workers alone."""
    mixed = np.rint(w.astype(np.float64) * 4096).astype(np.int64) * 31 + np.arange(w.size)
    mixed += step * 7919 + rank * 104_729 + workers * 1299 + len(key)
    return ((mixed % SPAN - SPAN // 2) / GRAIN).astype(np.float32)


def bits(weights: Mapping[str, np.ndarray]) -> bytes:
    """All weights as bytes."""
    return b"".join(weights[key].tobytes() for key in SIZES)


def curve(workers: Mapping[int, int], steps: int) -> list[bytes]:
    """The bits of all weights before each step and at the end, of a job with so many workers in each step."""
    weights = start()
    rules = {key: optimizer(key) for key in SIZES}
    states = {key: rules[key].init(weights[key]) for key in SIZES}
    found = [bits(weights)]
    for step in range(steps):
        for key, w in weights.items():
            total = sum(gradient(key, w, step, rank, workers[step]) for rank in range(workers[step]))
            rules[key].update(w, np.asarray(total, np.float32), states[key], step + 1)
        found.append(bits(weights))
    return found
