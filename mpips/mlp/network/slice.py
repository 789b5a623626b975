"""One rank's slice of a multi-layer perceptron: its memory, laid out once, and forward, loss and backward in place.

Activations are kept as (neurons, samples), so that a slice of neurons is one contiguous block: a layer writes its slice
straight into the gathered array, and no collective ever needs a copy. No MPI in here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpips.mlp.network.layers import (
    ACTIVATIONS,
    LOSSES,
    Specification,
    Split,
    check,
    draw_weight,
    splits,
    working_dtype,
)

_BLOCK_FLOPS = 3e7  # some 0.3 ms of a core: so often messages are moved on
_CACHED_BYTES = 512 << 10  # of an array that is passed over more than once, half of a usual core's own cache
_FEWEST_BLOCK_ROWS = 64  # below, a matrix product loses speed

LayerHook = Callable[[int], object]
"""Called with the number of a layer, from 0."""
Empty = Callable[[int, np.dtype], np.ndarray]
"""`empty(count, dtype)`: memory for that many elements."""


class PendingSum(Protocol):
    """A sum on its way."""

    def wait(self) -> None:
        """Return when the array holds the sum."""


class ModelExchange(Protocol):
    """What the ranks that share one model do together."""

    parts: int
    part: int

    def gather(self, full: Any) -> None:
        """Fill (neurons, samples): every rank has written its `interval` of rows and receives the others'."""

    def sum(self, array: Any) -> None:
        """Replace a forward array by its sum over the ranks."""

    def start_sum(self, array: Any) -> PendingSum:
        """Begin to replace a backward array by its sum over the ranks; it may not be touched before `wait`."""


class StepProgress(Protocol):
    """Sends messages while a step computes."""

    def gradient(self, layer: int) -> None:
        """Take the gradients of a layer, which are there; its parameters may still be needed."""

    def poll(self) -> None:
        """Move messages on. Called several times a millisecond of the backward pass."""


class LayerArrays(NamedTuple):
    """A layer's arrays for one number of samples: outputs (all, and this rank's), their gradients, a mask, scratch."""

    full: np.ndarray
    mine: np.ndarray
    delta: np.ndarray
    delta_mine: np.ndarray
    mask: np.ndarray
    scratch: np.ndarray


def numpy_empty(count: int, dtype: np.dtype) -> np.ndarray:
    """Return memory of this process alone."""
    return np.empty(count, dtype)


