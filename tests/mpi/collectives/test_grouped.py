"""`grouped_allreduce`: many unlike arrays in one call, each summed across ranks, and apart from each other."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from tests.choice import once
from tests.mpi.collectives.support import NODES, RANK, WORLD, P, block, fresh, make

SHAPES = [(5,), (), (0,), (3, 4), (70_000,), (1,), (2, 0), (250_001,), (16_385,)]
DTYPES = ["float32", "float64", "float16", "int64"]
OPS = {"sum": np.sum, "max": np.max, "mean": np.mean}


@pytest.fixture(scope="module", params=NODES)
def comm(request):
    with fresh(request.param) as made:
        yield made


def group(rank, turn, dtypes=DTYPES):
    """What a rank brings."""
    kinds = [(shape, dtypes[i % len(dtypes)]) for i, shape in enumerate(SHAPES)]
    return [
        ((np.arange(np.prod(shape, dtype=int)) % 7 + i + rank) * 2 + turn).reshape(shape).astype(dtype)
        for i, (shape, dtype) in enumerate(kinds)
    ]


def placed(array, values):
    found = [make(array, one.size, one.dtype).reshape(one.shape) for one in values]
    for to, one in zip(found, values):
        to[...] = one
    return found


@once(array=["ordinary", "shared", "mixed", "by turns"], op=OPS)
def test_each_array_is_reduced_on_its_own(comm, op, array):
    wrong = []
    dtypes = DTYPES[:3] if op == "mean" else DTYPES
    kinds = ("ordinary", "shared") if array == "by turns" else (array,)
    for turn in range(4):
        given = group(RANK, turn, dtypes)
        wanted = [OPS[op](ones, axis=0) for ones in zip(*(group(rank, turn, dtypes) for rank in range(P)))]
        x = placed(kinds[turn % len(kinds)], given)
        out = placed(kinds[-1], given) if turn % 2 else None
        result = collectives.grouped_allreduce(x, comm, op=op, out=out)
        for i, (one, want) in enumerate(zip(result, wanted)):
            if one is not (x if out is None else out)[i] or not np.allclose(one, want, rtol=2e-3):
                wrong.append((turn, i))
            if out is not None and not np.array_equal(x[i], given[i]):
                wrong.append((turn, i, "x has changed"))
    assert not wrong


def test_new_arrays_that_take_the_place_of_freed_ones(comm):
    """Views made and dropped in turn are often the same objects again, with other memory."""
    memory = np.zeros((8, 2, 5000), np.float32)
    for part in memory:
        part[...] = RANK + 1
        collectives.grouped_allreduce([part[0], part[1, :77]], comm)
    total = P * (P + 1) / 2
    assert (memory[:, 0] == total).all()
    assert (memory[:, 1, :77] == total).all()
    assert (memory[:, 1, 77:] == RANK + 1).all()


@pytest.mark.parametrize("algorithm", ["ring", "native", "direct", "auto"])
def test_by_other_algorithms(comm, algorithm):
    x = [np.full(n, RANK + 1.0, dtype) for n, dtype in ((10, "float32"), (90_000, "float64"), (3, "int32"))]
    for _ in range(2):
        for one in x:
            one[:] = 1
        collectives.grouped_allreduce(x, comm, algorithm=algorithm)
        assert all((one == P).all() for one in x)


@once(array=["ordinary", "shared", "mixed"], sizes=[[70_001], [5, 70_001, 300_000, 0], [3]])
def test_a_ranks_block_of_each_result_goes_elsewhere_too(comm, array, sizes):
    wanted = [P * (np.arange(n) % 9) + P * (P + 1) // 2 for n in sizes]
    blocks = [np.full(n, -1, np.float32) for n in sizes]
    for turn in range(4):
        x = placed(array, [np.arange(n, dtype=np.float32) % 9 + RANK + 1 for n in sizes])
        out = placed(array, x) if turn % 2 else None
        mine = None if RANK == 1 and turn == 2 else [None if turn == 3 else blocks[0], *blocks[1:]]
        result = collectives.grouped_allreduce(x, comm, algorithm="reproducible", out=out, blocks=mine)
        assert all(np.array_equal(one, want) for one, want in zip(result, wanted))
        for want, found in zip(wanted, blocks):
            mine = block(want.size)
            assert np.array_equal(found[mine], want[mine])
            assert (np.delete(found, mine) == -1).all()
    tied, blocks = placed(array, [np.ones(70_001)])[0], [np.zeros(70_001), np.zeros(70_001)]
    collectives.grouped_allreduce([tied, tied], comm, blocks=blocks)
    assert [int(one.sum()) for one in blocks] == [P * np.ones(70_001)[block(70_001)].size] * 2


@pytest.mark.parametrize("x", [[], [np.ones(0)], [np.ones(0, np.float32), np.ones((0, 3))]])
def test_nothing_to_reduce(comm, x):
    assert len(collectives.grouped_allreduce(x, comm)) == len(x)


@pytest.mark.parametrize(
    "x, words, said",
    [
        ([np.ones(3), "x"], {}, "arrays.1"),
        ([np.ones((4, 4))[:, 1]], {}, "C-contiguous"),
        ([np.ones(3), np.ones(2, np.int64)], {"op": "mean"}, "mean"),
        ([np.ones(3)], {"out": [np.ones(3), np.ones(3)]}, "1 arrays and out 2"),
        ([np.ones(3)], {"out": [np.ones(4)]}, "same size"),
        ([np.ones(3)], {"algorithm": "quicksort"}, "quicksort"),
        ([np.ones(3)], {"op": "xor"}, "xor"),
        ([np.ones(3)], {"op": MPI.SUM}, "of type Op: pass one of sum"),
    ],
)
def test_what_is_refused(comm, x, words, said):
    """On one rank: nobody else hears of it."""
    if RANK == 0:
        with pytest.raises((ValueError, TypeError), match=said):
            collectives.grouped_allreduce(x, comm, **words)
    good = [np.ones(3)]
    collectives.grouped_allreduce(good, comm)
    assert (good[0] == P).all()


def test_many_groups_of_as_many_bytes():
    """Groups that differ only in how their bytes are shared out."""
    wrong = []
    for turn in range(30):
        n = 1 + turn % 9
        x = [np.full(n, RANK + 1.0), np.full(10 - n, RANK + 2.0)]
        collectives.grouped_allreduce(x, WORLD)
        total = P * (P + 1) // 2
        wrong += [turn] * bool((x[0] != total).any() or (x[1] != total + P).any())
    assert not wrong


@pytest.mark.parametrize("n", [10, 100_000])
@pytest.mark.parametrize("array", ["ordinary", "shared"])
def test_an_array_that_is_there_twice_is_reduced_once(comm, array, n):
    x, y = placed(array, [np.full(n, RANK + 1.0), np.full(n, RANK + 2.0)])
    collectives.grouped_allreduce([x, y, x], comm)
    total = P * (P + 1) / 2
    assert (x == total).all() and (y == total + P).all()


def test_results_that_overlap_are_refused_on_this_rank_alone(comm):
    x = np.ones(200_000)
    with pytest.raises(ValueError, match="arrays 0 and 1 overlap"):
        collectives.grouped_allreduce([x[:150_000], x[100_000:]], comm)
    with pytest.raises(ValueError, match=r"arrays\[1\] and its out overlap"):
        collectives.grouped_allreduce([np.ones(3), x[:-1]], comm, out=[np.ones(3), x[1:]])
    collectives.grouped_allreduce([x[:100_000], x[100_000:]], comm)
    assert (x == P).all()
