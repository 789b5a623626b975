"""The compressors: two bits, one bit or sixteen an element, or the largest elements alone. What is left is fed back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mpips.compression.base import Compressor, bit_bytes, bits_of, blocks, put, put_bits

FLOAT16_MAX = float(np.finfo(np.float16).max)


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


@dataclass(frozen=True)
class OneBit(Compressor):
    """Every element becomes the mean of its sign's elements: 32 times smaller than float32 (Seide et al. 2014).

    Layout: the mean of the elements >= 0, the mean of the others (float32 each), then the bit plane of those >= 0.
    """

    def max_bytes(self, n: int) -> int:
        return 8 + bit_bytes(n)

    def fill(self, residual: np.ndarray, payload: np.ndarray) -> None:
        total, count = np.zeros(2), np.zeros(2)
        for part in blocks(residual.size):
            block = residual[part]
            positive = block >= 0
            put_bits(payload[8:], part, positive)
            ones, both, size = np.count_nonzero(positive), float(np.sum(block)), float(np.sum(np.abs(block)))
            total += (size + both) / 2, (both - size) / 2
            count += ones, positive.size - ones
        payload[:8] = (total / np.maximum(count, 1)).astype(np.float32).view(np.uint8)
        for part in blocks(residual.size):
            residual[part] -= self._values((residual[part] >= 0).view(np.int8), payload, residual.dtype)

    def read(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        for part in blocks(out.size):
            put(out, part, self._values(bits_of(payload[8:], part), payload, out.dtype), add)

    @staticmethod
    def _values(bits: np.ndarray, payload: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The mean of each element's sign, by arithmetic: choosing element by element takes three times as long."""
        above, below = (float(mean) for mean in payload[:8].view(np.float32))
        values = np.multiply(bits, above - below, dtype=dtype)
        values += below
        return values


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
