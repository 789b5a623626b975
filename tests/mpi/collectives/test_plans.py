"""Plans: reused, started beside other work, several at a time, of any length of message."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pytest
from collectives.session import session
from collectives.transport.room import Room
from collectives.watch import HISTORY, SPEAK_SECONDS

import collectives
from collectives import one_shot
from collectives.errors import CollectiveError
from collectives.network import messages
from collectives.tuner.table import Slots
from tests.mpi.collectives.support import PATIENCE, RANK, TAG, WORLD, P, outcome, share_nothing, started
from tests.mpi.sizes import only_on

TOTAL = P * (P + 1) // 2

ALGORITHMS = ("auto", "native", "ring")


@pytest.fixture(params=["one node", "a node for each rank"])
def comm(request, monkeypatch):
    """A communicator whose ranks share memory, and one whose ranks do not."""
    if request.param != "one node":
        share_nothing(monkeypatch)
    made = WORLD.Dup()
    yield made
    made.Free()


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("n", [3, 9000, 300_000])
def test_a_plan_runs_again_and_again(comm, algorithm, n):
    x = collectives.empty(n, np.float64, comm)
    plan = collectives.plan("allreduce", x, comm, algorithm=algorithm)
    wrong = []
    for turn in range(12):
        x[:] = RANK + 1 + turn
        if plan() is not x or (x != TOTAL + turn * P).any():
            wrong.append(turn)
    plan.free()
    assert not wrong, "turns"


@pytest.mark.mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_several_plans_in_flight(comm, algorithm):
    xs = [np.full(n, RANK + 1.0) for n in (5, 60_000, 400_000)]
    plans = [collectives.plan("allreduce", x, comm, algorithm=algorithm) for x in xs]
    for plan in plans:
        plan.start()
    while not plans[-1].test():
        np.ones(100).sum()  # compute beside
    for plan in reversed(plans):
        plan.wait()
    assert all((x == TOTAL).all() for x in xs)


def planned(algorithm):
    def make(x, comm):
        plan = collectives.plan("allreduce", x, comm, algorithm=algorithm)
        return lambda: plan.start() or plan

    return make


def begun(algorithm, vectors=False):
    return lambda x, comm: lambda: one_shot.begin("allreduce", [x] if vectors else x, comm, algorithm=algorithm)


RINGS = "multi_ring(rings=2)"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "first, second",
    [
        (planned(RINGS), planned("ring")),
        (planned(RINGS), begun("multi_ring(rings=3)", vectors=True)),
        (begun("ring"), begun("ring")),
    ],
)
def test_messages_in_flight_together_are_kept_apart(comm, first, second):
    """The other ranks have started both when rank 0 comes to the first, and goes through it alone."""
    x, y = (np.full(6 * P, RANK + 1.0) for _ in range(2))
    collectives.allreduce(np.ones(1), comm)  # the first call meets
    start_first, start_second = first(x, comm), second(y, comm)
    if RANK:
        started = [start_first(), start_second()]
        WORLD.Barrier()
    else:
        WORLD.Barrier()
        started = [start_first()]
        while not started[0].test():
            pass
        started.append(start_second())
    for plan in started:
        plan.wait()
    assert (x == TOTAL).all() and (y == TOTAL).all()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_run_started_tensors_at_other_times(comm):
    """A tensor counts as called when it is started, not when its turn comes: all see that they do the same."""
    xs = [np.full(n, RANK + 1.0) for n in (5, 6, 7)]
    plans = [collectives.plan("allreduce", [x], comm, algorithm="host_ring") for x in xs[:2]]
    plans.append(collectives.plan("allreduce", xs[2], comm, algorithm="ring"))
    for plan in plans if RANK == 0 else plans[:1]:
        plan.start()
    while not plans[0].test():
        pass
    for plan in plans[1:] if RANK else ():
        plan.start()
    watch = session(comm).watch
    said = WORLD.allgather(watch._mine if watch is not None else None)
    for plan in plans:
        plan.wait()
    assert all(numbered == said[0] for numbered in said), said
    assert all((x == TOTAL).all() for x in xs)


@pytest.mark.mpi(min_size=2)
def test_more_plans_under_way_than_names_are_kept(comm):
    """All are still to come to rank 0 when the others have waited so long that they say what they wait for."""
    xs = [np.full(2, RANK + 1.0) for _ in range(HISTORY + 2)]
    plans = [collectives.plan("allreduce", x, comm, algorithm="ring") for x in xs]
    if RANK == 0:
        for other in range(1, P):
            WORLD.Recv(bytearray(1), other)
    for plan in plans:
        plan.start()
    if RANK:
        until = time.monotonic() + 2 * SPEAK_SECONDS

        def late():
            while time.monotonic() < until:
                session(comm).advance()
                yield

        try:
            session(comm).drive(late(), "a wait")
        finally:
            WORLD.Send(b"1", 0)
    for plan in plans:
        plan.wait()
    assert all((x == TOTAL).all() for x in xs)


@pytest.mark.mpi
def test_a_blocking_call_waits_its_turn(comm):
    x, y = np.full(100_000, RANK + 1.0), np.full(10, RANK + 1.0)
    plan = collectives.plan("allreduce", x, comm)
    plan.start()
    collectives.allreduce(y, comm)
    plan.wait()
    assert (x == TOTAL).all() and (y == TOTAL).all()


@pytest.mark.mpi
def test_a_started_plan_does_not_hold_up_other_communicators():
    """Ranks look after it at different times: in between they meet elsewhere."""
    comm = WORLD.Dup()
    x = np.full(1_000_000, RANK, np.float32)
    plan, wrong = collectives.plan("broadcast", x, comm), []
    for turn in range(12):
        x[:] = RANK + turn
        if RANK % 2:
            WORLD.Barrier()
        plan.start()
        plan.test()
        if RANK % 2 == 0:
            WORLD.Barrier()
        WORLD.Barrier()
        plan.wait()
        if (x != turn).any():
            wrong.append(turn)
    comm.Free()
    assert not wrong, "turns"


def interrupted(room):
    raise KeyboardInterrupt
    yield


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_who_is_interrupted_in_what_it_started_takes_back_its_entry(monkeypatch, algorithm):
    """Rank 0, before the others have come: they hear of it, and the next plan serves all."""
    comm = WORLD.Dup()
    plan = collectives.plan("allreduce", np.ones(10), comm, algorithm=algorithm)
    session(comm).patient(60.0, 10.0)
    said = ""
    if RANK == 0:
        monkeypatch.setattr(Room, "meet", interrupted)
    else:
        WORLD.Recv(bytearray(1), 0, TAG)
    try:
        plan.start()
        plan.wait()
    except (KeyboardInterrupt, CollectiveError) as error:
        said = f"{type(error).__name__}: {error}"
    if RANK == 0:
        monkeypatch.undo()
        for other in range(1, P):
            WORLD.Send(b"1", other, TAG)
    everybody = WORLD.allgather(said)
    assert everybody[0] == "KeyboardInterrupt: "
    assert all("rank 0 has given up" in sentence for sentence in everybody[1:]), everybody
    x = np.ones(10)
    collectives.plan("allreduce", x, comm)()
    assert (x == P).all()
    comm.Free()


@pytest.mark.mpi
def test_start_and_wait_come_in_pairs(comm):
    plan = collectives.plan("allreduce", np.ones(4), comm)
    with pytest.raises(CollectiveError, match=r"not started: call start\(\) first"):
        plan.wait()
    plan.start()
    with pytest.raises(CollectiveError, match="twice"):
        plan.start()
    plan.wait()


@pytest.mark.mpi
def test_a_freed_plan_is_refused(comm):
    x = np.full(4, RANK + 1.0)
    plan = collectives.plan("allreduce", x, comm)
    plan.free()
    for _ in range(2):
        with pytest.raises(CollectiveError, match="freed"):
            plan()
    collectives.allreduce(x, comm)
    assert (x == TOTAL).all()


@pytest.mark.mpi
def test_more_plans_than_are_kept(comm, monkeypatch):
    monkeypatch.setattr(one_shot, "MOST_PLANS", 4)
    xs, wrong = [np.full(10 + i, RANK + 1.0) for i in range(9)], []
    for turn in range(3):
        for x in xs:
            x[:] = RANK + 1
            collectives.allreduce(x, comm, algorithm="ring" if turn else "auto")
            if (x != TOTAL).any():
                wrong.append((turn, len(x)))
    assert not wrong, "turns and numbers of elements"


@pytest.mark.mpi
def test_long_vectors_go_in_several_messages(comm, monkeypatch):
    monkeypatch.setattr(messages, "MESSAGE_BYTES", 1000)
    kinds = {"allreduce": TOTAL, "broadcast": 1}
    xs = [np.full(5000, RANK + 1, np.int32) for _ in kinds]
    for kind, x in zip(kinds, xs):
        collectives.plan(kind, x, comm, algorithm="ring")()
    assert [set(x) for x in xs] == [{value} for value in kinds.values()]


@pytest.mark.mpi
def test_the_model_expects_more_of_more_bytes(comm):
    plans = [collectives.plan("allreduce", np.zeros(n), comm) for n in (1000, 1_000_000)]
    short, long = (plan.predicted_seconds for plan in plans)
    assert short is not None
    assert long is not None
    assert short < long or P == 1


@pytest.mark.mpi(min_size=2)
def test_calls_that_are_not_kept_leave_no_request(comm, monkeypatch):
    class Wrapped:
        def __init__(self, array):
            self.__array_interface__ = array.__array_interface__

    given_back = []
    release = messages.release
    monkeypatch.setattr(messages, "release", lambda requests: (given_back.extend(requests), release(requests)))
    array, counts = np.ones(5 * P), []
    for _ in range(3):
        collectives.allreduce(Wrapped(array), comm, algorithm="ring")
        counts.append(len(given_back))
    assert counts == [turn * 4 * (P - 1) for turn in (1, 2, 3)]
    assert (array == P**3).all()


@pytest.mark.mpi
def test_arrays_of_other_libraries(comm):
    class Wrapped:
        def __init__(self, array):
            self.array = array
            self.__array_interface__ = array.__array_interface__

    class Capsule:
        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **wanted):
            return self.array.__dlpack__(**wanted)

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    arrays = [np.full((3, 5), RANK + 1.0) for _ in range(2)]
    wrapped = [Wrapped(arrays[0]), Capsule(arrays[1])]
    results = [collectives.allreduce(one, comm) for one in wrapped]
    assert all(result is one for result, one in zip(results, wrapped))
    assert all((array == TOTAL).all() for array in arrays)


@pytest.mark.mpi
@only_on(2, 3)
def test_a_started_call_with_other_arrays_between_two_calls_changes_no_sum():
    """Rank 0 has one ordinary array; the others' are by turns node-shared and ordinary."""
    comm = WORLD.Dup()
    n = 6000  # of these node-shared ones do not pass through slots, where ranks have cores of their own
    session(comm).table = msgspec.structs.replace(session(comm).table, slots={P: Slots(16 << 10, 64 << 10)})
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
