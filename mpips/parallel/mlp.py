"""A multi-layer perceptron in one process: the serial program that every grid must reproduce."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .network import Empty, Network, _numpy_empty

_PREDICT_SAMPLES = 1024


class MLP:
    """Fully connected layers with one activation between them, trained on NumPy.

    `sizes` are inputs, hidden widths, outputs. `parameters` and `gradients` are lists of arrays in the order of `names`
    (``layer0.weight`` (outputs, inputs), ``layer0.bias`` (outputs,), ...); the arrays keep their identity and are
    updated in place. Both are views of `flat_parameters` and `flat_gradients`, 1-D and contiguous. Pass
    ``empty=mpips.empty`` to have the gradients in memory that the ranks of a node share. After the first step of a
    size, steps allocate no arrays of the layers' size. Nothing here talks to MPI.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "relu",
        loss: str = "l2",
        dtype: str = "float32",
        seed: int = 0,
        empty: Empty = _numpy_empty,
    ) -> None:
        self._network = Network(sizes, activation, loss, dtype, seed, empty=empty)
        self.names = self._network.names
        self.parameters, self.flat_parameters = self._network.parameters, self._network.flat_parameters
        self.gradients, self.flat_gradients = self._network.gradients, self._network.flat_gradients

    def loss_and_gradients(self, x: np.ndarray, y: np.ndarray) -> float:
        """Mean loss over the samples; `gradients` become its gradient.

        x is (samples, features) in the network's dtype; y is (samples, outputs) or (samples,) for "l2", class numbers
        (samples,) for "softmax". Needs at least one sample.
        """
        if not len(x):
            raise ValueError("a step needs at least one sample")
        return self._network.step(x, y, len(x)) / len(x)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Outputs (samples, outputs) of inputs (samples, features), a new array; softmax networks return logits."""
        outputs = np.empty((len(x), self._network.sizes[-1]), self._network.dtype)
        for start in range(0, len(x), _PREDICT_SAMPLES):
            block = x[start : start + _PREDICT_SAMPLES]
            outputs[start : start + len(block)] = self._network.forward(block).T
        return outputs

    def accuracy(self, x: np.ndarray, y: np.ndarray) -> float:
        """Share of the samples whose largest output is the class y (samples,)."""
        return float(np.mean(self.predict(x).argmax(axis=1) == y))
