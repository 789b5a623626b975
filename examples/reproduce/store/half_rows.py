"""Measures rows a second of embedding tables with 16-bit values, beside the same table with float32 values.

    mpips run -w 2 -s 1 -m examples.reproduce.store.half_rows [--dims 32] [--ids zipf1.05,uniform]

All tables take turns in one job, with the same ids, Adagrad and the same number of rows, and all rows exist. A row
counts each time that an id names it, on each worker. A sample takes as long as its slowest worker. The result is the
median of the samples, in million rows a second of all workers together.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

import mpips
from collectives.kernels import engine
from collectives.terminal import RankedCommand, show_table
from examples.reproduce.store.tables import (
    BATCH_HELP,
    LEAST_IDS,
    QUIET_SECONDS,
    OurTable,
    drawn,
    ids_option,
    list_option,
)

# (dtype, rounding) of each table that takes turns
TABLES = [
    ("float32", "nearest"),
    ("bfloat16", "nearest"),
    ("bfloat16", "stochastic"),
    ("float16", "nearest"),
]


def measure(
    comm: MPI.Comm, tables: dict[tuple[str, str], OurTable], dim: int, kind: str, batch: int, rows: int, rounds: int
) -> dict[tuple[str, str], dict[str, float]]:
    """Return the million rows a second of pulls, pushes and steps of each table. Collective.

    The first round warms up.
    """
    batches, calls = drawn(kind, rows, batch, comm.rank), max(1, LEAST_IDS // batch)
    gradients = np.random.default_rng(comm.rank).standard_normal((batch, dim), np.float32)
    pushed = {name: gradients.astype(name) for name, _ in tables}
    out = {name: np.zeros_like(array) for name, array in pushed.items()}
    found: dict[tuple[str, str], list[dict[str, float]]] = {which: [] for which in tables}
    for round_ in range(rounds + 1):
        for which, table in tables.items():
            comm.Barrier()
            time.sleep(QUIET_SECONDS)
            sample = table.sample(batches, calls, pushed[which[0]], out[which[0]], comm)
            if round_:
                found[which].append({word: comm.allreduce(took, MPI.MAX) for word, took in sample.items()})
            else:
                engine.load_all()
    number = calls * batch * comm.size
    return {
        which: {word: number / statistics.median(sample[word] for sample in samples) / 1e6 for word in samples[0]}
        for which, samples in found.items()
    }


@click.command(cls=RankedCommand)
@list_option("--dims", default="32,128")
@ids_option
@list_option("--batches", default="16384", help=BATCH_HELP)
@click.option("--rows", default=1 << 20, show_default=True, type=click.IntRange(1), help="Of each table; all exist.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
def main(dims: list[str], kinds: list[str], batches: list[str], rows: int, rounds: int) -> None:
    """Time tables of 16-bit rows beside one of float32 rows; a rank of `mpips run`."""
    with mpips.create("dist_sync") as kv:
        comm: Any = kv.layout.workers
        title = f"million rows a second (over float32): {kv.num_workers} workers, {kv.layout.num_servers} servers"
        shown = Table("dim", "ids", "batch", "rows", "rounding", "pull", "push", "step", title=title)
        for dim in map(int, dims):
            tables = {which: OurTable(kv, rows, dim, *which) for which in TABLES}
            for kind in kinds:
                for batch in map(int, batches):
                    found = measure(comm, tables, dim, kind, batch, rows, rounds)
                    plain = found[TABLES[0]]
                    for which, rates in found.items():
                        cells = (f"{rates[word]:.3g} ({rates[word] / plain[word]:.2f})" for word in rates)
                        shown.add_row(str(dim), kind, str(batch), *which, *cells)
        if kv.rank == 0:
            show_table(shown)


if __name__ == "__main__":
    main()
