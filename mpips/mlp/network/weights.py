"""First weights, drawn by the seed, that do not depend on how the network is cut.

Element (r, c) of layer l is number ``r * columns + c`` of the random stream seeded by (seed, l). A rank that holds
a slice jumps to it, so every device mesh starts from the same matrices without sending any (the batch ranks of
the paper "share a layer's seed"; its model ranks drew unrelated slices, ours draw slices of one matrix).
"""

from __future__ import annotations

import math

import numpy as np

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
