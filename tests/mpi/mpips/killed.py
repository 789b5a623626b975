"""Jobs whose processes are killed: why there can be none here, and a run that sees the values that are left."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from launch import find
from launch.mpirun import find_obstacle_to_survival
from tests import child
from tests.mpi.mpips.survivor import Job, expected
from tests.mpi.sizes import JOB_LIMIT

HINDRANCE = find_obstacle_to_survival(find()) if MPI.COMM_WORLD.size == 1 else "starts jobs of its own; once is enough"
pytestmark = pytest.mark.skipif(bool(HINDRANCE), reason=HINDRANCE)

ROOT = Path(__file__).parents[3]


def run(
    folder: Path, job: Job, ranks: int, module: str = "tests.mpi.mpips.survivor", expected: Any = expected
) -> list[list[list[int]]]:
    """The traces of the workers that are left, once their values were seen to be right."""
    roles = ["-n", str(ranks - job.spares), "-s", str(job.servers), "--spares", str(job.spares)]
    words = [sys.executable, "-m", "launch.cli", "run", *roles, "-m", module, str(folder), job.text()]
    out = io.BytesIO()
    code = child.run(words, JOB_LIMIT, ROOT, out)
    traces = [json.loads(file.read_text()) for file in sorted(folder.glob("*.trace"))]
    assert code == 0 and traces, out.getvalue().decode()
    with np.load(folder / "values.npz") as found:
        for name, array in expected(job, traces).items():
            assert found[name].tobytes() == array.tobytes(), name
    return traces
