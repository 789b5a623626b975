"""Batch, model and hybrid parallel training of multi-layer perceptrons on a process grid.

Source: "Batch, model and integrated parallelism for neural networks", sections 5 to 7 and Algorithms 1 to 3.
`MLP` alone needs no MPI; the other names load it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .mlp import MLP

if TYPE_CHECKING:
    from .agreement import TrainingError
    from .checkpoint import collect
    from .checkpoint import load as load_checkpoint
    from .checkpoint import save as save_checkpoint
    from .data import load
    from .grid import Grid
    from .predict import choose_grid, predict_all
    from .served import Servers
    from .sources import open_source
    from .training import train

_WHERE = {
    "TrainingError": ("agreement", "TrainingError"),
    "collect": ("checkpoint", "collect"),
    "load_checkpoint": ("checkpoint", "load"),
    "save_checkpoint": ("checkpoint", "save"),
    "load": ("data", "load"),
    "Grid": ("grid", "Grid"),
    "choose_grid": ("predict", "choose_grid"),
    "Servers": ("served", "Servers"),
    "open_source": ("sources", "open_source"),
    "predict_all": ("predict", "predict_all"),
    "train": ("training", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _WHERE[name]
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value


__all__ = [
    "MLP", "Grid", "Servers", "TrainingError", "choose_grid", "collect", "load", "load_checkpoint", "open_source",
    "predict_all", "save_checkpoint", "train",
]  # fmt: skip
