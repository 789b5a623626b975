"""Ranks that are interrupted, or give up: who waits for them hears why, in what they give up or in what comes next."""

from __future__ import annotations

import signal
import time

import msgspec
import numpy as np
import pytest

import collectives
from collectives.errors import CollectiveError
from collectives.session import Session, session
from collectives.table import Eager
from collectives.transport import shared_memory
from collectives.transport.room import Room
from tests.mpi.collectives.support import RANK, TAG, WORLD, P, share_nothing
from tests.mpi.sizes import only_on

PATIENCE = 20.0  # seconds
ALGORITHMS = ("auto", "ring(over=messages)", "native")


@pytest.fixture
def alarm():
    """alarm(seconds): interrupts this rank, as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def outcome(function):
    """What the function raises, as a word and a sentence; or "done"."""
    try:
        function()
    except (KeyboardInterrupt, CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def others_come_now():
    """Rank 0 lets the others go on, which wait here."""
    if RANK:
        WORLD.recv(source=0, tag=TAG)
    else:
        for other in range(1, P):
            WORLD.send(None, other, tag=TAG)


def soon(function):
    """`outcome`, where this rank must not have waited until its patience ends."""
    start = time.monotonic()
    said = outcome(function)
    return said if time.monotonic() - start < PATIENCE / 2 else f"late: {said}"


def interrupted_at(turn, steps):
    """The same steps, in one of which Ctrl-C is pressed."""
    for _ in range(turn):
        yield next(steps)
    steps.throw(KeyboardInterrupt())


def started(plan):
    plan.start()
    plan.wait()


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
def test_who_is_interrupted_while_he_waits_for_what_he_has_started_takes_back_his_entry(alarm, algorithm):
    comm = WORLD.Dup()
    x = np.ones(10)
    plan = collectives.plan("allreduce", x, comm, algorithm=algorithm)
    session(comm).patient(60.0, PATIENCE)
    if RANK == 0:
        alarm(0.3)
        said = outcome(lambda: started(plan))
    others_come_now()
    if RANK:
        said = outcome(lambda: started(plan))
    untouched = bool((x == 1).all())
    again = outcome(plan)
    everybody = WORLD.allgather((said, untouched, again, bool((x == P).all())))
    comm.Free()
    assert everybody[0] == ("KeyboardInterrupt: ", True, "done", True)
    for sentence, *rest in everybody[1:]:
        assert "rank 0 has given up" in sentence
        assert rest == [True, "done", True]


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("within", [False, True])
def test_who_is_interrupted_while_he_waits_for_the_second_of_two_leaves_the_communicator(alarm, within):
    """Between two steps of the first, or within one."""
    comm = WORLD.Dup()
    plans = [collectives.plan("allreduce", np.ones(10), comm) for _ in range(2)]
    session(comm).patient(60.0, PATIENCE)
    said = []
    if RANK == 0:
        for plan in plans:
            plan.start()
        if within:
            session(comm).active[0].steps = interrupted_at(3, session(comm).active[0].steps)
        else:
            alarm(0.3)
        said = [outcome(plan.wait) for plan in reversed(plans)]
    others_come_now()
    if RANK:
        said = [soon(plan) for plan in plans]
    after = soon(lambda: collectives.allreduce(np.ones(3), comm))
    everybody = WORLD.allgather((*said, after))
    comm.Free()
    assert everybody[0][0] == "KeyboardInterrupt: "
    assert "was given up" in everybody[0][1]
    for sentences in everybody[1:]:
        assert all("rank 0 has given up a" in sentence for sentence in sentences), sentences
        assert "late" not in "".join(sentences)
    assert len({sentences[2] for sentences in everybody}) == 1, everybody
    assert "unusable after: rank 0 has given up allreduce" in everybody[0][2]


@pytest.mark.mpi
@only_on(2, 3)
def test_a_call_that_took_too_long_because_of_what_was_started_before_can_be_made_again():
    comm = WORLD.Dup()
    x, y = np.ones(10), np.ones(5)
    plan = collectives.plan("allreduce", x, comm)
    session(comm).patient(60.0, 0.3 if RANK == 0 else PATIENCE)
    if RANK == 0:
        plan.start()
        said = [outcome(lambda: collectives.allreduce(y, comm)), outcome(plan.wait)]
    others_come_now()
    session(comm).patient(60.0, PATIENCE)
    if RANK:
        said = [outcome(plan), ""]
    said += [soon(lambda: collectives.allreduce(y, comm)) for _ in range(2)]
    everybody = WORLD.allgather((*said, y[0] == P**2))
    comm.Free()
    assert everybody[0][0].startswith("StallError") and "was given up" in everybody[0][1]
    assert all("not come" in one[0] for one in everybody), everybody
    assert all(one[2:] == ("done", "done", True) for one in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3)
def test_what_was_started_later_can_be_waited_for_when_what_was_started_before_took_too_long():
    comm = WORLD.Dup()
    x, y = np.ones(10), np.ones(10)
    plans = [collectives.plan("allreduce", array, comm) for array in (x, y)]
    session(comm).patient(60.0, 0.3 if RANK == 0 else PATIENCE)
    if RANK == 0:
        for plan in plans:
            plan.start()
        said = [outcome(plans[1].wait)]
    others_come_now()
    session(comm).patient(60.0, PATIENCE)
    if RANK:
        said = [outcome(plans[0])]
    said.append(outcome(plans[1].wait if RANK == 0 else plans[1]))
    everybody = WORLD.allgather((*said, bool((y == P).all())))
    comm.Free()
    assert everybody[0][0].startswith("StallError")
    assert all("have not come" in one[0] or "has not come" in one[0] for one in everybody), everybody
    assert all(one[1:] == ("done", True) for one in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3)
def test_who_can_do_no_more_on_a_communicator_tells_who_waits_for_him():
    """Rank 0 gives up two calls before the others come: the second would write over what they read in the first."""
    comm = WORLD.Dup()
    collectives.allreduce(np.ones(10), comm)
    session(comm).patient(60.0, 0.2 if RANK == 0 else PATIENCE)
    calls = [lambda k=k: collectives.allreduce(np.full(10, 10.0**k), comm) for k in range(3)]
    if RANK == 0:
        said = [outcome(call) for call in calls]
    others_come_now()
    if RANK:
        said = [soon(call) for call in calls]
    everybody = WORLD.allgather(said)
    comm.Free()
    assert all(one.startswith("StallError") for one in everybody[0][:2])
    assert "this communicator is unusable after: rank 0 has given up" in everybody[0][2]
    for other in everybody[1:]:
        assert other[0].startswith("Withdrawn") and "not come" in other[0], other
        assert all("rank 0 has given up allreduce of 10" in one for one in other[1:]), other


@pytest.mark.mpi
@only_on(2, 3)
def test_what_a_slow_rank_still_reads_stays_when_others_give_up_the_next_call_and_go_on(monkeypatch):
    """The last rank has met the others in the first call but not taken their values when rank 0 begins the third."""
    slow = RANK == P - 1
    takes = shared_memory._eager_takes

    def slowly(*arguments):
        wait = (lambda: WORLD.recv(source=0, tag=TAG) if slow and armed else None, ())
        return (wait, *takes(*arguments))

    monkeypatch.setattr(shared_memory, "_eager_takes", slowly)
    armed = False
    comm = WORLD.Dup()
    x, out = np.ones(10), np.zeros(10)
    plan = collectives.plan("allreduce", x, comm, out=out)
    plan()
    session(comm).patient(60.0, 0.3 if RANK == 0 else PATIENCE)
    armed = True
    if RANK == 0:
        plan()
        said = outcome(plan)
        session(comm).patient(60.0, PATIENCE)
        x[:] = 100
        plan.start()
        WORLD.send(None, P - 1, tag=TAG)
        WORLD.send(None, P - 1, tag=TAG)
        plan.wait()
    else:
        plan()
        assert (out == P).all(), "what was read late"
        said = outcome(plan)
        plan()
    everybody = WORLD.allgather((said, float(out[0])))
    comm.Free()
    assert everybody[0][0].startswith("StallError")
    assert all("has not come" in sentence for sentence, _ in everybody[1:]), everybody
    assert all(total == 100 + P - 1 for _, total in everybody), everybody


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


@pytest.mark.mpi
@only_on(2, 3)
def test_a_started_call_with_other_arrays_between_two_calls_changes_no_sum():
    """Rank 0 has one ordinary array; the others' are by turns node-shared and ordinary."""
    comm = WORLD.Dup()
    n = 6000  # of these node-shared ones do not pass through slots, where ranks have cores of their own
    session(comm).table = msgspec.structs.replace(session(comm).table, eager={P: Eager(16 << 10, 64 << 10)})
    session(comm).patient(60.0, PATIENCE)
    ordinary, shared = np.empty(n), collectives.empty(n, np.float64, comm)
    plans = [collectives.plan("allreduce", x, comm) for x in (ordinary, shared if RANK else ordinary)]
    totals = []
    for turn in (1, 0, 1):
        x = shared if turn and RANK else ordinary
        x[:] = 1
        WORLD.Barrier()
        time.sleep(0.0 if RANK else 0.2)
        plan = plans[turn if RANK else 0]
        totals.append(outcome(lambda plan=plan, turn=turn: plan() if turn or RANK else started(plan)))
        totals.append((float(x.min()), float(x.max())))
    everybody = WORLD.allgather(totals)
    comm.Free()
    assert all(totals == ["done", (P, P)] * 3 for totals in everybody), everybody
