"""Labels of classes as files have them: whole numbers, or words. All ranks number them alike: 0, 1, 2, ..."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
from mpi4py import MPI

from ..agreement import TrainingError, agree, gather_bytes

if TYPE_CHECKING:
    from .sources import Source

MOST = 10_000
"""Labels that may be classes; more of them are numbers to be learned."""
MISSING = {"", "?", "na", "n/a", "nan", "null"}
"""What stands where there is no label, in small letters."""
NO_LABEL = "no label of a class: labels are whole numbers, or words"
_SHOWN = 6  # labels that a sentence shows


def label_of(field: str) -> str | None:
    """The label that a text stands for: "2" of "2.0", words as they are; None where it is none."""
    try:
        number = float(field) if field.isascii() and "_" not in field else None
    except ValueError:
        number = None
    if number is None:
        return None if field.lower() in MISSING else field
    return str(int(number)) if number == number // 1 and abs(number) <= 2**53 else None


def is_number(label: str) -> bool:
    """Whether it stands for a whole number."""
    return label.lstrip("-").isdecimal() and label.isascii()


def see_few(name: str, labels: Mapping[str, int]) -> None:
    """TrainingError where there are more labels than classes."""
    if len(labels) > MOST:
        raise TrainingError(f"{name} has more than {MOST:,} different labels, such as {_listed(list(labels))}: "
                            "they are no classes; leave --classify out to learn numbers")


def number_labels(source: Source | None, comm: MPI.Comm, known: Sequence[str] | None) -> tuple[str, ...]:
    """The labels of the rows that all ranks read, in the order of their classes, which `source` then gives.

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
        problem = (f"label {strange[0]!r} is none of the checkpoint's, which are {_listed(known)}: give it rows of the "
                   "same classes, or train anew")
    agree(comm, problem)
    ordered = tuple(known or sorted(labels, key=int if numbers else str))
    if source is not None:
        source.number(ordered)
    return ordered


def _labels_of(source: Source | None) -> tuple[tuple[list[str], list[str]], str | None]:
    """The labels that this rank's part has, where the first word and the first number are; what is wrong with them."""
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


def told(labels: Sequence[str]) -> str:
    """Which label is which class, in words; "" where they are 0, 1, 2, ... themselves."""
    if list(labels) == [str(number) for number in range(len(labels))]:
        return ""
    pairs = [f"{label} is {number}" for number, label in enumerate(labels[:_SHOWN])]
    return f"{len(labels)} classes: {', '.join(pairs)}{', ...' if len(labels) > _SHOWN else ''}"


def _listed(labels: Sequence[str]) -> str:
    more = f" and {len(labels) - _SHOWN:,} more" if len(labels) > _SHOWN else ""
    return ", ".join(labels[:_SHOWN]) + more
