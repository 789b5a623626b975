"""Labels of classes as files have them: whole numbers, or words. What is one, and how it is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpips.mlp.agreement import TrainingError

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
        raise TrainingError(f"{name} has more than {MOST:,} different labels, such as {listed(list(labels))}: "
                            "they are no classes; leave --classify out to learn numbers")


def told(labels: Sequence[str]) -> str:
    """Which label is which class, in words; "" where they are 0, 1, 2, ... themselves."""
    if list(labels) == [str(number) for number in range(len(labels))]:
        return ""
    pairs = [f"{label} is {number}" for number, label in enumerate(labels[:_SHOWN])]
    return f"{len(labels)} classes: {', '.join(pairs)}{', ...' if len(labels) > _SHOWN else ''}"


def listed(labels: Sequence[str]) -> str:
    """Return some labels in words, and how many more there are."""
    more = f" and {len(labels) - _SHOWN:,} more" if len(labels) > _SHOWN else ""
    return ", ".join(labels[:_SHOWN]) + more
