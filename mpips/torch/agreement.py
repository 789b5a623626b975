"""What must hold on all ranks before training: MPI joined all processes, and all have the same model and arguments.

Where they differ, a sentence says what differs first.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

import collectives
from collectives.communicator import communicator
from collectives.errors import of_caller
from mpips.store import world

WHAT = "DataParallel"
TORCHRUN, PROCESSES = "TORCHELASTIC_RUN_ID", "WORLD_SIZE"
Items = Sequence[tuple[str, str]]
"""Things, such as "parameter 'weight'", and what they are: "float32(2, 3)". No thing comes twice."""


def see_joined() -> None:
    """RuntimeError where a launcher started more processes than MPI has ranks: each would train a model of its own."""
    ranks = MPI.COMM_WORLD.size
    cause = world.lost(os.environ, MPI.Get_library_version(), ranks)
    asked = os.environ.get(PROCESSES, "") if TORCHRUN in os.environ else ""
    if cause is None and asked.isdigit() and int(asked) > ranks:
        cause = (f"torchrun started {asked} processes ({PROCESSES}), and MPI has {ranks} rank{'s' * (ranks > 1)}: "
                 f"start with `mpips run -w {asked}` or `mpirun -n {asked}` instead of torchrun")  # fmt: skip
    if cause is not None:
        raise of_caller(RuntimeError(cause))


def described(module: torch.nn.Module, buckets: str | float, algorithm: str) -> Items:
    """What has to be the same on all ranks."""
    return [
        *((f"parameter {name!r}", _kind(p) + ("" if p.requires_grad else ", frozen")) for name, p in
          module.named_parameters()),
        *((f"buffer {name!r}", _kind(buffer)) for name, buffer in module.named_buffers()),
        ("buckets", repr(buckets)), ("algorithm", repr(algorithm)), ("module", type(module).__name__),
    ]  # fmt: skip


def agree(items: Items, comm: MPI.Intracomm, what: str = WHAT, cure: str = "give all ranks the same") -> None:
    """MismatchError on all ranks, with one sentence, unless all bring the same. Collective, blocking."""
    word = msgspec.msgpack.encode(items)
    head = np.array([len(word), int.from_bytes(hashlib.blake2b(word, digest_size=7).digest())])
    heads = gathered(head, comm, what)
    if (heads == head).all():
        return
    padded = np.zeros(heads[:, 0].max(), np.uint8)
    padded[: len(word)] = np.frombuffer(word, np.uint8)
    words = gathered(padded, comm, what)
    every = [msgspec.msgpack.decode(row[:n].tobytes(), type=list[tuple[str, str]]) for row, (n, _) in zip(words, heads)]
    with communicator(comm).failing(what):
        raise collectives.MismatchError(f"{what}: {difference(every)}: {cure}")


def difference(every: Sequence[Items], first: int = 0) -> str:
    """What differs first between rank `first` and those behind it; "" where nothing does. Pure."""
    known = dict(every[0])
    for rank, items in enumerate(every, first):
        theirs = dict(items)
        for thing, kind in every[0]:
            if thing not in theirs:
                return f"rank {rank} has no {thing}, which rank {first} has"
            if theirs[thing] != kind:
                return f"{thing} is {kind} on rank {first} and {theirs[thing]} on rank {rank}"
        for other in theirs:
            if other not in known:
                return f"rank {first} has no {other}, which rank {rank} has"
        for thing, other in zip(known, theirs):
            if other != thing:
                return f"rank {first} has {thing} where rank {rank} has {other}"
    return ""


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}"


def gathered(row: np.ndarray, comm: MPI.Intracomm, what: str = WHAT) -> np.ndarray:
    """Return all ranks' rows, which are of one length. Collective, blocking."""
    rows = np.empty((comm.size, row.size), row.dtype)
    collectives.allgather(row, comm, out=rows, label=what)
    return rows
