"""`mpips run --log-dir` of a job in which a worker dies: who did what, in one file, in order."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.mpi.jobs import job

pytestmark = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough")
PROGRAM = """
import os, signal
import numpy as np
import mpips
kv = mpips.create("dist_sync")
kv.init("w", np.zeros(5, np.float32))
kv.set_optimizer("sgd", learning_rate=0.1)
for step in range(20):
    if step == 7 and kv.rank == 1:
        {end}
    kv.pushpull("w", np.ones(5, np.float32))
"""


def test_the_life_of_a_job_is_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    others = {name: f"2026-11-27T10:00:00.000001Z {name}\n" for name in ("job.jsonl", "rank-0.jsonl", "web.jsonl")}
    for name, text in others.items():
        (tmp_path / "logs" / name).write_text(text)
    done = job(tmp_path, PROGRAM.format(end="pass"), "-w 2 -s 1 --log-dir logs --log-format json")
    assert done.returncode == 0, done.stderr
    assert {name: (tmp_path / "logs" / name).read_text() for name in others} == others
    (logs,) = [path for path in (tmp_path / "logs").iterdir() if path.is_dir()]
    assert {path.name for path in logs.iterdir()} == {
        "job.jsonl",
        "launch.jsonl",
        "rank-0.jsonl",
        "rank-1.jsonl",
        "rank-2.jsonl",
    }
    found = [json.loads(line) for line in (logs / "job.jsonl").read_text().splitlines()]
    assert [one["time"] for one in found] == sorted(one["time"] for one in found)
    said = {(one.get("rank", one.get("process")), one["message"].split(",")[0].split(":")[0]) for one in found}
    assert ("launch", "job begins") in said
    for rank, role in ((0, "worker"), (1, "worker"), (2, "server")):
        mine = [one["message"].split(",")[0] for one in found if one.get("rank") == rank]
        assert (mine[0], mine[-1]) == ("rank begins", "rank ends"), mine
        assert (rank, "generation 0 has begun") in said and (rank, "the store is closed") in said
        assert {one["role"] for one in found if one.get("rank") == rank and "role" in one} == {role}


@pytest.mark.slow
def test_a_death_is_in_the_log(tmp_path: Path) -> None:
    done = job(tmp_path, PROGRAM.format(end="os.kill(os.getpid(), signal.SIGKILL)"), "-w 2 -s 1 --log info")
    assert done.returncode != 0
    lines = [line[28:] for line in done.stderr.splitlines() if line[:3] == "202"]
    assert re.match(r"launch \(\d+\.\d{3} s\) mpips.launch: job has ended", lines[-1])
    assert "rank 1 (worker) was ended by SIGKILL" in lines[-1]
    assert sum("recovery of generation 0 is asked for" in line for line in lines) <= 1


@pytest.mark.slow
def test_jobs_of_collectives_alone_say_when_ranks_begin_and_end_each_in_its_own_folder(tmp_path: Path) -> None:
    program = "import numpy, collectives\ncollectives.allreduce(numpy.ones(3))\n"
    assert [job(tmp_path, program, "-w 2 --log-dir logs").returncode for _ in range(2)] == [0, 0]
    folders = sorted((tmp_path / "logs").iterdir())
    assert len(folders) == 2
    for each in folders:
        lines = (each / "job.log").read_text().splitlines()
        assert sum("job begins" in line for line in lines) == 1
        for rank in range(2):
            said = [line.split(" mpips.rank: ")[1].split(",")[0] for line in lines if f"rank {rank} (" in line]
            assert said == ["rank begins", "rank ends"], lines


def test_a_bad_folder_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = job(tmp_path, PROGRAM.format(end="pass"), "-w 2 -s 1 --log-dir file/below")
    assert done.returncode == 2 and "cannot be made" in done.stderr and "Traceback" not in done.stderr
