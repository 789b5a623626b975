"""Data, tensor and hybrid parallel training of multi-layer perceptrons on a device mesh.

    mesh = mpips.mlp.Mesh(batch=2, model=2)
    data = mpips.mlp.load(lambda: mpips.mlp.open_source("digits"), mesh, batch=100, seed=1)
    model = mpips.mlp.MLP([64, 512, data.outputs], loss="softmax", seed=1)
    trained = mpips.mlp.train(model, data, mesh, epochs=10)

Source: "Batch, model and integrated parallelism for neural networks" ("the paper" in here), sections 5 to 7 and
Algorithms 1 to 3. Its batch parallelism is data parallelism, its model parallelism tensor parallelism, its process grid
the device mesh. Names are loaded when they are first used: `MLP` alone needs no MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpips.mlp.agreement import TrainingError
    from mpips.mlp.checkpoint import collect
    from mpips.mlp.checkpoint import load as load_checkpoint
    from mpips.mlp.checkpoint import save as save_checkpoint
    from mpips.mlp.data.arrays import ArraySource
    from mpips.mlp.data.part import load
    from mpips.mlp.data.sources import SyntheticSource, open_source
    from mpips.mlp.data.text import TextSource
    from mpips.mlp.mesh import Mesh
    from mpips.mlp.network.mlp import MLP
    from mpips.mlp.prediction.predict import choose_mesh, predict_all
    from mpips.mlp.servers.servers import Servers
    from mpips.mlp.training import train

_HOMES = {
    "ArraySource": ("data.arrays", "ArraySource"),
    "MLP": ("network.mlp", "MLP"),
    "Mesh": ("mesh", "Mesh"),
    "Servers": ("servers.servers", "Servers"),
    "SyntheticSource": ("data.sources", "SyntheticSource"),
    "TextSource": ("data.text", "TextSource"),
    "TrainingError": ("agreement", "TrainingError"),
    "choose_mesh": ("prediction.predict", "choose_mesh"),
    "collect": ("checkpoint", "collect"),
    "load": ("data.part", "load"),
    "load_checkpoint": ("checkpoint", "load"),
    "open_source": ("data.sources", "open_source"),
    "predict_all": ("prediction.predict", "predict_all"),
    "save_checkpoint": ("checkpoint", "save"),
    "train": ("training", "train"),
}

__all__ = [
    "ArraySource", "MLP", "Mesh", "Servers", "SyntheticSource", "TextSource", "TrainingError", "choose_mesh", "collect",
    "load", "load_checkpoint", "open_source", "predict_all", "save_checkpoint", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
