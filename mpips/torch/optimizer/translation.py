"""PyTorch's optimizers as the store's: which record of `mpips.optimizers` computes the same, with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mpips.optimizers import SGD, AdaGrad, Adam, AdamW, Optimizer, RMSProp

Group = Mapping[str, Any]
"""A group of parameters of a PyTorch optimizer: its options by name."""


def record(optimizer: torch.optim.Optimizer, group: Group, rescale: float) -> Optimizer | None:
    """What updates this group on a server as `optimizer` does here, for gradients that arrive as a sum; None where
    there is no such record."""
    make = _RECORDS.get(type(optimizer))
    if make is None or group.get("maximize") or isinstance(group["lr"], torch.Tensor):
        return None
    return make(group, rescale)


def rate(group: Group) -> float:
    """The group's present learning rate."""
    return float(group["lr"])


def _sgd(group: Group, rescale: float) -> Optimizer | None:
    if group["dampening"]:
        return None
    return SGD(rate(group), group["weight_decay"], rescale, group["momentum"], group["nesterov"])


def _adam(kind: Callable[..., Optimizer]) -> Callable[[Group, float], Optimizer | None]:
    def make(group: Group, rescale: float) -> Optimizer | None:
        if group["amsgrad"]:
            return None
        decoupled = AdamW if group.get("decoupled_weight_decay") else kind
        beta1, beta2 = group["betas"]
        return decoupled(rate(group), group["weight_decay"], rescale, beta1, beta2, group["eps"])

    return make


def _rmsprop(group: Group, rescale: float) -> Optimizer | None:
    if group["centered"] or group["momentum"]:
        return None
    return RMSProp(rate(group), group["weight_decay"], rescale, group["alpha"], group["eps"])


def _adagrad(group: Group, rescale: float) -> Optimizer | None:
    if group["lr_decay"] or group["initial_accumulator_value"]:
        return None
    return AdaGrad(rate(group), group["weight_decay"], rescale, group["eps"])


_RECORDS: dict[type, Callable[[Group, float], Optimizer | None]] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adam: _adam(Adam),
    torch.optim.AdamW: _adam(AdamW),
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adagrad: _adagrad,
}
