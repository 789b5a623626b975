"""Two ranks of a job with pages, as processes that only wait; and an mpirun that starts nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from collectives.recorder import folders
from tests.child import outside

HYDRA = "HYDRA build details:\n    Version: 4.2.1"
RANK = """
import sys, time
from pathlib import Path
from collectives.recorder import folders, own
folders.jobs_folder = lambda: Path(sys.argv[1])
own.begin(int(sys.argv[2]), 2)
own.rank_state.generation, own.rank_state.step = 1, 40
own.rank_state.take(["worker", "server"][int(sys.argv[2])], 0)
marks, other = own.Marks(5), own.Marks(6)
marks.word[0], other.word[0] = 30 << 32 | 1, 4 << 32 | 1
other.close()
own.note(loss=0.25, accuracy=0.5)
own.write_load(1000, 2, {"0": 600, "1": 400}, room=5000, rounds=8, missed={"0": 2})
numbers = own.table_numbers("users")
for at in range(11):
    numbers[at] = 10 + at
own.count_exchange(4000)
own.count_wait(1.5, False)
own.write_wait("barrier", time.monotonic() - 3, [1])
own.write_failure("once")
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks of job 77, which wait."""
    top = tmp_path / "jobs"
    monkeypatch.setattr(folders, "jobs_folder", lambda: top)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(top), str(rank)],
            env={**outside(), "_MPIPS_JOB": "77"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "there\n"
    yield ranks
    for rank in ranks:
        rank.kill()
        rank.communicate()


@pytest.fixture
def mpirun(tmp_path: Path) -> str:
    """A stand-in that answers `--version` as MPICH does and prints its arguments otherwise."""
    file = tmp_path / "mpiexec"
    answer = f"{HYDRA!r} if sys.argv[1:] == ['--version'] else ' '.join(sys.argv[1:])"
    file.write_text(f"#!{sys.executable}\nimport sys\nprint({answer})\n")
    file.chmod(0o755)
    return str(file)
