"""The script that a job is to run: what would be an error of all ranks is said once, before they start."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib.machinery import PathFinder

import click


class NoPython(click.ClickException):
    """A refusal, shown without the usage."""

    exit_code = 2


def words_of(words: Sequence[str]) -> tuple[str, ...]:
    """`SCRIPT.py ARGS`, `-m MODULE ARGS` or `-c LINE`, without two dashes before them; UsageError where it is none.

    What stands where a script should, and is none, is an option that there is not: see `unknown_option`.
    """
    words = tuple(words[1:] if words[:1] == ("--",) else words)
    if not words:
        raise click.UsageError(
            "no script is named: SCRIPT.py, -m MODULE, or, as -c alone means --clients, a line of Python by -- -c LINE"
        )
    if words[0] in ("-m", "-c") and len(words) < 2:
        raise click.UsageError(f"{words[0]} needs an argument")
    return words


def _read(ctx: click.Context, parameter: click.Parameter, words: Sequence[str]) -> tuple[str, ...]:
    words = words_of(words)
    if unknown := unknown_option(words):
        known = [name for option in ctx.command.params for name in option.opts if name.startswith("--")]
        raise click.NoSuchOption(unknown, possibilities=difflib.get_close_matches(unknown, known, cutoff=0.7))
    return words


argument = click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT.py|-m MODULE [ARGS]...", is_eager=True, callback=_read
)
"""Of a command that takes `BEFORE_A_SCRIPT` as its settings: the script and its words, as `words_of` gives them."""

BEFORE_A_SCRIPT = {"ignore_unknown_options": True, "allow_interspersed_args": False}


def unknown_option(words: Sequence[str]) -> str | None:
    """The option that stands where a script should, None where a script does."""
    word = words[0].partition("=")[0]
    return word if word.startswith("-") and word not in ("-m", "-c") else None


def check(words: Sequence[str]) -> None:
    """UsageError, or NoPython with the line, where the script is missing or no Python."""
    script = words[0]
    if script == "-m":
        sys.path.insert(0, os.getcwd())  # where ranks look first
        try:
            exists = _exists(words[1])
        finally:
            del sys.path[0]  # what this process is yet to import does not lie there
        if not exists:
            raise click.UsageError(f"there is no module {words[1]!r} for {sys.executable}")
    elif script == "-c":
        _compile(words[1], "<string>")
    elif os.path.isdir(script):
        raise click.UsageError(f"{script!r} is a folder: name a script in it, or a module by -m")
    elif not os.path.isfile(script):
        raise click.UsageError(f"there is no script {script!r} here ({os.getcwd()})")
    elif script.endswith(".py"):  # others may be archives
        with open(script, "rb") as file:
            _compile(file.read(), script)


def note_missing(words: Sequence[str]) -> None:
    """Says on standard error that the script is not here, where it may yet be on the machine of the job."""
    if words[0] not in ("-m", "-c") and not os.path.isfile(words[0]):
        click.echo(f"note: there is no script {words[0]!r} here ({os.getcwd()}): the job needs it there", err=True)


def _compile(source: str | bytes, name: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks give them
            compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL in the text
        lines = "".join(traceback.format_exception_only(error))
        raise NoPython(f"no rank is started, as the script is no Python:\n{lines.rstrip()}") from None


def _exists(module: str) -> bool:
    """Is there a module of this name? Packages on the way to it are looked into, not run."""
    top, *names = module.split(".")
    spec = importlib.util.find_spec(top) if top else None
    for i, name in enumerate(names):
        if spec is None or spec.submodule_search_locations is None:
            return False
        full = ".".join([top, *names[: i + 1]])
        spec = PathFinder.find_spec(full, list(spec.submodule_search_locations)) if name else None
    return spec is not None
