"""Which stream waits for which: ours for the user's before an operation, the host for ours at its end.

Before   A kernel on one GPU reads the vectors of the others. So *each* of our streams waits for *every* device's user
         streams: the current stream of CuPy in this thread, that of torch where torch uses CUDA, and the legacy
         default stream, which itself waits for every blocking stream. Work on another non-blocking stream is its
         owner's to finish.
After    The host waits: no operation ends before its tickets are done. What the user queues later, on whatever stream,
         therefore runs later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import cupy as cp

NAP = 1e-4  # seconds
BY_ADDRESS = 4  # cudaMemcpyDefault: the addresses say which way


class Streams:
    """One stream of ours on each of the devices, for all operations of the process."""

    def __init__(self, devices: Iterable[int]):
        self._own = {device: _own(device) for device in devices}

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPUs, by CUDA's numbers."""
        return tuple(self._own)

    def after_user(self) -> None:
        """What follows on any of our streams comes after what the user has queued on any of the devices."""
        events = [_event(device, stream) for device in self._own for stream in _users(device)]
        for device, own in self._own.items():
            with cp.cuda.Device(device):
                for event in events:
                    own.wait_event(event)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make our stream of the device the current one."""
        with cp.cuda.Device(device), self._own[device]:
            yield

    def copy(self, device: int, to: int, source: int, nbytes: int) -> None:
        """Queue a copy between addresses on a device's stream. Host memory must be pinned."""
        if nbytes:
            with cp.cuda.Device(device):
                cp.cuda.runtime.memcpyAsync(to, source, nbytes, BY_ADDRESS, self._own[device].ptr)

    def ticket(self, devices: Sequence[int]) -> Callable[[], bool]:
        """Done when all that is queued by now on our streams of these devices has run."""
        left = [_event(device, self._own[device]) for device in devices]

        def done() -> bool:
            while left and left[-1].done:
                left.pop()
            return not left

        return done

    def drained(self, seconds: float) -> bool:
        """Wait, no longer than this, until all that is queued on our streams has run; False where it has not."""
        if all(own.done for own in self._own.values()):
            return True
        ticket, end = self.ticket(self.devices), time.monotonic() + seconds
        while not ticket():
            if time.monotonic() > end:
                return False
            time.sleep(NAP)
        return True


@cache
def _own(device: int) -> Any:
    with cp.cuda.Device(device):
        return cp.cuda.Stream(non_blocking=True)


def _event(device: int, stream: Any) -> Any:
    """An event behind what is queued on the stream by now."""
    with cp.cuda.Device(device):
        event = cp.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


def _users(device: int) -> Iterable[Any]:
    """The user's streams on a device."""
    streams = [cp.cuda.Stream.null, cp.cuda.get_current_stream(device)]
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        streams.append(cp.cuda.ExternalStream(torch.cuda.current_stream(device).cuda_stream, device))
    return {stream.ptr: stream for stream in streams}.values()
