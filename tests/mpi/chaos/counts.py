"""Keys of an asynchronous store that count pushes: each push adds 1 to elements that no other push touches.

So what is stored tells of every push how often each part of it was applied, and no order of pushes changes a bit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import numpy as np

from mpips.store.world import launched_as

PROCESSES = 8
TOTAL = 80
"""Pushes of all workers after which a program ends."""
MOST = 2 * TOTAL  # of one process
NUMBERS = PROCESSES * MOST
TOTALS = "ids"
DONE, EPOCHS, OVER = "done", 32, -1
"""A key in which workers say that they push no more, each in the row of the epoch; its last element: all have."""
SIZES = {TOTALS: NUMBERS, "split": 70_001, "block": 1531}
"""Elements of each key. The first counts each push once."""


def start() -> dict[str, np.ndarray]:
    """Nothing is counted yet."""
    return {key: np.zeros(n, np.float32) for key, n in SIZES.items()}


def nobody_done() -> np.ndarray:
    """The first value of `DONE`."""
    return np.zeros(EPOCHS * PROCESSES + 1, np.float32)


def says_done(epoch: int, rank: int) -> np.ndarray:
    """What a worker pushes to `DONE`."""
    pushed = nobody_done()
    pushed[:OVER].reshape(EPOCHS, PROCESSES)[epoch, rank] = 1
    return pushed


def says_over() -> np.ndarray:
    """What who sees that all are done pushes to `DONE`."""
    pushed = nobody_done()
    pushed[OVER] = 1
    return pushed


def all_done(done: np.ndarray, epoch: int, workers: int) -> bool:
    """Whether all workers of an epoch, this one or an earlier one, have said so."""
    return bool(done[OVER] or done[:OVER].reshape(EPOCHS, PROCESSES)[epoch, :workers].all())


def number_of(made: int) -> int:
    """The number of this process' push after it has made so many."""
    assert made < MOST
    return (launched_as(os.environ) or (0, 1))[0] * MOST + made


def push(key: str, number: int) -> np.ndarray:
    """What the push of this number brings."""
    pushed = np.zeros(SIZES[key], np.float32)
    pushed[number::NUMBERS] = 1
    return pushed


def begun(number: int) -> int:
    """What is noted before a push."""
    return 2 * number


def acknowledged(number: int) -> int:
    """What is noted once a push has been acknowledged."""
    return 2 * number + 1


def wrong(stored: Mapping[str, np.ndarray], noted: Collection[int]) -> str:
    """What is not as promised, "" where all is: each acknowledged push counts once, one under way once or not."""
    for key, size in SIZES.items():
        for number in range(min(NUMBERS, size)):
            found = {float(value) for value in np.unique(stored[key][number::NUMBERS])}
            what, fit = "not made", {0.0}
            if acknowledged(number) in noted:
                what, fit = "acknowledged", {1.0}
            elif begun(number) in noted:
                what, fit = "begun", {0.0, 1.0}
            if not found <= fit:
                who, turn = divmod(number, MOST)
                return f"push {turn} of process {who}, {what}, was counted {sorted(found)} times in key {key!r}"
    return ""
