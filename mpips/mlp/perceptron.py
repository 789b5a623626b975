"""A multi-layer perceptron in one process: the class that users make, and that `train` cuts into slices."""

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
    """Fully connected layers with one activation between them, on the array module `xp`: NumPy or CuPy.

    `sizes` are inputs, hidden widths, outputs. `parameters` and `gradients` are lists of arrays in the order of
    `names` (``layer0.weight`` (outputs, inputs), ``layer0.bias`` (outputs,), ...); the arrays keep their identity and
    are updated in place. Both are views of `flat_parameters` and `flat_gradients`, 1-D and contiguous. Pass
    ``empty=mpips.empty`` to have the gradients in memory that the ranks of a node share. After the first step of a
    size, steps allocate no arrays of the layers' size. The arrays are made on first use, so describing a network
    that `train` cuts in slices costs nothing. Nothing here talks to MPI.
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
        self.xp, self._empty = xp, empty
        check(self.specification)
        self.layer_elements = [(inputs + 1) * outputs for inputs, outputs in pairwise(sizes)]
        """Parameters of each layer; layers lie one after the other in the flat arrays."""
        self.names = [f"layer{layer}.{kind}" for layer in range(len(sizes) - 1) for kind in ("weight", "bias")]

    @cached_property
    def _network(self) -> Network:
        return Network(self.specification, empty=self._empty, xp=self.xp)

    @property
    def used(self) -> bool:
        """Return whether the arrays exist, so that they may hold other weights than the seed's."""
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
        """Return the mean loss over the samples; `gradients` become its gradient.

        x is (samples, features) in the network's dtype; y is (samples, outputs) or (samples,) for "l2", class numbers
        (samples,) for "softmax". Needs at least one sample. `before(layer)` is called, layers counted from 0, before a
        layer's parameters are used, `ready(layer)` when its gradients are there: for exchanges beside the compute.
        """
        x, y = self._array("x", x), self._array("y", y)
        if not len(x):
            raise ValueError("a step needs at least one sample")
        self.check_samples(x, y)
        return self._network.step(x, y, len(x), before, ready) / len(x)

    def check_samples(self, x: np.ndarray, y: np.ndarray) -> None:
        """Raise ValueError or TypeError where this network cannot learn targets y from inputs x, as
        `loss_and_gradients` takes them. A Trainer asks before its first step."""
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
        """Return outputs (samples, outputs) of x (samples, features), a new array; logits of softmax networks."""
        x, features = self._array("x", x), self.specification.sizes[0]
        if x.ndim != 2 or x.shape[1] != features:
            raise ValueError(f"x is {x.shape}: this network takes x (samples, {features})")
        outputs = self.xp.empty((len(x), self._network.sizes[-1]), self._network.dtype)
        for start in range(0, len(x), _PREDICT_SAMPLES):
            block = x[start : start + _PREDICT_SAMPLES]
            outputs[start : start + len(block)] = self._network.forward(block).T
        return outputs

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        """Return the share of the samples whose largest output is the class y (samples,)."""
        y = self._array("y", y)
        if y.shape != (x.shape[0],):
            raise ValueError(f"y is {y.shape}: the accuracy is of the classes of {x.shape[0]} samples (samples,)")
        return float((self.predict(x).argmax(axis=1) == y).mean())

    def _array(self, name: str, given: np.ndarray) -> np.ndarray:
        """Return rows as an array of NumPy, or of the array module."""
        return in_memory(name, given) if self.xp is np else given
