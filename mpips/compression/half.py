"""Sixteen bits an element: float16."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mpips.compression.base import Compressor, blocks, put

FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Half(Compressor):
    """Every element as float16, at most 65504 in size: 2 times smaller than float32; the rounding error is fed back."""

    def max_bytes(self, n: int) -> int:
        return 2 * n

    def fill(self, residual: np.ndarray, payload: np.ndarray) -> None:
        halves = payload.view(np.float16)
        for part in blocks(residual.size):
            block = residual[part]
            halves[part] = np.clip(block, -FLOAT16_MAX, FLOAT16_MAX)
            block -= halves[part].astype(block.dtype)

    def read(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        halves = payload.view(np.float16)
        for part in blocks(out.size):
            put(out, part, halves[part], add)
