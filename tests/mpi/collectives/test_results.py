"""Every collective, by every algorithm, on ordinary and node-shared arrays, in place and not, against NumPy.

A rank asserts when all collectives of a test are done: ranks meet at its end, and do not wait for each other before.
"""

from __future__ import annotations

import doctest
from functools import cache

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.schedule import catalog
from collectives.schedule.model import KINDS, cut
from tests.mpi.sizes import only_on

COMM = MPI.COMM_WORLD
RANK, P = COMM.rank, COMM.size
ROOT = P - 1
BOUNDS = {}
OWN_ALGORITHMS = ("auto", "shared_memory", "native")


def bounds(n):
    return [int(cut(n, P, rank)) for rank in range(P + 1)]


def contribution(rank, n, dtype):
    return ((np.arange(n) * 7 + rank * 13) % 5 + 1).astype(dtype)


@cache
def arrangement(kind, n, dtype):
    """(this rank's x, the size of its out, the result it should get); the arrays are kept for the next test."""
    b = bounds(n)
    own = slice(b[RANK], b[RANK + 1])
    xs = [contribution(rank, n, dtype) for rank in range(P)]
    total = sum(x.astype(np.float64) for x in xs).astype(dtype)
    gathered = np.concatenate([xs[rank][b[rank] : b[rank + 1]] for rank in range(P)])
    arrived = np.concatenate([x[own] for x in xs])
    size = own.stop - own.start
    for kept in (*xs, total, gathered, arrived):
        kept.flags.writeable = False
    return {
        "allreduce": (xs[RANK], n, total),
        "reduce_scatter": (xs[RANK], size, total[own]),
        "allgather": (xs[RANK][own], n, gathered),
        "broadcast": (xs[RANK], n, xs[ROOT]),
        "reduce": (xs[RANK], n, total),
        "alltoall": (xs[RANK], size * P, arrived),
    }[kind]


def make(array, values):
    where = array if array != "mixed" else ("ordinary", "shared")[RANK % 2]
    made = collectives.empty(values.size, values.dtype) if where == "shared" else np.empty(values.size, values.dtype)
    made[:] = values
    return made


def call(kind, x, **keywords):
    if kind in ("broadcast", "reduce"):
        keywords["root"] = ROOT
    return getattr(collectives, kind)(x, COMM, **keywords)


def serves(kind, algorithm):
    return algorithm in OWN_ALGORITHMS or catalog.serves(kind, algorithm, P) is None


CASES = [(kind, name) for kind in KINDS for name in (*OWN_ALGORITHMS, *catalog.ALGORITHMS) if serves(kind, name)]


@pytest.mark.mpi
@pytest.mark.parametrize("array", ["ordinary", "shared", "mixed"])
@pytest.mark.parametrize("kind, algorithm", CASES)
def test_out_of_place(kind, algorithm, array):
    wrong = []
    for n in (0, 1, P + 1, 1001, 200_003):
        values, size, wanted = arrangement(kind, n, np.float32)
        x, out = make(array, values), make(array, np.full(size, -1, np.float32))
        result = call(kind, x, algorithm=algorithm, out=out)
        relevant = kind != "reduce" or RANK == ROOT
        right = {
            "out came back": result is out,
            "out is right": np.array_equal(out, wanted) or not relevant,
            "x is unchanged": np.array_equal(x, values),
        }
        wrong += [(n, what) for what, ok in right.items() if not ok]
    assert not wrong


@pytest.mark.mpi
@pytest.mark.parametrize("array", ["ordinary", "shared", "mixed"])
@pytest.mark.parametrize("kind, algorithm", CASES)
def test_in_place(kind, algorithm, array):
    wrong = []
    for n in (0, 1, P, 1000 * P, 20_000 * P):
        if kind == "alltoall" and n % P:
            continue
        values, _, wanted = arrangement(kind, n, np.float32)
        if kind == "allgather":
            whole = np.zeros(n, np.float32)
            whole[slice(*bounds(n)[RANK : RANK + 2])] = values
            values = whole
        x = make(array, values)
        for _ in range(2):  # a second call of the same arrays takes the kept plan
            x[:] = values
            result = call(kind, x, algorithm=algorithm)
            if not np.array_equal(result, wanted) and (kind != "reduce" or RANK == ROOT):
                wrong.append(n)
    assert not wrong, "numbers of elements"


@only_on(1, 2, 3)
@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "uint16", "int32", "int64"])
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod", "mean"])
@pytest.mark.parametrize("algorithm", ["auto", "native", "direct"])
def test_types_and_operations(algorithm, op, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    dtype = np.dtype(dtype)
    if op == "mean" and dtype.kind in "iu":
        pytest.skip("the mean of integers is refused")
    if algorithm == "native" and dtype.itemsize == 2 and dtype.kind not in "iu":
        pytest.skip("MPI has no 16-bit floating-point type")
    reductions = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}
    wrong = []
    for n in (5, 40_000):
        xs = np.stack([np.arange(n) % 3 + (rank % 2) + (0 if op == "prod" else 1) for rank in range(P)])
        wanted = reductions[op](xs.astype(np.float64), axis=0)
        x = xs[RANK].astype(dtype)
        collectives.allreduce(x, COMM, op=op, algorithm=algorithm)
        rounded = wanted.astype(dtype).astype(np.float64)
        tolerance = 2e-2 if dtype.itemsize == 2 else 1e-6
        if not np.allclose(x.astype(np.float64), rounded, rtol=tolerance):
            wrong.append(n)
    assert not wrong, "numbers of elements"


