"""A rank's slice of a multi-layer perceptron: the columns or rows of each layer in one part, and a step on them.

A layer's kind says which rank of a model (`part`, its model index on the mesh) holds what of it:

- ``columns``: a rank holds some outputs of the layer (rows of its matrix). The inputs must be whole; the outputs
  are gathered, and the gradient of the inputs is summed over the ranks (the paper's Algorithm 2).
- ``rows``: a rank holds some inputs, exactly the outputs that it computed in the layer before, which must be cut
  by columns and is then not gathered. The outputs are summed over the ranks; backward nothing moves.
- ``whole``: every rank holds and computes the whole layer; nothing moves.

Everything is column-wise, (neurons, samples), as in the paper, which writes X_l in R^{d_l x B}. So a slice of neurons
is one contiguous block: a layer writes its slice straight into the gathered array, and no collective ever needs a copy.
No MPI in here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple, Protocol

import numpy as np

from mpips.collectives.errors import did_you_mean
from mpips.collectives.kernels.quiet import quiet
from mpips.collectives.schedule.model import cut

DTYPES = ("float32", "float64", "mixed")
MODES = ("pairs", "columns")
_FEWEST_OUTPUTS_PER_RANK = 8  # below this a gather's latency costs more than computing a last layer on every rank
_DRAWN_ELEMENTS = 1 << 20
_BLOCK_FLOPS = 3e7  # some 0.3 ms of a core: so often messages are moved on
_CACHED_BYTES = 512 << 10  # of an array that is passed over more than once, half of a usual core's own cache
_FEWEST_BLOCK_ROWS = 64  # below, a matrix product loses speed

LayerHook = Callable[[int], object]
"""Called with the number of a layer, from 0."""
Empty = Callable[[int, np.dtype], np.ndarray]
"""`empty(count, dtype)`: memory for that many elements."""


class Specification(NamedTuple):
    """Sizes are inputs, hidden widths, outputs; the seed fixes the weights.

    dtype: "float32", "float64", or "mixed": float32 weights, sums and state, while what ranks send each other between
    nodes is float16, under a loss scale (Micikevicius et al., Mixed precision training, 2018).
    """

    sizes: tuple[int, ...]
    activation: str
    loss: str
    dtype: str
    seed: int


def check(specification: Specification) -> None:
    """Raise ValueError, naming the argument and the choices, unless such a network can be made."""
    sizes, activation, loss, dtype, _ = specification
    if len(sizes) < 2 or any(size < 1 for size in sizes):
        raise ValueError(f"sizes {list(sizes)} must be inputs, hidden widths, outputs: at least two, all at least 1")
    for value, known, what in ((activation, ACTIVATIONS, "activation"), (loss, LOSSES, "loss")):
        if value not in known:
            perhaps = did_you_mean(value, known)
            raise ValueError(f"{what} {value!r} is unknown{perhaps}; choose one of {', '.join(known)}")
    if str(dtype) not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")


def working_dtype(dtype: str) -> np.dtype:
    """Return the dtype of weights, activations and data in a network of this `dtype`."""
    return np.dtype("float32" if dtype == "mixed" else dtype)


# ---- how layers are cut


class Split(NamedTuple):
    """One rank's part of a layer: its kind and the intervals of outputs and inputs whose weights it holds."""

    kind: str
    outputs: tuple[int, int]
    inputs: tuple[int, int]
    gathered: bool  # columns only: whether the next layer needs the outputs of all ranks


