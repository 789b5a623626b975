"""Negotiation: match the operations of a process set by name, in whatever order ranks begin them.

A process set is Horovod's name for a group of ranks. An `OperationRequest` describes each operation. While a rank has
operations in flight, its communication thread runs rounds with the other ranks. In each round:

1. An allgather collects every rank's new requests, and whether its program is waiting.
2. The operations that all ranks have requested run, in the same order on all ranks. Consecutive allreduces with the
   same settings run as one.

If the requests of an operation do not fit together, its handles on all ranks get the same error, and the process set
stays usable. Any other failure ends all operations in flight.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from itertools import groupby
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from mpips.collectives.agreement import SAME_VALUES, Items, difference
from mpips.collectives.api import begin
from mpips.collectives.communicator import communicator
from mpips.collectives.errors import CollectiveError, format_ranks
from mpips.torch.jobs import GroupJobs
from mpips.torch.tensors import flatten, flatten_result
from mpips.torch.works import GroupJob, communication, wait_for_plan


class HorovodInternalError(CollectiveError):
    """An operation has failed on all ranks of its process set."""


class OperationRequest(msgspec.Struct, array_like=True):
    """One rank's request for an operation. The rank sends it to the other ranks."""

    kind: str
    name: str
    dtypes: list[str]
    shapes: list[list[int]]
    op: int = 0
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: list[int] = []

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"

    def items(self) -> Items:
        """Return the properties of the request that must be the same on all ranks."""
        # In these two operations, ranks may have different numbers of rows.
        free = 1 if self.kind in ("allgather", "alltoall") else 0
        things = {
            "the operation": self.kind,
            "the number of tensors": len(self.shapes),
            "dtype": self.dtypes,
            "number of dimensions": [*map(len, self.shapes)],
            "shape behind the first dimension" if free else "shape": [shape[free:] for shape in self.shapes],
            "op": self.op,
            "prescale_factor": self.prescale,
            "postscale_factor": self.postscale,
            "root_rank": self.root,
        }
        return [(thing, str(_only_item(value))) for thing, value in things.items()]


T = TypeVar("T")


