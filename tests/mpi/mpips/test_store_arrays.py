"""Arrays of other libraries in every kind of store: tensors, JAX arrays, arrays on GPUs, DLPack."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mpips
from tests.gpu.arrays import on_gpu
from tests.mpi.mpips.support import failure, need, run

STORES = [("mpi_sync", {"servers": 0}), ("dist_sync", {"servers": 1}), ("mpi_sync", {"servers": 1})]
stores = pytest.mark.parametrize("kind, options", STORES)
SHAPE = (30, 40)


def full(value: float) -> np.ndarray:
    return np.full(SHAPE, value, np.float32)


@stores
def test_arrays_on_gpus_are_summed_there_and_come_back(gpu_xp: Any, kind: str, options: dict[str, Any]) -> None:
    workers = need(**options)

    def body(kv: mpips.KVStore) -> list[float]:
        kv.init("w", on_gpu(gpu_xp, full(7), 0))
        there = on_gpu(gpu_xp, full(0), 1)
        kv.pull("w", there)
        found = [float(there.get()[0, 0])]
        for round_ in range(3):
            values = [on_gpu(gpu_xp, full(number + round_), number) for number in (1, 2)]
            outs = [on_gpu(gpu_xp, full(0), number) for number in (1, 2)]
            if round_ == 0:
                kv.pushpull("w", values, out=outs)
            elif round_ == 1:
                kv.ipushpull("w", values, out=outs).wait()
            else:
                kv.pushpull(["w"], [values])
                outs = values
            found += [float(out.get().max()) for out in outs]
        return found

    expected = [7.0] + [float(workers * (3 + 2 * round_)) for round_ in range(3) for _ in range(2)]
    assert run(kind, body, **options) in (None, expected)


@stores
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_with_and_without_gradients_and_of_bfloat16(where: str, kind: str, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU that PyTorch finds")
    pytest.importorskip("ml_dtypes")
    workers = need(**options)

    def body(kv: mpips.KVStore) -> list[float]:
        found = []
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            name = str(dtype)
            weights = torch.nn.Parameter(torch.zeros(SHAPE, dtype=dtype, device=where))
            kv.init(name, weights)
            gradient = torch.ones(SHAPE, dtype=dtype, device=where, requires_grad=kv.rank == 0)
            kv.push(name, gradient)
            kv.pull(name, weights)
            found.append(float(weights.detach().max()))
            kv.pushpull([name], [[gradient, gradient]], out=[weights])
            found.append(float(weights.detach().min()))
        return found

    assert run(kind, body, **options) in (None, [workers, 2 * workers] * 3)


@stores
def test_arrays_of_jax_are_values_and_no_outs(kind: str, options: dict[str, Any]) -> None:
    jnp = pytest.importorskip("jax.numpy")
    workers = need(**options)

    def body(kv: mpips.KVStore) -> tuple[float, str]:
        kv.init("w", jnp.zeros(SHAPE))
        out = full(0)
        kv.pushpull("w", jnp.ones(SHAPE), out=out)
        return float(out[0, 0]), failure(lambda: kv.pull("w", jnp.zeros(SHAPE)))

    found = run(kind, body, **options)
    assert found is None or (found[0] == workers and "an array of JAX to write to" in found[1])


@pytest.mark.mpi(min_size=2)
@stores
def test_a_type_that_is_no_array_is_told_on_its_rank_alone(kind: str, options: dict[str, Any]) -> None:
    """Fault 37: nobody else waits, and the call can be made again."""
    workers = need(**options)

    def body(kv: mpips.KVStore) -> list[Any]:
        kv.init("w", full(0))
        said = []
        for bad in (object(), "w", {"w": 1}, [[1, 2]], np.ma, None):
            if kv.rank == kv.num_workers - 1:
                said.append(failure(lambda bad=bad: kv.push("w", bad)))
        value = full(1)
        kv.pushpull("w", value)
        return [float(value[0, 0]), kv.generation, all("key 'w' needs an array" in word for word in said)]

    assert run(kind, body, **options) in (None, [workers, 0, True])


NO_NUMBERS = {
    "masked": lambda x: np.ma.masked_array(x, x > 0),
    "object": lambda x: x.astype(object),
    "text": lambda x: x.astype(str),
    "date": lambda x: x.astype("M8[D]"),
    "record": lambda x: x.view([("a", "f4")]),
}


@stores
@pytest.mark.parametrize("name", NO_NUMBERS)
def test_arrays_that_hold_no_numbers_are_refused_in_every_call(name: str, kind: str, options: dict[str, Any]) -> None:
    """What lies below a mask is not summed in silence, nor is a mask given up by a pull."""
    workers = need(**options)

    def body(kv: mpips.KVStore) -> list[Any]:
        bad, good = NO_NUMBERS[name](full(1)), full(1)
        kv.init("w", full(0))
        kv.init("rows", full(0))
        calls = [
            lambda: kv.push("w", bad),
            lambda: kv.pull("w", bad),
            lambda: kv.pushpull("w", bad),
            lambda: kv.pushpull("w", good, out=bad),
            lambda: kv.push(["w"], [bad]),
            lambda: kv.push("w", [good, bad]),
            lambda: kv.ipushpull("w", bad).wait(),
            lambda: kv.init("new", bad),
            lambda: kv.broadcast("new", good, bad),
            lambda: kv.push("rows", mpips.RowSparse(np.arange(30), bad, SHAPE)),
            lambda: kv.row_sparse_pull("rows", out=bad, row_ids=np.arange(30)),
            lambda: kv.row_sparse_pull("rows", out=full(0), row_ids=NO_NUMBERS[name](np.arange(30, dtype="f4"))),
        ]
        said = [failure(call) for call in calls]
        value = full(1)
        kv.pushpull("w", value)
        named = {"masked": "masked array", "text": "str", "record": "void|'a'"}.get(name, name)
        return [float(value[0, 0]), [text for text in said if not re.search(named, text)]]

    assert run(kind, body, **options) in (None, [workers, []])
