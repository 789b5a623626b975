"""The short forms of programs that measure training with PyTorch and JAX end well and leave their JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from launch import find
from tests.child import outside

ALONE = pytest.mark.skipif(MPI.COMM_WORLD.size != 1, reason="starts a job of its own; once is enough")


def measured(folder: Path, *words: str) -> list[dict[str, Any]]:
    """Run a program of the examples on two ranks, and return its rows."""
    command = [sys.executable, "-m", "launch.run", "-n", "2", "-m", *words, "--json", "rows.json"]
    done = subprocess.run(command, cwd=folder, env=outside(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())
    return rows


@ALONE
@pytest.mark.full
def test_every_way_to_average_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    rows = measured(tmp_path, "examples.reproduce.torch.ddp", "--models", "mlp-0.3M", "--seconds", "0.2")
    assert {"gloo, 25 MB", "mpi4py", "mpips", "DataParallel"} <= {row["contender"] for row in rows}


@ALONE
@pytest.mark.full
def test_jax_is_measured_beside_its_own_collectives(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    rows = measured(tmp_path, "examples.reproduce.jax_allreduce", "--sizes", "8B,16KiB", "--seconds", "0.2")
    assert {(row["nbytes"], row["contender"]) for row in rows} >= {
        (nbytes, who) for nbytes in (8, 16384) for who in ("mpips", "gloo")
    }
    assert all(row["alone_s"] > 0 and row["in_a_loop_s"] > 0 for row in rows)


@ALONE
@pytest.mark.full
@pytest.mark.skipif(find(python=sys.executable).flavour == "mpich", reason="a death ends every job of this MPI")
def test_goodput_is_measured_while_replicas_are_killed_and_stopped(tmp_path: Path) -> None:
    pytest.importorskip("torch", "2.14")
    command = [sys.executable, "-m", "examples.reproduce.torch.goodput", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, env=outside(), capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    report = json.loads((tmp_path / "reproduce-goodput.json").read_text())
    assert [fault["kind"] for fault in report["faults"]] == ["kill", "stop"] and not report["left"]
    assert len(set(report["checksums"])) == 1 and report["samples_per_second_with"] > 0