class Network:
    """The layers of one rank, cut as `mode` says among the ranks of `exchange` (None: they are whole).

    `parameters` and `gradients` are views (weight (outputs, inputs), bias (outputs,), weight, ...) of `flat_parameters`
    and `flat_gradients`, so that one allreduce and one optimizer call serve all layers. `empty(count, dtype)` gives the
    memory for what other ranks read (gradients, activations): NumPy's own, or memory that ranks of a node share. The
    weights are those of the specification's seed, however the network is cut. `xp` is the array module that holds and
    computes everything: NumPy, or CuPy, whose arrays NumPy's functions pass on to it.
    """

    def __init__(
        self, specification: Specification, exchange: ModelExchange | None = None, mode: str = "pairs",
        empty: Empty = numpy_empty, xp: Any = np,
    ) -> None:  # fmt: skip
        check(specification)
        self.specification, self.mode, self.xp, self._exchange = specification, mode, xp, exchange
        self.sizes, self.dtype = specification.sizes, working_dtype(specification.dtype)
        self.parts, part = (1, 0) if exchange is None else (exchange.parts, exchange.part)
        self.splits = splits(self.sizes, self.parts, part, mode)
        self._activate, self._derive = ACTIVATIONS[specification.activation]
        self._loss = LOSSES[specification.loss]
        self._empty = empty if xp is np else xp.empty
        self._shapes: list[tuple[int, ...]] = []
        for split in self.splits:
            rows = split.outputs[1] - split.outputs[0]
            self._shapes += [(rows, split.inputs[1] - split.inputs[0]), (rows,)]
        elements = [int(np.prod(shape)) for shape in self._shapes]
        self.layer_elements = [weight + bias for weight, bias in zip(elements[::2], elements[1::2])]
        """This rank's parameters of each layer; layers lie one after the other in the flat arrays."""
        self.flat_parameters = xp.empty(sum(elements), self.dtype)
        self.flat_gradients = self._empty(sum(elements), self.dtype)
        self.parameters, self.gradients = self.views(self.flat_parameters), self.views(self.flat_gradients)
        self.names = [f"layer{layer}.{kind}" for layer in range(len(self.splits)) for kind in ("weight", "bias")]
        self._neurons = [
            self.sizes[layer + 1] if split.kind != "columns" or split.gathered else split.outputs[1] - split.outputs[0]
            for layer, split in enumerate(self.splits)
        ]
        """Neurons of each layer whose outputs this rank keeps: all, unless the next layer wants only its own."""
        self._capacity = -1
        self._blocks: list[tuple[np.ndarray, ...]] = []
        self._spaces: dict[int, list[LayerArrays]] = {}
        for layer, split in enumerate(self.splits):
            weight = self.parameters[2 * layer]
            drawn = weight if xp is np else np.empty(weight.shape, self.dtype)
            draw_weight(drawn, specification, layer, split.outputs[0], split.inputs[0])
            if drawn is not weight:
                weight[...] = xp.asarray(drawn)
            self.parameters[2 * layer + 1][...] = 0

    # -- parameters

    def views(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return views of an array laid out as the flat parameters (an optimizer's state): weight, bias, weight, ..."""
        views, offset = [], 0
        for shape in self._shapes:
            count = int(np.prod(shape))
            views.append(flat[offset : offset + count].reshape(shape))
            offset += count
        return views

    def splits_of_all(self) -> list[list[Split]]:
        """Return the splits of every rank of the model."""
        return [splits(self.sizes, self.parts, part, self.mode) for part in range(self.parts)]

    def copy_slices(self, parameters: Sequence[np.ndarray]) -> None:
        """Copy this rank's slices from the parameters of the whole network."""
        for layer, split in enumerate(self.splits):
            rows, columns = slice(*split.outputs), slice(*split.inputs)
            self.parameters[2 * layer][...] = self.xp.asarray(parameters[2 * layer][rows, columns])
            self.parameters[2 * layer + 1][...] = self.xp.asarray(parameters[2 * layer + 1][rows])

    # -- memory of a step

    def reserve(self, capacity: int) -> None:
        """Lay out the memory for steps of up to `capacity` samples; later steps then allocate nothing."""
        if capacity <= self._capacity:
            return
        self._capacity = capacity
        self._spaces.clear()
        self._blocks.clear()
        for neurons in self._neurons:
            count = capacity * neurons
            arrays = self._empty(count, self.dtype), self._empty(count, self.dtype)
            self._blocks.append((*arrays, self.xp.empty(count, bool), self.xp.empty(count, self.dtype)))

    def _arrays(self, samples: int) -> list[LayerArrays]:
        """Return the arrays of each layer for a step of so many samples: views of one block of memory a layer."""
        if samples not in self._spaces:
            self.reserve(samples)
            space = []
            for neurons, split, blocks in zip(self._neurons, self.splits, self._blocks):
                full, delta, mask, scratch = (block[: neurons * samples].reshape(neurons, samples) for block in blocks)
                own = slice(*split.outputs) if split.gathered else slice(None)
                space.append(LayerArrays(full, full[own], delta, delta[own], mask, scratch))
            self._spaces[samples] = space
        return self._spaces[samples]

    # -- computation

    def forward(self, x: np.ndarray, before: LayerHook | None = None) -> np.ndarray:
        """Return the outputs (outputs, samples) of inputs (samples, features); they stay valid until the next step."""
        y = x.T
        for layer, (split, space) in enumerate(zip(self.splits, self._arrays(x.shape[0]))):
            if before is not None:
                before(layer)
            np.matmul(self.parameters[2 * layer], y, out=space.mine)
            if split.kind == "rows":
                assert self._exchange is not None
                self._exchange.sum(space.mine)
            bias, hidden = self.parameters[2 * layer + 1][:, None], layer + 1 < len(self.splits)
            for rows in self._row_blocks(space.mine):
                part = space.mine[rows]
                part += bias[rows]
                if hidden:
                    self._activate(part)
            if split.gathered:
                assert self._exchange is not None
                self._exchange.gather(space.full)
            y = space.full
        return y

    def step(
        self, x: np.ndarray, y: np.ndarray, samples: float, before: LayerHook | None = None,
        ready: LayerHook | None = None, progress: StepProgress | None = None,
    ) -> float:  # fmt: skip
        """Compute forward and backward of one minibatch's part; returns the *sum* of its losses.

        x is (part, features), y (part, outputs) or (part,); the gradients are those of the sum of the losses divided by
        `samples`: with the samples of the whole minibatch, summing them over the batch ranks gives the gradient of its
        mean. `before(layer)` is called before a layer's parameters are first used, `ready(layer)` when its gradients
        are there and its parameters are no longer needed. `progress` sends messages meanwhile.
        """
        space = self._arrays(x.shape[0])
        output = self.forward(x, before)
        total = self._loss(output, y, space[-1].delta, space[-1].scratch, 1.0 / samples, self.xp)
        for layer in range(len(self.splits) - 1, -1, -1):
            self._backward_layer(layer, x.T if layer == 0 else space[layer - 1].full, space, progress)
            if ready is not None:
                ready(layer)
        return total

    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """Return the sum of the losses of (x, y), and how many samples have their largest output at class y (l2: 0)."""
        output, space = self.forward(x), self._arrays(len(x))[-1]
        right = float((output.argmax(axis=0) == y).sum()) if self.specification.loss == "softmax" else 0.0
        return self._loss(output, y, space.delta, space.scratch, 1.0, self.xp), right

    def _backward_layer(
        self, layer: int, x: np.ndarray, space: list[LayerArrays], progress: StepProgress | None
    ) -> None:
        """Compute the gradients of inputs and weights; that which has to travel first, to be on its way meanwhile."""
        split = self.splits[layer]
        if layer and split.kind == "columns":
            assert self._exchange is not None
            self._input_gradient(layer, space, progress)
            pending = self._exchange.start_sum(space[layer - 1].delta)
            self._weight_gradient(layer, x, space, progress)
            pending.wait()
        elif progress is not None:
            self._weight_gradient(layer, x, space, progress)
            self._input_gradient(layer, space, progress)
        else:
            self._input_gradient(layer, space, progress)
            self._weight_gradient(layer, x, space, progress)
        if layer:
            below, split = space[layer - 1], self.splits[layer - 1]
            own = slice(*split.outputs) if split.gathered else slice(None)
            arrays = below.delta_mine, below.mine, below.mask[own], below.scratch[own]
            for rows in self._row_blocks(arrays[0]):
                self._derive(*(array[rows] for array in arrays))

    def _input_gradient(self, layer: int, space: list[LayerArrays], progress: StepProgress | None) -> None:
        if layer:
            _multiply(self.parameters[2 * layer].T, space[layer].delta_mine, space[layer - 1].delta, progress)

    def _weight_gradient(
        self, layer: int, x: np.ndarray, space: list[LayerArrays], progress: StepProgress | None
    ) -> None:
        delta = space[layer].delta_mine
        _multiply(delta, x.T, self.gradients[2 * layer], progress)
        delta.sum(axis=1, out=self.gradients[2 * layer + 1])
        if progress is not None:
            progress.gradient(layer)

    def _row_blocks(self, array: np.ndarray) -> list[slice]:
        """Return blocks of rows that stay in a core's cache from one function to the next; a GPU takes all at once."""
        rows, columns = array.shape
        block = max(1, _CACHED_BYTES // max(1, columns * self.dtype.itemsize)) if self.xp is np else max(1, rows)
        return [slice(start, start + block) for start in range(0, rows, block)]


def _multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray, progress: StepProgress | None) -> None:
    """Compute out = a @ b; with `progress` in blocks of rows, between which messages are moved on."""
    if progress is None:
        np.matmul(a, b, out=out)
        return
    rows = max(_FEWEST_BLOCK_ROWS, int(_BLOCK_FLOPS / (2 * max(1, b.size))))
    for start in range(0, len(a), rows):
        np.matmul(a[start : start + rows], b, out=out[start : start + rows])
        progress.poll()
