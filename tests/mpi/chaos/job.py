"""One job under one plan, and whether all was as promised."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpips import chaos
from mpips.chaos import ChaosReport, FaultPlan, WatchedRun
from mpips.chaos.report import notes_of
from tests.mpi.chaos import counts, model, tables
from tests.mpi.chaos.cases import WORKERS, Case

LIMIT = 20.0  # seconds of a job
MODULE = "tests.mpi.chaos.program"
Curve = Callable[[Mapping[int, int], int], list[bytes]]
"""The bits of all steps of an undisturbed job, of the number of workers in each step and the number of steps."""


class Result(NamedTuple):
    """What came of a job. `wrong`: what is not as promised, and is no hang and no leftover; "" where all is."""

    plan: FaultPlan
    report: ChaosReport
    wrong: str
    said: str

    @property
    def good(self) -> bool:
        return not (self.wrong or self.report.hung or self.report.left)


def run(case: Case, plan: FaultPlan, spares: int, limit: float = LIMIT, names: str = "") -> Result:
    """Run the program of a case under a plan. `names`: of the tables that it trains, if any."""
    if names:
        # Servers share a table's limit, so their number decides which rows it drops: let none be missing.
        spares = max(spares, len(plan.faults))
    with tempfile.TemporaryDirectory(prefix="chaos-job-") as name:
        file = Path(name, "stored.npz" if case.asynchronous else "stored.safetensors")
        argv = [
            sys.executable,
            "-m",
            "launch.cli",
            "run",
            "-w",
            str(WORKERS),
            "-s",
            str(case.servers),
            *case.words,
            *(() if spares < 0 else ("--spares", str(spares))),
            "-m",
            MODULE,
            case.kind,
            str(file),
            *filter(None, [names]),
        ]
        with open(Path(name, "said"), "w+b") as said:
            done = chaos.watch(argv, plan, limit, said)
            said.seek(0)
            text = said.read().replace(b"\0", b"").decode(errors="replace")  # Open MPI prints NULs
        wrong = f"ended with {done.code}" if done.code and not done.hung else ""
        if not wrong and not done.hung and names:
            wrong = wrong_curve(done, partial(tables.curve, names, case.servers), tables.STEPS)
        elif not wrong and not done.hung:
            wrong = _wrong_counts(done, file) if case.asynchronous else wrong_curve(done)
        return Result(plan, chaos.judge(done), wrong, text)


def wrong_curve(run: WatchedRun, curve: Curve = model.curve, steps: int = model.STEPS) -> str:
    """What is not as in an undisturbed job with the same number of workers in each step, "" where nothing is."""
    notes = notes_of(run)
    workers = {note.step: note.workers for note in notes}  # as it was when the step was done for the last time
    if missing := set(range(steps + 1)) - workers.keys():
        return f"nobody noted step {min(missing)}"
    wanted = [_digest(bits) for bits in curve(workers, steps)]
    for note in notes:
        if note.digest != wanted[note.step]:
            return f"wrong bits at step {note.step} of rank {note.rank} ({workers[note.step]} workers)"
    return ""


def _wrong_counts(run: WatchedRun, file: Path) -> str:
    if not file.exists():
        return "no counts were stored"
    with np.load(file) as stored:
        return counts.wrong(stored, {note.step for note in notes_of(run)})


def _digest(bits: bytes) -> str:
    return hashlib.blake2b(bits, digest_size=8).hexdigest()
