"""Faults made on purpose. A *cell* is a fault, a way to call, and a route that the call takes.

`run` makes one cell with ranks that live through it, and tells what every rank has seen. As a program this module makes
all cells of some faults one after the other, or one of which a rank dies, and with it the job:

    mpirun -n P python -m tests.mpi.collectives.faults live FAULT...
    mpirun -n P python -m tests.mpi.collectives.faults FAULT WAY ROUTE

`tests.mpi.collectives.fault_table` starts both and prints a table.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import collectives
from tests.mpi.collectives.cells import SOON, Heard, cells
from tests.mpi.collectives.support import (
    ODD,
    PATIENCE,
    RANK,
    TOTAL,
    WORLD,
    P,
    fresh,
    hear,
    interrupted,
    patient,
    polled,
    started,
)

TIMEOUT = 0.15  # seconds that ranks wait for one that does not come
LATE = 0.2  # seconds after which a rank dies, so that the others wait for it
INTERRUPTED = 0.05
INTERRUPTED_TAG = 7
SMALL, LARGE = 100, 600_000


class Route(NamedTuple):
    """Which way the data go: by how many elements, where they lie, and by the algorithm."""

    n: int
    make: Callable[..., Any]
    algorithm: str = "auto"


ROUTES = {
    "small": Route(SMALL, np.empty),
    "large": Route(LARGE, np.empty),
    "empty": Route(LARGE, collectives.empty),
    "ring": Route(10_000, np.empty, "ring"),
    "native": Route(10_000, np.empty, "native"),
    "grouped": Route(LARGE, np.empty),
}


class Cell:
    """The calls of one cell on `comm`. Each is made ready by all ranks, and any rank may then make it or another."""

    def __init__(self, comm: MPI.Intracomm, way: str, route: str) -> None:
        self.comm, self.way, self.route = comm, way, route
        self.arrays: list[Any] = []

    def call(self, **changes: Any) -> Callable[[], Any]:
        """The call of this cell, or another one; collective where it is a plan's. It keeps its arrays."""
        n, make, algorithm = ROUTES[self.route]
        words = {"kind": "allreduce", "n": n, "dtype": np.float64, "op": "sum", "algorithm": algorithm, **changes}
        x = make(words["n"], words["dtype"])
        x[:] = RANK + 1
        self.arrays.append(x)
        taken = ("algorithm",) if words["kind"] == "broadcast" else ("op", "algorithm")
        keywords = {key: words[key] for key in taken}
        if self.route == "grouped" and words["kind"] == "allreduce":
            group = [np.ones(7, np.float32), x, np.ones(2, np.int64)]
            return lambda: collectives.grouped_allreduce(group, self.comm, **keywords)
        if self.way == "blocking":
            function = getattr(collectives, words["kind"])
            return lambda: function(x, self.comm, **keywords)
        plan = collectives.plan(words["kind"], x, self.comm, **keywords)
        return {"plan": plan, "tested": lambda: polled(plan), "waited": lambda: started(plan)}[self.way]

    def other(self, fault: str) -> Callable[[], Any]:
        """The call that the odd rank makes instead."""
        n = ROUTES[self.route].n
        changes = {
            "size": {"n": n + 1},
            "dtype": {"dtype": np.float32},
            "op": {"op": "max"},
            "kind": {"kind": "broadcast"},
        }
        return self.call(**changes[fault])

    def sums(self) -> bool:
        """Whether the call sums exactly, on this rank, three times in a row."""
        call = self.call()
        x = self.arrays[-1]
        right = True
        for _ in range(3):
            x[:] = RANK + 1
            call()
            right &= bool((x == TOTAL).all())
        return right


class Seen(NamedTuple):
    """What came of a cell, on every rank."""

    heard: list[Heard]
    again: list[Heard]
    """What the next call raised."""
    fault_at: float
    """When the fault was there, by the clock of the machine."""
    right: bool
    """Whether sums were exact afterwards."""

    @property
    def seconds(self) -> float:
        """How long the slowest rank took to hear of it."""
        return max(one.ended - max(self.fault_at, one.begun) for one in self.heard)

    def wrong(self, fault: str) -> str:
        """What is not as it should be; "" where all is."""
        if fault == "argument":
            return "" if self.right and not any(one.error for one in self.heard) else f"not local: {self}"
        errors = {"absent": "StallError", "interrupt": "CollectiveError"}
        wanted = [errors.get(fault, "MismatchError")] * P
        if fault == "absent" and not self.heard[ODD].error:
            wanted[ODD] = ""  # between nodes all that it needs may have come before the others gave up
        said = {one[:2] for one in self.again}
        sentences = {one.sentence for one in self.heard if one.error not in ("", "KeyboardInterrupt")}
        if fault == "interrupt":
            wanted[ODD] = "KeyboardInterrupt"
            wanted[0] = wanted[0] if self.heard[0].error else ""  # likewise
        if [one.error for one in self.heard] != wanted:
            return f"raised {[one[:2] for one in self.heard]}"
        if len(sentences) > 1 or len(said) > 1 or (sentences and {one.sentence for one in self.again} != sentences):
            return f"unlike sentences {sentences} and then {said}"
        if self.seconds > SOON:
            return f"heard after {self.seconds:.1f} s"
        return "" if self.right else "wrong sums after renew"


