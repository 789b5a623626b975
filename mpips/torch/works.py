"""Operations under way: run at once in the caller's thread, or by one communication thread, in program order.

A `GroupJob` is one operation, and a `Work` is what c10d hands to its users for it. `communication.run` runs jobs.
Collectives of one group start one after the other, in the order in which the program made them; what a callback starts
comes at once, whatever the program has made meanwhile, or ranks would differ. Those of other groups, sends and receives
go on beside them: groups overlap, and each rank may call them in an order of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.futures import Future

from mpips.collectives.clock import Clock
from mpips.collectives.fabric.requests import keep
from mpips.collectives.fabric.wait import see_in_time
from mpips.torch.tensors import as_backend_error, bytes_of

if TYPE_CHECKING:
    from mpips.collectives.communicator import Communicator
    from mpips.collectives.plan import Plan

YIELD_SECONDS, NAP_SECONDS = 2e-3, 2e-5
"""Seconds in which the thread only gives way between two looks at the jobs, and of its sleeps afterwards."""
LOOK_SECONDS = 1e-2
"""Between two looks for the end of the generation."""


class Work(torch._C._distributed_c10d.Work):
    """The handle that c10d returns. Unlike in PyTorch's own wrapper of a future, `wait` raises the operation's error.

    `status` is that of a receive from any rank, `sequence` the operation's number in its group.
    """

    # works that PyTorch's registry holds, which keeps no object of Python alive
    _registered: ClassVar[set[Work]] = set()

    def __init__(self, future: Future[Any], status: MPI.Status | None = None, sequence: int = 0) -> None:
        super().__init__()
        self._future, self._status, self._sequence = future, status, sequence
        self._results: list[Tensor] = []

    @classmethod
    def of_all(cls, works: Sequence[Work], result: Any) -> Work:
        """A work that ends when all of these have."""

        def finish(done: Future[list[Future[Any]]]) -> Any:
            for future in done.value():
                future.wait()
            return result

        return cls(torch.futures.collect_all([work._future for work in works]).then(finish), None, works[-1]._sequence)

    def register(self, results: Sequence[Tensor]) -> None:
        """Let `wait_tensor` wait for this work, which compiled code calls on its results, until `wait` is called."""
        self._results = list(results)
        self._registered.add(self)
        for tensor in results:
            torch._C._distributed_c10d._register_work(tensor, self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation has ended. Blocking; `timeout` is that of the group."""
        self._future.wait()
        if self._results:
            results, self._results = self._results, []
            self._registered.discard(self)
            for tensor in results:  # the only call that takes a work out of the registry
                torch.ops._c10d_functional.wait_tensor(tensor)
        return True

    def _get_sequence_number(self) -> int:
        return self._sequence

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of the operation, or None."""
        if self._future.done():
            try:
                self._future.value()
            except Exception as error:
                return error
        return None

    def result(self) -> Any:
        return self._future.wait()

    def source_rank(self) -> int:
        """Return the sender of a message that was received from any rank, else -1."""
        return -1 if self._status is None or not self._future.done() else self._status.Get_source()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future that fails in C++ too where the operation has: Python's exceptions are mere values there."""
        fine = self._future.done() and self.exception() is None
        return self._future if fine else self._future.then(lambda future: future.wait())


class GroupJob:
    """One operation: `run` makes it, blocking; `steps` makes the same beside others; `after` follows either.

    `order`: the communicator on which the job takes turns with others; None for sends and receives. `result`: the
    value of the future.
    """

    def __init__(
        self,
        run: Callable[[], object],
        steps: Callable[[], Iterator[None]],
        order: Communicator | None,
        after: Callable[[], None] | None = None,
        result: Any = None,
    ) -> None:
        self._run, self._steps, self._after = run, steps, after
        self.order, self.result = order, result
        self.future: Future[Any] = Future()

    def run(self) -> None:
        """Run the operation to its end. Blocking."""
        self._run()
        if self._after is not None:
            self._after()

    def steps(self) -> Iterator[None]:
        """Run the operation beside others."""
        yield from self._steps()
        if self._after is not None:
            self._after()


