"""Cores for the processes of a store on a machine that has more processes than cores.

Who waits there gives his core away at every look, which the kernel takes for work: it may leave both servers on one
core, and those who wait for them on the other, for seconds. So each process gets one core, in turn, unless a launcher
has bound any of them before; servers, the last ranks, then have different ones. Where nodes are containers of one
machine, or hosts of a lab, nobody is bound: with Open MPI's waits for the network, two on one core stand still.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from collectives.machine import Quota, bound_cores, find_quota, usable_cores
from mpips.store.runtime.rendezvous import MeetingPlace

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Another one for each start of a machine, and the same in all its containers."""
Cores = frozenset[int]


class Ranks(Protocol):
    """Which ranks share a node: a `layout.Layout`."""

    rank: int
    num_workers: int
    num_servers: int

    def same_node(self, a: int, b: int) -> bool: ...


class Place(msgspec.Struct, array_like=True, frozen=True):
    """Where a process runs."""

    machine: str
    cores: list[int]
    quota: Quota | None


def crowded(allowed: Sequence[Cores], quotas: Sequence[Quota | None] = ()) -> bool:
    """Return whether processes of a machine, which may use these cores within these quotas, are more than the cores."""
    return bound_cores(len(frozenset().union(*allowed)), quotas) < len(allowed)


def spread(allowed: Sequence[Cores]) -> list[int] | None:
    """A core for each process of a machine, from the cores that each may use; None where they stay as they are."""
    cores = sorted(allowed[0])
    if len(set(allowed)) > 1 or not 1 < len(cores) < len(allowed):
        return None
    return [cores[index % len(cores)] for index in range(len(allowed))]


class Seat:
    """The core of this process, until it leaves."""

    def __init__(self, layout: Ranks, generation: MeetingPlace) -> None:
        """Collective over all ranks of the store, blocking. `shared`: some process has no core alone. Spares sleep, and
        do not count in that."""
        self.before: Cores = frozenset(os.sched_getaffinity(0))
        self.usable = usable_cores()
        mine = Place(BOOT.read_text(), sorted(self.before), find_quota())
        said = generation.meet(msgspec.msgpack.encode(mine), "mpips.create", True)
        every = [msgspec.msgpack.decode(data, type=Place) for data in said]
        here = [rank for rank, place in enumerate(every) if place.machine == mine.machine]
        allowed = [frozenset(every[rank].cores) for rank in here]
        alone = all(layout.same_node(rank, layout.rank) for rank in here)
        busy = [rank for rank in here if rank < layout.num_workers + layout.num_servers]
        busy = busy or here
        self.shared = crowded([frozenset(every[rank].cores) for rank in busy], [every[rank].quota for rank in busy])
        cores = spread(allowed) if alone else None
        self.own = frozenset([cores[here.index(layout.rank)]]) if cores else self.before
        self._take(self.own)

    def step_aside(self) -> None:
        """The calling thread leaves this process' core to its main thread, where it has but that one."""
        self._take(self.before - self.own or self.before)

    def leave(self) -> None:
        """The process runs where it ran before."""
        self._take(self.before)

    def _take(self, cores: Cores) -> None:
        if cores != frozenset(os.sched_getaffinity(0)):
            with suppress(OSError):  # where a container forbids it, all stays as it is
                os.sched_setaffinity(0, cores)
