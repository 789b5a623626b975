"""What the tests of PyTorch share: models, batches, groups, stores, and training steps.

Where a test fails on one rank it fails on all (`tests/mpi/conftest.py`): ranks assert what they see themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn

import mpips.torch

WORLD = MPI.COMM_WORLD
ODD = WORLD.size - 1
"""The rank that does something else than the others."""
BATCH = 4
EARLY = 0.00001
"""MiB of a bucket: every gradient travels alone, as soon as it is there."""
several = pytest.mark.skipif(WORLD.size == 1, reason="one rank has nobody to differ from")


@contextlib.contextmanager
def groups() -> Iterator[None]:
    """c10d with "mpips" as its default group."""
    dist.init_process_group("mpips")
    try:
        yield
    finally:
        dist.destroy_process_group()


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a network that is the same on every rank and at every call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def joined_batch(step: int, dtype: torch.dtype = torch.float64, ranks: int = WORLD.size) -> tuple[Tensor, Tensor]:
    """Return all ranks' batches of one step, in the order of ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    size = BATCH * WORLD.size
    x = torch.randn(size, 5, generator=generator, dtype=torch.float64)[: BATCH * ranks]
    y = torch.randn(size, 3, generator=generator, dtype=torch.float64)[: BATCH * ranks]
    return x.to(dtype), y.to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64, rank: int = WORLD.rank) -> tuple[Tensor, Tensor]:
    """Return one rank's batch."""
    x, y = joined_batch(step, dtype)
    mine = slice(BATCH * rank, BATCH * (rank + 1))
    return x[mine], y[mine]


def train(
    model: nn.Module,
    optimizer: Any,
    steps: int,
    batches: Callable[[int], tuple[Tensor, Tensor]],
    after: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Train by the usual loop, and return the losses."""
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
    """Return the largest difference of parameters, relative to the largest value."""
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-12)) for a, b in pairs)


def alike(mine: Any) -> bool:
    """Return whether all ranks bring the same. Collective."""
    every = WORLD.allgather(mine)
    return all(each == every[0] for each in every)


def sums(model: nn.Module) -> list[float]:
    """Return the sum of each parameter, to compare ranks by."""
    return [float(p.detach().double().sum()) for p in model.parameters()]


def heard(call: Callable[[], Any]) -> str:
    """Return the error that a call raises, as text; "" where it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Words(nn.Module):
    """The loss of rows of a sparse table. `tied`: the last layer is the table, too, whose gradient is dense then."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.last = nn.Embedding(10, 3, sparse=True).double(), nn.Linear(3, 10).double()
        if tied:
            self.last.weight = self.table.weight

    def forward(self, taken: Tensor) -> Tensor:
        return self.last(self.table(taken) if len(taken) else torch.ones(1, 3).double()).pow(2).mean()


def rows(step: int, rank: int = WORLD.rank) -> Tensor:
    """Return the rows that one rank's batch takes."""
    return torch.randint(10, (3,), generator=torch.Generator().manual_seed(10 * step + rank))


# ---- stores

SERVERLESS: dict[str, Any] = {"kind": "dist_sync"}
SERVED: dict[str, Any] = {"kind": "dist_sync", "servers": 1}
PAIRS = pytest.mark.parametrize("options", [SERVERLESS, SERVED], ids=str)
"""Stores for tests that need two workers: the second has them on three ranks."""


@contextlib.contextmanager
def on_workers(options: dict[str, Any], least: int = 1) -> Iterator[None]:
    """Servers leave the block by themselves. `least`: workers that the test takes."""
    if WORLD.size - options.get("servers", 0) < least:
        pytest.skip(f"it takes {least} worker{'s' * (least > 1)}, beside servers")
    with contextlib.suppress(SystemExit):
        yield


def wrapped(model: nn.Module, optimizer: torch.optim.Optimizer, options: dict[str, Any]) -> Any:
    """Return a worker's DistributedOptimizer."""
    return mpips.torch.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def mine(optimizer: Any) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return the batches of one worker, by step."""
    return lambda step: batch(step, rank=optimizer.store.rank)
