"""A plan of faults: which fault, to whom, and when. Data, drawn from a seed, that can be saved and replayed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from mpips.collectives import files

KINDS = ("kill", "stop", "full", "host", "cut", "slow")
"""SIGKILL; SIGSTOP for some seconds; for some seconds no file that the process writes can grow. Of the host on which it
is: SIGKILL to all ranks there; its NICs are down for some seconds; they have a part of their rate for some seconds."""
OF_HOSTS = ("host", "cut", "slow")
"""Kinds that need a lab."""
AT_ONCE = ("kill", "host")
ROLES = ("any", "worker", "server", "spare")
CALLS = (
    "create",
    "init",
    "set_optimizer",
    "push",
    "pull",
    "pushpull",
    "ipush",
    "ipull",
    "ipushpull",
    "barrier",
    "save",
    "load",
    "recover",
    "close",
)
NEAREST, FARTHEST = 0.5, 1.5  # of a drawn time between faults, in parts of the mean
LEAST_SHARE = 0.001  # of a rate
LONGEST = 1e8  # seconds
SLOWEST, FASTEST = 0.02, 0.5  # of a drawn share of a rate


class PlanError(ValueError):
    """A plan that makes no sense, or a file that holds none."""


class Point(msgspec.Struct, frozen=True):
    """A moment in a rank's program: `delay` seconds after it begins its `nth` call of that name."""

    rank: int
    call: str
    nth: int = 1
    delay: float = 0.0


class Whom(msgspec.Struct, frozen=True):
    """A process: the rank `number` of the launcher, or the one at place `number`, counted round, of those alive in a
    role."""

    role: Literal["rank", "any", "worker", "server", "spare"]
    number: int


class Fault(msgspec.Struct, frozen=True):
    """One fault. `at`: seconds since the first store was made, or a point. `seconds`: how long it lasts, where it does.
    `share`: what slow NICs keep of their rate."""

    kind: Literal["kill", "stop", "full", "host", "cut", "slow"]
    whom: Whom
    at: float | Point
    seconds: float = 0.0
    share: float = 1.0

    @property
    def lasts(self) -> bool:
        return self.kind not in AT_ONCE


class FaultPlan(msgspec.Struct, frozen=True):
    """The faults that are to be made in a job. `seed`: what they were drawn from."""

    seed: int = 0
    faults: tuple[Fault, ...] = ()


def draw(
    seed: int,
    count: int,
    every: float,
    kinds: Sequence[str] = ("kill",),
    roles: Sequence[str] = ("any",),
    seconds: float = 1.0,
) -> FaultPlan:
    """So many faults, one after the other, `every` seconds in the mean; each of these kinds and roles is as likely.
    Equal arguments give an equal plan; PlanError where they make no sense."""
    rng, at, faults = random.Random(seed), 0.0, []
    for _ in range(count):
        at += every * rng.uniform(NEAREST, FARTHEST)
        kind, role = rng.choice(list(kinds)), rng.choice(list(roles))
        lasts = 0.0 if kind in AT_ONCE else seconds
        whom = {"role": role, "number": rng.randrange(1 << 16)}
        share = round(rng.uniform(SLOWEST, FASTEST), 3) if kind == "slow" else 1.0
        faults.append({"kind": kind, "whom": whom, "at": round(at, 3), "seconds": lasts, "share": share})
    try:
        return _checked(msgspec.convert({"seed": seed, "faults": faults}, FaultPlan))
    except msgspec.ValidationError as error:
        raise PlanError(f"no plan can be drawn: {error}") from None


def save(plan: FaultPlan, path: str | Path) -> None:
    """Write a plan as JSON."""
    files.write(path, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def load(path: str | Path) -> FaultPlan:
    """Return the plan in a file that `save` wrote; PlanError where it holds none."""
    try:
        return _checked(msgspec.json.decode(Path(path).read_bytes(), type=FaultPlan))
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} holds no plan of faults: {error}; `mpips chaos --save` writes one") from None


def check_lab(plan: FaultPlan, lab: str) -> None:
    """PlanError where a plan has faults of hosts, and the job runs in no lab."""
    if not lab and (kinds := [fault.kind for fault in plan.faults if fault.kind in OF_HOSTS]):
        raise PlanError(
            f"{kinds[0]!r} is a fault of a lab's hosts, and no lab is named: make one (`mpips lab up`), run the job in "
            "it (`mpips lab run`), and name it here (--lab)"
        )


def _checked(plan: FaultPlan) -> FaultPlan:
    for place, fault in enumerate(plan.faults):
        point = fault.at if isinstance(fault.at, Point) else None
        delay = point.delay if point else fault.at
        assert isinstance(delay, float)
        if delay < 0 or fault.seconds < 0 or fault.whom.number < 0:
            raise PlanError(f"fault {place} has a time or a number below 0")
        if max(delay, fault.seconds) > LONGEST:
            raise PlanError(f"fault {place} has a time of {max(delay, fault.seconds):g} s: give at most {LONGEST:g}")
        if fault.lasts and not fault.seconds:
            raise PlanError(f"fault {place} ({fault.kind}) lasts 0 seconds: give more")
        if not LEAST_SHARE <= fault.share <= 1:
            raise PlanError(f"fault {place} ({fault.kind}) has a share of {fault.share}: give {LEAST_SHARE} to 1")
        if point and (point.call not in CALLS or point.nth < 1):
            known = ", ".join(CALLS)
            raise PlanError(f"fault {place} is at call {point.nth} of {point.call!r}; known: {known}, counted from 1")
    return plan
