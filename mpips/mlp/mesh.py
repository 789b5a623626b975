"""The device mesh, batch x model: which rank computes which part, by its two indices, and their communicators.

Source: the paper, section 7, which calls it a process grid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import NamedTuple, TypeVar, cast

import numpy as np
from mpi4py import MPI

from mpips.collectives.communicator import communicator
from mpips.mlp.network import Specification
from mpips.optimizers.base import Optimizer
from mpips.store.runtime import rendezvous

T = TypeVar("T")


class TrainingError(ValueError):
    """Training cannot start or go on: bad data, arguments that differ, a mesh that does not fit the job.

    Every rank raises the same sentence. `everywhere`: every rank of the world does, so that an uncaught one needs no
    abort and only one rank to tell.
    """

    everywhere = False


class Mesh:
    """Rank r is at (batch index r // model, model index r % model).

    The `model` ranks of one batch index hold slices of one network and see the same samples (`model_comm`, rank = model
    index); the `batch` ranks of one model index hold the same slice and see different samples (`batch_comm`, rank
    = batch index). Neighbouring ranks share a model: that traffic is the more frequent. Making a mesh is
    collective over `comm`; TrainingError on every rank if they ask for different meshes, or if batch x model is not
    the number of ranks. From then on an uncaught exception of this process ends the whole job.
    """

    def __init__(self, batch: int = 1, model: int = 1, comm: MPI.Comm | None = None) -> None:
        self.comm = MPI.COMM_WORLD if comm is None else comm
        if isinstance(batch, str):
            raise TrainingError(
                f"Mesh({batch!r}): a mesh is Mesh(batch=2, model=1); to have one chosen for a network call "
                f"choose_mesh(model, batch), or train(model, open_source, mesh='auto', batch=...)"
            )
        self.batch, self.model = int(batch), int(model)
        alike(self.comm, "Mesh", {"grid": self}, misfit(self.batch, self.model, self.comm.size))
        self.batch_index, self.model_index = divmod(self.comm.rank, self.model)
        self.model_comm = self.comm.Split(color=self.batch_index, key=self.model_index)
        self.batch_comm = self.comm.Split(color=self.model_index, key=self.batch_index)

    def free(self) -> None:
        """Free both communicators. Collective."""
        self.model_comm.Free()
        self.batch_comm.Free()

    def __str__(self) -> str:
        return f"{self.batch}x{self.model}"


def factorings(ranks: int) -> list[tuple[int, int]]:
    """Return all meshes (batch, model) of that many ranks, from pure batch to pure model parallel."""
    return [(ranks // model, model) for model in range(1, ranks + 1) if ranks % model == 0]


def parse(text: str) -> tuple[int, int]:
    """Return (batch, model) of a text like "4x2"."""
    match = re.fullmatch(r"(\d+)x(\d+)", text.strip())
    if not match or "0" in match.groups():
        raise ValueError(f"grid {text!r} must be BATCHxMODEL, for instance 4x2, or auto")
    return int(match[1]), int(match[2])


def misfit(batch: int, model: int, ranks: int) -> str | None:
    """Say why a mesh does not fit that many ranks; None where it does."""
    if batch * model == ranks and batch > 0:
        return None
    fitting = ", ".join(f"{b}x{m}" for b, m in factorings(ranks))
    needs = f"a grid of {batch}x{model} needs {batch * model} ranks, the job has {ranks}"
    return f"{needs}; give another --ranks or choose one of {fitting}"


class Spans(NamedTuple):
    """Tells whether the ranks of any batch and of any model communicator of a mesh are on several nodes.

    Then messages travel beside computation, and may be float16.
    """

    batch: bool
    model: bool


def spans_nodes(mesh: Mesh) -> Spans:
    """Return the same on every rank, though nodes may hold ranks that the mesh does not divide evenly. Collective."""
    most = np.array([nodes(mesh.batch_comm), nodes(mesh.model_comm)])
    mesh.comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    return Spans(*(most > 1).tolist())


def nodes(comm: MPI.Comm) -> int:
    """Count the nodes that the ranks are on. Collective at first use of the communicator."""
    return communicator(comm).nodes if comm.size > 1 else 1


# -- agreement


def agree(comm: MPI.Comm, problem: str | None) -> None:
    """Return if no rank of `comm` has a problem; otherwise raise the lowest such rank's sentence on all. Collective."""
    problems = [each for each in comm.allgather(problem) if each is not None]
    if problems:
        raise _error(comm, problems[0])


def attempt(comm: MPI.Comm, call: Callable[[], T]) -> T:
    """Return what `call` returns if no rank's raises TrainingError; otherwise all raise one sentence. Collective."""
    found, problem = None, None
    try:
        found = call()
    except TrainingError as error:
        problem = str(error)
    agree(comm, problem)
    return cast(T, found)


def alike(
    comm: MPI.Comm, call: str, arguments: Mapping[str, object], problem: str | None = None, noun: str = "argument"
) -> None:
    """Return if all ranks of `comm` make this call with the same arguments and none has a problem with them.

    Otherwise every rank raises one sentence. Arguments are compared as texts. Collective, before anything that ranks
    must do alike.
    """
    if comm.size == 1:
        agree(comm, problem)
        return
    refusal = None if problem is None else TrainingError(problem)
    items = [(name, str(value)) for name, value in arguments.items()]
    try:
        rendezvous.agree(rendezvous.Gathering(comm), call, items, refusal, noun)
    except ValueError as error:
        raise _error(comm, str(error)) from None


def arguments_of(specification: Specification, optimizer: Optimizer | None, mode: str | None) -> dict[str, object]:
    """Return the arguments of an MLP, an optimizer and how layers are cut by name, as `alike` compares them."""
    found: dict[str, object] = {
        "network": "-".join(map(str, specification.sizes)),
        "activation": specification.activation,
        "loss": specification.loss,
        "dtype of the network": specification.dtype,
        "seed of the network": specification.seed,
        "mode": mode,
    }
    if optimizer is not None:
        found["optimizer"] = type(optimizer).__name__
        found |= {f"{field.name} of the optimizer": getattr(optimizer, field.name) for field in fields(optimizer)}
    return found


def counted(count: int, thing: str) -> str:
    """Return a number of things in words of a sentence: "1 row", "1,797 rows"."""
    return f"{count:,} {thing}{'s'[: count != 1]}"


def _error(comm: MPI.Comm, sentence: str) -> TrainingError:
    error = TrainingError(sentence)
    error.everywhere = comm.size == MPI.COMM_WORLD.size
    return error
