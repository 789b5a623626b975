"""A process ends with its own exit code and text, whatever MPI_Finalize does, and under `python -m mpips`."""

from __future__ import annotations

import os
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
ALONE = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
VALUES = (
    "ValueError('no column price')",
    "['a', 'b']",
    "{'a': 1}",
    "[]",
    "''",
    "None",
    "0",
    "256",
    "2**40",
    "2**80",
    "-1",
    "True",
    "2.5",
    "np.int64(3)",
    "np.bool_(False)",
)
PROGRAM = f"""
import os, sys
import numpy as np
for value in ({", ".join(VALUES)}):
    child = os.fork()  # to import once for all values
    if not child:
        sys.exit(value)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.write(2, f"{{value!r}}: exit code {{code}}\\n".encode())
"""


@pytest.mark.parametrize(
    "ends, code",
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise SystemExit(4)", 4),
        ("raise ValueError('bad')", 1),
        ("sys.exit('why')", 1),
    ],
)
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


def exits(*words: str) -> list[str]:
    """Return the text and the exit code with which a process leaves by `sys.exit` of each value."""
    command = [sys.executable, *words, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **ALONE}, cwd=ROOT)
    return done.stderr.splitlines()


@pytest.mark.slow
def test_any_value_of_exit_has_the_code_and_the_text_of_python_alone() -> None:
    alone = exits()
    assert len([line for line in alone if "exit code" in line]) == len(VALUES)
    assert exits("-m", "mpips") == alone


@pytest.mark.slow
def test_a_thread_that_keeps_a_finished_program_is_named() -> None:
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(2,), name='reader').start()"
    command = [sys.executable, "-m", "mpips", "-c", program]
    environment = {**os.environ, **ALONE, "MPIPS_STALL_SECONDS": "0.5"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    said = "its program ended 0.5 s ago, and waits for its thread 'reader': end it, or make it with daemon=True"
    assert (done.returncode, done.stderr) == (0, f"mpips: rank 0: {said}\n")
