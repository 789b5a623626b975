"""Pack and unpack gradients in one pass by compiled kernels, with the same bits as NumPy's passes in `compressors`.

A kernel is a compiled function (`collectives.kernels.function`). If it meets a value that no payload can hold, it
returns 0 and has changed nothing but its scratch arrays. The sum of an element means the sum of its gradient and its
residual. A bit plane holds one bit for each element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpips.collectives.kernels.function import WIDE, compiled, narrow, widen

if TYPE_CHECKING:
    from mpips.collectives.kernels.compiler import narrow_float16, sum_of_128, widen_float16

Array = np.ndarray
# Number of elements that NumPy handles at a time, so that temporary arrays stay in cache. It is a multiple of 8, the
# number of bits in a byte of a payload.
BLOCK = 32 * 1024
# Number of elements that a kernel handles at a time. It is a multiple of 8, so that a tile has whole bytes of a bit
# plane. The compiler can then vectorize a loop over elements and a loop over bytes.
TILE = 1024
CONSTANTS = {"TILE": TILE, "BLOCK": BLOCK}


def wide(values: np.ndarray) -> np.ndarray:
    """Return values in the dtype that a kernel computes in."""
    return values.astype(WIDE.get(values.dtype.name, values.dtype), copy=False)


@compiled("const stored[], const wide[]", constants=CONSTANTS)
def fit(gradient: Array, residual: Array) -> bool:
    """True if all sums are finite in float32, so that a payload can hold them."""
    bad = False
    for i in range(residual.size):
        x = np.float32(residual[i] + widen(gradient[i]))
        # x - x is NaN for NaN and for infinity, and 0 for every other number.
        difference = x - x
        bad |= difference != difference
    return not bad


@compiled("const stored[], wide[], uint8[], uint8[], const wide[]", constants=CONSTANTS)
def two_bits(gradient: Array, residual: Array, up: Array, down: Array, values: Array) -> int:
    """Write two bit planes, and keep the rest in the residual.

    `up` marks the sums >= values[1], and `down` marks the sums <= values[2]. A receiver decodes an element as values[0]
    without a bit, values[1] with an up bit, and values[2] with a down bit.
    """
    nothing, most, least = values[0], values[1], values[2]
    high, low = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    high_words, low_words = high.view(np.uint64), low.view(np.uint64)
    for start in range(0, residual.size, TILE):
        stop = min(start + TILE, residual.size)
        g_, r_ = gradient[start:stop], residual[start:stop]
        high[r_.size :], low[r_.size :] = 0, 0
        for i in range(r_.size):
            x = r_[i] + widen(g_[i])
            above, below = x >= most, x <= least
            high[i], low[i] = above, below
            r_[i] = x - ((nothing if below else most) if above else (least if below else nothing))
        up_, down_ = up[start // 8 : (stop + 7) // 8], down[start // 8 : (stop + 7) // 8]
        # The product collects the lowest bits of eight bytes in its highest byte.
        for i in range(up_.size):
            up_[i] = (high_words[i] * np.uint64(0x8040201008040201)) >> np.uint64(56)
            down_[i] = (low_words[i] * np.uint64(0x8040201008040201)) >> np.uint64(56)
    return 1


@compiled("stored[], const uint8[], const uint8[], const wide[], int64", constants=CONSTANTS)
def planes(out: Array, up: Array, down: Array, values: Array, add: int) -> int:
    """Add values[up bit + 2 * down bit] to every element of `out`, or write it there if `add` is 0."""
    neither, first, second, both = values[0], values[1], values[2], values[3]
    high, low = np.empty(TILE, np.uint8), np.empty(TILE, np.uint8)
    high_words, low_words = high.view(np.uint64), low.view(np.uint64)
    for start in range(0, out.size, TILE):
        stop = min(start + TILE, out.size)
        out_ = out[start:stop]
        up_, down_ = up[start // 8 : (stop + 7) // 8], down[start // 8 : (stop + 7) // 8]
        # Repeat the byte eight times, and keep a different bit of each copy.
        for i in range(up_.size):
            high_words[i] = (np.uint64(up_[i]) * np.uint64(0x0101010101010101)) & np.uint64(0x0102040810204080)
            low_words[i] = (np.uint64(down_[i]) * np.uint64(0x0101010101010101)) & np.uint64(0x0102040810204080)
        if add:
            for i in range(out_.size):
                value = (both if low[i] else first) if high[i] else (second if low[i] else neither)
                out_[i] = narrow(widen(out_[i]) + value)
        else:
            for i in range(out_.size):
                out_[i] = narrow((both if low[i] else first) if high[i] else (second if low[i] else neither))
    return 1


@compiled("const stored[], const wide[], uint8[], wide[], float64[]", constants=CONSTANTS)
def signs(gradient: Array, residual: Array, plane: Array, rest: Array, total: Array) -> bool:
    """Write the bit plane of sums >= 0, and add up the sums >= 0 and the other sums.

    Within a block of BLOCK elements, additions are in the same order as in NumPy: eight columns of each 128 elements,
    then neighbours in pairs.

    Args:
        gradient: The gradient.
        residual: The residual. It is not changed.
        plane: Gets the bit plane.
        rest: Gets the sums after the last whole block, which `total` does not include.
        total: Gets the total of the sums >= 0 and the total of the other sums, both over whole blocks, and the number
            of all sums >= 0.
    """
    bad, count = False, 0
    bits, tile, parts = np.empty(TILE, np.uint8), np.empty(TILE, residual.dtype), np.empty(BLOCK // 64, residual.dtype)
    words = bits.view(np.uint64)
    whole = residual.size // BLOCK * BLOCK
    for start in range(0, residual.size, TILE):
        stop = min(start + TILE, residual.size)
        g_, r_ = gradient[start:stop], residual[start:stop]
        bits[r_.size :] = 0
        for i in range(r_.size):
            x = r_[i] + widen(g_[i])
            narrowed = np.float32(x)
            difference = narrowed - narrowed
            bad |= difference != difference
            tile[i], bits[i] = x, x >= 0
        plane_ = plane[start // 8 : (stop + 7) // 8]
        for i in range(plane_.size):
            count += int((words[i] * np.uint64(0x0101010101010101)) >> np.uint64(56))
            plane_[i] = (words[i] * np.uint64(0x8040201008040201)) >> np.uint64(56)
        if start >= whole:
            rest[start - whole : stop - whole] = tile[: r_.size]
            continue
        # first the sums themselves, then their absolute values
        for half in range(2):
            at = half * BLOCK // 128 + start % BLOCK // 128
            for row in range(TILE // 128):
                parts[at + row] = sum_of_128(tile, 128 * row)
            for i in range(TILE):
                tile[i] = abs(tile[i])
        if stop % BLOCK == 0:
            left = BLOCK // 128
            while left > 1:
                for i in range(left):
                    parts[i] = parts[2 * i] + parts[2 * i + 1]
                left //= 2
            both, size = np.float64(parts[0]), np.float64(parts[1])
            total[0] += (size + both) / 2
            total[1] += (both - size) / 2
    total[2] = count
    return not bad


@compiled("const stored[], wide[], const wide[]", constants=CONSTANTS)
def take_means(gradient: Array, residual: Array, values: Array) -> int:
    """Add the gradient to the residual, and subtract values[1] from sums >= 0 and values[0] from sums < 0."""
    below, above = values[0], values[1]
    for i in range(residual.size):
        x = residual[i] + widen(gradient[i])
        residual[i] = x - (above if x >= 0 else below)
    return 1


@compiled("const stored[], float32[], uint16[]", ("float16", "bfloat16", "float32"), CONSTANTS)
def halves(gradient: Array, residual: Array, payload: Array) -> int:
    """Write all sums as float16, with absolute values of at most 65504, and keep the rest in the residual."""
    for i in range(residual.size):
        x = residual[i] + widen(gradient[i])
        half = narrow_float16(min(max(x, np.float32(-65504)), np.float32(65504)))
        payload[i] = half
        residual[i] = x - widen_float16(half)
    return 1


@compiled("stored[], const uint16[], int64", ("float16", "float32", "float64"), CONSTANTS)
def add_halves(out: Array, payload: Array, add: int) -> int:
    """Add the float16 numbers of a payload to `out`, or write them there if `add` is 0."""
    if add:
        for i in range(out.size):
            out[i] = narrow(widen(out[i]) + widen_float16(payload[i]))
    else:
        for i in range(out.size):
            out[i] = narrow(widen_float16(payload[i]))
    return 1


@compiled("const stored[], const wide[], wide[]", constants=CONSTANTS)
def sample(gradient: Array, residual: Array, sizes: Array) -> int:
    """Divide the sums into stretches, and write the absolute value of one pseudo-random sum of each stretch."""
    stretch = residual.size // sizes.size
    word = np.uint64(1)
    for i in range(sizes.size):
        word = word * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
        at = i * stretch + np.int64(((word >> np.uint64(32)) * np.uint64(stretch)) >> np.uint64(32))
        sizes[i] = abs(residual[at] + widen(gradient[at]))
    return 1


@compiled("const stored[], const wide[], wide[], uint32[], wide[]", constants=CONSTANTS)
def candidates(gradient: Array, residual: Array, least: Array, places: Array, sums: Array) -> int:
    """Write the indices and values of all sums whose absolute value is at least `least[0]`. Return their number plus 1.

    Writing stops when less room than for TILE sums is left. If there is a value that no payload can hold, return 0.
    """
    bound, found, bad = least[0], 0, False
    tile, large, some = np.empty(TILE, residual.dtype), np.empty(TILE, np.uint8), np.empty(TILE // 8 + 1, np.int64)
    words = large.view(np.uint64)
    for start in range(0, residual.size, TILE):
        stop = min(start + TILE, residual.size)
        g_, r_ = gradient[start:stop], residual[start:stop]
        large[r_.size :] = 0
        for i in range(r_.size):
            x = r_[i] + widen(g_[i])
            narrowed = np.float32(x)
            difference = narrowed - narrowed
            bad |= difference != difference
            tile[i], large[i] = x, abs(x) >= bound
        if found + TILE <= places.size:
            count = 0
            for word in range(TILE // 8):
                some[count] = word
                count += words[word] != 0
            # Write every element, and advance the index only after a large one. Without a branch that depends on an
            # element, the processor never mispredicts.
            for word in some[:count]:
                for i in range(8 * word, 8 * word + 8):
                    places[found], sums[found] = start + i, tile[i]
                    found += large[i]
    return 0 if bad else found + 1


@compiled("stored[], const uint32[], const float32[], int64", constants=CONSTANTS)
def scatter(out: Array, places: Array, values: Array, add: int) -> int:
    """Add values at these indices. If `add` is 0, write the values there, and zeros everywhere else.

    Return 0 unless all indices ascend and exist in `out`.
    """
    before = np.int64(-1)
    for i in range(places.size):
        if np.int64(places[i]) <= before:
            return 0
        before = np.int64(places[i])
    if before >= out.size:
        return 0
    if not add:
        out[:] = 0
    for i in range(places.size):
        out[places[i]] = narrow(widen(out[places[i]]) + widen(narrow(values[i])))
    return 1
