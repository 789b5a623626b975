"""Arrays that tests put on the host, on the GPUs of a stand-in for CuPy (`device`), and on a card.

The fixture `xp` is each of these three, `gpu_xp` the two whose arrays lie on GPUs. What runs on a card is marked `gpu`,
and skipped where there is none: `make gpu` runs it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.unit.collectives import device

HostArray = np.ndarray[Any, Any]
CARD = pytest.param("cupy", marks=pytest.mark.gpu)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@cache
def card_is_here() -> bool:
    """Return whether CuPy finds a GPU."""
    if importlib.util.find_spec("cupy") is None:
        return False
    import cupy

    try:
        return bool(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


@pytest.fixture(params=["numpy", "stand-in", CARD])
def xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """NumPy, `device` in CuPy's place, CuPy on a card."""
    yield from modules(request.param)


@pytest.fixture(params=["stand-in", CARD])
def gpu_xp(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`device` in CuPy's place, CuPy on a card."""
    yield from modules(request.param)


def modules(name: str) -> Iterator[Any]:
    """The array module, for the time of a test."""
    if name == "stand-in":
        with device.installed() as state:
            yield device
            assert state.blocked == 0  # what an operation starts on a GPU it waits for step by step
            assert 0 not in state.contexts  # where no vector lies
    elif name == "cupy" and not card_is_here():
        pytest.skip("needs CuPy and a GPU")
    else:
        yield pytest.importorskip(name)


class Bfloat16:
    """A vector of bfloat16 on a card, of no library that `collectives` knows: only the interface says where it is."""

    dtype = BFLOAT16

    def __init__(self, bits: Any) -> None:
        self.bits, self.shape, self.device = bits, bits.shape, bits.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.bits.__cuda_array_interface__, "typestr": BFLOAT16.str}

    def get(self) -> HostArray:
        """The numbers, on the host."""
        return self.bits.get().view(BFLOAT16)


def on_gpu(xp: Any, vector: HostArray, number: int = 0) -> Any:
    """Return the numbers on a GPU: where there are some, on another for each `number`.

    Of the stand-in's never on the first, which nobody should touch then.
    """
    count = device.DEVICES - 1 if xp is device else xp.cuda.runtime.getDeviceCount()
    with xp.cuda.Device(number % count + (xp is device)):
        if xp is device or vector.dtype != BFLOAT16:
            return xp.asarray(vector)
        return Bfloat16(xp.asarray(vector.view(np.uint16)))


def placed(xp: Any, vectors: Sequence[HostArray]) -> list[Any]:
    """Return arrays of these numbers, on one GPU after the other; NumPy's as they are."""
    if xp is np:
        return [np.asarray(vector) for vector in vectors]
    return [on_gpu(xp, vector, number) for number, vector in enumerate(vectors)]


def write(xp: Any, array: Any, values: HostArray) -> None:
    """Queue other numbers for an array, on the current stream of its device."""
    if isinstance(array, np.ndarray):
        array[...] = values
        return
    with array.device:
        array[...] = xp.asarray(values)


def numbers(array: Any) -> HostArray:
    """Return the numbers of an array, on the host."""
    return array if isinstance(array, np.ndarray) else array.get()
