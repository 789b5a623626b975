"""Measure the share of a collective that hides behind compute, as the OSU benchmarks do for non-blocking calls.

Overlap (%) = 100 x (1 - (overall - compute) / pure communication), where `overall` is the time of start, compute and
wait together, and the compute lasts as long as the communication alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from rich.table import Table

from collectives.benchmark.harness import measure
from collectives.plan import plan as compiled
from collectives.terminal import show_bytes, show_table

SLICES = 32  # how often the computing thread looks after the communication


@dataclass(frozen=True)
class OverlapRow:
    """Median microseconds of start + compute + wait, of the compute alone, of the communication alone; and the share
    of the communication that was hidden."""

    collective: str
    algorithm: str
    array: str
    dtype: str
    ranks: int
    bytes: int
    overall_us: float
    compute_us: float
    pure_us: float
    overlap_percent: float


def measure_overlap(comm: MPI.Comm, algorithm: str, x: np.ndarray[Any, Any], array: str, budget_s: float) -> OverlapRow:
    """Return overlap of an allreduce of `x` in place. Collective and blocking; the row is the same on every rank."""
    plan = compiled("allreduce", x, comm, algorithm=algorithm)
    try:
        pure = measure(comm, [plan], budget_s / 3)[0].median
        block = np.ones(16_384, np.float32)

        def compute(look: bool) -> None:
            for _ in range(SLICES):
                until = time.perf_counter() + pure / SLICES
                while time.perf_counter() < until:
                    np.multiply(block, 1.0001, out=block)
                if look:
                    plan.test()
            block.fill(1)

        def together() -> None:
            plan.start()
            compute(look=True)
            plan.wait()

        alone, overall = measure(comm, [lambda: compute(look=False), together], 2 * budget_s / 3)
    finally:
        plan.free()
    hidden = 1 - (overall.median - alone.median) / pure
    return OverlapRow(
        "allreduce", algorithm, array, x.dtype.name, comm.size, x.nbytes,
        1e6 * overall.median, 1e6 * alone.median, 1e6 * pure, 100 * min(1.0, max(0.0, hidden)),
    )  # fmt: skip


def print_overlap(rows: Sequence[OverlapRow], title: str) -> None:
    """Print the rows as a table for people."""
    caption = "overall: compute and the call together. pure comm.: the call alone. overlap: its share that compute hid."
    table = Table(title=title, caption=caption)
    for name in ("size", "algorithm", "array", "overall us", "compute us", "pure comm. us", "overlap %"):
        table.add_column(name, justify="left" if name in ("algorithm", "array") else "right")
    for row in rows:
        numbers = [f"{value:.1f}" for value in (row.overall_us, row.compute_us, row.pure_us, row.overlap_percent)]
        table.add_row(show_bytes(row.bytes), row.algorithm, row.array, *numbers)
    show_table(table)
