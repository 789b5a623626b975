"""Training through a store: `Trainer`, and what goes with it.

`trainer`: what users see. `fit`: its loop; `rejoin`: the loop after deaths. `batches`: arrays and iterables;
`evaluation`; `history`; `callbacks`: `Checkpoint`, `EarlyStop`, `LearningRate`, `Progress`; `checkpoint`: a Trainer's
files. A step: `exchange` (compute, accumulation), `gradients` (synchronous and asynchronous), `elastic`, `clipping`.
`model`: what a model has to offer.
"""

from mpips.training.callbacks import Callback, Checkpoint, EarlyStop, Fitting, LearningRate, Progress
from mpips.training.elastic import Elastic
from mpips.training.history import Epoch
from mpips.training.model import EvaluatedModel, Model
from mpips.training.trainer import Trainer

__all__ = [
    "Callback", "Checkpoint", "EarlyStop", "Elastic", "Epoch", "EvaluatedModel", "Fitting", "LearningRate", "Model",
    "Progress", "Trainer",
]  # fmt: skip
