"""Vectors on GPUs: who waits for whom, pinned memory, kernels; on a stand-in whose streams run as late as can be."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from collectives.tensor.vectors import Ticket, running, vector_place
from tests.unit.collectives import device

N = 1000


@pytest.fixture
def gpus() -> Iterator[Any]:
    with device.installed() as state:
        yield state


def cuda_vectors(sources: list[Any], targets: list[Any] | None = None, operation: str = "add") -> Any:
    from collectives.tensor.cuda import CudaVectors

    given = [vector_place(x, "x", targets is None) for x in sources]
    return CudaVectors(given, given if targets is None else [vector_place(x, "out", True) for x in targets], operation)


def pool(keep_bytes: int = 1 << 30) -> Any:
    return importlib.import_module("collectives.tensor.cuda").PinnedPool(keep_bytes)


def wait(ticket: Ticket) -> None:
    while not ticket():
        pass


def on_devices(*numbers: int) -> list[Any]:
    return [device.asarray(np.arange(N, dtype=np.float32) + number, number) for number in numbers]


def stream_on(number: int, non_blocking: bool = True) -> Any:
    with device.Device(number):
        return device.Stream(non_blocking)


def sums(vectors: Any) -> np.ndarray[Any, Any]:
    out = vectors.host(vectors.n)
    wait(vectors.gather(0, vectors.n, None, out))
    return np.array(out)


WANT = 3 * np.arange(N, dtype=np.float32) + 6


@pytest.mark.parametrize("late", [1, 2, 3])
@pytest.mark.parametrize("where", ["current", "default", "blocking", "torch"])
def test_every_stream_waits_for_the_users_streams_of_every_device(gpus: Any, where: str, late: int) -> None:
    """The last write to the vector on GPU `late` is queued on one of the user's streams there, and rests."""
    vectors = cuda_vectors(x := on_devices(1, 2, 3))
    for v in x:
        v.get()
    held = x[late - 1].held
    good = held.copy()
    held[...] = -1
    stream = device.Stream.null if where == "default" else stream_on(late, non_blocking=where != "blocking")
    with device.Device(late):
        stream.queue.append(lambda: held.__setitem__(slice(None), good))
    gpus.current_stream[late] = stream if where == "current" else stream_on(late)
    others = {number: stream_on(number) for number in (1, 2, 3) if number != late}
    torch = device.torch_uses(lambda d: stream if d == late else others[d]) if where == "torch" else nullcontext()
    with torch, running(vectors):
        assert np.array_equal(sums(vectors), WANT)


def test_a_vector_is_written_before_the_host_goes_on(gpus: Any) -> None:
    x = on_devices(1, 2)
    vectors = cuda_vectors(x)
    result = vectors.host(N)
    with running(vectors):
        result[...] = 7
        wait(vectors.spread(0, N, result))
        assert all((v.held == 7).all() for v in x)
        result[...] = 8  # which a copy that still ran would read
    assert all((v.held == 7).all() for v in x)


def test_an_operation_that_is_broken_off_leaves_nothing_running(gpus: Any) -> None:
    x = on_devices(1, 2)
    vectors = cuda_vectors(x)
    result = vectors.host(N)
    result[...] = 7

    def interrupted() -> None:
        with running(vectors):
            vectors.spread(0, N, result)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gpus.blocked
    assert all((v.held == 7).all() for v in x)


