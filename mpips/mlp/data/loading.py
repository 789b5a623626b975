"""`load`: open a source, deal its rows to batch indices, read each row once, and standardise.

There are two ways for rows to reach the ranks. In "read", every rank reads a part of the rows, and the ranks exchange
rows. In "scatter", rank 0 reads all rows and sends to every rank the rows that this rank keeps.

Rows are dealt once. The seed gives a permutation of the rows: its first part is for testing, the rest is cut into
minibatches, and each minibatch is cut into a slice for each batch index. So a rank keeps only its slices, one after
another, and a step reads one contiguous block.

Every epoch visits the same minibatches in a new order. So no row moves between ranks during training, and minibatches
are the same on every mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpips.collectives import log
from mpips.collectives.kernels.quiet import quiet
from mpips.mlp.data.base import DataSource, check_few_labels, is_number, listed, read_checked
from mpips.mlp.mesh import Mesh, TrainingError, agree, alike, attempt
from mpips.mlp.network import interval, working_dtype

WAYS = ("read", "scatter")
# a rank that reads sends its rows in blocks of this size, so that it never holds all rows that it reads
_BLOCK_BYTES = 32 << 20
LOG = log.get("mpips.mlp")


class Scaling(NamedTuple):
    """Means and standard deviations of the training rows.

    A network sees ``(x - x_mean) / x_std``, and y likewise unless it is a class.
    """

    x_mean: np.ndarray
    x_std: np.ndarray
    y_mean: np.ndarray
    y_std: np.ndarray


class DealRule(NamedTuple):
    """The numbers that determine how rows are dealt. An equal seed and test share give the same test rows."""

    seed: int
    test_share: float
    batch: int


class Deal(NamedTuple):
    """The row numbers that one batch index gets. Its slice of minibatch k is ``train[bounds[k]:bounds[k + 1]]``.

    A slice may be empty.
    """

    # row numbers for training, one slice after another
    train: np.ndarray
    # (minibatches + 1,)
    bounds: np.ndarray
    # size of each whole minibatch, (minibatches,)
    samples: np.ndarray
    # row numbers for testing
    test: np.ndarray


class Data(NamedTuple):
    """The rows of one batch index, standardised, ready for training."""

    # training rows
    # x: inputs in the dtype of the network, (rows, features)
    # y: class numbers, (rows,), or targets, (rows, outputs)
    x: np.ndarray
    y: np.ndarray
    # test rows, in the same form
    test_x: np.ndarray
    test_y: np.ndarray
    deal: Deal
    # number of outputs of a network for these rows
    outputs: int
    # True if y holds class numbers
    classes: bool
    # number of training rows on all batch indices of the mesh together
    train_rows: int
    test_rows: int
    batch: int
    seed: int
    test_share: float
    # the mesh for which the rows were loaded, such as "2x1"
    mesh: str
    # how the rows reached the ranks: "read" or "scatter"
    way: str
    scaling: Scaling
    # names that a file gives the classes 0, 1, 2, ...; empty if the source numbers them itself
    labels: tuple[str, ...] = ()

    @property
    def rule(self) -> DealRule:
        return DealRule(self.seed, self.test_share, self.batch)

    def on(self, xp: ModuleType) -> Data:
        """Return these rows in arrays of the module `xp`. With NumPy, return this object itself."""
        names = ("x", "y", "test_x", "test_y")
        return self if xp is np else self._replace(**{name: xp.asarray(getattr(self, name)) for name in names})


class OpenedSource(NamedTuple):
    """A source that all ranks have agreed on. No row has been read yet."""

    # the source that this rank reads from, or None if this rank does not read
    source: DataSource | None
    # how the rows reach the ranks: "read" or "scatter"
    way: str
    # rank r reads rows [starts[r], starts[r + 1]); (ranks + 1,)
    starts: np.ndarray
    features: int
    targets: int
    # number of classes; None if targets are numbers
    classes: int | None
    # the source's `DataSource.columns()`
    columns: str
    # names that a file gives the classes 0, 1, 2, ...; empty if the source numbers them itself
    labels: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows of the whole source."""
        return int(self.starts[-1])

    @property
    def outputs(self) -> int:
        """Number of outputs of a network for this source: the targets, or the classes, but at least two."""
        return self.targets if self.classes is None else max(self.classes, 2)


