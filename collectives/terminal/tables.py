"""Tables for people: one style for all commands, in which no number and no name is cut, however narrow the terminal."""

from __future__ import annotations

import textwrap

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from collectives.terminal.console import console

HEADER_WIDTH = 9  # letters after which a number's header goes on below
NAME_WIDTH = 24  # letters of a name that stay on one line
UNBOUNDED = 10_000  # columns


def show_table(table: Table, terminal: Console | None = None) -> None:
    """Print a table on standard output, or on `terminal`, in the one style.

    Columns of numbers are those that are justified to the right. Where the terminal is narrower than numbers and names,
    it wraps the lines. Title and caption stand above and below, and wrap as text.
    """
    terminal = terminal or console()
    table.box, table.show_edge, table.padding, table.header_style = box.SIMPLE_HEAD, False, (0, 1, 0, 0), "bold"
    title, note, table.title, table.caption = table.title, table.caption, None, None
    for column in table.columns:
        if column.justify == "right":
            column.no_wrap = True
            column.header = "\n".join(textwrap.wrap(str(column.header), HEADER_WIDTH, break_long_words=False))
        elif not column.no_wrap:
            column.min_width = min(NAME_WIDTH, max(len(str(cell)) for cell in [column.header, *column.cells]))
    if _least(table, terminal) > terminal.width:
        table.padding = (0, 0, 0, 0)
    if title:
        terminal.print(title)
    width = max(terminal.width, _least(table, terminal))  # Rich cuts what does not fit
    wide = Console(file=terminal.file, width=width, highlight=False, force_terminal=terminal.is_terminal)
    wide.print(table, crop=False)
    if note:
        terminal.print(note)


def _least(table: Table, terminal: Console) -> int:
    """Return the columns that the table needs at least."""
    return Measurement.get(terminal, terminal.options.update(max_width=UNBOUNDED), table).minimum
