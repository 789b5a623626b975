"""Run operations in program order, either at once in the caller's thread or in one communication thread.

A `GroupJob` is one operation of a process group. A `Work` is the handle of an operation that c10d, the core of
torch.distributed, gives to the program. `communication.run` runs jobs.

Collectives of one group run one after another, in the order in which the program started them. There is one exception:
a collective that a callback of a future starts goes to the front of the queue. Otherwise its place among the
collectives of the program would depend on timing, and ranks would wait in different collectives. (PowerSGD's hook, for
example, starts operations in callbacks while backward starts others.)

Collectives of other groups, sends and receives run at the same time, because groups may overlap and each rank may call
them in its own order.

If an operation fails, the generation of its communicator ends on all ranks. A generation is the life of a communicator
between two failures.
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
from mpips.collectives.errors import StallError, of_caller
from mpips.collectives.fabric.requests import keep_until_complete
from mpips.collectives.fabric.wait import check_in_time
from mpips.torch.tensors import as_backend_error, bytes_of

if TYPE_CHECKING:
    from mpips.collectives.communicator import Communicator
    from mpips.collectives.plan import Plan

# For YIELD_SECONDS after the last progress, the thread only yields its core between two polls of its jobs. After that
# it sleeps for NAP_SECONDS between polls.
YIELD_SECONDS, NAP_SECONDS = 2e-3, 2e-5
# seconds between two checks whether the generation has ended
LOOK_SECONDS = 1e-2


class Work(torch._C._distributed_c10d.Work):
    """The handle of an operation that c10d gives to programs.

    It behaves like PyTorch's own Work around a future, except that `wait` raises the operation's error.

    Args:
        future: The future that completes when the operation ends. None for an operation that has already ended.
        status: MPI's status of a receive from any rank. None for all other operations.
        sequence: The number of the operation in its group.
        result: The result of an operation that has already ended.
    """

    # PyTorch's registry of works holds only the C++ objects, so the Python objects are kept alive here.
    _registered: ClassVar[set[Work]] = set()

    def __init__(
        self, future: Future[Any] | None, status: MPI.Status | None = None, sequence: int = 0, result: Any = None
    ) -> None:
        super().__init__()
        self._given_future = future
        self._result = result
        self._status = status
        self._sequence = sequence
        self._results: list[Tensor] = []

    @property
    def _future(self) -> Future[Any]:
        if self._given_future is None:
            # Most programs never ask for the future of an operation that has ended, and making it takes 2 us.
            self._given_future = Future()
            self._given_future.set_result(self._result)
        return self._given_future

    @classmethod
    def of_all(cls, works: Sequence[Work], result: Any) -> Work:
        """Return a work that ends when all of `works` have ended. Its value is `result`."""

        def finish(done: Future[list[Future[Any]]]) -> Any:
            for future in done.value():
                future.wait()
            return result

        return cls(torch.futures.collect_all([work._future for work in works]).then(finish), None, works[-1]._sequence)

    def register(self, results: Sequence[Tensor]) -> None:
        """Make `torch.ops._c10d_functional.wait_tensor`, which compiled code calls, wait for this work.

        The registration lasts until `wait` is called.
        """
        self._results = list(results)
        self._registered.add(self)
        for tensor in results:
            torch._C._distributed_c10d._register_work(tensor, self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation has ended. If it has failed, raise its error. Blocking.

        Args:
            timeout: How long to wait at most. None or 0: the timeout of the group.

        Raises:
            StallError: The time is over. The operation continues, so another `wait` may succeed.
        """
        if self._given_future is not None:
            if timeout is not None and timeout > timedelta(0):
                self._wait_at_most(timeout.total_seconds())
            communication.advance(self._given_future.done)
            self._given_future.wait()
        if self._results:
            results, self._results = self._results, []
            self._registered.discard(self)
            # wait_tensor is the only call that takes a work out of PyTorch's registry.
            for tensor in results:
                torch.ops._c10d_functional.wait_tensor(tensor)
        return True

    def _wait_at_most(self, seconds: float) -> None:
        future, ended, deadline = self._future, threading.Event(), time.monotonic() + seconds
        communication.advance(lambda: future.done() or time.monotonic() > deadline)
        future.add_done_callback(lambda _: ended.set())
        if not ended.wait(min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)):
            raise of_caller(StallError(f"wait: the operation has not ended in {seconds:.3g} s: wait again"))

    def _get_sequence_number(self) -> int:
        return self._sequence

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._future.done()

    def is_success(self) -> bool:
        return self._future.done() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of the operation, or None if it succeeded or has not ended."""
        if self._future.done():
            try:
                self._future.value()
            except Exception as error:
                return error
        return None

    def result(self) -> Any:
        return self._future.wait()

    def source_rank(self) -> int:
        """Return the sender of a message that was received from any rank, or -1 otherwise."""
        return -1 if self._status is None or not self._future.done() else self._status.Get_source()

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return the future of the operation. If the operation fails, C++ code also sees the error.

        An exception that Python sets on a future is a plain value for C++. An exception that a callback raises is an
        error for C++, so a callback raises it again.
        """
        fine = self._future.done() and self.exception() is None
        return self._future if fine else self._future.then(lambda future: future.wait())


