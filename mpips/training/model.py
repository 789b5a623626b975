"""The protocols of a model that a Trainer can train (`Model`, `EvaluatedModel`), and the checks of a user's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np

# inputs or targets of samples, (samples, ...): an array of any library, or an object that a data loader makes of arrays
Samples: TypeAlias = Any
REQUIRED = ("parameters", "gradients", "loss_and_gradients")


class Model(Protocol):
    """The members that every Trainer needs of a model: two lists of arrays, and a function that fills the gradients.

    The arrays must stay at the same place in memory. A model may also have `names`, a list of strings, one for each
    parameter. The names become the keys in the store. `overlap=` needs a model that consists of layers
    (`mpips.overlap.LayeredModel`). Other features need methods of `EvaluatedModel`.
    """

    @property
    def parameters(self) -> Sequence[np.ndarray]:
        """The parameters: C-contiguous float arrays, which the Trainer changes in place."""
        ...

    @property
    def gradients(self) -> Sequence[np.ndarray]:
        """One array for each parameter, of equal shape and dtype. Arrays from `mpips.empty` are sent without a copy."""
        ...

    def loss_and_gradients(self, x: Samples, y: Samples) -> float:
        """Return the mean loss of a batch, and write the gradients of this mean into `gradients`.

        x and y are (samples, ...). They have the type that the program passes to `fit` or `step`, or that its data
        loader makes.
        """
        ...


class EvaluatedModel(Model, Protocol):
    """Methods that a model may have besides those of `Model`. Each method serves one feature of a Trainer."""

    def predict(self, x: Samples) -> np.ndarray:
        """Return outputs (samples, ...) for inputs (samples, ...). `Trainer.predict` and `metrics=` need this."""
        ...

    def loss(self, x: Samples, y: Samples) -> float:
        """Return the mean loss of a batch, for `evaluate` and `fit(test=)`.

        If a model lacks this method, `evaluate` and `fit` call `loss_and_gradients` instead, which makes a needless
        backward pass and overwrites the gradients.
        """
        ...

    def accuracy(self, x: Samples, y: Samples) -> float:
        """Return the share of samples that the model predicts correctly.

        `evaluate` and `fit(test=)` measure it if the Trainer has no `metrics=` and y are classes, whole numbers of
        shape (samples,).
        """
        ...

    def check_samples(self, x: Samples, y: Samples) -> None:
        """Raise ValueError or TypeError if the model cannot learn y from x.

        `fit` and `evaluate` pass their whole arrays before the first step, so that an error is raised on all workers.
        The arrays may lie on disk, so use only `shape` and slices `x[a:b]`.
        """
        ...


def check_model_arrays(model: object) -> None:
    """Raise TypeError or ValueError if the model lacks a member of `Model`. The error names the missing member."""
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
    for number, (parameter, gradient) in enumerate(zip(parameters, gradients)):
        if parameter != gradient:
            raise ValueError(
                f"parameters[{number}] is {parameter}, but gradients[{number}] {gradient}: they must be equal"
            )


def check_method(model: object, method: str, feature: str) -> None:
    """Raise TypeError if the model lacks a method that a feature needs. The error names the method and the feature."""
    if not callable(getattr(model, method, None)):
        raise TypeError(
            f"{feature} needs a model with {method}, which {type(model).__name__} has not: add it, or "
            f'leave {feature} out (the page "The Trainer" tells more)'
        )


def samples_of(x: Samples, y: Samples) -> int:
    """Return the number of samples in a batch: the length of its targets, or of its inputs if there are no targets."""
    return len(x if y is None else y)


def keys_of(model: Any) -> list[str]:
    """Return a key for every parameter of the model: the model's `names` if it has them, otherwise "0", "1", ...

    Keys are always strings, because all keys of a store must have one type, and `overlap` measures messages with
    strings as keys.
    """
    return list(getattr(model, "names", map(str, range(len(model.parameters)))))
