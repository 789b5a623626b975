"""The process group: c10d's collectives on CPU tensors, carried out by `collectives`; sends and receives by MPI.

All methods take the lists of tensors and the options that c10d hands over, and return its `Work`. With `asyncOp` an
operation goes on beside compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from mpips.torch.process_group import exchange
from mpips.torch.process_group.jobs import Jobs, deal, in_turn
from mpips.torch.process_group.reductions import Reduction, reduction
from mpips.torch.process_group.tensors import flat, see_host, written
from mpips.torch.process_group.uncompiled import uncompiled
from mpips.torch.process_group.works import Found, Work, communication

Tensors = Sequence[Tensor]


@uncompiled()
class Group(dist.ProcessGroup):
    """Ranks of one MPI communicator as a group of c10d's. Making it is collective over `comm`."""

    def __init__(self, comm: MPI.Intracomm, timeout: timedelta) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._jobs = Jobs(comm, timeout.total_seconds())
        self._do = self._jobs.do
        self._token = torch.zeros(1)
        self._name = ""

    # ---- reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceOptions()
        see_host(tensors, "all_reduce")
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        target, home = written(tensors[0])
        how = reduction(opts.reduceOp, target.dtype)
        return self._do(self._jobs.reduced("allreduce", target, target, how, 0, home), opts, tensors, tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllreduceCoalescedOptions()
        see_host(tensors, "all_reduce_coalesced")
        return self._do(self._jobs.grouped(tensors, opts.reduceOp), opts, tensors)

    def reduce(self, tensors: Tensors, opts: Any) -> Any:
        see_host(tensors, "reduce")
        (tensor,) = tensors
        given = flat(tensor).clone()
        target, home = written(tensor) if self.comm.rank == opts.rootRank else (torch.empty_like(given), None)
        how = reduction(opts.reduceOp, tensor.dtype)
        return self._do(self._jobs.reduced("reduce", given, target, how, opts.rootRank, home), opts, tensors, tensors)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        see_host([*outputs, *inputs[0]], "reduce_scatter")
        (output,), (parts,) = outputs, inputs
        if len(parts) != self.comm.size:
            raise ValueError(f"reduce_scatter: {len(parts)} inputs for {self.comm.size} ranks: give one for each")
        sizes = [part.numel() for part in parts]
        return self._do(self._jobs.scattered(output, _joined(parts, output.dtype), sizes, opts.reduceOp), opts, outputs)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.ReduceScatterOptions()
        see_host([*outputs, *inputs], "reduce_scatter_tensor")
        jobs = [
            self._jobs.scattered(output, flat(given), [given.numel() // self.comm.size] * self.comm.size, opts.reduceOp)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._do(in_turn(jobs, outputs), opts, [*outputs, *inputs])

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- the same values for all

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.BroadcastOptions()
        see_host(tensors, "broadcast")
        pairs = [written(tensor) for tensor in tensors]
        jobs = [self._jobs.moved("broadcast", target, None, opts.rootRank, home) for target, home in pairs]
        return self._do(in_turn(jobs, tensors), opts, tensors, tensors)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        jobs = [self._jobs.gathered(out, given) for out, given in zip(outputs, inputs, strict=True)]
        return self._do(in_turn(jobs, outputs), opts, [*inputs, *(tensor for out in outputs for tensor in out)])

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllgatherOptions()
        see_host([*outputs, *inputs], "all_gather_into_tensor")
        jobs = []
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self.comm.size:
                raise ValueError(f"all_gather_into_tensor: the output has {output.numel()} elements and the input "
                                 f"{given.numel()}: it needs {self.comm.size} times as many")  # fmt: skip
            target, home = written(output)
            jobs.append(self._jobs.moved("allgather", flat(given), target, 0, home))
        return self._do(in_turn(jobs, outputs), opts, [*outputs, *inputs])

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> Any:
        by_tensor = [[out[number] for out in outputs] for number in range(len(inputs))]  # c10d lists them by rank here
        return self.allgather(by_tensor, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def barrier(self, opts: Any = None) -> Any:
        job = self._jobs.reduced("allreduce", self._token, self._token, Reduction("sum", None, None))
        return self._do(job, opts or dist.BarrierOptions(), ())

    # ---- from each to each, from one to all and back

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int] | None, input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Any:  # fmt: skip
        opts = opts or dist.AllToAllOptions()
        see_host([output, given], "all_to_all_single")
        source, (target, home) = flat(given), written(output)
        sent = exchange.elements(given, input_splits, self.comm.size, "input_split_sizes")
        came = exchange.elements(output, output_splits, self.comm.size, "output_split_sizes")
        steps = self._jobs.between.alltoall(target, came, source, sent)
        job = self._jobs.exchanged(steps, "all_to_all", [output], home)
        return self._do(job, opts, [output, given, source, target])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Any:
        opts = opts or dist.AllToAllOptions()
        see_host([*outputs, *inputs], "all_to_all")
        source = _joined(inputs, inputs[0].dtype)
        target = torch.empty(sum(tensor.numel() for tensor in outputs), dtype=source.dtype)
        came, sent = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        steps = self._jobs.between.alltoall(target, came, source, sent)
        job = self._jobs.exchanged(steps, "all_to_all", list(outputs), lambda: deal(target, outputs))
        return self._do(job, opts, [*outputs, source, target])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> Any:
        see_host(inputs, "gather")
        (given,) = inputs
        parts = outputs[0] if self.comm.rank == opts.rootRank else []
        source, target = flat(given), torch.empty(sum(part.numel() for part in parts), dtype=given.dtype)
        steps = self._jobs.between.gather(target, [part.numel() for part in parts], source, opts.rootRank)
        job = self._jobs.exchanged(steps, "gather", list(parts), lambda: deal(target, parts))
        return self._do(job, opts, [*parts, source, target])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> Any:
        see_host(outputs, "scatter")
        parts = inputs[0] if self.comm.rank == opts.rootRank else []
        source, (target, home) = _joined(parts, outputs[0].dtype), written(outputs[0])
        steps = self._jobs.between.scatter(target, source, [part.numel() for part in parts], opts.rootRank)
        return self._do(self._jobs.exchanged(steps, "scatter", list(outputs), home), opts, [*outputs, source, target])

    # ---- from one to one

    def send(self, tensors: Tensors, destination: int, tag: int) -> Any:
        see_host(tensors, "send")
        source = flat(tensors[0])
        steps = self._jobs.between.send(source, destination, tag)
        return self._do(self._jobs.exchanged(steps, f"send to rank {destination}", [], None, False), None, [source])

    def recv(self, tensors: Tensors, source: int, tag: int) -> Any:
        see_host(tensors, "recv")
        target, home = written(tensors[0])
        steps = self._jobs.between.receive(target, source, tag)
        job = self._jobs.exchanged(steps, f"recv from rank {source}", list(tensors), home, False)
        return self._do(job, None, [*tensors, target])

    def recv_anysource(self, tensors: Tensors, tag: int) -> Any:
        see_host(tensors, "recv")
        target, home = written(tensors[0])
        found = Found()
        steps = self._jobs.between.receive(target, MPI.ANY_SOURCE, tag, found)
        job = self._jobs.exchanged(steps, "recv from any rank", list(tensors), home, False)
        job.keep = [*tensors, target]
        return Work(communication.do(job, True), found)

    # ---- the rest of c10d

    def getBackendName(self) -> str:
        return "mpips"

    @property
    def pg_name(self) -> str:
        """The name under which c10d knows the group, or has known it."""
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    group_name = pg_name

    def __repr__(self) -> str:
        return f"<mpips process group, rank {self.comm.rank} of {self.comm.size}>"

    def _get_backend(self, device: Any) -> Group:
        """What carries out calls on tensors of a device: c10d sees that it puts none together."""
        return self

    def _start_coalescing(self, device: Any) -> None:
        """What follows is put into operations one by one: they run in order in any case."""

    def _end_coalescing(self, device: Any = None) -> Any:
        return Work(communication.do(self._jobs.empty(), False))

    def _set_sequence_number_for_group(self) -> None:
        """Operations are numbered by `collectives`."""

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        """When the group is destroyed: the thread that serves all groups goes on."""


def _joined(parts: Tensors, dtype: torch.dtype) -> Tensor:
    return torch.cat([flat(part) for part in parts]) if parts else torch.empty(0, dtype=dtype)
