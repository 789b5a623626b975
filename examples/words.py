"""Command-line parsing for the examples, with one error message for all ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import IO, NoReturn

from collectives.terminal import describe_unwritable, is_first


class Parser(argparse.ArgumentParser):
    """An argument parser for MPI programs: every rank parses, and only rank 0 prints errors and help."""

    def error(self, message: str) -> NoReturn:
        if is_first():
            super().error(message)
        sys.exit(2)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if is_first():
            super().print_help(file)

    def check_files(self, options: argparse.Namespace, *names: str) -> None:
        """Exit on every rank if rank 0 could not write one of the files in these options. Collective over COMM_WORLD.

        Call it before the work.
        """
        # Not at the top of the file: demo.py, which starts jobs, must not start MPI itself.
        from mpi4py import MPI

        files = {f"--{name} {getattr(options, name)}": getattr(options, name) for name in names}
        said = {words: describe_unwritable(file) for words, file in files.items() if file}
        refusals = [f"{words} {reason}" for words, reason in said.items() if reason]
        if said := MPI.COMM_WORLD.bcast(refusals, 0):
            self.error(said[0])


def number(kind: type, least: float) -> Callable[[str], float]:
    """Return a parser of an option's value: a number of this kind that is at least `least`."""

    def read(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is no {'whole ' * (kind is int)}number of at least {least:g}")
        return value

    return read
