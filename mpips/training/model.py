"""Define the models that a Trainer takes (`Model`), and refuse one that lacks something with a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

Samples: TypeAlias = Any
"""Inputs or targets of samples, (samples, ...): an array of any library, or what a loader makes of them."""
REQUIRED = ("parameters", "gradients", "loss_and_gradients")


class Model(Protocol):
    """Offer what every Trainer needs: arrays that stay where they are, and a function that fills the gradients.

    A model may also have `names`, a list of texts, one a parameter: they become the keys in the store. `overlap=` needs
    a model in layers (`mpips.overlap.LayeredModel`); other features need methods of `EvaluatedModel`.
    """

    @property
    def parameters(self) -> Sequence[np.ndarray]:
        """C-contiguous arrays of floats, which the Trainer writes in place."""
        ...

    @property
    def gradients(self) -> Sequence[np.ndarray]:
        """An array for each parameter, of its shape and dtype; in `mpips.empty` they travel without being copied."""
        ...

    def loss_and_gradients(self, x: Samples, y: Samples) -> float:
        """Mean loss of a batch; `gradients` become the gradients of that mean.

        x is (samples, ...) and y (samples, ...), as `fit` and `step` were given them, or what a loader makes of them.
        """
        ...


class EvaluatedModel(Model, Protocol):
    """Offer more methods, each for one feature of a Trainer."""

    def predict(self, x: Samples) -> np.ndarray:
        """Outputs (samples, ...) of inputs (samples, ...). For `Trainer.predict` and `metrics=`."""
        ...

    def loss(self, x: Samples, y: Samples) -> float:
        """Mean loss of a batch. For `evaluate` and `fit(test=)`, which use `loss_and_gradients` where there is none:
        that takes a backward pass more, and overwrites the gradients."""
        ...

    def accuracy(self, x: Samples, y: Samples) -> float:
        """A share of the samples. `evaluate` and `fit(test=)` measure it where no `metrics=` are named and y are
        classes, whole numbers (samples,)."""
        ...

    def check_samples(self, x: Samples, y: Samples) -> None:
        """Raise ValueError or TypeError where the model cannot learn y from x. `fit` and `evaluate` ask for all of
        their arrays before the first step, so that all workers are told; they may lie on disk (`shape`, `x[a:b]`)."""
        ...


def see_model(model: object) -> None:
    """TypeError or ValueError that says what the model lacks of `Model`."""
    lacks = [name for name in REQUIRED if not hasattr(model, name)]
    if type(model).__module__.partition(".")[0] == "torch" or hasattr(model, "named_parameters"):
        raise TypeError(
            f"a Trainer trains models of NumPy, and {type(model).__name__} is a module of PyTorch: write "
            "its loop with mpips.torch.DataParallel or mpips.torch.DistributedOptimizer"
        )
    if lacks:
        raise TypeError(
            f"a Trainer's model has parameters, gradients and loss_and_gradients, but "
            f"{type(model).__name__} has no {', '.join(lacks)}: see mpips.Model"
        )
    parameters, gradients = (
        [f"{array.dtype}{tuple(array.shape)}" for array in getattr(model, name)] for name in ("parameters", "gradients")
    )
    if len(parameters) != len(gradients):
        raise ValueError(f"the model has {len(parameters)} parameters, but {len(gradients)} gradients: one for each")
    for number, (mine, theirs) in enumerate(zip(parameters, gradients)):
        if mine != theirs:
            raise ValueError(f"parameters[{number}] is {mine}, but gradients[{number}] {theirs}: they must be equal")


def see_method(model: object, method: str, feature: str) -> None:
    """TypeError where the model lacks a method that a feature needs; it names both."""
    if not callable(getattr(model, method, None)):
        raise TypeError(
            f"{feature} needs a model with {method}, which {type(model).__name__} has not: add it, or "
            f'leave {feature} out (the page "The Trainer" tells more)'
        )


def samples_of(x: Samples, y: Samples) -> int:
    """Return how many samples a batch has: the length of its targets, or of its inputs where it has none."""
    return len(x if y is None else y)


def keys_of(model: Any) -> list[str]:
    """A key for every array of the model: its names where it has them, otherwise "0", "1", ...

    Texts, as the keys are with which messages are measured: a store's keys are of one type.
    """
    return list(getattr(model, "names", map(str, range(len(model.parameters)))))
