"""The public names of `mpips.overlap`: all there, and planning by them loads no MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpips import overlap

PLANNING = """
import sys
from mpips.overlap import Layer, Linear, Profile, load_profile, plan, plans, save_profile
profile = Profile((Layer("a", 10, 0.5, 1.0), Layer("b", 10, 0.5, 1.0)), Linear(0.1, 0.01), 0.1, 100.0)
save_profile(profile, sys.argv[1])
assert load_profile(sys.argv[1]) == profile
print(len(plans(profile)), plan(profile, "optimal").push, "mpi4py.MPI" in sys.modules)
"""


def test_every_public_name_is_there() -> None:
    assert all(getattr(overlap, name) is not None for name in overlap.__all__)
    assert dir(overlap) == sorted(overlap.__all__)
    with pytest.raises(AttributeError, match=r"mpips\.overlap.*has no attribute 'bucket'"):
        overlap.bucket  # noqa: B018


def test_planning_loads_no_mpi(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PLANNING, str(tmp_path / "job.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "7 ((1, 1), (2, 2)) False\n", done.stderr
