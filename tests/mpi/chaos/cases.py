"""Which jobs get which faults: kinds of store, and plans drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import NamedTuple

from mpips.chaos import Fault, FaultPlan, Point, Whom
from tests.mpi.chaos import model

WORKERS, SERVERS, SPARES = 4, 2, 1
TWO_AT_ONCE, IN_RECOVER, LATER, STOPPED = 0.2, 0.2, 0.3, 0.1  # of the plans, so many have it
STOP_SECONDS = 0.02, 0.4
LATE = 0.85  # part of a program's calls at which faults begin


class Case(NamedTuple):
    """A kind of store, its servers and the words of `mpips run` for its clients."""

    kind: str
    servers: int
    words: tuple[str, ...] = ()

    @property
    def asynchronous(self) -> bool:
        return self.kind.endswith("_async")


CASES = {
    "dist_sync": Case("dist_sync", SERVERS),
    "mpi_sync-one": Case("mpi_sync", SERVERS, ("-c", "2", "--masters", "one")),
    "mpi_sync-all": Case("mpi_sync", SERVERS, ("-c", "2", "--masters", "all")),
    "mpi_async": Case("mpi_async", SERVERS, ("-c", "2")),
    "dist_async": Case("dist_async", SERVERS),
    "pure": Case("dist_sync", 0),
}
KEYS, STEPS = len(model.SIZES), model.STEPS
CALLS = {
    "init": KEYS,
    "set_optimizer": KEYS,
    "push": KEYS * STEPS // 3,
    "pull": KEYS * STEPS // 3,
    "pushpull": (KEYS + 1) * STEPS // 3,
    "save": STEPS // model.SAVE_EVERY,
}
"""How often a worker of the synchronous program makes each call."""
COUNTING = {"init": 3, "set_optimizer": 1, "push": 25, "pull": 25, "pushpull": 25}
"""The same of the one that counts, where all are as fast."""


def draw(seed: int, case: Case, spares: int = SPARES, only: Collection[str] = CALLS) -> FaultPlan:
    """One to three faults for one job, as a program of this case can live through, in some calls or after them."""
    rng = random.Random(f"{seed} {case}")
    roles = ["worker"] * WORKERS + ["server"] * case.servers + ["spare"] * max(0, spares)
    victims = _victims(rng, roles)
    calls = {name: n for name, n in (COUNTING if case.asynchronous else CALLS).items() if name in only}
    faults = [_fault(rng, victims[0], _point(rng, calls, roles, []))]
    at = faults[0].at
    assert isinstance(at, Point)
    for place, victim in enumerate(victims[1:], 1):
        way = rng.random() * (TWO_AT_ONCE + IN_RECOVER + LATER)
        if way < TWO_AT_ONCE and place == 1:
            faults.append(_fault(rng, victim, at))
        elif way < TWO_AT_ONCE + IN_RECOVER:
            by = rng.choice([rank for rank in range(WORKERS) if rank not in victims[:place]])
            faults.append(_fault(rng, victim, Point(by, "recover", place, round(rng.expovariate(200), 4))))
        else:
            faults.append(_fault(rng, victim, _point(rng, calls, roles, victims[:place])))
    return FaultPlan(seed, tuple(faults))


def _victims(rng: random.Random, roles: list[str]) -> list[int]:
    """Different ranks, so that a worker is left, and a server where there were some."""
    while True:
        count = 1 if rng.random() > TWO_AT_ONCE + IN_RECOVER + LATER else rng.choice([2, 2, 3])
        found = rng.sample(range(len(roles)), count)
        servers = sum(roles[rank] == "server" for rank in found)
        if servers < max(1, roles.count("server")):
            return found


def _fault(rng: random.Random, victim: int, at: Point) -> Fault:
    if rng.random() < STOPPED:
        return Fault("stop", Whom("rank", victim), at, round(rng.uniform(*STOP_SECONDS), 3))
    return Fault("kill", Whom("rank", victim), at)


def _point(rng: random.Random, calls: dict[str, int], roles: list[str], dead: list[int]) -> Point:
    by = rng.choice([rank for rank, role in enumerate(roles) if role == "worker" and rank not in dead])
    call = rng.choice(sorted(calls))
    delay = rng.choice([0.0, rng.expovariate(500), rng.expovariate(500), rng.uniform(0, 0.03)])
    return Point(by, call, rng.randint(1, max(1, int(LATE * calls[call]))), round(delay, 4))
