"""One rank's part of a multi-layer perceptron: forward, loss and backward, in place.

Activations are kept as (neurons, samples), so that a slice of neurons is one contiguous block: a layer writes its slice
straight into the gathered array, and no collective ever needs a copy.

Memory of a network, laid out once: flat parameters and gradients, and the workspace of a step.

What a network asks of the ranks that hold its other slices, and whom it tells how far a step is: the protocols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpips.mlp.network.layers import (
    ACTIVATIONS,
    LOSSES,
    Activation,
    Specification,
    Split,
    bound,
    check,
    draw,
    splits,
    working_dtype,
)

_BLOCK_FLOPS = 3e7  # some 0.3 ms of a core: so often what is on its way is looked after
_CACHED_BYTES = 512 << 10  # of an array that is passed over more than once, half of a usual core's own cache
_FEWEST_BLOCK_ROWS = 64  # below, a matrix product loses speed


Empty = Callable[[int, np.dtype], np.ndarray]
"""`empty(count, dtype)`: memory for that many elements."""


def numpy_empty(count: int, dtype: np.dtype) -> np.ndarray:
    """Memory of this process alone."""
    return np.empty(count, dtype)


class Network:
    """The layers of one rank, cut as `mode` says among the ranks of `exchange`.

    `empty(count, dtype)` gives the memory for what other ranks read (gradients, activations): NumPy's own, or memory
    that ranks of a node share. The weights are those of the specification's seed, however the network is cut. `xp` is
    the array module that holds and computes everything: NumPy, or CuPy, whose arrays NumPy's functions pass on to it.
    """

    def __init__(
        self,
        specification: Specification,
        exchange: Exchange | None = None,
        mode: str = "pairs",
        empty: Empty = numpy_empty,
        xp: Any = np,
    ) -> None:
        check(specification)
        self.specification, self.mode, self.xp = specification, mode, xp
        self.sizes = specification.sizes
        self.dtype = working_dtype(specification.dtype)
        self.progress: Progress | None = None
        self.exchange: Exchange = Alone() if exchange is None else exchange
        self.splits = splits(self.sizes, self.exchange.parts, self.exchange.part, mode)
        self._activation: Activation = ACTIVATIONS[specification.activation]
        self._loss = LOSSES[specification.loss].function
        empty = empty if xp is np else xp.empty
        self._memory = Parameters(self.splits, self.dtype, empty, xp)
        self._workspaces = Workspaces(self.sizes, self.splits, self.dtype, empty, xp)
        self.flat_parameters, self.flat_gradients = self._memory.flat_parameters, self._memory.flat_gradients
        self.parameters, self.gradients = self._memory.parameters, self._memory.gradients
        self.names, self.views, self.reserve = self._memory.names, self._memory.views, self._workspaces.reserve
        self._draw()

    # -- parameters

    def _draw(self) -> None:
        last = len(self.splits) - 1
        for layer, split in enumerate(self.splits):
            columns = self.sizes[layer]
            half_width = bound("" if layer == last else self.specification.activation, columns)
            weight = self.weight(layer)
            drawn = weight if self.xp is np else np.empty(weight.shape, self.dtype)
            draw(drawn, self.specification.seed, layer, columns, split.outputs[0], split.inputs[0], half_width)
            if drawn is not weight:
                weight[...] = self.xp.asarray(drawn)
            self.bias(layer)[...] = 0

    @property
    def layer_elements(self) -> list[int]:
        """This rank's parameters of each layer; layers lie one after the other in the flat arrays."""
        return self._memory.layer_elements

    def splits_of_all(self) -> list[list[Split]]:
        """The splits of every rank of the model."""
        return [splits(self.sizes, self.exchange.parts, part, self.mode) for part in range(self.exchange.parts)]

    def weight(self, layer: int) -> np.ndarray:
        """This rank's part of a layer's matrix, (outputs, inputs)."""
        return self.parameters[2 * layer]

    def bias(self, layer: int) -> np.ndarray:
        """This rank's part of a layer's bias, (outputs,)."""
        return self.parameters[2 * layer + 1]

    def take(self, parameters: Sequence[np.ndarray]) -> None:
        """Copy this rank's slices from the parameters of the whole network."""
        for layer, split in enumerate(self.splits):
            rows, columns = slice(*split.outputs), slice(*split.inputs)
            self.weight(layer)[...] = self.xp.asarray(parameters[2 * layer][rows, columns])
            self.bias(layer)[...] = self.xp.asarray(parameters[2 * layer + 1][rows])

    # -- computation

    def forward(self, x: np.ndarray, before: LayerHook | None = None) -> np.ndarray:
        """Outputs (outputs, samples) of inputs (samples, features); they stay valid until the next step."""
        space = self._workspaces.of(x.shape[0])
        y = x.T
        for layer, split in enumerate(self.splits):
            if before is not None:
                before(layer)
            y = self._forward_layer(layer, split, y, space)
        return y

    def _forward_layer(self, layer: int, split: Split, x: np.ndarray, space: Workspace) -> np.ndarray:
        mine = space.mine[layer]
        np.matmul(self.weight(layer), x, out=mine)
        if split.kind == "rows":
            self.exchange.sum(mine)
        bias, hidden = self.bias(layer)[:, None], layer + 1 < len(self.splits)
        for rows in self._row_blocks(mine):
            part = mine[rows]
            part += bias[rows]
            if hidden:
                self._activation.apply(part)
        if split.gathered:
            self.exchange.gather(space.full[layer])
        return space.full[layer]

    def step(
        self,
        x: np.ndarray,
        y: np.ndarray,
        samples: float,
        before: LayerHook | None = None,
        ready: LayerHook | None = None,
    ) -> float:
        """Forward and backward of one minibatch's part; returns the *sum* of its losses.

        x is (part, features), y (part, outputs) or (part,); the gradients are those of the sum of the losses divided by
        `samples`: with the samples of the whole minibatch, summing them over the batch ranks gives the gradient of its
        mean. `before(layer)` is called before a layer's parameters are first used, `ready(layer)` when its gradients
        are there and its parameters are no longer needed.
        """
        space = self._workspaces.of(x.shape[0])
        output = self.forward(x, before)
        total = self._loss(output, y, space.delta[-1], space.scratch[-1], 1.0 / samples, self.xp)
        for layer in range(len(self.splits) - 1, -1, -1):
            self._backward_layer(layer, x.T if layer == 0 else space.full[layer - 1], space)
            if ready is not None:
                ready(layer)
        return total

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """Sum of the losses of (x, y), and how many samples have their largest output at the class y (0 for "l2")."""
        output = self.forward(x)
        space = self._workspaces.of(len(x))
        right = float((output.argmax(axis=0) == y).sum()) if LOSSES[self.specification.loss].classes else 0.0
        return self._loss(output, y, space.delta[-1], space.scratch[-1], 1.0, self.xp), right

    def _backward_layer(self, layer: int, x: np.ndarray, space: Workspace) -> None:
        """Of the gradients of inputs and weights that first which has to travel: it is on its way during the other."""
        split = self.splits[layer]
        if layer and split.kind == "columns":
            self._input_gradient(layer, space)
            pending = self.exchange.start_sum(space.delta[layer - 1])
            self._weight_gradient(layer, x, space)
            pending.wait()
        elif self.progress is not None:
            self._weight_gradient(layer, x, space)
            self._input_gradient(layer, space)
        else:
            self._input_gradient(layer, space)
            self._weight_gradient(layer, x, space)
        if layer:
            self._through_activation(layer - 1, space)

    def _input_gradient(self, layer: int, space: Workspace) -> None:
        if layer:
            self._product(self.weight(layer).T, space.delta_mine[layer], space.delta[layer - 1])

    def _weight_gradient(self, layer: int, x: np.ndarray, space: Workspace) -> None:
        delta = space.delta_mine[layer]
        self._product(delta, x.T, self.gradients[2 * layer])
        delta.sum(axis=1, out=self.gradients[2 * layer + 1])
        if self.progress is not None:
            self.progress.gradient(layer)

    def _product(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        """out = a @ b; beside messages in blocks of rows, between which they are looked after."""
        if self.progress is None:
            np.matmul(a, b, out=out)
            return
        rows = max(_FEWEST_BLOCK_ROWS, int(_BLOCK_FLOPS / (2 * max(1, b.size))))
        for start in range(0, len(a), rows):
            np.matmul(a[start : start + rows], b, out=out[start : start + rows])
            self.progress.poll()

    def _through_activation(self, layer: int, space: Workspace) -> None:
        own = slice(*self.splits[layer].outputs) if self.splits[layer].gathered else slice(None)
        arrays = space.delta_mine[layer], space.mine[layer], space.mask[layer][own], space.scratch[layer][own]
        for rows in self._row_blocks(arrays[0]):
            self._activation.backward(*(array[rows] for array in arrays))

    def _row_blocks(self, array: np.ndarray) -> list[slice]:
        """Blocks of rows that stay in a core's cache from one function to the next; a GPU takes all rows at once."""
        rows, columns = array.shape
        block = max(1, _CACHED_BYTES // max(1, columns * self.dtype.itemsize)) if self.xp is np else max(1, rows)
        return [slice(start, start + block) for start in range(0, rows, block)]


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


LayerHook = Callable[[int], object]
"""Called with the number of a layer, from 0."""


class Pending(Protocol):
    """A sum on its way."""

    def wait(self) -> None:
        """Return when the array holds the sum."""


class Exchange(Protocol):
    """What the ranks that share one model do together."""

    parts: int
    part: int

    def gather(self, full: Any) -> None:
        """Fill (neurons, samples): every rank has written its `interval` of rows and receives the others'."""

    def sum(self, array: Any) -> None:
        """Replace a forward array by its sum over the ranks."""

    def start_sum(self, array: Any) -> Pending:
        """Begin to replace a backward array by its sum over the ranks; it may not be touched before `wait`."""


class Alone:
    """The exchange of a rank that holds the whole model: nothing moves, and nothing may ask for it."""

    parts = 1
    part = 0

    def gather(self, full: Any) -> None:
        raise AssertionError("a whole model gathers nothing")

    def sum(self, array: Any) -> None:
        raise AssertionError("a whole model sums nothing")

    def start_sum(self, array: Any) -> Pending:
        raise AssertionError("a whole model sums nothing")


class Progress(Protocol):
    """Who sends while a step computes."""

    def gradient(self, layer: int) -> None:
        """The gradients of a layer are there; its parameters may still be needed."""

    def poll(self) -> None:
        """Look after what is on its way. Called several times a millisecond of the backward pass."""
