"""c10d's collectives as jobs: what `collectives` does by itself, and what goes by MPI's own calls.

Tensors may have any shape and any strides; results of tensors that are not contiguous are copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

import collectives
from collectives.api import begin
from collectives.communicator import communicator
from mpips.torch.process_group import exchange
from mpips.torch.process_group.reductions import Reduction, numbers, reduction
from mpips.torch.process_group.tensors import flat, movable, see_host, written
from mpips.torch.process_group.works import Job, Steps, Work, communication, in_steps

Home = Callable[[], None]
"""Brings a result to where the caller wants it."""


class Jobs:
    """Makes the jobs of one group. Making it is collective over `comm`."""

    def __init__(self, comm: MPI.Intracomm, timeout_seconds: float) -> None:
        self.comm = comm
        self._home = communicator(comm)
        self._home.patient(self._home.limits.stall_seconds, timeout_seconds)
        self.between = exchange.Exchange(comm.Dup())

    def do(self, job: Job, opts: Any, keep: Sequence[Any], result: Sequence[Tensor] | None = None) -> Work:
        """Do a job, beside compute where the options say so. `result`: the tensors that the work's future gives.

        DistributedDataParallel's come inside a backward pass: where ranks have one core each they are done at once, as
        a thread would only take turns with it.
        """
        job.keep, job.result = keep, None if result is None else list(result)
        roomy = self._home.nodes > 1 or self._home.board.memory.roomy
        alone = not roomy and torch._C._current_graph_task_id() >= 0
        return Work(communication.do(job, opts is None or (opts.asyncOp and not alone)))

    def reduced(
        self, kind: str, given: Tensor, target: Tensor, how: Reduction, root: int = 0, home: Home | None = None
    ) -> Job:
        """A reduction into `target`, which may be `given` itself; both are contiguous and 1-D."""
        if how.factor is not None:
            given.mul_(how.factor)
        home = self._divided(target, home) if how.divided else home
        if how.bitwise is not None:
            steps = self.between.reduce(target, given, how.bitwise, root if kind == "reduce" else None)
            return self.exchanged(steps, kind, [target], home)
        out = None if target is given else numbers(target)
        return self._collective(kind, numbers(given), out, how.name, root, home)

    def grouped(self, tensors: Sequence[Tensor], op: Any) -> Job:
        """An allreduce of each, in one operation."""
        hows = [reduction(op, tensor.dtype) for tensor in tensors]
        pairs = [written(tensor) for tensor in tensors]
        if any(how.bitwise or how.factor is not None for how in hows):
            jobs = [self.reduced("allreduce", to, to, how, 0, home) for how, (to, home) in zip(hows, pairs)]
            return in_turn(jobs, tensors)
        targets = [numbers(target) for target, _ in pairs if target.numel()]

        homes = [self._divided(target, home) if how.divided else home for how, (target, home) in zip(hows, pairs)]

        def ended() -> Sequence[Tensor]:
            for home in homes:
                home()
            return tensors

        def run() -> Sequence[Tensor]:
            if targets:
                collectives.grouped_allreduce(targets, self.comm, hows[0].name)
            return ended()

        def steps() -> Steps:
            if targets:
                yield from in_steps(begin("grouped_allreduce", targets, self.comm, op=hows[0].name))
            return ended()

        return Job(run, steps, self._home)

    def moved(
        self, kind: str, given: Tensor, target: Tensor | None, root: int = 0, home: Home | None = None
    ) -> Job:
        """A collective that adds nothing, of any type."""
        return self._collective(kind, movable(given), None if target is None else movable(target), "sum", root, home)

    def scattered(self, output: Tensor, given: Tensor, sizes: Sequence[int], op: Any) -> Job:
        """The ranks' sums of `given`, of which this rank takes its part."""
        how, rank = reduction(op, given.dtype), self.comm.rank
        if output.numel() != sizes[rank] or sum(sizes) != given.numel():
            raise ValueError(f"reduce_scatter: rank {rank}'s output has {output.numel()} elements, and its part of the "
                             f"input {sizes[rank]} of {given.numel()} between {len(sizes)} ranks")  # fmt: skip
        target, home = written(output)
        if how.bitwise is None and how.factor is None and len(set(sizes)) == 1:
            home = self._divided(target, home) if how.divided else home
            return self._collective("reduce_scatter", numbers(given), numbers(target), how.name, 0, home)
        whole, start = given.clone(), sum(sizes[:rank])

        def take() -> None:
            target.copy_(whole[start : start + sizes[rank]])
            home()

        return self.reduced("allreduce", whole, whole, how, 0, take)

    def gathered(self, outputs: Sequence[Tensor], given: Tensor) -> Job:
        """Every rank's tensor, in as many tensors."""
        see_host([*outputs, given], "all_gather")
        if len(outputs) != self.comm.size:
            raise ValueError(f"all_gather: {len(outputs)} outputs for {self.comm.size} ranks: give one for each")
        sizes = [tensor.numel() for tensor in outputs]
        target = torch.empty(sum(sizes), dtype=given.dtype)
        if len(set(sizes)) == 1 and sizes[0] == given.numel():
            return self.moved("allgather", flat(given), target, 0, lambda: deal(target, outputs))
        steps = self.between.allgather(target, sizes, flat(given))
        return self.exchanged(steps, "all_gather", list(outputs), lambda: deal(target, outputs))

    def exchanged(
        self, steps: Steps, what: str, result: list[Tensor], home: Home | None = None, ordered: bool = True
    ) -> Job:
        """What goes by MPI's own calls; `steps` begin when they are first taken."""

        def through() -> Steps:
            yield from steps
            if home is not None:
                home()
            return result

        def run() -> list[Tensor]:
            self._home.check()
            with self._home.failing(what):
                self._home.run(through(), what)
            return result

        return Job(run, lambda: exchange.watched(through(), self._home, what), self._home if ordered else None)

    def _divided(self, target: Tensor, home: Home | None) -> Home:
        """Divide a sum of integers by the number of ranks, then bring it home."""

        def divide() -> None:
            target.div_(self.comm.size, rounding_mode="trunc")
            if home is not None:
                home()

        return divide

    def _collective(self, kind: str, x: Tensor, out: Tensor | None, op: str, root: int, home: Home | None) -> Job:
        keywords: dict[str, Any] = {"out": out}
        if kind in ("allreduce", "reduce_scatter", "reduce"):
            keywords["op"] = op
        if kind in ("broadcast", "reduce"):
            keywords["root"] = root
        call = getattr(collectives, kind)

        def ended() -> list[Tensor]:
            if home is not None:
                home()
            return [x if out is None else out]

        def run() -> list[Tensor]:
            call(x, self.comm, **keywords)
            return ended()

        def steps() -> Steps:
            yield from in_steps(begin(kind, x, self.comm, op=op, out=out, root=root))
            return ended()

        return Job(run, steps, self._home)

    def empty(self) -> Job:
        """One that does nothing, in its turn."""
        return Job(_nothing, lambda: _at_once(_nothing), self._home)


def in_turn(jobs: Sequence[Job], result: Any) -> Job:
    """Several collectives as one."""
    if len(jobs) == 1:
        return jobs[0]

    def run() -> Any:
        for job in jobs:
            job.run()
        return result

    def steps() -> Steps:
        for job in jobs:
            yield from job.steps()
        return result

    return Job(run, steps, jobs[0].line if jobs else None)


def deal(source: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy the parts of a 1-D tensor into tensors, one behind the other."""
    start = 0
    for output in outputs:
        output.detach().copy_(source[start : start + output.numel()].view(output.shape))
        start += output.numel()


def _at_once(run: Callable[[], Any]) -> Steps:
    """What does not wait for others beside others."""
    return run()
    yield


def _nothing() -> None:
    """There is nothing to be done."""
