"""Every collective, by every algorithm and way to call, on ordinary and node-shared arrays, against NumPy.

A rank asserts when all collectives of a test are done: ranks meet at its end, and do not wait for each other before.
"""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import communicator as communicators
from collectives.kernels import engine
from collectives.schedule import catalog
from tests.mpi.collectives.support import KINDS, NODES, RANK, TOTAL, WORLD, P, block, fresh, make, polled, started
from tests.mpi.sizes import core_on, either_mpi, only_on
from tests.pages import failed_examples

ROOT = P // 2
BETWEEN = ("auto", "native", "hierarchical", "hierarchical(between=halving_doubling)")
ON_ONE_NODE = (
    "auto",
    "shared_memory",
    "native",
    *catalog.ALGORITHMS,
    "multi_ring(rings=3)",
    "bcube(n=2,k=2)",
    f"bcube(n={P},k=1)",
    "hierarchical(local=2,between=halving_doubling)",
    BETWEEN[-1],
)


def serves(nodes, kind, algorithm):
    name = algorithm.partition("(")[0]
    if name == "hierarchical" and "local" not in algorithm:
        even = nodes != "nodes of two" or P % 2 == 0
        return kind == "allreduce" and even
    return name in ("auto", "shared_memory", "native") or catalog.serves(kind, algorithm, P) is None


CASES = [
    (nodes, kind, algorithm)
    for nodes in NODES
    for kind, algorithm in product(KINDS, ON_ONE_NODE if nodes == "one node" else BETWEEN)
    if serves(nodes, kind, algorithm)
]


@cache
def comm_of(nodes):
    return NODES[nodes](WORLD.Dup())


@cache
def arrangement(kind, n, dtype):
    """(this rank's whole vector, the size of its out, the result it should get); kept for the next test."""
    xs = [((np.arange(n) * 7 + rank * 13) % 5 + 1).astype(dtype) for rank in range(P)]
    mine = block(n)
    size = mine.stop - mine.start
    total = sum(x.astype(np.float64) for x in xs).astype(dtype)
    return {
        "allreduce": (xs[RANK], n, total),
        "reduce_scatter": (xs[RANK], size, total[mine]),
        "allgather": (xs[RANK], n, np.concatenate([x[block(n, rank)] for rank, x in enumerate(xs)])),
        "broadcast": (xs[RANK], n, xs[ROOT]),
        "reduce": (xs[RANK], n, total),
        "alltoall": (xs[RANK], size * P, np.concatenate([x[mine] for x in xs])),
    }[kind]


def turns(nodes, kind, algorithm, array, n, in_place, way):
    """Turns, of three, in which this rank gets what it should not, or finds its x changed."""
    values, size, wanted = arrangement(kind, n, np.float32)
    brought = values if in_place or kind != "allgather" else values[block(n)]
    x = make(array, brought.size)
    out = None if in_place else make(array, size)
    words = {"root": ROOT} if kind in ("broadcast", "reduce") else {}
    if way == "blocking":
        run = partial(getattr(collectives, kind), x, comm_of(nodes), algorithm=algorithm, out=out, **words)
    else:
        plan = collectives.plan(kind, x, comm_of(nodes), algorithm=algorithm, out=out, **words)
        run = {"plan": plan, "tested": partial(polled, plan), "waited": partial(started, plan)}[way]
    wrong = []
    for turn in range(3):
        x[:] = brought + turn
        result = run()
        if turn == 0:
            # later turns take the compiled way
            engine.load_all()
        added = turn * P if kind in ("allreduce", "reduce", "reduce_scatter") else turn
        right = np.array_equal(result, wanted + added) or (kind == "reduce" and RANK != ROOT)
        right &= in_place or (result is out and np.array_equal(x, brought + turn))
        unread = WORLD.Ibarrier()  # others go on at once: nobody may still read what this rank writes next
        x[:] = -1
        unread.Wait()
        wrong += [] if right else [turn]
    return wrong


