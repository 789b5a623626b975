"""`DataSource`, the base class for sources of rows; checks of the rows that a source reads; class labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpips.mlp.mesh import TrainingError, counted

# a column with more different labels than this holds numbers, not classes
MOST_LABELS = 10_000
NO_LABEL = "no label of a class: labels are whole numbers, or words"
# texts that mean that a label is missing, in lower case
MISSING_LABELS = {"", "?", "na", "n/a", "nan", "null"}
# number of labels that a message lists
_SHOWN = 6
# largest number accepted: the squares of such numbers can be summed over 1e28 rows
_GREATEST = 1e140


class DataSource:
    """Base class of the sources of rows. A row has `features` inputs, followed by `targets` targets.

    Rows are read part by part: `open_part` chooses the part, and later calls count rows from the beginning of the part.

    Attributes:
        name: The name of the source in error messages.
        features: Number of inputs.
        targets: Number of targets.
        classes: None if the targets are numbers. Otherwise the only target is a class number, and `classes` is the
            number of classes, or 0 if this number is only known after `labels` has been called.
        apart: True if a part can be read without the rest. If not, one rank reads all rows and sends them.
    """

    name: str
    features: int
    targets: int
    classes: int | None = None
    apart = True

    def fingerprint(self) -> str:
        """Return the size and a checksum of the rows. If there are many rows, the checksum is computed from samples.

        The result is equal on all ranks that see the same rows. It takes little time compared with reading a part.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise TrainingError if the file is damaged, as far as its format allows this check.

        This reads the whole file, so only rank 0 calls it.
        """

    def open_part(self, parts: int, index: int) -> int:
        """Choose part `index` of `parts` contiguous parts, and return its number of rows."""
        raise NotImplementedError

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of the part as float64, (stop - start, features + targets).

        Raise TrainingError if a value is not a number.
        """
        raise NotImplementedError

    def where(self, row: int, column: int) -> str:
        """Describe a value of the part for a message: "FILE, line 3: column 2 is 'x'"."""
        raise NotImplementedError

    def labels(self) -> dict[str, int]:
        """Return label -> first row with this label, for the labels of the part. Called if `classes` is 0.

        Raise TrainingError if a label is missing or is neither a whole number nor a word.
        """
        raise NotImplementedError

    def number(self, labels: Sequence[str]) -> None:
        """Set the labels of the classes 0, 1, 2, ... From now on `read` returns class numbers."""
        raise NotImplementedError

    def columns(self) -> str:
        """Describe the columns in words: "8 features -> 1 target"."""
        targets = "a class" if self.classes is not None else counted(self.targets, "target")
        return f"{counted(self.features, 'feature')} -> {targets}"


def read_checked(source: DataSource, start: int, stop: int) -> np.ndarray:
    """Read rows [start, stop) of the part and check them.

    Raise TrainingError if a number is not finite, if it is too large to be squared, or if it should be a class number
    but is not.
    """
    table = source.read(start, stop)
    if (bad := ~np.isfinite(table)).any():
        row, column = np.argwhere(bad)[0].tolist()
        raise TrainingError(f"{source.where(start + row, column)}, not a finite number; mend or remove the row")
    if (huge := np.abs(table) > _GREATEST).any():
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


# ---- labels


def number_of(field: str) -> float | None:
    """Parse a number as NumPy does, or return None. Unlike float(), this refuses 1_000 and digits of other scripts."""
    try:
        return float(field) if field.isascii() and "_" not in field else None
    except ValueError:
        return None


def label_of(field: str) -> str | None:
    """Return the label in a field of a file: "2" for "2.0", and a word as it is. None if the field is not a label."""
    number = number_of(field)
    if number is None:
        return None if field.lower() in MISSING_LABELS else field
    return str(int(number)) if number == number // 1 and abs(number) <= 2**53 else None


def is_number(label: str) -> bool:
    """True if a label is a whole number."""
    return label.lstrip("-").isdecimal() and label.isascii()


def check_few_labels(name: str, labels: Mapping[str, int]) -> None:
    """Raise TrainingError if the source `name` has too many different labels for classes."""
    if len(labels) > MOST_LABELS:
        raise TrainingError(
            f"{name} has more than {MOST_LABELS:,} different labels, such as {listed(list(labels))}: "
            "they are no classes; leave --classify out to learn numbers"
        )


def listed(labels: Sequence[str]) -> str:
    """Format labels for a message: the first few, and the number of the rest."""
    more = f" and {len(labels) - _SHOWN:,} more" if len(labels) > _SHOWN else ""
    return ", ".join(labels[:_SHOWN]) + more


def name_classes(labels: Sequence[str]) -> str:
    """Describe in words which label is which class. Return "" if the labels are 0, 1, 2, ... themselves."""
    if list(labels) == [str(number) for number in range(len(labels))]:
        return ""
    pairs = [f"{label} is {number}" for number, label in enumerate(labels[:_SHOWN])]
    return f"{len(labels)} classes: {', '.join(pairs)}{', ...' if len(labels) > _SHOWN else ''}"
