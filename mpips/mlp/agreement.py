"""Agreement of ranks: a problem that one sees, or arguments that differ, all of them raise in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache

import msgspec
import numpy as np
from mpi4py import MPI

from collectives.fabric.wait import Limits
from mpips.optimizers.base import Optimizer
from mpips.store.runtime.rendezvous import Assembling, Room

from mpips.mlp.network.specification import Specification

_NAMED = 8  # ranks that a sentence lists one by one
_TAG = 1017  # of what ranks tell each other in `alike`


@cache
def _room() -> int:
    """Under what a communicator keeps its room. Made at first use: a driver may import this without MPI."""
    return MPI.Comm.Create_keyval()


class TrainingError(ValueError):
    """Training cannot start or go on: bad data, arguments that differ, a mesh that does not fit the job.

    Every rank raises the same sentence. `everywhere`: every rank of the world does, so that an uncaught one needs no
    abort and only one rank to tell.
    """

    everywhere = False


def agree(comm: MPI.Comm, problem: str | None) -> None:
    """Return if no rank of `comm` has a problem; otherwise raise the lowest such rank's sentence on all. Collective."""
    mine = comm.rank if problem is not None else comm.size
    first = np.array([mine], np.int64)
    comm.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
    if first[0] < comm.size:
        raise _error(comm, broadcast_bytes(comm, (problem or "").encode(), root=int(first[0])).decode())


def alike(
    comm: MPI.Comm, call: str, arguments: Mapping[str, object], problem: str | None = None,
    cure: str = "give all ranks the same",
) -> None:  # fmt: skip
    """Return if all ranks of `comm` make this call with the same arguments and none has a problem with them.

    Otherwise every rank raises one sentence: the first argument that differs with its values and their ranks, else the
    lowest rank's problem. Arguments are compared as texts. Collective, before anything that ranks must do alike.
    """
    mine = [("the call", call), *((name, str(value)) for name, value in arguments.items())]
    found = comm.Get_attr(_room())
    room = found if isinstance(found, Room) else Room(comm, _TAG)
    comm.Set_attr(_room(), room)
    payloads = room.exchange(msgspec.json.encode((mine, problem)), call, Assembling(Limits()))
    if problem is None and all(payload == payloads[0] for payload in payloads):
        return
    come = [msgspec.json.decode(payload, type=tuple[list[tuple[str, str]], str | None]) for payload in payloads]
    told = [dict(each) for each, _ in come]
    if difference := _difference(told):
        raise _error(comm, f"{told[0]['the call']}: {difference}; {cure}")
    raise _error(comm, next(each for _, each in come if each is not None))


def _difference(told: Sequence[Mapping[str, str]]) -> str | None:
    """The first argument that is not the same on all ranks, with its values."""
    for name in dict.fromkeys(name for each in told for name in each):
        ranks: dict[str, list[int]] = {}
        for rank, each in enumerate(told):
            ranks.setdefault(each.get(name, "not given"), []).append(rank)
        if len(ranks) > 1:
            return f"{name} is {' but '.join(f'{value} on {_named(some)}' for value, some in ranks.items())}"
    return None


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_NAMED]))}{more}"


def _error(comm: MPI.Comm, sentence: str) -> TrainingError:
    error = TrainingError(sentence)
    error.everywhere = comm.size == MPI.COMM_WORLD.size
    return error


def counted(count: int, thing: str) -> str:
    """How many there are, in words of a sentence: "1 row", "1,797 rows"."""
    return f"{count:,} {thing}{'s'[: count != 1]}"


def broadcast_bytes(comm: MPI.Comm, data: bytes, root: int = 0) -> bytes:
    """`data` of rank `root`, on every rank. Collective."""
    size = np.array([len(data)], np.int64)
    comm.Bcast(size, root)
    buffer = bytearray(data) if comm.rank == root else bytearray(int(size[0]))
    comm.Bcast([buffer, MPI.BYTE], root)
    return bytes(buffer)


def gather_bytes(comm: MPI.Comm, data: bytes) -> list[bytes]:
    """Every rank's `data`, in rank order, on every rank. Collective."""
    sizes = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([len(data)], np.int64), sizes)
    buffer = bytearray(int(sizes.sum()))
    comm.Allgatherv([data, MPI.BYTE], [buffer, sizes.tolist(), None, MPI.BYTE])
    stops = np.cumsum(sizes).tolist()
    return [bytes(buffer[stop - size : stop]) for stop, size in zip(stops, sizes.tolist())]


def of_network(specification: Specification) -> dict[str, object]:
    """The arguments of an MLP by name, as `alike` compares them."""
    return {
        "the network": "-".join(str(size) for size in specification.sizes), "activation": specification.activation,
        "loss": specification.loss, "dtype of the network": specification.dtype,
        "seed of the network": specification.seed,
    }  # fmt: skip


def of_optimizer(optimizer: Optimizer) -> dict[str, object]:
    """Its kind and options by name, as `alike` compares them."""
    options = {f"{field.name} of the optimizer": getattr(optimizer, field.name) for field in fields(optimizer)}
    return {"the optimizer": type(optimizer).__name__, **options}
