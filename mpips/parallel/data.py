"""The part of a data set that one rank trains and tests on: read or received, checked, standardised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from .agreement import TrainingError, agree
from .distribution import WAYS, distribute, measure, way_seconds
from .grid import Grid
from .measure import Link
from .minibatches import Deal, deal
from .sources import Source
from .specification import working_dtype


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
    way: str
    way_seconds: dict[str, float]
    """What sending the rows would take in the paper's two ways, by its formulas and the measured link."""
    scaling: Scaling

    def on(self, xp: Any) -> Data:
        """The same rows in arrays of the array module `xp`; themselves with NumPy."""
        names = ("x", "y", "test_x", "test_y")
        return self if xp is np else self._replace(**{name: xp.asarray(getattr(self, name)) for name in names})


class Shape(NamedTuple):
    """What a source holds, before any row is read."""

    rows: int
    features: int
    targets: int
    classes: int  # -1: targets are numbers; 0: class numbers, how many is not known yet

    @property
    def outputs(self) -> int:
        """Outputs of a network for it; at least two where the classes are not known yet."""
        return self.targets if self.classes < 0 else max(self.classes, 2)


def describe(open_source: Callable[[], Source], comm: MPI.Comm) -> Shape:
    """The shape of rank 0's source, on every rank. Collective; TrainingError on every rank if rank 0 cannot open it."""
    source, _ = _open(open_source, comm, "scatter")
    return _agree_shape(source, comm)


def load(
    open_source: Callable[[], Source],
    grid: Grid,
    batch: int,
    dtype: str = "float32",
    seed: int = 0,
    test_share: float = 0.2,
    way: str = "auto",
    link: Link | None = None,
) -> Data:
    """This rank's part of the rows of a source, ready for training. Collective over the grid.

    `batch` is the size of a whole minibatch, `test_share` the share of rows kept for testing. `way` is "read"
    (every rank reads its own rows), "scatter", "broadcast" (rank 0 reads and sends), or "auto": read where all
    ranks can, else the cheaper of the other two for the `link` (None: measured). TrainingError on every rank, in the
    same words, if any rank finds the data bad.
    """
    agree(grid.comm, _wrong(batch, test_share, way))
    source, way = _open(open_source, grid.comm, way)
    shape = _agree_shape(source, grid.comm)
    test_rows = int(shape.rows * test_share)
    if shape.rows - test_rows < 1:
        raise TrainingError(f"{shape.rows} rows with a test share of {test_share} leave none for training")
    deals = [deal(shape.rows, test_rows, batch, grid.batch, index, seed) for index in range(grid.batch)]
    columns = shape.features + shape.targets
    costs = way_seconds(grid.batch, grid.model, 8.0 * columns * shape.rows / grid.batch, link or measure(grid.comm))
    if way == "auto":
        way = min(costs, key=costs.__getitem__)
    parts = [np.concatenate([each.train, each.test]) for each in deals]
    table = distribute(grid, way, source.read if source else None, parts, columns)
    mine = deals[grid.batch_index]
    x, y = table[:, : shape.features], table[:, shape.features :]
    outputs = shape.targets if shape.classes < 0 else _classes(y, shape, grid)
    scaling = _scaling(x[: len(mine.train)], y[: len(mine.train)], shape.classes >= 0, grid)
    working = working_dtype(dtype)
    x = ((x - scaling.x_mean) / scaling.x_std).astype(working)
    y = y[:, 0].astype(np.int64) if shape.classes >= 0 else ((y - scaling.y_mean) / scaling.y_std).astype(working)
    cut = len(mine.train)
    return Data(
        x[:cut], y[:cut], x[cut:], y[cut:], mine, outputs, shape.classes >= 0,
        shape.rows - test_rows, test_rows, batch, seed, way, costs, scaling,
    )  # fmt: skip


def _wrong(batch: int, test_share: float, way: str) -> str | None:
    if batch < 1:
        return f"a batch of {batch} samples: give at least 1"
    if not 0 <= test_share < 1:
        return f"a test share of {test_share}: give at least 0 and less than 1"
    if way not in ("auto", *WAYS):
        return f"way {way!r} is unknown; choose auto, {', '.join(WAYS)}"
    return None


def _open(open_source: Callable[[], Source], comm: MPI.Comm, way: str) -> tuple[Source | None, str]:
    """The source where it can be opened, and the way, "auto" if it is still to be chosen."""
    source, problem = None, None
    try:
        source = open_source()
    except TrainingError as error:
        problem = str(error)
    needed = way == "read" or comm.rank == 0
    agree(comm, problem if needed else None)
    mark = -1 if source is None else source.fingerprint()
    marks = np.array([mark, -mark], np.int64)
    comm.Allreduce(MPI.IN_PLACE, marks, MPI.MIN)
    everywhere = marks[0] == -marks[1]
    if way == "read" and not everywhere:
        raise TrainingError("the data differ between the ranks; give all ranks the same file, or choose scatter")
    return source, "read" if way in ("auto", "read") and everywhere else way


def _agree_shape(source: Source | None, comm: MPI.Comm) -> Shape:
    numbers = np.zeros(4, np.int64)
    if comm.rank == 0 and source is not None:
        classes = -1 if source.classes is None else source.classes
        numbers[:] = source.rows, source.features, source.targets, classes
    comm.Bcast(numbers)
    shape = Shape(*(int(number) for number in numbers))
    if shape.classes >= 0 and shape.targets != 1:
        raise TrainingError(f"class numbers need one target column, not {shape.targets}")
    return shape


def _classes(y: np.ndarray, shape: Shape, grid: Grid) -> int:
    """How many classes there are; the labels must be whole numbers from 0."""
    bad = y[(y != np.floor(y)) | (y < 0) | (y >= (shape.classes or 2**31))]
    problem = f"label {bad[0]:g} is not a class number: classes are 0, 1, 2, ..." if len(bad) else None
    agree(grid.comm, problem)
    most = np.array([y.max(initial=1)])
    grid.comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    return max(shape.classes, int(most[0]) + 1)


def _scaling(x: np.ndarray, y: np.ndarray, classes: bool, grid: Grid) -> Scaling:
    x_mean, x_std = _moments(x, grid.batch_comm)
    if classes:
        return Scaling(x_mean, x_std, np.zeros(1), np.ones(1))
    return Scaling(x_mean, x_std, *_moments(y, grid.batch_comm))


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
