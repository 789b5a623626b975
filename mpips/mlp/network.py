"""One rank's slice of a multi-layer perceptron: the layers cut by columns or rows, and a training step on the slice.

A network is cut into parts, one for each of the ranks that share a model. The number of a rank's part is its model
index on the mesh. A layer is cut in one of three ways, called its kind:

- ``columns``: a rank holds some outputs of the layer (rows of its matrix). The rank needs all inputs. The outputs are
  gathered, and the gradient of the inputs is summed over the ranks (the paper's Algorithm 2).
- ``rows``: a rank holds some inputs of the layer: exactly the outputs that it computed in the layer before. That layer
  before must be cut by columns, and its outputs are then not gathered. The outputs of the layer cut by rows are summed
  over the ranks. This layer sends nothing in the backward pass.
- ``whole``: every rank holds and computes the whole layer, and nothing is sent.

Arrays are (neurons, samples), as in the paper, which writes X_l in R^{d_l x B}. So a slice of neurons is one contiguous
block: a layer writes its slice straight into the gathered array, and no collective needs a copy.

This module does not call MPI. `ModelExchange` is the interface to the exchanges that it needs with the other ranks.
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
# with fewer outputs per rank, gathering the last layer takes longer than computing all of it on every rank
_FEWEST_OUTPUTS_PER_RANK = 8
# random numbers drawn at a time; a rank also draws numbers of other ranks' slices, and this bounds their memory
_DRAWN_ELEMENTS = 1 << 20
# floating-point operations between two polls of the messages in flight: about 0.3 ms on one core
_BLOCK_FLOPS = 3e7
# size in bytes of a block that several functions process in turn: half of the cache that a core usually has for itself
_CACHED_BYTES = 512 << 10
# fewest rows of a block in a matrix product; smaller products lose speed
_FEWEST_BLOCK_ROWS = 64

# a function that is called with the number of a layer, from 0
LayerHook = Callable[[int], object]
# empty(count, dtype) -> 1-D array of `count` elements
Empty = Callable[[int, np.dtype], np.ndarray]


class Specification(NamedTuple):
    """The description of a network. Two networks of one specification start from the same weights."""

    # inputs, hidden widths, outputs
    sizes: tuple[int, ...]
    # a key of ACTIVATIONS
    activation: str
    # a key of LOSSES
    loss: str
    # "float32", "float64", or "mixed". In "mixed", weights, sums and optimizer state are float32, but messages between
    # nodes are float16, with a loss scale (Micikevicius et al., Mixed precision training, 2018).
    dtype: str
    # the seed of the first weights
    seed: int


def check(specification: Specification) -> None:
    """Raise ValueError unless a network of this specification can be made. The message names the argument."""
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
    """Return the NumPy dtype of weights, activations and data. `dtype` is the dtype of a `Specification`."""
    return np.dtype("float32" if dtype == "mixed" else dtype)


# ---- how layers are cut


class Split(NamedTuple):
    """One rank's part of a layer."""

    # "columns", "rows" or "whole"
    kind: str
    # intervals [start, stop) of the outputs and inputs whose weights the rank holds
    outputs: tuple[int, int]
    inputs: tuple[int, int]
    # True if the outputs of all ranks are gathered, because the next layer needs them; only for "columns"
    gathered: bool


