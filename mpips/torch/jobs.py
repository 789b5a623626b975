"""The jobs of a process group: each runs one operation by `mpips.collectives`, or by MPI's own calls.

The recorder of `mpips.collectives` notes which operation is running. It knows each group and each operation by a
number: the group's identity and the operation's token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

import mpips.collectives as collectives
from mpips.collectives.api import begin
from mpips.collectives.communicator import communicator
from mpips.collectives.fabric.failure import guard_comm
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder.own import Marks
from mpips.collectives.recorder.ring import form
from mpips.torch.tensors import (
    ArgumentError,
    Reduction,
    as_movable,
    as_numbers,
    check_on_host,
    check_sparse,
    count_entries,
    describe_sparse,
    flatten,
    flatten_result,
    reduction,
)
from mpips.torch.works import GroupJob, Messages, communication, listen, wait_for_plan, watch

Tensors = Sequence[Tensor]
# Timeouts are at least this long, because 0 would mean no timeout.
LEAST_SECONDS = 1e-3
# This bit is added to a group's identity in the recorder for MPI's own calls. Traces then show them in a separate row.
LANE = 1 << 62
# A function that runs after an operation, for example to copy its result into the caller's tensor, or None.
After = Callable[[], None] | None


class GroupJobs:
    """Creates the jobs of one group. Creating a GroupJobs is collective.

    A job runs in `collectives` if that package has the operation. Otherwise the job makes MPI's own calls.

    Args:
        outlived: True if the processes may continue after the group has ended. Then no rank accesses the private memory
            of another rank, because this could happen:

            1. A process is stopped (SIGSTOP) in a collective. The others wait until the timeout, and make a new group.
            2. They use the memory of the collective for something else.
            3. The stopped process continues, and writes the rest of its result into that memory.
    """

    def __init__(self, comm: MPI.Intracomm, timeout_seconds: float, outlived: bool = False) -> None:
        self.comm = comm
        self._home = communicator(comm)
        if outlived:
            self._home.board.memory.reachable = False
        self.set_timeout(timeout_seconds)
        self._comm_of_messages = guard_comm(comm.Dup())
        self.messages = Messages(self._comm_of_messages)
        self._barrier_token = torch.zeros(1)
        self._marks = Marks(self._home.board.marks.identity | LANE)
        # name of an operation -> its token in the recorder
        self._tokens = dict[str, int]()

    def set_timeout(self, seconds: float) -> None:
        """Set how long operations wait for other ranks. Also applies to operations that already wait. Local."""
        self._home.set_limits(self._home.limits.stall_seconds, max(seconds, LEAST_SECONDS))

    def free(self) -> None:
        """Free the group's communicators. Local. A rank that still waits for this rank in the group raises an error."""
        self._marks.close()
        self._home.leave()
        self._comm_of_messages.Free()
        self.comm.Free()

    def end(self, sentence: str) -> None:
        """End the group's generation (its life between two failures). All ranks raise CollectiveError with `sentence`.

        Does nothing if the generation has already ended.
        """
        self._home.fail("reconfigure", collectives.CollectiveError(sentence))

    def leave(self) -> None:
        """Free the communicator after `end`. Blocks until this rank's jobs have failed, but does not wait for ranks."""
        communication.wait_for(self._home)
        self._marks.close()
        # This also frees everything that `collectives` has made for the communicator. The communicator of `messages` is
        # never freed, because messages that nobody has received may still be in flight on it.
        self.comm.Free()

    def reduce(
        self, kind: str, given: Tensor, target: Tensor, how: Reduction, root: int = 0, after: After = None
    ) -> GroupJob:
        """Create the job that reduces `given` into `target`.

        Both tensors are contiguous and 1-D, and may be the same tensor.
        """
        if how.factor is not None:
            given.mul_(how.factor)
        after = self._divide(target, after) if how.divided else after
        if how.bitwise is not None:
            steps = self.messages.reduce(target, given, how.bitwise, root if kind == "reduce" else None)
            return self.exchange(steps, kind, after)
        out = None if target is given else as_numbers(target)
        return self._collective(kind, as_numbers(given), out, how.name, root, after)

    def allreduce_together(self, tensors: Tensors, op: dist.ReduceOp) -> GroupJob:
        """Create the job of an allreduce of several tensors, as a single operation if their reductions allow it."""
        hows = [reduction(op, tensor.dtype) for tensor in tensors]
        results = [flatten_result(tensor) for tensor in tensors]
        if len({how.name for how in hows}) > 1 or any(how.bitwise or how.factor is not None for how in hows):
            each = zip(hows, results)
            return in_turn([self.reduce("allreduce", target, target, how, 0, after) for how, (target, after) in each])
        targets = [as_numbers(target) for target, _ in results if target.numel()]
        afters = [self._divide(*result) if how.divided else result[1] for how, result in zip(hows, results)]

        def finish() -> None:
            for after in afters:
                if after is not None:
                    after()

        if not targets:
            return self.empty(finish)
        name = hows[0].name
        return GroupJob(
            lambda: collectives.grouped_allreduce(targets, self.comm, name),
            lambda: wait_for_plan(begin("grouped_allreduce", targets, self.comm, op=name)),
            self._home,
            finish,
        )

    def allreduce_sparse(self, tensor: Tensor, op: dist.ReduceOp) -> GroupJob:
        """Create the job that sums sparse tensors into `tensor`, which becomes coalesced.

        Entries are added in the order of the ranks.
        """
        how, given = check_sparse(tensor, op), tensor.detach().coalesce()
        described = describe_sparse(given)
        every = torch.empty(self.comm.size * described.numel(), dtype=described.dtype)
        parts: list[Tensor] = []

        def gather() -> Iterator[None]:
            counts = count_entries(every.view(self.comm.size, -1))
            for part in (given.indices().t(), given.values()):
                width = math.prod(part.shape[1:])
                target = torch.empty((sum(counts), *part.shape[1:]), dtype=part.dtype)
                yield from self.messages.allgather(target.view(-1), [count * width for count in counts], flatten(part))
                parts.append(target)

        def finish() -> None:
            total = torch.sparse_coo_tensor(parts[0].t(), parts[1], given.shape, check_invariants=False).coalesce()
            if how.name == "mean":
                total.values().div_(self.comm.size)
            elif how.divided:
                total.values().div_(self.comm.size, rounding_mode="trunc")
            # Do not copy into `tensor.detach()`: it has index and value tensors of its own, so `tensor` would not
            # change.
            with torch.no_grad():
                tensor.copy_(total)

        what = "all_reduce of a sparse tensor"
        return in_turn([self.move("allgather", described, every), self.exchange(gather(), what, finish)])

    def move(self, kind: str, given: Tensor, target: Tensor | None, root: int = 0, after: After = None) -> GroupJob:
        """Create the job of a collective that only moves values, so that they may have any dtype."""
        out = None if target is None else as_movable(target)
        return self._collective(kind, as_movable(given), out, "sum", root, after)

    def barrier(self) -> GroupJob:
        return self._collective("allreduce", as_numbers(self._barrier_token), None, "sum", 0, None, "barrier")

    def reduce_scatter(self, output: Tensor, given: Tensor, sizes: Sequence[int], op: dist.ReduceOp) -> GroupJob:
        """Create the job that reduces `given` and stores this rank's part of the result in `output`.

        `sizes[r]` is the number of elements in rank r's part.
        """
        how, rank = reduction(op, given.dtype), self.comm.rank
        check_types(output, given, "reduce_scatter")
        if output.numel() != sizes[rank] or sum(sizes) != given.numel():
            raise ArgumentError(
                f"reduce_scatter: rank {rank}'s output has {output.numel()} elements, and its part of the input "
                f"{sizes[rank]} of {given.numel()} between {len(sizes)} ranks"
            )
        target, after = flatten_result(output)
        if how.bitwise is None and how.factor is None and len(set(sizes)) == 1:
            after = self._divide(target, after) if how.divided else after
            return self._collective("reduce_scatter", as_numbers(given), as_numbers(target), how.name, 0, after)
        # Bitwise operations, factors and unequal parts cannot use `collectives.reduce_scatter`. In these cases every
        # rank reduces the whole tensor and takes its part of the result.
        whole, start = given.clone(), sum(sizes[:rank])

        def take_part() -> None:
            target.copy_(whole[start : start + sizes[rank]])
            if after is not None:
                after()

        return self.reduce("allreduce", whole, whole, how, 0, take_part)

    def allgather(self, outputs: Tensors, given: Tensor) -> GroupJob:
        """Create the job after which outputs[r] is the tensor of rank r. The tensors' sizes may differ."""
        check_on_host([*outputs, given], "all_gather")
        if len(outputs) != self.comm.size:
            raise ArgumentError(f"all_gather: {len(outputs)} outputs for {self.comm.size} ranks: give one for each")
        check_alike(outputs[self.comm.rank], given, f"all_gather: of outputs that of rank {self.comm.rank}")
        sizes = [tensor.numel() for tensor in outputs]
        target = torch.empty(sum(sizes), dtype=given.dtype)
        if len(set(sizes)) == 1 and sizes[0] == given.numel():
            return self.move("allgather", flatten(given), target, 0, lambda: deal(target, outputs))
        steps = self.messages.allgather(target, sizes, flatten(given))
        return self.exchange(steps, "all_gather", lambda: deal(target, outputs))

    def exchange(self, steps: Iterator[None], what: str, after: After = None, ordered: bool = True) -> GroupJob:
        """Create a job of MPI's own calls. The first `next(steps)` starts the calls.

        If `ordered`, all ranks first wait for each other, because a rank that is already inside of an MPI call would
        not learn that another rank never makes this call.
        """
        steps = listen(steps, self._home)
        if ordered:
            steps = itertools.chain(self._home.agreed(what), steps)
        steps = self._recorded(steps, what)

        def run() -> None:
            self._home.check()
            with self._home.failing(what):
                self._home.run(steps, what)

        return GroupJob(run, lambda: watch(steps, self._home, what), self._home, after, ordered=ordered)

    def _recorded(self, steps: Iterator[None], what: str) -> Iterator[None]:
        """Run the steps, and show in the recorder which of MPI's own calls is running.

        While tracing is on, also record when the call begins and ends.
        """
        self._marks.word[0] = self._tokens.get(what) or self._new_token(what)
        if not recorder.is_traced:
            yield from steps
            return
        ring = recorder.ring
        sequence = ring.begin(form(self._home.board.marks.identity, what))
        yield from steps
        ring.end(sequence)

    def _new_token(self, what: str) -> int:
        token = self._tokens[what] = self._marks.new_token(what)
        return token

    def empty(self, after: After = None) -> GroupJob:
        """Create a job that sends nothing. It ends when the jobs before it have ended."""
        return GroupJob(lambda: None, lambda: iter(()), self._home, after)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Change the timeout of this group within a `with` block."""
        usual = self._home.limits
        self.set_timeout(seconds)
        try:
            yield
        finally:
            self._home.set_limits(*usual)

    def _divide(self, target: Tensor, after: After) -> Callable[[], None]:
        """Return a function that divides a sum of integers by the number of ranks, and then calls `after`."""

        def divide() -> None:
            target.div_(self.comm.size, rounding_mode="trunc")
            if after is not None:
                after()

        return divide

    def _collective(
        self, kind: str, x: Tensor, out: Tensor | None, op: str, root: int, after: After, label: str = ""
    ) -> GroupJob:
        keywords: dict[str, Any] = {"out": out, "label": label}
        if kind in ("allreduce", "reduce_scatter", "reduce"):
            keywords["op"] = op
        if kind in ("broadcast", "reduce"):
            keywords["root"] = root
        call = getattr(collectives, kind)
        return GroupJob(
            lambda: call(x, self.comm, **keywords),
            lambda: wait_for_plan(begin(kind, x, self.comm, op=op, out=out, root=root, label=label)),
            self._home,
            after,
        )


def in_turn(jobs: Sequence[GroupJob]) -> GroupJob:
    """Combine several jobs of a group into one, which runs them one after another."""
    if len(jobs) == 1:
        return jobs[0]

    def run() -> None:
        for job in jobs:
            job.run()

    def steps() -> Iterator[None]:
        for job in jobs:
            yield from job.steps()

    return GroupJob(run, steps, jobs[0].home if jobs else None)


def deal(source: Tensor, outputs: Tensors) -> None:
    """Copy consecutive parts of a 1-D tensor into `outputs`, in order."""
    start = 0
    for output in outputs:
        output.detach().copy_(source[start : start + output.numel()].view(output.shape))
        start += output.numel()


def check_types(output: Tensor, given: Tensor, what: str) -> None:
    if output.dtype != given.dtype:
        raise ArgumentError(f"{what}: the output is of {output.dtype} and the input of {given.dtype}: give one type")


def check_alike(part: Tensor, own: Tensor, what: str) -> None:
    if part.numel() != own.numel():
        raise ArgumentError(f"{what} has {part.numel()} elements, and its tensor {own.numel()}: give as many")
