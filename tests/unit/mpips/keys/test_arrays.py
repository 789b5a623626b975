"""Arrays of other libraries: host arrays are views of the same memory, GPUs' are summed on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpips.store.keys import arguments
from mpips.store.keys import arguments as arrays
from mpips.store.keys.key import Key
from tests.unit.collectives import device

F4 = np.dtype(np.float32)
KNOWN = {"w": Key("w", (2, 3), F4)}
ONES = np.ones((2, 3), np.float32)


def run(task: Any) -> None:
    for _ in task:
        pass


@pytest.fixture
def gpus() -> Iterator[Any]:
    with device.installed() as state:
        yield state


def test_a_tensor_that_records_gradients_is_read_and_written_in_place() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.nn.Parameter(torch.ones(2, 3))
    array = arguments.writable(weights, "w", "pull")
    array[...] = 5
    assert weights.detach().eq(5).all()


def test_bfloat16_of_torch_is_that_of_ml_dtypes() -> None:
    torch, ml_dtypes = pytest.importorskip("torch"), pytest.importorskip("ml_dtypes")
    tensor = torch.full((4,), 1.5, dtype=torch.bfloat16, requires_grad=True)
    array = arguments.writable(tensor, "w", "pull")
    assert array.dtype == ml_dtypes.bfloat16
    array[0] = 2
    assert tensor.detach()[0] == 2


def test_tensors_in_lists_are_viewed_and_all_else_stays() -> None:
    torch = pytest.importorskip("torch")
    tensor, other = torch.ones(2, 3), object()
    for same in (ONES, [ONES], other, None, [other, [ONES]], "no"):
        assert arrays.viewed(same) is same
    (first, (second, third)) = arrays.viewed([tensor, (tensor, ONES)])
    assert third is ONES
    first[0, 0] = 7
    assert second[0, 0] == tensor[0, 0] == 7


def test_arrays_of_jax_are_read_and_not_written() -> None:
    jnp = pytest.importorskip("jax.numpy")
    assert np.array_equal(arguments.readable(jnp.ones((2, 3)), "w", "push"), ONES)
    assert arguments.readable(jnp.ones(3, jnp.bfloat16), "w", "push").dtype.name == "bfloat16"
    with pytest.raises(TypeError, match="pull: key 'w' got an array of JAX to write to"):
        arguments.writable(jnp.ones((2, 3)), "w", "pull")


class Broken:
    """What says that it speaks DLPack, and does not."""

    shape = (2, 3)

    def __dlpack__(self, **_: Any) -> Any:
        raise BufferError("of another planet")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_what_cannot_be_viewed_is_told_in_our_words() -> None:
    with pytest.raises(TypeError, match=r"push: key 'w' needs an array, not Broken: .*of another planet"):
        arguments.readable(Broken(), "w", "push")


@pytest.mark.usefixtures("gpus")
def test_arrays_on_gpus_are_summed_there_and_the_result_goes_back() -> None:
    values = [device.asarray(ONES * number, number) for number in (1, 2)]
    (call,) = arguments.check(KNOWN, "pushpull", "w", values)
    assert call.gathered is not None
    run(call.gathered)
    assert np.array_equal(call.payload, 3 * ONES)
    assert call.spread is not None
    call.targets[0][...] = 7
    run(call.spread.spread())
    assert all(np.array_equal(value.get(), 7 * ONES) for value in values)


@pytest.mark.usefixtures("gpus")
def test_gpu_and_host_arrays_go_together() -> None:
    (push,) = arguments.check(KNOWN, "push", "w", [device.asarray(ONES, 0), 2 * ONES])
    assert push.gathered is not None
    run(push.gathered)
    assert np.array_equal(push.payload, 3 * ONES)
    here, there = np.zeros((2, 3), np.float32), device.asarray(ONES, 1)
    (pull,) = arguments.check(KNOWN, "pull", "w", out=[here, there])
    assert pull.targets[1] is here
    assert np.array_equal(arguments.first_value("w", [there]), ONES)


@pytest.mark.usefixtures("gpus")
def test_what_was_given_up_is_not_written_by_gpus_any_more() -> None:
    (call,) = arguments.check(KNOWN, "push", "w", device.asarray(ONES, 0))
    assert call.gathered is not None
    next(call.gathered)
    call.gathered.close()
    assert np.array_equal(call.payload, ONES)


@pytest.mark.usefixtures("gpus")
def test_gpu_arrays_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"push: key 'w' was initialised as float32\(2, 3\)"):
        arguments.check(KNOWN, "push", "w", device.asarray(np.ones(6, np.float32), 0))
    with pytest.raises(ValueError, match="push: key 'w': the arrays of one key, one per device, differ"):
        arguments.check(KNOWN, "push", "w", [device.asarray(ONES, 0), device.asarray(np.ones((3, 2), np.float32), 1)])
    with pytest.raises(ValueError, match="pull: key 'w': array 0 is read-only"):
        arguments.check(KNOWN, "pull", "w", out=device.Array((2, 3), np.float32, 0, writable=False))
