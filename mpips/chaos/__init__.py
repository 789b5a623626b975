"""Faults on purpose: a seeded plan of kills, stops, full disks and lost links against a running job, and a report.

    plan = chaos.draw(seed=7, count=3, every=5.0)
    run = chaos.watch(["mpips", "run", "-w", "4", "-s", "2", "--spares", "1", "train.py"], plan, limit=120)
    print(chaos.judge(run))

A program notes `chaos.note(step, loss)` at the beginning of each step. That costs nothing where nobody watches.
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
from mpips.chaos.injector import Made, Note, Recovered, note
from mpips.chaos.report import Outcome, Report, judge
from mpips.chaos.watch import Done, Run, watch

__all__ = [
    "CALLS",
    "Done",
    "Fault",
    "FaultPlan",
    "KINDS",
    "Made",
    "Note",
    "Outcome",
    "PlanError",
    "Point",
    "ROLES",
    "Recovered",
    "Report",
    "Run",
    "Whom",
    "check_lab",
    "draw",
    "judge",
    "load",
    "note",
    "save",
    "watch",
]
