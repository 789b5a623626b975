"""Tensors: a list of vectors a rank, reduced as one object, by every algorithm; on GPUs where there are any."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.benchmark.case import contribution, count_wrong, expected
from collectives.tensor import cuda_kernels as kernels
from tests.choice import once, pairwise
from tests.gpu.arrays import numbers, placed, write
from tests.mpi.collectives.support import TORCH_DEVICES, block, fresh, sentence
from tests.mpi.sizes import either_mpi, only_on
from tests.unit.collectives import device

ALGORITHMS = (
    "auto",
    "shared_memory",
    "native",
    "host_ring",
    "ring",
    "multi_ring",
    "multi_ring(rings=3)",
    "direct",
    "halving_doubling",
    "recursive_doubling",
    "binomial",
)
COMM = MPI.COMM_WORLD


@pytest.fixture
def gpus() -> Iterator[Any]:
    """The state of the stand-in, installed."""
    with device.installed() as state:
        yield state


def put_in(op: str, n: int, dtype: str, count: int) -> list[np.ndarray[Any, Any]]:
    members = COMM.size * count
    return [contribution(op, COMM.rank * count + v, n, np.dtype(dtype), members) for v in range(count)]


@cache
def want(op: str, n: int, dtype: str, count: int) -> np.ndarray[Any, Any]:
    members = COMM.size * count
    return expected("allreduce", op, 0, members, n, np.dtype(dtype), [0] * (members + 1))


@either_mpi
@pairwise(algorithm=ALGORITHMS, count=[1, 3], n=[0, 5, 70_001])
def test_allreduce_gives_all_vectors_the_sum(xp: Any, algorithm: str, count: int, n: int) -> None:
    x = placed(xp, put_in("sum", n, "float32", count))
    plan = collectives.plan("allreduce", x, COMM, algorithm=algorithm)
    plan()
    right = all(count_wrong(numbers(v), want("sum", n, "float32", count)) == 0 for v in x)
    for v, again in zip(x, put_in("sum", n, "float32", count)):
        write(xp, v, again)
    plan.start()
    while not plan.test():
        pass
    plan.wait()
    right = right and all(count_wrong(numbers(v), want("sum", n, "float32", count)) == 0 for v in x)
    plan.free()
    assert right


@only_on(1, 2, 3)
@pairwise(
    algorithm=["auto", "multi_ring", "host_ring"],
    dtype=["float16", "float64", "int32"],
    op=["sum", "min", "max", "prod", "mean"],
)
def test_types_and_operations(xp: Any, algorithm: str, dtype: str, op: str) -> None:
    if op == "mean" and dtype == "int32":
        pytest.skip("refused; see the test of refusals")
    if op == "prod" and COMM.size * 2 > 10 and dtype == "float16":
        pytest.skip("a product of so many does not fit float16")
    x = placed(xp, put_in(op, 777, dtype, 2))
    out = [xp.zeros_like(v) for v in x]
    before = [numbers(v).copy() for v in x]
    collectives.allreduce(x, COMM, op=op, algorithm=algorithm, out=out)
    assert all(count_wrong(numbers(v), want(op, 777, dtype, 2)) == 0 for v in out)
    assert all(np.array_equal(numbers(v), b) for v, b in zip(x, before))


@either_mpi
@once(dtype=kernels.ELEMENTS, op=["sum", "max", "min", "prod"])
def test_every_collective_of_every_type(xp: Any, dtype: str, op: str) -> None:
    root, element = COMM.size - 1, np.dtype(dtype)
    right = []

    def see(arrays: list[Any], wanted: np.ndarray[Any, Any]) -> None:
        right.extend(count_wrong(numbers(array), wanted) == 0 for array in arrays)

    with fresh() as comm:  # whose plans are of this stand-in
        for n, count in ((1, 1), (5, 3), (1001, 2)):
            x, total, own = placed(xp, put_in(op, n, dtype, count)), want(op, n, dtype, count), block(n)
            part, whole, reduced = (
                placed(xp, [np.zeros(size, element) for _ in range(count)]) for size in (own.stop - own.start, n, n)
            )
            collectives.reduce_scatter(x, comm, op=op, out=part)
            see(part, total[own])
            collectives.allgather(part, comm, out=whole)
            see(whole, total)
            collectives.reduce(x, comm, op=op, root=root, out=reduced)
            see(reduced if COMM.rank == root else [], total)
            sent = placed(xp, [np.full(n, COMM.rank + v).astype(element) for v in range(count)])
            collectives.broadcast(sent, comm, root=root)
            see(sent, np.full(n, root).astype(element))
            collectives.allreduce(x, comm, op=op)
            see(x, total)
    assert all(right), right


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


ROUTES = ("auto", "multi_ring", "host_ring")


@only_on(1, 2, 3)
@pairwise(
    algorithm=ROUTES,
    given=[(True, True), (True, False), (False, True), (False, False)],
    taken=[(True, False), (False, False), None],
)
def test_arrays_on_gpus_and_on_the_host_in_one_call(
    gpu_xp: Any, algorithm: str, given: tuple[bool, bool], taken: tuple[bool, bool] | None
) -> None:
    """`given` and `taken` say which vectors lie on a GPU; None: in place."""
    n = 70_001
    numbers_in = put_in("sum", n, "float32", 2)
    x = [placed(gpu_xp if there else np, [v.copy()])[0] for there, v in zip(given, numbers_in)]
    out = taken and [placed(gpu_xp if there else np, [np.zeros(n, np.float32)])[0] for there in taken]
    plan = collectives.plan("allreduce", x, COMM, algorithm=algorithm, out=out)
    right = True
    for shift in (0, 1):  # what lies on the host is read at every call
        for v, then in zip(x, numbers_in):
            write(gpu_xp, v, then + np.float32(shift))
        plan()
        total = want("sum", n, "float32", 2) + shift * 2 * COMM.size
        right = right and all(np.array_equal(numbers(v), total) for v in out or x)
    plan.free()
    assert right


@only_on(1, 2, 3)
@pytest.mark.parametrize("on_gpu", [(True, False), (False, True)])
def test_one_array_between_a_gpu_and_the_host(gpu_xp: Any, on_gpu: tuple[bool, bool]) -> None:
    n = 1001
    x, out = (
        placed(gpu_xp if there else np, [v])[0]
        for there, v in zip(on_gpu, [put_in("sum", n, "float64", 1)[0], np.zeros(n)])
    )
    assert collectives.allreduce(x, COMM, out=out) is out
    assert np.array_equal(numbers(out), want("sum", n, "float64", 1))


class Dlpack:
    """A host array as torch's: DLPack and no array interface; `size` is a method."""

    def __init__(self, held: np.ndarray[Any, Any]):
        self.held = held

    def size(self) -> tuple[int, ...]:
        return self.held.shape

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.held.__dlpack_device__()


