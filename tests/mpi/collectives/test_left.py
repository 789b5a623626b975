"""Ranks that leave a communicator, and entries that others may have seen: who waits, or only tests, hears of it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from collectives.session import Session, session
from collectives.transport import shared_memory
from collectives.transport.room import Room

import collectives
from collectives.errors import CollectiveError
from tests.mpi.collectives.support import (
    PATIENCE,
    RANK,
    TAG,
    WORLD,
    P,
    others_come_now,
    outcome,
    share_nothing,
    soon,
    started,
)  # fmt: skip
from tests.mpi.sizes import only_on

ALGORITHMS = ("auto", "ring", "native")


def polled(plan):
    plan.start()
    polled_to_the_end(plan)


def polled_to_the_end(plan):
    until = time.monotonic() + PATIENCE
    while not plan.test() and time.monotonic() < until:
        time.sleep(1e-3)


def seen_by_the_others(room):
    """The others come now, and go to work with what they see of this rank."""
    others_come_now()
    while not Room.complete(room):
        time.sleep(1e-3)
    time.sleep(0.2)


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("run", [started, collectives.Plan.__call__])
def test_an_interrupt_between_nodes_is_told_to_the_others(monkeypatch, alarm, algorithm, run):
    """Ranks that share no memory; what others have had from the interrupted rank they may still finish."""
    share_nothing(monkeypatch)
    comm = WORLD.Dup()
    plan = collectives.plan("allreduce", np.ones(10), comm, algorithm=algorithm)
    plan()
    WORLD.Barrier()
    session(comm).patient(60.0, PATIENCE)
    if RANK == 0:
        alarm(0.3)
        said = [outcome(lambda: run(plan)), ""]
    others_come_now()
    if RANK:
        said = [soon(lambda: run(plan)), soon(lambda: run(plan))]
    after = soon(lambda: collectives.allreduce(np.ones(3), comm))
    everybody = WORLD.allgather((*said, after))
    comm.Free()
    assert everybody[0][0] == "KeyboardInterrupt: "
    for first, second, _ in everybody[1:]:
        assert first == "done" or "rank 0 has given up" in first, first
        assert "rank 0 has given up" in second and "late" not in second, second
    assert all("unusable" in sentences[2] for sentences in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("nodes", [1, P])
def test_who_only_tests_hears_of_it_too(monkeypatch, nodes):
    """Rank 0 has left the communicator; the others look after what they have started beside compute."""
    if nodes > 1:
        share_nothing(monkeypatch)
    comm = WORLD.Dup()
    plan = collectives.plan("allreduce", np.ones(10), comm, algorithm="ring")
    plan()
    WORLD.Barrier()
    session(comm).patient(60.0, PATIENCE)

    if RANK == 0:
        session(comm).leave("a call", CollectiveError("rank 0 has given up a call"))
    others_come_now()
    said = soon(lambda: polled(plan)) if RANK else outcome(plan)
    everybody = WORLD.allgather(said)
    comm.Free()
    assert all("rank 0 has given up a call" in sentence for sentence in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("nodes", [1, P])
def test_who_only_tests_hears_of_a_rank_that_waited_too_long(monkeypatch, nodes):
    """On one node the others have come, and stay away halfway."""
    if nodes > 1:
        share_nothing(monkeypatch)
    comm = WORLD.Dup()
    plan = collectives.plan("allreduce", np.ones(10), comm, algorithm="ring")
    plan()
    first = collectives.plan("allreduce", np.ones(5), comm, algorithm="ring")
    session(comm).patient(60.0, 0.3 if RANK == 0 else PATIENCE)
    if RANK and nodes == 1:
        first.start()
    WORLD.Barrier()
    if RANK == 0:
        said = outcome(first)
    others_come_now()
    if RANK:
        said = soon(lambda: polled(plan))
    after = soon(lambda: collectives.allreduce(np.ones(3), comm))
    everybody = WORLD.allgather((said, after))
    comm.Free()
    assert everybody[0][0].startswith("StallError"), everybody
    assert all("has waited for 0.3 s" in words and "late" not in words for one in everybody for words in one), everybody


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("how", ["too late", "interrupted"])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct memory"])
def test_others_that_count_on_an_entry_just_before_it_is_taken_back_hear_of_it(monkeypatch, alarm, algorithm, how):
    """They come, and see it, between the last look of who takes it back and his writing so."""
    comm = WORLD.Dup()
    x = collectives.empty(100_000, np.float64) if algorithm == "direct memory" else np.empty(10)
    x[:] = 1
    plan = collectives.plan("allreduce", x, comm, algorithm="ring" if algorithm == "ring" else "auto")
    plan()
    WORLD.Barrier()
    room = session(comm).room
    session(comm).patient(60.0, 0.3 if RANK == 0 and how == "too late" else PATIENCE)
    if RANK == 0:
        youngest, complete = room.last_token, room.complete

        def looked_before_they_came():
            seen = complete()
            if room.last_token > youngest:  # the card that says why is written
                monkeypatch.setattr(room, "complete", complete)
                seen_by_the_others(room)
            return seen

        monkeypatch.setattr(room, "complete", looked_before_they_came)
        if how == "interrupted":
            alarm(0.3)
        said = outcome(plan)
    else:
        WORLD.recv(source=0, tag=TAG)
        said = soon(plan)
    after = soon(plan)
    everybody = WORLD.allgather((said, after))
    comm.Free()
    assert everybody[0][0].startswith("StallError" if how == "too late" else "KeyboardInterrupt"), everybody
    assert all("late:" not in words for one in everybody for words in one), everybody
    assert all("rank 0 has given up" in one[0] or one[0] == "done" for one in everybody[1:]), everybody
    assert all("rank 0 has given up" in one[1] for one in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3)
def test_others_that_come_while_an_entry_is_taken_back_go_on_with_who_takes_it_back(monkeypatch):
    comm = WORLD.Dup()
    x = np.ones(10)
    plan = collectives.plan("allreduce", x, comm)
    room = session(comm).room
    session(comm).patient(60.0, 0.3 if RANK == 0 else PATIENCE)
    if RANK == 0:
        settled = room._settled
        monkeypatch.setattr(room, "_settled", lambda: (seen_by_the_others(room), settled())[1])
        said = outcome(plan)
    else:
        WORLD.recv(source=0, tag=TAG)
        said = outcome(plan)
    session(comm).patient(60.0, PATIENCE)
    again = outcome(plan)
    everybody = WORLD.allgather((said, again, bool((x == P).all())))
    comm.Free()
    assert everybody[0][0].startswith("StallError"), everybody
    assert all(one[0].startswith("Withdrawn") for one in everybody[1:]), everybody
    assert all(one[1:] == ("done", True) for one in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3)
def test_what_has_been_started_has_ended_when_who_tests_it_hears_that_a_rank_has_left():
    """Not when the garbage collector comes, which would wait then for the others."""
    comm = WORLD.Dup()
    plan = collectives.plan("allreduce", collectives.empty(100_000, np.float64), comm)
    plan()
    WORLD.Barrier()
    session(comm).patient(60.0, PATIENCE)
    ended = [True]
    if RANK == 0:
        session(comm).leave("a call", CollectiveError("rank 0 has given up a call"))
    else:
        plan.start()
        steps = [operation.steps for operation in session(comm).active]
    others_come_now()
    if RANK:
        said = soon(lambda: polled_to_the_end(plan))
        ended = [one.gi_frame is None for one in steps]
    everybody = WORLD.allgather((said if RANK else "rank 0 has given up a call", ended))
    comm.Free()
    assert all("rank 0 has given up a call" in words and ended == [True] for words, ended in everybody), everybody


def once(monkeypatch, where, name):
    """The next call of this function is interrupted as it begins."""
    whole = getattr(where, name)

    def interrupted(*arguments):
        monkeypatch.setattr(where, name, whole)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, name, interrupted)


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("calls_before", [0, 1])
@pytest.mark.parametrize("where, name", [(shared_memory.MemoryPlan, "_enter"), (Session, "advance"), (Room, "go")])
@pytest.mark.parametrize("run", [started, collectives.Plan.__call__])
def test_an_interrupt_before_a_rank_has_entered_is_told_to_the_others(monkeypatch, run, where, name, calls_before):
    """Nor does what it had begun to start go on by itself. Or, as it tells of one, another one comes."""
    comm = WORLD.Dup()
    x, out = np.ones(10), np.zeros(10)
    plan = collectives.plan("allreduce", x, comm, out=out)
    for _ in range(calls_before):
        plan()
    WORLD.Barrier()
    out[:] = 0
    session(comm).patient(60.0, PATIENCE)
    said = "KeyboardInterrupt: "
    if RANK == 0:
        if name != "advance":
            monkeypatch.setattr(plan, "_quick", shared_memory.MemoryPlan.afresh)
        once(monkeypatch, where, name)
        if name == "go":
            once(monkeypatch, shared_memory.MemoryPlan, "_enter")
        if name != "advance" or run is started:
            said = outcome(lambda: run(plan))
        else:
            session(comm).leave("a call", KeyboardInterrupt())
    others_come_now()
    if RANK:
        said = soon(lambda: run(plan))
    after = soon(lambda: collectives.allreduce(np.ones(3), comm))
    everybody = WORLD.allgather((said, after, bool((out == 0).all())))
    comm.Free()
    assert everybody[0][0] == "KeyboardInterrupt: "
    assert all("rank 0 has given up" in one[0] and "late" not in one[0] for one in everybody[1:]), everybody
    assert all("unusable" in one[1] and one[2] for one in everybody), everybody
