"""A decorator that turns a function into a kernel, which is compiled for the dtype of its first argument.

    @compiled("stored[], const wide[]")
    def scale(out, factors): ...

The kernel gets an array of float16 or bfloat16 as uint16; `widen` and `narrow` convert its elements, `widened_row` and
`store_row` its rows. A call returns 0 if the kernel cannot run, and then nothing has been changed. A kernel that runs
must return another number.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from mpips.collectives.kernels import engine

# dtype of the first array -> dtype in which a kernel computes
WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


class Compiled:
    """A function that is compiled for each dtype of its first array. For the arguments see `compiled`."""

    def __init__(
        self, function: Callable[..., Any], types: str, dtypes: tuple[str, ...], constants: Mapping[str, int]
    ) -> None:
        # the function as Python runs it
        self.function = function
        self._name = function.__name__
        self._types = types
        self._dtypes = dtypes
        try:
            text = inspect.getsource(function)
        except OSError:
            # If the installation has no source files, no kernels can be compiled.
            text, self._dtypes = "", ()
        text = text[text.find("def ") :].replace(f"def {self._name}(", "def kernel(", 1)
        for constant, value in constants.items():
            text = re.sub(rf"\b{constant}\b", str(value), text)
        self._text = text
        self._kernels: dict[np.dtype, engine.Kernel | None] = {}

    def prepare(self, dtype: np.dtype, elements: int = 0) -> engine.Kernel | None:
        """Return the kernel for arrays of a dtype, or None if kernels do not support the dtype.

        If calls on arrays of `elements` elements are expected to save more time than loading takes, the kernel is
        loaded before this returns. Call this while a program sets up, because loading may block for a second or two.
        """
        kernel = self._kernel_for(dtype)
        if kernel is not None:
            kernel.prepare(elements)
        return kernel

    def _kernel_for(self, dtype: np.dtype) -> engine.Kernel | None:
        if dtype not in self._kernels:
            name = dtype.name if dtype.isnative else ""
            self._kernels[dtype] = self._kernel(name) if name in self._dtypes else None
        return self._kernels[dtype]

    def _kernel(self, dtype: str) -> engine.Kernel:
        text, stored = self._text, "uint16" if "16" in dtype else dtype
        for word in ("widen", "narrow"):
            text = text.replace(f"{word}(", f"{word}_{dtype}(" if "16" in dtype else "(")
        for word in ("widened_row", "store_row"):
            text = text.replace(f"{word}(", f"{word}_{dtype if '16' in dtype else 'float'}(")
        text = text.replace("values_at(", f"{stored}_at(")
        types = self._types.replace("stored", stored).replace("wide", WIDE.get(dtype, dtype)).split(", ")
        return engine.kernel(f"{self._name} of {dtype}", text, types)

    def ready(self, array: np.ndarray) -> bool:
        """True if the kernel is loaded for the dtype of an array. If it is not, the caller uses NumPy.

        Blocking if `Kernel.call_for` loads kernels.
        """
        kernel = self._kernel_for(array.dtype)
        return kernel is not None and kernel.call_for(array.size) is not None

    def __call__(self, array: np.ndarray, *rest: np.ndarray | int) -> int:
        """Run the kernel and return its result. Return 0 if it is not loaded, or cannot take these arrays."""
        kernel = self._kernel_for(array.dtype)
        if kernel is None or (call := kernel.call_for(array.size)) is None:
            return 0
        try:
            return int(call(array.view(np.uint16) if array.itemsize == 2 else array, *rest))
        except TypeError:
            # Numba raises TypeError before the kernel runs if an array is not aligned, is not contiguous, or has
            # another dtype.
            return 0


def compiled(
    types: str, dtypes: tuple[str, ...] = tuple(WIDE), constants: Mapping[str, int] = MappingProxyType({})
) -> Callable[[Callable[..., Any]], Compiled]:
    """Decorate a function to make it a kernel.

    Args:
        types: The types of its arguments, separated by ", ". `stored` is the element type of the first array, and
            `wide` the type in which kernels compute with its elements.
        dtypes: The dtypes of the first array for which the kernel may be compiled.
        constants: Words in the source of the function, and the numbers that replace them.
    """
    return lambda function: Compiled(function, types, dtypes, constants)


def widen(x: Any) -> Any:
    """Convert from the dtype of a kernel's first array. Only for use in kernels, whose compiler replaces it."""


def narrow(x: Any) -> Any:
    """Convert to the dtype of a kernel's first array. Only for use in kernels, whose compiler replaces it."""


def widened_row(row: Any, scratch: Any) -> Any:
    """Return a row of a kernel's first array in the dtype in which kernels compute. Only for use in kernels.

    A row of float16 or bfloat16 is converted into `scratch`. Other rows are returned themselves.
    """


def store_row(row: Any, wide: Any, streams: Any, i: int) -> None:
    """Write what `widened_row` has returned into the row. Only for use in kernels.

    A row of float16 or bfloat16 is rounded to nearest if `streams` is empty, and otherwise at random: element k by the
    64 bits mixed64(streams[i] + (k + 1) * golden ratio).
    """
