"""Faults at random moments, of random workers, one after the other in one store: no hang, no wrong value.

    python -m tests.mpi.mpips.test_random_faults COUNT [SEED] [--python PYTHON]

makes COUNT of them, in jobs of several each, and prints how many jobs hang and how many values are wrong. What a job
does follows from its seed, which is printed where something is wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import mpips
from tests.choice import first
from tests.mpi.collectives.fault_table import NOT_DONE, Place
from tests.mpi.collectives.support import interrupted
from tests.mpi.mpips.cells import KINDS, WAYS
from tests.mpi.mpips.faults import PATIENCE, WORLD, Worker, hear, in_the_middle, workers
from tests.mpi.sizes import only_on

MODULE = "tests.mpi.mpips.test_random_faults"
FAULTS = ("interrupt", "interrupt", "order", "argument", "late", "exit")
STEPS = 30  # calls among which the fault happens
PATIENT = 8.0  # seconds that a wait may last; a late worker comes up to half as many again later
EACH = 8  # faults in a job
JOB_SECONDS = 200


class Fault(NamedTuple):
    """What happens, to whom, and when."""

    kind: str
    odd: int
    step: int
    seconds: float


def job(seed: int, count: int, deadly: bool = True) -> list[str]:
    """One rank of a job: so many faults in a store of some kind. What was wrong, on worker 0. A worker that exits ends
    the job."""
    rng = random.Random(seed)
    name, options = KINDS[rng.choice(list(KINDS))]
    nodes, ranks = rng.random() < 0.3, WORLD.size - options["servers"]
    comm = workers(options["servers"])
    sizes = {f"k{i}": int(10 ** rng.uniform(0, 5.7)) for i in range(rng.randrange(1, 5))}
    make: Callable[[int], Any] = rng.choice([np.zeros, lambda n: mpips.empty(n, np.float64)])
    plan = [Fault(_chosen(rng, deadly), rng.randrange(ranks), rng.randrange(STEPS), rng.random()) for _ in range(count)]
    ways = [rng.choice(WAYS) for _ in range(count)]
    WORLD.Barrier()  # ranks start at their own pace
    try:
        kv = mpips.create(
            name, comm=WORLD, timeout_seconds=PATIENT, stall_seconds=PATIENCE, shared_memory=not nodes, **options
        )
    except SystemExit:
        return []
    worker = Worker(kv, comm, WAYS[0], sizes, make)
    wrong = []
    for number, (fault, way) in enumerate(zip(plan, ways)):
        worker.way = way
        words = _one(worker, fault)
        if words:
            wrong.append(f"seed {seed}, fault {number}, {name} {options}, {way}, nodes={nodes}, {fault}: {words}")
    kv.close()
    return wrong


def _chosen(rng: random.Random, deadly: bool) -> str:
    kind = rng.choice(FAULTS)
    return "interrupt" if kind == "exit" and not deadly else kind


def _one(worker: Worker, fault: Fault) -> str:
    """A fault among some calls; what was wrong on any worker."""
    comm = worker.comm
    heard = hear(lambda: _calls(worker, fault))
    if fault.kind == "exit":  # the odd worker is gone: the job ends
        sys.exit(3 if not heard.error or heard.error.startswith("Store") else f"raised {heard}")
    every = comm.allgather(heard)
    if any(one.error for one in every):
        again = comm.allgather(hear(worker.call).sentence)
        sentences = {one.sentence for one in every if one.error.startswith("Store")} | set(again)
        words = "" if len(sentences) == 1 else f"unlike sentences {sentences}"
        if any(one.error not in ("", "KeyboardInterrupt") and not one.error.startswith("Store") for one in every):
            words = f"raised {[one[:2] for one in every]}"
        words = worker.wrong_after(worker.kv.recover()) or words
    else:
        words = ""
        worker.counted()
    if not worker.good(3):
        words = words or "wrong sums afterwards"
    return next(filter(None, comm.allgather(words)), "")


def _calls(worker: Worker, fault: Fault) -> None:
    """Some calls of all keys, with the fault on the odd worker."""
    order = list(worker.sizes)
    for step in range(STEPS):
        if worker.rank != fault.odd or step != fault.step:
            worker.call(order)
        elif fault.kind == "interrupt":
            with interrupted(max(fault.seconds * 0.02, 1e-5), in_the_middle, again=0):
                worker.call(order)
        elif fault.kind == "order":
            worker.call(order[::-1])
        elif fault.kind == "argument":
            for bad in (np.zeros(3), "x", None):
                assert hear(lambda bad=bad: worker.kv.push(order, bad)).error in ("ValueError", "TypeError")
            worker.call(order)
        elif fault.kind == "late":
            time.sleep(fault.seconds * 1.5 * PATIENT)
            worker.call(order)
        else:
            sys.exit(3)


@only_on(3, 5)
@first(2, seed=range(4))
def test_some_faults(seed):
    assert not job(seed, 4, deadly=False)


# ---- as a program


def main() -> int:
    """Command line; the exit code."""
    if sys.argv[1] == "job":
        faulthandler.dump_traceback_later(JOB_SECONDS - 10)  # where it hangs
        for words in job(int(sys.argv[2]), int(sys.argv[3])):
            print(json.dumps({"wrong": words}), flush=True)
        return 0
    parser = argparse.ArgumentParser(description="Random faults of the store.")
    parser.add_argument("count", type=int)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    hangs, wrong = [], []
    place = Place(arguments.python, "", MODULE, (5, 6))
    for number in range(-(-arguments.count // EACH)):
        seed = arguments.seed * 10_000 + number
        code, said = place.run(["job", str(seed), str(EACH)], JOB_SECONDS)
        if NOT_DONE in said or "left behind" in said:
            hangs.append(seed)
            print(f"seed {seed}: {said[-1500:]}")
        found = [json.loads(line)["wrong"] for line in said.splitlines() if line.startswith('{"wrong"')]
        if code not in (0, 3) and seed not in hangs:
            found.append(f"seed {seed}: the job ended with {code}: {said[-1500:]}")
        wrong += found
        print(f"{(number + 1) * EACH} faults, {len(hangs)} hangs, {len(wrong)} wrong", flush=True)
        for words in found:
            print(words, flush=True)
    return 1 if hangs or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
