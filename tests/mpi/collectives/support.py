"""What tests of several collectives need."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import collectives
from collectives import CollectiveError
from collectives import communicator as communicators
from collectives.communicator import communicator
from tests.mpi.collectives.cells import Heard

WORLD = MPI.COMM_WORLD
RANK, P = WORLD.rank, WORLD.size
ODD = P - 1  # the rank that does otherwise
TOTAL = P * (P + 1) // 2  # of RANK + 1 over all ranks
MIDDLE = tuple(f"mpips.collectives.{name}" for name in ("started", "runner", "node.", "network.", "shared_memory."))
PATIENCE = 30.0  # seconds that a wait may last in these tests
SWALLOWED_SECONDS = 1.0
KINDS = ("allreduce", "reduce_scatter", "allgather", "broadcast", "reduce", "alltoall")
TORCH_DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Pairs(MPI.Intracomm):
    """A communicator whose nodes hold two ranks each, but perhaps the last."""

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Intracomm:
        return self.Split(self.rank // 2)


class Alone(MPI.Intracomm):
    """A communicator whose nodes hold one rank each."""

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> MPI.Intracomm:
        return self.Split(self.rank)


NODES = {"one node": MPI.Intracomm, "a node for each rank": Alone, "nodes of two": Pairs}


@contextmanager
def fresh(nodes: str = "one node") -> Iterator[MPI.Intracomm]:
    """A communicator of all ranks on which no wait is endless."""
    made = NODES[nodes](WORLD.Dup())
    patient(made, PATIENCE, PATIENCE)
    yield made
    made.Free()


def patient(comm: MPI.Intracomm, stall_seconds: float, timeout_seconds: float) -> None:
    """From now on waits on `comm` warn and raise after so long."""
    communicator(comm).set_limits(stall_seconds, timeout_seconds)


def block(n: int, rank: int = RANK, p: int = P) -> slice:
    """The part of n elements that is a rank's: sizes differ by one at most, and the larger parts come first."""
    size, larger = divmod(n, p)
    start = rank * size + min(rank, larger)
    return slice(start, start + size + (rank < larger))


def hear(call: Callable[[], Any]) -> Heard:
    """Make a call, and tell what it raises. Local."""
    begun, error, sentence = time.monotonic(), "", ""
    try:
        call()
    except (CollectiveError, KeyboardInterrupt, ValueError, TypeError) as caught:
        error, sentence = type(caught).__name__, str(caught)
    return Heard(error, sentence, begun, time.monotonic())


def sentence(call: Callable[[], Any], error: type[Exception] = collectives.MismatchError) -> str:
    """What the call raises, having checked that all ranks raise it with the same sentence.

    No rank makes it while another is still in the call before: that one would hear of the failure there.
    """
    WORLD.Barrier()
    everybody = WORLD.allgather(hear(call)[:2])
    assert set(everybody) == {(error.__name__, everybody[0][1])}, everybody
    return everybody[0][1]


def still_works(comm: MPI.Intracomm) -> None:
    """Calls on `comm` sum exactly."""
    for n in (3, 100_000):
        x, y = np.full(n, RANK + 1.0), np.full(n, RANK + 1.0)
        collectives.allreduce(x, comm)
        collectives.plan("allreduce", y, comm, algorithm="ring")()
        assert WORLD.allreduce(bool((x == TOTAL).all() and (y == TOTAL).all()), MPI.LAND)


def share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on ranks share no memory, as on a node for each."""
    opened = communicators.open_memory
    monkeypatch.setattr(communicators, "open_memory", lambda node: opened(node) if node.size == 1 else None)


def make(array: str, n: int, dtype: Any = np.float32) -> Any:
    """An array of n elements: ordinary, shared (`collectives.empty`), or one or the other by rank (mixed)."""
    shared = array == "shared" or (array == "mixed" and RANK % 2 == 1)
    return collectives.empty(n, dtype) if shared else np.empty(n, dtype)


def started(plan: collectives.Plan) -> Any:
    """Run a plan by start and wait."""
    plan.start()
    return plan.wait()


def polled(plan: collectives.Plan) -> Any:
    """Run a plan by start, test beside other work, and wait."""
    plan.start()
    while not plan.test():
        time.sleep(0)
    return plan.wait()


def in_the_middle(frame: FrameType | None) -> bool:
    """Whether a frame belongs to a call that has begun: at its very edges an interrupt is the caller's own affair."""
    while frame is not None and not str(frame.f_globals.get("__name__", "")).startswith(MIDDLE):
        frame = frame.f_back
    return frame is not None


@contextmanager
def interrupted(
    seconds: float, middle: Callable[[FrameType | None], bool] = in_the_middle, again: float = 1e-4
) -> Iterator[list[float]]:
    """Raise KeyboardInterrupt once after some seconds, in the middle of a call; gives when it did, by the clock.

    Where the alarm finds no call that has begun it comes again a little later; never, where `again` is 0. It also comes
    again a second later where Python has swallowed it, as it does in what a garbage collection runs.
    """
    at, over = [0.0], False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if over:  # it comes once more, and would kill the process when the handler has gone
            return
        if not middle(frame):
            signal.setitimer(signal.ITIMER_REAL, again)
            return
        at[0] = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, SWALLOWED_SECONDS if again else 0)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield at
    finally:
        over = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
