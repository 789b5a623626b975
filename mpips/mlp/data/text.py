"""`TextSource`: delimited text. A part is an interval of the file's bytes, and a line is parsed when it is read."""

from __future__ import annotations

import csv
import mmap
import os
import re
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from mpips.mlp.data.base import MISSING_LABELS, NO_LABEL, DataSource, check_few_labels, label_of, number_of
from mpips.mlp.mesh import TrainingError
from mpips.mlp.network import interval

# texts that mean that the name of a column is missing, in lower case
_MISSING_NAMES = {*MISSING_LABELS, "-", "none", "nil"}
# the fingerprint of a large file reads this many samples of this many bytes
_SAMPLES = 256
_SAMPLE_BYTES = 4 << 10
# lines are counted in blocks of this many bytes
_COUNT_BYTES = 1 << 20
# delimiter -> its name in messages; None stands for any number of blanks
_DELIMITERS = {"\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars", None: "blanks"}
_QUOTED = re.compile(r'"[^"]*"?')
_FILLED = re.compile(rb"\S")
# first bytes of a file that is not text -> the end of the error message: the file's format, and what the user can do
_BINARY = {
    b"\x93NUMPY": "an array of NumPy: save inputs and targets as np.savez('data.npz', x=..., y=...)",
    b"PK\x03\x04": "a zip, as spreadsheets are: export it as CSV; arrays of NumPy need a name that ends in .npz",
    b"\x1f\x8b": "compressed by gzip: unpack it first",
    b"\x89HDF": "HDF5: save its arrays as np.savez('data.npz', x=..., y=...)",
    b"PAR1": "Parquet: export it as CSV",
    b"\xff\xfe": "text in UTF-16: save it in UTF-8",
    b"\xfe\xff": "text in UTF-16: save it in UTF-8",
}
# the name of a data frame's index column: pandas writes an empty name, and reads this name back as "Unnamed: 0"
_INDEX = re.compile(r"(Unnamed: 0)?")