@only_on(1, 2)
def test_lists_of_arrays_that_speak_dlpack_only() -> None:
    x = [Dlpack(v) for v in put_in("sum", 1001, "float32", 2)]
    out = [Dlpack(np.zeros(1001, np.float32)) for _ in x]
    assert collectives.allreduce(x, COMM, out=out) is out
    collectives.allreduce(x, COMM, algorithm="multi_ring")
    assert all(np.array_equal(v.held, want("sum", 1001, "float32", 2)) for v in [*x, *out])


TORCH_TYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8")


@only_on(1, 2, 4)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring"])
@pytest.mark.parametrize("where", TORCH_DEVICES)
def test_lists_of_torch_tensors(where: str, algorithm: str) -> None:
    torch = pytest.importorskip("torch")
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU that PyTorch finds")
    for dtype in TORCH_TYPES:
        host = [v.astype(float) for v in put_in("sum", 1001, dtype, 2)]
        given = [torch.from_numpy(v).to(where, getattr(torch, dtype)) for v in host]
        if given[0].is_floating_point():
            given[0].requires_grad_()
        collectives.allreduce(given, COMM, algorithm=algorithm)
        total = want("sum", 1001, dtype, 2).astype(float)
        assert all(np.array_equal(v.detach().cpu().double().numpy(), total) for v in given), dtype