def load(
    open_source: Callable[[], DataSource],
    mesh: Mesh,
    batch: int,
    dtype: str = "float32",
    seed: int = 0,
    test_share: float = 0.2,
    way: str = "auto",
    labels: Sequence[str] | None = None,
) -> Data:
    """Load this rank's part of the rows of a source, standardised and ready for `train`.

    Collective over the mesh; blocking. Minibatches and test rows are the same on every mesh.

    Args:
        open_source: Opens the source, such as ``lambda: mpips.mlp.open_source("digits")``.
        mesh: The mesh that will train. Each batch index gets its part of every minibatch.
        batch: Samples of a whole minibatch.
        dtype: The dtype of the network.
        seed: Determines how rows are dealt.
        test_share: Share of the rows kept for testing, in [0, 1).
        way: "read": every rank reads a part of the rows, and the ranks exchange them. "scatter": rank 0 reads all rows
            and sends them. "auto": "read" if all ranks can read the source and it has parts, else "scatter".
        labels: Names that a file gives the classes 0, 1, 2, ..., as in `Data.labels` of an earlier run. Default: the
            file's labels in sorted order.

    Returns:
        The rows of this rank's batch index.

    Raises:
        TrainingError: On every rank, with the same message, if any rank finds the data bad, or if the ranks give
            different arguments or see different data.

    >>> mesh = mpips.mlp.Mesh(batch=MPI.COMM_WORLD.size)
    >>> data = mpips.mlp.load(lambda: mpips.mlp.open_source("synthetic:500,4,1"), mesh, batch=40)
    >>> data.train_rows, data.test_rows
    (400, 100)
    """
    return load_opened(open_everywhere(open_source, mesh.comm, way, labels), mesh, batch, dtype, seed, test_share)


@quiet
def load_opened(
    opened: OpenedSource,
    mesh: Mesh,
    batch: int,
    dtype: str = "float32",
    seed: int = 0,
    test_share: float = 0.2,
    scaling: Scaling | None = None,
) -> Data:
    """Load rows like `load`, from a source that `open_everywhere` has opened. Collective over the mesh.

    `scaling` is the scaling of an earlier run, and must be equal on every rank. It is used if it has as many columns as
    these rows. If not, or if it is None, the scaling is computed from these rows.
    """
    problem = None
    rows, features, test_rows = opened.rows, opened.features, int(opened.rows * test_share)
    if batch < 1:
        problem = f"a batch of {batch} samples: give at least 1"
    elif not 0 <= test_share < 1:
        problem = f"a test share of {test_share}: give at least 0 and less than 1"
    elif rows - test_rows < 1:
        problem = f"{rows} rows with a test share of {test_share} leave none for training"
    arguments = {"grid": mesh, "batch": batch, "dtype": dtype, "seed": seed, "test_share": float(test_share)}
    alike(mesh.comm, "load", arguments, problem)
    deals = [deal(rows, test_rows, batch, mesh.batch, index, seed) for index in range(mesh.batch)]
    table = _distribute(opened, mesh, [np.concatenate([each.train, each.test]) for each in deals])
    own_deal = deals[mesh.batch_index]
    cut, classes, working = len(own_deal.train), opened.classes is not None, working_dtype(dtype)
    x, y = table[:, :features], table[:, features:]
    if scaling is None or (scaling.x_mean.size, scaling.y_mean.size) != (features, opened.targets):
        moments = (np.zeros(1), np.ones(1)) if classes else _moments(y[:cut], mesh.batch_comm)
        scaling = Scaling(*_moments(x[:cut], mesh.batch_comm), *moments)
    x = ((x - scaling.x_mean) / scaling.x_std).astype(working)
    y = y[:, 0].astype(np.int64) if classes else ((y - scaling.y_mean) / scaling.y_std).astype(working)
    LOG.info("rows are loaded: %d for training, %d for testing, by %s", rows - test_rows, test_rows, opened.way)
    return Data(
        x[:cut],
        y[:cut],
        x[cut:],
        y[cut:],
        own_deal,
        opened.outputs,
        classes,
        rows - test_rows,
        test_rows,
        batch,
        seed,
        test_share,
        str(mesh),
        opened.way,
        scaling,
        opened.labels,
    )


