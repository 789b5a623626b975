"""A job of LocalSGD in which ranks die: each worker says what it has at the end.

mpips run -w 3 --spares 1 -m tests.mpi.torch.apart '{"kills": [[1, 6, -1]], ...}' FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from mpi4py import MPI
from torch import nn

import mpips.torch
from tests.mpi.deaths import die, die_later, wait_for_earlier
from tests.mpi.torch.support import network

ADAMW = {"lr": 0.01, "weight_decay": 0.1}


class Plan(msgspec.Struct):
    """What a job does."""

    kind: str = "dist_sync"
    local: dict[str, Any] = {}
    """Of LocalSGD."""
    steps: int = 16
    kills: list[tuple[int, int, float]] = []
    """Ranks of COMM_WORLD that die, in which inner step of their own, below 0: before its exchange; or so many
    milliseconds after worker 0 has begun that step."""


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Return the loss on a worker's own batch, which depends on nothing else."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return nn.functional.mse_loss(model(x), x[:, :3].tanh())


def main(plan: Plan, folder: Path) -> None:
    model, me = network(), MPI.COMM_WORLD.rank
    for rank, step, milliseconds in plan.kills:
        if rank == me and milliseconds >= 0:
            die_later(folder / f"begun-{step}", milliseconds / 1000)
    inner = torch.optim.AdamW(model.parameters(), **ADAMW)
    trainer = mpips.torch.LocalSGD(model, inner, kind=plan.kind, **plan.local)
    began = trainer.steps
    while trainer.steps < plan.steps:
        step = trainer.steps + 1
        wait_for_earlier(plan.kills, step, plan.steps)
        if trainer.store.rank == 0:
            (folder / f"begun-{step}").touch()
        if (me, step, -1) in plan.kills:
            die()
        trainer.zero_grad()
        loss_of(model, step, trainer.store.rank).backward()
        trainer.step(**({"tokens": 10} if plan.local.get("by_tokens") else {}))
    trainer.share()
    values = [parameter.detach().numpy().tobytes().hex() for parameter in model.parameters()]
    said = {
        "rank": trainer.store.rank,
        "process": me,
        "workers": trainer.store.num_workers,
        "began": began,
        "values": values,
        "generation": trainer.store.generation,
    }
    (folder / f"worker-{trainer.store.rank}.json").write_text(json.dumps(said))
    trainer.close()


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan), Path(sys.argv[2]))
