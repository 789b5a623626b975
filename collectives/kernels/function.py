"""A kernel as a function in a module: its text is compiled for the dtype of its first array, and calling it runs that.

    @compiled("stored[], const wide[]")
    def scale(out, factors): ...

An array of 16-bit numbers comes as uint16; `widen` and `narrow` convert its elements. Calling a kernel returns 0 where
it cannot run, and has changed nothing then; one that runs returns something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mpips.collectives.kernels import engine

WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Dtypes of arrays that kernels know, and what they reckon in."""


class Compiled:
    """A function, compiled for each dtype of its first array."""

    def __init__(
        self, function: Callable[..., Any], types: str, dtypes: tuple[str, ...], constants: Mapping[str, int]
    ) -> None:
        self._name, self._types, self._dtypes = function.__name__, types, dtypes
        try:
            text = inspect.getsource(function)
        except OSError:  # an installation without sources
            text, self._dtypes = "", ()
        text = text[text.find("def ") :].replace(f"def {self._name}(", "def kernel(", 1)
        for constant, value in constants.items():
            text = text.replace(constant, str(value))
        self._text = text
        self._kernels: dict[np.dtype, engine.Kernel | None] = {}

    def prepare(self, dtype: np.dtype) -> engine.Kernel | None:
        """Ask for the kernel of this dtype, so that it is there in time; None where there is none."""
        if dtype not in self._kernels:
            name = dtype.name if dtype.isnative else ""
            self._kernels[dtype] = self._kernel(name) if name in self._dtypes else None
        return self._kernels[dtype]

    def _kernel(self, dtype: str) -> engine.Kernel:
        text, stored = self._text, "uint16" if "16" in dtype else dtype
        for word in ("widen", "narrow"):
            text = text.replace(f"{word}(", f"{word}_{dtype}(" if "16" in dtype else "(")
        types = self._types.replace("stored", stored).replace("wide", WIDE.get(dtype, dtype)).split(", ")
        return engine.kernel(f"{self._name} of {dtype}", text, types)

    def ready(self, array: np.ndarray) -> bool:
        """Return whether the kernel is there for such arrays; where it is not, NumPy does this one's elements."""
        kernel = self.prepare(array.dtype)
        return kernel is not None and kernel.call_for(array.size) is not None

    def __call__(self, array: np.ndarray, *rest: np.ndarray | int) -> int:
        """Return what the kernel does; 0 where it is not there, or not for such arrays."""
        kernel = self.prepare(array.dtype)
        if kernel is None or (call := kernel.call_for(array.size)) is None:
            return 0
        try:
            return int(call(array.view(np.uint16) if array.itemsize == 2 else array, *rest))
        except TypeError:  # before it runs: arrays that are not aligned or contiguous, or of other dtypes
            return 0


def compiled(
    types: str, dtypes: tuple[str, ...] = tuple(WIDE), constants: Mapping[str, int] = MappingProxyType({})
) -> Callable[[Callable[..., Any]], Compiled]:
    """Make a kernel of a function; a decorator. In `types` the first array's elements are `stored`, and reckoned with
    as `wide`. `constants`: words of its text, and the numbers that they stand for."""
    return lambda function: Compiled(function, types, dtypes, constants)


def widen(x: Any) -> Any:
    """Stand for a conversion from the dtype of a kernel's first array."""


def narrow(x: Any) -> Any:
    """Stand for a conversion to the dtype of a kernel's first array."""
