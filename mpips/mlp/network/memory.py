"""Memory of a network, laid out once: flat parameters and gradients, and the workspace of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpips.mlp.network.splits import Split

Empty = Callable[[int, np.dtype], np.ndarray]
"""`empty(count, dtype)`: memory for that many elements."""


def numpy_empty(count: int, dtype: np.dtype) -> np.ndarray:
    """Memory of this process alone."""
    return np.empty(count, dtype)


class Parameters:
    """Weights and biases of one rank in one flat array, their gradients in another, each (elements,).

    Layers lie one behind the other, weights then bias, so that one allreduce and one optimizer call serve them all.
    `parameters` and `gradients` are views of them: weight (outputs, inputs), bias (outputs,), weight, ...
    """

    def __init__(self, splits: Sequence[Split], dtype: np.dtype, empty: Empty, xp: Any) -> None:
        self._shapes: list[tuple[int, ...]] = []
        for split in splits:
            rows = split.outputs[1] - split.outputs[0]
            self._shapes += [(rows, split.inputs[1] - split.inputs[0]), (rows,)]
        count = sum(int(np.prod(shape)) for shape in self._shapes)
        self.flat_parameters = xp.empty(count, dtype)
        self.flat_gradients = empty(count, dtype)
        self.parameters = self.views(self.flat_parameters)
        self.gradients = self.views(self.flat_gradients)
        self.names = [f"layer{layer}.{part}" for layer in range(len(splits)) for part in ("weight", "bias")]

    @property
    def layer_elements(self) -> list[int]:
        """Parameters of each layer."""
        sizes = [array.size for array in self.parameters]
        return [weight + bias for weight, bias in zip(sizes[::2], sizes[1::2])]

    def views(self, flat: np.ndarray) -> list[np.ndarray]:
        """Views of an array laid out as the flat parameters (an optimizer's state): weight, bias, weight, ..."""
        views, offset = [], 0
        for shape in self._shapes:
            count = int(np.prod(shape))
            views.append(flat[offset : offset + count].reshape(shape))
            offset += count
        return views


class Workspace(NamedTuple):
    """Views for one number of samples, per layer: outputs (all, and this rank's), their gradients, a mask, scratch."""

    full: list[np.ndarray]
    mine: list[np.ndarray]
    delta: list[np.ndarray]
    delta_mine: list[np.ndarray]
    mask: list[np.ndarray]
    scratch: list[np.ndarray]


class Workspaces:
    """The workspace for each number of samples, all of them views of one block of memory a layer.

    `sizes` are the neurons of all layers, inputs first; `empty` gives the memory that other ranks read.
    """

    def __init__(
        self, sizes: Sequence[int], splits: Sequence[Split], dtype: np.dtype, empty: Empty, xp: Any
    ) -> None:
        self._splits, self._dtype, self._empty, self._xp = splits, dtype, empty, xp
        self._held = [
            sizes[layer + 1] if split.kind != "columns" or split.gathered else split.outputs[1] - split.outputs[0]
            for layer, split in enumerate(splits)
        ]
        """Neurons of each layer that this rank keeps: all, unless the next layer wants only its own."""
        self._capacity = -1
        self._blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._spaces: dict[int, Workspace] = {}

    def reserve(self, capacity: int) -> None:
        """Lay out the memory for steps of up to `capacity` samples; later steps then allocate nothing."""
        if capacity <= self._capacity:
            return
        self._capacity = capacity
        self._spaces.clear()
        self._blocks.clear()
        for held in self._held:
            count = capacity * held
            arrays = self._empty(count, self._dtype), self._empty(count, self._dtype)
            self._blocks.append((*arrays, self._xp.empty(count, bool), self._xp.empty(count, self._dtype)))

    def of(self, samples: int) -> Workspace:
        """The workspace of a step of so many samples."""
        space = self._spaces.get(samples)
        if space is None:
            self.reserve(samples)
            space = self._spaces[samples] = self._views(samples)
        return space

    def _views(self, samples: int) -> Workspace:
        space = Workspace([], [], [], [], [], [])
        for held, split, blocks in zip(self._held, self._splits, self._blocks):
            full, delta, mask, scratch = (block[: held * samples].reshape(held, samples) for block in blocks)
            own = slice(*split.outputs) if split.gathered else slice(None)
            space.full.append(full)
            space.mine.append(full[own])
            space.delta.append(delta)
            space.delta_mine.append(delta[own])
            space.mask.append(mask)
            space.scratch.append(scratch)
        return space
