"""Parse the command line of an example, so that only rank 0 prints errors and help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import IO, NoReturn

from collectives.terminal import describe_unwritable, is_first


class Parser(argparse.ArgumentParser):
    """An argument parser for MPI programs. Every rank parses, and only rank 0 prints errors and help."""

    def error(self, message: str) -> NoReturn:
        if is_first():
            super().error(message)
        sys.exit(2)

    def print_help(self, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if is_first():
            super().print_help(file)

    def check_files(self, options: argparse.Namespace, *names: str) -> None:
        """Exit on every rank if rank 0 cannot write one of the files that options name. Collective over COMM_WORLD.

        Call it before the training, so that no results are lost. `names` are the names of the options.
        """
        # Imported here because this import starts MPI. demo.py imports this module, too, and must not start MPI.
        from mpi4py import MPI

        files = {f"--{name} {getattr(options, name)}": getattr(options, name) for name in names}
        reasons = {option: describe_unwritable(file) for option, file in files.items() if file}
        errors = [f"{option} {reason}" for option, reason in reasons.items() if reason]
        if errors := MPI.COMM_WORLD.bcast(errors, 0):
            self.error(errors[0])


def number_parser(kind: type, least: float) -> Callable[[str], float]:
    """Return a function that parses the value of an option: a number of type `kind` that is at least `least`."""

    def read(text: str) -> float:
        try:
            value: float = kind(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a {'whole ' * (kind is int)}number of at least {least:g}"
            )
        return value

    return read
