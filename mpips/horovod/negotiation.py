"""Negotiation: operations of a process set are matched by name, whatever the order in which ranks begin them.

Each operation is a `Request`. While a rank has one under way, its communication thread makes rounds with the others: in
one allgather all bring their new requests. What all ranks have brought runs then, on all in the same order: allreduces
that follow each other as one. Where requests do not fit together, each rank's handle gets the same sentence, and the
process set goes on.
"""

from __future__ import annotations

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

from mpips.collectives.api import begin
from mpips.collectives.communicator import communicator
from mpips.collectives.errors import CollectiveError, ranks
from mpips.torch.process_group import Jobs
from mpips.torch.tensors import flatten, flatten_result
from mpips.torch.works import GroupJob, communication, wait_for_plan


class HorovodInternalError(CollectiveError):
    """An operation has failed, on all ranks of its process set."""


class Request(msgspec.Struct, array_like=True):
    """One rank's part in an operation, as the others learn of it."""

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


T = TypeVar("T")


class Handle(Generic[T]):
    """An operation under way on this rank: the tensors it takes, and what has come of it."""

    def __init__(
        self,
        request: Request,
        tensors: Sequence[Tensor],
        deliver: Callable[..., T],
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.request, self.tensors, self._deliver, self._waiting = request, list(tensors), deliver, waiting
        self.received: list[int] = []
        """Rows that an alltoall has brought from each rank."""
        self._done = threading.Event()
        self._result: T
        self._error: BaseException | None = None

    def poll(self) -> bool:
        """Return whether it has ended."""
        return self._done.is_set()

    def end(self, results: list[Tensor] | T, error: BaseException | None = None) -> None:
        """Note what has come of it."""
        if error is None and isinstance(results, list):
            results = self._deliver(results)
        self._result, self._error = results, error  # type: ignore[assignment]
        self._done.set()

    def wait(self) -> T:
        """Wait until it has ended; return its result, or raise its error. Blocking."""
        if not self._done.is_set():
            with self._waiting():
                self._done.wait()
        if self._error is not None:
            raise HorovodInternalError(str(self._error)) from None
        return self._result


class Op(IntEnum):
    """Horovod's reductions, with its numbers."""

    Average, Sum, Adasum, Min, Max, Product = range(6)


REDUCTIONS = {
    Op.Average: ReduceOp.AVG,
    Op.Sum: ReduceOp.SUM,
    Op.Min: ReduceOp.MIN,
    Op.Max: ReduceOp.MAX,
    Op.Product: ReduceOp.PRODUCT,
}


class Executor:
    """Runs operations on which all ranks agree, on one communicator."""

    def __init__(self, jobs: Jobs, rank: int, names: Sequence[int]) -> None:
        self._jobs, self._rank, self._names, self._size = jobs, rank, names, len(names)

    def allreduce(self, first: Request, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Reduce tensors in place, together, as a request says."""
        _scale(tensors, first.prescale)
        yield from self._jobs.allreduce_together(tensors, REDUCTIONS[Op(first.op)]).steps()
        _scale(tensors, first.postscale)

    def run(self, first: Request, every: Sequence[Request], handle: Handle[Any]) -> Generator[None, None, list[Tensor]]:
        """Run any other operation, from all ranks' requests. Return its results."""
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

    def _allgather(self, every: Sequence[Request], place: int, tensor: Tensor) -> Generator[None, None, Tensor]:
        rows = [request.shapes[place][0] for request in every]
        result = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype)
        yield from self._jobs.allgather(list(result.split(rows)), tensor).steps()
        return result

    def _alltoall(self, every: Sequence[Request], place: int, tensor: Tensor) -> Generator[None, None, Tensor]:
        received = [request.splits[self._rank] for request in every]
        result = torch.empty((sum(received), *tensor.shape[1:]), dtype=tensor.dtype)
        row = tensor[0].numel() if tensor.shape[0] else result[0].numel() if result.shape[0] else 0
        parts = [[rows * row for rows in each] for each in (received, every[self._rank].splits)]
        steps = self._jobs.messages.alltoall(result.view(-1), parts[0], flatten(tensor), parts[1])
        yield from self._jobs.exchange(steps, "alltoall").steps()
        return result

    def _reducescatter(self, every: Sequence[Request], place: int, tensor: Tensor) -> Generator[None, None, Tensor]:
        mine, whole = every[self._rank], tensor.shape[0]
        rows = [whole // self._size + (rank < whole % self._size) for rank in range(self._size)]
        result = torch.empty((rows[self._rank], *tensor.shape[1:]), dtype=tensor.dtype)
        given = flatten(tensor).clone()
        _scale([given], mine.prescale)
        row = tensor[0].numel() if whole else 0
        sizes = [each * row for each in rows]
        yield from self._jobs.reduce_scatter(result, given, sizes, REDUCTIONS[Op(mine.op)]).steps()
        _scale([result], mine.postscale)
        return result


def _scale(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply tensors in place: integers in float64 and cut, float16 in float32, as Horovod does."""
    if factor == 1.0:
        return
    for tensor in map(Tensor.detach, tensors):
        if tensor.dtype in (torch.float16, torch.bfloat16):
            tensor.copy_(tensor.float() * factor)
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.mul_(factor)
        else:
            tensor.copy_(tensor.double() * factor)


ROW_BYTES = 1024
"""Of a rank's requests in the first allgather of a round; what is longer follows in a second one."""
PAUSE_SECONDS = 1e-3
"""Between two rounds in which nobody brings anything new."""
CYCLE_SECONDS, CROWDED_CYCLE_SECONDS = 5e-3, 5e-2
"""Wait before a round, while the program goes on and may bring more, as in a backward pass. It is longer where ranks
have one core each: a round then takes turns with the program."""
IDLE_ROUNDS = 1000
"""Rounds without anything new, in which the programs of all ranks wait, before that is an error."""
NOTHING_LEFT = "join"


class Negotiator:
    """Operations of the ranks of one communicator, which nobody else may use. Making it is collective."""

    def __init__(self, comm: MPI.Intracomm, names: Sequence[int], timeout_seconds: float) -> None:
        self.comm, self.names = comm, names
        self.jobs = Jobs(comm, timeout_seconds)
        self._home = home = communicator(comm)
        roomy = home.nodes > 1 or home.board.memory.roomy
        self._cycle_seconds = CYCLE_SECONDS if roomy else CROWDED_CYCLE_SECONDS
        self._executor = Executor(self.jobs, comm.rank, names)
        self._state = threading.Lock()
        self._handles: dict[str, Handle[Any]] = {}
        self._new: list[Request] = []
        self._runs = False
        self._waiting = 0
        self._unnamed: dict[str, int] = {}
        self._met: dict[str, dict[int, Request]] = {}
        self._joined: list[int] = []
        self._row = np.zeros(ROW_BYTES, np.uint8)
        self._rows = np.zeros((comm.size, ROW_BYTES), np.uint8)

    def begin(self, handle: Handle[T]) -> Handle[T]:
        """Begin an operation. ValueError where one of that name is under way on this rank."""
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
        """Free its communicators, unless an operation is under way on this rank. Local."""
        while self._runs and not self._handles:
            time.sleep(1e-4)  # its thread is in the last round
        if not self._runs and not MPI.Is_finalized():
            self.jobs.free()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Let the others know that this rank's program waits, within, for an operation."""
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
                every = [msgspec.msgpack.decode(row, type=tuple[bool, list[Request]]) for row in rows]
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
        """Bring a word; return all ranks', in their order."""
        size = len(word)
        self._row[:8].view(np.int64)[0] = size
        if size <= ROW_BYTES - 8:
            self._row[8 : 8 + size] = np.frombuffer(word, np.uint8)
        yield from wait_for_plan(begin("allgather", self._row, self.comm, out=self._rows))
        sizes = [int(row[:8].view(np.int64)[0]) for row in self._rows]
        rows, start = self._rows, 8
        if max(sizes) > ROW_BYTES - 8:
            mine = np.zeros(max(sizes), np.uint8)
            mine[:size] = np.frombuffer(word, np.uint8)
            rows, start = np.zeros((self.comm.size, mine.size), np.uint8), 0
            yield from wait_for_plan(begin("allgather", mine, self.comm, out=rows))
        return [row[start : start + length].tobytes() for row, length in zip(rows, sizes)]

    def _take(self, every: Sequence[tuple[bool, list[Request]]]) -> Iterator[None]:
        """Take all ranks' new requests, and run what all have brought."""
        for rank, (_, requests) in enumerate(every):
            for request in requests:
                if request.kind == NOTHING_LEFT:
                    self._joined.append(rank)
                else:
                    self._met.setdefault(request.name, {})[rank] = request
        ready = []
        for name, requests_of in list(self._met.items()):
            if len(requests_of.keys() | set(self._joined)) == self.comm.size:
                del self._met[name]
                first = requests_of[min(requests_of)]
                if wrong := self._difference(first, requests_of) or self._against_joined(first):
                    self._end(name, None, HorovodInternalError(f"{first}: {wrong}"))
                else:
                    ready.append((first, requests_of))
        for _, group in groupby(ready, lambda each: _fusion(each[0])):
            yield from self._run(list(group))
        if len(self._joined) == self.comm.size:
            last, self._joined = self._joined[-1], []
            self._unnamed.clear()
            self._end(NOTHING_LEFT, self.names[last])

    def _run(self, operations: Sequence[tuple[Request, dict[int, Request]]]) -> Iterator[None]:
        """Run one operation, or allreduces that go together. A rank that has joined brings zeros."""
        first, requests = operations[0]
        if first.kind == "allreduce":
            every = [self._tensors_of(request) for request, _ in operations]
            yield from self._executor.allreduce(first, [tensor for tensors in every for tensor in tensors])
            for (request, _), tensors in zip(operations, every):
                self._end(request.name, tensors)
        elif first.kind == "barrier":
            self._end(first.name, [])
        else:
            in_order = [requests[rank] for rank in sorted(requests)]
            self._end(first.name, (yield from self._executor.run(first, in_order, self._handles[first.name])))

    def _tensors_of(self, request: Request) -> Sequence[Tensor]:
        handle = self._handles.get(request.name)
        if handle is not None:
            return handle.tensors
        return [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(request.dtypes, request.shapes)]

    def _difference(self, first: Request, requests: dict[int, Request]) -> str:
        """Return how the requests of two ranks differ; "" where they fit together."""
        one = min(requests)
        for rank, request in requests.items():
            free = 1 if first.kind in ("allgather", "alltoall") else 0
            for what, a, b in (
                ("the operation", first.kind, request.kind),
                ("the number of tensors", len(first.shapes), len(request.shapes)),
                ("dtype", first.dtypes, request.dtypes),
                ("number of dimensions", [*map(len, first.shapes)], [*map(len, request.shapes)]),
                (
                    "shape behind the first dimension" if free else "shape",
                    [shape[free:] for shape in first.shapes],
                    [shape[free:] for shape in request.shapes],
                ),
                ("op", first.op, request.op),
                ("prescale_factor", first.prescale, request.prescale),
                ("postscale_factor", first.postscale, request.postscale),
                ("root_rank", first.root, request.root),
            ):
                if a != b:
                    return (
                        f"{what} is {_said(a)} on rank {self.names[one]} and {_said(b)} on rank "
                        f"{self.names[rank]}: give all ranks the same"
                    )
        return ""

    def _against_joined(self, first: Request) -> str:
        """Return why an operation cannot run beside ranks that have joined; "" where it can."""
        if not self._joined or first.kind == "barrier" or (first.kind == "allreduce" and first.op in (0, 1)):
            return ""
        return (
            f"{ranks([self.names[rank] for rank in self._joined])} has called join(), and then only allreduce with "
            "op=Average or Sum, and barrier, go on: call this before join()"
        )

    def _end(self, name: str, result: object, error: Exception | None = None) -> None:
        with self._state:
            handle = self._handles.pop(name, None)
        if handle is not None:
            handle.end(result, error)

    def _fail_all(self, error: BaseException) -> None:
        """End all operations of this rank, as of all others, with one error."""
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
            return f"{ranks([self.names[rank] for rank in self._joined])} has called join(): call it on all ranks"
        _, requests = met[0]
        there = [self.names[rank] for rank in requests]
        missing = [rank for rank in range(self.comm.size) if rank not in requests and rank not in self._joined]
        others = [other for other, by in met if missing[0] in by]
        instead = f", and waits in {others[0]!r}" if others else ""
        return (
            f"{requests[min(requests)]}: {ranks(there)} called it, and rank {self.names[missing[0]]} did not"
            f"{instead}: let all ranks call operations of the same names"
        )


def _fusion(request: Request) -> tuple[object, ...]:
    """Return what is the same for allreduces that go together, and another for each other operation."""
    if request.kind != "allreduce":
        return (request.name,)
    return (request.op, request.prescale, request.postscale, sorted(set(request.dtypes)))


def _said(value: object) -> object:
    """Return what a sentence says of a list: its one item."""
    return _said(value[0]) if isinstance(value, list) and len(value) == 1 else value
