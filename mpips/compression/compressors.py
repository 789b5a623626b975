"""Compressors: a compressor turns a gradient into a payload of fixed size, and keeps the rest for the next gradient.

Every compressor is pure arithmetic on flat float arrays. `encode` adds a gradient to the residual (the rest of earlier
gradients), encodes as much of the sum as it can into the payload, and leaves the new rest in the residual. `decode`
adds the decoded values to an array, or writes them there. At any time the sum of the decoded payloads plus the residual
equals the sum of the gradients, up to rounding. The size of a payload depends only on the number of elements:
`max_bytes(n)`. Gradients with NaN or infinity are refused (`unfit`).

The methods `fill` and `read` use NumPy. For most compressors, compiled kernels compute the same bits in one pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from mpips.collectives.errors import CollectiveError
from mpips.collectives.kernels.function import Compiled
from mpips.collectives.kernels.quiet import quiet, quietly
from mpips.compression import kernels
from mpips.compression.kernels import BLOCK


@dataclass(frozen=True)
class Compressor:
    """Base class of compressors, with error feedback.

    To write your own compressor, derive a class that defines `max_bytes`, `fill` and `read`.
    """

    _kernels: ClassVar[tuple[Compiled, ...]] = ()

    def max_bytes(self, n: int) -> int:
        """Return the size of the payload for n elements, in bytes."""
        raise NotImplementedError

    def fill(self, residual: np.ndarray, payload: np.ndarray) -> None:
        """Encode `residual` into `payload` as closely as possible, and subtract the encoded values from `residual`.

        Args:
            residual: (n,), float32 or float64, changed in place. The gradient has been added to it.
            payload: uint8, (max_bytes(n),), not initialized.
        """
        raise NotImplementedError

    def read(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        """Decode `payload` and add the result to `out`, or write it to `out` if `add` is false.

        `out` has shape (n,) and any float dtype.
        """
        raise NotImplementedError

    def init(self, gradient: np.ndarray) -> np.ndarray:
        """Return the first residual for gradients like this one: 1-D zeros. For 16-bit gradients it is float32."""
        wide = np.float32 if gradient.dtype.itemsize < 4 else gradient.dtype
        return np.zeros(gradient.size, wide)

    def encode(self, gradient: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Return the payload for the sum of gradient and residual, and keep the rest in `residual`, in place.

        Args:
            gradient: (n,), any float dtype.
            residual: (n,), with the dtype that `init` chooses.

        Returns:
            uint8, (max_bytes(n),).

        Raises:
            ValueError: `fill` has raised an error, which is the `__cause__` of the ValueError.
        """
        payload = self.encode_by_kernels(gradient, residual)
        if payload is not None:
            return payload
        payload = np.empty(self.max_bytes(gradient.size), np.uint8)
        for part in blocks(gradient.size):
            quietly(np.add, residual[part], gradient[part], residual[part])
        try:
            self._run(self.fill, residual, payload)
        except Exception as error:
            raise ValueError(self._text("fill", gradient.size, error)) from error
        return payload

    def encode_by_kernels(self, gradient: np.ndarray, residual: np.ndarray) -> np.ndarray | None:
        """Do the work of `encode` with compiled kernels, and return the payload.

        If no kernels are ready, or if a kernel meets a value that no payload can hold (see `unfit`), change nothing and
        return None.
        """
        if gradient.ndim != 1 or gradient.shape != residual.shape:
            raise ValueError(f"encode needs 1-D gradient and residual alike, not {gradient.shape} and {residual.shape}")
        if type(self) not in BUILT_IN:
            return None
        payload = np.empty(self.max_bytes(gradient.size), np.uint8)
        return payload if quietly(self._pack, gradient, residual, payload) else None

    def _pack(self, gradient: np.ndarray, residual: np.ndarray, payload: np.ndarray) -> bool:
        """Add the gradient to the residual and fill the payload, with compiled kernels.

        Return False if no kernels are ready, or if a kernel meets a value that no payload can hold (see `unfit`). Then
        nothing but `payload` has changed.
        """
        return False

    def _unpack(self, payload: np.ndarray, out: np.ndarray, add: bool) -> bool:
        """Do the work of `read` with a compiled kernel. If no kernel is ready, change nothing and return False."""
        return False

    def prepare(self, dtype: np.dtype, elements: int = 0) -> None:
        """Load the compiled kernels that encode and decode gradients, if they will probably save time.

        Small gradients save less time than loading takes (`collectives.kernels.engine`). Call this while a program sets
        up, because loading may block for a second or two.

        Args:
            dtype: The dtype of the gradients.
            elements: The number of elements of a gradient.
        """
        for kernel in (kernels.fit, *self._kernels):
            kernel.prepare(dtype, elements)

    def decode(self, payload: np.ndarray, out: np.ndarray, add: bool = True) -> None:
        """Decode a payload and add the result to `out`. With add=False, write the result to `out` instead.

        Args:
            payload: uint8, (max_bytes(n),).
            out: (n,), any float dtype.

        Raises:
            ValueError: The payload has the wrong size, or `read` has raised an error, which is then the `__cause__` of
                the ValueError.
        """
        if out.ndim != 1 or payload.shape != (self.max_bytes(out.size),):
            raise ValueError(
                f"{type(self).__name__} has {self.max_bytes(out.size)} bytes for {out.size} elements, "
                f"not {payload.shape}; sender and receiver need the same compression and the same interval"
            )
        try:
            if type(self) not in BUILT_IN or not quietly(self._unpack, payload, out, add):
                self._run(self.read, payload, out, add)
        except Exception as error:
            raise ValueError(self._text("read", out.size, error)) from error

    def _run(self, method: Callable[..., None], *arguments: object) -> None:
        """Call `fill` or `read`.

        In built-in compressors, NumPy's floating-point warnings are silenced. A method of a user's own compressor runs
        with the settings of the user.
        """
        if type(self).__module__ == __name__:
            quietly(method, *arguments)
        else:
            method(*arguments)

    def _text(self, what: str, n: int, error: Exception) -> str:
        return f"{type(self).__name__}.{what} failed for {n} elements: {type(error).__name__}: {error}"


