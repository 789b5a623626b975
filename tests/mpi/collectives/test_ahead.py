"""Few bytes broadcast or reduced again and again: ranks that do not meet get what they should, and hear of errors."""

from __future__ import annotations

import random
import time
from contextlib import nullcontext

import numpy as np
import pytest
from collectives.session import session
from collectives.transport import room
from collectives.transport.ahead import AFTER, DEPTH

import collectives
from tests.mpi.collectives.support import PATIENCE, RANK, WORLD, P, outcome
from tests.mpi.delays import put_off
from tests.mpi.sizes import only_on


@pytest.fixture(params=[0, 1])
def late(request):
    """One of the ranks is put off now and then: the root, or one that the root waits for."""
    with put_off(0.002, 0.0046) if request.param == RANK else nullcontext():
        yield


class Many:
    """One call that is made again and again: its plan, and what should come out."""

    def __init__(self, comm, kind, root, n, dtype, op="sum", in_place=True):
        self.kind, self.root, self.op = kind, root, op
        self.x = np.zeros(n, dtype)
        self.out = None if in_place else np.zeros(n, dtype)
        rooted = {} if kind == "allreduce" else {"root": root}
        self.plan = collectives.plan(kind, self.x, comm, op=op, out=self.out, **rooted)

    def wrong(self, number, start):
        """Elements that are wrong after one more call, which is started and waited for or made at once."""
        values = [np.arange(self.x.size) % 3 + (number + rank) % 5 for rank in range(P)]
        self.x[:] = values[RANK].astype(self.x.dtype)
        if start:
            self.plan.start()
            result = self.plan.wait()
        else:
            result = self.plan()
        if self.kind == "broadcast":
            expected = values[self.root]
        else:
            expected = {"sum": sum(values), "max": np.max(values, 0), "mean": sum(values) / P}[self.op]
        if self.kind == "reduce" and self.root != RANK:
            return 0
        return int((result != expected.astype(result.dtype)).sum())


@pytest.mark.mpi
@only_on(2, 3, 4)
def test_long_rows_of_calls_of_several_sorts_by_turns(comm, late):
    last = P - 1
    calls = [
        Many(comm, "broadcast", 0, 1, np.float32), Many(comm, "broadcast", last, 100, np.float64, in_place=False),
        Many(comm, "reduce", 0, 2, np.float32), Many(comm, "reduce", last, 60, np.int32, "max", in_place=False),
        Many(comm, "reduce", 0, 7, np.float16), Many(comm, "allreduce", 0, 3, np.float64),
        Many(comm, "reduce", last, 1, np.float64, "mean"), Many(comm, "broadcast", 0, 1000, np.float32),
    ]  # fmt: skip
    chance, own = random.Random(5), random.Random(RANK)  # which call: the same on all ranks; how: each its own way
    wrong = number = 0
    for _ in range(60):
        call = chance.choice(calls)
        for _ in range(chance.choice([1, AFTER - 1, AFTER, AFTER + 1, AFTER + DEPTH, AFTER + 3 * DEPTH])):
            wrong += call.wrong(number, start=own.random() < 0.1)
            number += 1
    assert wrong == 0