def _moments(table: np.ndarray, comm: MPI.Comm) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation of each column over all ranks. A constant column has deviation 1."""
    sums = np.append(table.sum(axis=0), len(table))
    comm.Allreduce(MPI.IN_PLACE, sums)
    mean = sums[:-1] / sums[-1]
    squares = np.square(table - mean).sum(axis=0)
    comm.Allreduce(MPI.IN_PLACE, squares)
    std = np.sqrt(squares / sums[-1])
    return mean, np.where(std > 1e-12 * np.maximum(1, np.abs(mean)), std, 1.0)


# ---- opening


def open_everywhere(
    open_source: Callable[[], DataSource], comm: MPI.Comm, way: str = "auto", labels: Sequence[str] | None = None
) -> OpenedSource:
    """Open the source on rank 0, and on the other ranks if all ranks are to read it and can read it. Collective.

    Rank 0 checks a file as a whole. The other ranks look only at the rows that they will read.

    Args:
        labels: Names of the classes 0, 1, 2, ... in a checkpoint. None: number the file's labels in sorted order.

    Raises:
        TrainingError: On every rank, with the same message, if a rank that must read cannot open the source, if ranks
            that read see different data, if `way` is "read" and the source has no parts, or if labels are wrong.
    """
    problem = None if way in ("auto", *WAYS) else f"way {way!r} is unknown; choose auto, {', '.join(WAYS)}"
    alike(comm, "load", {"way": way}, problem)
    source = _open_readers(open_source, comm, way)
    way = "read" if all(comm.allgather(source is not None)) and way != "scatter" else "scatter"
    parts, part = (comm.size, comm.rank) if way == "read" else (1, 0)
    counts = comm.allgather(attempt(comm, lambda: 0 if source is None else source.open_part(parts, part)))
    facts = None
    if source is not None:
        facts = source.features, source.targets, source.classes, source.columns(), source.name
    features, targets, classes, columns, name = comm.bcast(facts)
    opened = OpenedSource(source, way, np.cumsum([0, *counts]), features, targets, classes, columns)
    if not opened.rows:
        raise TrainingError(f"{name} has no row of numbers")
    if classes is not None and targets != 1:
        raise TrainingError(f"class numbers need one target column, not {targets}")
    if classes != 0:
        return opened
    names = _number_labels(source, comm, labels)
    if labels is None and len(names) >= max(opened.rows, 3):
        raise TrainingError(
            f"{opened.rows} rows have {len(names)} different labels, such as {names[0]}: they are no "
            "classes; leave --classify out to learn numbers"
        )
    return opened._replace(classes=len(names), labels=names)


def _open_readers(open_source: Callable[[], DataSource], comm: MPI.Comm, way: str) -> DataSource | None:
    """Open the source on the ranks that will read it, and return None on the other ranks. Collective.

    All ranks read if `way` allows it and every rank can open the source. Otherwise only rank 0 reads.
    """

    def open_checked() -> DataSource | None:
        opened = open_source() if comm.rank == 0 else None
        if opened is not None:
            opened.check()
        return opened

    source, problem = attempt(comm, open_checked), None
    apart = comm.bcast(source.apart if source is not None else None)
    if comm.size > 1 and not apart and way == "read":
        raise TrainingError("these data cannot be read in parts: choose --way auto or scatter")
    if comm.size == 1 or not apart or way == "scatter":
        return source
    if comm.rank:
        try:
            source = open_source()
        except TrainingError as error:
            problem = str(error)
    agree(comm, problem if way == "read" else None)
    if not all(comm.allgather(source is not None)):
        return source if comm.rank == 0 else None
    assert source is not None
    alike(
        comm,
        "the data differ between the ranks; give all the same file, or choose scatter",
        {
            "features": source.features,
            "targets": source.targets,
            "classes": source.classes,
            "read in parts": source.apart,
            "columns": source.columns(),
            "content": source.fingerprint(),
        },
        noun="their",
    )
    return source


def _number_labels(source: DataSource | None, comm: MPI.Comm, known: Sequence[str] | None) -> tuple[str, ...]:
    """Collect the labels from all ranks, number them, and let `source` return class numbers from then on. Collective.

    Args:
        known: The labels of a checkpoint, which keep their class numbers. None without a checkpoint.

    Returns:
        The labels in the order of their classes.

    Raises:
        TrainingError: On every rank, if some labels are words and others numbers, if there are too many labels, or if a
            label is not among the known labels.
    """

    def look() -> tuple[list[str], list[str]]:
        """Return the labels of this rank's rows, and the places of the first word and the first number."""
        if source is None:
            return [], ["", ""]
        labels = source.labels()
        check_few_labels(source.name, labels)
        rows = {is_number(label): row for label, row in reversed(labels.items())}
        places = [source.where(rows[kind], source.features) if kind in rows else "" for kind in (False, True)]
        return list(labels), places

    everywhere = comm.allgather(attempt(comm, look))
    labels = dict.fromkeys(label for each, _ in everywhere for label in each)
    word, number = (next((places[kind] for _, places in everywhere if places[kind]), "") for kind in (0, 1))
    if word and number:
        raise TrainingError(
            f"{word}, a word, but {number}, a number: labels are all words or all numbers; mend one of them"
        )
    if known is not None and (strange := [label for label in labels if label not in set(known)]):
        raise TrainingError(
            f"label {strange[0]!r} is none of the checkpoint's, which are {listed(known)}: give it "
            "rows of the same classes, or train anew"
        )
    ordered = tuple(known or sorted(labels, key=int if number else str))
    if source is not None:
        source.number(ordered)
    return ordered


