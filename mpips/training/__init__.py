"""Train a model through a store: `Trainer`, its loop, and the ways to turn gradients into parameters.

`trainer` has the API for users. `loop` runs epochs and steps, and `rejoin` continues the loop after the death of a
process. `step` computes and accumulates gradients. `updates` turns gradients into parameters: by the store's optimizer,
by an optimizer on every worker, or by elastic averaging. `local` lets workers train independently and exchange rarely:
local SGD, DiLoCo, elastic averaging.
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
