"""What every optimizer is: a frozen record of numbers, a pure `init`, an in-place `update` in cache-sized blocks."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

State = Sequence[np.ndarray]
Numbers = Sequence[np.ndarray]

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


def _scratch(name: str, dtype: np.dtype, length: int, like: np.ndarray) -> np.ndarray:
    """One block of this thread's scratch memory where `like` lies, on the host or a GPU; the same name, dtype and place
    give the same memory again."""
    buffers: dict[Any, np.ndarray] = _local.__dict__
    block = buffers.get((name, dtype, type(like)))
    if block is None:
        block = np.empty_like(like, dtype, shape=(BLOCK_BYTES // dtype.itemsize,))
        buffers[name, dtype, type(like)] = block
    return block[:length]


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimizers: options are finite numbers or flags, checked once; the rest is `init` and `update`.

    An update of [0:n) equals updates of any pieces of it (elements are independent), so a server may update a shard by
    intervals. 16-bit weights are widened to float32 block by block, their state is float32; the result is rounded once.
    """

    slots: ClassVar[int] = 0
    """How many arrays of state an element has."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (bool, np.bool_)):
                object.__setattr__(self, field.name, bool(value))
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                raise ValueError(f"{type(self).__name__}({field.name}={value!r}): give a finite number")
            object.__setattr__(self, field.name, number)

    def init(self, weights: np.ndarray) -> State:
        """State for `weights` (1-D, n elements): a tuple of arrays (n,) of zeros in the working dtype."""
        dtype = working_dtype(weights.dtype)
        if isinstance(weights, np.ndarray):
            return self._state(tuple(np.zeros(weights.size, dtype) for _ in range(self._slots())))
        return self._state(tuple(np.zeros_like(weights, dtype) for _ in range(self._slots())))

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """One update in place: `weights` and `state` change, `gradient` does not.

        Shapes: all (n,), C-contiguous; `gradient` has the dtype of `weights`, `state` is what `init` gave, or the same
        slice of each of its arrays. `step` is the number of this update, from 1. Raises ValueError or TypeError on
        arrays that do not fit, before anything changes.
        """
        self._check(weights, gradient, state, step)
        dtype = working_dtype(weights.dtype)
        # As 0-d arrays: NumPy would convert a Python number again in every pass over every block.
        numbers: list[Any] = [np.array(number, dtype) for number in self._numbers(step)]
        if not isinstance(weights, np.ndarray):
            numbers = [dtype.type(number) for number in numbers]  # a GPU's functions take no host arrays
        length = BLOCK_BYTES // dtype.itemsize
        block = self._block if weights.dtype == dtype else self._wide_block
        scratch = _scratch("update", dtype, min(length, weights.size), weights)
        for start in range(0, weights.size, length):
            part = slice(start, start + length)
            w = weights[part]
            block(w, gradient[part], [s[part] for s in state], scratch[: w.size], numbers)

    def _wide_block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        """A block of 16-bit weights: computed in the dtype of `scratch`, rounded once."""
        wide_w, wide_g = (_scratch(name, scratch.dtype, w.size, w) for name in ("weights", "gradient"))
        wide_w[...], wide_g[...] = w, g
        self._block(wide_w, wide_g, state, scratch, numbers)
        w[...] = wide_w

    def _check(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        if gradient.shape != weights.shape or gradient.dtype != weights.dtype or weights.ndim != 1:
            raise ValueError(
                f"update needs two 1-D arrays alike, not weights {weights.dtype.name}{weights.shape} "
                f"and gradient {gradient.dtype.name}{gradient.shape}"
            )
        if not (weights.flags.c_contiguous and gradient.flags.c_contiguous):
            raise ValueError("update needs contiguous weights and gradient; pass contiguous views")
        if len(state) != self._slots() or any(s.shape != weights.shape for s in state):
            raise ValueError(
                f"{type(self).__name__} keeps {self._slots()} arrays of shape {weights.shape}, not "
                f"{[s.shape for s in state]}; take them from init(weights)"
            )
        if step < 1:
            raise ValueError(f"step counts updates from 1, not {step}")

    def _slots(self) -> int:
        return self.slots

    def _state(self, arrays: tuple[np.ndarray, ...]) -> State:
        return arrays

    def _numbers(self, step: int) -> tuple[float, ...]:
        """Numbers that all blocks of this update need."""
        return ()

    def _block(self, w: np.ndarray, g: np.ndarray, state: State, scratch: np.ndarray, numbers: Numbers) -> None:
        """Update one block in place; `scratch` is free for use, `g` is not."""
        raise NotImplementedError


@dataclass(frozen=True)
class Scaled(Optimizer):
    """An optimizer whose gradient is `rescale * gradient + weight_decay * weights` (PyTorch's L2 weight decay).

    `rescale` is usually 1 / mini-batch size, or 1 / workers: pushes arrive summed.
    """

    learning_rate: float = 0.01
    weight_decay: float = 0.0
    rescale: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_zero(self, "learning_rate", "weight_decay")

    def _scaled(self, w: np.ndarray, g: np.ndarray, scratch: np.ndarray) -> np.ndarray:
        """`rescale * g + weight_decay * w` in a block of its own, or `g` itself where that is the same."""
        return decayed(w, scaled(g, self.rescale), self.weight_decay, scratch)


def scaled(g: np.ndarray, rescale: float) -> np.ndarray:
    """`rescale * g` in a block of scratch, or `g` itself where that is the same."""
    return g if rescale == 1.0 else np.multiply(g, rescale, out=_scratch("scaled", g.dtype, g.size, g))


def decayed(w: np.ndarray, g: np.ndarray, weight_decay: float, scratch: np.ndarray) -> np.ndarray:
    """`g + weight_decay * w` in a block of scratch, or `g` itself where that is the same."""
    if weight_decay == 0.0:
        return g
    np.multiply(w, weight_decay, out=scratch)
    return np.add(g, scratch, out=_scratch("scaled", g.dtype, g.size, g))


def at_least_zero(optimizer: Optimizer, *names: str) -> None:
    """Raise ValueError, naming the option, unless each of the named options is >= 0."""
    for name in names:
        if getattr(optimizer, name) < 0:
            raise ValueError(f"{type(optimizer).__name__}({name}={getattr(optimizer, name)}): give a number >= 0")


def below_one(optimizer: Optimizer, *names: str) -> None:
    """Raise ValueError, naming the option, unless each of the named options is in [0, 1)."""
    for name in names:
        if not 0 <= getattr(optimizer, name) < 1:
            raise ValueError(f"{type(optimizer).__name__}({name}={getattr(optimizer, name)}): give a number in [0, 1)")
