"""Data, tensor and hybrid parallel training of multi-layer perceptrons on a device mesh.

    mesh = mpips.mlp.Mesh(batch=2, model=2)
    data = mpips.mlp.load(lambda: mpips.mlp.open_source("digits"), mesh, batch=100, seed=1)
    model = mpips.mlp.MLP([64, 512, data.outputs], loss="softmax", seed=1)
    trained = mpips.mlp.train(model, data, mesh, epochs=10)

Source: "Batch, model and integrated parallelism for neural networks", sections 5 to 7 and Algorithms 1 to 3. This
package calls it "the paper". The paper's batch parallelism is data parallelism, its model parallelism is tensor
parallelism, and its process grid is the device mesh.

A name is imported when it is first used, so a program that only uses `MLP` needs no MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpips.mlp.checkpoint import collect, load_checkpoint, save_checkpoint
    from mpips.mlp.data.loading import load
    from mpips.mlp.data.sources import ArraySource, SyntheticSource, open_source
    from mpips.mlp.data.text import TextSource
    from mpips.mlp.mesh import Mesh, TrainingError
    from mpips.mlp.perceptron import MLP
    from mpips.mlp.prediction import choose_mesh, predict_all
    from mpips.mlp.servers import Servers
    from mpips.mlp.training import train

# public name -> the module of this package that defines it
_HOMES = {
    "ArraySource": "data.sources",
    "MLP": "perceptron",
    "Mesh": "mesh",
    "Servers": "servers",
    "SyntheticSource": "data.sources",
    "TextSource": "data.text",
    "TrainingError": "mesh",
    "choose_mesh": "prediction",
    "collect": "checkpoint",
    "load": "data.loading",
    "load_checkpoint": "checkpoint",
    "open_source": "data.sources",
    "predict_all": "prediction",
    "save_checkpoint": "checkpoint",
    "train": "training",
}

__all__ = [
    "ArraySource",
    "MLP",
    "Mesh",
    "Servers",
    "SyntheticSource",
    "TextSource",
    "TrainingError",
    "choose_mesh",
    "collect",
    "load",
    "load_checkpoint",
    "open_source",
    "predict_all",
    "save_checkpoint",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
