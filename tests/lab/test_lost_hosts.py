"""A host is lost with a server and a worker, all at once: the others go on from the mirror, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from launch import find, survival
from launch.lab import client
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
