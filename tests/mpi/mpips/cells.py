"""The cells of the store's table of faults, and how one of which a rank dies is judged. Needs no MPI."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from typing import Any

from tests.mpi.collectives.cells import SOON, Heard

LIVING = ("argument", "shape", "order", "interrupt", "stop")
DEADLY = ("exception", "exit")
WAYS = ("push", "pushpull", "handle", "list")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dist_sync": ("dist_sync", {"servers": 1}),
    "dist_async": ("dist_async", {"servers": 1}),
    "mpi_sync-1": ("mpi_sync", {"servers": 1, "clients": 1}),
    "mpi_sync-2": ("mpi_sync", {"servers": 1, "clients": 2}),
    "mpi_sync-0": ("mpi_sync", {"servers": 0}),
    "mpi_async": ("mpi_async", {"servers": 1, "clients": 2}),
}


def cells(faults: Iterable[str], kinds: Iterable[str] = tuple(KINDS)) -> list[tuple[str, str, str]]:
    """Every fault by every way to call and kind of store."""
    return list(product(faults, WAYS, kinds))


def wrong_death(said: str, fault: str, kind: str, workers: int, now: float) -> tuple[str, float]:
    """From all that the workers of such a job have said, and when it had ended: what is not as it should be, and how
    long the slowest took to hear of it.

    An uncaught exception ends the job at once. A worker that leaves an asynchronous store of independent workers is
    missed by nobody.
    """
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')]
    died = [line["at"] for line in lines if "at" in line]
    heard = [Heard(*line["heard"]) for line in lines if "heard" in line]
    if len(died) != 1:
        return f"nobody died: {said[-300:]}", 0.0
    if fault == "exception":
        named = "a bug of the user's" in said and f"RuntimeError on rank {workers - 1}" in said
        return "" if named else f"it does not say who has failed: {said[-300:]}", now - died[0]
    if len(heard) != workers - 1:
        return f"{len(heard)} of {workers - 1} workers said what they heard: {said[-300:]}", 0.0
    seconds = max(one.ended - died[0] for one in heard)
    told = {one[:2] for one in heard}
    if kind == "dist_async" and told == {("", "")}:
        return "", 0.0
    if len(told) != 1 or not next(iter(told))[0].startswith("Store"):
        return f"unlike sentences {told}", seconds
    return "" if seconds < SOON else f"heard after {seconds:.1f} s", seconds
