"""A plan of faults: which fault hits which process, and when. Plans are drawn from a seed, and can be saved and loaded.

Apart from `save` and `load`, all functions are pure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from mpips.collectives import files

# kill: the process gets SIGKILL
# stop: the process is stopped by SIGSTOP for some seconds
# full: for some seconds the process cannot make any file longer, as if the disk were full
# host: all ranks on the process's host get SIGKILL
# cut: the NICs of the process's host are down for some seconds
# slow: the NICs of the process's host have only a share of their rate for some seconds
KINDS = ("kill", "stop", "full", "host", "cut", "slow")
# Kinds that hit a whole host. They need a lab (`mpips lab`), a cluster that is emulated on this machine.
OF_HOSTS = ("host", "cut", "slow")
# kinds of faults that happen at one moment; all other kinds last some seconds
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
# The time between two drawn faults is at least and at most this many times the mean.
NEAREST, FARTHEST = 0.5, 1.5
# the smallest share of its rate that a plan may leave to a NIC
LEAST_SHARE = 0.001
# the longest time in a plan, in seconds
LONGEST = 1e8
# the smallest and the largest share of its rate that is drawn for a NIC
SLOWEST, FASTEST = 0.02, 0.5


class PlanError(ValueError):
    """A plan is not valid, or a file contains no plan."""


class Point(msgspec.Struct, frozen=True):
    """A moment in a rank's program: `delay` seconds after the rank begins its call number `nth` of the function `call`.

    `nth` counts from 1.
    """

    rank: int
    call: str
    nth: int = 1
    delay: float = 0.0


class Whom(msgspec.Struct, frozen=True):
    """The process that a fault hits.

    With role "rank" the process is the rank `number` of the launcher. With another role the process is one of the
    living processes in that role: in the order of their ranks, the one at index `number` modulo their count.
    """

    role: Literal["rank", "any", "worker", "server", "spare"]
    number: int


class Fault(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        kind: One of `KINDS`.
        whom: The process to hit.
        at: When to make the fault: seconds since the first store was made, or a point in a rank's program.
        seconds: How long the fault lasts. 0 for the kinds that happen at one moment.
        share: The share of their rate that the NICs keep, for the kind "slow".
    """

    kind: Literal["kill", "stop", "full", "host", "cut", "slow"]
    whom: Whom
    at: float | Point
    seconds: float = 0.0
    share: float = 1.0

    @property
    def lasts(self) -> bool:
        return self.kind not in AT_ONCE


class FaultPlan(msgspec.Struct, frozen=True):
    """The faults to make in a job. `seed` is the seed from which they were drawn."""

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
    """Draw a random plan of faults, one after another. Local. Equal arguments give an equal plan.

    Args:
        seed: Determines the plan.
        count: The number of faults.
        every: The mean time between two faults, in seconds.
        kinds: The kinds of faults to draw from, all equally likely.
        roles: The roles of the processes to hit, all equally likely.
        seconds: How long each stop, full disk, cut or slow link lasts.

    Raises:
        PlanError: No valid plan can be made from the arguments.

    >>> plan = mpips.chaos.draw(seed=7, count=2, every=5.0, kinds=("kill", "stop"))
    >>> [fault.kind for fault in plan.faults]
    ['kill', 'kill']
    """
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
    """Write a plan as JSON, for `load`. Raises OSError if the file cannot be written.

    >>> mpips.chaos.save(mpips.chaos.draw(seed=7, count=1, every=5.0), folder / "plan.json")
    """
    files.write(path, msgspec.json.format(msgspec.json.encode(plan)) + b"\n")


def load(path: str | Path) -> FaultPlan:
    """Return the plan from a file that `save` wrote. Raises PlanError if the file cannot be read or has no valid plan.

    >>> mpips.chaos.save(mpips.chaos.draw(seed=7, count=1, every=5.0), folder / "plan.json")
    >>> mpips.chaos.load(folder / "plan.json").seed
    7
    """
    try:
        return _checked(msgspec.json.decode(Path(path).read_bytes(), type=FaultPlan))
    except OSError as error:
        raise PlanError(f"the plan {path} cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} holds no plan of faults: {error}; `mpips chaos --save` writes one") from None


def check_lab(plan: FaultPlan, lab: str) -> None:
    """Raise PlanError if a plan has faults that hit hosts, and `lab` is "".

    >>> mpips.chaos.check_lab(mpips.chaos.draw(seed=7, count=1, every=5.0), lab="")  # no fault of a host
    """
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
