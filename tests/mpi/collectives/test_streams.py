"""Collectives between what users queue on streams: on the stand-in, whose streams rest, and on a card that is busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from tests.choice import pairwise
from tests.gpu.arrays import numbers, on_gpu, write
from tests.mpi.collectives.support import TORCH_DEVICES, fresh
from tests.mpi.sizes import only_on
from tests.unit.collectives import device

COMM = MPI.COMM_WORLD
N, TURNS = 70_001, 6
LATE, BUSY = 2_000_000, 20_000_000  # cycles of a card's clock: a millisecond, and ten
ALL_BLOCKS = 1024  # more than the multiprocessors of any card
SPIN = """
extern "C" __global__ void spin(long long cycles) {
    const long long end = clock64() + cycles;
    while (clock64() < end) {}
}
"""


@cache
def spinning(xp: Any) -> Any:
    """A kernel that lasts for so many cycles."""
    return xp.RawKernel(SPIN, "spin")


def delay(xp: Any) -> None:
    """Let what follows on the current stream come late. On the stand-in nothing comes before somebody waits."""
    if xp is not device:
        spinning(xp)((1,), (1,), (np.int64(LATE),))


@contextmanager
def loaded(xp: Any, array: Any) -> Iterator[None]:
    """Keep the card of an array busy with another stream's kernels and copies."""
    with array.device:
        busy, heap = xp.cuda.Stream(non_blocking=True), [xp.zeros_like(array) for _ in range(2)]
        with busy:
            for _ in range(8):
                if xp is not device:
                    spinning(xp)((ALL_BLOCKS,), (64,), (np.int64(BUSY // 8),))
                heap[0][...] = heap[1]
    yield
    busy.synchronize()


def given(turn: int) -> np.ndarray[Any, Any]:
    """What this rank puts in."""
    return (np.arange(N) % 1000 + COMM.rank + turn).astype(np.float32)


def total(turn: int) -> np.ndarray[Any, Any]:
    """The sum over all ranks."""
    return sum((np.arange(N) % 1000 + rank + turn).astype(np.float32) for rank in range(COMM.size))  # type: ignore[return-value]


def stream(xp: Any, kind: str) -> Any:
    """The default stream, or another one of the current device."""
    return xp.cuda.Stream.null if kind == "default" else xp.cuda.Stream(non_blocking=kind == "non-blocking")


@only_on(1, 2, 4)
@pairwise(kind=["default", "blocking", "non-blocking"], algorithm=["auto", "multi_ring", "host_ring"], load=[0, 1])
def test_a_sum_comes_after_what_was_queued_and_before_what_follows(
    gpu_xp: Any, kind: str, algorithm: str, load: int
) -> None:
    """Nothing waits for the device in between, neither we nor the collective's caller."""
    x, found = on_gpu(gpu_xp, given(0)), []
    with fresh() as comm, loaded(gpu_xp, x) if load else nullcontext(), x.device, stream(gpu_xp, kind):
        plan = collectives.plan("allreduce", x, comm, algorithm=algorithm)
        for turn in range(TURNS):
            delay(gpu_xp)
            write(gpu_xp, x, given(turn))
            if turn % 2:
                plan.start()
                plan.wait()
            else:
                collectives.allreduce(x, comm, algorithm=algorithm)
            found.append(gpu_xp.zeros_like(x))
            found[-1][...] = x
        seen = [numbers(one) for one in found]
    assert [np.array_equal(one, total(turn)) for turn, one in enumerate(seen)] == [True] * TURNS


@only_on(1, 2, 4)
@pytest.mark.parametrize("algorithm", ["auto", "multi_ring"])
def test_events_order_producers_and_any_stream_reads_the_sum(gpu_xp: Any, algorithm: str) -> None:
    """Three at once: each array is written on a stream for which the current one waits, and is read on another."""
    arrays = [on_gpu(gpu_xp, given(0)) for _ in range(3)]
    copies = [gpu_xp.zeros_like(x) for x in arrays]
    right = []
    with fresh() as comm, loaded(gpu_xp, arrays[0]), arrays[0].device:
        streams = [stream(gpu_xp, "non-blocking") for _ in arrays]
        plans = [collectives.plan("allreduce", x, comm, algorithm=algorithm) for x in arrays]
        for turn in range(TURNS):
            for x, producer in zip(arrays, streams):
                with producer:
                    delay(gpu_xp)
                    write(gpu_xp, x, given(turn))
                    event = gpu_xp.cuda.Event(disable_timing=True)
                    event.record(producer)
                gpu_xp.cuda.get_current_stream().wait_event(event)
            for plan in plans:
                plan.start()
            for plan in reversed(plans):
                plan.wait()
            for x, copy, reader in zip(arrays, copies, streams[1:] + streams[:1]):
                with reader:
                    copy[...] = x
                    right.append(np.array_equal(numbers(copy), total(turn)))
    assert all(right), right


@only_on(1, 2, 4)
@pytest.mark.parametrize("where", TORCH_DEVICES)
def test_a_stream_of_torch_is_waited_for(where: str) -> None:
    torch = pytest.importorskip("torch")
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU that PyTorch finds")
    seen = []
    with torch.cuda.stream(torch.cuda.Stream()) if where == "cuda" else nullcontext():
        x = torch.zeros(N, device=where)
        for turn in range(TURNS):
            if where == "cuda":
                torch.cuda._sleep(LATE)
            x.copy_(torch.from_numpy(given(turn)), non_blocking=True)
            collectives.allreduce(x, COMM)
            seen.append(x.clone())
    assert [np.array_equal(one.cpu().numpy(), total(turn)) for turn, one in enumerate(seen)] == [True] * TURNS
