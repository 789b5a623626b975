"""What the examples share: handwritten digits, a network of two layers, a worker's batches, and progress reports.

The network is written in NumPy, so that a training loop shows every step: `forward`, `backward`, and the calls of the
store.
"""

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
from arguments import Parser, number_parser

AT_LEAST_ONE = ("epochs", "batch_size", "hidden", "interval")
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Each is also an option of the examples, such as --batch-size 32."""

    epochs: int = 40
    batch_size: int = 16
    learning_rate: float = 0.05
    momentum: float = 0.9
    hidden: int = 256
    # ESGD: in an exchange, a client and the centre each move towards the other by this share of their distance
    alpha: float = 0.5
    # ESGD: number of iterations from one exchange to the next
    interval: int = 64
    seed: int = 0
    dtype: str = "float32"
    # seconds that a worker sleeps for each sample, to emulate the computation of a larger model
    sample_seconds: float = 0.0
    # 1: report each epoch as a line of JSON instead of as text
    lines: int = 0
    # the kind of store, for examples that have the option --kind
    kind: str = ""


def parse_settings(*kinds: str) -> Settings:
    """Parse the command line. `kinds` are the choices of --kind, the default first. Without any there is no --kind."""
    parser = Parser(description="Train a small network on handwritten digits.")
    for field in fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        kind, least = type(field.default), 1 if field.name in AT_LEAST_ONE else 0
        if field.name == "kind":
            if kinds:
                parser.add_argument(flag, choices=kinds, default=kinds[0])
        elif kind is str:
            parser.add_argument(flag, choices=DTYPES, default=field.default)
        else:
            parser.add_argument(flag, type=number_parser(kind, least), default=field.default)
    return Settings(**vars(parser.parse_args()))


def digits(dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x and y of 1,437 training images, then x and y of 360 test images.

    x is (samples, 64) with values in [0, 1], y (samples,) with values 0 to 9.
    """
    # Read the file of scikit-learn without importing the package: the import takes a second of CPU time on every rank.
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None or sklearn.origin is None:
        raise ImportError("the digits come with scikit-learn: pip install scikit-learn")
    table = np.loadtxt(Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x, y = (table[:, :-1] / 16).astype(dtype), table[:, -1].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(x))
    train, test = np.split(order, [len(x) * 4 // 5])
    return x[train], y[train], x[test], y[test]


class Network:
    """A network: softmax(relu(x @ weight1 + bias1) @ weight2 + bias2).

    `names`, `parameters` and `gradients` are lists in the same order. The arrays are updated in place. The gradients
    are in memory that all ranks of the node share, so a push does not have to copy them.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int, dtype: str, seed: int) -> None:
        shapes = {"weight1": (inputs, hidden), "bias1": (hidden,), "weight2": (hidden, outputs), "bias2": (outputs,)}
        self.names = list(shapes)
        self.parameters = [np.zeros(shape, dtype) for shape in shapes.values()]
        self.gradients = [mpips.empty(shape, dtype) for shape in shapes.values()]
        self.loss = 0.0
        rng = np.random.default_rng(seed)
        for weight in self.parameters[::2]:
            weight[:] = rng.normal(0, np.sqrt(2 / len(weight)), weight.shape)

    def forward(self, x: np.ndarray) -> np.ndarray:
        """Return the scores of shape (samples, outputs) for x of shape (samples, inputs)."""
        weight1, bias1, weight2, bias2 = self.parameters
        self._x = x
        self._hidden = np.maximum(x @ weight1 + bias1, 0)
        self._scores: np.ndarray = self._hidden @ weight2 + bias2
        return self._scores

    def backward(self, y: np.ndarray) -> None:
        """Set `loss` to the mean cross-entropy, and `gradients` to its gradient. Call it after `forward`.

        y, of shape (samples,), has the right class of each sample.
        """
        weight1, bias1, weight2, bias2 = self.gradients
        chances = np.exp(self._scores - self._scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        right = np.arange(len(y)), y
        self.loss = -float(np.log(np.maximum(chances[right], 1e-30)).mean())
        chances[right] -= 1
        slope = chances / len(y)
        np.matmul(self._hidden.T, slope, out=weight2)
        np.sum(slope, axis=0, out=bias2)
        slope = slope @ self.parameters[2].T * (self._hidden > 0)
        np.matmul(self._x.T, slope, out=weight1)
        np.sum(slope, axis=0, out=bias1)

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        """Return the share of samples for which `forward` gives the class in y the highest score."""
        return float((self.forward(x).argmax(axis=1) == y).mean())


class Task:
    """One worker's view of the task: its model, its batches, and the report of its progress."""

    def __init__(self, mode: str, kv: Any, settings: Settings) -> None:
        self.mode = mode
        self.kv = kv
        self.settings = settings
        self.x, self.y, self.test_x, self.test_y = digits(settings.dtype)
        self.model = Network(self.x.shape[1], settings.hidden, 10, settings.dtype, settings.seed)
        # the losses of the batches of the current epoch
        self._losses: list[float] = []

    def epochs(self) -> Iterator[int]:
        """Yield the numbers of the epochs, from 1, after a barrier. Report each one when its loop is done."""
        self.kv.barrier()
        seconds = 0.0
        for epoch in range(1, self.settings.epochs + 1):
            self._losses.clear()
            start = time.perf_counter()
            yield epoch
            # the time of training, without that of the reports
            seconds += time.perf_counter() - start
            self._report(epoch, seconds)

    def batches(self, epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield this worker's batches: x of shape (batch_size, 64) and y of shape (batch_size,).

        The batches of all workers in one step form a mini-batch. All workers have the same number of batches, and the
        remaining images are not used. The images are shuffled in every epoch.
        """
        size, workers, rank = self.settings.batch_size, self.kv.num_workers, self.kv.rank
        if size * workers > len(self.x):
            raise ValueError(f"--batch-size {size} of {workers} workers is more than {len(self.x)} images: take less")
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(len(self.x))
        for step in range(len(self.x) // (size * workers)):
            start = (step * workers + rank) * size
            rows = order[start : start + size]
            if self.settings.sample_seconds:
                time.sleep(size * self.settings.sample_seconds)
            yield self.x[rows], self.y[rows]
            self._losses.append(self.model.loss)

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


def name_mode(kind: str, algorithm: str) -> str:
    """Return the name of a mode in the paper, such as "mpi-SGD" for kind "mpi_sync" and algorithm "SGD"."""
    return f"{kind.partition('_')[0]}-{algorithm}"
