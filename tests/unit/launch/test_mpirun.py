"""From a job to a command, for each MPI; settings appear where they are needed and only there.

Whether deaths can be survived: asked of the MPI; and what a job with spares is started as.
"""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from launch import Job, Launcher, LauncherError, Machine, build, find, run, this_machine
from launch.hosts import Host, HostError, RankBlock, place
from launch.mpirun import check_spares, describe_missing_scheduler, find_obstacle_to_survival, parse_version

OPEN_MPI = Launcher("mpirun", "openmpi", "5.0.11")
MPICH = Launcher("mpiexec", "mpich", "5.0.2")
INTEL = Launcher("mpirun", "intel", "2021.18")
MACHINE = Machine(cores=8)
PROGRAM = ("python", "x.py")


def has(argv: list[str], *words: str) -> bool:
    """Do these words stand next to each other?"""
    return any(tuple(argv[i : i + len(words)]) == words for i in range(len(argv)))


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", ("openmpi", "5.0.11")),
        ("HYDRA build details:\n    Version:                                 4.2.1\n", ("mpich", "4.2.1")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 2", ("intel", "2021.18")),
        ("something else 1.0", None),
    ],
)
def test_flavours(text: str, known: tuple[str, str] | None) -> None:
    assert parse_version(text) == known


PLAIN = Job(4, PROGRAM, {"A": "1"})
AWAY = MACHINE._replace(missing_scheduler="srun is not here")


@pytest.mark.parametrize(
    ("launcher", "job", "machine", "words", "without"),
    [
        (
            OPEN_MPI,
            PLAIN,
            MACHINE,
            "-x A=1 -n 4 python x.py",
            "--allow-run-as-root --oversubscribe btl_tcp_eager_limit",
        ),
        (OPEN_MPI, PLAIN, MACHINE, "--bind-to none", "--with-ft"),
        (OPEN_MPI, PLAIN._replace(extra=("--bind-to", "core")), MACHINE, "--bind-to core", "none"),
        (OPEN_MPI, PLAIN._replace(exported=("KEY",)), MACHINE, "-x KEY", ""),
        (OPEN_MPI, PLAIN._replace(ranks=9), MACHINE, "--oversubscribe --mca mpi_yield_when_idle 1", ""),
        (OPEN_MPI, PLAIN, Machine(8, root=True), "--allow-run-as-root", ""),
        (OPEN_MPI, PLAIN, MACHINE, "--mca osc ^ucx", "plm"),
        (OPEN_MPI, PLAIN, Machine(8, infiniband=True), "mpirun", "^ucx"),
        (MPICH, PLAIN, MACHINE, "mpiexec -genv A 1 -n 4 python x.py", "-launcher -rmk"),
        # as in a container, which has the variables of a scheduler's job, and not srun
        (OPEN_MPI, PLAIN, AWAY, "--prtemca plm ^slurm,tm,lsf,pals", ""),
        (OPEN_MPI._replace(version="4.1.6"), PLAIN, AWAY, "--mca plm ^slurm,tm,lsf,pals", ""),
        (MPICH, PLAIN, AWAY, "-launcher fork -rmk user", ""),
        (MPICH, PLAIN._replace(hosts=(RankBlock("a", 4),)), AWAY, "-launcher ssh -rmk user", ""),
        (INTEL, PLAIN, AWAY, "-bootstrap fork", "-rmk"),
    ],
)
def test_settings_appear_where_they_are_needed_and_only_there(
    launcher: Launcher, job: Job, machine: Machine, words: str, without: str
) -> None:
    argv = build(launcher, job, machine)
    assert has(argv, *words.split())
    assert not set(argv) & set(without.split())


@pytest.mark.parametrize("launcher", [OPEN_MPI, MPICH])
def test_ranks_that_share_cores_share_what_these_have_learned_of_their_code(launcher: Launcher) -> None:
    """Where the machine lets them, and all of them are on it."""
    fixed = ("setarch", "x86_64", "-R")
    lets = MACHINE._replace(fixed_addresses=fixed)
    assert build(launcher, Job(9, PROGRAM), lets)[:4] == [*fixed, launcher.path]
    assert build(launcher, Job(8, PROGRAM), lets)[0] == launcher.path
    assert build(launcher, Job(9, PROGRAM), MACHINE)[0] == launcher.path
    assert build(launcher, Job(9, PROGRAM, hosts=(RankBlock("node1", 9),)), lets)[0] == launcher.path


@pytest.mark.parametrize(("text", "allowed"), [("#!/bin/sh\nexit 0", True), ("#!/bin/sh\nexit 1", False), ("", False)])
def test_a_container_may_forbid_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, allowed: bool) -> None:
    """Or have a file of that name which is no program."""
    setarch = tmp_path / "setarch"
    setarch.write_text(text)
    setarch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert this_machine().fixed_addresses == ((str(setarch), platform.machine(), "-R") if allowed else ())