class GroupJob:
    """One operation of a group.

    Args:
        run: A function that runs the operation to its end, blocking.
        steps: A function that returns an iterator. The iterator also runs the operation, and yields wherever `run`
            would wait.
        home: The communicator of the operation, or None.
        after: A function that is called when the operation has ended, or None.
        result: The value of the job's future.
        ordered: True if jobs with the same `home` run one after another. False for sends and receives, which do not
            wait for each other.
    """

    def __init__(
        self,
        run: Callable[[], object],
        steps: Callable[[], Iterator[None]],
        home: Communicator | None,
        after: Callable[[], None] | None = None,
        result: Any = None,
        ordered: bool = True,
    ) -> None:
        self._run = run
        self._steps = steps
        self._after = after
        self.home = home
        self.order = home if ordered else None
        self.result = result
        self.future: Future[Any] = Future()

    def run(self) -> None:
        """Run the operation to its end. Blocking."""
        self._run()
        if self._after is not None:
            self._after()

    def steps(self) -> Iterator[None]:
        """Run the operation as an iterator, so that other jobs can run at the same time."""
        yield from self._steps()
        if self._after is not None:
            self._after()


class Communication:
    """Runs the jobs of this process, either in the caller's thread or in the communication thread.

    Several threads of a program may call it, if each thread uses groups of its own.
    """

    def __init__(self) -> None:
        # live threads, other than the main thread, that have called run()
        self._others: set[threading.Thread] = set()
        self._lock = threading.RLock()
        self._state = threading.Condition(self._lock)
        # jobs that have not begun
        self._jobs: deque[GroupJob] = deque()
        # jobs that have begun, each with its iterator
        self._under_way: list[tuple[GroupJob, Iterator[None]]] = []
        # True while the communication thread or the main thread runs jobs
        self._busy = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def run(self, job: GroupJob, in_background: bool) -> Future[Any]:
        """Run a job, and return its future.

        The job runs in the caller's thread, blocking, if `in_background` is False, no other job is under way, and only
        the main thread of the program calls `run`. Its errors are then raised by this call. Any other job runs in the
        communication thread, and this call returns at once.

        Args:
            job: The operation.
            in_background: True to run the job in the communication thread in any case.
        """
        # If the caller is a callback of a future, this is the communication thread, and the callback may wait for the
        # job. So the job runs now.
        if threading.current_thread() is self._thread:
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
            # PyTorch does not warn of overflow, so suppress NumPy's warnings.
            with np.errstate(all="ignore"):
                job.run()
            job.future.set_result(job.result)
        finally:
            with self._state:
                self._busy = False
                self._state.notify_all()
        return job.future

    def advance(self, until: Callable[[], bool]) -> None:
        """Run jobs until `until()` is true, if the caller is a callback of a future. Otherwise do nothing.

        Such a callback runs in the communication thread. If it only waited, no job would ever end.
        """
        if threading.current_thread() is self._thread:
            self._run_side_by_side(until)

    def run_at_once(self, operation: Callable[..., object], *arguments: Any, **keywords: Any) -> bool:
        """Run an operation in the caller's thread, and return True. Blocking.

        If other jobs are under way, do nothing and return False. The same holds if the caller is not the main thread,
        or if another thread has made calls (see `_is_main_alone`).
        """
        if threading.get_ident() != threading.main_thread().ident or self._others:
            return False
        with self._lock:
            if self._busy or self._jobs:
                return False
            self._busy = True
        try:
            operation(*arguments, **keywords)
        finally:
            with self._lock:
                self._busy = False
                if self._jobs:
                    self._state.notify_all()
        return True

    def _is_main_alone(self) -> bool:
        """True if the caller is the main thread, and no other thread that has called run() is alive.

        Only then may the caller run a job itself. Otherwise ranks could deadlock:

        1. Threads A and B of the program each start a collective of their own group.
        2. On rank 0 thread A runs its collective at once, and thread B's collective has to wait. On rank 1, B runs its
           collective at once, and A's has to wait.
        3. Each rank waits in a collective that the other rank does not begin.

        The result is the same on all ranks, because they run the same program.
        """
        me, main = threading.current_thread(), threading.main_thread()
        if self._others or me is not main:
            self._others = {thread for thread in (*self._others, me) if thread.is_alive() and thread is not main}
        return not self._others

    def wait_for(self, home: Communicator) -> None:
        """Wait until no job of a communicator is left. Blocking. The communicator has ended, so its jobs fail soon."""
        if threading.current_thread() is self._thread:
            raise of_caller(
                RuntimeError("reconfigure: call it from a thread of the program, not from a work's callback")
            )
        while True:
            with self._state:
                jobs = [*self._jobs, *(job for job, _ in list(self._under_way))]
            if all(job.home is not home for job in jobs):
                return
            time.sleep(NAP_SECONDS)

    def close(self) -> None:
        """Stop the communication thread. Blocks for at most 2 seconds, so that a job under way may end or fail."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run_thread(self) -> None:
        """Run jobs whenever there are any, until `close`."""
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
        """Run jobs until none is left, or until `until()` is true.

        All jobs that have begun advance step by step, one after another. If one job alone ran to its end, ranks could
        deadlock, because another rank may be waiting in a different job.
        """
        moved = time.monotonic()
        while not until() and ((has_begun := self._begin_next_job()) or self._under_way):
            before = len(self._under_way)
            for each in list(self._under_way):
                # Since this loop began, a callback of another job's future may have run this job to its end.
                if each in self._under_way:
                    self._take_step(*each)
            if has_begun or len(self._under_way) < before:
                moved = time.monotonic()
            elif time.monotonic() - moved < YIELD_SECONDS:
                os.sched_yield()
            else:
                time.sleep(NAP_SECONDS)

    def _take_step(self, job: GroupJob, steps: Iterator[None]) -> None:
        """Advance a job to its next wait. If the job has ended, complete its future, which runs callbacks."""
        try:
            next(steps)
        except StopIteration:
            self._under_way.remove((job, steps))
            job.future.set_result(job.result)
        except Exception as error:
            self._under_way.remove((job, steps))
            job.future.set_exception(as_backend_error(error))

    def _begin_next_job(self) -> bool:
        """Begin the next job whose communicator has no unfinished earlier job. Return False if there is none."""
        taken = {job.order for job, _ in self._under_way} - {None}
        with self._state:
            for place, job in enumerate(self._jobs):
                if job.order not in taken:
                    # Move the job under the lock, so that `wait_for` always finds it in one of the two lists.
                    del self._jobs[place]
                    self._under_way.append((job, job.steps()))
                    return True
                taken.add(job.order)
        return False


# the only instance in a process
communication = Communication()


# ---- operations as steps


def wait_for_plan(plan: Plan) -> Iterator[None]:
    """Wait for a collective that has been started."""
    while not plan.test():
        yield
    plan.wait()


class Messages:
    """MPI's own calls, on a communicator that is used for nothing else.

    A group uses them for bitwise reductions, sends and receives, and exchanges that are uneven or have a root. Each
    method returns an iterator that starts the MPI call at its first step and ends when the call has completed.
    """

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
        """Reduce by an operation on bytes. With root None all ranks get the result."""
        # MPI uses both arrays until the call has ended, and the frame of this generator keeps them alive until then.
        given, result = bytes_of(source).copy(), bytes_of(target)
        if root is None:
            yield from _wait_for_request(lambda: self._comm.Iallreduce(given, result, op))
        else:
            receive = result if self._comm.rank == root else None
            yield from _wait_for_request(lambda: self._comm.Ireduce(given, receive, op, root))

    def send(self, source: Tensor, destination: int, tag: int) -> Iterator[None]:
        return _wait_for_request(lambda: self._comm.Isend(bytes_of(source), destination, tag))

    def receive(self, target: Tensor, source: int, tag: int, status: MPI.Status | None = None) -> Iterator[None]:
        return _wait_for_request(lambda: self._comm.Irecv(bytes_of(target), source, tag), status)


def _wait_for_request(start: Callable[[], MPI.Request], status: MPI.Status | None = None) -> Iterator[None]:
    """Start a call of MPI at the first step, and wait for its end."""
    request = start()
    try:
        while not request.Test(status):
            yield
    finally:
        # A request that is still active here belongs to an abandoned iterator. MPI may still write to the arrays, so
        # keep the request and its arrays alive.
        if request:
            keep_until_complete([request])


def listen(steps: Iterator[None], home: Communicator) -> Iterator[None]:
    """Run the steps of one call of MPI.

    Raises an error if the generation of `home` has ended, or if a process of this node has died.
    """
    due = 0.0
    for _ in steps:
        if (now := time.monotonic()) >= due:
            home.look_at_all()
            due = now + LOOK_SECONDS
        yield


def watch(steps: Iterator[None], home: Communicator, what: str) -> Iterator[None]:
    """Run the steps of one operation, while other operations may also be running.

    Raises an error if the generation of `home` has ended, or if the steps exceed the timeout. If the steps fail, the
    generation ends on all ranks.
    """
    clock, due = Clock(), 0.0
    try:
        home.check()
        for _ in steps:
            if (now := time.monotonic()) >= due:
                waited = clock.seconds()
                home.look(waited)
                check_in_time(what, waited, home.generation)
                due = now + LOOK_SECONDS
            yield
    except Exception as error:
        raise home.fail(what, error) from None


def _parts(memory: np.ndarray, sizes: Sequence[int], itemsize: int) -> list[Any]:
    """Return a buffer in the form that MPI's vector calls take: [memory, (counts, starts), type].

    `sizes[r]` is the number of elements for rank r.
    """
    counts = np.array(sizes, np.int64) * itemsize
    starts = np.cumsum(counts) - counts
    return [memory, (counts.tolist(), starts.tolist()), MPI.BYTE]
