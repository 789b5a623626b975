"""The programs of the documents run as they are printed, and print what is shown below their commands.

The commands of a page run in its order, in one folder: one may go on from what another has left.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.mpi.sizes import JOB_LIMIT

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TORCH = importlib.util.find_spec("torch") is not None

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")


def programs(page: Path) -> dict[str, str]:
    """The programs and other files of a page that have a name, in the comment on their first line."""
    blocks = re.findall(r"```\w+\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {found[1]: block for block in blocks if (found := re.match(r"# (\w+\.\w+)\n", block))}


def runs(page: Path) -> Iterator[tuple[str, str]]:
    """Every command of a page that is shown with what it prints: `$ mpips ...`, and the lines below it."""
    for shown in re.findall(r"^    \$ mpips .*\n(?:    .*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
        for command in re.split(r"^    \$ mpips ", shown, flags=re.MULTILINE)[1:]:
            words, _, output = command.partition("\n")
            yield words, re.sub(r"^    ", "", output, flags=re.MULTILINE)


CASES = [
    pytest.param(page, id=page.relative_to(ROOT).with_suffix("").as_posix()) for page in PAGES if list(runs(page))
]


def test_tutorials_have_programs_that_run() -> None:
    for page in (ROOT / "docs" / "tutorial").glob("*.md"):
        commands = " ".join(words for words, _ in runs(page))
        assert [name for name in programs(page) if name not in commands] == [], page
        assert commands, page


@pytest.mark.parametrize("page", CASES)
def test_programs_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """`...` in what is shown stands for anything. Programs of an extra run where it is installed."""
    files = programs(page)
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    clean = {k: v for k, v in os.environ.items() if not re.match(r"OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|MPI_|MPIPS_", k)}
    for words, printed in runs(page):
        if any("import torch" in text for name, text in files.items() if name in words) and not TORCH:
            continue
        done = subprocess.run(
            [sys.executable, "-m", "launch.cli", *shlex.split(words)],
            cwd=tmp_path, env={**clean, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=JOB_LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, f"mpips {words}\n{done.stderr}"
        pattern = re.escape(printed).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, done.stdout, re.DOTALL), f"mpips {words}\n{done.stdout}\n{done.stderr}"
