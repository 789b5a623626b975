"""Makes "mpips" a backend of torch.distributed: groups over MPI's communicators, and a rendezvous by MPI."""

from __future__ import annotations

import atexit
import importlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import torch.distributed as dist
from mpi4py import MPI

from collectives.errors import of_caller
from mpips.torch.agreement import see_joined
from mpips.torch.process_group.group import Group
from mpips.torch.process_group.works import communication

NAME = "mpips"
TAG = 7301
WORDS = 512


def register() -> None:
    """Let `init_process_group("mpips")` find this backend. Once for each process; sends nothing."""
    if NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    given = handlers["env"]
    handlers["env"] = lambda url, **keywords: _by_mpi(given, url, **keywords)
    atexit.register(communication.close)


def _create(options: Any, group_options: Any = None) -> Group:
    """The group that c10d asks for; collective over its ranks. RuntimeError where MPI has not joined all processes,
    ValueError where rank or size are not MPI's."""
    see_joined()
    ranks, world = list(options.global_ranks_in_group), MPI.COMM_WORLD
    if not ranks or len(ranks) == world.size:
        _see_place(options.group_rank, options.group_size)
        return Group(world.Dup(), options.timeout)
    members = world.group.Incl(ranks)
    return Group(world.Create_group(members, TAG), options.timeout)


def _by_mpi(given: Any, url: str, timeout: timedelta = dist.default_pg_timeout, **keywords: Any) -> Iterator[Any]:
    """The rendezvous of `env://`, where a launcher has set its variables; else rank 0 says over MPI where it is."""
    if "MASTER_ADDR" in os.environ:
        yield from given(url, timeout=timeout, **keywords)
        return
    world = MPI.COMM_WORLD
    asked = parse_qs(urlsplit(url).query)
    _see_place(*(int(asked.get(name, ["-1"])[0]) for name in ("rank", "world_size")))
    server = None
    address = _address()
    if world.rank == 0:
        server = dist.TCPStore(address, 0, world.size, True, timeout, wait_for_workers=False)
    told = bytearray(WORDS)
    if server is not None:
        text = f"{server.host} {server.port}".encode()
        told[: len(text)] = text
    world.Bcast(told)
    host, port = told.rstrip(b"\0").decode().split()
    store = server or dist.TCPStore(host, int(port), world.size, False, timeout, wait_for_workers=False)
    yield store, world.rank, world.size


def _see_place(rank: int, size: int) -> None:
    """ValueError on all ranks where one gives a rank or a size that is not MPI's; -1 is none. Collective."""
    world = MPI.COMM_WORLD
    given = np.empty((world.size, 2), np.int64)
    world.Allgather(np.array([rank, size], np.int64), given)
    for place, (said, ranks) in enumerate(given.tolist()):
        wrong = f"world_size is {ranks}, and MPI's is {world.size}" if ranks not in (-1, world.size) else ""
        if not wrong and said not in (-1, place):
            wrong = f"rank is {said} on MPI's rank {place}"
        if wrong:
            raise of_caller(ValueError(f"init_process_group: {wrong}: leave rank and world_size out, MPI knows them"))


def _address() -> str:
    """Where the other ranks reach this one. Collective."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    alone = node.size == MPI.COMM_WORLD.size
    node.Free()
    return "127.0.0.1" if alone else socket.gethostname()
