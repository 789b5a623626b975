"""Numbers in a list, as an option of a command."""

from __future__ import annotations

from typing import Any

import click


class Counts(click.ParamType):
    """Whole numbers of at least 1, commas between: a tuple of int."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(word) for word in str(value).split(","))
        except ValueError:
            found = (0,)
        if min(found) < 1:
            self.fail(f"{value!r} must be numbers of at least 1 with commas between, for instance 100,1000", param, ctx)
        return found