@pytest.mark.mpi
@pytest.mark.parametrize("array", ["ordinary", "shared"])
@pytest.mark.parametrize("algorithm", ["auto", *(name for name in catalog.ALGORITHMS if serves("allreduce", name))])
def test_every_rank_gets_the_same_bits(algorithm, array):
    wrong = []
    for n in (3, 5003, 300_007):
        x = make(array, np.random.default_rng(RANK).standard_normal(n).astype(np.float32))
        collectives.allreduce(x, COMM, algorithm=algorithm)
        if x.tobytes() != COMM.bcast(x.tobytes()):
            wrong.append(n)
    assert not wrong, "numbers of elements"


@pytest.mark.mpi
def test_views_and_shapes():
    x = np.full((6, 4), RANK + 1.0)
    result = collectives.allreduce(x, COMM)
    total = P * (P + 1) / 2
    right = result is x and (x == total).all()
    for row in range(2):
        collectives.allreduce(x[row], COMM, op="max")  # a new view object for every call
        collectives.broadcast(x[row : row + 2], COMM)
    assert right and (x == total).all()


@pytest.mark.mpi
def test_other_memory_at_another_time():
    """Arrays come and go, on each rank in its own way, and plans are not mixed up."""
    rng, wrong = np.random.default_rng(7), []
    for i in range(40):
        n = int(rng.choice([10, 3000, 50_000]))
        shared = (i + RANK) % 3 == 0
        x = collectives.empty(n, np.float32) if shared else np.empty(n, np.float32)
        x[:] = RANK + i
        collectives.allreduce(x, COMM)
        if (x != sum(rank + i for rank in range(P))).any():
            wrong.append(i)
        if (i + RANK) % 2:
            kept = x  # noqa: F841  keeps this rank's memory in use for one more turn
    assert not wrong, "turns"


@pytest.mark.mpi
@pytest.mark.parametrize("fence", [False, True])
def test_a_part_of_the_world(fence, monkeypatch):
    """Communicators of some ranks, in another order; with fences as on processors that reorder stores."""
    if fence:
        from collectives.transport.room import Room

        opened = Room.open
        monkeypatch.setattr(Room, "open", lambda node, names: opened(node, names, fenced=True))
    part, right = COMM.Split(RANK % 2, -RANK), True
    for n in (5, 100_000):
        x = np.full(n, RANK, np.int64)
        collectives.allreduce(x, part)
        root = np.array([part.rank])
        collectives.broadcast(root, part, root=part.size - 1)
        right &= (x == sum(rank for rank in range(P) if rank % 2 == RANK % 2)).all() and root[0] == part.size - 1
    part.Free()
    assert right


@pytest.mark.mpi
@pytest.mark.parametrize("array", ["ordinary", "shared", "mixed"])
@pytest.mark.parametrize("kind", ["allgather", "broadcast", "alltoall"])
def test_long_vectors_while_it_is_tried_what_is_faster(kind, array):
    n = 150_000 * P + 300_000
    values, size, wanted = arrangement(kind, n, np.float32)
    x, out = make(array, values), make(array, np.full(size, -1, np.float32))
    wrong = []
    for turn in range(12):
        out[:] = -1
        x[:] = values + turn
        call(kind, x, out=out)
        if not np.array_equal(out, wanted + turn):
            wrong.append(turn)
    assert not wrong, "calls"


@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["<u4", ">u8"])
@pytest.mark.parametrize("kind", ["allgather", "broadcast", "alltoall"])
def test_a_few_floats_that_are_moved_keep_all_their_bits(kind, dtype):
    """Also those of a signalling NaN, and in the other order of bytes; call after call."""
    n, pattern, wrong = 3 * P, 0x7FA00000 if dtype == "<u4" else 0x7FF4 << 48, []
    b, floats = bounds(n), np.dtype(dtype.replace("u", "f"))
    own = slice(b[RANK], b[RANK + 1])
    for turn in range(4):
        xs = [np.full(n, pattern + 16 * turn + rank, dtype) for rank in range(P)]
        x, expected = {
            "allgather": (xs[RANK][own], np.concatenate([xs[r][b[r] : b[r + 1]] for r in range(P)])),
            "broadcast": (xs[RANK][:3], xs[ROOT][:3]),
            "alltoall": (xs[RANK], np.concatenate([x[own] for x in xs])),
        }[kind]
        expected = expected.astype(dtype)  # concatenate has the machine's order of bytes
        if turn == 0:
            source, out = x.copy(), np.zeros_like(expected)
        source[:], out[:] = x, 0
        words = {"root": ROOT} if kind == "broadcast" else {}
        getattr(collectives, kind)(source.view(floats), out=out.view(floats), **words)
        if out.tobytes() != expected.tobytes():
            wrong.append(turn)
    assert not wrong


@pytest.mark.mpi
@pytest.mark.parametrize("kind", KINDS)
def test_the_example_of_each_call_gives_what_it_says(kind):
    call = getattr(collectives, kind)
    test = doctest.DocTestParser().get_doctest(
        call.__doc__, {"collectives": collectives, "np": np, "MPI": MPI}, kind, None, None
    )
    said = []
    outcome = doctest.DocTestRunner().run(test, out=said.append)
    assert COMM.allreduce(bool(outcome.attempted and not outcome.failed), MPI.LAND), "".join(said)
