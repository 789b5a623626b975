"""A worker of a job with tables of which ranks are killed, and what the rows must be in the end; run as `survivor`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import mpips
from tests.mpi.mpips.reference_table import ReferenceTable
from tests.mpi.mpips.survivor import Job, main

DIM = 5
TABLES: dict[str, dict[str, Any]] = {
    "users": {"optimizer": "adam", "evict": 9}, "items": {"optimizer": "row_adagrad", "admit": mpips.seen(2)},
    "words": {"optimizer": "adagrad", "admit": mpips.chance(0.7)},
}  # fmt: skip
LIMITED = {"tags": {"optimizer": "sgd", "limit": 40}}
"""Servers share the limit, so that what is dropped depends on how many there are."""
COUNTED = "evicted", "refused"
EVERY = np.arange(-60, 60) * 7 * 10**15


def tables_of(job: Job) -> dict[str, dict[str, Any]]:
    return TABLES | (LIMITED if job.spares >= len(job.kills) else {})


def batch(name: str, step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng([len(name), step, rank])
    ids = random.choice(EVERY, (step + rank) % 13)
    return ids, random.standard_normal((len(ids), DIM)).astype(np.float32)


def train(kv: mpips.KVStore, job: Job) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """The loop of a program that survives; what it ends with, and from which step on with how many workers."""
    step, trace, w = kv.resumed, [], np.zeros(3)
    made: dict[str, Any] = {}
    while True:
        try:
            for name, more in tables_of(job).items():
                if name not in made:  # they go on after a recovery
                    made[name] = kv.table(name, DIM, init=mpips.uniform(0.5), learning_rate=0.1, **more)
            kv.init("w", np.zeros(3))
            kv.set_optimizer("sgd", learning_rate=1.0)
            while step < job.steps:
                if not trace or trace[-1][1] != kv.num_workers:
                    trace.append([step, kv.num_workers])
                for name, table in made.items():
                    (table.push if step % 3 else table.pushpull)(*batch(name, step, kv.rank))
                kv.pushpull("w", np.full(3, -1.0), w)
                step += 1
            rows = {name: table.pull(EVERY) for name, table in made.items()}
            counts = {f"{name} counts": np.array([*map(table.stats().get, COUNTED)]) for name, table in made.items()}
            return rows | counts | {"w": w}, trace
        except mpips.StoreError:
            step = kv.recover().step


def train_alone(kv: mpips.KVStore, job: Job) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """Push 1 to a row of one's own, in an asynchronous store: each counts once, but for one under way at a death."""
    mine, table = np.array([kv.rank]), None
    unsure = int(kv.resumed != 0)  # who takes a dead worker's place goes on with its row
    while True:
        try:
            table = table or kv.table("t", DIM, init=mpips.uniform(0), learning_rate=1.0)
            while table.pushes < job.steps:
                row = table.pushpull(mine, np.full((1, DIM), -1, np.float32))
                assert (row == row[0, 0]).all() and table.pushes - unsure <= row[0, 0] <= table.pushes
            return {"right": np.ones(1)}, [[0, kv.num_workers]]
        except mpips.StoreError:
            kv.recover()
            unsure += 1


def expected(job: Job, traces: Iterable[list[list[int]]]) -> dict[str, np.ndarray]:
    """The rows after all steps, each made by as many workers as the traces say."""
    if job.kind == "dist_async":
        return {"right": np.ones(1)}
    workers = [max(trace for trace in traces if trace[0][0] == 0)[0][1]] * job.steps
    changes = [(step, number, size) for trace in traces for number, (step, size) in enumerate(trace) if number]
    for step, _, size in sorted(changes):
        workers[step:] = [size] * (job.steps - step)
    tables = {
        name: ReferenceTable(name, DIM, "float32", 0.5, servers=job.servers, **more)
        for name, more in tables_of(job).items()
    }
    for step, size in enumerate(workers):
        for name, table in tables.items():
            table.push([batch(name, step, rank) for rank in range(size)])
    rows = {name: table.pull(EVERY) for name, table in tables.items()}
    counts = {f"{name} counts": np.array([len(it.evicted), it.refused]) for name, it in tables.items()}
    return rows | counts | {"w": np.full(3, float(sum(workers)))}


if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[2]))
    main(Path(sys.argv[1]), asked, train_alone if asked.kind == "dist_async" else train)
