"""What a command's help ends with, what a group says of a command that it has not, and whole numbers as options."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import click


def examples(*lines: str) -> str:
    """The epilog of a click command: each example on a line of its own."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])


def known(context: click.Context, name: str, names: Iterable[str]) -> None:
    """click.UsageError that says which command is near, or which there are, where `name` is none of `names`.

    A shell that asks how to complete a line is told nothing.
    """
    names = list(names)
    if name in names or context.resilient_parsing:
        return
    near = difflib.get_close_matches(name, names, 1)
    meant = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(names)}."
    context.fail(f"No such command {name!r}. {meant}")


class Whole(click.IntRange):
    """A whole number of at least so many, refused in our own words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            bounds = f"of at least {self.min}" if self.max is None else f"from {self.min} to {self.max}"
            self.fail(f"{value!r} is no whole number {bounds}", param, ctx)
