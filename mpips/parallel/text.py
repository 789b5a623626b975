"""Delimited text: rows found by their line ends, and only the rows that are asked for parsed."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .agreement import TrainingError


class TextSource:
    """A file of numbers, one row a line, fields separated by commas, tabs or blanks, with or without a line of names.

    `target` and `features` are columns by name or by number from 1; by default the target is the last column and the
    features are all others. Raises TrainingError, naming the line and the column, on what is not a finite number.
    """

    classes: int | None = None

    def __init__(self, path: str, target: Sequence[str] = (), features: Sequence[str] = ()) -> None:
        self.name = path
        if not os.path.isfile(path):
            raise TrainingError(f"data file {path} does not exist")
        if not os.path.getsize(path):
            raise TrainingError(f"data file {path} is empty")
        with open(path, "rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts, self._stops, self._lines = _lines(self._bytes)
        first = self._line(0)
        self._delimiter = "," if "," in first else "\t" if "\t" in first else None
        names = self._header(first)
        self._width = len(first.split(self._delimiter))
        targets = [self._column(column, names) for column in target] or [self._width - 1]
        inputs = [self._column(column, names) for column in features]
        inputs = inputs or [column for column in range(self._width) if column not in targets]
        if not inputs or set(inputs) & set(targets):
            raise TrainingError(f"{path} has {self._width} columns, of which some must be features, not targets")
        self._columns = inputs + targets
        self.rows, self.features, self.targets = len(self._starts), len(inputs), len(targets)
        if not self.rows:
            raise TrainingError(f"{path} has names of columns but no row")

    def fingerprint(self) -> int:
        """A number that is the same on every rank that sees the same file."""
        return len(self._bytes)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """These rows, (len(rows), features + targets), float64."""
        lines = [self._line(row) for row in rows]
        if not lines:
            return np.empty((0, len(self._columns)))
        try:
            table = np.loadtxt(lines, delimiter=self._delimiter, ndmin=2, comments=None)
        except ValueError:
            table = np.empty((0, 0))
        if table.shape != (len(lines), self._width) or not np.isfinite(table[:, self._columns]).all():
            self._explain(rows, lines)
        return np.ascontiguousarray(table[:, self._columns])

    def _line(self, row: int) -> str:
        return self._bytes[self._starts[row] : self._stops[row]].decode("utf-8", "replace").strip()

    def _header(self, first: str) -> list[str]:
        """Names of the columns; takes the first line away from the rows if it holds them."""
        fields = [field.strip() for field in first.split(self._delimiter)]
        if any(_number(field) is not None for field in fields):
            return []
        self._starts, self._stops, self._lines = self._starts[1:], self._stops[1:], self._lines[1:]
        return fields

    def _column(self, column: str, names: list[str]) -> int:
        if column in names:
            return names.index(column)
        if column.isdigit() and 1 <= int(column) <= self._width:
            return int(column) - 1
        known = f"the columns are {', '.join(names)}" if names else "it has no line of names"
        raise TrainingError(f"{self.name} has no column {column!r}: {known}; or give a number from 1 to {self._width}")

    def _explain(self, rows: np.ndarray, lines: list[str]) -> None:
        """Raise for the first line of the file that is wrong."""
        for row, line in sorted(zip(rows, lines)):
            fields = line.split(self._delimiter)
            where = f"{self.name}, line {self._lines[row]}"
            if len(fields) != self._width:
                raise TrainingError(f"{where}: {len(fields)} columns where the first line has {self._width}")
            for column in self._columns:
                field = fields[column].strip()
                value = _number(field)
                if value is None or not np.isfinite(value):
                    what = "is missing" if not field else f"is {field!r}, not a finite number"
                    raise TrainingError(f"{where}: column {column + 1} {what}; mend or remove the line")
        raise TrainingError(f"{self.name} cannot be read as a table of numbers")


def _number(field: str) -> float | None:
    try:
        return float(field)
    except ValueError:
        return None


def _lines(data: mmap.mmap) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Start, stop and number (from 1) of every line that is not blank."""
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    if not len(ends) or ends[-1] != len(data) - 1:
        ends = np.append(ends, len(data))
    starts = np.concatenate([[0], ends[:-1] + 1])
    filled = np.array([bool(data[start:stop].strip()) for start, stop in zip(starts, ends)], bool)
    return starts[filled], ends[filled], np.flatnonzero(filled) + 1


def airfoil(directory: str) -> TextSource:
    """The NASA airfoil self-noise set of the UCI repository: 1,503 rows; columns 2 to 5 predict the last one."""
    path = Path(directory) / "airfoil_self_noise.dat"
    if not path.is_file():
        raise TrainingError(
            f"{path} does not exist: download the airfoil self-noise set from the UCI machine learning repository and "
            f"name its directory with --data-directory"
        )
    return TextSource(str(path), features=("2", "3", "4", "5"))