@pytest.mark.mpi
@only_on(2, 3)
def test_one_shot_calls(comm, late):
    x, y = np.zeros(3, np.float32), np.zeros(3, np.float32)
    wrong = 0
    for number in range(4 * AFTER + DEPTH):
        x[:], y[:] = RANK + number, RANK - number
        if number < 2 * AFTER + DEPTH:
            collectives.broadcast(x, comm, root=1)
            wrong += int((x != 1 + number).sum())
        else:
            collectives.reduce(y, comm, out=x)
            wrong += int((x != P * (P - 1) // 2 - P * number).sum()) if RANK == 0 else 0
    assert wrong == 0


@pytest.mark.mpi
@only_on(2, 3, 7)
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_numbers_are_used_up_meanwhile(comm, kind):
    call = Many(comm, kind, 0, 4, np.float32)
    there = session(comm).room
    comm.Barrier()
    there.skip_to(room.MOST_OPERATIONS - AFTER - 5, there.phase)
    wrong = sum(call.wrong(number, start=False) for number in range(3 * AFTER + 2 * DEPTH))
    assert (wrong, there.operation < 4 * AFTER + 2 * DEPTH) == (0, True)


ELSEWHERE = {
    "another collective": lambda comm: collectives.allreduce(np.ones(3, np.float32), comm),
    "another length": lambda comm: collectives.broadcast(np.ones(5, np.float32), comm),
    "a plan": lambda comm: collectives.plan("allreduce", np.ones(3, np.float32), comm),
    "arguments that are refused": lambda comm: collectives.allreduce(np.ones((4, 4))[:, 1], comm),
}


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("where", ELSEWHERE)
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_goes_elsewhere_is_heard_of_by_all(comm, kind, who, where):
    call = Many(comm, kind, 0, 1, np.float32)
    for number in range(AFTER + 7):
        call.wrong(number, start=False)

    def goes_on():
        for _ in range(DEPTH + 1):
            call.plan()

    said = outcome(lambda: ELSEWHERE[where](comm)) if who == RANK else outcome(goes_on)
    after = outcome(lambda: collectives.allreduce(np.ones(3), comm))
    said, after = zip(*WORLD.allgather((said, after)))
    assert len(set(said)) == 1 and said[0].startswith("MismatchError: "), said
    if where == "arguments that are refused":
        assert f"rank {who}: x of shape (4,) is not C-contiguous" in said[0]
    else:
        assert f"rank {who}: " in said[0], said
        assert f"{kind} of 1 float32" in said[0], said
    assert all("unusable after" in words for words in after), after


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("start", [False, True])
def test_who_waited_too_long_is_heard_of(comm, start):
    """He may make the call again or not, and the root, which comes late, has made it: they cannot go on as one."""
    call = Many(comm, "broadcast", 0, 2, np.float64)
    wrong = sum(call.wrong(number, start=False) for number in range(AFTER + 3))
    if RANK:
        session(comm).patient(PATIENCE, 0.3)
        said = outcome(lambda: call.wrong(0, start))
    WORLD.Barrier()
    if RANK == 0:
        said = outcome(lambda: [call.wrong(number, start) for number in range(2 * DEPTH)])
    everybody = WORLD.allgather((said, wrong, outcome(call.plan)))
    assert [wrong for _, wrong, _ in everybody] == [0] * P
    assert all("StallError: broadcast" in words for words, *_ in everybody), everybody
    assert all("rank 0 has not come" in words for words, *_ in everybody), everybody
    assert all("unusable after: broadcast" in after for *_, after in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3, 4)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_who_comes_no_more_is_named_by_all(comm, kind, who):
    """By those, too, who wait for one that waits for him."""
    call = Many(comm, kind, 0, 1, np.float32)
    for number in range(AFTER + 3):
        call.wrong(number, start=False)
    session(comm).patient(PATIENCE, 0.5)
    said = ""
    if who != RANK:
        said = outcome(lambda: [call.plan() for _ in range(DEPTH + 1)])
    everybody = WORLD.allgather(said)
    others = {words for rank, words in enumerate(everybody) if rank != who}
    assert len(others) == 1 and "StallError: " in min(others), everybody
    assert f"rank {who} has not come" in min(others), everybody


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_who_is_interrupted_while_he_waits_is_heard_of(comm, alarm, kind):
    """In a broadcast rank 1 waits for the root; in a reduce the root for the others."""
    call = Many(comm, kind, 0, 2, np.float64)
    for number in range(AFTER + 3):
        call.wrong(number, start=False)
    waiting = 1 if kind == "broadcast" else 0

    def goes_on():
        for _ in range(DEPTH + 1):
            call.plan()

    if waiting == RANK:
        alarm(0.3)
        said = outcome(call.plan)
    WORLD.Barrier()
    if waiting != RANK:
        said = outcome(goes_on)
    everybody = WORLD.allgather(said)
    assert everybody[waiting] == "KeyboardInterrupt: "
    heard = [words for rank, words in enumerate(everybody) if rank != waiting]
    assert all(f"rank {waiting} has given up {kind}" in words for words in heard), heard


@pytest.mark.mpi
@only_on(2, 3)
def test_a_sender_waits_for_those_who_are_behind(comm):
    """What lies in a place stays there until all have taken it."""
    call = Many(comm, "broadcast", 0, 1, np.int64)
    for number in range(AFTER):
        call.wrong(number, start=False)
    if RANK == 0:
        for number in range(3 * DEPTH):
            call.x[:] = number
            if number == DEPTH:
                WORLD.Barrier()
            call.plan()
        got = list(range(3 * DEPTH))
    else:
        WORLD.Barrier()
        got = [int(call.plan()[0]) for _ in range(3 * DEPTH)]
    everybody = WORLD.allgather(got)
    assert all(one == list(range(3 * DEPTH)) for one in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3)
def test_a_plan_that_is_freed_meanwhile_and_a_communicator(comm):
    call = Many(comm, "broadcast", 0, 1, np.float32)
    wrong = sum(call.wrong(number, start=False) for number in range(AFTER + 5))
    call.plan.free()
    other = Many(comm, "broadcast", 0, 1, np.float32)
    wrong += sum(other.wrong(number, start=False) for number in range(AFTER + 5))
    assert WORLD.allgather(wrong) == [0] * P


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
@pytest.mark.parametrize("who", [0, 1])
def test_which_arrays_a_rank_brings_is_its_own_business(comm, kind, who):
    """One rank takes other arrays now and then, with one-shot calls, while the others always bring the same."""
    x, y = np.zeros(3, np.float32), np.zeros(3, np.float32)
    wrong = 0
    for number in range(6 * AFTER + 2 * DEPTH):
        mine = y if who == RANK and number // (AFTER + 4) % 2 else x
        mine[:] = RANK + number
        getattr(collectives, kind)(mine, comm)
        expected = number if kind == "broadcast" else P * (P - 1) // 2 + P * number
        wrong += int((mine != expected).sum()) if kind == "broadcast" or RANK == 0 else 0
    assert WORLD.allgather(wrong) == [0] * P


@pytest.mark.mpi
@only_on(2, 3)
@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_many_plans_of_one_call_by_turns(comm, kind, late):
    """As many as each rank likes, and now and then a call of another sort."""
    calls = [Many(comm, kind, 0, 5, np.float32) for _ in range(5)]
    other = Many(comm, "allreduce", 0, 5, np.float32)
    own, wrong = random.Random(RANK), 0
    for number in range(12 * AFTER + 3 * DEPTH):
        wrong += own.choice(calls[: 5 - RANK]).wrong(number, start=own.random() < 0.05)
        wrong += other.wrong(number, start=False) if number % (3 * AFTER) == AFTER else 0
    assert WORLD.allgather(wrong) == [0] * P


@pytest.mark.mpi
@only_on(2, 3)
def test_all_meet_in_an_operation_whose_number_was_once_the_last_of_a_row(comm):
    call, other = Many(comm, "broadcast", 0, 4, np.float32), Many(comm, "allreduce", 0, 4, np.float32, in_place=False)
    wrong = sum(call.wrong(number, start=False) for number in range(AFTER + 5))
    there = session(comm).room
    last = there.operation
    wrong += other.wrong(0, start=False)
    comm.Barrier()
    there.skip_to(room.MOST_OPERATIONS - 3, there.phase)
    for number in range(last + 6):
        if RANK == 1 and there.operation == last - 1:
            time.sleep(0.2)
        wrong += other.wrong(number, start=True)
    assert WORLD.allgather(wrong) == [0] * P
