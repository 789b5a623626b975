"""A worker of a job with tables of which ranks are killed, and what the rows must be in the end; run as `survivor`."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mpips
from mpips.tables import eviction
from tests.mpi.mpips.reference_table import ReferenceTable
from tests.mpi.mpips.survivor import Job, main

DIM = 5


@mpips.register_init
def sevenths(ids: np.ndarray) -> np.ndarray:
    """First values that workers, servers and spares compute by themselves."""
    return ids[:, None] % 1001 / 7 + np.arange(DIM)


TABLES: dict[str, dict[str, Any]] = {
    "users": {"optimizer": "row_adam", "weight_decay": 0.1, "init": mpips.truncated_normal(0.1), "evict": 9},
    "items": {
        "optimizer": "row_adagrad",
        "clipnorm": 1.5,
        "init": mpips.uniform(0.5),
        "admit": mpips.seen(2),
        "dtype": "bfloat16",
        "rounding": "stochastic",
    },
    "words": {
        "optimizer": "ftrl",
        "l1": 0.1,
        "init": sevenths,
        "admit": mpips.chance(0.7),
        "dtype": "float16",
        "evict_after": 8,
    },
}
EVEN = {"init": mpips.uniform(0.5)}
LIMITED: dict[str, dict[str, Any]] = {
    "tags": {"optimizer": "adam", "init": mpips.constant(0.3), "limit": 40},
    "tops": {"optimizer": "adam", "limit": 40, "evict_by": "count", "evict_after": 30, "admit": mpips.seen(2), **EVEN},
    "stars": {"optimizer": "row_adagrad", "dtype": "bfloat16", "limit": 30, "evict_by": "score", **EVEN},
}
"""Servers share the limit, so that what is dropped depends on how many there are."""
COUNTED = "evicted", "evicted_unused", "evicted_by_time", "evicted_by_limit", "removed", "refused"
RATES = 0.1, 0.05, 0.2
EVERY = np.arange(-60, 60) * 7 * 10**15


def tables_of(job: Job) -> dict[str, dict[str, Any]]:
    return TABLES | (LIMITED if job.spares >= len(job.kills) else {})


def batch(name: str, step: int, rank: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng([len(name), step, rank])
    ids = random.choice(EVERY, (step + rank) % 13)
    scores = [random.integers(-5, 5, len(ids)) / 2] if name == "stars" else []
    dtype = np.dtype((TABLES | LIMITED)[name].get("dtype", "float32"))
    return ids, random.standard_normal((len(ids), DIM)).astype(dtype), *scores


def kind_of(name: str, step: int) -> str:
    """Which call a step makes of a table."""
    return random.Random(f"{name} {step}").choice(["set", "remove"] + 8 * ["push"])


def clock_of(rank: int, step: int) -> int:
    """The wall clock in microseconds: a second passes with each step. Only the clock of rank 0 is right."""
    return 10**15 + step * 10**6 if rank == 0 else 10**18


def call_before(job: Job, name: str, step: int) -> str:
    """What is called before the push of a step, if anything."""
    chosen = random.Random(f"{job.kills} {name} {step}")
    return chosen.choice(["save", "load", "update_optimizer", "export"] + 40 * [""])


def changed(name: str, step: int) -> dict[str, float]:
    """The hyperparameters that `update_optimizer` changes before a step."""
    return {"l2" if name == "words" else "learning_rate": RATES[step % len(RATES)]}


class Expected:
    """Some tables of a job after some steps."""

    def __init__(self, job: Job, names: Iterable[str]) -> None:
        self._job, self.step = job, 0
        self.tables = {
            name: ReferenceTable(name, DIM, servers=job.servers, **{"dtype": "float32", **(TABLES | LIMITED)[name]})
            for name in names
        }
        self._saved: dict[str, Any] = {}

    def go_on(self, workers: int) -> None:
        """Make a step."""
        self.make_calls()
        self.make_rounds(workers)

    def make_calls(self) -> None:
        """Make the calls that come before the rounds of a step."""
        for name, table in self.tables.items():
            call = call_before(self._job, name, self.step)
            if call == "save":
                self._saved[name] = table.save()
            elif call == "load" and name in self._saved:
                table.load(self._saved[name])
            elif call == "update_optimizer":
                table.numbers |= changed(name, self.step)

    def make_rounds(self, workers: int) -> None:
        for name, table in self.tables.items():
            batches = [batch(name, self.step, rank) for rank in range(workers)]
            now, kind = clock_of(0, self.step), kind_of(name, self.step)
            if kind == "remove":
                table.remove([ids for ids, *_ in batches], now)
            else:
                (table.set if kind == "set" else table.push)(batches, now)
        self.step += 1


def make_call(folder: Path, job: Job, step: int, table: mpips.Table) -> None:
    path, call = folder / table.name, call_before(job, table.name, step)
    if call == "update_optimizer":
        table.update_optimizer(**changed(table.name, step))
    elif call == "export":
        table.export(folder / "export")
    elif call == "save":
        table.save(path)
    elif call == "load" and any(call_before(job, table.name, before) == "save" for before in range(step)):
        table.load(path)


def make_round(table: mpips.Table, step: int, rank: int) -> np.ndarray | None:
    """Push, set or remove, as the step says. What a pushpull returns, if it is one."""
    ids, rows, *scores = batch(table.name, step, rank)
    kind = kind_of(table.name, step)
    if kind == "set":
        table.set(ids, rows, *scores)
    elif kind == "remove":
        table.remove(ids)
    elif step % 3:
        table.push(ids, rows, *scores)
    else:
        found: np.ndarray = table.pushpull(ids, rows, None, *scores)
        return found
    return None


def train(kv: mpips.KVStore, job: Job, folder: Path) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """The loop of a program that survives; what it ends with, and from which step on with how many workers."""
    step, trace, w = kv.resumed, [], np.zeros(3)
    made: dict[str, Any] = {}
    model, size = Expected(job, tables_of(job)), kv.num_workers
    while True:
        try:
            model = model if model.step == step else Expected(job, tables_of(job))
            while model.step < step:
                model.go_on(size)
            for name, more in tables_of(job).items():
                if name not in made:  # they go on after a recovery
                    made[name] = kv.table(name, DIM, learning_rate=0.1, **more)
            kv.init("w", np.zeros(3))
            kv.set_optimizer("sgd", learning_rate=1.0)
            while step < job.steps:
                if not trace or trace[-1][1] != kv.num_workers:
                    trace.append([step, kv.num_workers])
                if step == job.steps - 1:
                    job.wait_for_deaths()
                model.go_on(kv.num_workers)
                eviction.now = partial(clock_of, kv.rank, step)  # type: ignore[assignment]
                for name, table in made.items():
                    make_call(folder, job, step, table)
                    found, same = make_round(table, step, kv.rank), job.spares >= len(job.kills)
                    ids = batch(name, step, kv.rank)[0]
                    if found is not None:
                        expected = model.tables[name].pull(ids)
                        assert found.tobytes() == expected.tobytes() or not same, f"step {step}: {name} differs"
                    if step % 7 == 0:
                        there = [one in model.tables[name].rows for one in ids.tolist()]
                        assert table.exists(ids).tolist() == there or not same, f"step {step}: {name} differs"
                if step % 4 == 0:
                    wanted = {table: EVERY[step % 7 :: 1 + number] for number, table in enumerate(made.values())}
                    for table, rows in mpips.pull_rows(wanted).items():
                        expected, same = model.tables[table.name].pull(wanted[table]), job.spares >= len(job.kills)
                        assert rows.tobytes() == expected.tobytes() or not same, f"step {step}: {table} differs"
                kv.pushpull("w", np.full(3, -1.0), w)
                step += 1
                job.start_clocks(folder, kv.generation)
            rows = {name: table.pull(EVERY) for name, table in made.items()}
            counts = {f"{name} counts": np.array([*map(table.stats().get, COUNTED)]) for name, table in made.items()}
            return rows | counts | {"w": w}, trace
        except mpips.StoreError:
            step = kv.recover().step


def train_alone(kv: mpips.KVStore, job: Job, folder: Path) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    """Push 1 to a row of one's own, in an asynchronous store: each counts once, but for one under way at a death.

    float16 has all whole numbers up to 2048."""
    mine, table = np.array([kv.rank]), None
    unsure = int(kv.resumed != 0)  # who takes a dead worker's place goes on with its row
    while True:
        try:
            table = table or kv.table("t", DIM, "float16", mpips.uniform(0), learning_rate=1.0)
            while table.pushes < job.steps:
                if table.pushes == job.steps - 1:
                    job.wait_for_deaths()
                row = table.pushpull(mine, np.full((1, DIM), -1, np.float16))
                assert (row == row[0, 0]).all() and table.pushes - unsure <= row[0, 0] <= table.pushes
                job.start_clocks(folder, kv.generation)
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
    model = Expected(job, tables_of(job))
    for size in workers:
        model.go_on(size)
    rows = {name: table.pull(EVERY) for name, table in model.tables.items()}
    counts = {
        f"{name} counts": np.array([len(it.evicted), *it.reasons, it.removed, it.refused])
        for name, it in model.tables.items()
    }
    return rows | counts | {"w": np.full(3, float(sum(workers)))}


if __name__ == "__main__":
    asked = Job(**json.loads(sys.argv[2]))
    main(Path(sys.argv[1]), asked, train_alone if asked.kind == "dist_async" else train)
