"""The part of a data set that one rank trains and tests on: `load`, with checks and standardisation.

A data set as all ranks see it before any row is read: who can read it, its shape, which rows each rank reads.

Which rows each batch index needs, in the order it uses them: the same minibatches on every mesh.

Rows are dealt once: a permutation by the seed, its first part for testing, the rest cut into minibatches; a minibatch
is cut into one slice for each batch index. A rank so needs, and keeps, only its slices, one behind the other, and a
step reads a contiguous block of them. Epochs visit the minibatches in a new order, not with new members, so that no
row moves between ranks during training.

How rows reach the ranks: every rank reads a part and they exchange, or rank 0 reads and sends them.

Sending is done in one of the paper's two ways (section 7). Rows are read in the order of the file, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.mlp.data.sources import Source, read_checked
from mpips.mlp.data.text import is_number, listed, see_few
from mpips.mlp.mesh import Mesh, TrainingError, agree, alike, broadcast_bytes, gather_bytes
from mpips.mlp.network.layers import interval, working_dtype
from mpips.mlp.prediction import Link, measure_scatter, way_seconds


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


class Shape(NamedTuple):
    """What a source holds."""

    rows: int
    features: int
    targets: int
    classes: int  # -1: targets are numbers

    @property
    def outputs(self) -> int:
        """Outputs of a network for it: the classes, at least two, or the targets."""
        return self.targets if self.classes < 0 else max(self.classes, 2)


class Opened(NamedTuple):
    """A source of which every rank reads rows [starts[rank], starts[rank + 1]), or rank 0 all."""

    source: Source | None
    way: str  # "read"; "scatter", "broadcast", or "auto" where one of these two is still to be chosen
    shape: Shape
    starts: np.ndarray  # (ranks + 1,)
    columns: str
    labels: tuple[str, ...] = ()  # in the order of the classes; none where the classes are the source's own


def open_everywhere(
    open_source: Callable[[], Source], comm: MPI.Comm, way: str = "auto", labels: Sequence[str] | None = None
) -> Opened:
    """Open the source on rank 0, then on the others if all are to read and can; see which rows are whose.

    No rank looks at rows that it will not read, but rank 0 checks a file as a whole. `labels`: those of a checkpoint,
    whose classes the labels of a file keep; else they are numbered in their order. Collective; TrainingError on every
    rank, in the same words, if a rank that is needed cannot open it, if ranks that are to read see different data, if
    with way "read" the source has no parts, or if labels are none.
    """
    problem = None if way in ("auto", *WAYS) else f"way {way!r} is unknown; choose auto, {', '.join(WAYS)}"
    alike(comm, "load", {"way": way}, problem)
    source, problem = _open(open_source, whole=True) if comm.rank == 0 else (None, None)
    agree(comm, problem)
    facts = _tell(source, comm)
    if comm.size > 1 and not facts[0] and way == "read":
        raise TrainingError("these data cannot be read in parts: choose --way auto, scatter or broadcast")
    together = comm.size == 1 or (bool(facts[0]) and way in ("auto", "read"))
    if together and comm.rank:
        source, problem = _open(open_source)
    if way == "read":
        agree(comm, problem)
    if way in ("auto", "read") and together and _opened_everywhere(comm, source):
        _check_same(comm, source)
        way = "read"
    count, problem = _part(source, comm, way)
    agree(comm, problem)
    counts = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([count], np.int64), counts)
    starts = np.concatenate([[0], np.cumsum(counts)])
    columns = broadcast_bytes(comm, source.columns().encode() if source and comm.rank == 0 else b"").decode()
    shape = Shape(int(starts[-1]), *(int(fact) for fact in facts[1:]))
    agree(comm, f"{source.name} has no row of numbers" if source and not shape.rows else None)
    if shape.classes >= 0 and shape.targets != 1:
        raise TrainingError(f"class numbers need one target column, not {shape.targets}")
    reader = source if way == "read" or comm.rank == 0 else None
    if shape.classes:
        return Opened(reader, way, shape, starts, columns)
    found = _number_labels(reader, comm, labels)
    if labels is None and len(found) >= max(shape.rows, 3):
        raise TrainingError(f"{shape.rows} rows have {len(found)} different labels, such as {found[0]}: they are no "
                            "classes; leave --classify out to learn numbers")
    return Opened(reader, way, shape._replace(classes=len(found)), starts, columns, found)


def _number_labels(source: Source | None, comm: MPI.Comm, known: Sequence[str] | None) -> tuple[str, ...]:
    """Return the labels of the rows that all ranks read, in the order of their classes, which `source` then gives.

    `known`: those of a checkpoint, whose classes they keep. Collective; TrainingError on every rank where they are
    words and numbers, too many, or none of those that are known.
    """
    mine, problem = _labels_of(source)
    told = [msgspec.json.decode(each, type=tuple[list[str], list[str]]) for each in
            gather_bytes(comm, msgspec.json.encode(mine))]  # fmt: skip
    agree(comm, problem)
    labels = dict.fromkeys(label for each, _ in told for label in each)
    words, numbers = (next((places[index] for _, places in told if places[index]), "") for index in (0, 1))
    if words and numbers:
        problem = f"{words}, a word, but {numbers}, a number: labels are all words or all numbers; mend one of them"
    elif known is not None and (strange := [label for label in labels if label not in set(known)]):
        problem = (f"label {strange[0]!r} is none of the checkpoint's, which are {listed(known)}: give it rows of the "
                   "same classes, or train anew")
    agree(comm, problem)
    ordered = tuple(known or sorted(labels, key=int if numbers else str))
    if source is not None:
        source.number(ordered)
    return ordered


def _labels_of(source: Source | None) -> tuple[tuple[list[str], list[str]], str | None]:
    """Return the labels of this rank's part, where the first word and the first number are, and what is wrong."""
    if source is None:
        return ([], ["", ""]), None
    try:
        found = source.labels()
        see_few(source.name, found)
    except TrainingError as error:
        return ([], ["", ""]), str(error)
    rows = {is_number(label): row for label, row in reversed(found.items())}
    places = [source.where(rows[kind], source.features) if kind in rows else "" for kind in (False, True)]
    return (list(found), places), None


