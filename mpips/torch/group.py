"""The process group: c10d's collectives on CPU tensors, carried out by `collectives`; sends and receives by MPI.

All take the lists of tensors and the options that c10d hands over, and return its `Work`. Tensors may have any shape
and any strides; results of tensors that are not contiguous are copied back. With `asyncOp` an operation goes on beside
compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

import collectives
from collectives.api import begin
from collectives.communicator import communicator
from mpips.torch import exchange
from mpips.torch.reductions import Reduction, numbers, reduction
from mpips.torch.tensors import flat, movable, see_host, written
from mpips.torch.works import Communication, Job, Steps, work

communication = Communication()
"""That of this process."""


class Group(dist.ProcessGroup):
    """Ranks of one MPI communicator as a group of c10d's. Making it is collective over `comm`."""

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._home = communicator(comm)
        self._home.patient(self._home.limits.stall_seconds, timeout.total_seconds())
        self._between = exchange.Exchange(comm.Dup(), self._home)
        self._token = torch.zeros(1)

    def getBackendName(self) -> str:  # noqa: N802  (c10d's name)
        return "mpips"

    @property
    def pg_name(self) -> str:
        """The name under which c10d knows the group."""
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def group_name(self) -> str:
        return self.pg_name

    def __repr__(self) -> str:
        return f"<mpips process group, rank {self.comm.rank} of {self.comm.size}>"

    # ---- reductions

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        see_host(tensors, "all_reduce")
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        (tensor,) = tensors
        how = reduction(opts.reduceOp, tensor.dtype)
        target, home = written(tensor)
        return self._do(self._reduced("allreduce", target, target, how, 0, home), opts, tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllreduceCoalescedOptions()
        see_host(tensors, "all_reduce_coalesced")
        hows = [reduction(opts.reduceOp, tensor.dtype) for tensor in tensors]
        pairs = [written(tensor) for tensor in tensors]
        if any(how.bitwise or how.factor is not None for how in hows):
            jobs = [
                self._reduced("allreduce", target, target, how, 0, home) for how, (target, home) in zip(hows, pairs)
            ]
            return self._do(_in_turn(jobs, tensors), opts, tensors)
        targets = [numbers(target) for target, _ in pairs if target.numel()]

        def run() -> Sequence[Tensor]:
            if targets:
                collectives.grouped_allreduce(targets, self.comm, hows[0].name)
            for _, home in pairs:
                home()
            return tensors

        return self._do(Job(run, lambda: _at_once(run), True), opts, tensors)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> Any:
        see_host(tensors, "reduce")
        (tensor,) = tensors
        how = reduction(opts.reduceOp, tensor.dtype)
        given = flat(tensor).clone()
        target, home = written(tensor) if self.comm.rank == opts.rootRank else (torch.empty_like(given), _nothing)
        return self._do(self._reduced("reduce", given, target, how, opts.rootRank, home), opts, tensors)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        see_host([*outputs, *inputs[0]], "reduce_scatter")
        (output,), (parts,) = outputs, inputs
        if len(parts) != self.comm.size:
            raise ValueError(f"reduce_scatter: {len(parts)} input tensors for {self.comm.size} ranks: give one for each")
        together = torch.cat([flat(part) for part in parts])
        sizes = [part.numel() for part in parts]
        return self._do(self._scattered(output, together, sizes, opts), opts, outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        see_host([output, given], "reduce_scatter_tensor")
        job = self._scattered(output, flat(given), [given.numel() // self.comm.size] * self.comm.size, opts)
        return self._do(job, opts, [output, given])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        see_host([*outputs, *inputs], "reduce_scatter_tensor")
        share = self.comm.size
        jobs = [
            self._scattered(output, flat(given), [given.numel() // share] * share, opts)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._do(_in_turn(jobs, outputs), opts, [*outputs, *inputs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- the same values for all

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        see_host(tensors, "broadcast")
        jobs = []
        for tensor in tensors:
            target, home = written(tensor)
            jobs.append(self._moved("broadcast", target, None, opts.rootRank, home))
        return self._do(_in_turn(jobs, tensors), opts, tensors)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        jobs = [self._gathered(out, given) for out, given in zip(outputs, inputs, strict=True)]
        return self._do(_in_turn(jobs, outputs), opts, [*inputs, *(tensor for out in outputs for tensor in out)])

    allgather_coalesced = allgather

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Any:
        opts = opts or dist.AllgatherOptions()
        see_host([*outputs, *inputs], "all_gather_into_tensor")
        jobs = []
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self.comm.size:
                raise ValueError(f"all_gather_into_tensor: the output has {output.numel()} elements and the input "
                                 f"{given.numel()}: it needs {self.comm.size} times as many")  # fmt: skip
            target, home = written(output)
            jobs.append(self._moved("allgather", flat(given), target, 0, home))
        return self._do(_in_turn(jobs, outputs), opts, [*outputs, *inputs])

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        opts = opts or dist.BarrierOptions()
        token = self._token
        return self._do(self._reduced("allreduce", token, token, Reduction("sum", None, None), 0, _nothing), opts, ())

    # ---- from each to each

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:  # fmt: skip
        opts = opts or dist.AllToAllOptions()
        see_host([output, given], "all_to_all_single")
        source = flat(given)
        target, home = written(output)
        cuts_in = exchange.elements(given, input_splits, self.comm.size, "input_split_sizes")
        cuts_out = exchange.elements(output, output_splits, self.comm.size, "output_split_sizes")
        steps = self._between.alltoall(target, cuts_out, source, cuts_in)
        return self._do(self._exchanged(steps, "all_to_all", [output], home), opts, [output, given, source, target])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        see_host([*outputs, *inputs], "all_to_all")
        source = torch.cat([flat(tensor) for tensor in inputs])
        target = torch.empty(sum(tensor.numel() for tensor in outputs), dtype=source.dtype)
        steps = self._between.alltoall(
            target, [tensor.numel() for tensor in outputs], source, [tensor.numel() for tensor in inputs]
        )
        job = self._exchanged(steps, "all_to_all", list(outputs), lambda: _deal(target, outputs))
        return self._do(job, opts, [*outputs, source, target])

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> Any:
        see_host(inputs, "gather")
        (given,) = inputs
        parts = outputs[0] if self.comm.rank == opts.rootRank else []
        source, target = flat(given), torch.empty(sum(part.numel() for part in parts), dtype=given.dtype)
        steps = self._between.gather(target, [part.numel() for part in parts], source, opts.rootRank)
        job = self._exchanged(steps, "gather", list(parts), lambda: _deal(target, parts))
        return self._do(job, opts, [*parts, source, target])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> Any:
        see_host(outputs, "scatter")
        (output,) = outputs
        parts = [flat(part) for part in inputs[0]] if self.comm.rank == opts.rootRank else []
        target, home = written(output)
        source = torch.cat(parts) if parts else torch.empty(0, dtype=output.dtype)
        steps = self._between.scatter(target, source, [part.numel() for part in parts], opts.rootRank)
        return self._do(self._exchanged(steps, "scatter", [output], home), opts, [output, source, target])

    # ---- from one to one

    def send(self, tensors: Sequence[Tensor], destination: int, tag: int) -> Any:
        see_host(tensors, "send")
        source = flat(tensors[0])
        steps = self._between.send(source, destination, tag)
        return self._do(self._exchanged(steps, f"send to rank {destination}", [], _nothing, False), None, [source])

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        see_host(tensors, "recv")
        target, home = written(tensors[0])
        steps = self._between.receive(target, source, tag)
        job = self._exchanged(steps, f"recv from rank {source}", list(tensors), home, False)
        return self._do(job, None, [*tensors, target])

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Any:
        see_host(tensors, "recv")
        target, home = written(tensors[0])
        found = exchange.Found()
        steps = self._between.receive(target, MPI.ANY_SOURCE, tag, found)
        job = self._exchanged(steps, "recv from any rank", list(tensors), home, False)
        return exchange.FromAny(self._future(job, True, [*tensors, target]), found)

    # ---- the rest of c10d

    def _start_coalescing(self, device: Any) -> None:
        """What follows is put into operations one by one: they run in order in any case."""

    def _end_coalescing(self, device: Any = None) -> Any:
        return work(self._future(Job(_nothing, lambda: _at_once(_nothing), True), False, ()))

    def _set_sequence_number_for_group(self) -> None:
        """Operations are numbered by `collectives`."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        """When the group is destroyed: the thread that serves all groups goes on."""

    # ---- inside

    def _do(self, job: Job, opts: Any, keep: Sequence[Any]) -> Any:
        return work(self._future(job, opts is None or opts.asyncOp, keep))

    def _future(self, job: Job, beside: bool, keep: Sequence[Any]) -> Any:
        job.keep = keep
        return communication.do(job, beside)

    def _reduced(
        self, kind: str, given: Tensor, target: Tensor, how: Reduction, root: int, home: Callable[[], None]
    ) -> Job:
        """A reduction into `target`, which may be `given` itself."""
        if how.factor is not None:
            given.mul_(how.factor)
        if how.bitwise is not None:
            steps = self._between.reduce(target, given, how.bitwise, root if kind == "reduce" else None)
            return self._exchanged(steps, kind, [target], home)
        x, out = numbers(given), None if target is given else numbers(target)
        return self._collective(kind, x, out, how.name, root, home)

    def _moved(self, kind: str, given: Tensor, target: Tensor | None, root: int, home: Callable[[], None]) -> Job:
        """A collective that adds nothing, of any type."""
        return self._collective(kind, movable(given), None if target is None else movable(target), "sum", root, home)

    def _collective(
        self, kind: str, x: Tensor, out: Tensor | None, op: str, root: int, home: Callable[[], None]
    ) -> Job:
        keywords: dict[str, Any] = {"out": out}
        if kind in ("allreduce", "reduce_scatter", "reduce"):
            keywords["op"] = op
        if kind in ("broadcast", "reduce"):
            keywords["root"] = root
        call = getattr(collectives, kind)

        def run() -> list[Tensor]:
            call(x, self.comm, **keywords)
            home()
            return [x if out is None else out]

        def steps() -> Steps:
            made = begin(kind, x, self.comm, op=op, out=out, root=root)
            while not made.test():
                yield
            made.wait()
            home()
            return [x if out is None else out]

        return Job(run, steps, True)

    def _scattered(self, output: Tensor, given: Tensor, sizes: Sequence[int], opts: Any) -> Job:
        """The ranks' sums of `given`, of which this rank takes its part."""
        how, rank = reduction(opts.reduceOp, given.dtype), self.comm.rank
        if output.numel() != sizes[rank] or sum(sizes) != given.numel():
            raise ValueError(f"reduce_scatter: rank {rank}'s output has {output.numel()} elements, and its part of the "
                             f"input {sizes[rank]} of {given.numel()} between {len(sizes)} ranks")  # fmt: skip
        target, home = written(output)
        if how.bitwise is None and how.factor is None and len(set(sizes)) == 1:
            return self._collective("reduce_scatter", numbers(given), numbers(target), how.name, 0, home)
        whole, start = given.clone(), sum(sizes[:rank])

        def take() -> None:
            target.copy_(whole[start : start + sizes[rank]])
            home()

        return self._reduced("allreduce", whole, whole, how, 0, take)

    def _gathered(self, outputs: Sequence[Tensor], given: Tensor) -> Job:
        see_host([*outputs, given], "all_gather")
        if len(outputs) != self.comm.size:
            raise ValueError(f"all_gather: {len(outputs)} outputs for {self.comm.size} ranks: give one for each")
        sizes = [tensor.numel() for tensor in outputs]
        if len(set(sizes)) == 1 and sizes[0] == given.numel():
            target = torch.empty(sum(sizes), dtype=given.dtype)
            return self._moved("allgather", flat(given), target, 0, lambda: _deal(target, outputs))
        target = torch.empty(sum(sizes), dtype=given.dtype)
        steps = self._between.allgather(target, sizes, flat(given))
        return self._exchanged(steps, "all_gather", list(outputs), lambda: _deal(target, outputs))

    def _exchanged(
        self, steps: Steps, what: str, result: list[Tensor], home: Callable[[], None], ordered: bool = True
    ) -> Job:
        """What goes by MPI's own calls; `steps` begin when they are first taken."""

        def through() -> Steps:
            yield from steps
            home()
            return result

        def run() -> list[Tensor]:
            with self._home.failing(what):
                self._home.run(through(), what)
            return result

        return Job(run, through, ordered)


def _in_turn(jobs: Sequence[Job], result: Any) -> Job:
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

    return Job(run, steps, True)


def _at_once(run: Callable[[], Any]) -> Steps:
    """What does not wait for others beside others."""
    return run()
    yield


def _deal(source: Tensor, outputs: Sequence[Tensor]) -> None:
    """Copy the parts of a 1-D tensor into tensors, one behind the other."""
    start = 0
    for output in outputs:
        output.detach().copy_(source[start : start + output.numel()].view(output.shape))
        start += output.numel()


def _nothing() -> None:
    """There is nothing to be done."""
