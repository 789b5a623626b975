"""Short forms of the reproductions that need no lab: each ends well, and leaves its JSON and picture."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 200
OURS = r"OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|MPI_|MPIPS_|COV_"
pytestmark = [
    pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts jobs of its own; once is enough"),
    pytest.mark.full,
]


def reproduce(folder: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -m examples.reproduce.MODULE WORDS` in a folder."""
    clean = {name: value for name, value in os.environ.items() if not re.match(OURS, name)}
    command = [sys.executable, "-m", f"examples.reproduce.{module}", *words]
    clean["PYTHONPATH"] = str(ROOT)
    return subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=LIMIT, check=False)


def written(folder: Path, module: str, *words: str) -> Any:
    """What it has left in rows.json."""
    done = reproduce(folder, module, *words, "--json", "rows.json")
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return json.loads((folder / "rows.json").read_text())


def test_mlp(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    points = written(tmp_path, "mlp", "--quick", "--plot", "figure.png")["points"]
    assert {point["width"] for point in points} == {32, 512}
    assert any(point["measured"] for point in points)
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_mlp_grids(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    rows = written(tmp_path, "mlp.grids", "--ranks", "2")["rows"]
    assert {row["grid"] for row in rows} == {"1x2", "2x1"}
    assert all(row["difference"] < 1e-4 for row in rows)


def test_allreduce(tmp_path: Path) -> None:
    words = ["--environment", sys.executable, "--ranks", "2", "--sizes", "8", "--rounds", "1", "--seconds", "0.01"]
    rows = written(tmp_path, "allreduce", *words)["rows"]
    assert {(row["start"], row["bytes"]) for row in rows} == {("mpips run", 8), ("mpirun", 8)}


def test_settings(tmp_path: Path) -> None:
    assert all("gain" in row or "skipped" in row for row in written(tmp_path, "settings", "--quick"))


@pytest.mark.parametrize("paper", ["mg-wfbp", "ibatch"])
def test_scaling_figures(tmp_path: Path, paper: str) -> None:
    pytest.importorskip("matplotlib")
    assert written(tmp_path, "overlap.simulated", paper, "--plot", "figure.png")["points"]
    assert (tmp_path / "figure.png").stat().st_size > 1000


def test_the_optimality_gap(tmp_path: Path) -> None:
    assert written(tmp_path, "overlap.gap", "--count", "5")["losses"]


def test_bml_simulated(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    done = reproduce(tmp_path, "bml", "--simulate-only")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "reproduce-bml.json").read_text())["figure5"]
    assert (tmp_path / "out" / "reproduce-bml.png").stat().st_size > 1000


def test_where_nothing_can_be_written_nothing_is_computed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    done = reproduce(tmp_path, "bml", "--simulate-only", "--out", "file/out")
    assert done.returncode == 2
    assert "'file/out' cannot be made: Not a directory" in done.stderr
