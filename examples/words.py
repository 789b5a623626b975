"""What examples take from the command line, refused with a sentence where it cannot be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import IO, NoReturn

from collectives.terminal import describe_unwritable, is_first


class Parser(argparse.ArgumentParser):
    """A parser of which rank 0 alone tells what it says on every rank."""

    def error(self, message: str) -> NoReturn:
        if is_first():
            super().error(message)
        sys.exit(2)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if is_first():
            super().print_help(file)

    def check_files(self, options: argparse.Namespace, *names: str) -> None:
        """Refuse on every rank, before the work, what rank 0 could not write. Collective over COMM_WORLD."""
        from mpi4py import MPI  # a program that starts jobs does without

        files = {f"--{name} {getattr(options, name)}": getattr(options, name) for name in names}
        said = {words: describe_unwritable(file) for words, file in files.items() if file}
        refusals = [f"{words} {reason}" for words, reason in said.items() if reason]
        if said := MPI.COMM_WORLD.bcast(refusals, 0):
            self.error(said[0])


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
