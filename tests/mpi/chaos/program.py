"""A training program that may lose any of its processes: one rank of it.

    mpips run ... -m tests.mpi.chaos.program KIND FILE [TABLES]

Synchronous kinds train `model` and note all weights before each step. Asynchronous ones count: each push adds 1 to
elements of its own, and is noted when it begins and once it is acknowledged. With names of tables, they train
those, as `tables` says. FILE is where checkpoints go.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np

import mpips
from tests.mpi.chaos import counts, model, tables

Values = dict[str, np.ndarray]


def set_up(kv: mpips.KVStore, first: Values, optimize: Callable[[], None]) -> None:
    """All keys with their first values and optimizers, whoever dies meanwhile."""
    there: set[str] = set()
    while True:
        try:
            for key, value in first.items():
                if key not in there:
                    kv.init(key, value)
            optimize()
            return
        except mpips.StoreError:
            there = {str(key) for key in kv.recover()}


def pull(kv: mpips.KVStore, values: Values) -> None:
    for key, value in values.items():
        kv.pull(key, value)


def synchronous(kv: mpips.KVStore, file: str) -> None:
    """Train, and note all weights before each step and at the end."""
    weights = model.start()

    def optimize() -> None:
        for key in model.SIZES:
            kv.set_optimizer(model.optimizer(key), keys=[key])

    set_up(kv, model.start(), optimize)
    step, fresh = kv.resumed, True
    while True:
        try:
            if fresh:
                pull(kv, weights)
                fresh = False
            mpips.chaos.note(step, model.bits(weights))
            if step == model.STEPS:
                kv.close()
                return
            if step % model.SAVE_EVERY == model.SAVE_EVERY - 1:
                kv.save(file)
            one_round(kv, weights, step)
            step += 1
        except mpips.StoreError:
            rounds = kv.recover()
            step, fresh = rounds.step, True
            assert step is not None, f"keys stand at different rounds: {dict(rounds)}"


def one_round(kv: mpips.KVStore, weights: Values, step: int) -> None:
    """One round of all keys, called in one of three ways."""
    pushed = {key: model.gradient(key, w, step, kv.rank, kv.num_workers) for key, w in weights.items()}
    if step % 3 == 0:
        for key, w in weights.items():
            kv.pushpull(key, pushed[key], w)
    elif step % 3 == 1:
        for key in weights:
            kv.push(key, pushed[key])
        pull(kv, weights)
    else:
        kv.pushpull(list(weights), list(pushed.values()), list(weights.values()))


def asynchronous(kv: mpips.KVStore, file: str) -> None:
    """Count pushes until there are enough of all workers, and note each when it begins and when it is acknowledged."""
    totals = counts.start()
    first = counts.start() | {counts.DONE: counts.nobody_done()}
    set_up(kv, first, lambda: kv.set_optimizer(mpips.optimizers.Add()))
    made, fresh = 0, True
    while True:
        try:
            if fresh:
                pull(kv, totals)
                fresh = False
            if (seen := int(totals[counts.TOTALS].sum())) >= counts.TOTAL:
                finish(kv)
                pull(kv, totals)
                kv.close()
                break
            made += 1
            count(kv, totals, counts.number_of(made - 1), seen)
        except mpips.StoreError:
            kv.recover()
            fresh = True
    own = f"{file}.{os.getpid()}.npz"  # all have the same: who would be rank 0 may have died when the others had closed
    np.savez(own, **totals)
    os.replace(own, file)


def finish(kv: mpips.KVStore) -> None:
    """Wait until nobody pushes any more. A spare may come when the others have been through this: no call of all."""
    done = counts.nobody_done()
    kv.pushpull(counts.DONE, counts.says_done(kv.generation, kv.rank), done)
    while not counts.all_done(done, kv.generation, kv.num_workers):
        time.sleep(1e-3)
        kv.pull(counts.DONE, done)
    kv.pushpull(counts.DONE, counts.says_over(), done)


def count(kv: mpips.KVStore, totals: Values, number: int, seen: int) -> None:
    """One push of every key. Workers of a client have seen the same, so they call alike."""
    mpips.chaos.note(counts.begun(number), seen)
    for key, total in totals.items():
        if seen % 2:
            kv.pushpull(key, counts.push(key, number), total)
        else:
            kv.push(key, counts.push(key, number))
            kv.pull(key, total)
    mpips.chaos.note(counts.acknowledged(number), seen)


if __name__ == "__main__":
    kind, checkpoint, *names = sys.argv[1:]
    store = mpips.create(kind, **model.OPTIONS)
    if names:
        tables.train(store, names[0], checkpoint)
    else:
        (asynchronous if kind.endswith("_async") else synchronous)(store, checkpoint)
