"""Threads of a program: each with a communicator of its own, or the second one is told."""

from __future__ import annotations

import threading
import warnings

import numpy as np
import pytest

import collectives
from collectives import CollectiveError
from collectives.communicator import communicator
from tests.mpi.collectives.support import ODD, RANK, TOTAL, WORLD, fresh, hear, still_works
from tests.mpi.sizes import only_on

LIMIT = 30


@only_on(2, 3)
def test_each_thread_on_a_communicator_of_its_own():
    wrong = []

    def sums(comm, value):
        for turn in range(50):
            x = np.full(4, value * (RANK + 1.0))
            collectives.allreduce(x, comm)
            if (x != value * TOTAL).any():
                wrong.append((turn, x))

    with fresh() as mine, fresh() as other, warnings.catch_warnings():
        warnings.simplefilter("error")
        thread = threading.Thread(target=sums, args=(other, 1))
        thread.start()
        sums(mine, 100)
        thread.join(LIMIT)
    assert not any(WORLD.allgather(wrong))


@only_on(2, 3)
@pytest.mark.parametrize("call", ["allreduce", "plan", "grouped_allreduce", "start"])
def test_a_second_thread_is_told_on_all_ranks(call):
    """On one rank a thread waits in a call to which the others do not come, and the program makes another one."""
    with fresh() as comm:
        x, plan = np.ones(3), collectives.plan("allreduce", np.ones(5), comm)
        calls = {
            "allreduce": lambda: collectives.allreduce(x, comm),
            "plan": plan,
            "start": plan.start,
            "grouped_allreduce": lambda: collectives.grouped_allreduce([x, x], comm),
        }
        heard = []
        if RANK == ODD:
            home = communicator(comm)
            first = threading.Thread(target=lambda: heard.append(hear(lambda: collectives.allreduce(np.ones(9), comm))))
            first.name = "loader"
            first.start()
            while not (home.inside and home.board.number % 2 == 0):  # it has entered its call, behind the plan's making
                pass
            heard.append(hear(calls[call]))
            first.join(LIMIT)
        else:
            WORLD.Barrier()
            heard.append(hear(lambda: collectives.allreduce(np.ones(9), comm)))
        if RANK == ODD:
            WORLD.Barrier()
        everybody = {one[:2] for rank in WORLD.allgather(heard) for one in rank}
        collectives.renew(comm)
        still_works(comm)
    (told,) = everybody
    assert told[0] == CollectiveError.__name__
    assert f"rank {ODD}: thread 'MainThread' calls " in told[1] and "while thread 'loader' is in a call" in told[1]


@only_on(2)
def test_threads_that_call_by_turns_are_warned_once():
    def own():
        collectives.allreduce(np.full(3, RANK + 1.0), comm)

    def elsewhere():
        begun.wait(LIMIT)
        own()
        done.set()
        over.wait(LIMIT)

    with fresh() as comm, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):  # one that ends before the program goes on does no harm
            helper = threading.Thread(target=own)
            helper.start()
            helper.join(LIMIT)
            own()
        before = len(said)
        begun, done, over = (threading.Event() for _ in range(3))
        helper = threading.Thread(target=elsewhere, name="loader")
        helper.start()
        begun.set()
        done.wait(LIMIT)
        own()
        own()
        over.set()
        helper.join(LIMIT)
        words = [str(one.message) for one in said]
    everybody = WORLD.allgather((before, words))
    assert all(before == 0 and len(words) == 1 for before, words in everybody), everybody
    assert all("threads 'loader' and 'MainThread' take turns to make calls" in words[0] for _, words in everybody), (
        everybody
    )
