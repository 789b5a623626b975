"""Rare meetings of all ranks of a communicator: everybody learns everybody's bytes, and nobody hangs unheard.

Used by `create`, and when a store ends. A rank whose arguments are bad comes to the meeting all the same and brings its
refusal, so all ranks raise one sentence. Who gives up one of these cannot come to another: that is for `meetings`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from collectives.errors import StallError, warn

if TYPE_CHECKING:
    from mpi4py import MPI

YIELDS = 8  # before the clock is looked at; where cores are busy each may cost a slice
SPIN_SECONDS = 1e-3
SLEEP_SECONDS = (2e-4, 2e-3)  # the shortest and the longest sleep between two looks
SLEEP_SHARE = 0.02  # of the time waited so far: a look costs the core that somebody else may need

_given_up: list[MPI.Request] = []
"""Requests that others may yet complete; they hold their memory."""


class Pause:
    """What to do between two looks at something that is not there yet: yield the core, later sleep in short steps.

    `describe()` says who waits for whom; it is called when the wait passes `stall_seconds` (a warning, once) or
    `timeout_seconds` (StallError; 0: never). `look(waited)` is called at every look of a long wait.
    """

    __slots__ = ("_count", "_describe", "_look", "_stall", "_start", "_timeout", "_warned", "waited")

    def __init__(
        self, describe: Callable[[], str], stall_seconds: float, timeout_seconds: float,
        look: Callable[[float], None] | None = None,
    ) -> None:  # fmt: skip
        self.waited = 0.0
        self._look = look
        self._count = 0
        self._start = 0.0
        self._describe, self._stall, self._timeout = describe, stall_seconds, timeout_seconds
        self._warned = False

    def restart(self) -> None:
        """What was waited for so far has come; another wait begins."""
        self.waited, self._count, self._start, self._warned = 0.0, 0, 0.0, False

    def __call__(self) -> None:
        self._count += 1
        if self._count < YIELDS:
            os.sched_yield()
            return
        now = time.monotonic()
        if not self._start:
            self._start = now
        waited = self.waited = now - self._start
        if waited < SPIN_SECONDS:
            os.sched_yield()
            return
        if self._look is not None:
            self._look(waited)
        if waited > self._stall and not self._warned:
            self._warned = True
            warn(f"{self._describe()} has taken {waited:.3g} s")
        if self._timeout and waited > self._timeout:
            raise StallError(f"{self._describe()} has taken {waited:.3g} s (timeout_seconds={self._timeout:g})")
        time.sleep(min(max(SLEEP_SHARE * waited, SLEEP_SECONDS[0]), SLEEP_SECONDS[1]))


def wait(request: MPI.Request, describe: Callable[[], str], stall_seconds: float, timeout_seconds: float) -> None:
    """Complete an MPI request by polling."""
    pause = Pause(describe, stall_seconds, timeout_seconds)
    try:
        while not request.Test():
            pause()
    except BaseException:
        _given_up.append(request)
        raise


def come(comm: MPI.Comm, stall_seconds: float, timeout_seconds: float) -> None:
    """Wait until all ranks of `comm` have come to `create`; collective."""
    what = f"mpips.create, to which not all {comm.Get_size()} ranks have come (all must call it, servers too),"
    wait(comm.Ibarrier(), lambda: what, stall_seconds, timeout_seconds)


def exchange(comm: MPI.Comm, payload: bytes, what: str, stall_seconds: float = 60.0) -> list[bytes]:
    """Everybody's payload, in rank order. Collective over `comm`, blocking."""

    def describe() -> str:
        return f"rank {comm.Get_rank()} waits for the other {comm.Get_size() - 1} ranks in {what}: it"

    sizes = np.empty(comm.Get_size(), np.int64)
    request = comm.Iallgather(np.array([len(payload)], np.int64), sizes)
    wait(request, describe, stall_seconds, 0.0)
    everything = np.empty(int(sizes.sum()), np.uint8)
    displacements = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    mine = np.frombuffer(payload, np.uint8)
    request = comm.Iallgatherv(mine, [everything, (sizes.tolist(), displacements.tolist())])
    wait(request, describe, stall_seconds, 0.0)
    data = everything.tobytes()
    return [data[start : start + size] for start, size in zip(displacements.tolist(), sizes.tolist(), strict=True)]
