"""Where a rank finds its place: the variables of torchrun, `mpips.rank` and `mpips.size`, and who exchanged nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from tests.mpi.launch.support import run

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SHOW = f"""
import multiprocessing, os, subprocess, sys
NAMES = {NAMES!r}

def place():
    return [os.environ.get(name) for name in NAMES]

def is_inherited(other):
    return place() == other

if __name__ == "__main__":
    assert "mpi4py.MPI" not in sys.modules
    mine = place()
    with multiprocessing.get_context("spawn").Pool(1) as pool:  # as workers of a DataLoader
        inherited = pool.apply(is_inherited, [mine])
    inner = [sys.executable, "-m", "launch.run", "-w", "1", "--", "-c", "import os; print(os.environ.get('RANK'))"]
    from mpi4py import MPI
    seen = subprocess.run(inner, capture_output=True, text=True).stdout.strip() if mine[0] == "1" else "0"
    os.write(1, f"{{MPI.COMM_WORLD.rank}} {{' '.join(map(str, mine))}} {{inherited}} {{seen}}\\n".encode())
"""
RANKS = """
import os
from mpi4py import MPI
import mpips
before = mpips.rank(), mpips.size()
if MPI.COMM_WORLD.rank == 2:
    os.write(1, f"server {before}\\n".encode())
kv = mpips.create("dist_sync", **({} if "MPIPS_SERVERS" in os.environ else {"servers": 1}))
kv.close()
os.write(1, f"{MPI.COMM_WORLD.rank} {before} {mpips.rank(), mpips.size()}\\n".encode())
"""
NOTE = "mpips: the 2 ranks of this job ran side by side and never exchanged anything"


def test_ranks_find_what_torchrun_sets_before_mpi_starts_and_jobs_within_find_their_own(tmp_path: Path) -> None:
    done = run(tmp_path, SHOW, "-w", "2")
    lines = sorted(line.split() for line in done.stdout.splitlines())
    assert done.returncode == 0 and NOTE not in done.stderr, done.stderr
    assert [line[:6] for line in lines] == [[rank, rank, "2", rank, "2", "127.0.0.1"] for rank in "01"]
    assert lines[0][6] == lines[1][6] and lines[0][6].isdigit()
    assert [line[7:] for line in lines] == [["True", "0"], ["True", "0"]], done.stderr


def test_ranks_beside_servers_and_what_the_user_has_set_find_no_other_place(tmp_path: Path) -> None:
    script = "import os\nprint('place', os.environ.get('RANK'), flush=True)\n"
    done = run(tmp_path, script, "-w", "1", "-s", "1")
    assert done.stdout.split() == ["place", "None"] * 2, done.stderr
    done = run(tmp_path, script, "-w", "2", "-x", "RANK=7")
    assert done.stdout.split() == ["place", "7"] * 2
    assert "mpips: RANK=7 is set here, and so for all ranks: unset it" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_rank_and_size_are_those_of_ranks_that_train(tmp_path: Path, known: bool) -> None:
    """Before the store, too, where `mpips run` knows the servers; else a warning says that the first were wrong."""
    unknown = "import os\nfor name in ('SERVERS', 'WORKERS'): del os.environ[f'MPIPS_{name}']"
    script = RANKS if known else unknown + RANKS
    done = run(tmp_path, script, "-w", *(["2", "-s", "1"] if known else ["3"]))
    assert done.returncode == 0, done.stderr
    before = [(0, 2), (1, 2), (1, 2)] if known else [(0, 3), (1, 3), (2, 3)]
    said = [f"{rank} {before[rank]} {(rank, 2)}" for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == [*said, f"server {before[2]}"]
    warned = "mpips.size() was 3 before the store was made, and is 2 now" in done.stderr
    assert warned == (not known), done.stderr


def test_a_job_that_exchanged_nothing_is_told_once_and_one_that_failed_is_not(tmp_path: Path) -> None:
    done = run(tmp_path, "print('alone')", "-w", "2")
    assert (done.returncode, done.stderr.count(NOTE)) == (0, 1), done.stderr
    done = run(tmp_path, "import os, sys\nsys.exit(3 * int(os.environ['RANK']))", "-w", "2")
    assert (done.returncode, done.stderr.count(NOTE)) == (3, 0), done.stderr
    done = run(tmp_path, "from mpi4py import MPI", "-w", "2")
    assert (done.returncode, done.stderr.count(NOTE)) == (0, 0), done.stderr
