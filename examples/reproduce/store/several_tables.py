"""Measures a pull of several tables at once beside a pull of each, and pushes of several tables in the same two ways.

    mpips run -w 2 -s 2 -m examples.reproduce.store.several_tables [--tables 26] [--dim 16] [--ids 256]

By default there are as many tables as Criteo's click logs have features. All ways take turns in one job, in three
stores: workers read rows in the memory of the servers; workers ask the servers by rings of shared memory, as
`staleness` requires; or workers ask by MPI messages, as between nodes. A sample takes as long as its slowest worker.
The result is the median of the samples, in microseconds for all tables.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

import mpips
from collectives.kernels import engine
from collectives.terminal import RankedCommand, show_table
from mpips.tables.table import push_together

STORES: dict[str, tuple[str, dict[str, Any]]] = {
    "in place": ("dist_sync", {}),
    "rings": ("dist_async", {"staleness": 1000}),
    "messages": ("dist_sync", {"shared_memory": False}),
}
# number of different batches, used in turn
BATCHES = 8


def microseconds(comm: MPI.Comm, do: Callable[[], object]) -> float:
    comm.Barrier()
    begun = time.perf_counter()
    do()
    return 1e6 * comm.allreduce(time.perf_counter() - begun, MPI.MAX)


def measure(kv: mpips.KVStore, tables: int, dim: int, ids: int, rounds: int) -> dict[str, float]:
    """Return the median times of each way. Collective."""
    comm, random = kv.layout.workers, np.random.default_rng(kv.rank)
    assert comm is not None
    made = [kv.table(f"{kv.type} {number}", dim, learning_rate=0.01) for number in range(tables)]
    batches = [[random.integers(0, 100_000, ids) for _ in made] for _ in range(BATCHES)]
    gradients, found = random.standard_normal((ids, dim), np.float32), dict[str, list[float]]()
    for round_ in range(-BATCHES, rounds):
        batch = batches[round_ % BATCHES]
        pushes = [(table, some, gradients) for table, some in zip(made, batch)]
        ways: dict[str, Callable[[], object]] = {
            "push each": lambda: [table.push(*rest) for table, *rest in pushes],  # type: ignore[func-returns-value]  # noqa: B023
            "push at once": lambda: push_together(pushes),  # noqa: B023
            "pull each": lambda: [table.pull(some) for table, some in zip(made, batch)],  # noqa: B023
            "pull at once": lambda: mpips.pull_rows(dict(zip(made, batch))),  # noqa: B023
        }
        for way, do in ways.items():
            took = microseconds(comm, do)
            # This is answered when the pushes are applied.
            made[-1].pull(batch[-1][:1])
            if round_ >= 0:
                found.setdefault(way, []).append(took)
        if round_ == -1:
            engine.load_all()
    return {way: statistics.median(samples) for way, samples in found.items()}


@click.command(cls=RankedCommand)
@click.option("--tables", default=26, show_default=True, type=click.IntRange(1))
@click.option("--dim", default=16, show_default=True, type=click.IntRange(1))
@click.option("--ids", default=256, show_default=True, type=click.IntRange(1), help="Of each table, in a call.")
@click.option("--rounds", default=200, show_default=True, type=click.IntRange(1))
def main(tables: int, dim: int, ids: int, rounds: int) -> None:
    """Time several tables at once and one by one; a rank of `mpips run`."""
    shown: Table | None = None
    with mpips.create("dist_sync") as first:
        servers = first.layout.num_servers
        for name, (kind, options) in STORES.items():
            with mpips.create(kind, servers=servers, **options) as kv:
                found = measure(kv, tables, dim, ids, rounds)
            if shown is None:
                title = f"{tables} tables, dim {dim}, {ids} ids: {first.num_workers} workers, {servers} servers, us"
                shown = Table("rows are read", *found, title=title)
            shown.add_row(name, *(f"{took:,.0f}" for took in found.values()))
        if first.rank == 0 and shown is not None:
            show_table(shown)


if __name__ == "__main__":
    main()