@either_mpi
@pytest.mark.parametrize("nodes, kind, algorithm", CASES)
def test_results(nodes, kind, algorithm):
    wrong = {}
    ways = ("blocking", "plan", "tested", "waited")
    sizes = ((0, False), (1, True), (P + 1, False), (P, True), (1001, False), (200_003, False), (20_000 * P, True))
    for i, (n, in_place) in enumerate(sizes):
        if kind == "alltoall" and in_place and n % P:
            continue
        for j, array in enumerate(("ordinary", "shared", "mixed")):
            way = ways[(i + j + len(algorithm)) % 4]
            if found := turns(nodes, kind, algorithm, array, n, in_place, way):
                wrong[n, in_place, array, way] = found
    assert not wrong


@only_on(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint16", "int32", "int64"])
def test_types_and_operations(dtype):
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype)
    reductions = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}
    wrong = []
    for op, algorithm, n in product(reductions, ("auto", "native", "direct"), (1, 2, 5, 40_000)):
        if op == "mean" and dtype.kind in "iu":
            continue  # refused
        if algorithm == "native" and dtype.itemsize == 2 and dtype.kind not in "iu":
            continue  # MPI has no 16-bit floating-point type
        xs = np.stack([np.arange(n) % 3 + (rank % 2) + (0 if op == "prod" else 1) for rank in range(P)])
        wanted = reductions[op](xs.astype(np.float64), axis=0)
        x = np.empty(n, dtype)
        rounded = wanted.astype(dtype).astype(np.float64)
        for turn in range(3 if n < 5 else 1):  # the same call again takes shorter ways
            x[...] = xs[RANK]
            collectives.allreduce(x, WORLD, op=op, algorithm=algorithm)
            if turn == 0:
                engine.load_all()
            if not np.allclose(x.astype(np.float64), rounded, rtol=2e-2 if dtype.itemsize == 2 else 1e-6):
                wrong.append((op, algorithm, n, turn))
    assert not wrong


@pytest.mark.parametrize(
    "nodes, algorithm",
    [
        *(("one node", each) for each in ("auto", "native", "ring", "recursive_doubling", "hierarchical")),
        *[("nodes of two", "hierarchical")] * (P % 2 == 0),
    ],
)
def test_every_rank_gets_the_same_bits(nodes, algorithm):
    wrong = []
    for array, n in product(("ordinary", "shared"), (3, 5003, 300_007)):
        x = make(array, n)
        x[:] = np.random.default_rng(RANK).standard_normal(n)
        collectives.allreduce(x, comm_of(nodes), algorithm=algorithm)
        if len(set(WORLD.allgather(x.tobytes()[:4096] + x.tobytes()[-4096:]))) > 1:
            wrong.append((array, n))
    assert not wrong


def test_views_shapes_and_odd_places():
    x = np.full((6, 4), RANK + 1.0)
    right = [collectives.allreduce(x, WORLD) is x, (x == TOTAL).all()]
    for row in range(2):
        collectives.allreduce(x[row], WORLD, op="max")  # a new view object for every call
        collectives.broadcast(x[row : row + 2], WORLD)
    right.append((x == TOTAL).all())
    for n in (1, 3):
        askew = np.zeros(8 * n + 1, np.uint8)[1:].view(np.float64)
        askew[:] = 1
        collectives.allreduce(askew, WORLD)
        right.append((askew == P).all())
    assert all(right)


@only_on(3)
def test_nodes_of_unlike_size_are_refused_on_all_ranks():
    with pytest.raises(ValueError, match="equal numbers of consecutive ranks"):
        collectives.allreduce(np.ones(5), comm_of("nodes of two"), algorithm="hierarchical")


@core_on(3)
def test_more_lanes_than_a_plan_mostly_has():
    x = np.ones(3000)
    collectives.allreduce(x, WORLD, algorithm="multi_ring(rings=300)")
    assert (x == P).all()


