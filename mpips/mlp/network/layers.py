"""What a network is: sizes, activation, loss, dtype and seed, whoever holds it.

Activations and losses: what they compute in place, and their derivatives.

Everything is column-wise, (neurons, samples), as everything inside a network (the paper writes X_l in R^{d_l x B}).

Balanced half-open intervals: who holds which rows, columns and samples.

Which rank of a mesh holds which rows and columns of each layer: by its model index, rank % model (`mesh`).

- ``columns``: a rank holds some outputs of the layer (rows of its matrix). The inputs must be whole; the outputs
  are gathered, and the gradient of the inputs is summed over the ranks (the paper's Algorithm 2).
- ``rows``: a rank holds some inputs, exactly the outputs that it computed in the layer before, which must be cut
  by columns and is then not gathered. The outputs are summed over the ranks; backward nothing moves.
- ``whole``: every rank holds and computes the whole layer; nothing moves.

First weights, drawn by the seed, that do not depend on how the network is cut.

Element (r, c) of layer l is number ``r * columns + c`` of the random stream seeded by (seed, l). A rank that holds
a slice jumps to it, so every device mesh starts from the same matrices without sending any (the batch ranks of
the paper "share a layer's seed"; its model ranks drew unrelated slices, ours draw slices of one matrix).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

DTYPES = ("float32", "float64", "mixed")


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


def working_dtype(dtype: str) -> np.dtype:
    """The dtype of weights, activations and data in a network of this `dtype`."""
    return np.dtype("float32" if dtype == "mixed" else dtype)


def check(specification: Specification) -> None:
    """Raise ValueError, naming the argument and the choices, unless such a network can be made."""
    sizes, activation, loss, dtype, _ = specification
    if len(sizes) < 2 or any(size < 1 for size in sizes):
        raise ValueError(f"sizes {list(sizes)} must be inputs, hidden widths, outputs: at least two, all at least 1")
    for value, known, what in ((activation, ACTIVATIONS, "activation"), (loss, LOSSES, "loss")):
        if value not in known:
            raise ValueError(f"{what} {value!r} is unknown; choose one of {', '.join(known)}")
    if str(dtype) not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")


class Activation(NamedTuple):
    """`apply(z)` overwrites z with its activation; `backward(delta, y, mask, scratch)` multiplies delta
    by the derivative at y.
    """

    apply: Callable[[np.ndarray], None]
    backward: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def _relu(z: np.ndarray) -> None:
    np.maximum(z, 0, out=z)


def _relu_backward(delta: np.ndarray, y: np.ndarray, mask: np.ndarray, scratch: np.ndarray) -> None:
    np.greater(y, 0, out=mask)
    np.multiply(delta, mask, out=delta)


def _tanh(z: np.ndarray) -> None:
    np.tanh(z, out=z)


def _tanh_backward(delta: np.ndarray, y: np.ndarray, mask: np.ndarray, scratch: np.ndarray) -> None:
    np.square(y, out=scratch)
    np.subtract(1, scratch, out=scratch)
    np.multiply(delta, scratch, out=delta)


ACTIVATIONS = {"relu": Activation(_relu, _relu_backward), "tanh": Activation(_tanh, _tanh_backward)}


def l2(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: Any = np
) -> float:
    """Sum over samples of ``1/2 |output - target|^2``; `delta` becomes its gradient times `scale`.

    `target` is (samples, outputs) or, with one output, (samples,); `scratch` is overwritten.
    """
    np.subtract(output, target.reshape(output.shape[::-1]).T, out=delta)
    np.square(delta, out=scratch)
    total = 0.5 * float(scratch.sum(dtype=np.float64))
    np.multiply(delta, delta.dtype.type(scale), out=delta)
    return total


def softmax(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: Any = np
) -> float:
    """Sum over samples of the cross-entropy ``-log softmax(output)[target]``; `delta` becomes its gradient times
    `scale`.

    `target` is (samples,) of class numbers; `scratch` is overwritten; `xp` is the array module of all of them.
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


class Loss(NamedTuple):
    """A loss by name, and whether its targets are class numbers."""

    function: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, Any], float]
    classes: bool


LOSSES = {"l2": Loss(l2, classes=False), "softmax": Loss(softmax, classes=True)}


def interval(count: int, parts: int, index: int) -> tuple[int, int]:
    """Slice `index` of `count` items cut into `parts` contiguous slices whose lengths differ by at most one.

    The first ``count % parts`` slices are the longer ones; with fewer items than parts the last slices are empty.
    """
    if not 0 <= index < parts:
        raise ValueError(f"slice {index} of {parts} parts does not exist")
    short, longer = divmod(count, parts)
    start = index * short + min(index, longer)
    return start, start + short + (index < longer)


def intervals(count: int, parts: int) -> list[tuple[int, int]]:
    """All slices of `count` items cut into `parts`, in order."""
    return [interval(count, parts, index) for index in range(parts)]


MODES = ("pairs", "columns")
_FEWEST_OUTPUTS_PER_RANK = 8  # below this a gather's latency costs more than computing a last layer on every rank


class Split(NamedTuple):
    """One rank's part of a layer: its kind and the intervals of outputs and inputs whose weights it holds."""

    kind: str
    outputs: tuple[int, int]
    inputs: tuple[int, int]
    gathered: bool  # columns only: whether the next layer needs the outputs of all ranks


def kinds(sizes: Sequence[int], parts: int, mode: str = "pairs") -> list[str]:
    """The kind of every layer: the paper's ("columns"), or pairs of columns and rows, which need one allreduce a
    pair."""
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
    """What rank `part` of `parts` holds of each layer of a network with these sizes (inputs first, outputs last)."""
    chosen = kinds(sizes, parts, mode)
    result = []
    for layer, kind in enumerate(chosen):
        rows, columns = sizes[layer + 1], sizes[layer]
        outputs = interval(rows, parts, part) if kind == "columns" else (0, rows)
        inputs = interval(columns, parts, part) if kind == "rows" else (0, columns)
        followed = layer + 1 < len(chosen) and chosen[layer + 1] == "rows"
        result.append(Split(kind, outputs, inputs, gathered=kind == "columns" and not followed))
    return result


_BLOCK_ELEMENTS = 1 << 20


def bound(activation: str, columns: int) -> float:
    """Half-width of the uniform distribution: He et al. (2015) before a ReLU, variance 1/fan-in otherwise."""
    return math.sqrt((6.0 if activation == "relu" else 3.0) / columns)


def draw(
    out: np.ndarray,
    seed: int,
    layer: int,
    columns: int,
    first_row: int = 0,
    first_column: int = 0,
    half_width: float = 1.0,
) -> None:
    """Fill `out` (rows, width) with the slice at (first_row, first_column) of layer `layer`'s matrix of `columns`
    columns.

    The numbers are uniform in [-half_width, half_width), drawn in float64 and rounded to the dtype of `out`.
    """
    rows, width = out.shape
    if not rows or not width:
        return
    block = max(1, _BLOCK_ELEMENTS // columns)
    bits = np.random.PCG64(np.random.SeedSequence([seed, layer]))
    bits.advance(first_row * columns)
    generator = np.random.Generator(bits)
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        values = generator.random((stop - start, columns))[:, first_column : first_column + width]
        out[start:stop] = half_width * (2.0 * values - 1.0)
