"""The terminal, for all commands: progress, tables, files that options name, numbers and sizes in words, Ctrl-C.

A table has one style, in which no number and no name is cut, however narrow the terminal. A command whose standard
output cannot be written goes on, writes its files, and says so once, at its end. Rich is imported when it prints:
`mpips --help` does without.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import click

from mpips.collectives import files

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
CODE_FILE = "_MPIPS_CODE_FILE"  # names the file that is to hold the exit code of `leave`
INTERRUPTED = 130  # the exit code after Ctrl-C, as of shells
PLAIN_WIDTH = 160
PICTURES = (".png", ".pdf", ".svg")
FOLDER = "cannot be written: that names a folder, not a file"
HEADER_WIDTH = 9  # letters after which a number's header goes on below
NAME_WIDTH = 24  # letters of a name that stay on one line
UNBOUNDED = 10_000  # columns
UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
MOST_BYTES = 10**18
"""Bytes, so that counts of them fit 64-bit integers."""


def console(stderr: bool = False) -> Console:
    """Return a console with colours where a terminal reads it, and plain text, not cut at 80 columns, everywhere
    else.

    A rank writes to a pipe or a pseudo-terminal of its launcher, which tells nothing of where the text goes: plain.
    """
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False, force_terminal=False if is_rank() else None)
    if found.is_terminal:
        return found
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) else PLAIN_WIDTH
    return Console(stderr=stderr, highlight=False, force_terminal=False, width=width)


@contextmanager
def show_progress(title: str, total: int, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Give `begin(what)`, to be called before each of `total` steps.

    It shows a bar on a terminal, else lines, on standard error. Only the rank with `shown` says anything.
    """
    from rich.progress import Progress

    target = console(stderr=True)
    if not shown:
        yield lambda what: None
    elif target.is_terminal:
        with Progress(transient=True, console=target) as bar:
            task = bar.add_task(title, total=total, completed=-1)
            yield lambda what: bar.update(task, advance=1, description=f"{title}: {what}")
    else:
        numbers = count(1)
        yield lambda what: target.print(f"{title}: {what}, {next(numbers)} of {total}", markup=False, soft_wrap=True)


def show_table(table: Table, terminal: Console | None = None) -> None:
    """Print a table on standard output, or on `terminal`, in the one style.

    Columns of numbers are those that are justified to the right. Where the terminal is narrower than numbers and names,
    it wraps the lines. Title and caption stand above and below, and wrap as text.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement

    terminal = terminal or console()
    unbounded = terminal.options.update(max_width=UNBOUNDED)
    table.box, table.show_edge, table.padding, table.header_style = box.SIMPLE_HEAD, False, (0, 1, 0, 0), "bold"
    title, note, table.title, table.caption = table.title, table.caption, None, None
    for column in table.columns:
        if column.justify == "right":
            column.no_wrap = True
            column.header = "\n".join(textwrap.wrap(str(column.header), HEADER_WIDTH, break_long_words=False))
        elif not column.no_wrap:
            column.min_width = min(NAME_WIDTH, max(len(str(cell)) for cell in [column.header, *column.cells]))
    if Measurement.get(terminal, unbounded, table).minimum > terminal.width:
        table.padding = (0, 0, 0, 0)
    if title:
        terminal.print(title)
    width = max(terminal.width, Measurement.get(terminal, unbounded, table).minimum)  # Rich cuts what does not fit
    wide = Console(file=terminal.file, width=width, highlight=False, force_terminal=terminal.is_terminal)
    wide.print(table, crop=False)
    if note:
        terminal.print(note)


def format_examples(*lines: str) -> str:
    """Return the epilog of a click command: each example on a line of its own."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])


def is_first() -> bool:
    """Return whether this process was started alone, or as rank 0 of several: told without MPI."""
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0") == "0"


class Interruptible(click.Command):
    """A command that ends with the exit code of shells after Ctrl-C; rank 0 alone says so.

    Where its standard output cannot be written it works to its end, says so and has exit code 1.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        with keep_stdout():
            return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if is_first():
                click.echo(f"\n{ctx.command_path}: interrupted", err=True)
            sys.exit(INTERRUPTED)


class InterruptibleGroup(Interruptible, click.Group):
    """Such a command, with commands of its own; it says which one is near to a name that is none."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands and not ctx.resilient_parsing:  # a shell that completes a line is told nothing
            near = difflib.get_close_matches(args[0], self.commands, 1)
            meant = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(self.commands)}."
            ctx.fail(f"No such command {args[0]!r}. {meant}")
        return super().resolve_command(ctx, args)