def test_an_allocation_without_its_scheduler_is_found(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_NODELIST": "other", "PATH": str(tmp_path)}
    assert describe_missing_scheduler(job) == "this is inside a job of Slurm, but srun is not here"
    assert Job(2, PROGRAM).ranks_here(job) == 2
    (tmp_path / "srun").write_text("#!/bin/sh")
    (tmp_path / "srun").chmod(0o755)
    assert describe_missing_scheduler(job) == ""
    assert Job(2, PROGRAM).ranks_here(job) == 0
    assert "PBS, but its host file /none/n cannot be read" in describe_missing_scheduler({"PBS_NODEFILE": "/none/n"})


HOSTS = (RankBlock("a", 2), RankBlock("b", 2), RankBlock("a", 1))


def test_hosts_in_the_order_of_ranks() -> None:
    job = Job(5, PROGRAM, hosts=HOSTS, interface="eth1")
    argv = build(OPEN_MPI, job, MACHINE)
    assert [argv[i + 1] for i, word in enumerate(argv) if word == "--host"] == ["a:2", "b:2", "a:1"]
    assert argv.count(":") == 2
    assert has(argv, "--mca", "btl_tcp_if_include", "eth1")
    for name in ("btl_tcp_eager_limit", "btl_tcp_rndv_eager_limit", "btl_tcp_max_send_size"):
        assert has(argv, "--mca", name, "8388608")
    mpich = build(MPICH, job, MACHINE)
    assert has(mpich, "-hosts", "a:2,b:2,a:1")
    assert has(mpich, "-iface", "eth1")
    intel = build(INTEL, job, MACHINE)
    assert [intel[i + 1] for i, word in enumerate(intel) if word == "-host"] == ["a", "b", "a"]


def test_ranks_and_hosts_must_agree() -> None:
    with pytest.raises(LauncherError, match="5 ranks are placed on hosts, but the job has 6"):
        build(OPEN_MPI, Job(6, PROGRAM, hosts=HOSTS), MACHINE)


def test_a_mistyped_or_unknown_mpirun_is_told_from_an_mpi_that_is_missing(tmp_path: Path) -> None:
    stranger = tmp_path / "mpirun"
    stranger.write_text(f"#!{sys.executable}\nprint('Strange MPI 3')\n")
    stranger.chmod(0o755)
    with pytest.raises(LauncherError, match="Strange MPI 3"):
        find(str(stranger))
    with pytest.raises(LauncherError, match=f"^--mpirun {tmp_path}/none is not there: name an mpirun that is, or"):
        find(f"{tmp_path}/none")
    with pytest.raises(LauncherError, match=r"^--mpirun mpirum is not there on the PATH: "):
        find("mpirum")
    with pytest.raises(LauncherError, match=f"^--mpirun {tmp_path} is not an executable program: "):
        find(str(tmp_path))


def open_mpi(folder: Path, built_with: str) -> Launcher:
    """A stand-in whose ompi_info says this of its build."""
    for name, answer in (("mpirun", "mpirun (Open MPI) 5.0.11"), ("ompi_info", f"a:b\noptions:{built_with}")):
        file = folder / name
        file.write_text(f"#!/bin/sh\nprintf '{answer}\\n'\n")
        file.chmod(0o755)
    return Launcher(str(folder / "mpirun"), "openmpi", "5.0.11")


def call(*words: str) -> Result:
    return CliRunner().invoke(run.command, list(words))


def test_an_open_mpi_that_cannot_be_asked_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "there is no ompi_info" in find_obstacle_to_survival(Launcher(str(tmp_path / "mpirun"), "openmpi", "4.1"))


@pytest.mark.parametrize("flavour, name", [("mpich", "MPICH"), ("intel", "Intel MPI")])
def test_other_mpis_are_named_and_what_to_do(flavour: str, name: str) -> None:
    with pytest.raises(LauncherError, match=f"--spares 2 cannot be had with {name} 1.*{name} ends a job.*--restarts"):
        check_spares(Launcher("mpiexec", flavour, "1"), 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "asked, ranks, spares",
    [
        ("-w 3 -s 2 --spares 2", "7", "2"),
        ("-n 4 --spares 0", "4", "0"),
        ("-w 3", "3", ""),
        ("-w 3 MPIPS_SPARES=1", "4", "1"),
    ],
)
def test_spares_are_more_ranks_of_a_job_that_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, ranks: str, spares: str
) -> None:
    words, _, variable = asked.partition(" MPIPS_SPARES=")
    if variable:
        monkeypatch.setenv("MPIPS_SPARES", variable)
    mpirun = open_mpi(tmp_path, "ft_mpi_support:yes").path
    done = call(*words.split(), "--mpirun", mpirun, "--dry-run", "x.py")
    assert done.exit_code == 0, done.output
    started = shlex.split(done.output)
    assert started[started.index("-n") + 1] == ranks
    assert has(started, "--with-ft", "ulfm") == (f"MPIPS_SPARES={spares}" in started) == bool(spares)


def test_spares_need_ulfm(tmp_path: Path) -> None:
    mpirun = open_mpi(tmp_path, "ft_mpi_support:no").path
    done = call("-w", "3", "--spares", "1", "--mpirun", mpirun, "--dry-run", "x.py")
    assert done.exit_code == 2
    assert "--spares 1 cannot be had with Open MPI 5.0.11" in done.output


def test_spares_are_spread_over_the_slots_that_are_left() -> None:
    hosts = (Host("a", 3), Host("b", 3), Host("c", 3))
    assert place(hosts, 4, 1, 2) == (
        RankBlock("a", 3),
        RankBlock("b", 1),
        RankBlock("c", 1),
        RankBlock("b", 1),
        RankBlock("c", 1),
    )
    assert place((Host("a"), Host("b")), 2, 0, 2) == (
        RankBlock("a", 1),
        RankBlock("b", 1),
        RankBlock("a", 1),
        RankBlock("b", 1),
    )
    assert place(hosts, 5, 2) == place(hosts, 5, 2, 0)
    with pytest.raises(HostError, match=r"9 slots, the job needs 10 ranks \(3 spares, 5 workers, 2 servers\)"):
        place(hosts, 5, 2, 3)
