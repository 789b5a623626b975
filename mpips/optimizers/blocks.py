"""An update of long arrays in cache-sized blocks, 16-bit weights widened on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Numbers = Sequence[np.ndarray]
Kernel = Callable[[np.ndarray, np.ndarray, Sequence[np.ndarray], np.ndarray, Numbers], None]
"""`kernel(w, g, state, scratch, numbers)`: update one block of `w` and `state` in place; `g` is only read."""

BLOCK_BYTES = 384 * 1024
"""Bytes of one array that a block covers: the arrays of an update then stay in cache between its passes."""

_local = threading.local()


def working_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype an update computes in and keeps its state in: float32 for 16-bit floats, otherwise the dtype itself."""
    if dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if dtype.kind != "f":
        raise TypeError(f"an optimizer needs float weights, not {dtype.name}; store a float array or set no optimizer")
    return dtype


def zeros(weights: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
    """So many arrays of zeros like `weights` in the working dtype, where they lie (host or GPU)."""
    dtype = working_dtype(weights.dtype)
    if isinstance(weights, np.ndarray):
        return tuple(np.zeros(weights.size, dtype) for _ in range(count))
    return tuple(np.zeros_like(weights, dtype) for _ in range(count))


def by_blocks(
    kernel: Kernel, weights: np.ndarray, gradient: np.ndarray, state: Sequence[np.ndarray], *,
    slots: int, step: int, numbers: Sequence[float] = (),
) -> None:  # fmt: skip
    """Call `kernel` on every block of the arrays, with a block of scratch and `numbers` in the working dtype.

    A kernel computes in the working dtype: 16-bit weights and gradients are widened to float32 and rounded once.
    Raises ValueError or TypeError before anything changes, unless weights and gradient are alike, 1-D and contiguous,
    `state` has `slots` arrays of their shape, and `step` is at least 1.
    """
    _check(weights, gradient, state, slots, step)
    dtype = working_dtype(weights.dtype)
    # As 0-d arrays: NumPy would convert a Python number again in every pass over every block.
    prepared: list[Any] = [np.array(number, dtype) for number in numbers]
    if not isinstance(weights, np.ndarray):
        prepared = [dtype.type(number) for number in prepared]  # a GPU's functions take no host arrays
    length = BLOCK_BYTES // dtype.itemsize
    wide = weights.dtype != dtype
    scratch = block_of("update", dtype, min(length, weights.size), weights)
    for start in range(0, weights.size, length):
        part = slice(start, start + length)
        w = weights[part]
        arrays = [s[part] for s in state]
        if wide:
            _widened(kernel, w, gradient[part], arrays, scratch[: w.size], prepared)
        else:
            kernel(w, gradient[part], arrays, scratch[: w.size], prepared)


def _widened(
    kernel: Kernel, w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], scratch: np.ndarray, numbers: Numbers
) -> None:
    wide_w, wide_g = (block_of(name, scratch.dtype, w.size, w) for name in ("weights", "gradient"))
    wide_w[...], wide_g[...] = w, g
    kernel(wide_w, wide_g, state, scratch, numbers)
    w[...] = wide_w


def _check(weights: np.ndarray, gradient: np.ndarray, state: Sequence[np.ndarray], slots: int, step: int) -> None:
    if gradient.shape != weights.shape or gradient.dtype != weights.dtype or weights.ndim != 1:
        raise ValueError(
            f"update needs two 1-D arrays alike, not weights {weights.dtype.name}{weights.shape} "
            f"and gradient {gradient.dtype.name}{gradient.shape}"
        )
    if not (weights.flags.c_contiguous and gradient.flags.c_contiguous):
        raise ValueError("update needs contiguous weights and gradient; pass contiguous views")
    if len(state) != slots or any(s.shape != weights.shape for s in state):
        raise ValueError(
            f"update needs state of {slots} arrays of shape {weights.shape}, not {[s.shape for s in state]}; "
            "take them from init(weights)"
        )
    if step < 1:
        raise ValueError(f"step counts updates from 1, not {step}")


def block_of(name: str, dtype: np.dtype, length: int, like: np.ndarray) -> np.ndarray:
    """A block of this thread's scratch memory where `like` lies, on the host or a GPU; the same name, dtype and place
    give the same memory again."""
    buffers: dict[Any, np.ndarray] = _local.__dict__
    block = buffers.get((name, dtype, type(like)))
    if block is None:
        block = np.empty_like(like, dtype, shape=(BLOCK_BYTES // dtype.itemsize,))
        buffers[name, dtype, type(like)] = block
    return block[:length]


def scaled(g: np.ndarray, rescale: float) -> np.ndarray:
    """`rescale * g` in a block of scratch, or `g` itself where that is the same."""
    return g if rescale == 1.0 else np.multiply(g, rescale, out=block_of("scaled", g.dtype, g.size, g))


def decayed(w: np.ndarray, g: np.ndarray, rescale: float, weight_decay: float, scratch: np.ndarray) -> np.ndarray:
    """`rescale * g + weight_decay * w` in a block of scratch (PyTorch's decay), or `g` where that is the same."""
    d = scaled(g, rescale)
    if weight_decay == 0.0:
        return d
    np.multiply(w, weight_decay, out=scratch)
    return np.add(d, scratch, out=block_of("scaled", g.dtype, g.size, g))