@contextmanager
def without_signals() -> Iterator[None]:
    """Threads that are started in the block, and those that they start, hear no signals: the main thread does."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class RankedCommand(Interruptible):
    """A command of which every rank of a job sees the same words: rank 0 alone says what is wrong with them.

    A click.ClickException is one that all ranks raise, or rank 0 when the others have nothing more to do with it.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        if not options.get("standalone_mode", True):
            return super().main(*args, **options)
        try:
            return super().main(*args, **{**options, "standalone_mode": False})
        except click.ClickException as error:
            if is_first():
                error.show()
            leave(error.exit_code)
        except click.Abort:
            sys.exit(INTERRUPTED)


def leave(code: int) -> NoReturn:
    """End a command with an exit code, once it is said why; for all ranks, or for rank 0 when the others are done.

    mpirun would add a banner to a code other than 0. So `mpips ... --ranks` is told the code, where it has asked.
    """
    asked = os.environ.get(CODE_FILE)
    if asked and code:
        with suppress(OSError):
            Path(asked).write_bytes(bytes([code]))
            code = 0
    sys.exit(code)


def is_rank() -> bool:
    """Return whether a launcher started this process, as one of several."""
    return any(name in os.environ for name in RANK_VARIABLES)


class OutFile(click.Path):
    """A file to be written, in a folder that is there: refused before the work is done, not after it.

    Ranks do not look: only one of them writes, and others may be on hosts where the folder is not. With `dash`, "-"
    stands for the screen.
    """

    def __init__(self, dash: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path, allow_dash=dash)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self.allow_dash and path == Path("-"):
            return path
        if is_rank():
            reason = FOLDER if _names_folder(value) else None
        else:
            reason = describe_unwritable(value)
        if reason:
            self.fail(f"{str(value)!r} {reason}", param, ctx)
        return path


class Picture(OutFile):
    """A picture to be drawn, which takes matplotlib."""

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = super().convert(value, param, ctx)
        if is_rank():
            return path
        if path.suffix.lower() not in PICTURES:
            self.fail(f"{str(value)!r} is no picture: its name must end in {', '.join(PICTURES)}", param, ctx)
        if importlib.util.find_spec("matplotlib") is None:
            self.fail("a picture takes matplotlib: pip install matplotlib", param, ctx)
        return path


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of a file that an option names: click.ClickException with a sentence where that fails."""
    try:
        yield
    except OSError as error:
        context = click.get_current_context(silent=True)
        options = context.command.params if context else []
        given = next((option for option in options if context and context.params.get(str(option.name)) is path), None)
        name = f"{given.opts[0]} " if given else ""
        raise click.ClickException(f"{name}{path} cannot be written: {error.strerror or error}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file that an option names, in UTF-8; click.ClickException with a sentence where that fails."""
    with writing(path):
        files.write(path, text.encode())


def write_json(path: Path, content: object) -> None:
    """Write a file that an option names, as JSON for people; click.ClickException with a sentence where that fails."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def describe_unwritable(name: str | os.PathLike[str]) -> str | None:
    """Return what to say, behind its name, of a file that cannot be written; None where nothing forbids it. Writes
    nothing."""
    path = Path(name)
    if _names_folder(name) or path.is_dir():
        return FOLDER
    if not path.parent.is_dir():
        return f"cannot be written: there is no folder {str(path.parent)!r}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "cannot be written: it is not allowed"
    return None


def _names_folder(name: str | os.PathLike[str]) -> bool:
    """Return whether this is a folder's name, also of one that is not there. `Path` forgets a slash at its end."""
    return os.path.basename(name) in ("", os.curdir)


