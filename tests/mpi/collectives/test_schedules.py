"""Every algorithm executed over messages gives what its schedule gives when one process plays it."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from collectives.session import session
from collectives.transport import desks, room
from mpi4py import MPI

import collectives
from collectives.schedule import catalog
from collectives.schedule.model import KINDS, cut
from tests.mpi.sizes import only_on
from tests.unit.collectives.play import play

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


@cache
def values(rank, turn, n):
    """Small whole numbers, so that sums are exact in any order; kept for the next test."""
    return np.random.default_rng([rank, turn]).integers(-9, 9, n).astype(np.float32)


def make(array, n):
    shared = array == "shared" or (array == "mixed" and RANK % 2)
    return collectives.empty(n, np.float32) if shared else np.empty(n, np.float32)


def run(kind, algorithm, array, n, in_place):
    """What the collective leaves on this rank, three times with the same plan."""
    own = int(cut(n, P, RANK + 1)) - int(cut(n, P, RANK))
    wide = n if in_place or kind != "allgather" else own
    narrow = n if in_place else {"reduce_scatter": own, "alltoall": own * P}.get(kind, n)
    x, out = make(array, wide), None if in_place else make(array, narrow)
    words = {"root": ROOT} if kind in ("broadcast", "reduce") else {}
    plan = collectives.plan(kind, x, COMM, algorithm=algorithm, out=out, **words)
    results = []
    for turn in range(3):
        x[:] = values(RANK, turn, wide)
        result = plan()
        results.append(result.tobytes() if kind != "reduce" or RANK == ROOT else b"")
        unread = COMM.Ibarrier()  # others go on at once: nobody may still read what this rank writes next
        x[:] = -1
        unread.Wait()
    plan.free()
    return results


def played(kind, algorithm, n, in_place):
    """The same from the schedule, played on all ranks' vectors."""
    given = {"local": P} if algorithm == "hierarchical" else {}
    schedule = catalog.build(kind, algorithm, P, ROOT if kind in catalog.ROOTED else 0, **given)
    own = slice(int(cut(n, P, RANK)), int(cut(n, P, RANK + 1)))
    results = []
    for turn in range(3):
        vectors = []
        for rank in range(P):
            block = slice(int(cut(n, P, rank)), int(cut(n, P, rank + 1)))
            vectors.append(np.zeros(n, np.float32))
            place = block if kind == "allgather" else slice(None)
            vectors[-1][place] = values(rank, turn, n)[place] if in_place or kind != "allgather" else values(
                rank, turn, block.stop - block.start
            )
        result = play(schedule, vectors)[RANK]
        result = result[own] if kind == "reduce_scatter" else result
        results.append(result.tobytes() if kind != "reduce" or RANK == ROOT else b"")
    return results


@pytest.mark.mpi
@pytest.mark.parametrize("kind, algorithm", CASES)
def test_messages_give_what_the_schedule_promises(kind, algorithm):
    wrong = []
    for n, in_place in ((0, False), (1, False), (P, True), (P + 1, False), (5003, False), (15_000 * P, True)):
        if kind == "alltoall":
            n = -(-n // P) * P
        wanted = played(kind, algorithm, n, in_place)
        for array in ("ordinary", "shared", "mixed"):
            if run(kind, algorithm, array, n, in_place) != wanted:
                wrong.append((array, n, "in place" if in_place else "beside"))
    assert not wrong


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


@only_on(1, 2, 3)
@pytest.mark.mpi
def test_many_lanes():
    x = np.ones(3000)
    collectives.allreduce(x, COMM, algorithm="multi_ring(rings=300)")
    assert (x == P).all()


@pytest.mark.parametrize("size", [1, 3, 256, 257, 1000])
def test_all_ranks_of_a_large_node_have_a_stage_for_each(size):
    desk = np.zeros(desks.desk_bytes(size), np.uint8)
    there = room.Room(SimpleNamespace(rank=0, size=size), range(size), [desk] * size, None)
    last = there.stage_in(0, 1, size - 1)
    assert there.block_bytes == last.size > 0
    assert last.size % 64 == 0


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
