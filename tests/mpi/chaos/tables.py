"""Training with one table: what each step calls, and the rows and counts that it leaves.

Each table has other features, and in each some steps set or remove rows, save, load or export.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

import mpips
from mpips.tables import eviction
from tests.mpi.chaos import model
from tests.mpi.mpips.survivor import Job
from tests.mpi.mpips.table_survivor import (
    COUNTED,
    DIM,
    EVERY,
    LIMITED,
    TABLES,
    Expected,
    clock_of,
    make_call,
    make_round,
)

# name of a case -> name of its table
CASES = {
    "table-half": "items",  # bfloat16, stochastic rounding, row_adagrad, clipnorm, admit=seen
    "table-count": "tops",  # evict_by="count", limit, evict_after, adam, admit=seen
    "table-score": "stars",  # evict_by="score", limit, bfloat16, row_adagrad
    "table-clock": "words",  # evict_after, float16, ftrl, admit=chance, a function of first values
    "table-adam": "users",  # row_adam, weight_decay, evict
}
STEPS = 60


def job_of(servers: int) -> Job:
    return Job("dist_sync", servers, steps=STEPS)


def train(kv: mpips.KVStore, name: str, file: str) -> None:
    """Train, and note all rows and counts before each step and at the end."""
    step, table, w = kv.resumed, None, np.zeros(3)
    job = job_of(kv.layout.num_servers)
    while True:
        try:
            table = table or kv.table(name, DIM, learning_rate=0.1, **(TABLES | LIMITED)[name])
            kv.init("w", np.zeros(3))
            kv.set_optimizer("sgd", learning_rate=1.0)
            while True:
                stats = table.stats()
                mpips.chaos.note(step, bits(table.pull(EVERY), [stats[word] for word in COUNTED]))
                if step == STEPS:
                    kv.close()
                    return
                if step % model.SAVE_EVERY == model.SAVE_EVERY - 1:
                    kv.save(file)
                eviction.now = partial(clock_of, kv.rank, step)  # type: ignore[assignment]
                kv.pull("w", w)  # a moment at which faults begin, before those of the table
                make_call(Path(file).parent, job, step, table)
                make_round(table, step, kv.rank)
                if step % 2:
                    kv.push("w", np.full(3, -1.0))
                else:
                    kv.pushpull("w", np.full(3, -1.0), w)
                step += 1
        except mpips.StoreError:
            step = kv.recover().step


def bits(rows: np.ndarray, counts: list[int]) -> bytes:
    return rows.tobytes() + np.array(counts, np.int64).tobytes()


def curve(name: str, servers: int, workers: Mapping[int, int], steps: int) -> list[bytes]:
    """What a job with so many workers in each step notes before each step and at the end."""
    expected, found = Expected(job_of(servers), [name]), []
    for step in range(steps + 1):
        table = expected.tables[name]
        counts = [len(table.evicted), *table.reasons, table.removed, table.refused]
        found.append(bits(table.pull(EVERY), counts))
        if step < steps:
            expected.go_on(workers[step])
    return found
