"""Arithmetic on a worker's gradients, in place: clipping by global norm, accumulation, weights of uneven batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

BLOCK = 1 << 15
"""Elements that are squared at once, so that no array of a gradient's length is made."""

Arrays = Sequence[np.ndarray]


def global_norm(gradients: Arrays) -> float:
    """The square root of the sum of all elements' squares, added in float64.

    The order of the sum depends on shapes alone: equal gradients give equal bits.
    """
    total = 0.0
    for gradient in gradients:
        flat = gradient.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK].astype(np.float64)
            total += float(np.dot(block, block))
    return math.sqrt(total)


def clip(gradients: Arrays, limit: float) -> float:
    """Scale gradients so that their global norm is at most `limit`; the norm that they had.

    Where the norm is not finite nothing is scaled: the loss then says so, too.
    """
    norm = global_norm(gradients)
    if limit < norm < math.inf:
        weigh(gradients, limit / norm)
    return norm


def weigh(gradients: Arrays, factor: float) -> None:
    """Multiply by a factor. 1 changes no bit; 0 gives zeros, whatever was there."""
    for gradient in gradients if factor != 1.0 else ():
        if factor == 0.0:
            gradient[...] = 0
        else:
            np.multiply(gradient, factor, out=gradient, casting="same_kind")


class Accumulated:
    """The sum over batches of their mean gradients times their samples; the mean over all samples comes of it.

    16-bit floats are added in float32. It takes memory for one copy of the gradients, from the first `add` on.
    """

    def __init__(self, gradients: Arrays) -> None:
        self._gradients = gradients
        self._sums: list[np.ndarray] | None = None
        self._samples = 0

    def add(self, samples: int) -> None:
        """The gradients are the mean over so many samples of a batch; where it has none, whatever they are."""
        if not samples:
            return
        if self._sums is None:
            self._sums = [np.zeros(one.shape, np.result_type(one.dtype, np.float32)) for one in self._gradients]
        for total, gradient in zip(self._sums, self._gradients):
            total += np.multiply(gradient, samples, dtype=total.dtype)
        self._samples += samples

    def mean(self) -> None:
        """The gradients become the mean over all samples added; the next sum begins."""
        if self._sums is None or not self._samples:
            return
        for total, gradient in zip(self._sums, self._gradients):
            np.divide(total, self._samples, out=gradient, casting="same_kind")
        self.forget()

    def forget(self) -> None:
        """The next sum begins."""
        for total in self._sums or ():
            total[...] = 0
        self._samples = 0


def check_clip(clip_norm: float | None) -> float | None:
    """ValueError where it is no limit of a norm."""
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm={clip_norm!r}: give a finite number above 0")
    return float(clip_norm)
