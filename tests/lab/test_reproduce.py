"""Short forms of the reproductions that take an emulated cluster: each ends well and leaves its JSON and picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.conftest import LIMIT, ROOT

pytestmark = [pytest.mark.lab, pytest.mark.full]


def reproduce(folder: Path, module: str, *words: str) -> None:
    """`python -m examples.reproduce.MODULE WORDS --quick` in a folder."""
    command = [sys.executable, "-m", f"examples.reproduce.{module}", *words, "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"


def found(folder: Path, name: str) -> Any:
    """The JSON of a name, beside which there is a picture."""
    assert Path(folder, "out", f"{name}.png").stat().st_size > 1000
    return json.loads(Path(folder, "out", f"{name}.json").read_text())


@pytest.fixture(autouse=True)
def pictures() -> None:
    pytest.importorskip("matplotlib")


@pytest.mark.parametrize("paper, job", [("mg-wfbp", "uniform"), ("ibatch", "servers")])
def test_overlap(tmp_path: Path, paper: str, job: str) -> None:
    reproduce(tmp_path, "overlap", paper)
    assert found(tmp_path, f"reproduce-{paper}")["points"]
    assert all(row["measured_s"] > 0 for row in found(tmp_path, f"reproduce-{paper}-{job}")["strategies"])


def test_bml(tmp_path: Path) -> None:
    reproduce(tmp_path, "bml")
    report = found(tmp_path, "reproduce-bml")
    assert {row["algorithm"] for row in report["exchanges"]} == {"direct", "bcube(n=3,k=2,depth=2)"}
    assert all(row["measured"] > 0 for row in [*report["exchanges"], *report["native"]])


def test_tensor(tmp_path: Path) -> None:
    reproduce(tmp_path, "tensor")
    report = found(tmp_path, "reproduce-tensor")
    assert {row["hosts"] for row in report["rows"]} == {2, 4}
    assert report["reasons"]


def test_mxnet_mpi(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    reproduce(tmp_path, "mxnet_mpi", "--rate", "1gbit")
    report = found(tmp_path, "reproduce-mxnet-mpi")
    assert len(report["synchronisation"]) == 3
    assert {"dist-SGD", "mpi-SGD"} <= {row["mode"] for row in report["training"]}
    assert any((row["of"], row["over"]) == ("dist-SGD", "mpi-SGD") for row in report["claims"])


def test_mlp(tmp_path: Path) -> None:
    reproduce(tmp_path, "mlp.lab", "--json", "lab.json")
    rows = json.loads((tmp_path / "lab.json").read_text())["found"]
    assert {(row["batch"], row["model"]) for row in rows["small"]} == {(1, 2), (2, 1)}


def test_slow_links(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    reproduce(tmp_path, "torch.slow_links")
    rows = {row["way"]: row for row in found(tmp_path, "reproduce-slow-links")["rows"]}
    assert rows["DiLoCo"]["sent"] < rows["allreduce"]["sent"] / 10
    assert all(row["computed"] < row["sent"] < 2 * row["computed"] for row in rows.values()), rows
