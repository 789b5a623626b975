"""`mpips run` and `mpips doctor` on machines that lack something: a sentence that names it, and what to do."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
        ("mpich", "mount -t tmpfs -o ro tmpfs /dev/shm", "-m", "nothing can be written to /dev/shm, in which ranks"),
        ("openmpi", "true", "-n", "no network interface is up, and Open MPI's ranks find each other by one"),
        ("openmpi", "export TMPDIR=/proc", "", "needs a folder for files, and nothing can be written to /proc"),
        ("mpich", "ulimit -n 30", "", "a process may have 30 files open (ulimit -n), and 2 ranks need some 44"),
    ],
)  # fmt: skip
def test_what_is_sure_to_fail_is_refused(
    tmp_path: Path, flavour: str, prepare: str, unshare: str, words: str
) -> None:
    done = run_in(flavour, prepare, tmp_path, *filter(None, [unshare]))
    assert (done.returncode, words in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("flavour", "prepare", "unshare", "words"),
    [
        ("mpich", "mount -t tmpfs -o size=9m tmpfs /dev/shm", "-m", "mpips: /dev/shm has 9.0 MiB free"),
        ("openmpi", "mount -t tmpfs -o size=9m tmpfs /dev/shm", "-m", "mpips: /dev/shm has 9.0 MiB free"),
        ("mpich", "ulimit -n 40", "", "mpips: a process may have 40 files open (ulimit -n)"),
    ],
)  # fmt: skip
def test_what_may_do_is_said_after_a_failure(
    tmp_path: Path, flavour: str, prepare: str, unshare: str, words: str
) -> None:
    done = run_in(flavour, prepare, tmp_path, *filter(None, [unshare]))
    assert (done.returncode, words in done.stderr.splitlines()[-1]) == (7, True), done.stderr


def test_a_user_without_a_home_starts_jobs(tmp_path: Path) -> None:
    """Open MPI's mpirun does not even tell its version without one."""
    done = run_in("openmpi", "unset HOME", tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    code = "import mpi4py\nmpi4py.rc.initialize = False\nfrom collectives.tuner import table\n"
    code += "print(table.usable() == table.Table())"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]), "PATH": os.environ["PATH"]}
    alone = "import os, pwd\npwd.getpwuid = lambda user: (_ for _ in ()).throw(KeyError(user))\n"
    child = [sys.executable, "-c", alone + code]
    assert subprocess.run(child, env=environment, capture_output=True, text=True).stdout == "True\n"
