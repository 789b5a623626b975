"""How many ranks a machine can hold: which ranks count, and what is said of those that do not fit.

`mpips run` and `mpips doctor` on machines that lack something: a sentence that names it, and what to do.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from launch import Job, LauncherError, Machine
from launch.hosts import RankBlock
from launch.machine import Capacity, check_room, choose_loopback, choose_settings, describe_crowd, measure_room
from launch.mpirun import Flavour, Launcher

SMALL = Capacity(8, "it is small")


def test_ranks_may_outnumber_cores_but_not_what_fits() -> None:
    check_room(Job(8, ()), {}, SMALL)
    with pytest.raises(LauncherError, match="9 ranks cannot start on this machine: it is small; ask for at most 8"):
        check_room(Job(9, ()), {}, SMALL)


def test_only_ranks_of_this_machine_count() -> None:
    check_room(Job(9, (), hosts=(RankBlock("far", 9),)), {}, SMALL)
    here = (RankBlock("far", 9), RankBlock("localhost", 5), RankBlock(socket.gethostname(), 4))
    with pytest.raises(LauncherError, match="9 ranks cannot"):
        check_room(Job(18, (), hosts=here), {}, SMALL)


@pytest.mark.parametrize(
    "extra, variables",
    [
        (("--hostfile", "f"), {}),
        (("-hosts", "a,b"), {}),
        ((), {"LSB_JOBID": "1"}),
    ],
)
def test_where_mpirun_finds_hosts_by_itself_nothing_is_known(extra: tuple[str, ...], variables: dict[str, str]) -> None:
    check_room(Job(9, (), extra=extra), variables, SMALL)


def test_this_machine_holds_some_and_not_any_number() -> None:
    found = measure_room()
    assert 1 < found.ranks < 10**9
    assert found.why


def test_many_ranks_a_core_are_warned_of_with_what_to_do() -> None:
    assert describe_crowd(Job(32, ()), Machine(2), {}) is None
    said = describe_crowd(Job(1000, ()), Machine(2), {})
    assert said is not None
    assert "1000 ranks share 2 cores: starting them takes some 300 s" in said
    assert "ask for fewer" in said
    assert describe_crowd(Job(1000, (), hosts=(RankBlock("far", 1000),)), Machine(2), {}) is None


def test_threads_share_the_cores_unless_the_user_says() -> None:
    assert choose_settings(3, Machine(8), {})["OMP_NUM_THREADS"] == "2"
    assert choose_settings(9, Machine(8), {})["OMP_NUM_THREADS"] == "1"
    given = choose_settings(3, Machine(8), {"MKL_NUM_THREADS": "4"})
    assert given["MKL_NUM_THREADS"] == "4" and "OMP_NUM_THREADS" not in given


@pytest.mark.parametrize(
    ("flavour", "settings"),
    [
        ("openmpi", {"OMPI_MCA_btl_tcp_if_include": "127.0.0.0/8"}),
        ("mpich", {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}),
        ("intel", {"FI_TCP_IFACE": "lo"}),
    ],
)
def test_ranks_of_one_machine_are_not_reached_from_others(flavour: Flavour, settings: dict[str, str]) -> None:
    launcher, job = Launcher("mpirun", flavour, "1"), Job(2, ("x",))
    assert choose_loopback(job, launcher, {}) == settings
    for name in settings:  # the user's own count
        assert choose_loopback(job, launcher, {name: "eth0"}) == {}
        extra = ("--mca", name.removeprefix("OMPI_MCA_"), "eth0")
        assert choose_loopback(job._replace(extra=extra), launcher, {}) == {}
    assert choose_loopback(job._replace(hosts=(RankBlock("node1", 2),)), launcher, {}) == {}
    assert choose_loopback(job._replace(interface="eth0"), launcher, {}) == {}
    assert choose_loopback(job, launcher, {"LSB_JOBID": "1"}) == {}  # mpirun may know of other hosts
    assert choose_loopback(job._replace(extra=("--hostfile", "hosts")), launcher, {}) == {}


ROOT = Path(__file__).parents[3]
SAYS = {"openmpi": "mpirun (Open MPI) 5.0.11", "mpich": "HYDRA build details:\n    Version: 5.0.2"}


def run_in(flavour: str, prepare: str, tmp_path: Path, *unshare: str) -> subprocess.CompletedProcess[str]:
    """`mpips run -w 2 x.py` in a shell of its own after `prepare`, with a stand-in for mpirun that fails with 7."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\n[ $HOME ] || exit 9; [ $1 = --version ] && echo '{SAYS[flavour]}' || exit 7\n")
    mpirun.chmod(0o755)
    (tmp_path / "x.py").touch()
    words = [sys.executable, "-m", "launch.run", "-w", "2", "--mpirun", str(mpirun), str(tmp_path / "x.py")]
    shell = ["bash", "-c", f"{prepare} && exec {shlex.join(words)}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if unshare:
        shell = ["unshare", "-Ur", *unshare, *shell]
        if subprocess.run([*shell[: 2 + len(unshare)], "true"], capture_output=True).returncode:
            pytest.skip("this machine gives no namespaces of its own")
    return subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("flavour", "prepare", "unshare", "words"),
    [
        ("mpich", "mount -t tmpfs -o size=1m tmpfs /dev/shm", "-m", "/dev/shm has 1.0 MiB free, and 2 ranks of MPICH"),
        ("mpich", "mount -t tmpfs -o ro tmpfs /dev/shm", "-m", "/dev/shm is not writable, and ranks"),
        ("openmpi", "true", "-n", "no network interface is up, and Open MPI's ranks find each other by one"),
        ("openmpi", "export TMPDIR=/proc", "", "needs a folder for files, and /proc is not writable"),
        ("mpich", "ulimit -n 30", "", "a process may have 30 files open (ulimit -n), and 2 ranks need some 44"),
    ],
)
def test_what_is_sure_to_fail_is_refused(tmp_path: Path, flavour: str, prepare: str, unshare: str, words: str) -> None:
    done = run_in(flavour, prepare, tmp_path, *filter(None, [unshare]))
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("flavour", "prepare", "unshare", "words"),
    [
        ("mpich", "mount -t tmpfs -o size=9m tmpfs /dev/shm", "-m", "mpips: /dev/shm has 9.0 MiB free"),
        ("openmpi", "mount -t tmpfs -o size=9m tmpfs /dev/shm", "-m", "mpips: /dev/shm has 9.0 MiB free"),
        ("mpich", "ulimit -n 40", "", "mpips: a process may have 40 files open (ulimit -n)"),
        ("mpich", "ulimit -f 8", "", "mpips: no file may be larger than 0.0 MiB (ulimit -f)"),
    ],
)
def test_what_may_do_is_said_after_a_failure(
    tmp_path: Path, flavour: str, prepare: str, unshare: str, words: str
) -> None:
    done = run_in(flavour, prepare, tmp_path, *filter(None, [unshare]))
    assert (done.returncode, words in done.stderr.splitlines()[-1]) == (7, True), done.stderr


@pytest.mark.slow
def test_a_user_without_a_home_starts_jobs(tmp_path: Path) -> None:
    """Open MPI's mpirun does not even tell its version without one."""
    done = run_in("openmpi", "unset HOME", tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    code = "import mpi4py\nmpi4py.rc.initialize = False\nfrom collectives.tuner import table\n"
    code += "from collectives.schedule.catalog import check_algorithm\n"
    code += "print(table.load_or_warn(check_algorithm) == table.TuningTable())"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "PATH": os.environ["PATH"]}
    alone = "import os, pwd\npwd.getpwuid = lambda user: (_ for _ in ()).throw(KeyError(user))\n"
    child = [sys.executable, "-c", alone + code]
    assert subprocess.run(child, env=environment, capture_output=True, text=True).stdout == "True\n"