def interval(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return [start, stop) of slice `part` when `count` items are cut into `parts` slices.

    Lengths differ by at most one, and longer slices come first.
    """
    return cut(count, parts, part), cut(count, parts, part + 1)


def kinds(sizes: Sequence[int], parts: int, mode: str = "pairs") -> list[str]:
    """Return the kind of each layer when a network is cut among `parts` ranks.

    Mode "columns" cuts every layer by columns, as the paper does. Mode "pairs" cuts layers by columns and rows in turn,
    so that a pair of layers needs one sum in the forward pass. If the number of layers is odd, the last layer is in no
    pair; it is whole if it has few outputs.
    """
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
    """Return the slice of each layer that rank `part` of `parts` holds. `sizes` are the sizes of a `Specification`."""
    chosen = kinds(sizes, parts, mode)
    result = []
    for kind, following, columns, rows in zip(chosen, [*chosen[1:], ""], sizes, sizes[1:]):
        outputs = interval(rows, parts, part) if kind == "columns" else (0, rows)
        inputs = interval(columns, parts, part) if kind == "rows" else (0, columns)
        result.append(Split(kind, outputs, inputs, gathered=kind == "columns" and following != "rows"))
    return result


def largest_slice(sizes: Sequence[int], model: int, mode: str = "pairs") -> list[int]:
    """Return the number of parameters of each layer in part 0, which is the largest part."""
    return [
        (outputs[1] - outputs[0]) * (inputs[1] - inputs[0] + 1)
        for _, outputs, inputs, _ in splits(sizes, model, 0, mode)
    ]


def draw_weight(out: np.ndarray, specification: Specification, layer: int, first_row: int, first_column: int) -> None:
    """Draw the first weights of a slice of a layer's matrix. Local. Every way to cut the network gives equal weights.

    Element (r, c) of layer l is number ``r * columns + c`` of the random stream seeded by (seed, l), drawn uniformly in
    float64. The variance is as in He et al. (2015) before a ReLU, and 1/fan-in otherwise. A rank that holds a slice
    jumps to the slice's place in the stream. So every mesh starts from the same matrices, and no matrix is sent. (In
    the paper the model ranks drew unrelated slices.)

    Args:
        out: (rows, width), filled with the slice.
        layer: From 0.
        first_row: Row of the whole matrix at which the slice begins.
        first_column: Column of the whole matrix at which the slice begins.
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


# ---- activations and losses


def _relu_backward(delta: np.ndarray, y: np.ndarray, mask: np.ndarray, scratch: np.ndarray) -> None:
    np.greater(y, 0, out=mask)
    np.multiply(delta, mask, out=delta)


def _tanh_backward(delta: np.ndarray, y: np.ndarray, mask: np.ndarray, scratch: np.ndarray) -> None:
    np.square(y, out=scratch)
    np.subtract(1, scratch, out=scratch)
    np.multiply(delta, scratch, out=delta)


# name -> (forward, backward), both in place
# forward(z) replaces z by its activation. backward(delta, y, mask, scratch) multiplies delta by the derivative at the
# activation y, and may overwrite mask and scratch.
ACTIVATIONS = {
    "relu": (lambda z: np.maximum(z, 0, out=z), _relu_backward),
    "tanh": (lambda z: np.tanh(z, out=z), _tanh_backward),
}


def _l2(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: ModuleType
) -> float:
    """Return the sum over samples of ``1/2 |output - target|^2``.

    Args:
        output: (outputs, samples).
        target: (samples, outputs), or (samples,) if there is one output.
        delta: Overwritten with the gradient of the sum, times `scale`.
        scratch: Overwritten.
        xp: The array module of all arrays.
    """
    np.subtract(output, target.reshape(output.shape[::-1]).T, out=delta)
    np.square(delta, out=scratch)
    total = 0.5 * float(scratch.sum(dtype=np.float64))
    np.multiply(delta, delta.dtype.type(scale), out=delta)
    return total


def _softmax(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: ModuleType
) -> float:
    """Return the sum over samples of the cross-entropy ``-log softmax(output)[target]``.

    `target` holds class numbers, (samples,). The other arguments are as in `_l2`.
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


# name -> function of the loss; "softmax" takes class numbers, "l2" takes targets
LOSSES = {"l2": _l2, "softmax": _softmax}


# ---- one rank's slice


class ModelExchange(Protocol):
    """The exchanges between the ranks that share one model. All calls are collective over these ranks."""

    # the number of ranks that share the model, and this rank's number among them
    parts: int
    part: int

    def gather(self, full: np.ndarray) -> None:
        """Complete `full`, (neurons, samples), in which every rank has written its `interval` of rows. Blocking."""

    def sum(self, array: np.ndarray) -> None:
        """Replace an array of the forward pass by its sum over the ranks, in place. Blocking."""

    def start_sum(self, array: np.ndarray) -> None:
        """Begin to replace an array of the backward pass by its sum. Leave the array alone until `wait` returns."""

    def wait(self) -> None:
        """Wait until the array given to `start_sum` holds the sum."""


class StepProgress(Protocol):
    """Sends gradients during the backward pass."""

    def gradient(self, layer: int) -> None:
        """Called when the gradients of a layer are complete. The step may still read the layer's parameters."""

    def poll(self) -> None:
        """Progress the messages in flight. Called several times a millisecond."""


