"""The names of the cells of the table of faults, and how a cell is judged. This module needs no MPI."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

LIVING = ("argument", "size", "dtype", "op", "kind", "order", "absent", "interrupt")
DEADLY = ("exit", "exception", "kill")
WAYS = ("blocking", "plan", "tested", "waited")
ROUTES = ("small", "large", "empty", "ring", "native", "grouped")
SOON = 5.0  # seconds in which every rank has heard; a second, on a machine that is not busy


class Heard(NamedTuple):
    """What a call raised on a rank ("" for nothing), and when it had begun and ended."""

    error: str
    sentence: str
    begun: float
    ended: float


def cells(faults: Iterable[str], routes: Iterable[str] = ROUTES) -> list[tuple[str, str, str]]:
    """Every fault by every way to call and route; there are no plans of a group."""
    every = product(faults, WAYS, routes)
    return [(fault, way, route) for fault, way, route in every if route != "grouped" or way == "blocking"]


def wrong_death(said: str, ranks: int) -> tuple[str, float]:
    """From all that the ranks of such a job have said: what is not as it should be, and how long the slowest took."""
    lines = [json.loads(line) for line in said.splitlines() if line.startswith('{"rank"')]
    died = [line["at"] for line in lines if "at" in line]
    heard = [Heard(*line["heard"]) for line in lines if "heard" in line]
    again = [Heard(*line["again"]) for line in lines if "again" in line]
    if len(died) != 1 or len(heard) != ranks - 1:
        return f"{len(heard)} of {ranks - 1} ranks said what they heard", 0.0
    seconds = max(one.ended - died[0] for one in heard)
    told = {one[:2] for one in (*heard, *again)}
    if len(told) != 1 or "CollectiveError" not in {error for error, _ in told}:
        return f"unlike sentences {told}", seconds
    return "" if seconds < SOON else f"heard after {seconds:.1f} s", seconds
