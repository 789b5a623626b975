"""A host is lost with a server and a worker, all at once: the others go on from the mirror, bit for bit. If mpirun's
daemon is lost with them, the job has failed, and starts again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import find
from launch.lab import client
from launch.lab.job import open_mpi_options
from launch.mpirun import find_obstacle_to_survival
from tests.choice import first
from tests.lab.conftest import LIMIT, ROOT
from tests.mpi.mpips import mirrored, survivor, table_survivor
from tests.mpi.mpips.mirrored import Job

pytestmark = pytest.mark.lab


def survive(lab: str, folder: Path, module: Any, job: survivor.Job) -> int:
    """Run 3 workers, 2 servers and spares, two ranks on a host; return how many workers are left, with right values."""
    if why := find_obstacle_to_survival(find()):
        pytest.skip(why)
    program = [sys.executable, "-m", module.__name__, str(folder), job.text()]
    argv = client.job_command(lab, 5 + job.spares, program, per_host=2, extra=["--with-ft", "ulfm"])
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    traces = [json.loads(file.read_text()) for file in sorted(folder.glob("*.trace"))]
    assert done.returncode == 0 and traces, done.stderr
    expected = table_survivor.expected if module is table_survivor else survivor.expected
    with np.load(folder / "values.npz") as found:
        for key, array in expected(job, traces).items():
            assert found[key].tobytes() == array.tobytes(), key
    return len(traces)


@first(1, spares=[1, 0])
def test_a_hosts_ranks_are_all_killed(make: Callable[..., str], tmp_path: Path, spares: int) -> None:
    job = Job("dist_sync", spares=spares, optimizer="sgd", apart=False, kills={"2": 0.3, "3": 0.3})
    assert survive(make("star:3"), tmp_path, mirrored, job) == 2


@first(2, **{"victims, spares, mirrors": [(["2", "3"], 1, 1), (["3"], 1, 0), (["3"], 0, 0), (["2", "3"], 0, 1)]})
def test_rows_of_tables_outlive_their_host_or_server(
    make: Callable[..., str], tmp_path: Path, victims: list[str], spares: int, mirrors: int
) -> None:
    job = survivor.Job("dist_sync", 2, spares=spares, kills=dict.fromkeys(victims, 0.5), mirrors=mirrors)
    assert survive(make("star:3"), tmp_path, table_survivor, job) == 3 - ("2" in victims)


LOSES_A_HOST = """
import os, signal, socket, sys
import numpy as np
import mpips

kv = mpips.create("dist_sync")
weights, step = np.zeros(7, np.float32), kv.resumed
kv.init("w", weights)
kv.pull("w", weights)
while step < 60:
    if step == 30 and socket.gethostname() == "h1" and not os.path.exists(sys.argv[0] + ".killed"):
        here = os.readlink("/proc/self/ns/net")
        for process in filter(str.isdigit, os.listdir("/proc") if sys.argv[1] == "host" else []):
            if int(process) != os.getpid() and os.readlink(f"/proc/{process}/ns/net") == here:
                os.kill(int(process), signal.SIGKILL)
        open(sys.argv[0] + ".killed", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)
    kv.pushpull("w", np.full(7, 1 / kv.num_workers, np.float32), out=weights)
    step += 1
if kv.rank == 0:
    print("steps", weights[0], kv.num_workers, flush=True)
"""


@pytest.fixture
def train(make: Callable[..., str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`mpips run` of a training, from the launcher of a lab: a worker or all processes of its host die at step 30."""
    if find().flavour != "openmpi":
        pytest.skip("starts Open MPI's daemons by the lab's agent")
    (tmp_path / "hosts").write_text("".join(f"h{number} slots=1\n" for number in range(3)))
    (tmp_path / "train.py").write_text(LOSES_A_HOST)

    def started(what: str, restarts: int) -> subprocess.CompletedProcess[str]:
        again = ["--restarts", str(restarts), "--checkpoint", str(tmp_path / "saved"), "--every", "10"]
        words = ["-w", "2", "-s", "1", "--hostfile", str(tmp_path / "hosts"), "--interface", "vip0", *again]
        words += [f"--mpi-arg={word}" for word in open_mpi_options()]
        program = [sys.executable, "-m", "launch.run", *words, str(tmp_path / "train.py"), what]
        argv = client.host_command(make("star:3"), "launcher", program)
        return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)

    return started


def test_a_host_that_is_lost_with_mpiruns_daemon_is_a_failure(
    train: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = train("host", 0)
    assert done.returncode == 1 and "steps" not in done.stdout
    assert "mpips: mpirun has lost a host: the job has ended\n" in done.stderr


@pytest.mark.parametrize(
    "what, why, roles",
    [
        ("host", "mpirun has lost a host", ", with -w 1 -s 1 on the hosts that answer"),
        (
            "rank",
            "mpirun has left with code 14, as after the death of a rank|a rank of another host was ended by .*",
            "",
        ),
    ],
)
def test_the_job_starts_again_where_all_ranks_were_elsewhere(
    train: Callable[..., subprocess.CompletedProcess[str]], what: str, why: str, roles: str
) -> None:
    done = train(what, 1)
    assert done.returncode == 0 and "steps 1.0" in done.stdout, done.stderr
    again = rf"mpips: ({why}): the job starts again from .*, restart 1 of 1{roles}\n"
    assert re.search(again, done.stderr), done.stderr
