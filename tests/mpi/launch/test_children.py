"""What ranks start is no rank: children by spawn, forkserver, fork and `subprocess` end, and so does the job."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from tests.choice import first
from tests.mpi.launch.support import run

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")

BEGUN_ANEW = """
from mpi4py import MPI
RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
import multiprocessing, os, subprocess, sys
import mpips

def world(number):
    return number, RANK, SIZE

if __name__ == "__main__":
    kv = mpips.create("mpi_sync")
    seen = []
    for how in ("spawn", "forkserver"):
        context = multiprocessing.get_context(how)
        with context.Pool(1) as pool:
            seen += pool.map(world, [kv.rank])
    program = [sys.executable, "-c", "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"]
    child = subprocess.run(program, env={**os.environ, "MORE": "1"}, capture_output=True, text=True, timeout=60)
    seen.append(int(child.stdout))
    kv.barrier()
    os.write(1, f"{RANK} of {SIZE}: {seen}\\n".encode())
"""
FORKED = """
import os, sys
START = "import mpips; kv = mpips.create('mpi_sync')"
codes = []
for how in ("sys.exit(3)", "0", START, "sys.exit(0)", "sys.exit(3)", "sys.exit('why')", "raise KeyError", "0"):
    child = 0 if how == START else os.fork()
    if not child:
        exec(how)
    if not child and how != START:
        break
    if child:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    kv.barrier()
    os.write(1, f"{kv.rank}: {codes}\\n".encode())
"""


@pytest.mark.slow
@first(1, bare=[False, True])
def test_children_that_begin_anew_are_worlds_of_their_own(tmp_path: Path, bare: bool) -> None:
    done = run(tmp_path, BEGUN_ANEW, "-w", "2", bare=bare)
    assert done.returncode == 0, done.stderr
    seen = [f"{rank} of 2: {[(rank, 0, 1), (rank, 0, 1), 1]}" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == seen, done.stderr


def test_a_fork_of_a_rank_ends_as_any_python_program_does(tmp_path: Path) -> None:
    done = run(tmp_path, FORKED, "-w", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"{rank}: [3, 0, 0, 3, 1, 1, 0]" for rank in range(2)], done.stderr
    assert done.stderr.count("KeyError") == done.stderr.count("why") == 2, done.stderr
