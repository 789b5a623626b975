"""Tensors: a list of vectors a rank, reduced as one object, by every algorithm; on GPUs where there are any."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.benchmark import data
from collectives.schedule.model import cut
from tests.mpi.collectives.support import fresh, sentence
from tests.mpi.sizes import either_mpi, only_on

ALGORITHMS = (
    "auto", "shared_memory", "native", "host_ring", "reg", "vector_ring", "ring", "multi_ring", "multi_ring(rings=3)",
    "direct", "halving_doubling", "recursive_doubling", "binomial",
)  # fmt: skip
COMM = MPI.COMM_WORLD


def _has_gpu() -> bool:
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


BACKENDS = [
    "numpy",
    pytest.param("cupy", marks=[pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="needs CuPy and a GPU")]),
]


@pytest.fixture(params=BACKENDS)
def xp(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(request.param)


def put_in(op: str, n: int, dtype: str, count: int) -> list[np.ndarray[Any, Any]]:
    members = COMM.size * count
    return [data.contribution(op, COMM.rank * count + v, n, np.dtype(dtype), members) for v in range(count)]


@cache
def want(op: str, n: int, dtype: str, count: int) -> np.ndarray[Any, Any]:
    members = COMM.size * count
    return data.expected("allreduce", op, 0, members, n, np.dtype(dtype), [0] * (members + 1))


def numbers(xp: Any, vector: Any) -> np.ndarray[Any, Any]:
    return vector if xp is np else vector.get()


@either_mpi
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("n", [0, 5, 70_001])
def test_allreduce_gives_all_vectors_the_sum(xp: Any, algorithm: str, count: int, n: int) -> None:
    x = [xp.asarray(v) for v in put_in("sum", n, "float32", count)]
    plan = collectives.plan("allreduce", x, COMM, algorithm=algorithm)
    plan()
    right = all(data.wrong(numbers(xp, v), want("sum", n, "float32", count)) == 0 for v in x)
    for v, again in zip(x, put_in("sum", n, "float32", count)):
        v[...] = xp.asarray(again)
    plan.start()
    while not plan.test():
        pass
    plan.wait()
    right = right and all(data.wrong(numbers(xp, v), want("sum", n, "float32", count)) == 0 for v in x)
    plan.free()
    assert right


@only_on(1, 2, 3)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring", "host_ring", "reg", "vector_ring"])
@pytest.mark.parametrize("dtype", ["float16", "float64", "int32"])
@pytest.mark.parametrize("op", ["sum", "min", "max", "prod", "mean"])
def test_types_and_operations(xp: Any, algorithm: str, dtype: str, op: str) -> None:
    if (op == "mean" and dtype == "int32") or (algorithm == "reg" and dtype == "float16"):
        pytest.skip("refused; see the test of refusals")
    if op == "prod" and COMM.size * 2 > 10 and dtype == "float16":
        pytest.skip("a product of so many does not fit float16")
    x = [xp.asarray(v) for v in put_in(op, 777, dtype, 2)]
    out = [xp.zeros_like(v) for v in x]
    before = [numbers(xp, v).copy() for v in x]
    collectives.allreduce(x, COMM, op=op, algorithm=algorithm, out=out)
    assert all(data.wrong(numbers(xp, v), want(op, 777, dtype, 2)) == 0 for v in out)
    assert all(np.array_equal(numbers(xp, v), b) for v, b in zip(x, before))


def test_other_kinds(xp: Any) -> None:
    n, p, count = 1001, COMM.size, 2
    x = [xp.asarray(v) for v in put_in("sum", n, "float64", count)]
    total = want("sum", n, "float64", count)
    bounds = [int(cut(n, p, r)) for r in range(p + 1)]
    own = slice(bounds[COMM.rank], bounds[COMM.rank + 1])
    block = [xp.zeros(own.stop - own.start) for _ in range(count)]
    collectives.reduce_scatter(x, COMM, out=block)
    right = all(np.array_equal(numbers(xp, b), total[own]) for b in block)
    whole = [xp.zeros(n) for _ in range(count)]
    collectives.allgather(block, COMM, out=whole)
    right &= all(np.array_equal(numbers(xp, w), total) for w in whole)
    root = p - 1
    sent = [xp.full(n, float(COMM.rank + v)) for v in range(count)]
    collectives.broadcast(sent, COMM, root=root)
    right &= all(np.array_equal(numbers(xp, s), np.full(n, float(root))) for s in sent)
    collectives.reduce(x, COMM, root=root)
    if COMM.rank == root:
        right &= all(np.array_equal(numbers(xp, v), total) for v in x)
    assert right


@pytest.mark.parametrize(
    "x, word",
    [
        ([], "at least one"),
        ([np.zeros(3), np.zeros(4)], "one size"),
        ([np.zeros(3), np.zeros(3, np.float32)], "one size and type"),
        ([np.zeros((4, 4))[:, :2]], "C-contiguous"),
        ([np.zeros(3, np.int64)], "mean"),
    ],
)
def test_bad_tensors_are_refused(x: list[Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        collectives.allreduce(x, COMM, op="mean")


@pytest.mark.mpi(min_size=2)
def test_another_number_of_vectors_on_one_rank_is_named_on_all() -> None:
    with fresh() as comm:
        said = sentence(lambda: collectives.allreduce([np.zeros(10) for _ in range(1 + (COMM.rank == 1))], comm))
    assert "1 vectors" in said and "2 vectors" in said
