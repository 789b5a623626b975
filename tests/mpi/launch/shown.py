"""Programs of a page of the documents, run by the commands that it shows, must print what it shows below them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from tests.child import outside
from tests.mpi.sizes import JOB_LIMIT
from tests.pages import programs


def is_runnable(program: str) -> bool:
    """Whether the PyTorch that a program takes, if it takes one, is installed and new enough for it."""
    if "import torch" not in program:
        return True
    try:
        major, minor = metadata.version("torch").split(".")[:2]
    except metadata.PackageNotFoundError:
        return False
    return "enable_reconfigure" not in program or (int(major), int(minor)) >= (2, 14)


def runs(page: Path) -> Iterator[tuple[str, str]]:
    """Every command of a page that is shown with what it prints: `$ mpips ...`, and the lines below it."""
    for shown in re.findall(r"^    \$ mpips .*\n(?:    .*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        for command in re.split(r"^    \$ mpips ", shown, flags=re.MULTILINE)[1:]:
            words, _, output = command.partition("\n")
            yield words, re.sub(r"^    ", "", output, flags=re.MULTILINE)


def see_programs_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """`...` in what is shown stands for anything. Programs run where what they import is installed."""
    files = programs(page)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    for words, printed in runs(page):
        if not all(is_runnable(text) for name, text in files.items() if name in words):
            continue
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", *shlex.split(words)],
            cwd=tmp_path,
            env=outside(),
            capture_output=True,
            text=True,
            timeout=JOB_LIMIT,
        )
        assert done.returncode == 0, f"mpips {words}\n{done.stderr}"
        pattern = re.escape(printed).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, done.stdout, re.DOTALL), f"mpips {words}\n{done.stdout}\n{done.stderr}"
