"""The short form of the comparison of who averages PyTorch's gradients ends well and leaves its JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

ROOT = Path(__file__).resolve().parents[3]
OURS = r"OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|MPI_|MPIPS_"


@pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts a job of its own; once is enough")
@pytest.mark.full
def test_every_way_to_average_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    clean = {name: value for name, value in os.environ.items() if not re.match(OURS, name)}
    words = ["-m", "examples.reproduce.torch.ddp", "--models", "mlp-0.3M", "--seconds", "0.2", "--json", "rows.json"]
    command = [sys.executable, "-m", "launch.run", "-n", "2", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env={**clean, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert {"gloo, 25 MB", "mpi4py", "mpips", "DataParallel"} <= {row["contender"] for row in rows}