def interval(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return [start, stop) of one of `parts` slices of `count` items: lengths differ by one at most, longer first."""
    return cut(count, parts, part), cut(count, parts, part + 1)


def kinds(sizes: Sequence[int], parts: int, mode: str = "pairs") -> list[str]:
    """Return the kind of every layer: the paper's ("columns"), or pairs of columns and rows, with one sum a pair."""
    layers = len(sizes) - 1
    if mode not in MODES:
        raise ValueError(f"split mode {mode!r} is unknown; choose one of {', '.join(MODES)}")
    if parts == 1:
        return ["whole"] * layers
    if mode == "columns":
        return ["columns"] * layers
    chosen = ["columns" if layer % 2 == 0 else "rows" for layer in range(layers)]
    if layers % 2 and sizes[-1] < parts * _FEWEST_OUTPUTS_PER_RANK:
        chosen[-1] = "whole"
    return chosen


def splits(sizes: Sequence[int], parts: int, part: int, mode: str = "pairs") -> list[Split]:
    """Return what rank `part` of `parts` holds of each layer of a network of these sizes (inputs first)."""
    chosen = kinds(sizes, parts, mode)
    result = []
    for kind, following, columns, rows in zip(chosen, [*chosen[1:], ""], sizes, sizes[1:]):
        outputs = interval(rows, parts, part) if kind == "columns" else (0, rows)
        inputs = interval(columns, parts, part) if kind == "rows" else (0, columns)
        result.append(Split(kind, outputs, inputs, gathered=kind == "columns" and following != "rows"))
    return result


def largest_slice(sizes: Sequence[int], model: int, mode: str = "pairs") -> list[int]:
    """Return the parameters of each layer on the rank that holds the most (part 0)."""
    return [
        (outputs[1] - outputs[0]) * (inputs[1] - inputs[0] + 1)
        for _, outputs, inputs, _ in splits(sizes, model, 0, mode)
    ]


def draw_weight(out: np.ndarray, specification: Specification, layer: int, first_row: int, first_column: int) -> None:
    """Fill `out` (rows, width) with the slice at (first_row, first_column) of a layer's first matrix.

    Element (r, c) of layer l is number ``r * columns + c`` of the random stream seeded by (seed, l), drawn uniformly
    in float64: He et al. (2015) before a ReLU, variance 1/fan-in otherwise. A rank that holds a slice jumps to it. So
    every mesh starts from the same matrices without sending any (the paper's model ranks drew unrelated slices).
    """
    (rows, width), columns = out.shape, specification.sizes[layer]
    if not rows or not width:
        return
    relu = specification.activation == "relu" and layer + 2 < len(specification.sizes)
    half_width = math.sqrt((6.0 if relu else 3.0) / columns)
    block = max(1, _DRAWN_ELEMENTS // columns)
    bits = np.random.PCG64(np.random.SeedSequence([specification.seed, layer]))
    bits.advance(first_row * columns)
    generator = np.random.Generator(bits)
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        values = generator.random((stop - start, columns))[:, first_column : first_column + width]
        out[start:stop] = half_width * (2.0 * values - 1.0)


# ---- activations, in place: z becomes its activation; delta is multiplied by the derivative at y. Losses


def _relu_backward(delta: np.ndarray, y: np.ndarray, mask: np.ndarray, scratch: np.ndarray) -> None:
    np.greater(y, 0, out=mask)
    np.multiply(delta, mask, out=delta)


def _tanh_backward(delta: np.ndarray, y: np.ndarray, mask: np.ndarray, scratch: np.ndarray) -> None:
    np.square(y, out=scratch)
    np.subtract(1, scratch, out=scratch)
    np.multiply(delta, scratch, out=delta)


ACTIVATIONS = {
    "relu": (lambda z: np.maximum(z, 0, out=z), _relu_backward),
    "tanh": (lambda z: np.tanh(z, out=z), _tanh_backward),
}
"""Forward and backward by name."""


def _l2(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: ModuleType
) -> float:
    """Return the sum over samples of ``1/2 |output - target|^2``; `delta` becomes its gradient times `scale`.

    `target` is (samples, outputs) or, with one output, (samples,); `scratch` is overwritten.
    """
    np.subtract(output, target.reshape(output.shape[::-1]).T, out=delta)
    np.square(delta, out=scratch)
    total = 0.5 * float(scratch.sum(dtype=np.float64))
    np.multiply(delta, delta.dtype.type(scale), out=delta)
    return total


def _softmax(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: ModuleType
) -> float:
    """Return the sum over samples of the cross-entropy ``-log softmax(output)[target]``, as `_l2` does.

    `target` is (samples,) of class numbers; `xp` is the array module of all arrays.
    """
    samples = xp.arange(output.shape[1])
    np.subtract(output, output.max(axis=0, keepdims=True) if output.size else 0, out=scratch)
    np.exp(scratch, out=delta)
    sums = delta.sum(axis=0)
    total = float((np.log(sums) - scratch[target, samples]).sum(dtype=np.float64))
    np.divide(delta, sums, out=delta)
    delta[target, samples] -= 1
    np.multiply(delta, delta.dtype.type(scale), out=delta)
    return total


LOSSES = {"l2": _l2, "softmax": _softmax}
"""Softmax takes class numbers, l2 takes targets."""


# ---- one rank's slice


class ModelExchange(Protocol):
    """Exchanges between the ranks that share one model."""

    parts: int
    part: int

    def gather(self, full: np.ndarray) -> None:
        """Fill (neurons, samples): every rank has written its `interval` of rows and receives the others'."""

    def sum(self, array: np.ndarray) -> None:
        """Replace a forward array by its sum over the ranks."""

    def start_sum(self, array: np.ndarray) -> None:
        """Begin to replace a backward array by its sum over the ranks; it may not be touched before `wait`."""

    def wait(self) -> None:
        """Wait until the array holds the sum that was begun."""


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


class Network:
    """The layers of one rank, cut as `mode` says among the ranks of `exchange` (None: they are whole).

    `parameters` and `gradients` are views (weight (outputs, inputs), bias (outputs,), weight, ...) of `flat_parameters`
    and `flat_gradients`, so that one allreduce and one optimizer call serve all layers. `empty(count, dtype)` gives the
    memory for what other ranks read (gradients, activations): NumPy's own, or memory that ranks of a node share. The
    weights are those of the specification's seed, however the network is cut. `xp` is the array module that holds and
    computes everything: NumPy, or CuPy, whose arrays NumPy's functions pass on to it.
    """

    def __init__(
        self,
        specification: Specification,
        exchange: ModelExchange | None = None,
        mode: str = "pairs",
        empty: Empty = np.empty,
        xp: ModuleType = np,
    ) -> None:
        check(specification)
        self.specification, self.mode, self.xp, self._exchange = specification, mode, xp, exchange
        self.sizes, self.dtype = specification.sizes, working_dtype(specification.dtype)
        self.parts, part = (1, 0) if exchange is None else (exchange.parts, exchange.part)
        self.splits = splits(self.sizes, self.parts, part, mode)
        self._activate, self._derive = ACTIVATIONS[specification.activation]
        self._loss = LOSSES[specification.loss]
        self._empty = empty if xp is np else xp.empty
        self._shapes: list[tuple[int, ...]] = []
        self._neurons: list[int] = []
        """Neurons of each layer whose outputs this rank keeps: all, unless the next layer wants only its own."""
        for size, (kind, outputs, inputs, gathered) in zip(self.sizes[1:], self.splits):
            rows = outputs[1] - outputs[0]
            self._shapes += [(rows, inputs[1] - inputs[0]), (rows,)]
            self._neurons.append(size if kind != "columns" or gathered else rows)
        elements = [int(np.prod(shape)) for shape in self._shapes]
        self.layer_elements = [weight + bias for weight, bias in zip(elements[::2], elements[1::2])]
        """This rank's parameters of each layer; layers lie one after the other in the flat arrays."""
        self.flat_parameters = xp.empty(sum(elements), self.dtype)
        self.flat_gradients = self._empty(sum(elements), self.dtype)
        self.parameters, self.gradients = self.views(self.flat_parameters), self.views(self.flat_gradients)
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

    def views(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return views of an array laid out as the flat parameters (an optimizer's state): weight, bias, weight, ..."""
        views, offset = [], 0
        for shape in self._shapes:
            count = int(np.prod(shape))
            views.append(flat[offset : offset + count].reshape(shape))
            offset += count
        return views

    def copy_slices(self, parameters: Sequence[np.ndarray]) -> None:
        """Copy this rank's slices from the parameters of the whole network."""
        for layer, split in enumerate(self.splits):
            rows, columns = slice(*split.outputs), slice(*split.inputs)
            self.parameters[2 * layer][...] = self.xp.asarray(parameters[2 * layer][rows, columns])
            self.parameters[2 * layer + 1][...] = self.xp.asarray(parameters[2 * layer + 1][rows])

    def _arrays(self, samples: int) -> list[LayerArrays]:
        """Return each layer's arrays for a step of `samples` samples: views of memory for the most samples so far."""
        if samples in self._spaces:
            return self._spaces[samples]
        if samples > self._capacity:
            self._capacity = samples
            self._spaces.clear()
            self._blocks.clear()
            for neurons in self._neurons:
                count = samples * neurons
                arrays = self._empty(count, self.dtype), self._empty(count, self.dtype)
                self._blocks.append((*arrays, self.xp.empty(count, bool), self.xp.empty(count, self.dtype)))
        space = self._spaces[samples] = []
        for neurons, split, blocks in zip(self._neurons, self.splits, self._blocks):
            full, delta, mask, scratch = (block[: neurons * samples].reshape(neurons, samples) for block in blocks)
            own = slice(*split.outputs) if split.gathered else slice(None)
            space.append(LayerArrays(full, full[own], delta, delta[own], mask[own], scratch))
        return space

    # -- computation

    @quiet
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

    @quiet
    def step(
        self,
        x: np.ndarray,
        y: np.ndarray,
        samples: float,
        before: LayerHook | None = None,
        ready: LayerHook | None = None,
        progress: StepProgress | None = None,
    ) -> float:
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

    @quiet
    def evaluate(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """Return the sum of the losses of (x, y), and the samples with their largest output at class y (l2: 0)."""
        output, space = self.forward(x), self._arrays(len(x))[-1]
        right = float((output.argmax(axis=0) == y).sum()) if self.specification.loss == "softmax" else 0.0
        return self._loss(output, y, space.delta, space.scratch, 1.0, self.xp), right

    def _backward_layer(
        self, layer: int, x: np.ndarray, space: list[LayerArrays], progress: StepProgress | None
    ) -> None:
        """Compute the gradients of inputs and weights; that which has to travel first, to be on its way meanwhile."""
        if layer and self.splits[layer].kind == "columns":
            assert self._exchange is not None
            self._input_gradient(layer, space, progress)
            self._exchange.start_sum(space[layer - 1].delta)
            self._weight_gradient(layer, x, space, progress)
            self._exchange.wait()
        elif progress is not None:
            self._weight_gradient(layer, x, space, progress)
            self._input_gradient(layer, space, progress)
        else:
            self._input_gradient(layer, space, progress)
            self._weight_gradient(layer, x, space, progress)
        if layer:
            below, split = space[layer - 1], self.splits[layer - 1]
            scratch = below.scratch[slice(*split.outputs) if split.gathered else slice(None)]
            for rows in self._row_blocks(below.delta_mine):
                self._derive(below.delta_mine[rows], below.mine[rows], below.mask[rows], scratch[rows])

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
        """Return blocks of rows that stay in a core's cache between functions; for a GPU one block."""
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