class TextSource(DataSource):
    """A text file of numbers. Each line is a row; the first line may hold the names of the columns.

    Fields are separated by commas, semicolons, tabs, bars or blanks. Lines end in LF, CR LF, or CR alone.

    Args:
        path: The file, in UTF-8.
        target: Target columns, by name or by number from 1. Default: the last column.
        features: Feature columns. Default: all others, except a first column without a name, which is the index of a
            data frame.
        header: True if the first line holds names. Default: True if none of its fields is a number.
        classes: None: the targets are numbers. 0: the target is a label, any whole number or word. Otherwise the target
            is a class number, and this is the number of classes.

    Raises:
        TrainingError: If the file is not such a text, or lacks a column. Methods that read rows also raise it, for a
            value that is not a finite number or not a label. The message names file, line, column and value.

    >>> path = folder / "rows.csv"
    >>> _ = path.write_text("height,width,price\\n1,2,3\\n4,5,6\\n")
    >>> mpips.mlp.TextSource(str(path)).columns()
    'column 1 (height), column 2 (width) -> column 3 (price) (names from line 1)'
    """

    def __init__(
        self,
        path: str,
        target: Sequence[str] = (),
        features: Sequence[str] = (),
        header: bool | None = None,
        classes: int | None = None,
    ) -> None:
        self.name = path
        self.classes = classes
        self._bytes = _map(path)
        self._end = b"\n" if self._bytes.find(b"\n") >= 0 or self._bytes.find(b"\r") < 0 else b"\r"
        # Skip a byte order mark.
        self._begin = 3 if self._bytes[:3] == b"\xef\xbb\xbf" else 0
        filled = _FILLED.search(self._bytes, self._begin)
        if filled is None:
            raise TrainingError(f"data file {path} is empty")
        self._begin = max(self._begin, self._bytes.rfind(self._end, self._begin, filled.start()) + 1)
        after = self._line_from(self._begin + 1)
        first = self._text(self._begin, after)
        self._first_number = self._number_at(self._begin)
        second = self._text(after, self._line_from(after + 1))
        if self._bytes[self._begin : self._begin + 1] == b"\t" and second.count("\t") > first.count("\t"):
            # _text() has stripped the tab after the empty name of a data frame's index column.
            first = "\t" + first
        self._delimiter = _delimiter(first, second)
        fields = self._fields(first)
        self._width = len(fields)
        self._names = [""] * len(fields)
        # True if the first column is the index of a data frame and is left out
        self._index = False
        if not any(number_of(field) is not None for field in fields) if header is None else header:
            self._names = fields
            self._begin = after
            self._index = self._width > 2 and bool(_INDEX.fullmatch(fields[0])) and all(fields[1:])
            self._check_names({""} if header else _MISSING_NAMES)
        targets = [self._column(column) for column in target] or [self._width - 1]
        inputs = [self._column(column) for column in features]
        self._index = self._index and not inputs and 0 not in targets
        inputs = inputs or [column for column in range(self._index, self._width) if column not in targets]
        if self._width == 1:
            raise TrainingError(
                f"{path} has 1 column, but some must be features: fields must be separated by commas, semicolons, "
                f"tabs, bars or blanks, and line {self._first_number} is {first[:60]!r}"
            )
        if not inputs or set(inputs) & set(targets):
            raise TrainingError(f"{path} has {self._width} columns, of which some must be features, not targets")
        # the columns that are read: those of the inputs, then those of the targets
        self._columns = inputs + targets
        self.features = len(inputs)
        self.targets = len(targets)
        # for each line of the part, the positions of its first byte and of the byte after the line
        self._starts = self._stops = np.empty(0, np.int64)
        # label -> class number; None until number() sets it
        self._numbers: dict[str, int] | None = None

    def fingerprint(self) -> str:
        """Return the size and a checksum. If the file has more than 1 MiB, only evenly spaced samples are read."""
        size, starts, length, checksum = len(self._bytes), [0], len(self._bytes), 0
        if size > _SAMPLES * _SAMPLE_BYTES:
            starts, length = np.linspace(0, size - _SAMPLE_BYTES, _SAMPLES).astype(np.int64).tolist(), _SAMPLE_BYTES
        for start in starts:
            checksum = zlib.crc32(self._bytes[start : start + length], checksum)
        return f"{size} bytes, checksum {checksum:08x}, columns {self._columns}"

    def open_part(self, parts: int, index: int) -> int:
        """Choose the lines that begin in this part of the file's bytes. Only this part is searched for lines."""
        size = len(self._bytes)
        begin, end = (self._line_from(self._begin + cut) for cut in interval(size - self._begin, parts, index))
        data = np.frombuffer(self._bytes, np.uint8, end - begin, begin)
        stops = np.flatnonzero(data == self._end[0]) + 1
        if len(data) and not (len(stops) and stops[-1] == len(data)):
            stops = np.append(stops, len(data))
        starts = np.append(0, stops)[:-1]
        filled = np.logical_or.reduceat(data > ord(" "), starts) if len(data) else np.empty(0, bool)
        self._starts, self._stops = starts[filled] + begin, stops[filled] + begin
        return len(self._starts)

    def read(self, start: int, stop: int) -> np.ndarray:
        lines = [self._line(row) for row in range(start, stop)]
        if not lines:
            return np.empty((0, len(self._columns)))
        quote = '"' if any('"' in line for line in lines) else None
        if any(self._count(line) != self._width for line in lines):
            self._explain(start, lines)
        numbers, convert = self._numbers, dict[int | str, Callable[[str], int]]()
        if numbers:
            convert[self._columns[-1]] = lambda field: numbers[label_of(field.strip()) or ""]
        try:
            table: np.ndarray = np.loadtxt(
                lines,
                delimiter=self._delimiter,
                ndmin=2,
                comments=None,
                usecols=self._columns,
                quotechar=quote,
                converters=convert or None,
                encoding="utf-8",
            )
            return table
        except (ValueError, KeyError):
            self._explain(start, lines)
            raise TrainingError(f"{self._place(start)} and below cannot be read as a table of numbers") from None

    def where(self, row: int, column: int) -> str:
        field = self._fields(self._line(row))[self._columns[column]]
        return f"{self._place(row)}: {self._label(self._columns[column])} is {field!r}"

    def labels(self) -> dict[str, int]:
        column, rows, known = self._columns[-1], dict[str, int](), set[str]()
        for row in range(len(self._starts)):
            fields = self._fields(self._line(row))
            if len(fields) != self._width:
                self._explain(row, [self._line(row)])
            if (field := fields[column]) in known:
                continue
            known.add(field)
            label = label_of(field)
            if label is None:
                what = f"is {field!r}, {NO_LABEL}" if field else "is missing"
                raise TrainingError(f"{self._place(row)}: {self._label(column)} {what}; mend or remove the line")
            rows.setdefault(label, row)
            check_few_labels(self.name, rows)
        return rows

    def number(self, labels: Sequence[str]) -> None:
        self.classes = len(labels)
        self._numbers = {label: number for number, label in enumerate(labels)}

    def columns(self) -> str:
        """Describe the columns and their delimiter in words: "column 1 (a) -> column 2 (b) (names from line 1)"."""
        inputs, targets = self._columns[: self.features], self._columns[self.features :]
        head = f"names from line {self._first_number}" if any(self._names) else "no line of names"
        if self._delimiter != ",":
            head += f", fields separated by {_DELIMITERS[self._delimiter]}"
        if self._index:
            head += ", column 1 left out: the index of a frame"
        return f"{', '.join(map(self._label, inputs))} -> {', '.join(map(self._label, targets))} ({head})"

    # -- names and numbers of columns

    def _check_names(self, missing: set[str]) -> None:
        """Raise TrainingError if the line of names looks like a broken row. Texts in `missing` are not names."""
        for column, name in enumerate(self._names):
            if column < self._index:
                continue
            if name.lower() in missing or name in self._names[:column]:
                why = "is missing" if name.lower() in missing else f"is {name!r} as a column before"
                raise TrainingError(
                    f"{self.name}, line {self._first_number}: column {column + 1} {why}; a line without numbers must "
                    f"name every column, each differently: mend it, or remove it if it is a broken row"
                )

    def _column(self, column: str) -> int:
        if column in self._names:
            return self._names.index(column)
        if column.isdecimal() and 1 <= int(column) <= self._width:
            return int(column) - 1
        known = f"the columns are {', '.join(self._names)}" if any(self._names) else "it has no line of names"
        raise TrainingError(f"{self.name} has no column {column!r}: {known}; or give a number from 1 to {self._width}")

    # -- lines

    def _line_from(self, at: int) -> int:
        """Return the first byte at or after `at` at which a line begins."""
        if at <= self._begin:
            return self._begin
        newline = self._bytes.find(self._end, at - 1)
        return len(self._bytes) if newline < 0 else newline + 1

    def _line(self, row: int) -> str:
        return self._text(int(self._starts[row]), int(self._stops[row]))

    def _text(self, start: int, stop: int) -> str:
        """Decode an interval of bytes, and strip blanks."""
        return self._bytes[start:stop].decode("utf-8", "replace").strip()

    def _fields(self, line: str) -> list[str]:
        if '"' in line:
            try:
                fields = next(csv.reader([line], delimiter=self._delimiter or " ", skipinitialspace=True))
            # The line has a line end in its middle, or a field of 128 KiB: it is not a row of numbers.
            except csv.Error:
                return [line]
            return [field.strip() for field in fields]
        return [field.strip() for field in line.split(self._delimiter)]

    def _count(self, line: str) -> int:
        if '"' in line:
            return len(self._fields(line))
        return line.count(self._delimiter) + 1 if self._delimiter else len(line.split())

    def _label(self, column: int) -> str:
        name = self._names[column]
        return f"column {column + 1} ({name})" if name else f"column {column + 1}"

    def _place(self, row: int) -> str:
        return f"{self.name}, line {self._number_at(int(self._starts[row]))}"

    def _number_at(self, start: int) -> int:
        """Return the number, from 1, of the line that begins at this byte. Count lines from the file's beginning."""
        blocks = range(0, start, _COUNT_BYTES)
        return 1 + sum(self._bytes[at : min(start, at + _COUNT_BYTES)].count(self._end) for at in blocks)

    def _explain(self, start: int, lines: list[str]) -> None:
        """Raise TrainingError for the first line that is wrong, if any line is. `start` is the row of `lines[0]`."""
        for row, line in enumerate(lines, start):
            fields = self._fields(line)
            if "\r" in line or "\n" in line:
                raise TrainingError(
                    f"{self._place(row)} holds another line's end in its middle: write all lines with one kind of end"
                )
            if len(fields) != self._width:
                raise TrainingError(
                    f"{self._place(row)}: {len(fields)} columns where the first line has {self._width}, separated by "
                    f"{_DELIMITERS[self._delimiter]}"
                )
            for column in self._columns[: self.features if self._numbers else None]:
                if number_of(fields[column]) is None:
                    what = f"is {fields[column]!r}, not a finite number" if fields[column] else "is missing"
                    cure = "mend or remove the line"
                    if number_of(fields[column].replace(",", "")) is not None:
                        cure = "write it without commas, with a point before decimals"
                    elif fields[column] and column in self._columns[self.features :]:
                        cure += ", or say --classify if it is a label"
                    if self._starts[row] == self._begin and not any(self._names):
                        cure += ", or say --header if it names the columns"
                    raise TrainingError(f"{self._place(row)}: {self._label(column)} {what}; {cure}")


def _map(path: str) -> mmap.mmap:
    """Map a file into memory. Raise TrainingError if it cannot be read or is not text."""
    if not os.path.isfile(path):
        raise TrainingError(f"data file {path} does not exist")
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError as error:
        raise TrainingError(f"data file {path} is empty") from error
    except OSError as error:
        raise TrainingError(f"data file {path} cannot be read: {error.strerror}") from error
    head = data[:4096]
    kind = next((kind for mark, kind in _BINARY.items() if head.startswith(mark)), None)
    if kind is None and b"\0" in head:
        kind = "no text, as it holds zero bytes: give a text of numbers, or an .npz"
    if kind is not None:
        raise TrainingError(f"data file {path} is {kind}")
    return data


def _delimiter(first: str, second: str) -> str | None:
    """Guess the delimiter of a file from its first two lines. Return None if fields are separated by blanks.

    Prefer a delimiter that occurs equally often in both lines. Otherwise take one that occurs in the first line.
    """
    first, second = (_QUOTED.sub("", line) for line in (first, second))
    alike = [each for each in _DELIMITERS if each and first.count(each) == second.count(each) > 0]
    return next(iter([*alike, *(each for each in ",\t;|" if each in first)]), None)