def _open(open_source: Callable[[], Source], whole: bool = False) -> tuple[Source | None, str | None]:
    """The source, `whole`: whose file has been checked to its end; what is wrong with it."""
    try:
        source = open_source()
        if whole:
            source.check()
        return source, None
    except TrainingError as error:
        return None, str(error)


def _tell(source: Source | None, comm: MPI.Comm) -> np.ndarray:
    """Rank 0's source in numbers: apart, features, targets, classes."""
    facts = np.zeros(4, np.int64)
    if source is not None:
        classes = -1 if source.classes is None else source.classes
        facts[:] = source.apart, source.features, source.targets, classes
    comm.Bcast(facts)
    return facts


def _opened_everywhere(comm: MPI.Comm, source: Source | None) -> bool:
    everywhere = np.array([source is not None], np.int64)
    comm.Allreduce(MPI.IN_PLACE, everywhere, MPI.MIN)
    return bool(everywhere[0])


def _check_same(comm: MPI.Comm, source: Source | None) -> None:
    """Refuse data that differ between ranks that are to read parts of them: the whole would be a mixture."""
    assert source is not None, "asked of ranks that have opened it"
    facts = {
        "features": source.features, "targets": source.targets, "classes": source.classes,
        "read in parts": source.apart, "columns": source.columns(), "content": source.fingerprint(),
    }  # fmt: skip
    alike(comm, "the data differ between the ranks", facts, cure="give all ranks the same file, or choose scatter")


def _part(source: Source | None, comm: MPI.Comm, way: str) -> tuple[int, str | None]:
    """How many rows this rank is to read."""
    if source is None or (way != "read" and comm.rank):
        return 0, None
    try:
        return source.open_part(*((comm.size, comm.rank) if way == "read" else (1, 0))), None
    except TrainingError as error:
        return 0, str(error)


class Rule(NamedTuple):
    """By what rows are dealt: the same seed and share (of a file's rows, for testing) give the same test rows."""

    seed: int
    test_share: float
    batch: int


class Deal(NamedTuple):
    """What one batch index holds. Its slice of minibatch k is ``train[bounds[k]:bounds[k + 1]]``, maybe empty."""

    train: np.ndarray  # row numbers, (own training rows,)
    bounds: np.ndarray  # (minibatches + 1,)
    samples: np.ndarray  # samples of each whole minibatch, (minibatches,)
    test: np.ndarray  # row numbers, (own test rows,)


