"""A data set as all ranks see it before any row is read: who can read it, its shape, which rows each rank reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.mlp.agreement import TrainingError, agree, alike, broadcast_bytes, gather_bytes
from mpips.mlp.data.distribution import WAYS
from mpips.mlp.data.labels import is_number, listed, see_few
from mpips.mlp.data.sources import Source


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