def run(comm: MPI.Intracomm, fault: str, way: str, route: str, warm: bool) -> Seen:
    """Make one cell on `comm`, which is renewed after it. `warm`: calls have gone well before. Collective."""
    cell = Cell(comm, way, route)
    good = cell.call()
    if warm:
        good()
        good()
    mine, fault_at = _made(cell, fault, good)
    WORLD.Barrier()
    if fault == "interrupt" and RANK == 0:
        WORLD.recv(source=ODD, tag=INTERRUPTED_TAG)
    if fault == "absent" and RANK == ODD:
        heard = _absent(mine)
    else:
        heard = hear(mine)
        if fault == "absent":
            WORLD.send(None, ODD)
    return _after(cell, fault, heard, good, fault_at())


def _absent(mine: Callable[[], Any]) -> Heard:
    """The odd rank comes after all others have given up."""
    for other in range(P - 1):
        WORLD.recv(source=other)
    return hear(mine)


def _after(cell: Cell, fault: str, heard: Heard, good: Callable[[], Any], fault_at: float) -> Seen:
    everybody = WORLD.allgather((heard, fault_at))
    again = WORLD.allgather(hear(good))
    if fault != "argument":
        collectives.renew(cell.comm)
    patient(cell.comm, PATIENCE, PATIENCE)
    right = WORLD.allreduce(cell.sums(), MPI.LAND)
    fault_at = max(at for _, at in everybody)
    if fault not in ("interrupt", "argument"):  # it is there when the last has come that is needed for it
        begun = [one.begun for rank, (one, _) in enumerate(everybody) if fault != "absent" or rank != ODD]
        fault_at = max(begun) + (TIMEOUT if fault == "absent" else 0.0)
    return Seen([one for one, _ in everybody], again, fault_at, right)


def _made(cell: Cell, fault: str, good: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], float]]:
    """What this rank calls, and when, afterwards, it has made the fault."""
    if fault == "argument":
        return (lambda: (_refused(cell), good())) if RANK == ODD else good, lambda: 0.0
    if fault == "order":
        second = cell.call(n=ROUTES[cell.route].n + 7)
        return (lambda: (second(), good())) if RANK == ODD else (lambda: (good(), second())), lambda: 0.0
    if fault == "absent":
        patient(cell.comm, PATIENCE, TIMEOUT)
        return good, lambda: 0.0
    if fault == "interrupt":
        return _interrupted(good)
    other = cell.other(fault)
    return other if RANK == ODD else good, lambda: 0.0


def _refused(cell: Cell) -> None:
    """A call that this rank alone makes, with a wrong argument."""
    x = cell.arrays[0]
    try:
        if cell.way != "blocking":
            collectives.plan("allreduce", x, cell.comm, op="summ")
        elif cell.route == "grouped":
            collectives.grouped_allreduce([x, "x"], cell.comm)
        else:
            collectives.allreduce(x, cell.comm, algorithm="quicksort")
    except collectives.CollectiveError:
        raise
    except (ValueError, TypeError):
        return
    raise collectives.CollectiveError("a wrong argument was taken")


def _interrupted(good: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], float]]:
    """The odd rank is interrupted while it waits for rank 0, which comes once it was."""
    marks: list[list[float]] = []

    def alarmed() -> None:
        try:
            with interrupted(INTERRUPTED) as found:
                marks.append(found)
                good()
        finally:
            WORLD.send(None, 0, INTERRUPTED_TAG)

    return alarmed if RANK == ODD else good, lambda: marks[0][0] if marks else 0.0


def live(faults: Sequence[str]) -> None:
    """One rank of a job that makes all cells of these faults. Rank 0 says what came of each."""
    for fault, way, route in cells(faults):
        seconds, wrong = 0.0, ""
        for warm in (False, True):
            with fresh() as comm:
                seen = run(comm, fault, way, route, warm)
            seconds, wrong = max(seconds, seen.seconds), wrong or seen.wrong(fault)
        if RANK == 0:
            _say({"cell": (fault, way, route), "seconds": seconds, "wrong": wrong})


def die(fault: str, way: str, route: str) -> None:
    """One rank of a job in which the odd rank dies while the others wait for it. Each says what it has seen."""
    if fault == "kill":
        for number in (signal.SIGTERM, signal.SIGUSR1):  # of the launchers, which end the others at once
            signal.signal(number, signal.SIG_IGN)
    with fresh() as comm:
        good = Cell(comm, way, route).call()
        good()
        WORLD.Barrier()
        if RANK == ODD:
            time.sleep(LATE)
            _say({"rank": RANK, "at": time.monotonic()})
            _dies(fault)
        heard, again = hear(good), hear(good)
        _say({"rank": RANK, "heard": heard, "again": again})
        if fault == "kill":  # MPI may wait for ever for the dead, and a launcher end the others when one leaves
            time.sleep(LATE)
            os._exit(0)


def _dies(fault: str) -> None:
    if fault == "exit":
        sys.exit(3)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("a bug of the user's")


def _say(words: dict[str, Any]) -> None:
    os.write(1, f"\n{json.dumps(words)}\n".encode())


if __name__ == "__main__":
    live(sys.argv[2:]) if sys.argv[1] == "live" else die(*sys.argv[1:])