def deal(rows: int, test_rows: int, batch: int, parts: int, index: int, seed: int) -> Deal:
    """The rows of batch index `index` of `parts`: minibatches of `batch` samples, the last one perhaps smaller."""
    order = np.random.default_rng([seed, 0]).permutation(rows)
    test, train = order[:test_rows], order[test_rows:]
    starts = np.arange(0, len(train), batch)
    samples = np.minimum(len(train) - starts, batch)
    slices = [interval(int(count), parts, index) for count in samples]
    bounds = np.concatenate([[0], np.cumsum([stop - start for start, stop in slices], dtype=np.int64)])
    own = [train[first + start : first + stop] for first, (start, stop) in zip(starts, slices)]
    return Deal(np.concatenate([train[:0], *own]), bounds, samples, test[slice(*interval(test_rows, parts, index))])


def order(minibatches: int, epoch: int, seed: int) -> np.ndarray:
    """The order in which an epoch (from 0) visits the minibatches."""
    return np.random.default_rng([seed, 1, epoch]).permutation(minibatches)


WAYS = ("read", "scatter", "broadcast")
_BLOCK_BYTES = 32 << 20  # of rows that a reader has on the way at a time, so that nobody holds all

Read = Callable[[int, int], np.ndarray]


def distribute(
    mesh: Mesh, way: str, read: Read | None, starts: np.ndarray, parts: list[np.ndarray], columns: int
) -> np.ndarray:
    """The rows ``parts[mesh.batch_index]`` on every rank, (rows, columns) float64. Collective.

    `parts` holds the row numbers of every batch index. Rank r reads rows [starts[r], starts[r + 1]), which
    `read(start, stop)` gives, counted from its first one; unless the way is "read", rank 0 reads all of them. A
    TrainingError of a reader is raised by all ranks.
    """
    comm = mesh.comm
    wanted = parts[mesh.batch_index]
    mine = np.empty((len(wanted), columns))
    by_row = np.argsort(wanted)
    in_order = [np.sort(part) for part in parts]
    block = max(1, _BLOCK_BYTES // (8 * columns))
    send = {"read": _exchange, "scatter": _scatter, "broadcast": _scatter_broadcast}[way]
    first = int(starts[comm.rank])
    for offset in range(0, int(np.diff(starts).max(initial=0)), block):
        windows = [(min(start + offset, stop), min(start + offset + block, stop)) for start, stop in pairwise(starts)]
        start, stop = windows[comm.rank]
        table, problem = _attempt(read, start - first, stop - first, columns)
        agree(comm, problem)
        chunks = [table[part[slice(*np.searchsorted(part, (start, stop)))] - start] for part in in_order]
        cuts = [tuple(np.searchsorted(in_order[mesh.batch_index], window)) for window in windows]
        received = np.empty((sum(b - a for a, b in cuts), columns))
        send(mesh, chunks, received, [(b - a) * columns for a, b in cuts])
        mine[np.concatenate([by_row[a:b] for a, b in cuts])] = received
    return mine


def _attempt(read: Read | None, start: int, stop: int, columns: int) -> tuple[np.ndarray, str | None]:
    if read is None or start == stop:
        return np.empty((0, columns)), None
    try:
        return read(start, stop), None
    except TrainingError as error:
        return np.empty((0, columns)), str(error)


def _exchange(mesh: Mesh, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Every rank sends every rank what it has read of the other's rows; `counts` elements come from each."""
    outgoing = [chunk for chunk in chunks for _ in range(mesh.model)]
    flat, sizes = np.concatenate(outgoing), [chunk.size for chunk in outgoing]
    mesh.comm.Alltoallv([flat, sizes, None, MPI.DOUBLE], [received, counts, None, MPI.DOUBLE])


def _scatter(mesh: Mesh, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Rank 0 sends every rank its rows, the ranks of one model the same ones."""
    outgoing = [chunk for chunk in chunks for _ in range(mesh.model)]
    mesh.comm.Scatterv(_root(mesh, outgoing), received, root=0)


def _scatter_broadcast(mesh: Mesh, chunks: list[np.ndarray], received: np.ndarray, counts: list[int]) -> None:
    """Rank 0 sends rows to one rank of each model, which broadcasts them to the others."""
    if mesh.model_index == 0:
        mesh.batch_comm.Scatterv(_root(mesh, chunks), received, root=0)
    mesh.model_comm.Bcast(received, root=0)


def _root(mesh: Mesh, outgoing: list[np.ndarray]) -> list[object] | None:
    if mesh.comm.rank:
        return None
    return [np.concatenate(outgoing), [chunk.size for chunk in outgoing], None, MPI.DOUBLE]
