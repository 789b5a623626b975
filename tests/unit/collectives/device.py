"""A stand-in for CuPy on NumPy: four "GPUs" whose streams run only what somebody waits for, as late as can be.

What is queued on a stream rests until an event behind it is asked for, or its stream is synchronised. Then it runs, and
before it what its stream was told to wait for, and nothing else. So a wait that is missing, or is for another stream,
and a read before the copy, all give wrong numbers. The first question whether an event is done is answered no.

Refused are: work on a stream of a device that is not the current one, host memory that is not pinned, memory of a GPU
without peer access, memory that was freed, and memory that is pinned twice.

It implements what `collectives.tensor` uses, and does not show: that CUDA and CuPy take these calls, any order of work
but the laziest, two things at the same time, and how long anything takes. Kernels are computed by NumPy; that
their source says the same is shown by test_kernels.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from collectives.tensor import cuda_kernels as kernels

DEVICES = 4
MODULES = ("cuda", "streams", "pinned")
"""Of `collectives.tensor`, those that import CuPy."""

Queue = deque[Any]


class Mark:
    """A place in a queue, behind what was there."""

    def __init__(self, queue: Queue):
        self.queue, self.reached = queue, False
        queue.append(self)

    def run(self) -> None:
        while not self.reached:
            self.step()

    def step(self) -> None:
        item = self.queue.popleft()
        if isinstance(item, Mark):
            item.reached = True
        else:
            item()


class Work:
    """A kernel or a copy in a queue."""

    def __init__(self, run: Callable[[], object]):
        self._run = run

    def __call__(self) -> None:
        self._run()


class State:
    """The machine."""

    def __init__(self) -> None:
        self.current = 0
        self.contexts: set[int] = set()
        """Devices that were used."""
        self.streams: dict[int, Stream] = {}
        self.memory: dict[int, tuple[int, int]] = {}
        """address -> (bytes, device) of arrays on devices."""
        self.pinned: dict[int, int] = {}
        """address -> bytes."""
        self.pinnings = 0
        self.peers: set[tuple[int, int]] = set()
        self.built: list[str] = []
        """Kernels, as often as they were built."""
        self.current_stream: dict[int, Stream] = {}
        self.blocked = 0
        """Kernels and copies that were still to run when an operation ended."""

    def use(self) -> int:
        self.contexts.add(self.current)
        return self.current

    def see(self, address: int, nbytes: int, device: int | None) -> None:
        """AssertionError where the device (None: any) cannot reach these bytes."""
        for start, length in self.pinned.items():
            if start <= address and address + nbytes <= start + length:
                return
        for start, (length, owner) in self.memory.items():
            if start <= address and address + nbytes <= start + length:
                assert device in (None, owner) or (device, owner) in self.peers, f"{device} is no peer of {owner}"
                return
        raise AssertionError(f"{nbytes} bytes at {address} are neither pinned nor on a device")


class Device:
    def __init__(self, number: int | None = None):
        self.id = STATE.current if number is None else number
        self._before: list[int] = []

    def __enter__(self) -> Device:
        self._before.append(STATE.current)
        STATE.current = self.id
        return self

    def __exit__(self, *_: Any) -> None:
        STATE.current = self._before.pop()


class Stream:
    """`ptr` 0 is the default stream of the current device, which waits for all blocking streams there."""

    null: Stream

    def __init__(self, non_blocking: bool = False):
        self.device_id = STATE.use()
        self.non_blocking = non_blocking
        self.ptr = 1000 + len(STATE.streams)
        self.queues: dict[int, Queue] = {}
        STATE.streams[self.ptr] = self

    @property
    def device(self) -> int:
        return STATE.current if self.device_id < 0 else self.device_id

    @property
    def queue(self) -> Queue:
        return self.queues.setdefault(self.device, deque())

    def __enter__(self) -> Stream:
        assert self.device == STATE.current, "the stream of another device"
        self._before = get_current_stream()
        STATE.current_stream[STATE.current] = self
        return self

    def __exit__(self, *_: Any) -> None:
        STATE.current_stream[STATE.current] = self._before

    def wait_event(self, event: Event) -> None:
        if event.mark is not None:
            self.queue.append(event.mark.run)

    def synchronize(self) -> None:
        self.mark().run()

    @property
    def done(self) -> bool:
        """Asked by the library when an operation ends."""
        left = sum(isinstance(item, Work) for item in self.queue)
        STATE.blocked += left
        return not left

    def mark(self) -> Mark:
        if self.ptr == 0:
            for other in STATE.streams.values():
                if other.device_id == self.device and not other.non_blocking:
                    self.queue.append(Mark(other.queue).run)
        return Mark(self.queue)


class Event:
    def __init__(self, disable_timing: bool = False):
        assert disable_timing
        self.device = STATE.use()
        self.mark: Mark | None = None
        self._asked = False

    def record(self, stream: Stream) -> None:
        assert stream.device == self.device, "the event of another device"
        self.mark, self._asked = stream.mark(), False

    @property
    def done(self) -> bool:
        if self.mark is not None and self._asked:
            self.mark.run()
        self._asked = True
        return self.mark is None or self.mark.reached


class Array:
    """An array on a device. What the user does with it is queued on the current stream of this device."""

    def __init__(self, shape: Any, dtype: Any, device: int | None = None, writable: bool = True):
        self.held = np.empty(shape, dtype)
        self.held.view(np.uint8)[...] = 0xA5  # what is read too early is no number that anybody put in
        self.device, self.writable = Device(device), writable
        if self.held.nbytes:
            address = self.held.ctypes.data
            STATE.memory[address] = (self.held.nbytes, self.device.id)
            weakref.finalize(self, STATE.memory.pop, address, None)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface = self.held.__array_interface__
        shown = (interface["data"][0], not self.writable)
        return {"shape": self.shape, "typestr": self.held.dtype.str, "data": shown, "strides": None, "version": 3}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def size(self) -> int:
        return self.held.size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.held.dtype

    def __setitem__(self, where: Any, value: Any) -> None:
        given = value.held if isinstance(value, Array) else np.array(value)
        with self.device:
            get_current_stream().queue.append(lambda: self.held.__setitem__(where, given))

    def get(self) -> np.ndarray[Any, Any]:
        """The numbers, when what was queued on the user's stream has run."""
        with self.device:
            get_current_stream().synchronize()
        return self.held.copy()