# ---- dealing


def deal(rows: int, test_rows: int, batch: int, parts: int, index: int, seed: int) -> Deal:
    """Return the numbers of the rows that batch index `index` gets. `parts` is the number of batch indices.

    The last minibatch may have fewer than `batch` samples.
    """
    order = np.random.default_rng([seed, 0]).permutation(rows)
    test, train = order[:test_rows], order[test_rows:]
    starts = np.arange(0, len(train), batch)
    samples = np.minimum(len(train) - starts, batch)
    slices = [interval(int(count), parts, index) for count in samples]
    bounds = np.concatenate([[0], np.cumsum([stop - start for start, stop in slices], dtype=np.int64)])
    own = [train[first + start : first + stop] for first, (start, stop) in zip(starts, slices)]
    return Deal(np.concatenate([train[:0], *own]), bounds, samples, test[slice(*interval(test_rows, parts, index))])


def epoch_order(minibatches: int, epoch: int, seed: int) -> np.ndarray:
    """Return the order in which an epoch (from 0) visits the minibatches."""
    return np.random.default_rng([seed, 1, epoch]).permutation(minibatches)


# ---- reading


def _distribute(opened: OpenedSource, mesh: Mesh, parts: list[np.ndarray]) -> np.ndarray:
    """Read the rows and send them to their ranks. Return the rows of this rank, (rows, columns), float64. Collective.

    Each row is read once, in the order of the file. In every turn, each rank that reads takes its next block of rows,
    and one Alltoallv sends the blocks of all ranks. A TrainingError of one rank is raised on all ranks.

    Args:
        parts: The row numbers of each batch index, in the order in which its ranks keep the rows.
    """
    comm, starts, source = mesh.comm, opened.starts, opened.source
    columns = opened.features + opened.targets
    wanted = parts[mesh.batch_index]
    own_rows = np.empty((len(wanted), columns))
    by_row = np.argsort(wanted)
    in_order = [np.sort(part) for part in parts]
    block = max(1, _BLOCK_BYTES // (8 * columns))
    first = int(starts[comm.rank])
    for offset in range(0, int(np.diff(starts).max(initial=0)), block):
        # the rows that each rank reads in this turn
        windows = [(min(start + offset, stop), min(start + offset + block, stop)) for start, stop in pairwise(starts)]
        start, stop = windows[comm.rank]
        read: Callable[[], np.ndarray] = partial(np.empty, (0, columns))
        if source is not None and start < stop:
            read = partial(read_checked, source, start - first, stop - first)
        table = attempt(comm, read)
        chunks = [table[part[slice(*np.searchsorted(part, (start, stop)))] - start] for part in in_order]
        # All ranks of a model get the same rows.
        outgoing = [chunk for chunk in chunks for _ in range(mesh.model)]
        flat, sizes = np.concatenate(outgoing), [chunk.size for chunk in outgoing]
        cuts = [tuple(np.searchsorted(in_order[mesh.batch_index], window)) for window in windows]
        received = np.empty((sum(b - a for a, b in cuts), columns))
        counts = [(b - a) * columns for a, b in cuts]
        comm.Alltoallv([flat, sizes, None, MPI.DOUBLE], [received, counts, None, MPI.DOUBLE])
        own_rows[np.concatenate([by_row[a:b] for a, b in cuts])] = received
    return own_rows
