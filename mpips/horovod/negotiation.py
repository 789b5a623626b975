"""Negotiation: operations of a process set are matched by name, whatever the order in which ranks begin them.

Each operation is a `Request`. While a rank has one under way, its communication thread makes rounds with the others: in
one allgather all bring their new requests. What all ranks have brought runs then, on all in the same order. Where
requests do not fit together, each rank's handle gets the same sentence, and the process set goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
from mpi4py import MPI
from torch import Tensor

from collectives.api import begin
from collectives.communicator import communicator
from collectives.errors import ranks
from mpips.horovod.execution import Executor
from mpips.horovod.request import Handle, HorovodInternalError, Request
from mpips.torch.process_group import Jobs
from mpips.torch.works import GroupJob, communication, wait_for_plan

ROW_BYTES = 1024
"""Of a rank's requests in the first allgather of a round; what is longer follows in a second one."""
PAUSE_SECONDS = 1e-3
"""Between two rounds in which nobody brings anything new."""
IDLE_ROUNDS = 1000
"""Rounds without anything new, in which the programs of all ranks wait, before that is an error."""
NOTHING_LEFT = "join"


Make = Callable[[Request, dict[int, Request], Handle | None], tuple[list[GroupJob], list[Tensor]]]
"""Makes the jobs of an operation, from all ranks' requests, and the tensors that will hold its results. A rank that has
joined has no handle."""


class Negotiator:
    """Operations of the ranks of one communicator, which nobody else may use. Making it is collective."""

    def __init__(self, comm: MPI.Intracomm, names: Sequence[int], timeout_seconds: float) -> None:
        self.comm, self.names = comm, names
        self.jobs = Jobs(comm, timeout_seconds)
        self._home = communicator(comm)
        self._make: Make = Executor(self.jobs, comm.rank, names)
        self._state = threading.Lock()
        self._handles: dict[str, Handle] = {}
        self._new: list[Request] = []
        self._runs = False
        self._waiting = 0
        self._unnamed: dict[str, int] = {}
        self._met: dict[str, dict[int, Request]] = {}
        self._joined: list[int] = []
        self._row = np.zeros(ROW_BYTES, np.uint8)
        self._rows = np.zeros((comm.size, ROW_BYTES), np.uint8)

    def begin(self, handle: Handle) -> Handle:
        """Begin an operation. ValueError where one of that name is under way on this rank."""
        request = handle.request
        with self._state:
            if not request.name:
                self._unnamed[request.kind] = number = self._unnamed.get(request.kind, 0) + 1
                request.name = f"{request.kind}.noname.{number}"
            if request.name in self._handles:
                raise ValueError(f"{request}: an operation of this name is under way on rank "
                                 f"{self.names[self.comm.rank]}: call synchronize() on it first, or choose another "
                                 "name")  # fmt: skip
            self._handles[request.name] = handle
            self._new.append(request)
            begins, self._runs = not self._runs, True
        if begins:
            communication.run(GroupJob(lambda: None, self._steps, None), True)
        return handle

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
        for name, requests_of in list(self._met.items()):
            if len(requests_of.keys() | set(self._joined)) == self.comm.size:
                del self._met[name]
                yield from self._run(name, requests_of)
        if len(self._joined) == self.comm.size:
            last, self._joined = self._joined[-1], []
            self._unnamed.clear()
            self._end(NOTHING_LEFT, self.names[last])

    def _run(self, name: str, requests: dict[int, Request]) -> Iterator[None]:
        """Run one operation. Errors in which all ranks' requests result are those of its handles alone."""
        first = requests[min(requests)]
        if wrong := self._difference(first, requests) or self._against_joined(first):
            self._end(name, None, HorovodInternalError(f"{first}: {wrong}"))
            return
        jobs, results = self._make(first, requests, self._handles.get(name))
        for job in jobs:
            yield from job.steps()
        self._end(name, results)

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
                ("shape behind the first dimension" if free else "shape",
                 [shape[free:] for shape in first.shapes], [shape[free:] for shape in request.shapes]),
                ("op", first.op, request.op), ("prescale_factor", first.prescale, request.prescale),
                ("postscale_factor", first.postscale, request.postscale), ("root_rank", first.root, request.root),
            ):  # fmt: skip
                if a != b:
                    return (f"{what} is {_said(a)} on rank {self.names[one]} and {_said(b)} on rank "
                            f"{self.names[rank]}: give all ranks the same")  # fmt: skip
        return ""

    def _against_joined(self, first: Request) -> str:
        """Return why an operation cannot run beside ranks that have joined; "" where it can."""
        if not self._joined or first.kind == "barrier" or (first.kind == "allreduce" and first.op in (0, 1)):
            return ""
        return (f"{ranks([self.names[rank] for rank in self._joined])} has called join(), and then only allreduce with "
                "op=Average or Sum, and barrier, go on: call this before join()")  # fmt: skip

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
        return (f"{requests[min(requests)]}: {ranks(there)} called it, and rank {self.names[missing[0]]} did not"
                f"{instead}: let all ranks call operations of the same names")  # fmt: skip


def _said(value: object) -> object:
    """Return what a sentence says of a list: its one item."""
    return _said(value[0]) if isinstance(value, list) and len(value) == 1 else value
