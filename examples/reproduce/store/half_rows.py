"""Measures rows a second of tables in float16 and bfloat16 beside a table in float32.

    mpips run -w 2 -s 1 -m examples.reproduce.store.half_rows [--dims 32,128] [--optimizer adagrad] [--rounds 5]

The tables take turns in one job, with the same ids on the same workers. A row counts each time that an id names it, on
each worker. A sample takes as long as its slowest worker, and the result is the median over the rounds. Columns are
those of `examples.reproduce.store.tables`: pulls, pushes, and pulls with pushes. "bytes" is the memory of a row.
"""

from __future__ import annotations

import statistics
import time

import click
import numpy as np
from rich.table import Table

import mpips
from collectives.kernels import engine
from collectives.terminal import RankedCommand, show_progress, show_table, split_words
from examples.reproduce.store.tables import (
    LEAST_IDS,
    QUIET_SECONDS,
    SETTLE_SECONDS,
    OurTable,
    Sample,
    drawn,
)

# (dtype, rounding); the first is what the others are compared with
KINDS = [
    ("float32", "nearest"),
    ("bfloat16", "nearest"),
    ("bfloat16", "stochastic"),
    ("float16", "nearest"),
    ("float16", "stochastic"),
]


@click.command(cls=RankedCommand)
@click.option("--dims", default="32,128", show_default=True, callback=lambda _, __, text: split_words(text))
@click.option("--ids", "kind", default="zipf1.05", show_default=True, help="uniform, or zipf and its exponent.")
@click.option("--batches", default="1024,16384", show_default=True, callback=lambda _, __, text: split_words(text))
@click.option(
    "--rows", default=1 << 20, show_default=True, type=click.IntRange(1), help="Of each table; all are there."
)
@click.option("--optimizer", default="adagrad", show_default=True)
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1))
def main(dims: list[str], kind: str, batches: list[str], rows: int, optimizer: str, rounds: int) -> None:
    """Time tables of several dtypes; a rank of `mpips run`."""
    columns = "dim", "batch", "dtype", "rounding", "bytes", "pull", "push", "step", "x pull", "x push", "x step"
    shown = Table(*columns, title=f"million rows a second, {optimizer}, {kind}")
    with (
        mpips.create("dist_sync") as kv,
        show_progress("tables", len(dims) * len(batches), kv.rank == 0) as begin,
    ):
        comm = kv.layout.workers
        for dim in map(int, dims):
            tables = [OurTable(kv, rows, dim, dtype, optimizer, rounding) for dtype, rounding in KINDS]
            for batch in map(int, batches):
                begin(f"dim {dim}, batch {batch}")
                ids, calls = drawn(kind, rows, batch, comm.rank), max(1, LEAST_IDS // batch)
                gradients = np.random.default_rng(comm.rank).standard_normal((batch, dim), np.float32)
                samples: list[list[Sample]] = [[] for _ in tables]
                for round_ in range(rounds + 1):
                    for found, table in zip(samples, tables):
                        mine, out = gradients.astype(table.dtype), np.zeros((batch, dim), table.dtype)
                        comm.Barrier()
                        time.sleep(QUIET_SECONDS)
                        sample = table.sample(ids, calls, mine, out, comm)
                        if round_:
                            found.append({word: comm.allreduce(took, max) for word, took in sample.items()})
                        else:
                            engine.settle(SETTLE_SECONDS)
                count = calls * batch * comm.size / 1e6
                rates = [
                    [count / statistics.median(sample[word] for sample in found) for word in ("pull", "push", "step")]
                    for found in samples
                ]
                for (dtype, rounding), table, rate in zip(KINDS, tables, rates):
                    beside = [f"{mine / first:.2f}" for mine, first in zip(rate, rates[0])]
                    numbers = [f"{table.row_bytes:.0f}", *(f"{one:.3g}" for one in rate), *beside]
                    shown.add_row(str(dim), str(batch), dtype, rounding, *numbers)
        if comm.rank == 0:
            show_table(shown)


if __name__ == "__main__":
    main()
