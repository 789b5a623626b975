"""A job that trains while ranks die: each worker says what it has at the end.

mpips run -w 3 --spares 1 -m tests.mpi.torch.survivors '{"kills": [[1, 4, "push"]], ...}'
"""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import msgspec
import torch
from mpi4py import MPI
from torch import nn

import mpips.torch
from tests.mpi.deaths import die, die_later, wait_for_earlier

BATCH = 5
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, 0.01),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, 0.01),  # has no counterpart on servers
}


class Plan(msgspec.Struct):
    """What a job does. Steps [first, last), from what `saved` holds, where that is given."""

    kind: str = "dist_sync"
    optimizer: str = "sgd"
    first: int = 0
    last: int = 11
    kills: list[tuple[int, int, float]] = []
    """Ranks of COMM_WORLD that die, in which step of their own, below 0: before it; or so many milliseconds after
    worker 0 has begun that step."""
    saves: int = 0
    """A checkpoint is written each so many steps, by `optimizer.save`."""
    saved: str = ""
    keep: str = ""
    """Where model and optimizer go at the end, for a job that goes on from them."""
    odd: list[int] = []
    """The places in the batches of three workers that the first step's workers take, where they are others."""


class Network(nn.Module):
    """One part is frozen, and one is used in odd steps only, by place 1."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.main, self.odd = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3)), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor, odd: bool) -> torch.Tensor:
        out = self.main(self.frozen(x))
        return out + self.odd(x) if odd else out


def batch(step: int, place: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One worker's, which depends on nothing else."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * place + workers)
    x = torch.randn(BATCH, 7, generator=generator, dtype=torch.float64)
    return x, torch.randn(BATCH, 3, generator=generator, dtype=torch.float64)


def main(plan: Plan, folder: str) -> None:
    model, me = Network().double(), MPI.COMM_WORLD.rank
    for rank, step, milliseconds in plan.kills:
        if rank == me and milliseconds >= 0:
            die_later(Path(folder, f"begun-{step}"), milliseconds / 1000)
    optimizer = mpips.torch.DistributedOptimizer(
        OPTIMIZERS[plan.optimizer](model.parameters()), model.named_parameters(), plan.kind
    )
    store = optimizer.store
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if plan.saved:
        saved = torch.load(plan.saved)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        optimizer.set_parameters()
        scheduler.load_state_dict(saved["scheduler"])
    for _ in range(optimizer.resumed):
        scheduler.step()
    losses: list[Any] = []
    for step in range(plan.first + optimizer.resumed, plan.last):
        wait_for_earlier(plan.kills, step, plan.last - 1)
        if store.rank == 0:
            Path(folder, f"begun-{step}").touch()
        if (me, step, -1) in plan.kills:
            die()
        place, workers = store.rank, store.num_workers
        if plan.odd and step == plan.first:
            place, workers = plan.odd[store.rank], 3
        x, y = batch(step, place, workers)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x, place == 1 and step % 2 == 1), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append((step, store.rank, loss.item().hex()))
        if plan.saves and (step + 1) % plan.saves == 0:
            optimizer.save(Path(folder, f"step-{step + 1}"))
    if plan.keep:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        if store.rank == 0:
            torch.save(state, plan.keep)
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    said = {
        "rank": store.rank,
        "process": me,
        "workers": store.num_workers,
        "crc": zlib.crc32(data),
        "resumed": optimizer.resumed,
        "losses": losses,
        "generation": store.generation,
    }
    Path(folder, f"worker-{store.rank}.json").write_text(json.dumps(said))
    optimizer.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan), sys.argv[2])