class LayerArrays(NamedTuple):
    """The arrays of a layer, each (neurons, samples), for a given number of samples."""

    # the layer's outputs, and a view of the rows that this rank computes
    full: np.ndarray
    own: np.ndarray
    # gradients of the outputs, and a view of this rank's rows
    delta: np.ndarray
    delta_own: np.ndarray
    # working memory of losses and of the activation's derivative; `mask` has bools
    mask: np.ndarray
    scratch: np.ndarray


class Network:
    """One rank's slice of a network.

    `parameters` and `gradients` are lists of views (weight (outputs, inputs), bias (outputs,), weight, ...) into
    `flat_parameters` and `flat_gradients`, so that one allreduce and one optimizer call serve all layers. The first
    weights depend only on the specification, not on how the network is cut.

    Args:
        exchange: Exchanges with the other ranks of the model. None: this rank holds the whole network.
        mode: How the layers are cut, see `kinds`.
        empty: Allocates the arrays that other ranks read (gradients and activations). Give `np.empty`, or a function
            that allocates memory shared by the ranks of a node. Used with NumPy only.
        xp: The array module of all arrays: NumPy or CuPy. NumPy's functions also work on arrays of CuPy.
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
        self.specification = specification
        self.mode = mode
        self.xp = xp
        self._exchange = exchange
        self.sizes = specification.sizes
        self.dtype = working_dtype(specification.dtype)
        self.parts, part = (1, 0) if exchange is None else (exchange.parts, exchange.part)
        self.splits = splits(self.sizes, self.parts, part, mode)
        self._activate, self._derive = ACTIVATIONS[specification.activation]
        self._loss = LOSSES[specification.loss]
        self._empty = empty if xp is np else xp.empty
        self._shapes: list[tuple[int, ...]] = []
        # for each layer the number of outputs that this rank keeps: all, unless the next layer needs only its own part
        self._neurons: list[int] = []
        for size, (kind, outputs, inputs, gathered) in zip(self.sizes[1:], self.splits):
            rows = outputs[1] - outputs[0]
            self._shapes += [(rows, inputs[1] - inputs[0]), (rows,)]
            self._neurons.append(size if kind != "columns" or gathered else rows)
        elements = [int(np.prod(shape)) for shape in self._shapes]
        # number of this rank's parameters of each layer; layers follow one another in the flat arrays
        self.layer_elements = [weight + bias for weight, bias in zip(elements[::2], elements[1::2])]
        self.flat_parameters = xp.empty(sum(elements), self.dtype)
        self.flat_gradients = self._empty(sum(elements), self.dtype)
        self.parameters = self.views(self.flat_parameters)
        self.gradients = self.views(self.flat_gradients)
        # `_blocks` is the memory of each layer for `_capacity` samples, the largest number of samples in a step so far.
        self._capacity = -1
        self._blocks: list[tuple[np.ndarray, ...]] = []
        # number of samples in a step -> views of `_blocks` for that many samples
        self._spaces: dict[int, list[LayerArrays]] = {}
        for layer, split in enumerate(self.splits):
            weight = self.parameters[2 * layer]
            # Weights for a GPU are drawn on the host and then copied to the GPU.
            drawn = weight if xp is np else np.empty(weight.shape, self.dtype)
            draw_weight(drawn, specification, layer, split.outputs[0], split.inputs[0])
            if drawn is not weight:
                weight[...] = xp.asarray(drawn)
            self.parameters[2 * layer + 1][...] = 0

    def views(self, flat: np.ndarray) -> list[np.ndarray]:
        """Return views (weight, bias, weight, ...) of an array laid out as `flat_parameters`, e.g. optimizer state."""
        views, offset = [], 0
        for shape in self._shapes:
            count = int(np.prod(shape))
            views.append(flat[offset : offset + count].reshape(shape))
            offset += count
        return views

    def copy_slices(self, parameters: Sequence[np.ndarray]) -> None:
        """Copy this rank's slice of the whole network's `parameters`."""
        for layer, split in enumerate(self.splits):
            rows, columns = slice(*split.outputs), slice(*split.inputs)
            self.parameters[2 * layer][...] = self.xp.asarray(parameters[2 * layer][rows, columns])
            self.parameters[2 * layer + 1][...] = self.xp.asarray(parameters[2 * layer + 1][rows])

    def _arrays(self, samples: int) -> list[LayerArrays]:
        """Return each layer's arrays for a step of `samples` samples. Allocate memory if no step was this large yet."""
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
        """Return the outputs, (outputs, samples), of `x`, (samples, features). The next step overwrites the outputs.

        `before` is called with each layer's number before the layer's parameters are used.
        """
        y = x.T
        for layer, (split, space) in enumerate(zip(self.splits, self._arrays(x.shape[0]))):
            if before is not None:
                before(layer)
            np.matmul(self.parameters[2 * layer], y, out=space.own)
            if split.kind == "rows":
                assert self._exchange is not None
                self._exchange.sum(space.own)
            bias, hidden = self.parameters[2 * layer + 1][:, None], layer + 1 < len(self.splits)
            for rows in self._row_blocks(space.own):
                part = space.own[rows]
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
        """Run the forward and backward pass on this rank's part of a minibatch. Return the *sum* of its losses.

        The function that is differentiated is the sum of the losses divided by `samples`. If `samples` is the size of
        the whole minibatch, summing the gradients over the batch ranks gives the gradient of the mean loss.

        Args:
            x: (part, features).
            y: (part, outputs) or (part,).
            samples: The divisor of the gradients, see above.
            before: Called before a layer's parameters are first used.
            ready: Called when a layer's gradients are complete and its parameters are no longer needed.
            progress: Sends messages during the backward pass.
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
        """Return the sum of the losses of (x, y), and the number of samples classified correctly (0 for "l2")."""
        output, space = self.forward(x), self._arrays(len(x))[-1]
        right = float((output.argmax(axis=0) == y).sum()) if self.specification.loss == "softmax" else 0.0
        return self._loss(output, y, space.delta, space.scratch, 1.0, self.xp), right

    def _backward_layer(
        self, layer: int, x: np.ndarray, space: list[LayerArrays], progress: StepProgress | None
    ) -> None:
        """Compute the gradients of a layer's inputs and weights.

        The gradient that has to be sent is computed first, so that it travels while the other gradient is computed.
        """
        # Between model ranks, the input gradient of a layer cut by columns is summed. Between batch ranks, weight
        # gradients are summed. Weight gradients are sent now if there is a `progress`, and later otherwise.
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
            for rows in self._row_blocks(below.delta_own):
                self._derive(below.delta_own[rows], below.own[rows], below.mask[rows], scratch[rows])

    def _input_gradient(self, layer: int, space: list[LayerArrays], progress: StepProgress | None) -> None:
        if layer:
            _multiply(self.parameters[2 * layer].T, space[layer].delta_own, space[layer - 1].delta, progress)

    def _weight_gradient(
        self, layer: int, x: np.ndarray, space: list[LayerArrays], progress: StepProgress | None
    ) -> None:
        delta = space[layer].delta_own
        _multiply(delta, x.T, self.gradients[2 * layer], progress)
        delta.sum(axis=1, out=self.gradients[2 * layer + 1])
        if progress is not None:
            progress.gradient(layer)

    def _row_blocks(self, array: np.ndarray) -> list[slice]:
        """Cut the rows into blocks that stay in a core's cache from one function to the next. A GPU gets one block."""
        rows, columns = array.shape
        block = max(1, _CACHED_BYTES // max(1, columns * self.dtype.itemsize)) if self.xp is np else max(1, rows)
        return [slice(start, start + block) for start in range(0, rows, block)]


def _multiply(a: np.ndarray, b: np.ndarray, out: np.ndarray, progress: StepProgress | None) -> None:
    """Compute out = a @ b. With `progress`, compute it in blocks of rows and poll messages in between."""
    if progress is None:
        np.matmul(a, b, out=out)
        return
    # 2 * b.size flops a row
    rows = max(_FEWEST_BLOCK_ROWS, int(_BLOCK_FLOPS / (2 * max(1, b.size))))
    for start in range(0, len(a), rows):
        np.matmul(a[start : start + rows], b, out=out[start : start + rows])
        progress.poll()
