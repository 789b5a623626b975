"""Gradient compression with error feedback: what a payload leaves out stays in the sender's residual for the next one.

Every compressor is pure arithmetic on flat float arrays: `encode` turns gradient and residual into bytes, `decode` adds
them to an array (or writes them). Always: sum of decoded payloads + residual = sum of gradients, up to rounding.
A payload's size depends on the number of elements alone: `max_bytes(n)`. NaN and infinity are not supported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

BLOCK = 32 * 1024
"""Elements handled at a time, a multiple of 8 (bits of a payload byte): temporaries stay in cache."""

FLOAT16_MAX = float(np.finfo(np.float16).max)


def _blocks(n: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK))


def _bit_bytes(n: int) -> int:
    return (n + 7) // 8


def _bits(payload: np.ndarray, part: slice) -> np.ndarray:
    """Bits [part) of a bit plane, as int8 zeros and ones."""
    plane = payload[part.start // 8 : _bit_bytes(part.stop)]
    return np.unpackbits(plane, count=part.stop - part.start).view(np.int8)


def _put_bits(payload: np.ndarray, part: slice, bits: np.ndarray) -> None:
    payload[part.start // 8 : _bit_bytes(part.stop)] = np.packbits(bits)


def _put(out: np.ndarray, part: slice, values: Any, add: bool) -> None:
    if add:
        out[part] += values
    else:
        out[part] = values


@dataclass(frozen=True)
class Compressor:
    """Base of all compressors; `encode` and `decode` check sizes, subclasses do the work."""

    def init(self, gradient: np.ndarray) -> np.ndarray:
        """The first residual for gradients like this one: zeros of its size, 1-D, float32 for 16-bit gradients."""
        wide = np.float32 if gradient.dtype.itemsize < 4 else gradient.dtype
        return np.zeros(gradient.size, wide)

    def max_bytes(self, n: int) -> int:
        """Bytes of the payload for n elements."""
        raise NotImplementedError

    def encode(self, gradient: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """The payload, uint8 (max_bytes(n),), for a gradient of shape (n,); `residual` (n,) changes in place."""
        if gradient.ndim != 1 or gradient.shape != residual.shape:
            raise ValueError(f"encode needs 1-D gradient and residual alike, not {gradient.shape} and {residual.shape}")
        payload = np.empty(self.max_bytes(gradient.size), np.uint8)
        for part in _blocks(gradient.size):
            residual[part] += gradient[part]
        self._encode(residual, payload)
        return payload

    def decode(self, payload: np.ndarray, out: np.ndarray, add: bool = True) -> None:
        """Add what `payload` (uint8) holds to `out` of shape (n,), any float dtype; with add=False write it instead."""
        if out.ndim != 1 or payload.shape != (self.max_bytes(out.size),):
            raise ValueError(
                f"{type(self).__name__} has {self.max_bytes(out.size)} bytes for {out.size} elements, "
                f"not {payload.shape}; sender and receiver need the same compression and the same interval"
            )
        self._decode(payload, out, add)

    def _encode(self, residual: np.ndarray, payload: np.ndarray) -> None:
        """Fill the payload with the nearest of what residual holds, and take that off the residual."""
        raise NotImplementedError

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        raise NotImplementedError


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
        return 2 * _bit_bytes(n)

    def _encode(self, residual: np.ndarray, payload: np.ndarray) -> None:
        up, down = np.split(payload, 2)
        for part in _blocks(residual.size):
            block = residual[part]
            positive, negative = block >= self.threshold, block <= -self.threshold
            _put_bits(up, part, positive)
            _put_bits(down, part, negative)
            sign = positive.view(np.int8) - negative.view(np.int8)
            block -= np.multiply(sign, self.threshold, dtype=block.dtype)

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        up, down = np.split(payload, 2)
        for part in _blocks(out.size):
            sign = _bits(up, part) - _bits(down, part)
            _put(out, part, np.multiply(sign, self.threshold, dtype=out.dtype), add)


@dataclass(frozen=True)
class OneBit(Compressor):
    """Every element becomes the mean of its sign's elements: 32 times smaller than float32 (Seide et al. 2014).

    Layout: the mean of the elements >= 0, the mean of the others (float32 each), then the bit plane of those >= 0.
    """

    def max_bytes(self, n: int) -> int:
        return 8 + _bit_bytes(n)

    def _encode(self, residual: np.ndarray, payload: np.ndarray) -> None:
        total, count = np.zeros(2), np.zeros(2)
        for part in _blocks(residual.size):
            block = residual[part]
            positive = block >= 0
            _put_bits(payload[8:], part, positive)
            ones, both, size = np.count_nonzero(positive), float(np.sum(block)), float(np.sum(np.abs(block)))
            total += (size + both) / 2, (both - size) / 2
            count += ones, positive.size - ones
        payload[:8] = (total / np.maximum(count, 1)).astype(np.float32).view(np.uint8)
        for part in _blocks(residual.size):
            residual[part] -= self._values((residual[part] >= 0).view(np.int8), payload, residual.dtype)

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        for part in _blocks(out.size):
            _put(out, part, self._values(_bits(payload[8:], part), payload, out.dtype), add)

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

    def _encode(self, residual: np.ndarray, payload: np.ndarray) -> None:
        halves = payload.view(np.float16)
        for part in _blocks(residual.size):
            block = residual[part]
            halves[part] = np.clip(block, -FLOAT16_MAX, FLOAT16_MAX)
            block -= halves[part].astype(block.dtype)

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        halves = payload.view(np.float16)
        for part in _blocks(out.size):
            _put(out, part, halves[part], add)


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
        """How many of n elements travel: at least one."""
        return min(n, max(1, math.ceil(self.ratio * n)))

    def max_bytes(self, n: int) -> int:
        return 8 * self.count(n)

    def _encode(self, residual: np.ndarray, payload: np.ndarray) -> None:
        k = self.count(residual.size)
        if k == 0:
            return
        places = np.argpartition(np.abs(residual), residual.size - k)[-k:].astype(np.uint32)
        places.sort()
        values = residual[places].astype(np.float32)
        payload[: 4 * k] = places.view(np.uint8)
        payload[4 * k :] = values.view(np.uint8)
        residual[places] -= values

    def _decode(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        k = self.count(out.size)
        places, values = payload[: 4 * k].copy().view(np.uint32), payload[4 * k :].copy().view(np.float32)
        if k and int(places.max()) >= out.size:
            raise ValueError(f"topk payload names element {int(places.max())} of {out.size}")
        if not add:
            out[...] = 0
        out[places] += values.astype(out.dtype)


COMPRESSORS: dict[str, type[Compressor]] = {"2bit": TwoBit, "1bit": OneBit, "fp16": Half, "topk": TopK}
"""Every compressor by its name in `set_gradient_compression`."""

EXAMPLE = '{"type": "2bit", "threshold": 0.5}'


def create(options: Mapping[str, Any]) -> Compressor:
    """The compressor of `options`: {"type": name, ...its options}, as `{"type": "2bit", "threshold": 0.5}`.

    Raises ValueError for an unknown type or a bad value, TypeError for an unknown option, or no mapping.
    """
    if not isinstance(options, Mapping):
        raise TypeError(f"compression is given as {EXAMPLE}, not as {options!r}")
    given = dict(options)
    name = given.pop("type", None)
    if name is None:
        asked = f"no key 'type', only {', '.join(map(repr, given))}" if given else "no key 'type'"
        raise ValueError(f'compression has {asked}: pass {EXAMPLE}; types are {", ".join(COMPRESSORS)}')
    if name not in COMPRESSORS:
        raise ValueError(f"unknown compression type {name!r}: the known ones are {', '.join(COMPRESSORS)}")
    known = [field.name for field in fields(COMPRESSORS[name])]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise TypeError(f"{name} compression has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    try:
        return COMPRESSORS[name](**{key: float(value) for key, value in given.items()})
    except TypeError as error:
        raise ValueError(f"{name} compression needs numbers as options, not {given}") from error
