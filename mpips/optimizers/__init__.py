"""Optimizers as data: named, checked, encoded without pickle, applied in place to any interval of a 1-D array."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import msgspec

from mpips.optimizers.adam import Adam, AdamW, Moments
from mpips.optimizers.adaptive import AdaGrad, RMSProp, Squares
from mpips.optimizers.base import Optimizer, State
from mpips.optimizers.elastic import Elastic1, Elastic2
from mpips.optimizers.sgd import SGD, Add, Momentum
from mpips.optimizers.updater import Updater

OPTIMIZERS: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind for kind in (SGD, AdaGrad, RMSProp, Adam, AdamW, Elastic1, Elastic2, Add)
}
"""Every optimizer by its lower-case name."""


def create(optimizer: str | Optimizer, **options: Any) -> Optimizer:
    """The optimizer of that name (any case) with these options; an Optimizer is given back as it is.

    Raises ValueError for an unknown name, TypeError for an unknown option; both list the known ones.
    """
    if isinstance(optimizer, Optimizer):
        if options:
            raise TypeError(f"options {sorted(options)} go with an optimizer's name, not with {optimizer!r}")
        return optimizer
    kind = OPTIMIZERS.get(optimizer.lower()) if isinstance(optimizer, str) else None
    if kind is None:
        raise ValueError(f"unknown optimizer {optimizer!r}: the known ones are {', '.join(OPTIMIZERS)}")
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"{kind.__name__} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    return kind(**options)


def encode(optimizer: Optimizer) -> bytes:
    """The optimizer as msgpack: a map of its name and its options. `decode` gives an equal one back."""
    return msgspec.msgpack.encode({"name": type(optimizer).__name__.lower(), "options": asdict(optimizer)})


def decode(data: bytes) -> Optimizer:
    """The optimizer that `encode` wrote; raises ValueError or TypeError on anything else."""
    record = msgspec.msgpack.decode(data, type=_Record)
    return create(record.name, **record.options)


class _Record(msgspec.Struct):
    name: str
    options: dict[str, float | bool]


__all__ = [
    "OPTIMIZERS", "SGD", "AdaGrad", "Adam", "AdamW", "Add", "Elastic1", "Elastic2", "Moments", "Momentum", "Optimizer",
    "RMSProp", "Squares", "State", "Updater", "create", "decode", "encode",
]  # fmt: skip
