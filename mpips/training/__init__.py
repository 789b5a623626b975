"""Train a model through a store: `Trainer`, its loop, and what becomes of a step's gradients.

`trainer`: what users see. `loop`: epochs and steps. `rejoin`: the loop after deaths. `step`: compute, accumulate, clip.
`updates`: gradients become parameters, by the store's optimizer, by every worker, or by elastic averaging.
`local`: workers train apart and exchange rarely: local SGD, DiLoCo, elastic averaging.
"""

from mpips.training.callbacks import Callback, Checkpoint, EarlyStop, Fitting, LearningRate, Progress
from mpips.training.checkpoint import Epoch
from mpips.training.local import Elastic, Local
from mpips.training.model import EvaluatedModel, Model
from mpips.training.trainer import Trainer

__all__ = [
    "Callback",
    "Checkpoint",
    "EarlyStop",
    "Elastic",
    "Epoch",
    "EvaluatedModel",
    "Fitting",
    "LearningRate",
    "Local",
    "Model",
    "Progress",
    "Trainer",
]
