"""The largest elements alone, with their places."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpips.compression.base import Compressor


@dataclass(frozen=True)
class TopK(Compressor):
    """The `ratio` of elements that are largest in size, as float32 with their places: 8 bytes for each of them.

    Error feedback as in Stich, Cordonnier, Jaggi 2018 (Mem-SGD). Layout: places (uint32, ascending), then values.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"topk compression needs a ratio in (0, 1], not {self.ratio}")

    def count(self, n: int) -> int:
        """Return how many of n elements travel: at least one."""
        return min(n, max(1, math.ceil(self.ratio * n)))

    def max_bytes(self, n: int) -> int:
        return 8 * self.count(n)

    def fill(self, residual: np.ndarray, payload: np.ndarray) -> None:
        k = self.count(residual.size)
        if k == 0:
            return
        places = np.argpartition(np.abs(residual), residual.size - k)[-k:].astype(np.uint32)
        places.sort()
        values = residual[places].astype(np.float32)
        payload[: 4 * k] = places.view(np.uint8)
        payload[4 * k :] = values.view(np.uint8)
        residual[places] -= values

    def read(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        k = self.count(out.size)
        places, values = payload[: 4 * k].copy().view(np.uint32), payload[4 * k :].copy().view(np.float32)
        if k and int(places.max()) >= out.size:
            raise ValueError(f"topk payload names element {int(places.max())} of {out.size}")
        if not add:
            out[...] = 0
        out[places] += values.astype(out.dtype)
