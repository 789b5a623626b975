"""`mpips run --spares`: jobs whose ranks are killed go on, and end in time, with the right code; nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mpi4py import MPI

from collectives.machine import read_stat
from launch import find
from launch.mpirun import find_obstacle_to_survival
from tests.child import outside
from tests.choice import first
from tests.mpi.sizes import JOB_LIMIT

HINDRANCE = find_obstacle_to_survival(find()) if MPI.COMM_WORLD.size == 1 else "starts jobs of its own; once is enough"
pytestmark = pytest.mark.skipif(bool(HINDRANCE), reason=HINDRANCE)

BEGIN = """
import os, random, signal, sys, threading, time
from mpi4py import MPI
import mpips

w = MPI.COMM_WORLD
w.Barrier()
files = {line.split()[-1] for line in open("/proc/self/maps") if "/sm_segment" in line}
os.write(1, f"up {w.rank} {os.getpid()} {os.getppid()} {' '.join(files)}\\n".encode())
w.Barrier()

def kill(rank, seconds=0.0):
    if w.rank == rank:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()

def wait_until_told(deaths):
    while open("err").read().count("; the others go on") < deaths:
        time.sleep(0.01)
"""
GO_ON = """
choice = random.Random(int(sys.argv[1]))
victims = choice.sample(range(w.size), choice.choice([1, 2]))
for victim in victims:
    kill(victim, choice.random() / 2)
comm = w.Dup()
while comm.size > w.size - len(victims):
    try:
        while True:
            comm.Allreduce(bytearray(8), bytearray(8), MPI.BOR)
    except MPI.Exception:
        comm.Revoke()
    comm = comm.Shrink()
os.write(1, f"last {time.time()}\\n".encode())
"""
PATIENT = "from mpips.ending import uncaught\nuncaught.PATIENCE = 20\n"  # cores may be busy


class Started:
    """A job of 4 ranks, 3 workers and a spare, and what is seen of it."""

    def __init__(self, folder: Path, script: str, *words: str, spares: int = 1) -> None:
        (folder / "script.py").write_text(script)
        roles = ["-w", "3", "--spares", str(spares)]
        self._out, self._err = folder / "out", folder / "err"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "launch.run", *roles, "script.py", *words],
            cwd=folder,
            stdout=self._out.open("w"),
            stderr=self._err.open("w"),
            env=outside(),
        )
        self.pid = self._process.pid

    def up(self) -> list[list[str]]:
        """Rank, process, mpirun and files of every rank that has begun."""
        return [line.split()[1:] for line in self.out().splitlines() if line.startswith("up ")]

    def all_up(self, ranks: int = 4) -> list[list[str]]:
        _until(lambda: len(self.up()) == ranks)
        return self.up()

    def out(self) -> str:
        return self._out.read_text()

    def err(self) -> str:
        return self._err.read_text()

    def code(self) -> int:
        """Once it has ended, and nothing of it is left."""
        try:
            code = self._process.wait(JOB_LIMIT)
        finally:
            self._process.kill()
        return code

    def leaves_nothing(self) -> bool:
        """Within some seconds, as mpirun may be at it, and zombies of other parents."""
        _until(lambda: not any(_runs(int(pid)) for up in self.up() for pid in up[1:3]))
        return not any(Path(file).exists() for up in self.up() for file in (*up[3:], f"/tmp/ompi.{up[2]}"))


def _until(done: object) -> None:
    deadline = time.monotonic() + JOB_LIMIT
    while not done() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.02)
    assert done()  # type: ignore[operator]


def _runs(pid: int) -> bool:
    try:
        return read_stat(pid)[0] not in b"ZX"
    except OSError:
        return False


@pytest.mark.slow
@first(1, seed=range(6))
def test_jobs_end_well_after_deaths_at_any_moment(tmp_path: Path, seed: int) -> None:
    job = Started(tmp_path, BEGIN + GO_ON, str(seed))
    assert job.code() == 0, job.err()
    ended = time.time()
    last = [float(line.split()[1]) for line in job.out().splitlines() if line.startswith("last ")]
    assert len(last) + job.err().count("; the others go on\n") == 4
    assert ended - max(last) < 10  # 2 s where cores are free
    assert job.leaves_nothing()


@first(
    1,
    **{
        "rest, code, said": [
            (f"{PATIENT}raise ValueError('bad')", 1, "mpips: ValueError on rank 0 of 4 and 2 others: the job ends"),
            ("if w.rank == 2: sys.exit(3)\ntime.sleep(600)", 3, "exit 3 on rank 2 of 4"),
            ("if w.rank == 3: threading.Thread(target=lambda: 1 / 0).start()\ntime.sleep(600)", 1, "ZeroDivisionError"),
        ]
    },
)
def test_an_error_ends_a_job_with_dead_ranks(tmp_path: Path, rest: str, code: int, said: str) -> None:
    job = Started(tmp_path, f"{BEGIN}kill(1)\nwait_until_told(1)\n{rest}\n")
    assert job.code() == code
    assert job.err().startswith("mpips: rank 1 (worker) ")
    assert said in job.err()
    assert job.leaves_nothing()


@pytest.mark.slow
def test_a_job_ends_when_only_spares_are_left(tmp_path: Path) -> None:
    job = Started(tmp_path, f"{BEGIN}for rank in range(3): kill(rank, rank / 10)\ntime.sleep(600)\n")
    assert job.code() in (137, 1)
    assert job.err().endswith("mpips: no working rank is left: the job has ended\n")
    assert job.leaves_nothing()


def test_a_spare_with_a_role_works(tmp_path: Path) -> None:
    takes = "from mpips.ending.process import say_role\nif w.rank == 3: say_role('worker')\n"
    rest = f"{takes}w.Barrier()\nfor rank in range(3): kill(rank)\nwait_until_told(3)\ntime.sleep(2.5)\n"
    job = Started(tmp_path, f"{BEGIN}{rest}os.write(1, b'it works')\n")
    assert job.code() == 0, job.err()
    assert job.out().endswith("it works")
    assert job.leaves_nothing()


@pytest.mark.slow
def test_a_death_before_mpi_has_started_ends_the_job(tmp_path: Path) -> None:
    dies = "import os\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': os.kill(os.getpid(), 9)\n"
    job = Started(tmp_path, dies + BEGIN)
    assert job.code() in (137, 1)
    assert job.err().endswith("mpips: MPI had not started: the job has ended\n")


@first(1, whom=["all ranks", "mpirun", "mpips run"])
def test_nothing_outlives_what_is_killed(tmp_path: Path, whom: str) -> None:
    job = Started(tmp_path, f"{BEGIN}time.sleep(600)\n")
    ups = job.all_up()
    pids = {"all ranks": [int(up[1]) for up in ups], "mpirun": [int(ups[0][2])], "mpips run": [job.pid]}[whom]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert job.code() in ((-9,) if whom == "mpips run" else (137, 1))
    assert job.leaves_nothing()
