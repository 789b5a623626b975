"""Two bits an element: +threshold, -threshold or nothing. What is left of it goes to the residual (`residuals.py`)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpips.compression.base import Compressor, bit_bytes, bits_of, blocks, put, put_bits


@dataclass(frozen=True)
class TwoBit(Compressor):
    """Every element becomes +threshold, -threshold or nothing: 16 times smaller than float32 (MXNet's `2bit`).

    Layout: a bit plane of the elements >= threshold, then one of those <= -threshold.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise ValueError(f"2bit compression needs a finite threshold > 0, not {self.threshold}")

    def max_bytes(self, n: int) -> int:
        return 2 * bit_bytes(n)

    def fill(self, residual: np.ndarray, payload: np.ndarray) -> None:
        up, down = np.split(payload, 2)
        for part in blocks(residual.size):
            block = residual[part]
            positive, negative = block >= self.threshold, block <= -self.threshold
            put_bits(up, part, positive)
            put_bits(down, part, negative)
            sign = positive.view(np.int8) - negative.view(np.int8)
            block -= np.multiply(sign, self.threshold, dtype=block.dtype)

    def read(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        up, down = np.split(payload, 2)
        for part in blocks(out.size):
            sign = bits_of(up, part) - bits_of(down, part)
            put(out, part, np.multiply(sign, self.threshold, dtype=out.dtype), add)
