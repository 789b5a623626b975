"""Tensors: a list of vectors a rank, reduced as one object, by every algorithm; on GPUs where there are any."""

from __future__ import annotations

import gc
import importlib.util
import weakref
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives.benchmark.case import contribution, count_wrong, expected
from tests.choice import pairwise
from tests.mpi.collectives.support import block, fresh, sentence
from tests.mpi.sizes import either_mpi, only_on
from tests.unit.collectives import device

ALGORITHMS = (
    "auto", "shared_memory", "native", "host_ring", "ring", "multi_ring", "multi_ring(rings=3)",
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
    "stand-in",
    pytest.param("cupy", marks=[pytest.mark.gpu, pytest.mark.skipif(not _has_gpu(), reason="needs CuPy and a GPU")]),
]


@pytest.fixture(params=BACKENDS)
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """NumPy, CuPy, or `device` in CuPy's place."""
    if request.param == "stand-in":
        with device.installed() as state:
            yield device
            assert state.blocked == 0  # what an operation starts on a GPU it waits for step by step
            assert 0 not in state.contexts  # where no vector lies
    else:
        yield pytest.importorskip(request.param)


@pytest.fixture
def gpus() -> Iterator[Any]:
    """The state of the stand-in, installed."""
    with device.installed() as state:
        yield state


def placed(xp: Any, vectors: Sequence[np.ndarray[Any, Any]]) -> list[Any]:
    """One vector on each device in turn; none on the stand-in's device 0, which nobody should touch then."""
    if xp is np:
        return [np.asarray(vector) for vector in vectors]
    devices = range(1, device.DEVICES) if xp is device else range(xp.cuda.runtime.getDeviceCount())
    made = []
    for number, vector in enumerate(vectors):
        with xp.cuda.Device(devices[number % len(devices)]):
            made.append(xp.asarray(vector))
    return made


def put_in(op: str, n: int, dtype: str, count: int) -> list[np.ndarray[Any, Any]]:
    members = COMM.size * count
    return [contribution(op, COMM.rank * count + v, n, np.dtype(dtype), members) for v in range(count)]


@cache
def want(op: str, n: int, dtype: str, count: int) -> np.ndarray[Any, Any]:
    members = COMM.size * count
    return expected("allreduce", op, 0, members, n, np.dtype(dtype), [0] * (members + 1))


def numbers(xp: Any, vector: Any) -> np.ndarray[Any, Any]:
    return vector if xp is np else vector.get()


@either_mpi
@pairwise(algorithm=ALGORITHMS, count=[1, 3], n=[0, 5, 70_001])
def test_allreduce_gives_all_vectors_the_sum(xp: Any, algorithm: str, count: int, n: int) -> None:
    x = placed(xp, put_in("sum", n, "float32", count))
    plan = collectives.plan("allreduce", x, COMM, algorithm=algorithm)
    plan()
    right = all(count_wrong(numbers(xp, v), want("sum", n, "float32", count)) == 0 for v in x)
    for v, again in zip(x, put_in("sum", n, "float32", count)):
        with v.device if xp is not np else nullcontext():
            v[...] = again if xp is device else xp.asarray(again)
    plan.start()
    while not plan.test():
        pass
    plan.wait()
    right = right and all(count_wrong(numbers(xp, v), want("sum", n, "float32", count)) == 0 for v in x)
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
    before = [numbers(xp, v).copy() for v in x]
    collectives.allreduce(x, COMM, op=op, algorithm=algorithm, out=out)
    assert all(count_wrong(numbers(xp, v), want(op, 777, dtype, 2)) == 0 for v in out)
    assert all(np.array_equal(numbers(xp, v), b) for v, b in zip(x, before))


def test_other_kinds(xp: Any) -> None:
    n, p, count = 1001, COMM.size, 2
    x = placed(xp, put_in("sum", n, "float64", count))
    total = want("sum", n, "float64", count)
    own = block(n)
    part = placed(xp, [np.zeros(own.stop - own.start)] * count)
    collectives.reduce_scatter(x, COMM, out=part)
    right = all(np.array_equal(numbers(xp, b), total[own]) for b in part)
    whole = placed(xp, [np.zeros(n)] * count)
    collectives.allgather(part, COMM, out=whole)
    right &= all(np.array_equal(numbers(xp, w), total) for w in whole)
    root = p - 1
    sent = placed(xp, [np.full(n, float(COMM.rank + v)) for v in range(count)])
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


ROUTES = ("auto", "multi_ring", "host_ring")


@only_on(1, 2, 3)
@pairwise(
    algorithm=ROUTES,
    given=[(True, True), (True, False), (False, True), (False, False)],
    taken=[(True, False), (False, False), None],
)
def test_arrays_on_gpus_and_on_the_host_in_one_call(
    gpus: Any, algorithm: str, given: tuple[bool, bool], taken: tuple[bool, bool] | None
) -> None:
    """`given` and `taken` say which vectors lie on a GPU; None: in place."""
    n = 70_001
    numbers_in = put_in("sum", n, "float32", 2)
    x = [placed(device if there else np, [v.copy()])[0] for there, v in zip(given, numbers_in)]
    out = taken and [placed(device if there else np, [np.zeros(n, np.float32)])[0] for there in taken]
    plan = collectives.plan("allreduce", x, COMM, algorithm=algorithm, out=out)
    right = True
    for shift in (0, 1):  # what lies on the host is read at every call
        for v, then in zip(x, numbers_in):
            v[...] = then + shift
        plan()
        total = want("sum", n, "float32", 2) + shift * 2 * COMM.size
        right = right and all(np.array_equal(v if isinstance(v, np.ndarray) else v.get(), total) for v in out or x)
    plan.free()
    assert right


@only_on(1, 2, 3)
@pytest.mark.parametrize("on_gpu", [(True, False), (False, True)])
def test_one_array_between_a_gpu_and_the_host(gpus: Any, on_gpu: tuple[bool, bool]) -> None:
    n = 1001
    x, out = (
        placed(device if there else np, [v])[0]
        for there, v in zip(on_gpu, [put_in("sum", n, "float64", 1)[0], np.zeros(n)])
    )
    assert collectives.allreduce(x, COMM, out=out) is out
    assert np.array_equal(out if isinstance(out, np.ndarray) else out.get(), want("sum", n, "float64", 1))


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


@only_on(1, 2)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring"])
def test_lists_of_torch_tensors(algorithm: str) -> None:
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(v) for v in put_in("sum", 1001, "float32", 2)]
    collectives.allreduce(tensors, COMM, algorithm=algorithm)
    assert all(np.array_equal(v.numpy(), want("sum", 1001, "float32", 2)) for v in tensors)


@only_on(1, 2, 3)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring", "host_ring"])
def test_bfloat16_on_gpus(gpus: Any, algorithm: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    given = [np.full(777, COMM.rank + v + 1.0).astype(ml_dtypes.bfloat16) for v in range(2)]
    x = placed(device, given)
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
        assert all(np.flatnonzero(np.isnan(numbers(xp, v))).tolist() == [3] for v in vectors)


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
