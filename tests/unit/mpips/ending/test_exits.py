"""`python -m mpips` leaves with the exit code, and with the text, of Python alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
ALONE = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
VALUES = (
    "ValueError('no column price')", "['a', 'b']", "{'a': 1}", "[]", "''", "None", "0", "256", "2**40", "2**80", "-1",
    "True", "2.5", "np.int64(3)", "np.bool_(False)",
)  # fmt: skip
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


def exits(*words: str) -> list[str]:
    """Return the text and the exit code with which a process leaves by `sys.exit` of each value."""
    command = [sys.executable, *words, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **ALONE}, cwd=ROOT)
    return done.stderr.splitlines()


def test_any_value_of_exit_has_the_code_and_the_text_of_python_alone() -> None:
    alone = exits()
    assert len([line for line in alone if "exit code" in line]) == len(VALUES)
    assert exits("-m", "mpips") == alone


def test_a_thread_that_keeps_a_finished_program_is_named() -> None:
    program = "import threading, time\nthreading.Thread(target=time.sleep, args=(2,), name='reader').start()"
    command = [sys.executable, "-m", "mpips", "-c", program]
    environment = {**os.environ, **ALONE, "MPIPS_STALL_SECONDS": "0.5"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=ROOT)
    said = "its program ended 0.5 s ago, and waits for its thread 'reader': end it, or make it with daemon=True"
    assert (done.returncode, done.stderr) == (0, f"mpips: rank 0: {said}\n")
