"""What all ways to exchange gradients share: what is pushed, its share of an update, and collectives of the workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from mpi4py import MPI
from torch import Tensor

from mpips.layout import Layout
from mpips.runtime.epoch import Epoch


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """This rank's gradients, contiguous; zeros where it has none."""
    return [_gradient(parameter) for parameter in parameters]


def share(layout: Layout, passes: int) -> float:
    """What a sum of gradients, each of so many backward passes, is multiplied by to be the mean of one update."""
    workers, clients = layout.num_workers, len(layout.clients)
    return 1.0 / ((workers / clients if layout.asynchronous else workers) * passes)


@contextmanager
def among(layout: Layout, epoch: Epoch, what: str) -> Iterator[MPI.Intracomm]:
    """The workers' communicator, for collectives within: where one fails, the epoch ends. Collective at first."""
    workers = layout.workers
    assert workers is not None
    with epoch.failing(what):
        epoch.within(workers)
        yield workers


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad.detach().contiguous()
