"""Where rows come from: texts, arrays, sets that come with a package, synthetic rows.

A source gives its rows part by part, so that each rank looks at one part only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from collectives.machine import memory

from mpips.mlp.agreement import TrainingError, counted
from mpips.mlp.intervals import interval
from mpips.mlp.data.arrays import digits, mnist, npz
from mpips.mlp.data.text import TextSource, airfoil

BUILT_IN = ("digits", "mnist", "airfoil", "synthetic")
_BLOCK_ROWS = 4096
_GREATEST = 1e140  # squares of such numbers can still be summed, over more rows than there are


class Source(Protocol):
    """Rows of `features` inputs followed by `targets` targets; with `classes` the one target is a class number (0: how
    many there are is not known)."""

    name: str
    features: int
    targets: int
    classes: int | None
    apart: bool
    """Whether a part can be read without the rest. If not, one rank reads all rows and sends them."""

    def fingerprint(self) -> str:
        """How much there is and a checksum, of samples of the rows where they are many: the same on every rank that can
        read the same rows. Cheap beside reading a part."""

    def check(self) -> None:
        """TrainingError where a file is damaged, as far as its format can tell. Reads all of it; for one rank."""

    def open_part(self, parts: int, index: int) -> int:
        """Turn to part `index` of `parts`, which follow one another; returns how many rows it has."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the part, (stop - start, features + targets), float64; TrainingError on no numbers."""

    def where(self, row: int, column: int) -> str:
        """Where a value of the part is and what: the beginning of a sentence about it."""

    def labels(self) -> dict[str, int]:
        """The labels of the part, each with the first row that has it; asked where `classes` is 0. TrainingError where
        one is missing, or is no label."""

    def number(self, labels: Sequence[str]) -> None:
        """`read` gives these labels as 0, 1, 2, ... from now on, and there are so many classes."""

    def columns(self) -> str:
        """What is learned from what."""


def read_checked(source: Source, start: int, stop: int) -> np.ndarray:
    """`source.read`; raises TrainingError, too, on what is not finite, is too large to be squared or, where classes are
    wanted, is no class number."""
    table = source.read(start, stop)
    bad = ~np.isfinite(table)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise TrainingError(f"{source.where(start + row, column)}, not a finite number; mend or remove the row")
    huge = np.abs(table) > _GREATEST
    if huge.any():
        row, column = np.argwhere(huge)[0].tolist()
        raise TrainingError(
            f"{source.where(start + row, column)}, whose size is above {_GREATEST:g}: the column's deviation would be "
            f"infinite; divide the column by a number, or mend or remove the row"
        )
    if source.classes is not None and source.targets == 1:
        label = table[:, -1]
        wrong = np.flatnonzero((label != np.floor(label)) | (label < 0) | (label >= (source.classes or 2**31)))
        if len(wrong):
            known = f"0 to {source.classes - 1}" if source.classes else "0, 1, 2, ..."
            place = source.where(start + int(wrong[0]), source.features)
            raise TrainingError(f"{place}, not a class number: classes are {known}")
    return table


class SyntheticSource:
    """Rows made from their numbers: targets are smooth functions of normal features, plus a little noise.

    The default has the shape of the paper's large set (UCI ethylene in methane), which it is not.
    """

    classes: int | None = None
    apart = True

    def __init__(self, rows: int = 700_000, features: int = 16, targets: int = 2) -> None:
        if min(rows, features, targets) < 1:
            raise TrainingError(f"synthetic data of {rows} x {features} -> {targets}: each must be at least 1")
        self.name = f"synthetic {rows:,} x {features} -> {targets}"
        self.rows, self.features, self.targets = rows, features, targets
        largest = 8 * max(features * targets, _BLOCK_ROWS * (features + targets))
        try:
            memory.check(f"synthetic data of {rows} x {features} -> {targets}", largest, 2)
        except ValueError as error:
            raise TrainingError(str(error)) from None
        self._mix = np.random.default_rng([features, targets]).standard_normal((features, targets)) / np.sqrt(features)
        self._first = 0

    def fingerprint(self) -> str:
        return counted(self.rows, "row")

    def check(self) -> None:
        pass

    def open_part(self, parts: int, index: int) -> int:
        self._first, stop = interval(self.rows, parts, index)
        return stop - self._first

    def read(self, start: int, stop: int) -> np.ndarray:
        table = np.empty((stop - start, self.features + self.targets))
        row, end = self._first + start, self._first + stop
        while row < end:
            block, inside = divmod(row, _BLOCK_ROWS)
            count = min(_BLOCK_ROWS - inside, end - row)
            table[row - self._first - start :][:count] = self._block(block)[inside : inside + count]
            row += count
        return table

    def where(self, row: int, column: int) -> str:
        raise AssertionError("synthetic rows are numbers")

    def labels(self) -> dict[str, int]:
        raise AssertionError("synthetic rows have no classes")

    def number(self, labels: Sequence[str]) -> None:
        raise AssertionError("synthetic rows have no classes")

    def columns(self) -> str:
        return f"{counted(self.features, 'feature')} -> {counted(self.targets, 'target')}"

    def _block(self, block: int) -> np.ndarray:
        rng = np.random.default_rng([self.features, self.targets, block])
        x = rng.standard_normal((_BLOCK_ROWS, self.features))
        noise = 0.05 * rng.standard_normal((_BLOCK_ROWS, self.targets))
        return np.concatenate([x, np.sin(2 * x @ self._mix) + 0.5 * np.abs(x @ self._mix) + noise], axis=1)


def open_source(
    data: str, target: Sequence[str] = (), features: Sequence[str] = (), directory: str = ".", classify: bool = False,
    header: bool | None = None,
) -> Source:  # fmt: skip
    """The source named `data`: digits, mnist, airfoil, synthetic[:ROWS,FEATURES,TARGETS], a delimited text, an .npz.

    `target` and `features` choose columns of a text, whose first line holds names if `header` says so (None: if none
    of its fields is a number); `classify` says that its target (or y of an .npz) is a label, which `load` numbers.
    """
    built_in: dict[str, Callable[[], Source]] = {
        "digits": digits,
        "mnist": lambda: mnist(directory),
        "airfoil": lambda: airfoil(directory),
    }
    is_file = data not in built_in and data.split(":")[0] != "synthetic"
    if (target or features or header is not None) and (not is_file or data.endswith(".npz")):
        raise TrainingError(f"columns and a line of names can be chosen in a delimited text only, not in {data}")
    if classify and not is_file:
        raise TrainingError(f"what is a class number can be said of a file only, not of {data}")
    if data in built_in:
        return built_in[data]()
    if not is_file:
        return _synthetic(data)
    classes = 0 if classify else None  # known once the labels have been read
    return npz(data, classes) if data.endswith(".npz") else TextSource(data, target, features, header, classes)


def _synthetic(data: str) -> SyntheticSource:
    sizes = data.split(":")[1:]
    try:
        return SyntheticSource(*(int(size) for size in ",".join(sizes).split(",") if size))
    except (TypeError, ValueError) as error:
        if isinstance(error, TrainingError):
            raise
        raise TrainingError(f"data {data!r} must be synthetic or synthetic:ROWS,FEATURES,TARGETS") from error
