"""Runs a command under a plan: hears its ranks, makes the faults, ends it at a time limit, and looks for leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import msgspec

from mpips.chaos.faults import Done, Faults
from mpips.chaos.injector import SHOW_STACK
from mpips.chaos.plan import Plan, check_lab, save
from mpips.chaos.ranks import Ranks
from mpips.chaos.told import CHAOS, PLAN, Told

GRACE = 2.0  # seconds for a job's last processes to leave once its command has ended
END_SECONDS = 8.0  # for a command that is asked to end, before it is killed
STACK_SECONDS = 1.0  # for stacks to be written
LOOK_SECONDS = 0.2
SESSIONS = "ompi.", "prte."  # with the number of an mpirun behind


class Run(msgspec.Struct):
    """One run of a command: what its ranks told, which faults were made, how it ended."""

    plan: Plan
    began: float = 0.0
    ended: float = 0.0
    code: int = 0
    hung: bool = False
    told: list[Told] = []
    done: list[Done] = []
    left: list[str] = []
    """Processes that outlived it, and what else it left behind."""


def watch(
    argv: Sequence[str], plan: Plan, limit: float = 600.0, output: IO[bytes] | None = None, lab: str = "",
    look: Callable[[Run], None] | None = None,
) -> Run:  # fmt: skip
    """Run `argv`, an MPI job of programs that make stores, under a plan; what came of it.

    After `limit` seconds it counts as hung: each rank writes its stacks, and all is ended. Its output goes to `output`,
    a file, or where ours goes. It is heard on this machine alone, or on the hosts of `lab`, where it runs in one.
    `look` is called with the run so far, several times a second. PlanError where the plan has faults of hosts, and no
    lab is named.
    """
    check_lab(plan, lab)
    run = Run(plan, told=[], done=[], left=[])
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        save(plan, Path(name, PLAN))
        ranks = Ranks(Path(name))
        faults = Faults(plan, ranks, lab)
        run.began = time.monotonic()
        errors = subprocess.STDOUT if output else None
        job = subprocess.Popen(
            argv, env={**os.environ, CHAOS: name}, stdin=subprocess.DEVNULL, stdout=output, stderr=errors
        )
        try:
            _until_it_ends(run, job, ranks, faults, limit, look)
        finally:
            faults.end()
            if job.poll() is None:
                _end(job)
            run.code, run.ended, run.done = job.returncode, time.monotonic(), faults.done
            run.told += ranks.hear(0)
            run.left += _processes(name) + _files(ranks)
            ranks.close()
    return run


def _until_it_ends(
    run: Run, job: subprocess.Popen[bytes], ranks: Ranks, faults: Faults, limit: float,
    look: Callable[[Run], None] | None,
) -> None:  # fmt: skip
    while job.poll() is None:
        if look is not None:
            look(run)
        for told in ranks.hear(min(LOOK_SECONDS, faults.wait())):
            run.told.append(told)
            faults.hear(told)
        faults.make()
        if time.monotonic() > run.began + limit:
            run.hung = True
            for rank in ranks.all.values():
                rank.signal(SHOW_STACK) if rank.rank >= 0 else None
            time.sleep(STACK_SECONDS)
            return


def _end(job: subprocess.Popen[bytes]) -> None:
    job.terminate()
    try:
        job.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()


def _processes(folder: str) -> list[str]:
    """Processes of the job that have not left in time, each as a sentence; they are killed."""
    deadline = time.monotonic() + GRACE
    while (found := _carriers(folder)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"process {pid} ({words})" for pid, words in found.items()]


def _files(ranks: Ranks) -> list[str]:
    """Shared memory that its ranks had and session folders of its mpirun, which are there still."""
    memory = {path for rank in ranks.all.values() for path in rank.memory}
    ends = tuple(f".{pid}" for pid in ranks.parents)
    sessions = [path for path in Path(tempfile.gettempdir()).glob("*.[0-9]*") if path.name.startswith(SESSIONS)]
    return [str(path) for path in sorted(memory) + sessions if path in memory or path.name.endswith(ends)
            if path.exists()]  # fmt: skip


def _carriers(folder: str) -> dict[int, str]:
    """Processes that have this folder in their environment, as all of a watched job have, and their words."""
    mark, found = f"{CHAOS}={folder}".encode(), {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (place / "environ").read_bytes().split(b"\0"):
                words = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(place.name)] = words.strip()[:120]
    return found
