"""A host is lost with a server and a worker, all at once: the others go on from the mirror, bit for bit. If mpirun's
daemon is lost with them, the job has failed, and starts again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from launch import find, survival
from launch.lab import client
from launch.lab.job import agent_settings
from tests.lab.conftest import LIMIT, ROOT
from tests.mpi.mpips.mirrored import Job
from tests.mpi.mpips.survivor import expected

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("spares", [0, 1])
def test_a_hosts_ranks_are_all_killed(make: Callable[..., str], tmp_path: Path, spares: int) -> None:
    if why := survival.hindrance(find()):
        pytest.skip(why)
    name = make("star:3")
    job = Job("dist_sync", spares=spares, optimizer="sgd", apart=False, kills={"2": 0.3, "3": 0.3})
    program = [sys.executable, "-m", "tests.mpi.mpips.mirrored", str(tmp_path), job.text()]
    argv = client.job_command(name, 5 + spares, program, per_host=2, extra=["--with-ft", "ulfm"])
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    traces = [json.loads(file.read_text()) for file in sorted(tmp_path.glob("*.trace"))]
    assert done.returncode == 0 and len(traces) == 2, done.stderr
    with np.load(tmp_path / "values.npz") as found:
        for key, array in expected(job, traces).items():
            assert found[key].tobytes() == array.tobytes(), key


LOSES_A_HOST = """
import os, signal, socket, sys
import numpy as np
import mpips

kv = mpips.create("dist_sync")
weights, step = np.zeros(7, np.float32), kv.resumed
kv.init("w", weights)
kv.pull("w", weights)
while step < 60:
    if step == 30 and socket.gethostname() == "h1":
        here = os.readlink("/proc/self/ns/net")
        for process in filter(str.isdigit, os.listdir("/proc")):
            if int(process) != os.getpid() and os.readlink(f"/proc/{process}/ns/net") == here:
                os.kill(int(process), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    kv.pushpull("w", np.full(7, 1 / kv.num_workers, np.float32), out=weights)
    step += 1
if kv.rank == 0:
    print("steps", weights[0], kv.num_workers, flush=True)
"""


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_host_is_lost_with_mpiruns_daemon(make: Callable[..., str], tmp_path: Path, restarts: int) -> None:
    if find().flavour != "openmpi":
        pytest.skip("starts Open MPI's daemons by the lab's agent")
    (tmp_path / "hosts").write_text("".join(f"h{number} slots=1\n" for number in range(3)))
    (tmp_path / "train.py").write_text(LOSES_A_HOST)
    again = ["--restarts", "1", "--checkpoint", str(tmp_path / "saved"), "--every", "10"] if restarts else []
    words = ["-w", "2", "-s", "1", "--hostfile", str(tmp_path / "hosts"), "--interface", "vip0", *again]
    words += [f"--mpi-arg={word}" for word in agent_settings()]
    program = [sys.executable, "-m", "launch.run", *words, str(tmp_path / "train.py")]
    argv = client.host_command(make("star:3"), "launcher", program)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 1 - restarts, done.stderr
    if restarts:
        said = "mpips: mpirun has lost a host: the job starts again from .*, restart 1 of 1, with -w 1 -s 1 on"
        assert re.search(said, done.stderr) and "steps 1.0 1" in done.stdout, done.stderr
    else:
        assert "mpips: mpirun has lost a host: the job has ended\n" in done.stderr and "steps" not in done.stdout
