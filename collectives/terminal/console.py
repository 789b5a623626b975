"""What all commands share at the terminal: where they print, how they show progress, which files they may write."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.progress import Progress

from collectives import files
from collectives.terminal.help import known
from collectives.terminal.stdout import lasting

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
CODE_FILE = "_MPIPS_CODE_FILE"  # names the file that is to hold the exit code of `leave`
INTERRUPTED = 130  # the exit code after Ctrl-C, as of shells
PLAIN_WIDTH = 160
PICTURES = (".png", ".pdf", ".svg")
FOLDER = "cannot be written: that names a folder, not a file"


def console(stderr: bool = False) -> Console:
    """A console with colours where a terminal reads it, and plain text, not cut at 80 columns, everywhere else.

    A rank writes to a pipe or a pseudo-terminal of its launcher, which tells nothing of where the text goes: plain.
    """
    found = Console(stderr=stderr, highlight=False, force_terminal=False if is_rank() else None)
    if found.is_terminal:
        return found
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) else PLAIN_WIDTH
    return Console(stderr=stderr, highlight=False, force_terminal=False, width=width)


def is_first() -> bool:
    """Was this process started alone, or as rank 0 of several? Told without MPI."""
    return next((os.environ[name] for name in RANK_VARIABLES if name in os.environ), "0") == "0"


class Interruptible(click.Command):
    """A command that ends with the exit code of shells after Ctrl-C; rank 0 alone says so.

    Where its standard output cannot be written it works to its end, says so and has exit code 1.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        with lasting():
            return super().main(*args, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            if is_first():
                click.echo(f"\n{ctx.command_path}: interrupted", err=True)
            sys.exit(INTERRUPTED)


class InterruptibleGroup(Interruptible, click.Group):
    """Such a command, with commands of its own."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known(ctx, args[0], self.commands)
        return super().resolve_command(ctx, args)


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
    """Ends a command with an exit code, once it is said why; for all ranks, or for rank 0 when the others are done.

    mpirun would add a banner to a code other than 0. So `mpips ... --ranks` is told the code, where it has asked.
    """
    asked = os.environ.get(CODE_FILE)
    if asked and code:
        with suppress(OSError):
            Path(asked).write_bytes(bytes([code]))
            code = 0
    sys.exit(code)


def is_rank() -> bool:
    """Was this process started by a launcher, as one of several?"""
    return any(name in os.environ for name in RANK_VARIABLES)


@contextmanager
def progress(title: str, total: int, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Give `begin(what)`, to be called before each of `total` steps.

    It shows a bar on a terminal, else lines, on standard error. Only the rank with `shown` says anything.
    """
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


def unwritable(name: str | Path) -> str | None:
    """What to say, behind its name, of a file that cannot be written; None where nothing forbids it. Writes nothing."""
    path = Path(name)
    if _is_folders(name) or path.is_dir():
        return FOLDER
    if not path.parent.is_dir():
        return f"cannot be written: there is no folder {str(path.parent)!r}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "cannot be written: it is not allowed"
    return None


def _is_folders(name: str | Path) -> bool:
    """Is this a folder's name, whether it is there or not? `Path` forgets a slash at its end."""
    return os.path.basename(name) in ("", os.curdir)


class OutFile(click.Path):
    """A file to be written, in a folder that is there: refused before the work is done, not after it.

    Ranks do not look: only one of them writes, and others may be on hosts where the folder is not. With `dash`, "-"
    stands for the screen.
    """

    def __init__(self, dash: bool = False) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path, allow_dash=dash)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if self.allow_dash and path == Path("-"):
            return path
        if is_rank():
            reason = FOLDER if _is_folders(value) else None
        else:
            reason = unwritable(value)
        if reason:
            self.fail(f"{str(value)!r} {reason}", param, ctx)
        return path


class Picture(OutFile):
    """A picture to be drawn, which takes matplotlib."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
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


class Seconds(click.ParamType):
    """A time above zero, or, with `zero`, not below it."""

    name = "seconds"

    def __init__(self, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf") or (number == 0 and not self._zero):
            least = "of at least" if self._zero else "above"
            self.fail(f"{value!r} is no number of seconds {least} 0", param, ctx)
        return number
