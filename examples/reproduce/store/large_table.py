"""Measures a large embedding table: the time to fill it, the memory of a row, and the longest call.

    mpips run -w 1 -s 1 -m examples.reproduce.store.large_table [--rows 50000000] [--limit]

One worker pushes gradients of `--rows` new ids. With `--limit` the table may hold only this many rows, and the worker
pushes a tenth as many further ids, so that the same number of rows is dropped. In the end it trains on rows that exist.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import click
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import mpips
from collectives.terminal import show_table

# steps of training on rows that exist
STEPS = 200
# an odd number: multiplying by it spreads 0, 1, 2 ... over all int64 without repeats
FACTOR = 0x9E3779B97F4A7C15


def new_ids(start: int, stop: int, batch: int) -> Iterator[NDArray[np.int64]]:
    for first in range(start, stop, batch):
        yield (np.arange(first, min(stop, first + batch), dtype=np.uint64) * np.uint64(FACTOR)).view(np.int64)


def push_all(table: mpips.Table, batches: Iterator[NDArray[np.int64]], gradients: NDArray[np.float32]) -> list[float]:
    """Push all batches. Return the seconds of each push, until the server has made the update."""
    took = []
    for ids in batches:
        begun = time.perf_counter()
        table.push(ids, gradients[: len(ids)])
        # The server answers this after the update.
        table.pull(ids[:1])
        took.append(time.perf_counter() - begun)
    return took


@click.command()
@click.option("--rows", default=50_000_000, show_default=True, type=click.IntRange(1000))
@click.option("--dim", default=16, show_default=True, type=click.IntRange(1))
@click.option("--batch", default=1 << 15, show_default=True, type=click.IntRange(1), help="Ids of one push.")
@click.option("--limit/--no-limit", help="Bound the table to --rows, so that rows are dropped.")
def main(rows: int, dim: int, batch: int, limit: bool) -> None:
    """Fill a table by row-wise Adagrad; a rank of `mpips run` with one worker."""
    with mpips.create("dist_sync") as kv:
        table = kv.table("rows", dim, optimizer="row_adagrad", limit=rows if limit else None)
        gradients = np.random.default_rng(0).standard_normal((batch, dim), np.float32)
        push_all(table, new_ids(0, 1, 1), gradients)
        columns = "", "rows", "seconds", "million rows/s", "median ms", "longest ms"
        shown = Table(*columns, title=f"dim {dim}, {batch} ids")
        random = np.random.default_rng(1)
        parts = {"new rows": new_ids(1, rows, batch)}
        if limit:
            parts["new for old"] = new_ids(rows, rows + rows // 10, batch)
        last = rows + rows // 10 if limit else rows
        parts["old rows"] = (
            (random.integers(last - rows, last, batch).astype(np.uint64) * np.uint64(FACTOR)).view(np.int64)
            for _ in range(STEPS)
        )
        for name, batches in parts.items():
            took = push_all(table, batches, gradients)
            count, whole = len(took) * batch, sum(took)
            shown.add_row(
                name,
                f"{count:,}",
                f"{whole:.1f}",
                f"{count / whole / 1e6:.2f}",
                f"{1e3 * statistics.median(took):.1f}",
                f"{1e3 * max(took):.1f}",
            )
        stats = table.stats()
        show_table(shown)
        row_bytes = stats["bytes"] / stats["rows"]
        click.echo(
            f"{stats['rows']:,} rows of {row_bytes:.1f} bytes with state, id, age and index; "
            f"{stats['evicted']:,} were dropped"
        )


if __name__ == "__main__":
    main()