def blocks(n: int) -> Iterator[slice]:
    """Return slices of at most BLOCK elements, which together cover n elements."""
    return (slice(start, min(start + BLOCK, n)) for start in range(0, n, BLOCK))


@quiet
def unfit(gradient: np.ndarray, residual: np.ndarray) -> int:
    """Add gradient and residual, and return the index of the first sum that no payload can hold, or -1.

    No payload can hold NaN, infinity, or numbers beyond the largest float32. They would stay in the residual for ever.
    The arrays are not changed.
    """
    if kernels.fit(gradient, residual):
        return -1
    for part in blocks(gradient.size):
        fine = np.isfinite(np.add(gradient[part], residual[part]).astype(np.float32, copy=False))
        if not fine.all():
            return part.start + int(fine.argmin())
    return -1


def bit_bytes(n: int) -> int:
    """Return the size in bytes of a *bit plane* for n elements: one bit for each element, eight bits in a byte."""
    return (n + 7) // 8


def bits_of(payload: np.ndarray, part: slice) -> np.ndarray:
    """Return the bits of some elements from a bit plane (see `bit_bytes`), as int8 zeros and ones.

    Args:
        payload: The bytes of the whole plane.
        part: The elements, as one of the slices that `blocks` returns. So the first bit begins a byte.
    """
    plane = payload[part.start // 8 : bit_bytes(part.stop)]
    return np.unpackbits(plane, count=part.stop - part.start).view(np.int8)


def put_bits(payload: np.ndarray, part: slice, bits: np.ndarray) -> None:
    """Write the bits of some elements into a bit plane (see `bit_bytes`): 1 where `bits` is not zero, and 0 elsewhere.

    Args:
        payload: The bytes of the whole plane, changed in place.
        part: The elements, as one of the slices that `blocks` returns. So the first bit begins a byte.
        bits: A number or bool for each of these elements.
    """
    payload[part.start // 8 : bit_bytes(part.stop)] = np.packbits(bits)


def put(out: np.ndarray, part: slice, values: ArrayLike, add: bool) -> None:
    """Add values to `out[part]`, or write them there if `add` is False."""
    if add:
        out[part] += values
    else:
        out[part] = values


class Residuals:
    """A compressor that keeps one residual for each name.

    A residual is created as zeros when its name gets the first gradient. It is an array of the gradient's size.
    """

    def __init__(self, compressor: Compressor, rank: int = 0) -> None:
        """`rank` is the rank of the sending worker, for error messages."""
        self.compressor = compressor
        self._rank = rank
        self._kept: dict[Hashable, np.ndarray] = {}

    def payload(self, name: Hashable, gradient: np.ndarray, key: Hashable = "", start: int = 0) -> np.ndarray:
        """Return the payload to send for this gradient, uint8. The rest stays in the residual of `name`.

        Raises CollectiveError, with nothing changed, if a sum of gradient and residual is not a finite float32 number.

        Args:
            name: The name of the residual.
            gradient: 1-D, the elements of the key from index `start` on.
            key: The key in the store, for the error message.
            start: The index of the gradient's first element in the key, for the error message.
        """
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = self.compressor.init(gradient)
        if (payload := self.compressor.encode_by_kernels(gradient, kept)) is not None:
            return payload
        if (at := unfit(gradient, kept)) >= 0:
            raise CollectiveError(
                f"element {start + at} of what rank {self._rank} pushes of key {key!r} is {gradient[at]:g}, and "
                f"{type(self.compressor).__name__} sends finite numbers: leave the step out on all ranks, or clip it"
            )
        return self.compressor.encode(gradient, kept)

    def decoded(self, key: Hashable, gradient: np.ndarray) -> np.ndarray:
        """Return the values that a receiver decodes from `payload(key, gradient)`, in an array like the gradient."""
        payload = self.payload(key, gradient, key)
        out = np.empty_like(gradient)
        self.compressor.decode(payload, out, add=False)
        return out

    def get(self, name: Hashable) -> np.ndarray | None:
        """Return the residual of a name itself, (n,), not a copy. Return None before the name's first gradient."""
        return self._kept.get(name)

    def put(self, name: Hashable, values: np.ndarray, dtype: np.dtype) -> None:
        """Set the residual of a name to a copy of `values`, (n,). `dtype` is the dtype of the name's gradients."""
        kept = self._kept[name] = self.compressor.init(np.empty(values.size, dtype))
        quietly(np.copyto, kept, values, casting="same_kind")

    def forget(self, names: Iterable[Hashable]) -> None:
        """Discard the residuals of names that are no longer used."""
        for name in names:
            self._kept.pop(name, None)


BITS = np.array([0, 1], np.int8)
# SIGNS[up + 2 * down] is the sign of an element, where up and down are its bits in the two planes of `TwoBit`
SIGNS = np.array([0, 1, -1, 0], np.int8)
FLOAT16_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class TwoBit(Compressor):
    """Sends every element as +threshold, -threshold or 0: 16 times smaller than float32 (MXNet's `2bit`).

    The payload is two bit planes, with one bit for each element. The first marks the elements >= threshold, the second
    the elements <= -threshold.
    """

    _kernels = kernels.two_bits, kernels.planes

    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.threshold) and self.threshold > 0):
            raise ValueError(f"2bit compression needs a finite threshold > 0, not {self.threshold}")
        object.__setattr__(self, "threshold", float(self.threshold))

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

    def _pack(self, gradient: np.ndarray, residual: np.ndarray, payload: np.ndarray) -> bool:
        up, down = payload.reshape(2, -1)
        values = np.multiply(SIGNS, self.threshold, dtype=residual.dtype)
        return bool(kernels.fit(gradient, residual) and kernels.two_bits(gradient, residual, up, down, values))

    def _unpack(self, payload: np.ndarray, out: np.ndarray, add: bool) -> bool:
        up, down = payload.reshape(2, -1)
        values = np.multiply(SIGNS, self.threshold, dtype=out.dtype)
        return bool(kernels.planes(out, up, down, kernels.wide(values), add))


