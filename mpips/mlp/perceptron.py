"""`MLP`: a multi-layer perceptron in one process. `train` cuts it into slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from types import ModuleType

import numpy as np

from mpips.mlp.network import Empty, LayerHook, Network, Specification, check
from mpips.samples import in_memory

_PREDICT_SAMPLES = 1024


class MLP:
    """A multi-layer perceptron: fully connected layers with an activation after each hidden layer.

    It runs in one process and never calls MPI. Arrays are allocated when they are first used, so an MLP that only
    describes a network for `train` takes no memory. The first step with a given number of samples allocates arrays.
    Later steps with that number allocate no arrays of the layers' size.

    Args:
        sizes: Number of inputs, widths of the hidden layers, number of outputs.
        activation: "relu" or "tanh".
        loss: "l2" (half the squared error, for targets) or "softmax" (cross-entropy, for class numbers).
        dtype: "float32", "float64" or "mixed". In "mixed", weights are float32, and gradients and activations may
            travel between nodes as float16.
        seed: Determines the first weights, whatever mesh trains the network.
        empty: Allocates gradients and activations. Give ``mpips.empty`` to have them in memory that the ranks of a
            node share.
        xp: The array module that computes: NumPy or CuPy.

    Attributes:
        names: Names of the parameters: ``layer0.weight``, ``layer0.bias``, ``layer1.weight``, ...
        parameters: The parameters in the order of `names`: a weight (outputs, inputs), a bias (outputs,), ... They are
            updated in place and remain the same arrays.
        gradients: The gradients of the parameters, in the same order.
        flat_parameters: All parameters in one contiguous 1-D array; `parameters` are views into it.
        flat_gradients: All gradients in one contiguous 1-D array; `gradients` are views into it.
        layer_elements: Number of parameters of each layer. Layers follow one another in the flat arrays.

    Raises:
        ValueError: If an argument is wrong.

    >>> model = mpips.mlp.MLP([64, 32, 10], loss="softmax", seed=1)
    >>> model.names
    ['layer0.weight', 'layer0.bias', 'layer1.weight', 'layer1.bias']
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "relu",
        loss: str = "l2",
        dtype: str = "float32",
        seed: int = 0,
        empty: Empty = np.empty,
        xp: ModuleType = np,
    ) -> None:
        self.specification = Specification(tuple(sizes), activation, loss, dtype, seed)
        self.xp = xp
        self._empty = empty
        check(self.specification)
        self.layer_elements = [(inputs + 1) * outputs for inputs, outputs in pairwise(sizes)]
        self.names = [f"layer{layer}.{kind}" for layer in range(len(sizes) - 1) for kind in ("weight", "bias")]

    @cached_property
    def _network(self) -> Network:
        return Network(self.specification, empty=self._empty, xp=self.xp)

    @property
    def used(self) -> bool:
        """True once the arrays exist. They may then hold weights other than those of the seed."""
        return "_network" in self.__dict__

    @cached_property
    def parameters(self) -> list[np.ndarray]:
        return self._network.parameters

    @cached_property
    def gradients(self) -> list[np.ndarray]:
        return self._network.gradients

    @cached_property
    def flat_parameters(self) -> np.ndarray:
        return self._network.flat_parameters

    @cached_property
    def flat_gradients(self) -> np.ndarray:
        return self._network.flat_gradients

    def loss_and_gradients(
        self, x: np.ndarray, y: np.ndarray, before: LayerHook | None = None, ready: LayerHook | None = None
    ) -> float:
        """Return the mean loss over the samples, and set `gradients` to its gradient.

        Args:
            x: Inputs, (samples, features), in the network's dtype. At least one sample.
            y: For "l2": targets, (samples, outputs), or (samples,) if there is one output. For "softmax": class
                numbers, (samples,).
            before: Called with a layer's number, from 0, before the layer's parameters are first used.
            ready: Called with a layer's number when its gradients are complete. `before` and `ready` let a caller
                exchange parameters and gradients during the computation.

        Raises:
            ValueError: If there are no samples, or x and y do not fit the network.

        >>> model = mpips.mlp.MLP([2, 4, 1], dtype="float64")
        >>> loss = model.loss_and_gradients(np.ones((3, 2)), np.zeros((3, 1)))
        >>> [gradient.shape for gradient in model.gradients]
        [(4, 2), (4,), (1, 4), (1,)]
        """
        x, y = self._array("x", x), self._array("y", y)
        if not len(x):
            raise ValueError("a step needs at least one sample")
        self.check_samples(x, y)
        return self._network.step(x, y, len(x), before, ready) / len(x)

    def check_samples(self, x: np.ndarray, y: np.ndarray) -> None:
        """Raise ValueError or TypeError if `loss_and_gradients` cannot take x and y.

        A Trainer calls it before its first step.
        """
        features, samples = self.specification.sizes[0], y.shape[0] if len(y.shape) else 0
        if len(x.shape) != 2 or x.shape[1] != features or samples != x.shape[0]:
            raise ValueError(
                f"x is {tuple(x.shape)} with {samples} targets: this network takes x (samples, "
                f"{features}), and a target for every sample"
            )
        y = self._array("y", y)
        outputs, shape, loss = self.specification.sizes[-1], np.shape(y), self.specification.loss
        if loss == "softmax":
            if len(shape) != 1 or y.dtype.kind not in "iu":
                flat = "y.argmax(axis=1)" if outputs in shape[1:] else "y.ravel()"
                cure = "y.astype(int)" if len(shape) == 1 else flat
                raise ValueError(
                    f"y is {shape} of {y.dtype}: loss={loss!r} takes the classes of the samples as whole "
                    f"numbers (samples,), perhaps {cure}; loss='l2' takes targets (samples, {outputs})"
                )
            if self.xp is np and y.size and not (y.min() >= 0 and y.max() < outputs):
                raise ValueError(
                    f"y has classes from {y.min()} to {y.max()}, and this network has {outputs} outputs: "
                    f"number the classes 0 to {outputs - 1}, as np.unique(y, return_inverse=True)[1] does"
                )
        elif math.prod(shape[1:]) != outputs:
            raise ValueError(
                f"y is {shape}: loss={loss!r} takes targets (samples, {outputs}); loss='softmax' takes "
                "the classes of the samples as whole numbers (samples,)"
            )

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return the outputs, (samples, outputs), of inputs x, (samples, features). Softmax networks return logits.

        The result is a new array. Raises ValueError if x does not have this shape.

        >>> mpips.mlp.MLP([2, 4, 1]).predict(np.ones((3, 2))).shape
        (3, 1)
        """
        x, features = self._array("x", x), self.specification.sizes[0]
        if x.ndim != 2 or x.shape[1] != features:
            raise ValueError(f"x is {x.shape}: this network takes x (samples, {features})")
        outputs = self.xp.empty((len(x), self._network.sizes[-1]), self._network.dtype)
        for start in range(0, len(x), _PREDICT_SAMPLES):
            block = x[start : start + _PREDICT_SAMPLES]
            outputs[start : start + len(block)] = self._network.forward(block).T
        return outputs

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        """Return the share of samples, from 0 to 1, that the network classifies correctly.

        x, (samples, features), are inputs, and y, (samples,), are the right class numbers. Raises ValueError if x or y
        has another shape.

        >>> 0 <= mpips.mlp.MLP([2, 4, 3], loss="softmax").accuracy(np.ones((3, 2)), np.zeros(3, int)) <= 1
        True
        """
        y = self._array("y", y)
        if y.shape != (x.shape[0],):
            raise ValueError(f"y is {y.shape}: the accuracy is of the classes of {x.shape[0]} samples (samples,)")
        return float((self.predict(x).argmax(axis=1) == y).mean())

    def _array(self, name: str, given: np.ndarray) -> np.ndarray:
        """Return an argument as a NumPy array. With another array module, return the argument as it is."""
        return in_memory(name, given) if self.xp is np else given
