"""Execution: the job of an operation on which all ranks agree, by the collectives of the process group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpips.horovod.request import Handle, Request
from mpips.torch.process_group import Jobs
from mpips.torch.tensors import flatten, flatten_result
from mpips.torch.works import GroupJob


class Op(IntEnum):
    """Horovod's reductions, with its numbers."""

    Average, Sum, Adasum, Min, Max, Product = range(6)


REDUCTIONS = {
    Op.Average: ReduceOp.AVG, Op.Sum: ReduceOp.SUM, Op.Min: ReduceOp.MIN, Op.Max: ReduceOp.MAX,
    Op.Product: ReduceOp.PRODUCT,
}  # fmt: skip


class Executor:
    """Makes jobs on one communicator; called with an operation's requests, by rank, and this rank's handle."""

    def __init__(self, jobs: Jobs, rank: int, names: Sequence[int]) -> None:
        self._jobs, self._rank, self._names, self._size = jobs, rank, names, len(names)

    def __call__(
        self, first: Request, requests: dict[int, Request], handle: Handle | None
    ) -> tuple[list[GroupJob], list[Tensor]]:
        """Return the jobs, and the tensors that will hold their results."""
        every = [requests[rank] for rank in sorted(requests)]
        tensors = handle.tensors if handle is not None else _zeros(first)
        if first.kind == "barrier":
            return [], []
        if first.kind == "allreduce":
            return [self._allreduce(first, tensors)], tensors
        if first.kind == "broadcast":
            root = self._names.index(first.root)
            targets = [flatten_result(tensor) for tensor in tensors]
            return [self._jobs.move("broadcast", to, None, root, after) for to, after in targets], tensors
        if first.kind == "alltoall" and handle is not None:
            handle.received = [request.splits[self._rank] for request in every]
        jobs, results = [], []
        for place, tensor in enumerate(tensors):
            make = {"allgather": self._allgather, "alltoall": self._alltoall, "reducescatter": self._reducescatter}
            job, result = make[first.kind](every, place, tensor)
            jobs.append(job)
            results.append(result)
        return jobs, results

    def _allreduce(self, first: Request, tensors: Sequence[Tensor]) -> GroupJob:
        reduced = self._jobs.allreduce_together(tensors, REDUCTIONS[Op(first.op)])
        if first.prescale == first.postscale == 1.0:
            return reduced

        def steps() -> Iterator[None]:
            _scale(tensors, first.prescale)
            yield from reduced.steps()
            _scale(tensors, first.postscale)

        return GroupJob(reduced.run, steps, reduced.order)

    def _allgather(self, every: Sequence[Request], place: int, tensor: Tensor) -> tuple[GroupJob, Tensor]:
        rows = [request.shapes[place][0] for request in every]
        result = torch.empty((sum(rows), *tensor.shape[1:]), dtype=tensor.dtype)
        return self._jobs.allgather(list(result.split(rows)), tensor), result

    def _alltoall(self, every: Sequence[Request], place: int, tensor: Tensor) -> tuple[GroupJob, Tensor]:
        received = [request.splits[self._rank] for request in every]
        result = torch.empty((sum(received), *tensor.shape[1:]), dtype=tensor.dtype)
        row = tensor[0].numel() if tensor.shape[0] else result[0].numel() if result.shape[0] else 0
        parts = [[rows * row for rows in each] for each in (received, every[self._rank].splits)]
        steps = self._jobs.messages.alltoall(result.view(-1), parts[0], flatten(tensor), parts[1])
        return self._jobs.exchange(steps, "alltoall"), result

    def _reducescatter(self, every: Sequence[Request], place: int, tensor: Tensor) -> tuple[GroupJob, Tensor]:
        mine, whole = every[self._rank], tensor.shape[0]
        rows = [whole // self._size + (rank < whole % self._size) for rank in range(self._size)]
        result = torch.empty((rows[self._rank], *tensor.shape[1:]), dtype=tensor.dtype)
        given = flatten(tensor).clone()
        _scale([given], mine.prescale)
        row = tensor[0].numel() if whole else 0
        job = self._jobs.reduce_scatter(result, given, [each * row for each in rows], REDUCTIONS[Op(mine.op)])
        return _then(job, lambda: _scale([result], mine.postscale)), result


def _then(job: GroupJob, after: Callable[[], None]) -> GroupJob:
    def steps() -> Iterator[None]:
        yield from job.steps()
        after()

    return GroupJob(job.run, steps, job.order)


def _zeros(request: Request) -> list[Tensor]:
    """Return what a rank that has joined brings."""
    return [torch.zeros(shape, dtype=getattr(torch, dtype)) for dtype, shape in zip(request.dtypes, request.shapes)]


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
