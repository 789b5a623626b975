"""Training by LocalSGD, as its tests share it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import mpips.torch
from tests.mpi.torch.support import batch, network

ADAMW = {"lr": 0.01, "weight_decay": 0.1}
STEPS = 12


def loss_of(model: nn.Module, data: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


def local(options: dict[str, Any], steps: int = STEPS, inner: Any = None, **more: Any) -> tuple[Any, nn.Module] | None:
    """Train on this rank; None where it serves."""
    model = network()
    made = inner(model.parameters()) if inner else torch.optim.AdamW(model.parameters(), **ADAMW)
    try:
        trainer = mpips.torch.LocalSGD(model, made, **more, **options)
    except SystemExit:
        return None
    for step in range(1, steps + 1):
        trainer.zero_grad()
        loss_of(model, batch(step, rank=trainer.store.rank)).backward()
        trainer.step()
    return trainer, model
