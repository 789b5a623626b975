"""Training with tables: what each step calls, and the rows and counts that it leaves.

Each table has other features, and in each some steps set or remove rows, save, load or export.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

# name of a case -> names of its tables
CASES = {
    "table-half": "items",  # bfloat16, stochastic rounding, row_adagrad, clipnorm, admit=seen
    "table-count": "tops",  # evict_by="count", limit, evict_after, adam, admit=seen
    "table-score": "stars",  # evict_by="score", limit, bfloat16, row_adagrad
    "table-clock": "words",  # evict_after, float16, ftrl, admit=chance, a function of first values
    "table-adam": "users",  # row_adam, weight_decay, evict
    "tables": "items,tops,stars,words,users",
}
STEPS = 60


def job_of(servers: int) -> Job:
    return Job("dist_sync", servers, steps=STEPS)


def train(kv: mpips.KVStore, names: str, file: str) -> None:
    """Train, and note all rows and counts before the rounds of each step and at the end."""
    step, w = kv.resumed, np.zeros(3)
    made: dict[str, mpips.Table] = {}
    job = job_of(kv.layout.num_servers)
    while True:
        try:
            for name in names.split(","):
                if name not in made:  # they go on after a recovery
                    made[name] = kv.table(name, DIM, learning_rate=0.1, **(TABLES | LIMITED)[name])
            kv.init("w", np.zeros(3))
            kv.set_optimizer("sgd", learning_rate=1.0)
            while True:
                if step < STEPS:
                    # A recovery does not undo a load, so rows are compared after it.
                    for table in made.values():
                        make_call(Path(file).parent, job, step, table)
                counts = [map(table.stats().__getitem__, COUNTED) for table in made.values()]
                mpips.chaos.note(step, bits([table.pull(EVERY) for table in made.values()], counts))
                if step == STEPS:
                    kv.close()
                    return
                if step % model.SAVE_EVERY == model.SAVE_EVERY - 1:
                    kv.save(file)
                eviction.now = partial(clock_of, kv.rank, step)  # type: ignore[assignment]
                kv.pull("w", w)  # a moment at which faults begin, before the calls of tables
                for table in made.values():
                    make_round(table, step, kv.rank)
                if step % 2:
                    kv.push("w", np.full(3, -1.0))
                else:
                    kv.pushpull("w", np.full(3, -1.0), w)
                step += 1
        except mpips.StoreError:
            step = kv.recover().step


def bits(rows: Iterable[np.ndarray], counts: Iterable[Iterable[int]]) -> bytes:
    """All rows and counts as bytes."""
    return b"".join([each.tobytes() for each in rows] + [np.array([*each], np.int64).tobytes() for each in counts])


def curve(names: str, servers: int, workers: Mapping[int, int], steps: int) -> list[bytes]:
    """What a job with so many workers in each step notes."""
    expected, found = Expected(job_of(servers), names.split(",")), []
    tables = expected.tables.values()
    for step in range(steps + 1):
        if step < steps:
            expected.make_calls()
        counts = [[len(it.evicted), *it.reasons, it.removed, it.refused] for it in tables]
        found.append(bits([table.pull(EVERY) for table in tables], counts))
        if step < steps:
            expected.make_rounds(workers[step])
    return found