def test_memory_of_kernels_that_do_not_end_is_given_to_nobody(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's stream waits for ever, as for a rank that has died."""
    vectors = cuda_vectors(x := on_devices(1, 2))
    monkeypatch.setattr(importlib.import_module("collectives.tensor.cuda"), "PATIENCE", 0.01)
    monkeypatch.setattr(device.Event, "done", False)
    with running(vectors):
        vectors.gather(0, N, None, vectors.host(N))
    vectors.free()
    pinnings = gpus.pinnings
    again = cuda_vectors(x).host(N)
    assert gpus.pinnings == pinnings + 1 and again.size == N


def test_host_vectors_of_a_list_are_read_at_every_operation_and_written(gpus: Any) -> None:
    given, taken = np.arange(N, dtype=np.float32), np.zeros(N, np.float32)
    x, out = [*on_devices(1), given], [*on_devices(2), taken]
    vectors = cuda_vectors(x, out)
    for shift in (0, 5):
        given[...] = np.arange(N) + shift
        with running(vectors):
            result = vectors.host(N)
            wait(vectors.gather(0, N, None, result))
            wait(vectors.spread(0, N, result))
        assert np.array_equal(taken, 2 * np.arange(N, dtype=np.float32) + 1 + shift)


def test_arrays_are_held_by_address_only(gpus: Any) -> None:
    x = on_devices(1, 2)
    vectors = cuda_vectors(x)
    for v in x:
        v.get()
    del x, v
    gc.collect()
    assert not gpus.memory
    vectors.free()


def test_no_device_is_touched_but_those_of_the_vectors(gpus: Any) -> None:
    vectors = cuda_vectors(x := on_devices(2, 3))
    with running(vectors):
        sums(vectors)
    del x
    assert gpus.contexts == {2, 3} and gpus.pinned


def test_kernels_are_built_once(gpus: Any) -> None:
    for _ in range(3):
        vectors = cuda_vectors(x := on_devices(1, 2))
        with running(vectors):
            sums(vectors)
            wait(vectors.gather(0, 10, vectors.host(10), vectors.host(10)))
        del x
    assert sorted(gpus.built) == ["collectives_add_float32_2", "collectives_add_float32_3"]


@pytest.mark.parametrize("operation", ["add", "multiply", "minimum", "maximum"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "uint64"])
def test_the_host_and_gpus_agree_bit_by_bit(gpus: Any, operation: str, dtype: str) -> None:
    import ml_dtypes

    from collectives.call import REDUCTIONS
    from collectives.tensor.vectors import HostVectors

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    given = [(np.arange(N) % 97 * 3 + i).astype(kind) for i in range(3)]
    places = [vector_place(x, "x", False) for x in given]
    combine = next(known.combine for known in REDUCTIONS.values() if known.ufunc is getattr(np, operation))
    host, gpu = HostVectors(places, places, combine), [device.asarray(x, 1) for x in given]
    for x in gpu:
        if dtype == "bfloat16":
            assert vector_place(x, "x", False).dtype == kind
    vectors = cuda_vectors(gpu, operation=operation)
    out = host.host(N)
    with np.errstate(over="ignore"), running(vectors):
        host.gather(0, N, None, out)
        assert np.array_equal(sums(vectors).view(np.uint8), np.array(out).view(np.uint8))


def test_pinned_memory_is_used_again(gpus: Any) -> None:
    pinned = pool()
    for _ in range(5):
        first, second = (pinned.take(N, np.dtype(np.float64), 1) for _ in range(2))
        del first, second
    assert gpus.pinnings == 2
    first = pinned.take(N, np.dtype(np.float64), 1)
    view = first[10:20].view(np.uint8)
    del first
    others = [pinned.take(N, np.dtype(np.float64), 1) for _ in range(2)]  # the view still holds one
    assert gpus.pinnings == 3
    assert not any(np.shares_memory(other, view) for other in others)


def test_pinned_memory_that_nobody_uses_is_bounded(gpus: Any) -> None:
    pinned = pool(keep_bytes=1 << 20)
    for size in (1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21):
        taken = pinned.take(size, np.dtype(np.uint8), 3)
        del taken
        assert pinned.idle_bytes <= 1 << 20
    assert sum(gpus.pinned.values()) == pinned.idle_bytes and gpus.contexts == {3}


def test_a_failed_pinning_leaves_nothing_behind(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = pool()

    def fails(*_: Any) -> None:
        raise device.cuda.runtime.CUDARuntimeError("no more")

    monkeypatch.setattr(device.Runtime, "hostRegister", fails)
    with pytest.raises(RuntimeError, match="no more"):
        pinned.take(N, np.dtype(np.float64), 1)
    monkeypatch.undo()
    pinned.take(N, np.dtype(np.float64), 1)
    gc.collect()  # where an unfinished object would complain
    assert len(gpus.pinned) == 1


def test_gpus_that_cannot_read_each_other_are_refused(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.Runtime, "deviceCanAccessPeer", lambda *_: 0)
    cuda_vectors(on_devices(1))
    with pytest.raises(ValueError, match="GPU 1 cannot read GPU 2"):
        cuda_vectors(on_devices(1, 2))


class Numba(device.Array):
    """An array of another library."""

    def __init__(self, **changed: Any):
        super().__init__((4, 4), np.float32, 2)
        self._changed = changed

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**super().__cuda_array_interface__, **self._changed}


@pytest.mark.parametrize(
    "strides, good", [(None, True), ((16, 4), True), ((4, 16), False), ((32, 4), False), ((16, 8), False)]
)
def test_strided_device_arrays_are_refused(gpus: Any, strides: Any, good: bool) -> None:
    x = Numba(strides=strides)
    if good:
        assert vector_place(x, "x", True)[1:] == (16, np.dtype(np.float32), 2)
    else:
        with pytest.raises(ValueError, match=r"x of shape .* is not C-contiguous"):
            vector_place(x, "x", True)


def test_read_only_device_arrays_are_no_targets(gpus: Any) -> None:
    x = device.Array(4, np.float32, 1, writable=False)
    assert vector_place(x, "x", False).device == 1
    with pytest.raises(ValueError, match=r"out\[0\] is read-only"):
        vector_place(x, "out[0]", True)
    frozen = type("Array", (Numba,), {"__module__": "jaxlib._jax"})()
    with pytest.raises(ValueError, match="read-only"):
        vector_place(frozen, "out", True)


def test_an_empty_device_array_needs_no_device(gpus: Any) -> None:
    assert vector_place(device.Array(0, np.float32, 3), "x", True).device is None
    assert not gpus.contexts


class TestStandIn:
    """It notices what it is for."""

    def test_work_rests_until_an_event_behind_it_is_waited_for(self, gpus: Any) -> None:
        ran: list[str] = []
        first, second = stream_on(1), stream_on(2)
        first.queue.append(lambda: ran.append("first"))
        second.queue.append(lambda: ran.append("second"))
        with device.Device(2):
            event = device.Event(disable_timing=True)
            event.record(second)
        second.queue.append(lambda: ran.append("late"))
        assert not event.done and event.done and ran == ["second"]

    def test_an_event_of_another_stream_runs_before_what_waits_for_it(self, gpus: Any) -> None:
        ran: list[str] = []
        first, second = stream_on(1), stream_on(2)
        first.queue.append(lambda: ran.append("first"))
        with device.Device(1):
            event = device.Event(disable_timing=True)
            event.record(first)
        second.wait_event(event)
        second.queue.append(lambda: ran.append("second"))
        second.synchronize()
        assert ran == ["first", "second"]

    def test_what_hardware_would_refuse_is_refused(self, gpus: Any) -> None:
        stream, x, host = stream_on(1), device.asarray(np.ones(4), 1), np.ones(4)
        with device.Device(2), pytest.raises(AssertionError, match="another device"), stream:
            pass
        with device.Device(1):
            device.cuda.runtime.memcpyAsync(x.held.ctypes.data, host.ctypes.data, 32, 4, stream.ptr)
            with pytest.raises(AssertionError, match="neither pinned"):
                stream.synchronize()
