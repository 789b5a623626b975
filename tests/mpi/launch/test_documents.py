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
from click.testing import CliRunner
from mpi4py import MPI

from launch import cli
from tests.child import outside
from tests.mpi.launch.shown import runs, see_programs_print_what_is_shown
from tests.mpi.sizes import JOB_LIMIT
from tests.pages import PAGES, ROOT, blocks, programs

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")

CASES = [pytest.param(page, id=page.relative_to(ROOT).with_suffix("").as_posix()) for page in PAGES if list(runs(page))]


def test_tutorials_have_programs_that_run() -> None:
    for page in (ROOT / "docs" / "tutorial").glob("*.md"):
        commands = " ".join(words for words, _ in runs(page))
        assert [name for name in programs(page) if name not in commands] == [], page
        assert commands, page


@pytest.mark.core(1)
@pytest.mark.parametrize("page", CASES)
def test_programs_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    see_programs_print_what_is_shown(page, tmp_path)


# Commands that take another machine, a lab (tests/lab/test_documents.py), a job that runs, minutes, or an algorithm of
# the reader's.
ELSEWHERE = re.compile(
    r"mpips lab |--nics |--lab | 4711|star,ring|^python -m (tests|pytest)|'star'|examples.reproduce|demo.py"
)
QUICK = re.compile(r"^mpips (script|sim|plan) |--dry-run")
TRAIN = """
import numpy as np
import mpips
kv = mpips.create("dist_sync")
kv.init("w", np.zeros(4, np.float32))
for _ in range(20):
    kv.pushpull("w", np.ones(4, np.float32))
kv.close()
"""
TABLE = "a,b,price\n" + "".join(f"{i},{i % 7},{3 * i}\n" for i in range(200))
SEPARATE = ("measurements", "promises")  # their commands make the figures that these pages publish: minutes each


def commands(page: Path) -> Iterator[str]:
    """Every command in the blocks of a page, once, in its order. Hosts are not here, nor their NICs: --dry-run."""
    every = [line.strip().removeprefix("$ ") for block in blocks(page) for line in block.splitlines()]
    lines = [re.sub(r" +# .*", "", line) for line in every]
    found = [line for line in lines if re.match(r"(mpips|python) [-a-z]", line) and not ELSEWHERE.search(line)]
    for line in dict.fromkeys(found):
        dry = re.sub("--interface [a-z0-9]+", "", line).replace("mpips run ", "mpips run --dry-run ")
        yield dry if "--hostfile" in line else line.removesuffix("&")


def command_cases() -> Iterator[object]:
    """A simulation that several pages show runs once."""
    simulated: set[str] = set()
    for page in PAGES:
        for quick in (True, False):
            mine = [line for line in commands(page) if bool(QUICK.search(line)) == quick and line not in simulated]
            simulated |= {line for line in mine if line.startswith("mpips sim ")}
            if mine and page.stem not in SEPARATE:
                name = page.relative_to(ROOT).with_suffix("").as_posix()
                yield pytest.param(page, mine, id=name, marks=() if quick else pytest.mark.full)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("page", "lines"), command_cases())
def test_commands_run_as_printed(page: Path, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own files are there, and what it takes for granted: a program, a table, a profile, the examples."""
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "table.csv").write_text(TABLE, encoding="utf-8")
    (tmp_path / "hosts.txt").write_text("".join(f"node{i} slots=16\n" for i in range(1, 10)), encoding="utf-8")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, text in programs(page).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    text = page.read_text(encoding="utf-8")
    for name, profile in re.findall(r"`(\w+\.json)`[^`]*```json\n(.*?)```", text, re.DOTALL):
        (tmp_path / name).write_text(profile, encoding="utf-8")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**outside(), "PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), "WANDB_MODE": "offline"}
    words = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 2 * JOB_LIMIT}
    subprocess.run(["mpips", "plan", "--model", "lenet5", "--save-profile", "job.json"], check=True, **words)  # type: ignore[call-overload]
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for line in lines:
        if QUICK.search(line) and not re.search(r"[<>|&;$*`]", line):  # no shell, no other process
            here = CliRunner().invoke(cli.main, shlex.split(line)[1:], prog_name="mpips")
            assert here.exit_code == 0, f"{line}\n{here.output[-2000:]}"
            continue
        asks = re.search(r"torch|jax", line)
        if asks and importlib.util.find_spec(asks[0]) is None:
            continue
        done = subprocess.run(line, shell=True, **words)  # type: ignore[call-overload]
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