class Seconds(click.ParamType):
    """A time above zero, or, with `zero`, not below it."""

    name = "seconds"

    def __init__(self, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: str | float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf") or (number == 0 and not self._zero):
            least = "of at least" if self._zero else "above"
            self.fail(f"{value!r} is no number of seconds {least} 0", param, ctx)
        return number


class Whole(click.IntRange):
    """A whole number of at least so many, refused in our own words."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return int(super().convert(value, param, ctx))
        except click.BadParameter:
            bounds = f"of at least {self.min}" if self.max is None else f"from {self.min} to {self.max}"
            self.fail(f"{value!r} is no whole number {bounds}", param, ctx)


class WholeList(click.ParamType):
    """Whole numbers of at least 1, commas between: a tuple of int."""

    name = "numbers"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(word) for word in str(value).split(","))
        except ValueError:
            found = (0,)
        if min(found) < 1:
            self.fail(f"{value!r} must be numbers of at least 1 with commas between, for instance 100,1000", param, ctx)
        return found


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "[HOST:]PORT"; without a host the loopback. click.UsageError for what is none."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal():
        raise click.UsageError(f"{text!r} is no address: write PORT or HOST:PORT")
    if int(port) >= 1 << 16:
        raise click.UsageError(f"{text!r}: a port is a number from 0 to {(1 << 16) - 1}")
    return host.strip("[]") or "127.0.0.1", int(port)


def parse_bytes(text: str) -> int:
    """Return 4096 for "4096", "4KiB" or "4 kib", 4,000,000 for "4MB". ValueError for others, or above `MOST_BYTES`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match.group(2).upper() not in UNITS:
        raise ValueError(f"{text!r} is no size: write 4096, 4KiB, 4MiB, 1GiB, 1TiB or 4MB")
    found = float(match.group(1)) * UNITS[match.group(2).upper()]
    if found > MOST_BYTES:
        raise ValueError(f"{text!r} is above {MOST_BYTES:.0e} bytes, the most there is")
    return int(found)


def parse_sizes(text: str) -> list[int]:
    """Return sizes in bytes: "1KiB,4MiB", "1KiB:64MiB" in steps of 4, "1KiB:64MiB:2" in steps of 2, or both.

    A list may hold ranges: "8,1KiB:64MiB".
    """
    return [size for part in text.split(",") for size in _parse_range(part)]


def _parse_range(text: str) -> list[int]:
    if ":" not in text:
        return [parse_bytes(text)]
    first, last, *rest = text.split(":")
    factor = int(rest[0]) if rest and rest[0].isdigit() else 4
    low, high = parse_bytes(first), parse_bytes(last)
    if factor < 2 or len(rest) > 1 or (rest and not rest[0].isdigit()) or low < 1 or high < low:
        raise ValueError(
            f"{text!r} is no range of sizes: write MIN:MAX or MIN:MAX:FACTOR, with 1 <= MIN <= MAX, FACTOR >= 2"
        )
    sizes = [low]
    while sizes[-1] * factor <= high:
        sizes.append(sizes[-1] * factor)
    return sizes


def parse_counts(text: str, itemsize: int, element: str) -> list[int]:
    """Return the sizes of `parse_sizes` in elements of so many bytes; ValueError for one that is no whole number of
    them."""
    sizes = parse_sizes(text)
    for size in sizes:
        if size < itemsize or size % itemsize:
            raise ValueError(
                f"--sizes {text}: a {element} takes {itemsize} bytes: pass multiples of that from {itemsize} on, not "
                f"{show_bytes(size)}"
            )
    return [size // itemsize for size in sizes]


def show_bytes(nbytes: int) -> str:
    """Return "4 MiB" for 4194304, "548 MB" for 548000000, and the number of bytes where no unit divides it."""
    binary = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    units = (*binary, (10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (1, "B"))
    fitting = [f"{nbytes // unit} {name}" for unit, name in units if nbytes >= unit and nbytes % unit == 0]
    return min(fitting, key=lambda text: len(text.split()[0]), default="0 B")


def split_words(text: str) -> list[str]:
    """Return the comma-separated words of `text`, not split inside brackets: "ring,bcube(n=2,k=2)"."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    return [word.strip() for word in words if word.strip()]


@contextmanager
def keep_stdout() -> Iterator[None]:
    """Around a command: one sentence on standard error, and exit code 1 for 0, where its output has been lost. A
    standard output that was closed from the start is the null device."""
    if isinstance(sys.stdout, _KeptStdout):  # the command around this one tells
        yield
        return
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 it takes the descriptor that was closed
        os.set_inheritable(sys.stdout.fileno(), True)
    kept = _KeptStdout(sys.stdout)
    sys.stdout, code = kept, 1  # type: ignore[assignment]
    try:
        yield
        code = 0
    except SystemExit as end:
        code = end.code  # type: ignore[assignment]
        raise
    finally:
        sys.stdout = kept.stream
        try:
            kept.flush()
        except BrokenPipeError:
            kept.drop()
        if kept.lost:
            with suppress(OSError):
                print(f"Error: standard output cannot be written: {kept.lost}", file=sys.stderr, flush=True)
            if not code:
                sys.exit(1)


class _KeptStdout:
    """A stream that turns into the null device once it cannot be written; `lost` says why. A pipe that nobody reads any
    more is no such case: there a command ends."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.lost = stream, ""

    def write(self, text: str) -> int:
        self.trying(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self.trying(self.stream.flush)

    def trying(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BrokenPipeError:
            raise
        except OSError as error:
            self.lost = self.lost or error.strerror or str(error)
            self.drop()

    def drop(self) -> None:
        """Send the stream's buffer to the null device, or the interpreter would fail with it."""
        with suppress(OSError):  # a stream without a descriptor
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, self.stream.fileno())
            os.close(nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
