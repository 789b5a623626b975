"""The part of `mpips chaos` inside a rank: it sends messages about the rank's calls and about what its program notes.

The faults themselves are made outside the rank, by the process that watches the job (`chaos.watch`). In a job that is
not watched, `watched` returns its argument unchanged, and `note` does nothing. Each message is one of the records
below. Times are of CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import faulthandler
import functools
import hashlib
import os
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import msgspec

from mpips.chaos.faults import CALLS, FaultPlan, Point, load
from mpips.store.world import WATCHED, launched_as

if TYPE_CHECKING:
    import numpy as np

    from mpips.store.api import KVStore

PLAN, SOCKET = "plan.json", "ranks"


class RankUp(msgspec.Struct, tag=True, frozen=True):
    """A message from a rank that has started, or whose role has changed. `host` is the name of its machine."""

    rank: int
    role: str
    host: str


class StoreCreated(msgspec.Struct, tag=True, frozen=True):
    """A message from a rank that has made a store. The rank is worker number `worker` of the store's `workers`.

    A process group that can be created again (`reconfigure`) counts as a store.
    """

    time: float
    rank: int
    worker: int
    workers: int


class PointReached(msgspec.Struct, tag=True, frozen=True):
    """A message from a rank that has reached the point at which fault number `fault` of the plan is due."""

    time: float
    rank: int
    fault: int


class StoreRecovered(msgspec.Struct, tag=True, frozen=True):
    """A message from a rank whose call of `recover` has returned.

    `step` is the step that all keys of the store are at, or None if the keys are at different steps.
    """

    time: float
    rank: int
    worker: int
    workers: int
    step: int | None


class ProgramNote(msgspec.Struct, tag=True, frozen=True):
    """A message with a value that the rank's program has noted.

    `value` is None if the noted value is not a number. `digest` is a hash of the noted value's bits.
    """

    time: float
    rank: int
    worker: int
    workers: int
    step: int
    value: float | None
    digest: str


# any message from a rank
Message = RankUp | StoreCreated | PointReached | StoreRecovered | ProgramNote


# On this signal a watched rank writes the stack of every thread to standard error.
SHOW_STACK = signal.SIGRTMIN + 8
# seconds that a rank waits to be killed at the point where the plan kills it
TO_BE_KILLED = 5.0
# the type of `mpips.create`
Create = TypeVar("Create", bound=Callable[..., Any])


class Injector:
    """A rank's connection to the process that watches the job. If the connection breaks, messages are dropped."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self._plan: FaultPlan = load(folder / PLAN)
        # name of a call -> how many times the rank has begun that call
        self._counts: Counter[str] = Counter()
        self._store: KVStore | None = None
        # rank and size in the last process group that `reconfigure` of `mpips.torch` has created, or None
        self._group: tuple[int, int] | None = None
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line.connect(str(folder / SOCKET))
        faulthandler.register(SHOW_STACK, chain=False)

    def send(self, message: Message) -> None:
        with suppress(OSError):
            self._line.send(msgspec.msgpack.encode(message))

    def reach(self, call: str) -> None:
        """Count a call that the rank begins, and report each fault whose point is at this call.

        `call` is the name of the called function.
        """
        self._counts[call] += 1
        reached = self.rank, call, self._counts[call]
        for number, fault in enumerate(self._plan.faults):
            point = fault.at
            if isinstance(point, Point) and (point.rank, point.call, point.nth) == reached:
                self.send(PointReached(time.monotonic(), self.rank, number))
                own = (fault.whom.role, fault.whom.number) == ("rank", self.rank)
                # Wait for the SIGKILL from the watching process, so that the rank dies exactly at this point.
                if own and not fault.lasts and not point.delay:
                    time.sleep(TO_BE_KILLED)

    def place(self) -> tuple[int, int]:
        """Return this worker's number in the store or process group, and the number of workers.

        Before one is made, return this rank's number and the number of ranks.
        """
        if self._group is not None:
            return self._group
        if self._store is None:
            return launched_as(os.environ) or (0, 1)
        return self._store.rank, self._store.num_workers

    def take(self, store: KVStore) -> None:
        """Begin to watch the calls of a store that has just been made."""
        self._store = store
        for call in CALLS:
            if hasattr(store, call):
                setattr(store, call, self._counted(call, getattr(store, call)))
        self.send(RankUp(self.rank, "worker", socket.gethostname()))
        self.send(StoreCreated(time.monotonic(), self.rank, *self.place()))

    def join(self, rank: int, size: int) -> None:
        """Report that this rank is in a process group that `reconfigure` has created."""
        recovered, self._group = self._group is not None, (rank, size)
        if recovered:
            self.send(StoreRecovered(time.monotonic(), self.rank, rank, size, None))
        else:
            self.send(RankUp(self.rank, "worker", socket.gethostname()))
            self.send(StoreCreated(time.monotonic(), self.rank, rank, size))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*args: object, **options: object) -> object:
            self.reach(name)
            result = call(*args, **options)
            if name == "recover":
                step = getattr(result, "step", None)
                self.send(StoreRecovered(time.monotonic(), self.rank, *self.place(), step))
            return result

        return counted