class Communication:
    """Runs the jobs of this process. Threads of the program may call it, each for groups of its own."""

    def __init__(self) -> None:
        self._others: set[threading.Thread] = set()
        self._state = threading.Condition()
        self._jobs: deque[GroupJob] = deque()
        self._under_way: list[tuple[GroupJob, Iterator[None]]] = []
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def run(self, job: GroupJob, in_background: bool) -> Future[Any]:
        """Run a job now, blocking, or in the thread, and return its future. Errors of a job that runs now are raised.

        It runs now where it need not go on `in_background` and no other is under way. In the thread jobs of several
        threads of the program do not wait for each other."""
        if threading.current_thread() is self._thread:  # a callback of a future, which may wait for this one
            with self._state:
                self._jobs.appendleft(job)
            self._run_side_by_side(job.future.done)
            return job.future
        with self._state:
            if in_background or not self._is_main_alone() or self._busy or self._jobs:
                self._jobs.append(job)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run_thread, name="mpips torch", daemon=True)
                    self._thread.start()
                self._state.notify_all()
                return job.future
            self._busy = True
        try:
            with np.errstate(all="ignore"):  # as PyTorch computes
                job.run()
            job.future.set_result(job.result)
        finally:
            with self._state:
                self._busy = False
                self._state.notify_all()
        return job.future

    def _is_main_alone(self) -> bool:
        """Return whether the caller is the main thread, and no other that has called is alive.

        Only one of them may run jobs itself, and the same on all ranks: each would keep back what another rank awaits.
        """
        me, main = threading.current_thread(), threading.main_thread()
        if self._others or me is not main:
            self._others = {thread for thread in (*self._others, me) if thread.is_alive() and thread is not main}
        return not self._others

    def close(self) -> None:
        """End the thread when the jobs under way have ended or failed. Blocks for 2 seconds at most."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run_thread(self) -> None:
        """Run jobs while there are any, else sleep, until `close`."""
        np.seterr(all="ignore")
        while True:
            with self._state:
                self._state.wait_for(lambda: self._closing or (self._jobs and not self._busy))
                if self._closing:
                    return
                self._busy = True
            try:
                self._run_side_by_side()
            finally:
                with self._state:
                    self._busy = False
                    self._state.notify_all()

    def _run_side_by_side(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run jobs until none is left, or so far. No job is waited for by itself: another rank may wait in another."""
        moved = time.monotonic()
        while not until() and ((job := self._next_job()) or self._under_way):
            before = len(self._under_way)
            if job is not None:
                self._under_way.append((job, job.steps()))
            for each in list(self._under_way):
                if each in self._under_way:  # a callback may have ended it meanwhile
                    self._take_step(*each)
            if job is not None or len(self._under_way) < before:
                moved = time.monotonic()
            elif time.monotonic() - moved < YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(NAP_SECONDS)

    def _take_step(self, job: GroupJob, steps: Iterator[None]) -> None:
        """Advance a job to its next wait. Where it has ended its future has a result or an error, and callbacks run."""
        try:
            next(steps)
        except StopIteration:
            self._under_way.remove((job, steps))
            job.future.set_result(job.result)
        except Exception as error:
            self._under_way.remove((job, steps))
            job.future.set_exception(as_backend_error(error))

    def _next_job(self) -> GroupJob | None:
        """Return the next job that may begin: those of one communicator wait for the one before."""
        taken = {job.order for job, _ in self._under_way} - {None}
        with self._state:
            for place, job in enumerate(self._jobs):
                if job.order not in taken:
                    del self._jobs[place]
                    return job
                taken.add(job.order)
        return None


communication = Communication()
"""The one of this process."""


# ---- operations as steps


def wait_for_plan(plan: Plan) -> Iterator[None]:
    """Wait for a collective that has begun."""
    while not plan.test():
        yield
    plan.wait()


