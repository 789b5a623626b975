"""Ordinary programs on each way to exchange gradients: weights after 20 steps beside gloo's DDP."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.child import ROOT, outside
from tests.mpi.sizes import only_on

PROGRAMS = re.findall(r"^@program\ndef (\w+)", (Path(__file__).parent / "programs.py").read_text(), re.MULTILINE)
LIMIT = 400  # seconds of a job, which imports PyTorch once and runs all programs
WAYS = {
    "backend": ("mpips", 0),
    "data_parallel": ("data_parallel", 0),
    "optimizer": ("optimizer", 0),
    "servers": ("optimizer", 1),
}
# By way and program, the sentence by which all ranks refuse it.
REFUSED: dict[tuple[str, str], str] = {
    ("optimizer", "lbfgs"): r"LBFGS",
    ("servers", "lbfgs"): r"LBFGS",
}
# DistributedOptimizer exchanges in `step`: what is clipped before is each worker's own gradient, as its page says.
LOCAL = {("optimizer", "clipped"), ("servers", "clipped")}

pytestmark = [only_on(1), pytest.mark.timeout(2 * LIMIT)]


@cache
def outcomes(way: str, servers: int) -> dict[str, Any]:
    """Return what `programs.py` has found on two workers."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "found.pt"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "launch.cli",
                "run",
                "-w",
                "2",
                "-s",
                str(servers),
                "tests/mpi/torch/programs.py",
                way,
                str(file),
            ],
            cwd=ROOT,
            env=outside(),
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return torch.load(file)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_trains_as_on_gloo_or_is_refused(name: str, way: str) -> None:
    beside, _, wrong = outcomes("gloo", 0)[name]
    assert not any(wrong), wrong
    parameters, apart, errors = outcomes(*WAYS[way])[name]
    if (way, name) in REFUSED:
        assert len(set(errors)) == 1 and re.search(REFUSED[way, name], errors[0]), errors
        return
    assert not any(errors), errors
    assert apart == 0
    far = max(float((a - b).abs().max()) for a, b in zip(parameters, beside, strict=True))
    assert far < 1e-6 or (way, name) in LOCAL
