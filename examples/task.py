"""What the examples share: handwritten digits, a small network, a worker's batches, and the report of its progress."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

import mpips
from mpips.parallel.mlp import MLP
from mpips.trainer import INTERVAL, shares
from words import Parser, number

AT_LEAST_ONE = ("epochs", "batch_size", "hidden", "interval")
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Settings:
    """The numbers of a run; every one is also an argument of the examples (--batch-size 32)."""

    epochs: int = 40
    batch_size: int = 16
    learning_rate: float = 0.05
    momentum: float = 0.9
    hidden: int = 256
    alpha: float = 0.5
    interval: int = INTERVAL
    seed: int = 0
    dtype: str = "float32"
    sample_seconds: float = 0.0
    """Seconds that a worker sleeps for each sample, as a larger model would compute."""
    lines: int = 0
    """1: print an epoch as a line of JSON instead of words."""


def settings() -> Settings:
    """The settings of the command line."""
    parser = Parser(description="Train a small network on handwritten digits.")
    for field in fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        kind, least = type(field.default), 1 if field.name in AT_LEAST_ONE else 0
        if kind is str:
            parser.add_argument(flag, choices=DTYPES, default=field.default)
        else:
            parser.add_argument(flag, type=number(kind, least), default=field.default)
    return Settings(**vars(parser.parse_args()))


def digits(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """x and y of 1,437 images to train on, x and y of 360 to test with; x is (samples, 64) in [0, 1], y in 0..9."""
    # scikit-learn's own file; importing the package would cost every rank a second of CPU.
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None or sklearn.origin is None:
        raise ImportError("the digits come with scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x, y = (table[:, :-1] / 16).astype(dtype), table[:, -1].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = np.split(order, [len(x) * 4 // 5])
    return x[train], y[train], x[test], y[test]


class Task:
    """One worker's view of the task: its model, its batches, its report."""

    def __init__(self, mode: str, kv: Any, settings: Settings) -> None:
        self.mode, self.kv, self.settings = mode, kv, settings
        self.x, self.y, self.test_x, self.test_y = digits(settings.dtype)
        sizes = (self.x.shape[1], settings.hidden, 10)
        self.model = MLP(sizes, loss="softmax", dtype=settings.dtype, seed=settings.seed, empty=mpips.empty)
        self._losses: list[float] = []

    def epochs(self) -> Iterator[int]:
        """Numbers of the epochs; each is reported when its loop is done."""
        self.kv.barrier()
        start = time.perf_counter()
        for epoch in range(1, self.settings.epochs + 1):
            self._losses.clear()
            yield epoch
            self._report(epoch, time.perf_counter() - start)

    def batches(self, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """This worker's x and y of every mini-batch."""
        for rows in shares(len(self.x), self.settings.batch_size, epoch, self.settings.seed, self.kv):
            yield self.x[rows], self.y[rows]

    def backward(self, x: np.ndarray, y: np.ndarray) -> None:
        """Forward and backward: the model's gradients become those of this batch's mean loss."""
        self._losses.append(self.model.loss_and_gradients(x, y))
        if self.settings.sample_seconds:
            time.sleep(len(y) * self.settings.sample_seconds)

    def _report(self, epoch: int, seconds: float) -> None:
        if self.kv.rank != 0:
            return
        loss, accuracy = float(np.mean(self._losses)), self.model.accuracy(self.test_x, self.test_y)
        if self.settings.lines:
            record = {"mode": self.mode, "epoch": epoch, "seconds": seconds, "loss": loss, "test_accuracy": accuracy}
            print(json.dumps(record), flush=True)
        else:
            print(
                f"{self.mode:10}  epoch {epoch:3}/{self.settings.epochs}  loss {loss:.4f}  "
                f"test accuracy {accuracy:.3f}  {seconds:.2f} s",
                flush=True,
            )
