"""Register "mpips" as a backend of torch.distributed: process groups on MPI communicators, and a rendezvous by MPI."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch.distributed as dist
from mpi4py import MPI

from mpips.address import find_address
from mpips.collectives import log
from mpips.collectives.errors import of_caller
from mpips.collectives.fabric.requests import ArrivalBarrier, MemberArrival
from mpips.collectives.fabric.wait import Limits, read_limits
from mpips.ending.process import before_mpi_ends
from mpips.store.create import why_deaths_end_job, workers_of
from mpips.store.options import read as read_options
from mpips.store.world import MASTER, PORT, RANK, SIZE, launched_as, lost, without_place
from mpips.torch.process_group import TAG, ProcessGroup
from mpips.torch.reconfigure import GroupMember, make_pairs
from mpips.torch.samplers import watch_samplers
from mpips.torch.tensors import ArgumentError
from mpips.torch.works import communication

LOG = log.get("mpips.torch")
NAME = "mpips"
# an environment variable that only torchrun sets
TORCHRUN = "TORCHELASTIC_RUN_ID"


def register() -> None:
    """Register this backend, so that `init_process_group("mpips")` finds it and takes rank and size from MPI.

    Local. A second call does nothing.
    """
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=["cpu"])
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    given = handlers["env"]
    handlers["env"] = lambda url, **keywords: _rendezvous_by_mpi(given, url, **keywords)
    before_mpi_ends(communication.close)
    watch_samplers()


def check_joined() -> None:
    """Raise RuntimeError if a launcher started more processes than MPI has ranks.

    Without this check, each process would silently train its own model.
    """
    size = MPI.COMM_WORLD.size
    cause = lost(os.environ, MPI.Get_library_version(), size)
    asked = os.environ.get(SIZE, "") if TORCHRUN in os.environ else ""
    if cause is None and asked.isdigit() and int(asked) > size:
        cause = (
            f"torchrun started {asked} processes ({SIZE}), and MPI has {size} rank{'s' * (size > 1)}: "
            f"start with `mpips run -w {asked}` or `mpirun -n {asked}` instead of torchrun"
        )
    if cause is not None:
        raise of_caller(RuntimeError(cause))


def _create_group(options: Any, group_options: Any = None) -> ProcessGroup:
    """Create the process group that c10d, the core of torch.distributed, asks for. Collective over the group's ranks.

    Raises:
        RuntimeError: The launcher started processes that MPI has not joined.
        ArgumentError: The given rank or size differs from MPI's.
    """
    check_joined()
    ranks, world, default = list(options.global_ranks_in_group), workers_of(MPI.COMM_WORLD), dist.group.WORLD
    # PyTorch has this attribute from version 2.14 on.
    if getattr(options, "enable_reconfigure", False):
        return _begin_reconfigurable(options, world)
    if isinstance(default, ProcessGroup) and default.supports_reconfigure:
        return default.make_part(ranks, options.timeout)
    if isinstance(default, ProcessGroup):
        # MPI's call has no time limit. So all members come before it begins.
        limits = Limits(read_limits().stall_seconds, options.timeout.total_seconds())
        MemberArrival(default.comm, "new_group", ranks or range(world.size), TAG).wait(limits)
    if not ranks or len(ranks) == world.size:
        _check_place(options.group_rank, options.group_size, world)
        LOG.info("a process group of all %d ranks begins", world.size)
        return ProcessGroup(world.Dup(), options.timeout)
    LOG.info("a process group of ranks %s begins", ranks)
    members = world.group.Incl(ranks)
    return ProcessGroup(world.Create_group(members, TAG), options.timeout)


def _begin_reconfigurable(options: Any, world: MPI.Intracomm) -> ProcessGroup:
    """Create a process group that has no members until `reconfigure` is called.

    The first such group in a process is created collectively over MPI_COMM_WORLD. Later ones are local.

    Raises:
        CollectiveError: A rank died before the first group was created.
        RuntimeError: The death of a process would end the whole job.
        ArgumentError: The given rank or size differs from MPI's.
    """
    refusal = why_deaths_end_job("enable_reconfigure=True")
    if not refusal and (servers := read_options().servers):
        refusal = f"enable_reconfigure=True is not possible in a job with servers={servers}: start it without servers"
    if refusal:
        # Rank 0 runs the store of the rendezvous. If it raised at once, this store would end before the other ranks
        # have connected to it.
        ArrivalBarrier(world, "init_process_group").wait(read_limits())
        raise of_caller(RuntimeError(f"init_process_group: {refusal}"))
    _refuse_place(world.rank, options.group_rank, options.group_size, world.size)
    make_pairs()
    return ProcessGroup.without_members(world.rank, world.size, options.timeout, GroupMember())


def _rendezvous_by_mpi(
    given: Any, url: str, timeout: timedelta = dist.default_pg_timeout, **keywords: Any
) -> Iterator[Any]:
    """Yield the store, rank and size for the rendezvous `env://`.

    If MPI has joined the processes, rank and size come from MPI. If it has not, or if the program itself gives a rank
    and a size, PyTorch's own handler `given` takes them from environment variables.

    Whether an environment variable counts depends on who set it:
    - Variables that were exported before the start, as in the template of a batch script, have the same values on all
      ranks. They are ignored.
    - Variables that `mpips run` has set agree with MPI.
    - A child process of a rank inherits the variables of the rank. They are ignored, unless another launcher has set
      some of them again.
    """
    world = workers_of(MPI.COMM_WORLD)
    asked = parse_qs(urlsplit(url).query)
    joined = world.size > 1 or launched_as(os.environ) == (0, 1)
    theirs = without_place(os.environ)
    is_placed_anew = not joined and MASTER in os.environ and not theirs.keys().isdisjoint((PORT, RANK, SIZE))
    if is_placed_anew or (MASTER in theirs and (not joined or asked or _has_set_place())):
        try:
            yield from given(url, timeout=timeout, **keywords)
        except dist.DistNetworkError as error:
            if not joined or asked:
                raise
            place = ", ".join(f"{name}={os.environ.get(name)}" for name in (RANK, SIZE))
            raise of_caller(
                RuntimeError(
                    f"init_process_group: the program itself has set {place} on rank {world.rank} "
                    f"of MPI's {world.size}, and its rendezvous failed: export both before the "
                    f"start, or let the program leave them out. {error}"
                )
            ) from error
        return
    ArrivalBarrier(world, "init_process_group").wait(Limits(read_limits().stall_seconds, timeout.total_seconds()))
    rank, size = (int(asked.get(name, ["-1"])[0]) for name in ("rank", "world_size"))
    _check_place(rank, size, world)
    address = find_address("init_process_group", world)
    server = dist.TCPStore(address, 0, world.size, True, timeout, wait_for_workers=False) if world.rank == 0 else None
    port = np.array([0 if server is None else server.port])
    world.Bcast(port)
    store = server or dist.TCPStore(address, int(port[0]), world.size, False, timeout, wait_for_workers=False)
    yield store, world.rank, world.size


def _has_set_place() -> bool:
    """True if the program itself has set RANK or WORLD_SIZE since it was started."""
    try:
        words = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    started = without_place(dict(os.fsdecode(word).partition("=")[::2] for word in words))
    now = without_place(os.environ)
    return any(now.get(name) != started.get(name) for name in (RANK, SIZE))


def _check_place(rank: int, size: int, world: MPI.Intracomm) -> None:
    """Raise ArgumentError on all ranks if any rank passes a rank or size that differs from MPI's. Collective.

    A `rank` or `size` of -1 means that the program gave none.
    """
    given = np.empty((world.size, 2), np.int64)
    world.Allgather(np.array([rank, size], np.int64), given)
    for place, (said, asked) in enumerate(given.tolist()):
        _refuse_place(place, said, asked, world.size)


def _refuse_place(place: int, rank: int, size: int, world_size: int) -> None:
    """Raise ArgumentError if the rank and size that rank `place` has passed differ from MPI's."""
    wrong = f"world_size is {size}, and MPI's is {world_size}" if size not in (-1, world_size) else ""
    if not wrong and rank not in (-1, place):
        wrong = f"rank is {rank} on MPI's rank {place}"
    if wrong:
        raise ArgumentError(f"init_process_group: {wrong}: leave rank and world_size out, MPI knows them")
