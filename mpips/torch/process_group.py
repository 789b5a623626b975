"""The process group for CPU tensors: it runs collectives by `mpips.collectives`, and sends and receives by MPI.

Every method takes the lists of tensors and the options that c10d, the core of torch.distributed, passes, and returns a
`Work`. With the option `asyncOp` the operation runs while the program computes. Tensors may have any shape and any
strides. Bad arguments raise `ArgumentError` before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, _allow_inflight_collective_as_graph_input

from mpips.collectives.clock import Clock
from mpips.collectives.communicator import communicator
from mpips.collectives.errors import CollectiveError, StallError
from mpips.collectives.fabric.failure import CommCreationGuard, dead_ranks, guard_comm
from mpips.collectives.fabric.requests import MemberArrival
from mpips.collectives.fabric.wait import Limits
from mpips.torch.direct import reduce_at_once
from mpips.torch.dispatch import listened
from mpips.torch.jobs import LEAST_SECONDS, GroupJobs, Tensors, check_alike, check_types, deal, in_turn
from mpips.torch.lone import watch as gradients
from mpips.torch.reconfigure import GroupMember, call_in_thread
from mpips.torch.tensors import (
    NAMES,
    ArgumentError,
    check_on_host,
    find_tensors,
    flatten,
    flatten_result,
    reduction,
    uncompiled,
)
from mpips.torch.works import GroupJob, Work, communication

Allgather: TypeAlias = "AllgatherOptions | None"
ReduceScatter: TypeAlias = "dist.ReduceScatterOptions | None"
# MPI uses this tag for the messages that create a communicator for a subset of the ranks.
TAG = 7301
COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "broadcast",
    "allgather",
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather_coalesced",
    "barrier",
    "all_to_all_single",
    "alltoall",
    "gather",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)


@uncompiled()
@listened(*COLLECTIVES)
class ProcessGroup(dist.ProcessGroup):
    """A process group of torch.distributed over the ranks of an MPI communicator. Creating it is collective."""

    # PyTorch's split_group reads this, and then raises an error.
    supports_splitting = False

    def __init__(
        self, comm: MPI.Intracomm, timeout: timedelta, member: GroupMember | None = None, outlived: bool = False
    ) -> None:
        super().__init__(comm.rank, comm.size)
        # this process as a member of the groups that `reconfigure` makes, or None
        self._member = member
        # the groups of `new_group`, which end with this one
        self._parts: list[ProcessGroup] = []
        self._timeout = timeout
        self._name = ""
        self._sequence = 0
        self._use(GroupJobs(comm, timeout.total_seconds(), outlived))

    @classmethod
    def without_members(cls, rank: int, size: int, timeout: timedelta, member: GroupMember) -> ProcessGroup:
        """Create a group that has no members before `reconfigure` is called, and reports this rank and size. Local."""
        group = cls(MPI.COMM_SELF.Dup(), timeout, member)
        group._jobs.end("the process group has no members yet: call torch.distributed._reconfigure first")
        group._place = rank, size
        return group

    def _use(self, jobs: GroupJobs) -> None:
        """From now on, create all operations by `jobs`."""
        self._jobs = jobs
        self.comm = jobs.comm
        # rank and size, as c10d sees them
        self._place = self.comm.rank, self.comm.size
        home = communicator(jobs.comm)
        self._roomy = home.nodes > 1 or home.board.memory.roomy
        gradients.add_group(jobs.comm.size)

    def _start(self, job: GroupJob, opts: Any, result: Any) -> Work:
        """Run a job and return its work. The job's future gives `result`.

        The job runs in the background if the options ask for that. DistributedDataParallel starts its jobs inside of a
        backward pass. If each rank has only one core, a job that starts there runs in the caller's thread instead,
        because a background thread would only compete with backward for the core.
        """
        job.result = result
        if gradients.active:
            gradients.see(result, between_two=job.order is None)
        # Sends and receives are not made by all ranks, so they are not counted.
        self._sequence += job.order is not None
        alone = not self._roomy and torch._C._current_graph_task_id() >= 0
        future = communication.run(job, opts is None or (opts.asyncOp and not alone))
        work = Work(future, None, self._sequence)
        if _allow_inflight_collective_as_graph_input():
            work.register(list(find_tensors(result)))
        return work

    def _finished(self, result: list[Tensor]) -> Work:
        """Return the work for a collective that this thread has just finished."""
        if gradients.active:
            gradients.see(result, between_two=False)
        self._sequence += 1
        work = Work(None, None, self._sequence, result)
        if _allow_inflight_collective_as_graph_input():
            work.register(result)
        return work

    def _check_rank(self, rank: int, what: str, argument: str) -> None:
        if not 0 <= rank < self.comm.size:
            raise ArgumentError(f"{what}: {argument} is {rank}, and the group has ranks 0 to {self.comm.size - 1}")

    def _check_parts(self, parts: Tensors, own: Tensor, what: str, argument: str) -> None:
        """Raise ArgumentError unless there is a tensor for each rank, and this rank's tensor matches `own`."""
        if len(parts) != self.comm.size:
            raise ArgumentError(f"{what}: {len(parts)} {argument} for {self.comm.size} ranks: give one for each")
        check_alike(parts[self.comm.rank], own, f"{what}: of {argument} that of rank {self.comm.rank}")

    # ---- reductions

    def allreduce(self, tensors: Tensors, opts: dist.AllreduceOptions | None = None) -> Work:
        opts = opts or dist.AllreduceOptions()
        if len(tensors) == 1 and tensors[0].layout is torch.sparse_coo:
            return self._start(self._jobs.allreduce_sparse(tensors[0], opts.reduceOp), opts, list(tensors))
        check_on_host(tensors, "all_reduce")
        if len(tensors) > 1:
            return self.allreduce_coalesced(tensors, opts)
        name = None if opts.asyncOp else NAMES.get(opts.reduceOp.op)
        if name is not None and reduce_at_once(tensors[0], self.comm, name):
            return self._finished(list(tensors))
        target, copy_back = flatten_result(tensors[0])
        how = reduction(opts.reduceOp, target.dtype)
        return self._start(self._jobs.reduce("allreduce", target, target, how, 0, copy_back), opts, list(tensors))

    def allreduce_coalesced(self, tensors: Tensors, opts: dist.AllreduceCoalescedOptions | None = None) -> Work:
        opts = opts or dist.AllreduceCoalescedOptions()
        check_on_host(tensors, "all_reduce_coalesced")
        return self._start(self._jobs.allreduce_together(tensors, opts.reduceOp), opts, tensors)

    def reduce(self, tensors: Tensors, opts: dist.ReduceOptions) -> Work:
        check_on_host(tensors, "reduce")
        (tensor,) = tensors
        self._check_rank(opts.rootRank, "reduce", "dst")
        given, root = flatten(tensor).clone(), opts.rootRank
        target, copy_back = flatten_result(tensor) if self.comm.rank == root else (torch.empty_like(given), None)
        how = reduction(opts.reduceOp, tensor.dtype)
        return self._start(self._jobs.reduce("reduce", given, target, how, root, copy_back), opts, list(tensors))

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: ReduceScatter = None) -> Work:
        opts = opts or dist.ReduceScatterOptions()
        check_on_host([*outputs, *inputs[0]], "reduce_scatter")
        (output,), (parts,) = outputs, inputs
        if len(parts) != self.comm.size:
            raise ArgumentError(f"reduce_scatter: {len(parts)} inputs for {self.comm.size} ranks: give one for each")
        sizes = [part.numel() for part in parts]
        job = self._jobs.reduce_scatter(output, _join(parts, output.dtype), sizes, opts.reduceOp)
        return self._start(job, opts, [output])

    def reduce_scatter_single(self, output: Tensor, given: Tensor, opts: ReduceScatter = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: ReduceScatter = None) -> Work:
        opts, size = opts or dist.ReduceScatterOptions(), self.comm.size
        check_on_host([*outputs, *inputs], "reduce_scatter_tensor")
        jobs = [
            self._jobs.reduce_scatter(output, flatten(given), [given.numel() // size] * size, opts.reduceOp)
            for output, given in zip(outputs, inputs, strict=True)
        ]
        return self._start(in_turn(jobs), opts, outputs)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- broadcast, gathers to all, barriers

    def broadcast(self, tensors: Tensors, opts: dist.BroadcastOptions | None = None) -> Work:
        opts = opts or dist.BroadcastOptions()
        check_on_host(tensors, "broadcast")
        self._check_rank(opts.rootRank, "broadcast", "src")
        targets = [flatten_result(tensor) for tensor in tensors]
        jobs = [self._jobs.move("broadcast", target, None, opts.rootRank, after) for target, after in targets]
        return self._start(in_turn(jobs), opts, list(tensors))

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Allgather = None) -> Work:
        opts = opts or AllgatherOptions()
        jobs = [self._jobs.allgather(out, given) for out, given in zip(outputs, inputs, strict=True)]
        return self._start(in_turn(jobs), opts, list(outputs[0]) if len(outputs) == 1 else outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, opts: Allgather = None) -> Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Allgather = None) -> Work:
        opts = opts or AllgatherOptions()
        check_on_host([*outputs, *inputs], "all_gather_into_tensor")
        jobs = []
        for output, given in zip(outputs, inputs, strict=True):
            if output.numel() != given.numel() * self.comm.size:
                raise ArgumentError(
                    f"all_gather_into_tensor: the output has {output.numel()} elements and the input {given.numel()}: "
                    f"it needs {self.comm.size} times as many"
                )
            check_types(output, given, "all_gather_into_tensor")
            target, copy_back = flatten_result(output)
            jobs.append(self._jobs.move("allgather", flatten(given), target, 0, copy_back))
        return self._start(in_turn(jobs), opts, outputs)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Allgather = None) -> Work:
        # c10d passes a list for each rank, and our `allgather` takes a list for each tensor.
        by_tensor = [[out[number] for out in outputs] for number in range(len(inputs))]
        return self.allgather(by_tensor, inputs, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def barrier(self, opts: dist.BarrierOptions | None = None) -> Work:
        return self._start(self._jobs.barrier(), opts or dist.BarrierOptions(), [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, but for at most `timeout`. Collective, blocking.

        If a rank does not arrive in time, all ranks raise StallError, which names every missing rank whatever
        `wait_all_ranks` is. The group cannot be used afterwards.
        """
        if timeout is None:
            self.barrier().wait()
            return
        with self._jobs.limited(timeout.total_seconds()):
            self.barrier().wait()

    # ---- gather, scatter, reduce_scatter, all-to-all

    def all_to_all_single(
        self,
        output: Tensor,
        given: Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: dist.AllToAllOptions | None = None,
    ) -> Work:
        check_on_host([output, given], "all_to_all_single")
        check_types(output, given, "all_to_all_single")
        if not given.is_contiguous():
            raise ArgumentError("all_to_all_single: Tensors must be contiguous: pass input.contiguous()")
        source, (target, copy_back) = flatten(given), flatten_result(output)
        sent = _elements(given, input_splits, self.comm.size, "input_split_sizes")
        received = _elements(output, output_splits, self.comm.size, "output_split_sizes")
        rank = self.comm.rank
        if sent[rank] != received[rank]:
            raise ArgumentError(
                f"all_to_all_single: rank {rank} sends itself {sent[rank]} elements of the input and takes "
                f"{received[rank]} into the output"
            )
        job = self._jobs.exchange(self._jobs.messages.alltoall(target, received, source, sent), "all_to_all", copy_back)
        return self._start(job, opts or dist.AllToAllOptions(), [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: dist.AllToAllOptions | None = None) -> Work:
        check_on_host([*outputs, *inputs], "all_to_all")
        if len(inputs) != self.comm.size:
            raise ArgumentError(f"all_to_all: {len(inputs)} inputs for {self.comm.size} ranks: give one for each")
        self._check_parts(outputs, inputs[self.comm.rank], "all_to_all", "outputs")
        source = _join(inputs, inputs[0].dtype)
        received, sent = [tensor.numel() for tensor in outputs], [tensor.numel() for tensor in inputs]
        target = torch.empty(sum(received), dtype=source.dtype)
        steps = self._jobs.messages.alltoall(target, received, source, sent)
        job = self._jobs.exchange(steps, "all_to_all", lambda: deal(target, outputs))
        return self._start(job, opts or dist.AllToAllOptions(), list(outputs))

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: dist.GatherOptions) -> Work:
        check_on_host(inputs, "gather")
        (given,) = inputs
        self._check_rank(opts.rootRank, "gather", "dst")
        parts = outputs[0] if self.comm.rank == opts.rootRank else []
        if self.comm.rank == opts.rootRank:
            self._check_parts(parts, given, "gather", "outputs")
        target = torch.empty(sum(part.numel() for part in parts), dtype=given.dtype)
        steps = self._jobs.messages.gather(target, [part.numel() for part in parts], flatten(given), opts.rootRank)
        return self._start(self._jobs.exchange(steps, "gather", lambda: deal(target, parts)), opts, list(parts))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: dist.ScatterOptions) -> Work:
        check_on_host(outputs, "scatter")
        self._check_rank(opts.rootRank, "scatter", "src")
        parts = inputs[0] if self.comm.rank == opts.rootRank else []
        if self.comm.rank == opts.rootRank:
            self._check_parts(parts, outputs[0], "scatter", "inputs")
        source, (target, copy_back) = _join(parts, outputs[0].dtype), flatten_result(outputs[0])
        steps = self._jobs.messages.scatter(target, source, [part.numel() for part in parts], opts.rootRank)
        return self._start(self._jobs.exchange(steps, "scatter", copy_back), opts, list(outputs))

    def gather_single(self, output: Tensor, given: Tensor, opts: Any = None) -> Work:
        raise ArgumentError("Backend mpips does not support gather_single: call gather")

    # ---- sends and receives

    def send(self, tensors: Tensors, destination: int, tag: int) -> Work:
        check_on_host(tensors, "send")
        self._check_rank(destination, "send", "dst")
        _check_tag(tag, "send")
        steps = self._jobs.messages.send(flatten(tensors[0]), destination, tag)
        return self._start(self._jobs.exchange(steps, f"send to rank {destination}", ordered=False), None, [])

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        check_on_host(tensors, "recv")
        self._check_rank(source, "recv", "src")
        _check_tag(tag, "recv")
        target, copy_back = flatten_result(tensors[0])
        steps = self._jobs.messages.receive(target, source, tag)
        job = self._jobs.exchange(steps, f"recv from rank {source}", copy_back, ordered=False)
        return self._start(job, None, list(tensors))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        check_on_host(tensors, "recv")
        _check_tag(tag, "recv")
        (target, copy_back), status = flatten_result(tensors[0]), MPI.Status()
        steps = self._jobs.messages.receive(target, MPI.ANY_SOURCE, tag, status)
        job = self._jobs.exchange(steps, "recv from any rank", copy_back, ordered=False)
        job.result = list(tensors)
        return Work(communication.run(job, True), status)

    # ---- faults

    @property
    def supports_reconfigure(self) -> bool:
        return self._member is not None

    def get_reconfigure_handle(self) -> str:
        """Return the text by which `reconfigure` finds this process. Local. Each `reconfigure` makes it stale."""
        return str(self._found_member("get_reconfigure_handle").handle)

    def reconfigure(self, opts: Any) -> Work:
        """Create this group again, from the processes whose handles are given. Collective over them, blocking.

        The old group ends first: on all its ranks, operations under way and later ones raise CollectiveError, which
        names ranks that have died. After an error of this call the group has no members until the next call.

        Args:
            opts: PyTorch's `ReconfigureOptions`. `uuid`: a number that no earlier call has had. `handles`: the handle
                of each process; a list gives process k the rank k, and a set is ordered by the ranks of the job.
                `timeout`: None for the timeout of the group. `hints` are ignored.

        Raises:
            ArgumentError: The uuid was used before, or a handle is wrong or stale, or its process has died. The old
                group can still be used.
            MismatchError: The processes pass different handles.
            StallError: A process has not called `reconfigure` in time.
            CollectiveError: A process has died or given up during the call.
        """
        member = self._found_member("reconfigure")
        handles, timeout = member.check(opts.uuid, opts.handles), opts.timeout or self._timeout
        sentence = f"rank {self.comm.rank} has reconfigured its process group{member.name_deaths(self.comm)}"
        for group in (self, *self._parts):
            group._jobs.end(sentence)
        jobs = member.make(
            opts.uuid, handles, max(timeout.total_seconds(), LEAST_SECONDS), self._timeout.total_seconds()
        )
        for group in (*self._parts, self):
            group._jobs.leave()
        self._parts = []
        self._use(jobs)
        names = dist.distributed_c10d._world.pg_group_ranks
        if self in names:
            names[self] = {rank: rank for rank in range(self.comm.size)}
        return Work(None, None, self._sequence, [])

    def make_part(self, ranks: Sequence[int], timeout: timedelta) -> ProcessGroup:
        """Create a group of some ranks of this group. It ends when this group ends. Collective over them, blocking.

        Raises:
            CollectiveError: This group has ended, or one of its processes has died.
            StallError: A member has not called `new_group` in time. This group has ended.
        """
        home, clock, seconds = communicator(self.comm), Clock(), max(timeout.total_seconds(), LEAST_SECONDS)
        home.check()

        def look(waited: float) -> None:
            home.look_at_all(waited)
            if dead := dead_ranks(self.comm):
                raise CollectiveError(f"rank {dead[0]} is needed, and its process has ended")

        def failure() -> CollectiveError | None:
            try:
                look(0.0)
            except CollectiveError as error:
                return error
            late = clock.seconds() > seconds
            return StallError(f"new_group has taken longer than {seconds:.3g} s") if late else None

        def make() -> ProcessGroup:
            with CommCreationGuard(self.comm, lambda: failure() is not None):
                members = self.comm.group.Incl(ranks)
                return ProcessGroup(guard_comm(self.comm.Create_group(members, TAG)), timeout, outlived=True)

        with home.failing("new_group"):
            # MPI's call may never end if a member dies or does not come. So all members come before it begins.
            MemberArrival(self.comm, "new_group", ranks, TAG, look).wait(Limits(home.limits.stall_seconds, seconds))
            # This process may be the last to come, after others have stopped waiting.
            look(0.0)
            part = call_in_thread(make, failure)
        # A member may wait in this part for a living member, which itself waits for a dead one in another part. So if
        # any process of the enclosing group dies, the waits in all parts must end.
        communicator(part.comm).set_enclosing_look(home.look_at_all)
        self._parts.append(part)
        return part

    def _found_member(self, what: str) -> GroupMember:
        if self._member is None:
            raise ArgumentError(f"{what}: pass enable_reconfigure=True to init_process_group")
        return self._member

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the group, as `torch.distributed.set_timeout` asks. Local: call it on all ranks.

        Groups that `reconfigure` makes later have this timeout, too.
        """
        self._timeout = timeout
        self._jobs.set_timeout(timeout.total_seconds())

    def abort(self) -> None:
        """End the group: operations under way and later ones raise CollectiveError on all ranks.

        `reconfigure` makes it usable again.
        """
        self._jobs.end(f"rank {self.comm.rank} has aborted the process group")

    def get_error(self) -> Any:
        """Return SUCCESS, as gloo does: operations raise their errors."""
        return torch._C._distributed_c10d.ErrorType.SUCCESS

    def getRank(self) -> int:
        return self._place[0]

    def getSize(self) -> int:
        return self._place[1]

    # PyTorch's own methods keep a hook, but only C++ groups call hooks. So the methods are refused here.

    def register_pre_hook(self, hook_id: int, hook: object) -> None:
        raise ArgumentError("register_pre_hook: mpips would never call the hook")

    def register_post_hook(self, hook_id: int, hook: object) -> None:
        raise ArgumentError("register_post_hook: mpips would never call the hook")

    def register_abort_hook(self, hook_id: int, hook: object) -> None:
        raise ArgumentError("register_abort_hook: mpips would never call the hook")

    # ---- other methods that c10d calls

    def getBackendName(self) -> str:
        return "mpips"

    @property
    def pg_name(self) -> str:
        """The group's name in c10d. A group that was destroyed keeps the name that it had."""
        self._name = dist.distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    group_name = pg_name

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group supports. `monitored_barrier` needs it. Empty until the group has a name.

        If the list were not empty from the start, c10d would attach its flight recorder, which only works with C++
        backends.
        """
        return [torch.device("cpu")] if self.pg_name else []

    def __repr__(self) -> str:
        return f"<mpips process group, rank {self.comm.rank} of {self.comm.size}>"

    def _get_backend(self, device: torch.device) -> ProcessGroup:
        """Return the backend for a device: this group itself.

        This also tells c10d that the group does not coalesce operations.
        """
        return self

    get_backend = _get_backend

    def _start_coalescing(self, device: torch.device) -> None:
        """Do nothing: operations run in the order in which they are started anyway."""

    def _end_coalescing(self, device: torch.device | None = None) -> Work:
        """Return a work that ends after all operations started before it."""
        return Work(communication.run(self._jobs.empty(), False))

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every group counts from 0."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives started in this group.

        The number is the same on all ranks, because sends and receives do not count.
        """
        return self._sequence

    def shutdown(self) -> None:
        """Do nothing: the communication thread is shared by all groups and keeps running."""


def _join(parts: Tensors, dtype: torch.dtype) -> Tensor:
    return torch.cat([flatten(part) for part in parts]) if parts else torch.empty(0, dtype=dtype)


def _check_tag(tag: int, what: str) -> None:
    most = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 0)
    if not 0 <= tag <= most:
        raise ArgumentError(f"{what}: tag is {tag}: choose one from 0 to {most}")


def _elements(tensor: Tensor, splits: Sequence[int] | None, ranks: int, argument: str) -> list[int]:
    """Return, for each rank, how many elements of `tensor` are sent to it, or received from it.

    `splits[r]` is the number of rows for rank r. Without `splits` all ranks get an equal share. Raises ArgumentError if
    the splits do not fit the tensor.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not splits:
        if rows % ranks:
            raise ArgumentError(
                f"all_to_all_single: {rows} rows do not split evenly over {ranks} ranks: pass {argument}"
            )
        return [tensor.numel() // ranks] * ranks
    if len(splits) != ranks or sum(splits) != rows:
        raise ArgumentError(
            f"all_to_all_single: {argument} is {list(splits)}: give {ranks} numbers whose sum is {rows}"
        )
    return [rows_here * (tensor.numel() // max(rows, 1)) for rows_here in splits]