@pytest.mark.parametrize("kind", ["allreduce", "reduce", "broadcast"])
@pytest.mark.parametrize("nodes", ["one node", "a node for each rank"])
def test_arrays_made_anew_at_each_call(nodes, kind):
    """Of either sort by chance on each rank; some are kept for a while, so that others lie where they lay."""
    chance, wrong, kept, same = np.random.default_rng(RANK), [], [], np.random.default_rng(0)
    for turn in range(100):
        n = int(same.choice([1, 10, 3000, 50_000]))
        x = make("shared" if chance.random() < 0.3 else "ordinary", n)
        x[:] = np.arange(n) % 97 + RANK + turn
        getattr(collectives, kind)(x, comm_of(nodes))
        base = np.arange(n) % 97 + turn
        wanted = base if kind == "broadcast" else base * P + P * (P - 1) // 2
        if (kind != "reduce" or RANK == 0) and not np.array_equal(x, wanted):
            wrong.append(turn)
        x[:] = -5
        kept = [*kept[-4:], x] if chance.random() < 0.5 else []
    assert not wrong, "turns"


@pytest.mark.parametrize("fence", [False, True])
def test_communicators_of_some_ranks(fence, monkeypatch):
    """In another order; with fences as on processors that reorder stores."""
    if fence:
        monkeypatch.setattr(communicators, "open_memory", partial(communicators.open_memory, fenced=True))
    part, right = WORLD.Split(RANK % 2, -RANK), []
    wanted = sum(rank for rank in range(P) if rank % 2 == RANK % 2)
    for n in (5, 5, 100_000, 100_000):
        x = np.full(n, RANK, np.int64)
        collectives.allreduce(x, part)
        root = np.array([part.rank])
        collectives.broadcast(root, part, root=part.size - 1)
        right.append((x == wanted).all() and root[0] == part.size - 1)
    part.Free()
    assert all(right)


@pytest.mark.parametrize("dtype", ["<u4", ">u8"])
@pytest.mark.parametrize("kind", ["allgather", "broadcast", "alltoall"])
def test_floats_that_are_moved_keep_all_their_bits(kind, dtype):
    """Also those of a signalling NaN, and in the other order of bytes; call after call."""
    n, pattern, wrong = 3 * P, 0x7FA00000 if dtype == "<u4" else 0x7FF4 << 48, []
    floats = np.dtype(dtype.replace("u", "f"))
    for turn in range(4):
        xs = [np.full(n, pattern + 16 * turn + rank, dtype) for rank in range(P)]
        x, expected = {
            "allgather": (xs[RANK][block(n)], np.repeat([x[0] for x in xs], 3)),
            "broadcast": (xs[RANK][:3], xs[ROOT][:3]),
            "alltoall": (xs[RANK], np.repeat([x[0] for x in xs], 3)),
        }[kind]
        out = np.zeros(expected.size, dtype)
        words = {"root": ROOT} if kind == "broadcast" else {}
        getattr(collectives, kind)(x.view(floats), WORLD, out=out.view(floats), **words)
        if out.tobytes() != expected.astype(dtype).tobytes():
            wrong.append(turn)
    assert not wrong


@pytest.mark.parametrize("kind", [*KINDS, "grouped_allreduce"])
def test_the_example_of_each_call_gives_what_it_says(kind):
    assert not failed_examples(getattr(collectives, kind), collectives=collectives, np=np, MPI=MPI)


@only_on(2, 3)
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
@pytest.mark.parametrize("array, n", [("ordinary", 3), ("ordinary", 300_000), ("shared", 300_000)])
def test_calls_go_on_when_the_numbers_of_operations_are_used_up(algorithm, array, n):
    """As after two hours of calls of two microseconds."""
    with fresh() as comm:
        x, faults = make(array, n), []
        board = communicators.communicator(comm).board
        for call in range(8):
            if call == 3:
                comm.Barrier()
                board.number = (1 << 32) - 3
                comm.Barrier()
            x[:] = RANK + call
            collectives.allreduce(x, comm, algorithm=algorithm)
            faults.append(int((x != P * call + P * (P - 1) // 2).sum()))
        assert (faults, board.number < 100) == ([0] * 8, True)
