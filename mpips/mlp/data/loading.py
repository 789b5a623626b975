"""Load the rows that one rank trains and tests on: open, deal to batch indices, read once, standardise.

Every rank reads a part and they exchange ("read"), or rank 0 reads and sends every rank its rows ("scatter"). Rows are
dealt once: a permutation by the seed, its first part for testing, the rest cut into minibatches; a minibatch is cut
into one slice for each batch index. A rank so needs, and keeps, only its slices, one behind the other, and a step reads
a contiguous block of them. Epochs visit the minibatches in a new order, not with new members, so that no row moves
between ranks during training, and minibatches are the same on every mesh.
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
from mpips.mlp.data.base import DataSource, is_number, listed, read_checked, see_few
from mpips.mlp.mesh import Mesh, TrainingError, agree, alike, attempt
from mpips.mlp.network import interval, working_dtype

WAYS = ("read", "scatter")
_BLOCK_BYTES = 32 << 20  # of rows that a reader has on the way at a time, so that nobody holds all
LOG = log.get("mpips.mlp")


class Scaling(NamedTuple):
    """Means and standard deviations of the training rows; a network sees ``(x - x_mean) / x_std``, likewise y for
    "l2"."""

    x_mean: np.ndarray
    x_std: np.ndarray
    y_mean: np.ndarray
    y_std: np.ndarray


class DealRule(NamedTuple):
    """The numbers that deal rows: equal seeds and shares (of a file's rows, for testing) give equal test rows."""

    seed: int
    test_share: float
    batch: int


class Deal(NamedTuple):
    """The rows of one batch index. Its slice of minibatch k is ``train[bounds[k]:bounds[k + 1]]``, maybe empty."""

    train: np.ndarray  # row numbers, (own training rows,)
    bounds: np.ndarray  # (minibatches + 1,)
    samples: np.ndarray  # samples of each whole minibatch, (minibatches,)
    test: np.ndarray  # row numbers, (own test rows,)


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
    scaling: Scaling
    labels: tuple[str, ...] = ()
    """Names of the classes 0, 1, 2, ... in a file; none where the source numbers them itself."""

    @property
    def rule(self) -> DealRule:
        """Return the numbers that dealt the rows."""
        return DealRule(self.seed, self.test_share, self.batch)

    def on(self, xp: ModuleType) -> Data:
        """Return the same rows in arrays of the array module `xp`; themselves with NumPy."""
        names = ("x", "y", "test_x", "test_y")
        return self if xp is np else self._replace(**{name: xp.asarray(getattr(self, name)) for name in names})


class Opened(NamedTuple):
    """A source that all ranks see before any row is read; rank r reads rows [starts[r], starts[r + 1])."""

    source: DataSource | None
    way: str
    starts: np.ndarray  # (ranks + 1,)
    features: int
    targets: int
    classes: int | None  # None: targets are numbers
    columns: str
    labels: tuple[str, ...] = ()  # in the order of the classes; none where the classes are the source's own

    @property
    def rows(self) -> int:
        """Return the rows of all ranks."""
        return int(self.starts[-1])

    @property
    def outputs(self) -> int:
        """Return the outputs of a network for it: the classes, at least two, or the targets."""
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
    """Return this rank's part of the rows of a source, ready for training. Collective over the mesh.

    `batch` is the size of a whole minibatch, `test_share` the share of rows kept for testing. `way` is "read"
    (every rank reads one part of the rows, and they exchange), "scatter" (rank 0 reads and sends), or "auto": read
    where all ranks can and the source has parts, else scatter. `labels`: names of the classes 0, 1, 2, ... in a file,
    as in `Data.labels` of an earlier run; None: its own in their order. TrainingError on every rank, in the same words,
    if any rank finds the data bad, or if the ranks give different arguments or data.
    """
    return load_opened(open_everywhere(open_source, mesh.comm, way, labels), mesh, batch, dtype, seed, test_share)


@quiet
def load_opened(
    opened: Opened,
    mesh: Mesh,
    batch: int,
    dtype: str = "float32",
    seed: int = 0,
    test_share: float = 0.2,
    scaling: Scaling | None = None,
) -> Data:
    """Do what `load` does with a source that the ranks of the mesh have opened. Collective over the mesh.

    `scaling` is an earlier run's, taken in place of these rows' own where it has their columns. It must be the same on
    every rank.
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
    mine = deals[mesh.batch_index]
    cut, classes, working = len(mine.train), opened.classes is not None, working_dtype(dtype)
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
        mine,
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
    """Return mean and standard deviation of each column over the rows of all ranks; 1 for a constant column."""
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
) -> Opened:
    """Open the source on rank 0, then on the others if all are to read and can.

    No rank looks at rows that it will not read, but rank 0 checks a file as a whole. `labels`: those of a checkpoint,
    whose classes the labels of a file keep; else they are numbered in their order. Collective; TrainingError on every
    rank, in the same words, if a rank that is needed cannot open it, if ranks that are to read see different data, if
    with way "read" the source has no parts, or if labels are none.
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
    opened = Opened(source, way, np.cumsum([0, *counts]), features, targets, classes, columns)
    if not opened.rows:
        raise TrainingError(f"{name} has no row of numbers")
    if classes is not None and targets != 1:
        raise TrainingError(f"class numbers need one target column, not {targets}")
    if classes != 0:
        return opened
    found = _number_labels(source, comm, labels)
    if labels is None and len(found) >= max(opened.rows, 3):
        raise TrainingError(
            f"{opened.rows} rows have {len(found)} different labels, such as {found[0]}: they are no "
            "classes; leave --classify out to learn numbers"
        )
    return opened._replace(classes=len(found), labels=found)


def _open_readers(open_source: Callable[[], DataSource], comm: MPI.Comm, way: str) -> DataSource | None:
    """Return the source on the ranks that read: all, where they may and can, else rank 0. Collective."""

    def open_checked() -> DataSource | None:
        found = open_source() if comm.rank == 0 else None
        if found is not None:
            found.check()
        return found

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
    """Return the labels of the rows that all ranks read, in the order of their classes, which `source` then gives.

    `known`: those of a checkpoint, whose classes they keep. Collective; TrainingError on every rank where they are
    words and numbers, too many, or none of those that are known.
    """

    def look() -> tuple[list[str], list[str]]:
        """Return the labels here, and where the first word and the first number are."""
        if source is None:
            return [], ["", ""]
        labels = source.labels()
        see_few(source.name, labels)
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
    """Return the rows of batch index `index` of `parts`: minibatches of `batch` samples, the last perhaps smaller."""
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


def _distribute(opened: Opened, mesh: Mesh, parts: list[np.ndarray]) -> np.ndarray:
    """Return the rows ``parts[mesh.batch_index]`` on every rank, (rows, columns) float64. Collective.

    `parts` holds the row numbers of every batch index. Rows are read in the order of the file, each once, in blocks. A
    TrainingError of a reader is raised by all ranks.
    """
    comm, starts, source = mesh.comm, opened.starts, opened.source
    columns = opened.features + opened.targets
    wanted = parts[mesh.batch_index]
    mine = np.empty((len(wanted), columns))
    by_row = np.argsort(wanted)
    in_order = [np.sort(part) for part in parts]
    block = max(1, _BLOCK_BYTES // (8 * columns))
    first = int(starts[comm.rank])
    for offset in range(0, int(np.diff(starts).max(initial=0)), block):
        windows = [(min(start + offset, stop), min(start + offset + block, stop)) for start, stop in pairwise(starts)]
        start, stop = windows[comm.rank]
        read: Callable[[], np.ndarray] = partial(np.empty, (0, columns))
        if source is not None and start < stop:
            read = partial(read_checked, source, start - first, stop - first)
        table = attempt(comm, read)
        chunks = [table[part[slice(*np.searchsorted(part, (start, stop)))] - start] for part in in_order]
        outgoing = [chunk for chunk in chunks for _ in range(mesh.model)]
        flat, sizes = np.concatenate(outgoing), [chunk.size for chunk in outgoing]
        cuts = [tuple(np.searchsorted(in_order[mesh.batch_index], window)) for window in windows]
        received = np.empty((sum(b - a for a, b in cuts), columns))
        counts = [(b - a) * columns for a, b in cuts]
        comm.Alltoallv([flat, sizes, None, MPI.DOUBLE], [received, counts, None, MPI.DOUBLE])
        mine[np.concatenate([by_row[a:b] for a, b in cuts])] = received
    return mine
