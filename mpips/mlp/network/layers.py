"""What a network is, whoever holds it: its specification, first weights, how layers are cut, activations and losses.

A layer's kind says which rank of a model (`part`, its model index on the mesh) holds what of it:

- ``columns``: a rank holds some outputs of the layer (rows of its matrix). The inputs must be whole; the outputs
  are gathered, and the gradient of the inputs is summed over the ranks (the paper's Algorithm 2).
- ``rows``: a rank holds some inputs, exactly the outputs that it computed in the layer before, which must be cut
  by columns and is then not gathered. The outputs are summed over the ranks; backward nothing moves.
- ``whole``: every rank holds and computes the whole layer; nothing moves.

Everything is column-wise, (neurons, samples), as in the paper, which writes X_l in R^{d_l x B}. No MPI in here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from collectives.schedule.model import cut

DTYPES = ("float32", "float64", "mixed")
MODES = ("pairs", "columns")
_FEWEST_OUTPUTS_PER_RANK = 8  # below this a gather's latency costs more than computing a last layer on every rank
_BLOCK_ELEMENTS = 1 << 20


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
            raise ValueError(f"{what} {value!r} is unknown; choose one of {', '.join(known)}")
    if str(dtype) not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not supported; choose one of {', '.join(DTYPES)}")


def working_dtype(dtype: str) -> np.dtype:
    """Return the dtype of weights, activations and data in a network of this `dtype`."""
    return np.dtype("float32" if dtype == "mixed" else dtype)


# -- how layers are cut


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
    for layer, kind in enumerate(chosen):
        rows, columns = sizes[layer + 1], sizes[layer]
        outputs = interval(rows, parts, part) if kind == "columns" else (0, rows)
        inputs = interval(columns, parts, part) if kind == "rows" else (0, columns)
        followed = layer + 1 < len(chosen) and chosen[layer + 1] == "rows"
        result.append(Split(kind, outputs, inputs, gathered=kind == "columns" and not followed))
    return result


def largest_slice(sizes: Sequence[int], model: int, mode: str = "pairs") -> list[int]:
    """Return the parameters of each layer on the rank that holds the most (part 0)."""
    return [(outputs[1] - outputs[0]) * (inputs[1] - inputs[0] + 1) for _, outputs, inputs, _ in
            splits(sizes, model, 0, mode)]  # fmt: skip


# -- first weights


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
    block = max(1, _BLOCK_ELEMENTS // columns)
    bits = np.random.PCG64(np.random.SeedSequence([specification.seed, layer]))
    bits.advance(first_row * columns)
    generator = np.random.Generator(bits)
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        values = generator.random((stop - start, columns))[:, first_column : first_column + width]
        out[start:stop] = half_width * (2.0 * values - 1.0)


# -- activations, in place: z becomes its activation; delta is multiplied by the derivative at y


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


ACTIVATIONS = {"relu": (_relu, _relu_backward), "tanh": (_tanh, _tanh_backward)}
"""Forward and backward by name."""


# -- losses


def l2(
    output: np.ndarray, target: np.ndarray, delta: np.ndarray, scratch: np.ndarray, scale: float, xp: Any = np
) -> float:
    """Return the sum over samples of ``1/2 |output - target|^2``; `delta` becomes its gradient times `scale`.

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
    """Return the sum over samples of the cross-entropy ``-log softmax(output)[target]``; `delta` becomes its gradient
    times `scale`.

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


LOSSES = {"l2": l2, "softmax": softmax}
"""Softmax takes class numbers, l2 takes targets."""
