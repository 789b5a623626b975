"""A process ends with its own exit code, whatever MPI_Finalize does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpips.ending import process

ROOT = Path(__file__).parents[4]
HANGS = """
import atexit, sys, time
from mpips.ending import process
atexit.register(print, "closed")
def end():
    if not process.finalized(lambda: time.sleep(600), 0.1):
        process.leave_at_once()
atexit.register(end)
print("last", end=" ")
"""


@pytest.mark.parametrize("ends, code", [
    ("", 0), ("sys.exit(3)", 3), ("raise SystemExit(4)", 4), ("raise ValueError('bad')", 1), ("sys.exit('why')", 1),
])  # fmt: skip
def test_a_program_keeps_its_code_and_its_output(ends: str, code: int) -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HANGS + ends], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begun < 30
    assert (done.returncode, done.stdout) == (code, "last closed\n"), done.stderr
    assert ("ValueError: bad" in done.stderr) == ("bad" in ends)
    assert ("why" in done.stderr) == ("why" in ends)


def test_what_comes_back_is_not_waited_for() -> None:
    begun = time.monotonic()
    assert process.finalized(lambda: None, 60)
    assert time.monotonic() - begun < 30


@pytest.mark.parametrize("value, survives", [("1", True), ("true", True), ("0", False), (None, False)])
def test_a_rank_knows_whether_it_outlives_others(
    monkeypatch: pytest.MonkeyPatch, value: str | None, survives: bool
) -> None:
    monkeypatch.delenv(process.SURVIVES, raising=False)
    if value is not None:
        monkeypatch.setenv(process.SURVIVES, value)
    assert process.survives() is survives