def asarray(x: Any, device: int | None = None) -> Array:
    given = np.asarray(x)
    made = Array(given.shape, given.dtype, device)
    with made.device:
        made[...] = given
    return made


def zeros_like(x: Array) -> Array:
    return asarray(np.zeros(x.shape, x.dtype), x.device.id)


def get_current_stream(device: int = -1) -> Stream:
    return STATE.current_stream.get(STATE.current if device < 0 else device, Stream.null)


def external_stream(ptr: int, device: int) -> Stream:
    assert STATE.streams[ptr].device_id == device
    return STATE.streams[ptr]


class RawKernel:
    def __init__(self, code: str, name: str):
        _, self._operation, dtype, count = name.split("_")
        assert code == kernels.source(self._operation, dtype, int(count))
        self._dtype, self._count = dtype, int(count)
        STATE.built.append(name)

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: Sequence[int]) -> None:
        device, stream = STATE.use(), get_current_stream()
        assert stream.device == device and grid[0] >= 1 and 1 <= block[0] <= 1024
        *addresses, n = arguments
        assert len(addresses) == self._count + 1
        dtype = _dtype(self._dtype)

        def run() -> None:
            for address in addresses:
                STATE.see(address, n * dtype.itemsize, device)
            vectors = [_view(address, n, dtype) for address in addresses]
            with np.errstate(all="ignore"):
                vectors[-1][:] = functools.reduce(getattr(np, self._operation), vectors[:-1])

        stream.queue.append(Work(run))


class Runtime:
    """`cupy.cuda.runtime`."""

    CUDARuntimeError = type("CUDARuntimeError", (RuntimeError,), {})

    def memcpyAsync(self, to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == 4 and STATE.streams[stream].device == STATE.use()

        def run() -> None:
            STATE.see(to, nbytes, None)
            STATE.see(source, nbytes, None)
            ctypes.memmove(to, source, nbytes)

        STATE.streams[stream].queue.append(Work(run))

    def hostRegister(self, address: int, nbytes: int, flags: int) -> None:
        assert flags == 3 and address % 4096 == 0
        assert not any(a < address + nbytes and address < a + b for a, b in STATE.pinned.items()), "pinned twice"
        STATE.use()
        STATE.pinned[address] = nbytes
        STATE.pinnings += 1

    def hostUnregister(self, address: int) -> None:
        STATE.use()
        del STATE.pinned[address]

    def deviceGetAttribute(self, attribute: int, device: int) -> int:
        return int(attribute == 91)

    def deviceCanAccessPeer(self, device: int, other: int) -> int:
        return 1

    def deviceEnablePeerAccess(self, other: int) -> None:
        if (STATE.use(), other) in STATE.peers:
            raise self.CUDARuntimeError("cudaErrorPeerAccessAlreadyEnabled: peer access is already enabled")
        STATE.peers.add((STATE.current, other))

    def pointerGetAttributes(self, address: int) -> Any:
        return types.SimpleNamespace(device=STATE.memory[address][1])


STATE = State()
Stream.null = Stream()
Stream.null.device_id, Stream.null.ptr = -1, 0
STATE.streams = {0: Stream.null}
STATE.contexts.clear()

cuda = types.SimpleNamespace(
    Device=Device,
    Event=Event,
    ExternalStream=external_stream,
    Stream=Stream,
    get_current_stream=get_current_stream,
    runtime=Runtime(),
)


@contextmanager
def installed() -> Iterator[Any]:
    """This module as `cupy`, for `collectives.tensor`, on a machine that was just switched on."""
    modules = [f"{top}.tensor.{module}" for top in ("collectives", "mpips.collectives") for module in MODULES]
    before = {name: sys.modules.pop(name, None) for name in ("cupy", *modules)}
    sys.modules["cupy"] = sys.modules[__name__]
    STATE.__init__()  # type: ignore[misc]
    STATE.streams = {0: Stream.null}
    Stream.null.queues.clear()
    try:
        yield STATE
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@contextmanager
def torch_uses(stream_of: Callable[[int], Stream]) -> Iterator[None]:
    """A torch that uses CUDA, and whose current stream of each device is this one."""
    before = sys.modules.get("torch")
    current = types.SimpleNamespace(
        is_initialized=lambda: True, current_stream=lambda d: types.SimpleNamespace(cuda_stream=stream_of(d).ptr)
    )
    sys.modules["torch"] = types.SimpleNamespace(cuda=current)  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.modules.pop("torch")
        if before is not None:
            sys.modules["torch"] = before


def _dtype(name: str) -> np.dtype[Any]:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def _view(address: int, n: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    memory = (ctypes.c_char * (n * dtype.itemsize)).from_address(address)
    return np.ndarray((n,), dtype, buffer=memory)
