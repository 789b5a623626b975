"""Inject faults into a running job: kills, stops, full disks and lost links. A seed determines the plan of faults.

    plan = chaos.draw(seed=7, count=3, every=5.0)
    run = chaos.watch(["mpips", "run", "-w", "4", "-s", "2", "--spares", "1", "train.py"], plan, limit=120)
    print(chaos.judge(run))

`judge` reports how long the job took to continue after each fault. For this measurement the job's program must call
`chaos.note(step, loss)` at the beginning of each step. The call costs nothing in a job that is not watched.
"""

from mpips.chaos.faults import (
    CALLS,
    KINDS,
    ROLES,
    Fault,
    FaultPlan,
    PlanError,
    Point,
    Whom,
    check_lab,
    draw,
    load,
    save,
)
from mpips.chaos.injector import ProgramNote, StoreCreated, StoreRecovered, note
from mpips.chaos.report import ChaosReport, Outcome, judge
from mpips.chaos.watch import FaultAttempt, WatchedRun, watch

__all__ = [
    "CALLS",
    "FaultAttempt",
    "Fault",
    "FaultPlan",
    "KINDS",
    "StoreCreated",
    "ProgramNote",
    "Outcome",
    "PlanError",
    "Point",
    "ROLES",
    "StoreRecovered",
    "ChaosReport",
    "WatchedRun",
    "Whom",
    "check_lab",
    "draw",
    "judge",
    "load",
    "note",
    "save",
    "watch",
]
