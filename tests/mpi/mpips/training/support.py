"""What the tests of Trainers share: a small model, its data, every kind of store, and the serial program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpips.optimizers import SGD, Updater
from mpips.training.updates import clip
from tests.mpi.mpips.support import need, run

SYNCHRONOUS: dict[str, tuple[str, dict[str, Any]]] = {
    "dist_sync": ("dist_sync", {"servers": 1}),
    "dist_sync-0": ("dist_sync", {"servers": 0}),
    "mpi_sync-one": ("mpi_sync", {"servers": 1, "clients": 2}),
    "mpi_sync-all": ("mpi_sync", {"servers": 1, "clients": 2, "masters": "all"}),
    "mpi_sync-0": ("mpi_sync", {"servers": 0}),
}
ONE_CLIENT: dict[str, tuple[str, dict[str, Any]]] = {"mpi_async-1": ("mpi_async", {"servers": 1, "clients": 1})}
"""Asynchronous, but nobody else updates: it gives the serial numbers."""
KINDS = {
    **SYNCHRONOUS,
    **ONE_CLIENT,
    "dist_async": ("dist_async", {"servers": 1}),
    "mpi_async": ("mpi_async", {"servers": 1, "clients": 2}),
}
SAMPLES, FEATURES, OUTPUTS = 50, 4, 2


class Line:
    """y = x @ w + b, with the mean square as the loss: all in float64."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.parameters = [rng.normal(size=(FEATURES, OUTPUTS)), rng.normal(size=OUTPUTS)]
        self.gradients = [np.zeros_like(array) for array in self.parameters]

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x @ self.parameters[0] + self.parameters[1]

    def loss_and_gradients(self, x: np.ndarray, y: np.ndarray) -> float:
        far = self.predict(x) - y
        np.matmul(x.T, far * (2 / len(x)), out=self.gradients[0])
        self.gradients[1][:] = far.sum(axis=0) * (2 / len(x))
        return float((far**2).sum() / len(x))

    def bits(self) -> bytes:
        return b"".join(array.tobytes() for array in self.parameters)


def data(seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """x (SAMPLES, FEATURES) and y (SAMPLES, OUTPUTS)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(SAMPLES, FEATURES))
    return x, x @ rng.normal(size=(FEATURES, OUTPUTS)) + rng.normal(size=OUTPUTS)


def on_workers(kind: str, body: Callable[[Any], Any], **more: Any) -> Any:
    """`body(kv)` on the workers of a kind of store; None on servers. Skips where there are too few ranks."""
    name, options = KINDS[kind]
    need(**{**options, **more})
    return run(name, body, **{**options, **more})


def workers_of(kind: str) -> int:
    """Workers of such a store here."""
    return need(**KINDS[kind][1])


def serial(
    steps: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], optimizer: SGD, clip_norm: float | None = None
) -> Line:
    """A model after steps, each by the mean gradient over all samples of its batches."""
    model = Line()
    updater = Updater(optimizer, model.parameters)
    for batches in steps:
        model.loss_and_gradients(*(np.concatenate(arrays) for arrays in zip(*batches)))
        if clip_norm is not None:
            clip(model.gradients, clip_norm)
        updater.update(model.gradients)
    return model


def uneven(worker: int, epoch: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches of a worker: unlike numbers of them, with unlike numbers of samples; the second worker has none."""
    x, y = data(7 + epoch)
    sizes = [] if worker == 1 else [2 + (worker + n) % 3 for n in range(3 + worker)]
    starts = np.cumsum([0, *sizes]) + worker
    return [(x[start : start + size], y[start : start + size]) for start, size in zip(starts, sizes)]
