"""Define a source of rows, check what it reads, and tell the labels of classes that files hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpips.mlp.mesh import TrainingError, counted

MOST_LABELS = 10_000
"""Labels that may be classes; more of them are numbers to be learned."""
NO_LABEL = "no label of a class: labels are whole numbers, or words"
MISSING_LABELS = {"", "?", "na", "n/a", "nan", "null"}  # in small letters
_SHOWN = 6  # labels that a sentence shows
_GREATEST = 1e140  # squares of such numbers can still be summed, over more rows than there are


class DataSource:
    """Rows of `features` inputs followed by `targets` targets, which are given part by part.

    With `classes` the one target is a class number (0: their number is not known).
    """

    name: str
    features: int
    targets: int
    classes: int | None = None
    apart = True
    """Whether a part can be read without the rest. If not, one rank reads all rows and sends them."""

    def fingerprint(self) -> str:
        """Return the size and a checksum, of samples of the rows where they are many.

        It is the same on every rank that can read the same rows, and cheap beside reading a part.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Raise TrainingError where a file is damaged, as far as its format can tell. Reads all of it; for one rank."""

    def open_part(self, parts: int, index: int) -> int:
        """Turn to part `index` of `parts`, which follow one another; return its number of rows."""
        raise NotImplementedError

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return rows [start, stop) of the part, (stop - start, features + targets), float64.

        TrainingError where they are no numbers.
        """
        raise NotImplementedError

    def where(self, row: int, column: int) -> str:
        """Return the place of a value of the part and the value: the beginning of a sentence about it."""
        raise NotImplementedError

    def labels(self) -> dict[str, int]:
        """Return the labels of the part, each with the first row that has it; asked where `classes` is 0.

        TrainingError where one is missing, or is no label.
        """
        raise NotImplementedError

    def number(self, labels: Sequence[str]) -> None:
        """Let `read` give these labels as 0, 1, 2, ... from now on; they are all classes."""
        raise NotImplementedError

    def columns(self) -> str:
        """Return in words which columns are learned from which."""
        targets = "a class" if self.classes is not None else counted(self.targets, "target")
        return f"{counted(self.features, 'feature')} -> {targets}"


def read_checked(source: DataSource, start: int, stop: int) -> np.ndarray:
    """Return rows that have been checked.

    TrainingError on numbers that are not finite, too large to be squared or, where classes are wanted, no classes.
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
    """Return the number that NumPy reads here, too; None where it reads none."""
    try:
        return float(field) if field.isascii() and "_" not in field else None
    except ValueError:
        return None


def label_of(field: str) -> str | None:
    """Return the label that a text stands for: "2" of "2.0", words as they are; None where it is none."""
    number = number_of(field)
    if number is None:
        return None if field.lower() in MISSING_LABELS else field
    return str(int(number)) if number == number // 1 and abs(number) <= 2**53 else None


def is_number(label: str) -> bool:
    """Return whether a label stands for a whole number."""
    return label.lstrip("-").isdecimal() and label.isascii()


def see_few(name: str, labels: Mapping[str, int]) -> None:
    """Raise TrainingError where there are more labels than classes."""
    if len(labels) > MOST_LABELS:
        raise TrainingError(
            f"{name} has more than {MOST_LABELS:,} different labels, such as {listed(list(labels))}: "
            "they are no classes; leave --classify out to learn numbers"
        )


def listed(labels: Sequence[str]) -> str:
    """Return some labels in words, and how many more there are."""
    more = f" and {len(labels) - _SHOWN:,} more" if len(labels) > _SHOWN else ""
    return ", ".join(labels[:_SHOWN]) + more


def name_classes(labels: Sequence[str]) -> str:
    """Return in words which label is which class; "" where they are 0, 1, 2, ... themselves."""
    if list(labels) == [str(number) for number in range(len(labels))]:
        return ""
    pairs = [f"{label} is {number}" for number, label in enumerate(labels[:_SHOWN])]
    return f"{len(labels)} classes: {', '.join(pairs)}{', ...' if len(labels) > _SHOWN else ''}"
