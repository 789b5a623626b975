"""An mpirun whose ranks are elsewhere: all that it says comes out as it is, and a host that it has lost is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.running.presence import LOST_SENTENCES
from mpips.store.world import WELL_WITHOUT

ROOT = Path(__file__).parents[3]
RUN = """
import sys
from launch.running import process
ended = process.run([sys.executable, "-c", sys.argv[1]], roles=["worker"] * 3, here=int(sys.argv[2]), spares={spares})
process.tell(f"{{ended.code}} {{ended.death}}")
"""
SAYS = "import os, sys, time\nfor part in {parts!r}: os.write({file}, part); time.sleep(0.05)\nsys.exit({code})"


def run(parts: list[bytes], file: int, here: int = 0, spares: int = -1, code: int = 0) -> tuple[bytes, str]:
    """What comes out of an mpirun that says this, and, below it, its code and who has died."""
    program = [sys.executable, "-c", RUN.format(spares=spares), SAYS.format(parts=parts, file=file, code=code)]
    done = subprocess.run([*program, str(here)], cwd=ROOT, capture_output=True, timeout=60)
    *said, last = done.stderr.splitlines(keepends=True)
    return (done.stdout if file == 1 else b"".join(said)), last.decode().strip()


@pytest.mark.parametrize("file", [1, 2])
@pytest.mark.parametrize("spares", [-1, 0])
@pytest.mark.parametrize("sentence", LOST_SENTENCES)
def test_a_lost_host_is_a_failure_though_mpirun_says_0(sentence: bytes, spares: int, file: int) -> None:
    parts = [b"PRTE " + sentence[:10], sentence[10:], b"\0 more\n"]
    assert run(parts, file, spares=spares) == (b"".join(parts), "1 mpirun has lost a host")
    assert run(parts, file, spares=spares, code=7) == (b"".join(parts), "7 mpirun has lost a host")


def test_a_job_that_had_ended_well_without_a_host_has() -> None:
    parts = [WELL_WITHOUT + b" 1\n", LOST_SENTENCES[0] + b"\n"]
    for code in (0, 1):
        assert run(parts, 2, spares=0, code=code) == (b"".join(parts), "0")


def test_who_has_all_ranks_here_is_not_listened_to() -> None:
    assert run([LOST_SENTENCES[0], b"\n"], 2, here=3) == (LOST_SENTENCES[0] + b"\n", "0")


def test_much_is_passed_on_whole() -> None:
    program = [sys.executable, "-c", RUN.format(spares=-1), "import os\nprint('x' * 3_000_001); os.write(2, b'y')", "0"]
    job = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)  # nobody reads: what it has written waits
    out, said = job.communicate(timeout=60)
    assert (len(out), said) == (3_000_002, "y0 \n")


def test_a_signal_does_not_wait_for_who_reads() -> None:
    program = [sys.executable, "-c", RUN.format(spares=-1), "print('x' * 300_000)", "0"]
    job = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while job.poll() is None and time.monotonic() < deadline:
        os.kill(job.pid, signal.SIGTERM)
        time.sleep(0.1)
    assert job.wait(1) in (0, -signal.SIGTERM)
    assert job.stdout is not None
    job.stdout.close()