@dataclass(frozen=True)
class OneBit(Compressor):
    """Sends every element as the mean of all elements with its sign: 32 times smaller than float32 (Seide et al. 2014).

    The payload is the mean of the elements >= 0, the mean of the elements < 0 (float32 each), and a bit plane with one
    bit for each element, which marks the elements >= 0.
    """

    _kernels = kernels.signs, kernels.take_means, kernels.planes

    def max_bytes(self, n: int) -> int:
        return 8 + bit_bytes(n)

    def fill(self, residual: np.ndarray, payload: np.ndarray) -> None:
        total, count = np.zeros(2), np.zeros(2)
        for part in blocks(residual.size):
            block = residual[part]
            positive = block >= 0
            put_bits(payload[8:], part, positive)
            ones, both, size = np.count_nonzero(positive), float(np.sum(block)), float(np.sum(np.abs(block)))
            # The sum of each sign follows from the sum of all elements and the sum of their absolute values.
            total += (size + both) / 2, (both - size) / 2
            count += ones, positive.size - ones
        payload[:8] = (total / np.maximum(count, 1)).astype(np.float32).view(np.uint8)
        for part in blocks(residual.size):
            residual[part] -= self._values((residual[part] >= 0).view(np.int8), payload, residual.dtype)

    def read(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        for part in blocks(out.size):
            put(out, part, self._values(bits_of(payload[8:], part), payload, out.dtype), add)

    def _pack(self, gradient: np.ndarray, residual: np.ndarray, payload: np.ndarray) -> bool:
        rest, total = np.empty(residual.size % BLOCK, residual.dtype), np.zeros(3)
        if not kernels.signs(gradient, residual, payload[8:], rest, total) or not _sums_alike(gradient.dtype):
            return False
        both, size = float(np.sum(rest)), float(np.sum(np.abs(rest)))
        total[:2] += (size + both) / 2, (both - size) / 2
        count = np.maximum((total[2], residual.size - total[2]), 1)
        payload[:8] = (total[:2] / count).astype(np.float32).view(np.uint8)
        return bool(kernels.take_means(gradient, residual, self._values(BITS, payload, residual.dtype)))

    def _unpack(self, payload: np.ndarray, out: np.ndarray, add: bool) -> bool:
        plane, values = payload[8:], self._values(BITS, payload, out.dtype).repeat(2)
        return bool(kernels.planes(out, plane, plane, kernels.wide(values), add))

    @staticmethod
    def _values(bits: np.ndarray, payload: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the mean for each bit: the mean of the elements >= 0 (bit 1) or of the elements < 0 (bit 0).

        The values are computed by arithmetic, because choosing a mean for each element takes three times as long.
        """
        above, below = (float(mean) for mean in payload[:8].view(np.float32))
        values = np.multiply(bits, above - below, dtype=dtype)
        values += below
        return values


@functools.cache
def _sums_alike(dtype: np.dtype) -> bool:
    """True if this version of NumPy adds the elements of a block in the same order as the kernel `signs`.

    The kernel must already have been compiled.
    """
    block, total = np.random.default_rng(1).normal(size=BLOCK).astype(dtype), np.zeros(3)
    wide = kernels.wide(block)
    kernels.signs(block, np.zeros_like(wide), np.empty(bit_bytes(BLOCK), np.uint8), wide[:0], total)
    both, size = float(np.sum(wide)), float(np.sum(np.abs(wide)))
    return tuple(total[:2]) == ((size + both) / 2, (both - size) / 2)


@dataclass(frozen=True)
class Half(Compressor):
    """Sends every element as float16, with an absolute value of at most 65504: 2 times smaller than float32.

    The residual keeps the rounding errors.
    """

    _kernels = kernels.halves, kernels.add_halves

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

    def _pack(self, gradient: np.ndarray, residual: np.ndarray, payload: np.ndarray) -> bool:
        return bool(kernels.fit(gradient, residual) and kernels.halves(gradient, residual, payload.view(np.uint16)))

    def _unpack(self, payload: np.ndarray, out: np.ndarray, add: bool) -> bool:
        return bool(kernels.add_halves(out, payload.view(np.uint16), add))


# number of elements that share one scale; BLOCK is a multiple of it
GROUP = 256


@dataclass(frozen=True)
class Integers(Compressor):
    """Sends every element as an 8-bit or 4-bit integer (its code) times a float32 scale that 256 neighbours share.

    The scale is the largest absolute value of the 256 elements, divided by 127 (8 bits) or 7 (4 bits). The residual
    keeps the rounding errors. The payload is the scales, then the codes. A byte holds two 4-bit codes, the first one in
    its lower half.
    """

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or isinstance(self.bits, bool):
            raise ValueError(f"int compression has 8 or 4 as bits, not {self.bits!r}")

    def max_bytes(self, n: int) -> int:
        return 4 * -(-n // GROUP) + (n * self.bits + 7) // 8

    def fill(self, residual: np.ndarray, payload: np.ndarray) -> None:
        most = (1 << self.bits - 1) - 1
        scales, codes = self._parts(payload, residual.size)
        for part in blocks(residual.size):
            block = residual[part]
            sizes = np.maximum.reduceat(np.abs(block), np.arange(0, block.size, GROUP))
            found = (sizes / most).astype(np.float32)
            scales[part.start // GROUP :][: found.size] = found
            wide = np.repeat(found, GROUP)[: block.size]
            steps = np.divide(block, wide, out=np.zeros_like(block), where=wide > 0)
            whole = np.clip(np.rint(steps), -most, most).astype(np.int8)
            block -= whole.astype(np.float32) * wide
            self._put(codes, part, whole)
        payload[: scales.nbytes] = scales.view(np.uint8)

    def read(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        scales, codes = self._parts(payload, out.size)
        for part in blocks(out.size):
            wide = np.repeat(scales[part.start // GROUP : -(-part.stop // GROUP)], GROUP)[: part.stop - part.start]
            put(out, part, (self._codes(codes, part).astype(np.float32) * wide).astype(out.dtype), add)

    def _parts(self, payload: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a copy of the scales, and a view of the codes."""
        ends = 4 * -(-n // GROUP)
        return payload[:ends].copy().view(np.float32), payload[ends:]

    def _put(self, codes: np.ndarray, part: slice, whole: np.ndarray) -> None:
        if self.bits == 8:
            codes[part] = whole.view(np.uint8)
            return
        halves = np.zeros(whole.size + whole.size % 2, np.uint8)
        halves[: whole.size] = whole.view(np.uint8) & 15
        codes[part.start // 2 :][: halves.size // 2] = halves[::2] | halves[1::2] << 4

    def _codes(self, codes: np.ndarray, part: slice) -> np.ndarray:
        if self.bits == 8:
            return codes[part].view(np.int8)
        pairs = codes[part.start // 2 : (part.stop + 1) // 2]
        halves = np.stack([pairs << 4, pairs & 240], axis=1).reshape(-1)[: part.stop - part.start]
        return halves.view(np.int8) >> 4


@dataclass(frozen=True)
class TopK(Compressor):
    """Sends the elements with the largest absolute values, as float32 with their indices: 8 bytes for each of them.

    `ratio` is the share of elements to send. Among equal absolute values, those at the lowest indices are sent. Error
    feedback works as in Stich, Cordonnier, Jaggi 2018 (Mem-SGD). The payload is the indices (uint32, ascending), then
    the values.
    """

    _kernels = kernels.sample, kernels.candidates, kernels.scatter

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"topk compression needs a ratio in (0, 1], not {self.ratio}")

    def count(self, n: int) -> int:
        """Return the number of elements that are sent for a gradient of n elements: at least 1, if n is not 0."""
        return min(n, max(1, math.ceil(self.ratio * n)))

    def max_bytes(self, n: int) -> int:
        return 8 * self.count(n)

    def fill(self, residual: np.ndarray, payload: np.ndarray) -> None:
        k = self.count(residual.size)
        if k == 0:
            return
        self._take(residual, payload, _find_largest(residual, k).astype(np.uint32))

    def _take(self, residual: np.ndarray, payload: np.ndarray, places: np.ndarray) -> None:
        """Write the indices `places`, and then the residual's values there as float32, into `payload`.

        Subtract the written values from the residual.
        """
        values = residual[places].astype(np.float32)
        payload[: 4 * places.size] = places.view(np.uint8)
        payload[4 * places.size :] = values.view(np.uint8)
        residual[places] -= values

    def read(self, payload: np.ndarray, out: np.ndarray, add: bool) -> None:
        k = self.count(out.size)
        places, values = payload[: 4 * k].copy().view(np.uint32), payload[4 * k :].copy().view(np.float32)
        if k and int(places.max()) >= out.size:
            raise ValueError(f"topk payload names element {int(places.max())} of {out.size}")
        if not add:
            out[...] = 0
        out[places] += values.astype(out.dtype)

    def _pack(self, gradient: np.ndarray, residual: np.ndarray, payload: np.ndarray) -> bool:
        n, k = residual.size, self.count(residual.size)
        if k == 0:
            return True
        # From a sample, estimate a limit such that the absolute values of a little more than k elements almost surely
        # reach it. One pass collects these elements, the candidates. Then find the k largest among the candidates.
        sizes = np.empty(min(n, max(4096, min(n // 256, 65536))), residual.dtype)
        if not kernels.sample(gradient, residual, sizes):
            return False
        share = k * sizes.size / n
        # Five standard deviations above the expected number make it very unlikely to find too few candidates.
        rank = k if sizes.size == n else int(share + 5 * math.sqrt(share) + 8)
        least = np.partition(sizes, -rank)[-rank:][:1] if rank < sizes.size else np.zeros(1, residual.dtype)
        np.maximum(least, np.finfo(least.dtype).smallest_subnormal, out=least)
        most = min(n, 2 * k + n // 64) + kernels.TILE
        places, sums = np.empty(most, np.uint32), np.empty(most, residual.dtype)
        found = kernels.candidates(gradient, residual, least, places, sums) - 1
        if found < 0:
            return False
        for part in blocks(n):
            residual[part] += gradient[part]
        if k <= found <= most - kernels.TILE:
            self._take(residual, payload, places[_find_largest(sums[:found], k)])
        else:
            self.fill(residual, payload)
        return True

    def _unpack(self, payload: np.ndarray, out: np.ndarray, add: bool) -> bool:
        k = self.count(out.size)
        places, values = payload[: 4 * k].copy().view(np.uint32), payload[4 * k :].copy().view(np.float32)
        return bool(kernels.scatter(out, places, values, add))


def _find_largest(values: np.ndarray, k: int) -> np.ndarray:
    """Return the ascending indices of the k values with the largest absolute values. k is at least 1.

    Among equal absolute values, those at the lowest indices are taken. (`numpy.argpartition` may choose others,
    depending on the processor.)
    """
    # The bit patterns of positive floats, read as integers, have the same order as the floats. Integers compare faster.
    sizes = np.abs(values).view(f"u{values.itemsize}")
    least = np.partition(sizes, sizes.size - k)[sizes.size - k]
    chosen = sizes > least
    chosen[np.flatnonzero(sizes == least)[: k - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen)


# Classes that have kernels. A class that a user derives from one of these does not use the kernels, because it may
# have its own `fill` and `read`.
BUILT_IN = (TwoBit, OneBit, Half, TopK)
