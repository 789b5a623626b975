"""Folders of jobs: one for each job of this user on this machine, with the job's pages and its launcher's files.

A page is the file in which a rank records what it does (`recorder.page`). The folders are in memory (/dev/shm), so that
writing to them needs no disk. Only this user can read them. A job that ends well leaves no folder.
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
# Environment variables in which a scheduler gives the name of its allocation (the machines that it has reserved for a
# user). Several jobs may run in one allocation at a time.
SCHEDULERS = ("SLURM_JOB_ID", "LSB_JOBID", "PBS_JOBID")
MEMORY = Path("/dev/shm")
# The suffix of a page: in PID.page, the rank that runs as process PID records what it does.
PAGE = ".page"
# The suffix of a file for stacks: into PID.stacks, process PID writes the stacks of its threads when it gets a signal.
STACKS = ".stacks"
# The suffix of an empty file: RANK.ended says that the program of the rank with this number has ended well.
PROGRAM_ENDED = ".ended"
# The suffix of a trace: in PID.trace, process PID records its calls while the job is traced (`recorder.tracing`).
TRACE = ".trace"
# the file by which `mpips trace` asks the ranks of a job to begin a trace
TRACE_REQUEST = "trace.json"
# the file in which the launcher writes what it knows about the end of the job
END_FILE = "end.json"
# environment variable set by `mpips run` for a job on several hosts: the content of HOSTS_FILE, URL-quoted
HOSTS = "_MPIPS_HOSTS"
# the file that names the hosts of the job, and how to reach them
HOSTS_FILE = "hosts.json"
# number of folders of failed jobs to keep; older ones are removed
KEPT_JOBS = 8


def jobs_folder() -> Path:
    """Return the folder that holds the folders of this user's jobs on this machine."""
    return (MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())) / f"mpips-{os.getuid()}"


def is_private(path: Path) -> bool:
    """True if the path is a folder (and not a link) that belongs to this user and is closed to all others."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def job_name(environment: Mapping[str, str] = os.environ, alone: bool = False) -> str:
    """Return the name of the job to which this process belongs. Each launch on the machine has a different name.

    In an allocation of a scheduler, the job's name begins with the allocation's name. `alone` is True if the job has
    no other process.
    """
    name = environment.get(JOB, "")
    if not name:
        # Each mpirun, and each srun --mpi=pmix, has a namespace of its own.
        name = environment.get("PMIX_NAMESPACE", "")
        # Under MPICH's mpiexec ignore the number of the Slurm step: several mpiexec may run inside one step, and the
        # ranks of all of them have this step in their environment.
        if not name and "HYDI_CONTROL_FD" not in environment:
            name = environment.get("SLURM_STEP_ID", "")
        name = name or f"p{os.getpid() if alone else _launcher()}"
        name = ".".join([*(environment[variable] for variable in SCHEDULERS if environment.get(variable)), name])
    return "".join(letter if letter.isalnum() or letter in "-_.@" else "-" for letter in name).lstrip(".")[:200]


def _launcher() -> int:
    """Return the pid of the process that launched this rank.

    The launcher is the nearest ancestor that is not part of the rank. A wrapper script has PMI_RANK, so it is part of
    the rank.
    """
    pid = os.getppid()
    with suppress(OSError):
        while b"\0PMI_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def make_folder(name: str) -> Path:
    """Return the folder of a job. Make the folder if it does not exist.

    Jobs that fail leave their folders behind, so that tools can show how they ended. To keep these folders from filling
    the memory, each call that makes a folder also removes the oldest folders of jobs without a living process, except
    the newest `KEPT_JOBS`.

    Raises:
        OSError: The folder cannot be made, or other users have access to the folder that holds all jobs.
    """
    top = jobs_folder()
    top.mkdir(mode=0o700, exist_ok=True)
    if not is_private(top):
        raise PermissionError(f"{top} is open to others")
    folder = top / name
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        return folder
    others = sorted((other for other in top.iterdir() if other != folder), key=modified_at)
    ended = [
        other
        for other in others
        if not any(is_alive(int(path.stem)) for path in other.glob(f"*{PAGE}")) and not is_launched_here(other)
    ]
    for other in ended[:-KEPT_JOBS]:
        shutil.rmtree(other, ignore_errors=True)
    return folder


def modified_at(path: Path) -> float:
    """Return the Unix time at which a file was last written, or 0 if another process has removed the file."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def forget_job(name: str) -> None:
    """Remove the folder of a job that has ended well, with the files that dead ranks have left in it.

    Files of a trace stay, because the process that traces the job removes them.
    """
    with suppress(OSError):
        folder = jobs_folder() / name
        if not name or not is_private(jobs_folder()):
            return
        if not (folder / TRACE_REQUEST).exists() and not any(folder.glob(f"*{TRACE}")):
            shutil.rmtree(folder)
            return
        for path in folder.iterdir():
            if path.suffix != TRACE and path.name != TRACE_REQUEST:
                path.unlink(missing_ok=True)


def write_end(name: str, **known: object) -> None:
    """Write what the launcher knows about the end of a job into the job's folder, if the folder exists."""
    with suppress(OSError):
        if is_ours(jobs_folder() / name):
            write(jobs_folder() / name, END_FILE, json.dumps(known))


def write_hosts(name: str, text: str) -> None:
    """Write the hosts of a job, and how to reach them, for tools that run on the launcher's host."""
    with suppress(OSError):
        write(make_folder(name), HOSTS_FILE, text)


def read_hosts(folder: Path) -> dict[str, Any]:
    """Return what `write_hosts` has written (`names`, `launcher`, `agent`, `python`, `path`), or {}.

    The file names a program that will be run. So it is trusted only in a folder to which no other user has access.
    """
    with suppress(OSError, ValueError):
        if folder.parent == jobs_folder() and is_ours(folder):
            known: dict[str, Any] = json.loads((folder / HOSTS_FILE).read_text(encoding="utf-8"))
            return known
    return {}


def is_ours(folder: Path) -> bool:
    """True if the folder of a job exists, and only this user has access to it."""
    try:
        return is_private(folder.parent) and is_private(folder)
    except OSError:
        return False


def is_launched_here(folder: Path) -> bool:
    """True if this is the folder of a job on several hosts whose launcher, `mpips run`, is alive on this host.

    Such a job has the pid of its launcher as its name.
    """
    return read_hosts(folder).get("launcher") == socket.gethostname() and is_alive(int(folder.name))


def write(folder: Path, name: str, text: str) -> None:
    """Write a file atomically, so that several ranks of a host may write it at the same time."""
    passing = folder / f".{name}-{os.getpid()}"
    fd = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(passing, folder / name)


def is_alive(pid: int) -> bool:
    """True if there is a process with this pid."""
    return os.path.exists(f"/proc/{pid}")


def remove_if_empty(folder: Path, ranks: int = 0) -> None:
    """Remove the folder of a job if no page is left in it. Every rank calls this at its end.

    Args:
        ranks: The number of ranks on this host. Until all of them have ended, their `.ended` files stay, because a
            rank that still runs may have to read them.
    """
    with suppress(OSError):
        if not any(folder.glob(f"*{PAGE}")) and not is_launched_here(folder):
            (folder / HOSTS_FILE).unlink(missing_ok=True)
            ended = list(folder.glob(f"*{PROGRAM_ENDED}"))
            for path in ended if len(ended) >= ranks else ():
                path.unlink(missing_ok=True)
        folder.rmdir()
