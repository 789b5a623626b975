"""Whether deaths can be survived: asked of the MPI; and what a job with spares is started as."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launch import Launcher, LauncherError, run
from launch.hosts import Host, HostError, Placed, place
from launch.mpirun import check_spares, find_obstacle_to_survival


def open_mpi(folder: Path, built_with: str) -> Launcher:
    """A stand-in whose ompi_info says this of its build."""
    for name, answer in (("mpirun", "mpirun (Open MPI) 5.0.11"), ("ompi_info", f"a:b\noptions:{built_with}")):
        file = folder / name
        file.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
        file.chmod(0o755)
    return Launcher(str(folder / "mpirun"), "openmpi", "5.0.11")


def call(*words: str) -> Result:
    return CliRunner().invoke(run.command, list(words))


def test_open_mpi_with_ulfm_survives(tmp_path: Path) -> None:
    assert find_obstacle_to_survival(open_mpi(tmp_path, "ft_mpi_support:yes")) == ""
    assert "built without ULFM" in find_obstacle_to_survival(open_mpi(tmp_path, "ft_mpi_support:no"))


def test_an_open_mpi_that_cannot_be_asked_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no ompi_info" in find_obstacle_to_survival(Launcher(str(tmp_path / "mpirun"), "openmpi", "4.1"))


@pytest.mark.parametrize("flavour, name", [("mpich", "MPICH"), ("intel", "Intel MPI")])
def test_other_mpis_are_named_and_what_to_do(flavour: str, name: str) -> None:
    with pytest.raises(LauncherError, match=f"--spares 2 cannot be had with {name} 1.*{name} ends a job.*--restarts"):
        check_spares(Launcher("mpiexec", flavour, "1"), 2)  # type: ignore[arg-type]


def test_spares_are_more_ranks_of_a_job_that_survives(tmp_path: Path) -> None:
    mpirun = open_mpi(tmp_path, "ft_mpi_support:yes").path
    done = call("-w", "3", "-s", "2", "--spares", "2", "--mpirun", mpirun, "--dry-run", "x.py")
    assert done.exit_code == 0, done.output
    words = shlex.split(done.output)
    assert words[words.index("-n") + 1] == "7"
    assert words[words.index("--with-ft") + 1] == "ulfm"
    assert {"MPIPS_SPARES=2", "MPIPS_SERVERS=2", "MPIPS_WORKERS=3"} <= set(words)
    words = shlex.split(call("-n", "4", "--spares", "0", "--mpirun", mpirun, "--dry-run", "x.py").output)
    assert words[words.index("-n") + 1] == "4"
    assert "MPIPS_SPARES=0" in words and "--with-ft" in words


def test_without_spares_nothing_is_asked_for(tmp_path: Path) -> None:
    mpirun = open_mpi(tmp_path, "ft_mpi_support:no").path
    done = call("-w", "3", "--mpirun", mpirun, "--dry-run", "x.py")
    assert done.exit_code == 0
    assert "--with-ft" not in done.output and "SPARES" not in done.output
    done = call("-w", "3", "--spares", "1", "--mpirun", mpirun, "--dry-run", "x.py")
    assert done.exit_code == 2
    assert "--spares 1 cannot be had with Open MPI 5.0.11" in done.output


def test_a_variable_is_as_good_as_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIPS_SPARES", "1")
    done = call("-w", "3", "--mpirun", open_mpi(tmp_path, "ft_mpi_support:yes").path, "--dry-run", "x.py")
    words = shlex.split(done.output)
    assert words[words.index("-n") + 1] == "4" and "--with-ft" in words


def test_spares_are_spread_over_the_slots_that_are_left() -> None:
    hosts = (Host("a", 3), Host("b", 3), Host("c", 3))
    assert place(hosts, 4, 1, 2) == (Placed("a", 3), Placed("b", 1), Placed("c", 1), Placed("b", 1), Placed("c", 1))
    assert place((Host("a"), Host("b")), 2, 0, 2) == (Placed("a", 1), Placed("b", 1), Placed("a", 1), Placed("b", 1))
    assert place(hosts, 5, 2) == place(hosts, 5, 2, 0)
    with pytest.raises(HostError, match=r"9 slots, the job needs 10 ranks \(3 spares, 5 workers, 2 servers\)"):
        place(hosts, 5, 2, 3)
