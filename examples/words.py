"""What examples take from the command line, refused with a sentence where it cannot be."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def number(kind: type, least: float) -> Callable[[str], float]:
    """A number of the command line that is not below `least`."""

    def read(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' * (kind is int)}number of at least {least:g}")
        return value

    return read
