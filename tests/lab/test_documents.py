"""The commands of the documents that take a lab run as they are printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch import find
from launch.mpirun import find_obstacle_to_survival
from tests.lab.conftest import LIMIT
from tests.pages import ROOT, blocks, programs

pytestmark = pytest.mark.lab


LONG = [pytest.param(f"how-to/{name}", marks=pytest.mark.full) for name in ("emulate", "survive")]


@pytest.mark.parametrize("page", ["tutorial/first-cluster", *LONG])
def test_commands_run_as_printed(page: str, tmp_path: Path) -> None:
    file = ROOT / "docs" / f"{page}.md"
    script = next(block for block in blocks(file) if "mpips lab up" in block)
    if "ulfm" in script and (why := find_obstacle_to_survival(find())):
        pytest.skip(why)
    for name, text in programs(file).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    lines = [line for line in script.splitlines() if not line.strip().startswith("pip ")]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    try:
        done = subprocess.run(
            ["sh", "-ec", "\n".join(lines)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": path},
            capture_output=True,
            text=True,
            timeout=2 * LIMIT,
        )
    finally:
        down = [sys.executable, "-m", "launch.cli", "lab", "down"]
        subprocess.run(down, cwd=ROOT, capture_output=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r"\S", done.stdout)
