"""The device mesh of batch x model ranks: which rank holds which part of the layers, and the communicators along it.

Source: the paper, section 7, which calls the mesh a process grid. The functions at the end of the module (`agree`,
`attempt`, `alike`) raise an error of one rank on all ranks.
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
    """Training cannot start or continue: bad data, arguments that differ, a mesh that does not fit the job.

    All ranks of the communicator raise it with the same message.
    """

    __module__ = "mpips.mlp"

    # True if every rank of COMM_WORLD raises this error. If nobody catches it, no rank needs to abort the job, and only
    # one rank prints the error.
    everywhere = False


class Mesh:
    """A device mesh of batch x model ranks. Rank r has batch index r // model and model index r % model.

    The ranks with the same batch index hold the slices of one network and see the same samples. They form
    `model_comm`, in which a rank's number is its model index. The ranks with the same model index hold the same slice
    and see different samples. They form `batch_comm`, in which a rank's number is its batch index. Neighbouring ranks
    share a model, because model ranks exchange more often than batch ranks.

    Making a mesh is collective over `comm`. From then on an uncaught exception in this process ends the whole job.

    Args:
        batch: Ranks among which each minibatch is divided.
        model: Ranks among which the network is divided.
        comm: The ranks of the mesh. Default: COMM_WORLD.

    Raises:
        TrainingError: On every rank, if ranks ask for different meshes or batch x model is not the number of ranks.

    >>> mesh = mpips.mlp.Mesh(batch=MPI.COMM_WORLD.size, model=1)  # data parallel
    >>> mesh.model_comm.size
    1
    """

    def __init__(self, batch: int = 1, model: int = 1, comm: MPI.Comm | None = None) -> None:
        self.comm = MPI.COMM_WORLD if comm is None else comm
        if isinstance(batch, str):
            raise TrainingError(
                f"Mesh({batch!r}): a mesh is Mesh(batch=2, model=1); to have one chosen for a network call "
                f"choose_mesh(model, batch), or train(model, open_source, mesh='auto', batch=...)"
            )
        self.batch = int(batch)
        self.model = int(model)
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
    """Return all (batch, model) with batch x model = `ranks`, from pure batch to pure model parallel."""
    return [(ranks // model, model) for model in range(1, ranks + 1) if ranks % model == 0]


def parse(text: str) -> tuple[int, int]:
    """Parse a text like "4x2" into (batch, model). Raise ValueError if it is not of this form."""
    match = re.fullmatch(r"(\d+)x(\d+)", text.strip())
    if not match or "0" in match.groups():
        raise ValueError(f"grid {text!r} must be BATCHxMODEL, for instance 4x2, or auto")
    return int(match[1]), int(match[2])


def misfit(batch: int, model: int, ranks: int) -> str | None:
    """Return an error message if a mesh of `batch` x `model` does not have `ranks` ranks, else None."""
    if batch * model == ranks and batch > 0:
        return None
    fitting = ", ".join(f"{b}x{m}" for b, m in factorings(ranks))
    needs = f"a grid of {batch}x{model} needs {batch * model} ranks, the job has {ranks}"
    return f"{needs}; give another --ranks or choose one of {fitting}"


class Spans(NamedTuple):
    """Which communicators of a mesh span several nodes.

    Messages of a communicator that spans several nodes travel during computation. In a "mixed" network they are
    float16.
    """

    # True if any batch communicator of the mesh has ranks on several nodes
    batch: bool
    # True if any model communicator of the mesh has ranks on several nodes
    model: bool


def spans_nodes(mesh: Mesh) -> Spans:
    """Return which communicators of the mesh span several nodes. Collective.

    A rank's own two communicators may be on one node while another rank's communicators span several. So the ranks
    agree on one answer, which is the same on every rank.
    """
    most = np.array([nodes(mesh.batch_comm), nodes(mesh.model_comm)])
    mesh.comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    return Spans(*(most > 1).tolist())


def nodes(comm: MPI.Comm) -> int:
    """Return the number of nodes that the ranks of `comm` are on. The first call for a communicator is collective."""
    return communicator(comm).nodes if comm.size > 1 else 1


# -- agreement


def agree(comm: MPI.Comm, problem: str | None) -> None:
    """Raise TrainingError on all ranks of `comm` if any rank has a problem. Collective.

    `problem` is this rank's error message, or None. All ranks raise the message of the lowest rank with a problem.
    """
    problems = [each for each in comm.allgather(problem) if each is not None]
    if problems:
        raise _error(comm, problems[0])


def attempt(comm: MPI.Comm, call: Callable[[], T]) -> T:
    """Run `call` on every rank and return its result. Collective.

    If `call` raises TrainingError on any rank, all ranks raise TrainingError with the message of the lowest such rank.
    """
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
    """Raise the same TrainingError on all ranks unless they make this call with equal arguments. Collective.

    It is called before an operation that all ranks must run in the same way.

    Args:
        call: Name of the call, for the message.
        arguments: Name -> value. Values are compared as texts.
        problem: This rank's error message if its arguments are wrong, else None. If any rank has a message, all ranks
            raise it.
        noun: What the message calls an argument.
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
    """Return a dict by name of the settings of a network, its optimizer and its split mode, for `alike`."""
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
    """Format a count with its noun: "1 row", "1,797 rows"."""
    return f"{count:,} {thing}{'s'[: count != 1]}"


def _error(comm: MPI.Comm, sentence: str) -> TrainingError:
    error = TrainingError(sentence)
    error.everywhere = comm.size == MPI.COMM_WORLD.size
    return error
