"""The part of a data set that one rank trains and tests on: `load`, with checks and standardisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.mlp.agreement import TrainingError, alike
from mpips.mlp.mesh import Mesh
from mpips.mlp.network.specification import working_dtype
from mpips.mlp.prediction.links import Link, measure_scatter, way_seconds
from mpips.mlp.data.distribution import distribute
from mpips.mlp.data.minibatches import Deal, Rule, deal
from mpips.mlp.data.opening import Opened, open_everywhere
from mpips.mlp.data.sources import Source, read_checked


class Scaling(NamedTuple):
    """Means and standard deviations of the training rows; a network sees ``(x - x_mean) / x_std``, likewise y for
    "l2"."""

    x_mean: np.ndarray
    x_std: np.ndarray
    y_mean: np.ndarray
    y_std: np.ndarray


class Data(NamedTuple):
    """One batch index's rows, in the dtype of the network; y holds class numbers (rows,) or targets (rows, outputs)."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray
    deal: Deal
    outputs: int
    classes: bool
    train_rows: int
    test_rows: int
    batch: int
    seed: int
    test_share: float
    mesh: str
    way: str
    way_seconds: dict[str, float]
    """What sending the rows would take in the paper's two ways, by its formulas and the measured link."""
    scaling: Scaling
    labels: tuple[str, ...] = ()
    """What a file calls the classes 0, 1, 2, ...; none where the source numbers them itself."""

    def arguments(self) -> dict[str, object]:
        """What must be the same on every rank, by name, as `alike` compares it."""
        return {
            "batch of the data": self.batch, "seed of the data": self.seed, "grid of the data": self.mesh,
            "dtype of the data": self.x.dtype, "features of the data": self.x.shape[1],
            "outputs of the data": self.outputs, "classes of the data": self.classes, "training rows": self.train_rows,
            "test rows": self.test_rows,
        }  # fmt: skip

    @property
    def rule(self) -> Rule:
        """By what the rows were dealt."""
        return Rule(self.seed, self.test_share, self.batch)

    def on(self, xp: Any) -> Data:
        """The same rows in arrays of the array module `xp`; themselves with NumPy."""
        names = ("x", "y", "test_x", "test_y")
        return self if xp is np else self._replace(**{name: xp.asarray(getattr(self, name)) for name in names})


def load(
    open_source: Callable[[], Source],
    mesh: Mesh,
    batch: int,
    dtype: str = "float32",
    seed: int = 0,
    test_share: float = 0.2,
    way: str = "auto",
    link: Link | None = None,
    labels: Sequence[str] | None = None,
) -> Data:
    """This rank's part of the rows of a source, ready for training. Collective over the mesh.

    `batch` is the size of a whole minibatch, `test_share` the share of rows kept for testing. `way` is "read"
    (every rank reads one part of the rows, and they exchange), "scatter", "broadcast" (rank 0 reads and sends), or
    "auto": read where all ranks can and the source has parts, else the cheaper of the other two for the `link` (None:
    measured). `labels`: what a file calls the classes 0, 1, 2, ..., as in `Data.labels` of an earlier run; None: its
    own in their order. TrainingError on every rank, in the same words, if any rank finds the data bad, or if the ranks
    give different arguments or data.
    """
    _check(mesh, batch, dtype, seed, test_share, link)
    return load_opened(open_everywhere(open_source, mesh.comm, way, labels), mesh, batch, dtype, seed, test_share, link)


def load_opened(
    opened: Opened, mesh: Mesh, batch: int, dtype: str = "float32", seed: int = 0, test_share: float = 0.2,
    link: Link | None = None, scaling: Scaling | None = None,
) -> Data:  # fmt: skip
    """`load` of what the ranks of the mesh have opened; `scaling` is an earlier run's, taken in place of these rows'
    own where it has their columns, and must be the same on every rank."""
    _check(mesh, batch, dtype, seed, test_share, link)
    way, shape, starts = opened.way, opened.shape, opened.starts
    test_rows = int(shape.rows * test_share)
    if shape.rows - test_rows < 1:
        raise TrainingError(f"{shape.rows} rows with a test share of {test_share} leave none for training")
    deals = [deal(shape.rows, test_rows, batch, mesh.batch, index, seed) for index in range(mesh.batch)]
    columns = shape.features + shape.targets
    part_bytes = 8.0 * columns * shape.rows / mesh.batch
    costs = way_seconds(mesh.batch, mesh.model, part_bytes, link or measure_scatter(mesh.comm))
    if way == "auto":
        way = min(costs, key=costs.__getitem__)
    parts = [np.concatenate([each.train, each.test]) for each in deals]
    read = None if opened.source is None else partial(read_checked, opened.source)
    table = distribute(mesh, way, read, starts, parts, columns)
    mine = deals[mesh.batch_index]
    x, y = table[:, : shape.features], table[:, shape.features :]
    if scaling is None or (scaling.x_mean.size, scaling.y_mean.size) != (shape.features, shape.targets):
        scaling = _scaling(x[: len(mine.train)], y[: len(mine.train)], shape.classes >= 0, mesh)
    working = working_dtype(dtype)
    x = ((x - scaling.x_mean) / scaling.x_std).astype(working)
    y = y[:, 0].astype(np.int64) if shape.classes >= 0 else ((y - scaling.y_mean) / scaling.y_std).astype(working)
    cut = len(mine.train)
    return Data(
        x[:cut], y[:cut], x[cut:], y[cut:], mine, shape.outputs, shape.classes >= 0,
        shape.rows - test_rows, test_rows, batch, seed, test_share, str(mesh), way, costs, scaling, opened.labels,
    )  # fmt: skip


def _check(mesh: Mesh, batch: int, dtype: str, seed: int, test_share: float, link: Link | None) -> None:
    arguments = {
        "the grid": mesh, "batch": batch, "dtype": dtype, "seed": seed, "test_share": float(test_share), "link": link
    }  # fmt: skip
    alike(mesh.comm, "load", arguments, _wrong(batch, test_share))


def _wrong(batch: int, test_share: float) -> str | None:
    if batch < 1:
        return f"a batch of {batch} samples: give at least 1"
    if not 0 <= test_share < 1:
        return f"a test share of {test_share}: give at least 0 and less than 1"
    return None


def _scaling(x: np.ndarray, y: np.ndarray, classes: bool, mesh: Mesh) -> Scaling:
    x_mean, x_std = _moments(x, mesh.batch_comm)
    if classes:
        return Scaling(x_mean, x_std, np.zeros(1), np.ones(1))
    return Scaling(x_mean, x_std, *_moments(y, mesh.batch_comm))


def _moments(table: np.ndarray, comm: MPI.Comm) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each column over the rows of all ranks; a constant column counts as deviation
    1."""
    sums = np.append(table.sum(axis=0), len(table))
    comm.Allreduce(MPI.IN_PLACE, sums)
    mean = sums[:-1] / sums[-1]
    squares = np.square(table - mean).sum(axis=0)
    comm.Allreduce(MPI.IN_PLACE, squares)
    std = np.sqrt(squares / sums[-1])
    return mean, np.where(std > 1e-12 * np.maximum(1, np.abs(mean)), std, 1.0)
