"""Folders of jobs: one for each job of this user on this machine, with its ranks' pages and its launcher's notes.

They lie in memory (/dev/shm), so that writing to them needs no disk, and only this user can read them. A job that ends
well leaves no folder.
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

# environment variable with the job's name, set by `mpips run`
JOB = "_MPIPS_JOB"
# Environment variables that name an allocation. Several jobs may run in one allocation at the same time.
SCHEDULERS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
MEMORY = Path("/dev/shm")
# suffixes of the files of a rank; the stem is its pid
PAGE = ".page"
STACKS = ".stacks"
# An empty file RANK.ended says that the program of that rank has ended well.
PROGRAM_ENDED = ".ended"
TRACE = ".trace"
TRACE_REQUEST = "trace.json"
END_FILE = "end.json"
# environment variable set by `mpips run` for a job on several hosts: the content of HOSTS_FILE, URL-quoted
HOSTS = "_MPIPS_HOSTS"
HOSTS_FILE = "hosts.json"
# number of folders of failed jobs to keep; older ones are removed
KEPT_JOBS = 8


def of_jobs() -> Path:
    """Return the folder that holds the folders of this user's jobs on this machine."""
    return (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"mpips-{os.getuid()}"


def is_private(path: Path) -> bool:
    """True if the path is a folder (and not a link) that belongs to this user and is closed to all others."""
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def job_name(environment: Mapping[str, str] = os.environ, alone: bool = False) -> str:
    """Return a name for this process' job that no other launch on the machine has.

    In an allocation of a scheduler, the name begins with that of the allocation. `alone`: the job has no other process.
    """
    name = environment.get(JOB, "")
    if not name:
        # Each mpirun, and each srun --mpi=pmix, has a namespace of its own.
        name = environment.get("PMIX_NAMESPACE", "")
        # Not under MPICH's mpiexec: started inside a Slurm step, it passes on the variables of that step.
        if not name and "HYDI_CONTROL_FD" not in environment:
            name = environment.get("SLURM_STEP_ID", "")
        name = name or f"p{os.getpid() if alone else _launcher()}"
        name = ".".join([*(environment[one] for one in SCHEDULERS if environment.get(one)), name])
    return "".join(letter if letter.isalnum() or letter in "-_.@" else "-" for letter in name).lstrip(".")[:200]


def _launcher() -> int:
    """Return the pid of the process that launched this rank.

    That is its nearest ancestor that is not part of the rank itself. A wrapper script is: it has PMI_RANK, too.
    """
    pid = os.getppid()
    with suppress(OSError):
        while b"\0PMI_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def make(name: str) -> Path:
    """Make the folder of a job if it does not exist, and then remove the oldest folders of failed jobs.

    Raises:
        OSError: The folder cannot be made, or other users have access to it.
    """
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
    """Return the Unix time at which a file was last written, or 0 if another process has removed it meanwhile."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def forget_job(name: str) -> None:
    """Remove the folder of a job that has ended well, with the files that dead ranks have left there.

    Files of a trace stay: the process that traces the job removes them.
    """
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
    """Write what the launcher knows about the end of a job into the job's folder, if there is one."""
    with suppress(OSError):
        if is_ours(of_jobs() / name):
            write(of_jobs() / name, END_FILE, json.dumps(known))


def write_hosts(name: str, text: str) -> None:
    """Write the hosts of a job, and how to reach them, for tools that run on the host of its launcher."""
    with suppress(OSError):
        write(make(name), HOSTS_FILE, text)


def read_hosts(here: Path) -> dict[str, Any]:
    """Return what `write_hosts` has written (`names`, `launcher`, `agent`, `python`, `path`), or {}.

    The file names a program to run, so it counts only in a folder that belongs to this user alone.
    """
    with suppress(OSError, ValueError):
        if here.parent == of_jobs() and is_ours(here):
            known: dict[str, Any] = json.loads((here / HOSTS_FILE).read_text(encoding="utf-8"))
            return known
    return {}


def is_ours(here: Path) -> bool:
    """True if the folder of a job exists, and only this user has access to it."""
    try:
        return is_private(here.parent) and is_private(here)
    except OSError:
        return False


def is_launched_here(here: Path) -> bool:
    """True if the `mpips run` of a job on several hosts runs on this host. Its pid is the job's name."""
    return read_hosts(here).get("launcher") == socket.gethostname() and lives(int(here.name))


def write(here: Path, name: str, text: str) -> None:
    """Write a file atomically, so that the ranks of a host may write it at the same time."""
    passing = here / f".{name}-{os.getpid()}"
    fd = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(passing, here / name)


def lives(pid: int) -> bool:
    """True if there is a process with this pid."""
    return os.path.exists(f"/proc/{pid}")


def leave(here: Path, ranks: int = 0) -> None:
    """Remove the folder of a job if no page is left in it. Every rank calls this at its end.

    Args:
        ranks: The number of ranks on this host. Until all of them have ended, their `.ended` files stay, because a
            rank that still runs may have to read them.
    """
    with suppress(OSError):
        if not any(here.glob(f"*{PAGE}")) and not is_launched_here(here):
            (here / HOSTS_FILE).unlink(missing_ok=True)
            ended = list(here.glob(f"*{PROGRAM_ENDED}"))
            for path in ended if len(ended) >= ranks else ():
                path.unlink(missing_ok=True)
        here.rmdir()
