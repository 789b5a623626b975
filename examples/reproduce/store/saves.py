"""Times steps of a store that saves itself: run it with and without `--checkpoint`, and compare.

mpips run -w 2 -s 1 -m examples.reproduce.store.saves
mpips run -w 2 -s 1 --checkpoint saved --every 100 -m examples.reproduce.store.saves
"""

from __future__ import annotations

import statistics
import time

import click
import numpy as np

import mpips


@click.command()
@click.option("--elements", default=1_000_000, show_default=True, help="float32 weights.")
@click.option("--steps", default=500, show_default=True, type=click.IntRange(2))
@click.option("--compute", default=0.01, show_default=True, help="Seconds that a step computes.")
def main(elements: int, steps: int, compute: float) -> None:
    """Time steps of Adam on one key."""
    kv = mpips.create("dist_sync")
    weights, gradient = mpips.empty(elements, np.float32), mpips.empty(elements, np.float32)
    weights[:], gradient[:] = 0, 1
    kv.init("w", weights)
    kv.set_optimizer("adam", learning_rate=1e-3)
    kv.pull("w", weights)
    took, begun = [], time.perf_counter()
    for _ in range(kv.resumed or 0, steps):
        before = time.perf_counter()
        # Emulate compute that keeps the core busy.
        while time.perf_counter() < before + compute:
            np.sqrt(gradient[:10_000])
        kv.pushpull("w", gradient, out=weights)
        took.append(time.perf_counter() - before)
    mean = (time.perf_counter() - begun) / len(took)
    if kv.rank == 0:
        print(f"{len(took)} steps, {1e3 * mean:.3f} ms each on average, {1e3 * statistics.median(took):.3f} ms median")
    kv.close()


if __name__ == "__main__":
    main()
