"""What all ways to exchange gradients share: what is pushed, its share of an update, and collectives of the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from mpips.store.roles import Layout
from mpips.store.runtime.generation import Generation


class Step(NamedTuple):
    """What the workers of a step have agreed on."""

    used: Sequence[bool]
    """Which parameters have a gradient on any of them; none where the step is skipped."""
    sparse: Sequence[bool]
    """Which have a sparse one."""
    skipped: bool
    """Whether a gradient has overflowed on any of them (GradScaler): no parameter changes."""
    changed: bool
    """Whether the program has changed parameters since the last step, on all of them."""


def gradient(parameter: Tensor, used: bool) -> Tensor:
    """This rank's gradient, contiguous and dense; zeros where it has none, or nobody is to use it."""
    found = parameter.grad
    if found is None or not used:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return (found.detach().to_dense() if found.is_sparse else found.detach()).contiguous()


def share(layout: Layout, passes: int) -> float:
    """What a sum of gradients, each of so many backward passes, is multiplied by to be the mean of one update."""
    workers, clients = layout.num_workers, len(layout.clients)
    return 1.0 / ((workers / clients if layout.asynchronous else workers) * passes)


@contextmanager
def among(
    layout: Layout, generation: Generation, what: str, comm: MPI.Intracomm | None = None
) -> Iterator[MPI.Intracomm]:
    """The communicator of the workers, or a smaller one, for collectives within: where one fails, the generation ends.
    Collective at first."""
    ranks = comm or layout.workers
    assert ranks is not None
    with generation.failing(what):
        generation.within(ranks)
        yield ranks