@only_on(1, 2, 3)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring", "host_ring"])
def test_bfloat16_on_gpus(gpu_xp: Any, algorithm: str) -> None:
    x = placed(gpu_xp, [np.full(777, COMM.rank + v + 1.0).astype(ml_dtypes.bfloat16) for v in range(2)])
    collectives.allreduce(x, COMM, algorithm=algorithm)
    total = sum(rank + v + 1 for rank in range(COMM.size) for v in range(2))
    assert all((v.get().astype(float) == total).all() for v in x)


@pytest.mark.parametrize("op, special", [("min", np.nan), ("max", np.nan)])
def test_a_nan_of_one_vector_comes_through(xp: Any, op: str, special: float) -> None:
    for rank in range(COMM.size):
        x = [np.ones(10), np.ones(10)]
        if COMM.rank == rank:
            x[1][3] = special
        vectors = placed(xp, x)
        collectives.allreduce(vectors, COMM, op=op)
        assert all(np.flatnonzero(np.isnan(numbers(v))).tolist() == [3] for v in vectors)


def refused(x: Any, **given: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as raised:
        collectives.allreduce(x, COMM, **given)
    return str(raised.value)


def test_what_gpus_cannot_do_is_refused_on_every_rank(gpus: Any) -> None:
    x = placed(device, [np.ones(5)] * 2)
    frozen = device.Array(5, np.float64, 1, writable=False)
    assert "out[1] is read-only" in refused(x, out=[x[0], frozen])
    assert "x[0] is read-only" in refused([frozen])
    assert "one size and type" in refused([x[0], np.ones(5, np.float32)])
    wide = device.Array(5, np.complex64, 1)
    assert "complex64" in refused([wide])


@pytest.mark.slow
@only_on(2)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring"])
def test_repeated_one_shot_calls_use_their_pinned_memory_and_kernels_again(gpus: Any, algorithm: str) -> None:
    """A call may still hold its memory when the next one begins, but there are fewer pieces than calls."""
    seen = []
    for _ in range(24):
        x = placed(device, put_in("sum", 70_001, "float32", 2))
        collectives.allreduce(x, COMM, op="mean", algorithm=algorithm)
        del x
        gc.collect()
        seen.append((gpus.pinnings, len(gpus.built)))
    assert seen[-1][0] < len(seen)
    assert seen[-1][1] == seen[0][1]


@only_on(2)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring"])
def test_a_plan_pins_no_memory_when_it_runs(gpus: Any, algorithm: str) -> None:
    x = placed(device, put_in("sum", 70_001, "float32", 2))
    plan = collectives.plan("allreduce", x, COMM, op="mean", algorithm=algorithm)
    pinned = gpus.pinnings
    for _ in range(3):
        plan()
    plan.free()
    assert gpus.pinnings == pinned


@only_on(2)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring"])
def test_a_call_keeps_no_array_alive(xp: Any, algorithm: str) -> None:
    x = placed(xp, put_in("sum", 1001, "float32", 2))
    collectives.allreduce(x, COMM, algorithm=algorithm)
    kept = [weakref.ref(v) for v in x]
    del x
    gc.collect()
    assert all(ref() is None for ref in kept)


@only_on(2)
def test_a_ring_through_the_host_is_another_algorithm_than_a_fused_ring() -> None:
    x = [np.ones(1000), np.ones(1000)]
    heard = refused(x, algorithm="host_ring" if COMM.rank else "ring")
    collectives.renew(COMM)
    assert "host_ring" in heard