class Messages:
    """MPI's own calls on one communicator, used for nothing else: uneven and rooted exchanges, bitwise reductions,
    sends and receives."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def alltoall(self, target: Tensor, into: Sequence[int], source: Tensor, out_of: Sequence[int]) -> Iterator[None]:
        size = source.element_size()
        sent, received = _parts(bytes_of(source), out_of, size), _parts(bytes_of(target), into, size)
        return _wait_for_request(lambda: self._comm.Ialltoallv(sent, received))

    def allgather(self, target: Tensor, sizes: Sequence[int], source: Tensor) -> Iterator[None]:
        received = _parts(bytes_of(target), sizes, source.element_size())
        return _wait_for_request(lambda: self._comm.Iallgatherv(bytes_of(source), received))

    def gather(self, target: Tensor, sizes: Sequence[int], source: Tensor, root: int) -> Iterator[None]:
        received = _parts(bytes_of(target), sizes, source.element_size()) if self._comm.rank == root else None
        return _wait_for_request(lambda: self._comm.Igatherv(bytes_of(source), received, root))

    def scatter(self, target: Tensor, source: Tensor, sizes: Sequence[int], root: int) -> Iterator[None]:
        sent = _parts(bytes_of(source), sizes, source.element_size()) if self._comm.rank == root else None
        return _wait_for_request(lambda: self._comm.Iscatterv(sent, bytes_of(target), root))

    def reduce(self, target: Tensor, source: Tensor, op: MPI.Op, root: int | None) -> Iterator[None]:
        """Reduce by an operation on bytes; on all ranks where there is no root."""
        given, result = bytes_of(source).copy(), bytes_of(target)  # which live until MPI is through with them
        if root is None:
            yield from _wait_for_request(lambda: self._comm.Iallreduce(given, result, op))
        else:
            mine = result if self._comm.rank == root else None
            yield from _wait_for_request(lambda: self._comm.Ireduce(given, mine, op, root))

    def send(self, source: Tensor, destination: int, tag: int) -> Iterator[None]:
        return _wait_for_request(lambda: self._comm.Isend(bytes_of(source), destination, tag))

    def receive(self, target: Tensor, source: int, tag: int, status: MPI.Status | None = None) -> Iterator[None]:
        return _wait_for_request(lambda: self._comm.Irecv(bytes_of(target), source, tag), status)


def _wait_for_request(start: Callable[[], MPI.Request], status: MPI.Status | None = None) -> Iterator[None]:
    """Start a call of MPI when the first step is taken, and wait for its end."""
    request = start()
    try:
        while not request.Test(status):
            yield
    finally:
        if request:
            keep([request])  # which holds the arrays that MPI may still touch


def listen(steps: Iterator[None], home: Communicator) -> Iterator[None]:
    """Run steps within MPI's own calls. Raise where the generation of `home` has ended, or a process of the node."""
    due = 0.0
    for _ in steps:
        if (now := time.monotonic()) >= due:
            home.listen()
            due = now + LOOK_SECONDS
        yield


def watch(steps: Iterator[None], home: Communicator, what: str) -> Iterator[None]:
    """Run steps beside others. Raise where the generation of `home` has ended; end it where the steps fail."""
    clock, due = Clock(), 0.0
    try:
        home.check()
        for _ in steps:
            if (now := time.monotonic()) >= due:
                waited = clock.seconds()
                home.hear(waited)
                see_in_time(what, waited, home.generation)
                due = now + LOOK_SECONDS
            yield
    except Exception as error:
        raise home.fail(what, error) from None


def _parts(memory: np.ndarray, sizes: Sequence[int], itemsize: int) -> list[Any]:
    """Return a vector of bytes as MPI takes parts of it: [memory, (counts, starts), type]."""
    counts = np.array(sizes, np.int64) * itemsize
    starts = np.cumsum(counts) - counts
    return [memory, (counts.tolist(), starts.tolist()), MPI.BYTE]
