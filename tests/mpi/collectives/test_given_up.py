"""Calls that are interrupted, or given up: who comes to them later hears why, in them or in what comes next."""

from __future__ import annotations

import numpy as np
import pytest
from collectives.session import session
from collectives.transport import eager

import collectives
from tests.mpi.collectives.support import PATIENCE, RANK, TAG, WORLD, P, others_come_now, outcome, soon, started
from tests.mpi.sizes import only_on

ALGORITHMS = ("auto", "ring", "native")


def interrupted_at(turn, steps):
    """The same steps, in one of which Ctrl-C is pressed."""
    for _ in range(turn):
        yield next(steps)
    steps.throw(KeyboardInterrupt())


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
    takes = eager.takes

    def slowly(*arguments):
        wait = (lambda: WORLD.recv(source=0, tag=TAG) if slow and armed else None, ())
        return (wait, *takes(*arguments))

    monkeypatch.setattr(eager, "takes", slowly)
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
