"""Folders of jobs: a folder for each job of this user on this machine, of its ranks' pages and its launcher's notes.

They lie in memory, so that writing costs no disk, and only this user can read them. A job that ends well leaves none.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

JOB = "_MPIPS_JOB"
"""Set by `mpips run`: the job's name."""
SCHEDULERS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
"""Variables that name an allocation, in which several jobs may run at the same time."""
MEMORY = Path("/dev/shm")
PAGE, STACKS = ".page", ".stacks"
PROGRAM_ENDED = ".ended"
"""Of an empty file, named by a rank of the job, which says that its program has ended well."""
TRACE, TRACE_REQUEST = ".trace", "trace.json"
END_FILE = "end.json"
HOSTS = "_MPIPS_HOSTS"
"""Set by `mpips run` for a job of several hosts: what goes into `HOSTS_FILE`, quoted as in an address."""
HOSTS_FILE = "hosts.json"
KEPT_JOBS = 8
"""Folders of jobs that have ended otherwise than well, of which the newest are kept."""


def of_jobs() -> Path:
    """Return the folder of this user's jobs on this machine."""
    return (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"mpips-{os.getuid()}"


def is_private(path: Path) -> bool:
    """Return whether a folder is this user's, and closed to others."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def job_name(environment: Mapping[str, str] = os.environ, alone: bool = False) -> str:
    """Return the name of this process' job, which no other launch has; behind the scheduler's, where there is one.

    `alone`: the job has no other process.
    """
    name = environment.get(JOB, "")
    if not name:
        name = environment.get("PMIX_NAMESPACE", "")  # each mpirun, and each srun --mpi=pmix, has another
        if not name and "HYDI_CONTROL_FD" not in environment:  # an mpiexec in a step has the step's variables
            name = environment.get("SLURM_STEP_ID", "")
        name = name or f"p{os.getpid() if alone else _launcher()}"
        name = ".".join([*(environment[one] for one in SCHEDULERS if environment.get(one)), name])
    return "".join(letter if letter.isalnum() or letter in "-_.@" else "-" for letter in name).lstrip(".")[:200]


def _launcher() -> int:
    """Return the process that has started this rank: its parent, but for a script that is the rank's own."""
    pid = os.getppid()
    with suppress(OSError):
        while b"\0PMI_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def make(name: str) -> Path:
    """Make the folder of a job, and make room for it. OSError where it is not this user's alone."""
    top = of_jobs()
    top.mkdir(mode=0o700, exist_ok=True)
    if not is_private(top):
        raise PermissionError(f"{top} is open to others")
    here = top / name
    try:
        here.mkdir(mode=0o700)
    except FileExistsError:
        return here
    others = sorted((one for one in top.iterdir() if one != here), key=modified)
    ended = [
        one
        for one in others
        if not any(lives(int(path.stem)) for path in one.glob(f"*{PAGE}")) and not is_launched_here(one)
    ]
    for one in ended[:-KEPT_JOBS]:
        shutil.rmtree(one, ignore_errors=True)
    return here


def modified(path: Path) -> float:
    """Return when a file was written last, in Unix time; 0 where another process has removed it meanwhile."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def forget_job(name: str) -> None:
    """Remove what dead ranks have left of a job that has ended well. Whoever traces it removes the traces."""
    with suppress(OSError):
        here = of_jobs() / name
        if not name or not is_private(of_jobs()):
            return
        if not (here / TRACE_REQUEST).exists() and not any(here.glob(f"*{TRACE}")):
            shutil.rmtree(here)
            return
        for path in here.iterdir():
            if path.suffix != TRACE and path.name != TRACE_REQUEST:
                path.unlink(missing_ok=True)


def write_end(name: str, **known: object) -> None:
    """Write what the launcher of a job knows of its end, beside the pages of its ranks, where there are any."""
    with suppress(OSError):
        if is_ours(of_jobs() / name):
            write(of_jobs() / name, END_FILE, json.dumps(known))


def write_hosts(name: str, text: str) -> None:
    """Write on which hosts a job is, and how they are reached, for who looks from the host of its launcher."""
    with suppress(OSError):
        write(make(name), HOSTS_FILE, text)


def read_hosts(here: Path) -> dict[str, Any]:
    """Return what is written of the hosts of a job: `names`, `launcher`, `agent`, `python`, `path`; {}: nothing.

    It names a program to be run, so nothing counts but what lies in this user's own folder.
    """
    with suppress(OSError, ValueError):
        if here.parent == of_jobs() and is_ours(here):
            known: dict[str, Any] = json.loads((here / HOSTS_FILE).read_text(encoding="utf-8"))
            return known
    return {}


def is_ours(here: Path) -> bool:
    """Return whether there is a folder of a job that is this user's alone."""
    try:
        return is_private(here.parent) and is_private(here)
    except OSError:
        return False


def is_launched_here(here: Path) -> bool:
    """Return whether the `mpips run` of a job of several hosts lives here; its number is the job's name."""
    return read_hosts(here).get("launcher") == socket.gethostname() and lives(int(here.name))


def write(here: Path, name: str, text: str) -> None:
    """Write a file at one go, which ranks of one host may do at the same time."""
    passing = here / f".{name}-{os.getpid()}"
    fd = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(passing, here / name)


def lives(pid: int) -> bool:
    """Return whether there is a process of this number."""
    return os.path.exists(f"/proc/{pid}")


def leave(here: Path, ranks: int = 0) -> None:
    """Remove the folder of a job in which nothing of its ranks is left; whoever is the last does.

    `ranks`: so many are here. Before all have said that they ended, one may yet come that is to read it of others.
    """
    with suppress(OSError):
        if not any(here.glob(f"*{PAGE}")) and not is_launched_here(here):
            (here / HOSTS_FILE).unlink(missing_ok=True)
            ended = list(here.glob(f"*{PROGRAM_ENDED}"))
            for path in ended if len(ended) >= ranks else ():
                path.unlink(missing_ok=True)
        here.rmdir()
