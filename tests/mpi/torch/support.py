"""What the tests of PyTorch share: models, batches, a group, and training steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

import mpips.torch  # noqa: F401  (makes the backend known)

WORLD = MPI.COMM_WORLD
BATCH = 4


@contextmanager
def groups() -> Iterator[None]:
    """c10d with "mpips" as its default group."""
    dist.init_process_group("mpips")
    try:
        yield
    finally:
        dist.destroy_process_group()


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """The same on every rank and at every call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def joined_batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """All ranks' batches of one step, in the order of ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    size = BATCH * WORLD.size
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(size, 3, generator=generator, dtype=torch.float64).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64, rank: int = WORLD.rank) -> tuple[Tensor, Tensor]:
    """One rank's."""
    x, y = joined_batch(step, dtype)
    mine = slice(BATCH * rank, BATCH * (rank + 1))
    return x[mine], y[mine]


def train(
    model: nn.Module, optimizer: Any, steps: int, batches: Callable[[int], tuple[Tensor, Tensor]],
    after: Callable[[], Any] = lambda: None,
) -> list[float]:  # fmt: skip
    """The losses of some steps."""
    losses = []
    for step in range(steps):
        x, y = batches(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        after()
        losses.append(loss.item())
    return losses


def far(model: nn.Module, other: nn.Module) -> float:
    """The largest difference of parameters, relative to the largest value."""
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


def worst(value: float) -> float:
    """The largest of all ranks'."""
    return WORLD.allreduce(value, MPI.MAX)