class OperationHandle(Generic[T]):
    """An operation in flight on this rank.

    Args:
        request: The description of the operation that is sent to the other ranks.
        tensors: The tensors that the operation reads, or changes in place.
        deliver: A function that turns the list of results into the value that the program gets.
        waiting: A context that tells the other ranks that this rank's program waits.
    """

    def __init__(
        self,
        request: OperationRequest,
        tensors: Sequence[Tensor],
        deliver: Callable[..., T],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.request = request
        self.tensors = list(tensors)
        self._deliver = deliver
        self._waiting = waiting
        # number of rows that an alltoall has received from each rank
        self.received: list[int] = []
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def poll(self) -> bool:
        """True if the operation has ended."""
        return self._done.is_set()

    def end(self, results: list[Tensor] | T, error: BaseException | None = None) -> None:
        """Set the result or the error, and wake the threads that wait for it."""
        if error is None and isinstance(results, list):
            results = self._deliver(results)
        self._result, self._error = results, error  # type: ignore[assignment]
        self._done.set()

    def wait(self) -> T:
        """Wait until the operation has ended. Return its result, or raise its error. Blocking."""
        if not self._done.is_set():
            with self._waiting():
                self._done.wait()
        if self._error is not None:
            raise HorovodInternalError(str(self._error)) from None
        return self._result


class HorovodOp(IntEnum):
    """Horovod's reductions, with Horovod's numbers."""

    Average, Sum, Adasum, Min, Max, Product = range(6)


REDUCTIONS = {
    HorovodOp.Average: ReduceOp.AVG,
    HorovodOp.Sum: ReduceOp.SUM,
    HorovodOp.Min: ReduceOp.MIN,
    HorovodOp.Max: ReduceOp.MAX,
    HorovodOp.Product: ReduceOp.PRODUCT,
}


class OperationRunner:
    """Runs operations that all ranks have requested, on one communicator."""

    def __init__(self, jobs: GroupJobs, rank: int, names: Sequence[int]) -> None:
        self._jobs = jobs
        self._rank = rank
        self._names = names
        self._size = len(names)

    def allreduce(self, first: OperationRequest, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Reduce tensors in place as one operation, with the reduction and factors of `first`."""
        _scale(tensors, first.prescale)
        yield from self._jobs.allreduce_together(tensors, REDUCTIONS[HorovodOp(first.op)]).steps()
        _scale(tensors, first.postscale)

    def run(
        self, first: OperationRequest, every: Sequence[OperationRequest], handle: OperationHandle[Any]
    ) -> Generator[None, None, list[Tensor]]:
        """Run an operation that is not an allreduce, and return its results.

        Args:
            first: The request of the lowest rank.
            every: The requests of all ranks, by rank.
            handle: This rank's handle of the operation.
        """
        if first.kind == "broadcast":
            root = self._names.index(first.root)
            for tensor in handle.tensors:
                target, copy_back = flatten_result(tensor)
                yield from self._jobs.move("broadcast", target, None, root, copy_back).steps()
            return handle.tensors
        if first.kind == "alltoall":
            handle.received = [request.splits[self._rank] for request in every]
        run = {"allgather": self._allgather, "alltoall": self._alltoall, "reducescatter": self._reducescatter}
        results = []
        for place, tensor in enumerate(handle.tensors):
            results.append((yield from run[first.kind](every, place, tensor)))
        return results

    def _allgather(
        self, every: Sequence[OperationRequest], place: int, tensor: Tensor
    ) -> Generator[None, None, Tensor]:
        rows = [request.shapes[place][0] for request in every]
        result = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype)
        yield from self._jobs.allgather(list(result.split(rows)), tensor).steps()
        return result

    def _alltoall(self, every: Sequence[OperationRequest], place: int, tensor: Tensor) -> Generator[None, None, Tensor]:
        received = [request.splits[self._rank] for request in every]
        result = torch.empty((sum(received), *tensor.shape[1:]), dtype=tensor.dtype)
        # number of elements of a row; a rank that sends no rows takes this number from the rows that it receives
        row = tensor[0].numel() if tensor.shape[0] else result[0].numel() if result.shape[0] else 0
        parts = [[rows * row for rows in each] for each in (received, every[self._rank].splits)]
        steps = self._jobs.messages.alltoall(result.view(-1), parts[0], flatten(tensor), parts[1])
        yield from self._jobs.exchange(steps, "alltoall").steps()
        return result

    def _reducescatter(
        self, every: Sequence[OperationRequest], place: int, tensor: Tensor
    ) -> Generator[None, None, Tensor]:
        request, whole = every[self._rank], tensor.shape[0]
        rows = [whole // self._size + (rank < whole % self._size) for rank in range(self._size)]
        result = torch.empty((rows[self._rank], *tensor.shape[1:]), dtype=tensor.dtype)
        given = flatten(tensor).clone()
        _scale([given], request.prescale)
        row = tensor[0].numel() if whole else 0
        sizes = [each * row for each in rows]
        yield from self._jobs.reduce_scatter(result, given, sizes, REDUCTIONS[HorovodOp(request.op)]).steps()
        _scale([result], request.postscale)
        return result


def _scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors in place, as Horovod does.

    Integers are multiplied in float64, and the result is truncated. float16 and bfloat16 are multiplied in float32.
    """
    if factor == 1.0:
        return
    for tensor in map(Tensor.detach, tensors):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.copy_(tensor.float() * factor)
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.mul_(factor)
        else:
            tensor.copy_(tensor.double() * factor)


# Size of a rank's row in the first allgather of a round. If the requests of any rank need more, a second allgather
# follows.
ROW_BYTES = 1024
# pause after a round in which no rank had a new request
PAUSE_SECONDS = 1e-3
# How long to wait before a round while the program computes and may begin more operations, as in a backward pass. The
# longer time is for ranks with one core each, where a round takes the core away from the program.
CYCLE_SECONDS, CROWDED_CYCLE_SECONDS = 5e-3, 5e-2
# If this many rounds in a row have no new request while the programs of all ranks wait, the operations fail.
IDLE_ROUNDS = 1000
# kind and name of the request of a rank that calls join()
NOTHING_LEFT = "join"


class Negotiator:
    """Matches and runs the operations of one process set. Creating a Negotiator is collective.

    Args:
        comm: A communicator that is used for nothing else.
        names: For each rank of `comm` its rank in the world, for error messages.
        timeout_seconds: The timeout of operations; 0 means none.
    """

    def __init__(self, comm: MPI.Intracomm, names: Sequence[int], timeout_seconds: float) -> None:
        self.comm = comm
        self.names = names
        # Jobs belong to PyTorch groups, for which a timeout of 0 means "expires at once".
        self.jobs = GroupJobs(comm, timeout_seconds or math.inf)
        self._home = home = communicator(comm)
        roomy = home.nodes > 1 or home.board.memory.roomy
        self._cycle_seconds = CYCLE_SECONDS if roomy else CROWDED_CYCLE_SECONDS
        self._runner = OperationRunner(self.jobs, comm.rank, names)
        # guards the fields that the threads of the program and the communication thread both change
        self._state = threading.Lock()
        # name -> operation under way on this rank
        self._handles: dict[str, OperationHandle[Any]] = {}
        # requests that have not been sent to the other ranks yet
        self._new: list[OperationRequest] = []
        # True while the communication thread makes rounds
        self._runs = False
        # number of threads of the program that wait for an operation
        self._waiting = 0
        # kind -> number of operations without a name that have begun so far
        self._unnamed: dict[str, int] = {}
        # name -> {rank: request}, for operations that some ranks have not requested yet
        self._met: dict[str, dict[int, OperationRequest]] = {}
        # ranks that have called join(), in the order of their calls
        self._joined: list[int] = []
        self._row = np.zeros(ROW_BYTES, np.uint8)
        self._rows = np.zeros((comm.size, ROW_BYTES), np.uint8)

    def begin(self, handle: OperationHandle[T]) -> OperationHandle[T]:
        """Begin an operation. Does not block.

        Raises ValueError if an operation with the same name is under way on this rank.
        """
        request = handle.request
        with self._state:
            if not request.name:
                self._unnamed[request.kind] = number = self._unnamed.get(request.kind, 0) + 1
                request.name = f"{request.kind}.noname.{number}"
            if request.name in self._handles:
                raise ValueError(
                    f"{request}: an operation of this name is under way on rank "
                    f"{self.names[self.comm.rank]}: call synchronize() on it first, or choose another "
                    "name"
                )
            self._handles[request.name] = handle
            self._new.append(request)
            begins, self._runs = not self._runs, True
        if begins:
            communication.run(GroupJob(lambda: None, self._steps, None), True)
        return handle

    def close(self) -> None:
        """Free the communicators, unless an operation is under way on this rank. Local."""
        # The communication thread may be in its last round.
        while self._runs and not self._handles:
            time.sleep(1e-4)
        if not self._runs and not MPI.Is_finalized():
            self.jobs.free()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context that tells the other ranks that this rank's program waits for an operation."""
        with self._state:
            self._waiting += 1
        try:
            yield
        finally:
            with self._state:
                self._waiting -= 1

    # ---- in the communication thread

    def _steps(self) -> Iterator[None]:
        """Make rounds until no operation of this rank is under way."""
        idle = 0
        while True:
            until = time.monotonic() + self._cycle_seconds
            while self._new and not self._waiting and time.monotonic() < until:
                yield
            with self._state:
                if not self._handles:
                    self._runs = False
                    return
                brought, self._new = self._new, []
                waits = self._waiting > 0
            try:
                rows = yield from self._gather(msgspec.msgpack.encode((waits, brought)))
                every = [msgspec.msgpack.decode(row, type=tuple[bool, list[OperationRequest]]) for row in rows]
                if any(requests for _, requests in every):
                    idle = 0
                    yield from self._take(every)
                    continue
                idle = idle + 1 if all(waiting for waiting, _ in every) else 0
                if idle == IDLE_ROUNDS:
                    self._fail_all(HorovodInternalError(self._why_nothing_runs()))
                    idle = 0
            except Exception as error:
                self._fail_all(self._home.fail("an operation of Horovod's", error))
                continue
            until = time.monotonic() + PAUSE_SECONDS
            while time.monotonic() < until and not self._new:
                yield

    def _gather(self, word: bytes) -> Generator[None, None, list[bytes]]:
        """Gather some bytes from each rank, and return them in rank order.

        A rank's row is the length of its data in 8 bytes, followed by the data. If the data of any rank does not fit
        into a row, all data is gathered again, in rows of the largest length.
        """
        size = len(word)
        self._row[:8].view(np.int64)[0] = size
        if size <= ROW_BYTES - 8:
            self._row[8 : 8 + size] = np.frombuffer(word, np.uint8)
        yield from wait_for_plan(begin("allgather", self._row, self.comm, out=self._rows))
        sizes = [int(row[:8].view(np.int64)[0]) for row in self._rows]
        rows, start = self._rows, 8
        if max(sizes) > ROW_BYTES - 8:
            padded = np.zeros(max(sizes), np.uint8)
            padded[:size] = np.frombuffer(word, np.uint8)
            rows, start = np.zeros((self.comm.size, padded.size), np.uint8), 0
            yield from wait_for_plan(begin("allgather", padded, self.comm, out=rows))
        return [row[start : start + length].tobytes() for row, length in zip(rows, sizes)]

    def _take(self, every: Sequence[tuple[bool, list[OperationRequest]]]) -> Iterator[None]:
        """Take all ranks' new requests, and run the operations that all ranks have requested."""
        for rank, (_, requests) in enumerate(every):
            for request in requests:
                if request.kind == NOTHING_LEFT:
                    self._joined.append(rank)
                else:
                    self._met.setdefault(request.name, {})[rank] = request
        ready = []
        # Every rank has received the requests in the same order, so `ready` is the same on all ranks.
        for name, requests_of in list(self._met.items()):
            if len(requests_of.keys() | set(self._joined)) == self.comm.size:
                del self._met[name]
                first = requests_of[min(requests_of)]
                # Nearly always all requests are equal, and it is faster to compare them than to make their items.
                differ = any(request != first for request in requests_of.values())
                unlike = difference({self.names[rank]: each.items() for rank, each in requests_of.items() if differ})
                if wrong := f"{unlike}: {SAME_VALUES}" if unlike else self._against_joined(first):
                    self._end(name, None, HorovodInternalError(f"{first}: {wrong}"))
                else:
                    ready.append((first, requests_of))
        for _, group in groupby(ready, lambda each: _fusion(each[0])):
            yield from self._run(list(group))
        if len(self._joined) == self.comm.size:
            last, self._joined = self._joined[-1], []
            self._unnamed.clear()
            self._end(NOTHING_LEFT, self.names[last])

    def _run(self, operations: Sequence[tuple[OperationRequest, dict[int, OperationRequest]]]) -> Iterator[None]:
        """Run one operation, or several allreduces as one. A rank that has called join() contributes zeros."""
        first, requests = operations[0]
        if first.kind == "allreduce":
            every = [self._tensors_of(request) for request, _ in operations]
            yield from self._runner.allreduce(first, [tensor for tensors in every for tensor in tensors])
            for (request, _), tensors in zip(operations, every):
                self._end(request.name, tensors)
        elif first.kind == "barrier":
            self._end(first.name, [])
        else:
            in_order = [requests[rank] for rank in sorted(requests)]
            self._end(first.name, (yield from self._runner.run(first, in_order, self._handles[first.name])))

    def _tensors_of(self, request: OperationRequest) -> Sequence[Tensor]:
        handle = self._handles.get(request.name)
        if handle is not None:
            return handle.tensors
        return [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(request.dtypes, request.shapes)]

    def _against_joined(self, first: OperationRequest) -> str:
        """Return the reason why an operation cannot run while some ranks have called join(), or "" if it can."""
        if not self._joined or first.kind == "barrier" or (first.kind == "allreduce" and first.op in (0, 1)):
            return ""
        joined = format_ranks([self.names[rank] for rank in self._joined])
        return (
            f"{joined} has called join(), and then only allreduce with "
            "op=Average or Sum, and barrier, go on: call this before join()"
        )

    def _end(self, name: str, result: object, error: Exception | None = None) -> None:
        with self._state:
            handle = self._handles.pop(name, None)
        if handle is not None:
            handle.end(result, error)

    def _fail_all(self, error: BaseException) -> None:
        """End all operations of this rank with an error. All other ranks do the same."""
        with self._state:
            handles, self._handles = self._handles, {}
            self._new = []
        self._met.clear()
        self._joined.clear()
        for handle in handles.values():
            handle.end(None, error)

    def _why_nothing_runs(self) -> str:
        met = list(self._met.items())
        if not met:
            return (
                f"{format_ranks([self.names[rank] for rank in self._joined])} has called join(): call it on all ranks"
            )
        _, requests = met[0]
        callers = [self.names[rank] for rank in requests]
        missing = [rank for rank in range(self.comm.size) if rank not in requests and rank not in self._joined]
        others = [other for other, by in met if missing[0] in by]
        instead = f", and waits in {others[0]!r}" if others else ""
        return (
            f"{requests[min(requests)]}: {format_ranks(callers)} called it, and rank {self.names[missing[0]]} did not"
            f"{instead}: let all ranks call operations of the same names"
        )


def _fusion(request: OperationRequest) -> tuple[object, ...]:
    """Return a key that is equal for allreduces that can run as one. For any other operation the key is unique."""
    if request.kind != "allreduce":
        return (request.name,)
    return (request.op, request.prescale, request.postscale, sorted(set(request.dtypes)))


def _only_item(value: object) -> object:
    """Return the item of a list that has only one, for an error message. Return anything else unchanged."""
    return _only_item(value[0]) if isinstance(value, list) and len(value) == 1 else value
