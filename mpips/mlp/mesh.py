"""The device mesh, batch x model: rank r is at (r // model, r % model); its communicators, and which span nodes.

Source: the paper, section 7, which calls it a process grid.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from collectives.communicator import communicator

from mpips.mlp.agreement import TrainingError, alike


def factorings(ranks: int) -> list[tuple[int, int]]:
    """All meshes (batch, model) of that many ranks, from pure batch to pure model parallel."""
    return [(ranks // model, model) for model in range(1, ranks + 1) if ranks % model == 0]


def parse(text: str) -> tuple[int, int]:
    """(batch, model) of a text like "4x2"."""
    match = re.fullmatch(r"(\d+)x(\d+)", text.strip())
    if not match or "0" in match.groups():
        raise ValueError(f"grid {text!r} must be BATCHxMODEL, for instance 4x2, or auto")
    return int(match[1]), int(match[2])


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
        alike(self.comm, "Mesh", {"the grid": self}, misfit(self.batch, self.model, self.comm.size))
        self.batch_index, self.model_index = divmod(self.comm.rank, self.model)
        self.model_comm = self.comm.Split(color=self.batch_index, key=self.model_index)
        self.batch_comm = self.comm.Split(color=self.model_index, key=self.batch_index)

    def free(self) -> None:
        """Free both communicators. Collective."""
        self.model_comm.Free()
        self.batch_comm.Free()

    def __str__(self) -> str:
        return f"{self.batch}x{self.model}"


def misfit(batch: int, model: int, ranks: int) -> str | None:
    """Why a mesh does not fit that many ranks; None where it does."""
    if batch * model == ranks and batch > 0:
        return None
    fitting = ", ".join(f"{b}x{m}" for b, m in factorings(ranks))
    needs = f"a grid of {batch}x{model} needs {batch * model} ranks, the job has {ranks}"
    return f"{needs}; give another --ranks or choose one of {fitting}"


def nodes(comm: MPI.Comm) -> int:
    """On how many nodes the ranks are. Collective at first use of the communicator."""
    return communicator(comm).nodes if comm.size > 1 else 1


class Spans(NamedTuple):
    """Whether the ranks of any batch and of any model communicator of a mesh are on several nodes: then messages travel
    beside computation, and may be float16."""

    batch: bool
    model: bool


def spans_nodes(mesh: Mesh) -> Spans:
    """The same on every rank, though nodes may hold ranks that the mesh does not divide evenly. Collective."""
    most = np.array([nodes(mesh.batch_comm), nodes(mesh.model_comm)])
    mesh.comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    return Spans(*(most > 1).tolist())
