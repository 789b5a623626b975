"""One schedule, two transports: messages and the memory of the node give the same bits, for every algorithm."""

from __future__ import annotations

import re
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.errors import CollectiveError, MismatchError
from collectives.schedule import catalog
from collectives.schedule.model import KINDS, cut
from collectives.session import session
from collectives.transport import desks, room
from tests.mpi.sizes import only_on

COMM = MPI.COMM_WORLD
RANK, P = COMM.rank, COMM.size
ROOT = P // 2
VARIANTS = (
    *catalog.ALGORITHMS, "multi_ring(rings=3)", "bcube(n=2,k=2)", f"bcube(n={P},k=1)",
    "hierarchical(local=2,between=halving_doubling)", "hierarchical(local=2,between=multi_ring)",
)  # fmt: skip


def serves(kind, algorithm):
    return (algorithm, kind) == ("hierarchical", "allreduce") or catalog.serves(kind, algorithm, P) is None


CASES = [(kind, name) for kind in KINDS for name in VARIANTS if serves(kind, name)]


def over(algorithm, transport):
    name, _, rest = algorithm.partition("(")
    return f"{name}({rest.removesuffix(')') + ',' if rest else ''}over={transport})"


@cache
def floats(turn, n):
    """Random floats of this rank, kept for the next test."""
    return np.random.default_rng([RANK, turn]).standard_normal(n).astype(np.float32)


def make(array, n):
    shared = array == "shared" or (array == "mixed" and RANK % 2)
    return collectives.empty(n, np.float32) if shared else np.empty(n, np.float32)


def run(kind, algorithm, array, n, in_place):
    """What the collective leaves on this rank for random floats, three times with the same plan."""
    own = int(cut(n, P, RANK + 1)) - int(cut(n, P, RANK))
    wide = n if in_place or kind != "allgather" else own
    narrow = n if in_place else {"reduce_scatter": own, "alltoall": own * P}.get(kind, n)
    x, out = make(array, wide), None if in_place else make(array, narrow)
    words = {"root": ROOT} if kind in ("broadcast", "reduce") else {}
    plan = collectives.plan(kind, x, COMM, algorithm=algorithm, out=out, **words)
    results = []
    for turn in range(3):
        x[:] = floats(turn, wide)
        result = plan()
        results.append(result.tobytes() if kind != "reduce" or RANK == ROOT else b"")
        unread = COMM.Ibarrier()  # others go on at once: nobody may still read what this rank writes next
        x[:] = -1
        unread.Wait()
    plan.free()
    return results


@pytest.mark.mpi
@pytest.mark.parametrize("kind, algorithm", CASES)
def test_both_give_the_same_bits(kind, algorithm):
    wrong = []
    for n, in_place in ((0, False), (1, False), (P, True), (P + 1, False), (5003, False), (15_000 * P, True)):
        sent = run(kind, over(algorithm, "messages"), "mixed", n, in_place)
        for array in ("ordinary", "shared", "mixed"):
            if run(kind, over(algorithm, "memory"), array, n, in_place) != sent:
                wrong.append((array, n, "in place" if in_place else "beside"))
    assert not wrong


@pytest.mark.mpi
def test_memory_is_taken_where_all_are_on_one_node():
    x = np.full(1000, RANK + 1.0)
    collectives.plan("allreduce", x, COMM, algorithm="ring")()
    assert (x == P * (P + 1) / 2).all()


@pytest.mark.mpi
def test_several_started_plans_take_turns():
    xs = [make("mixed", n) for n in (7, 50_000, 200_000)]
    plans = [collectives.plan("allreduce", x, COMM, algorithm=name) for x, name in zip(xs, ("ring", "direct", "ring"))]
    wrong = []
    for turn in range(3):
        for x, plan in zip(xs, plans):
            x[:] = RANK + turn
            plan.start()
        while not plans[-1].test():
            pass
        for plan in plans:
            plan.wait()
        wrong += [(turn, len(x)) for x in xs if (x != P * (P - 1) // 2 + P * turn).any()]
    assert not wrong, "turns and numbers of elements"


@pytest.mark.mpi
def test_an_unknown_transport_is_refused():
    with pytest.raises(MismatchError, match="memory, messages"):
        collectives.allreduce(np.ones(3), COMM, algorithm="ring(over=pigeon)")


@only_on(1, 2, 3)
@pytest.mark.mpi
def test_more_lanes_than_marks_are_refused_with_the_way_out():
    x = np.ones(3000)
    with pytest.raises(MismatchError, match="over=messages"):
        collectives.allreduce(x, COMM, algorithm="multi_ring(rings=300)")
    collectives.allreduce(x, COMM, algorithm="multi_ring(rings=300,over=messages)")
    assert (x == P).all()


@pytest.mark.parametrize("size", [1, 3, 256, 257, 1000])
def test_all_ranks_of_a_large_node_have_a_stage_for_each(size):
    desk = np.zeros(desks.desk_bytes(size), np.uint8)
    there = room.Room(SimpleNamespace(rank=0, size=size), range(size), [desk] * size, None)
    last = there.stage_in(0, 1, size - 1)
    assert there.block_bytes == last.size > 0
    assert last.size % 64 == 0


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_stops_in_the_middle_is_named():
    """It has started the collective, but does not go on with it."""
    comm = COMM.Dup()
    x = collectives.empty(1000, np.float32)
    x[:] = 1
    home = session(comm)
    plan = collectives.plan("allreduce", x, comm, algorithm="ring")
    plan()
    home.timeout_seconds = 1
    said = ""
    plan.start()
    if RANK:
        try:
            while not said:
                plan.wait()
                said = "done"
        except CollectiveError as error:
            said = str(error)
    COMM.Barrier()
    everybody_said = COMM.allgather(said)
    comm.Free()
    named = re.compile(r": ranks? 0\b.* (has|have) not come")  # others may be slow too
    assert all(named.search(words) or words == "done" for words in everybody_said[1:]), everybody_said


@pytest.mark.mpi
@only_on(2, 3, 7)
@pytest.mark.parametrize("array", ["ordinary", "empty"])
@pytest.mark.parametrize("algorithm", ["auto", "ring", "native"])
@pytest.mark.parametrize("n", [3, 1000, 300_000])
def test_operations_go_on_when_their_numbers_are_used_up(algorithm, array, n):
    """As after two hours of calls of two microseconds."""
    comm = COMM.Dup()
    x = collectives.empty(n, np.float32, comm) if array == "empty" else np.empty(n, np.float32)
    plan = collectives.plan("allreduce", x, comm, algorithm=algorithm)
    there = session(comm).room
    faults = []
    for call in range(8):
        if call == 3:
            comm.Barrier()
            there.skip_to(room.MOST_OPERATIONS - 2, there.phase)
        x[:] = RANK + call
        plan() if call % 2 else collectives.allreduce(x, comm, algorithm=algorithm)
        faults.append(int((x != P * call + P * (P - 1) // 2).sum()))
    rounds = COMM.allgather((faults, there.operation < 100))
    del plan, x
    comm.Free()
    assert all(one == ([0] * 8, True) for one in rounds), rounds
