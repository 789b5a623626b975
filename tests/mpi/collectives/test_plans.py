"""Plans: reused, started beside other work, several at a time, of any length of message."""

from __future__ import annotations

import time

import numpy as np
import pytest

import collectives
from collectives import CollectiveError, api
from collectives.fabric import requests
from tests.choice import once
from tests.mpi.collectives.support import RANK, TOTAL, WORLD, P, fresh, make, polled, started
from tests.mpi.sizes import only_on

ALGORITHMS = ("auto", "native", "ring")
RINGS = "multi_ring(rings=2)"


@once(algorithm=ALGORITHMS, n=[1, 3, 9000, 300_000])
def test_a_plan_runs_again_and_again(comm, algorithm, n):
    """Called, tested and waited for by turns."""
    x = collectives.empty(n, np.float64, comm)
    plan, wrong = collectives.plan("allreduce", x, comm, algorithm=algorithm), []
    for turn in range(12):
        x[:] = RANK + 1 + turn
        result = (collectives.Plan.__call__, started, polled)[turn % 3](plan)
        if result is not x or (x != TOTAL + turn * P).any():
            wrong.append(turn)
    plan.free()
    assert not wrong


def planned(algorithm, vectors=False):
    def make_ready(x, comm):
        plan = collectives.plan("allreduce", [x] if vectors else x, comm, algorithm=algorithm)
        return lambda: plan.start() or plan

    return make_ready


def begun(algorithm, vectors=False):
    return lambda x, comm: lambda: api.begin("allreduce", [x] if vectors else x, comm, algorithm=algorithm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "first, second",
    [
        (planned(RINGS), planned("ring")),
        (planned(RINGS), begun("multi_ring(rings=3)", vectors=True)),
        (begun("ring"), begun("ring")),
        (planned("host_ring", vectors=True), planned("host_ring", vectors=True)),
    ],
)
def test_messages_in_flight_together_are_kept_apart(comm, first, second):
    """The other ranks have started both when rank 0 comes to the first, and goes through it alone."""
    x, y = (np.full(6 * P, RANK + 1.0) for _ in range(2))
    collectives.allreduce(np.ones(1), comm)  # the first call meets
    start_first, start_second = first(x, comm), second(y, comm)
    if RANK:
        running = [start_first(), start_second()]
        WORLD.Barrier()
    else:
        WORLD.Barrier()
        running = [start_first()]
        while not running[0].test():
            pass
        running.append(start_second())
    for plan in running:
        plan.wait()
    assert (x == TOTAL).all() and (y == TOTAL).all()


def test_a_started_plan_does_not_hold_up_other_communicators():
    """Ranks look after it at different times: in between they meet elsewhere."""
    with fresh() as comm:
        x = np.full(1_000_000, RANK, np.float32)
        plan, wrong = collectives.plan("broadcast", x, comm), []
        for turn in range(6):
            x[:] = RANK + turn
            if RANK % 2:
                WORLD.Barrier()
            plan.start()
            plan.test()
            if RANK % 2 == 0:
                WORLD.Barrier()
            WORLD.Barrier()
            plan.wait()
            wrong += [turn] * bool((x != turn).any())
    assert not wrong


@only_on(2, 3)
def test_called_and_started_with_arrays_of_two_sorts_by_turns():
    """Rank 0 has one ordinary array; the others' are by turns node-shared and ordinary, and some come late."""
    for n in (6000, 60_000):
        with fresh() as comm:
            ordinary, shared = np.empty(n), collectives.empty(n, np.float64, comm)
            plans = [collectives.plan("allreduce", x, comm) for x in (ordinary, shared if RANK else ordinary)]
            wrong = []
            for turn in range(20):
                x = shared if turn % 2 and RANK else ordinary
                x[:] = RANK + turn
                if turn % 5 == 0 and RANK == 0:
                    time.sleep(0.01)
                plan = plans[turn % 2 if RANK else 0]
                plan() if turn % 3 else started(plan)
                wrong += [turn] * bool((x != P * turn + P * (P - 1) // 2).any())
        assert not wrong


def test_start_and_wait_come_in_pairs(comm):
    """What is called out of turn is refused on that rank alone."""
    x = np.ones(4)
    plan = collectives.plan("allreduce", x, comm)
    with pytest.raises(CollectiveError, match=r"not started: call start\(\) first"):
        plan.wait()
    plan.start()
    with pytest.raises(CollectiveError, match="twice"):
        plan.start()
    plan.wait()
    assert (x == P).all()


def test_a_freed_plan_is_refused(comm):
    x = np.full(4, RANK + 1.0)
    for runs in range(3):
        plan = collectives.plan("allreduce", x, comm)
        for _ in range(runs):
            plan()
        plan.free()
        for use in (plan, plan.start):
            with pytest.raises(CollectiveError, match="freed"):
                use()
        x[:] = RANK + 1
        collectives.allreduce(x, comm)
        assert (x == TOTAL).all()


def test_long_vectors_go_in_several_messages(comm, monkeypatch):
    monkeypatch.setattr(requests, "MESSAGE_BYTES", 1000)
    kinds = {"allreduce": TOTAL, "broadcast": 1}
    xs = [np.full(5000, RANK + 1, np.int32) for _ in kinds]
    for kind, x in zip(kinds, xs):
        collectives.plan(kind, x, comm, algorithm="ring")()
    assert [set(x) for x in xs] == [{value} for value in kinds.values()]


def test_the_model_expects_more_of_more_bytes(comm):
    plans = [collectives.plan("allreduce", make("ordinary", n), comm) for n in (1000, 1_000_000)]
    short, long = (plan.predicted_seconds for plan in plans)
    assert short is not None and long is not None
    assert short < long or P == 1