# the Injector of this process, if its job is watched
_injectors: list[Injector] = []


def watched(create: Create) -> Create:
    """Return `create` unchanged or, in a watched job, wrapped.

    The wrapper reports its own calls, and watches the calls of the stores that it makes.
    """
    folder = os.environ.get(WATCHED)
    if not folder:
        return create
    rank, size = launched_as(os.environ) or (0, 1)
    try:
        injector = Injector(Path(folder), rank)
    except (OSError, ValueError):
        # The watching process has ended.
        return create
    _injectors[:] = [injector]
    injector.send(RankUp(rank, _role(rank, size, {}), socket.gethostname()))

    @functools.wraps(create)
    def created(*args: object, **options: object) -> KVStore:
        injector.send(RankUp(rank, _role(rank, size, options), socket.gethostname()))
        injector.reach("create")
        store: KVStore = create(*args, **options)
        injector.take(store)
        return store

    return created  # type: ignore[return-value]


def join_group(rank: int, size: int) -> None:
    """Report that this rank is in a process group that `reconfigure` has created. Does nothing if not watched."""
    for injector in _injectors:
        injector.join(rank, size)


def note(step: int, value: SupportsFloat | bytes | np.ndarray) -> None:
    """Note, for the report of `mpips chaos`, that this worker begins a step, and note a value such as the loss.

    The report compares runs of one program by these values, bit for bit. Local. Does nothing in a job that is not
    watched.

    Args:
        step: The number of steps that have been done before.
        value: A number, or an array. Only a digest of an array is kept.

    >>> for step in range(3):
    ...     mpips.chaos.note(step, 0.5 / (step + 1))
    """
    if not _injectors:
        return
    injector = _injectors[0]
    # A tensor of PyTorch that requires gradients does not give access to its bytes, so detach it.
    if callable(detach := getattr(value, "detach", None)):
        value = detach()
    number = float(value) if isinstance(value, float | int) or getattr(value, "shape", None) == () else None
    if number is not None:
        data = struct.pack("<d", number)
    elif isinstance(value, bytes):
        data = value
    else:
        import numpy as np

        array: Any = value
        # View the tensor as bytes, because NumPy has no bfloat16.
        if detach is not None:
            array = array.contiguous().view(-1).view(sys.modules["torch"].uint8).numpy()
        data = np.asarray(array).tobytes()
    digest = hashlib.blake2b(data, digest_size=8).hexdigest()
    injector.send(ProgramNote(time.monotonic(), injector.rank, *injector.place(), step, number, digest))


def _role(rank: int, size: int, options: dict[str, Any]) -> str:
    """Return the role in which a rank starts. The lowest ranks are workers, then come servers, then spares."""
    servers, spares = (_number(name, options) for name in ("servers", "spares"))
    if rank >= size - spares:
        return "spare"
    return "server" if rank >= size - spares - servers else "worker"


def _number(name: str, options: dict[str, Any]) -> int:
    with suppress(TypeError, ValueError):
        return max(0, int(options.get(name) or os.environ.get(f"MPIPS_{name.upper()}", "0")))
    return 0
