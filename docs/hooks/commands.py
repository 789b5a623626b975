"""A hook of mkdocs: puts the help of a command where a page says `<!-- help: mpips run -->`."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"<!-- help: mpips ?([\w ]*) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page with every command's help in it."""
    return MARK.sub(lambda found: f"```text\n{help_of(*found[1].split())}```", markdown)


@cache
def help_of(*words: str) -> str:
    """What `mpips WORDS --help` prints."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    import mpi4py

    mpi4py.rc.initialize = False
    from launch.cli import main

    done = CliRunner().invoke(main, [*words, "--help"], prog_name="mpips")
    if done.exit_code:
        raise ValueError(f"mpips {' '.join(words)} --help: {done.output or done.exception}")
    return done.output


def commands(*words: str) -> list[tuple[str, ...]]:
    """Every command below `mpips WORDS`, itself first, groups too, by what the helps list."""
    listed = help_of(*words).partition("\nCommands:\n")[2].split("\n\n")[0]
    names = re.findall(r"^  ([a-z][\w-]*)", listed, re.MULTILINE)
    return [words, *(below for name in names for below in commands(*words, name))]
