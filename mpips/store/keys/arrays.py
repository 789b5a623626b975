"""Arrays of NumPy, PyTorch, JAX, CuPy and others, as the host arrays that a store sends.

Host arrays are viewed, never copied: NumPy's, what has `__array_interface__` or DLPack, CPU tensors of PyTorch (with or
without requires_grad, bfloat16 too). JAX arrays are read, and cannot be written. Arrays on GPUs (CuPy, torch, whatever
has `__cuda_array_interface__`) are summed on the device into pinned host memory, and results are copied back from there
(`collectives.tensor`), after what the user has queued on his streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from collectives import arrays
from mpips.store.runtime.tasks import Task

if TYPE_CHECKING:
    from collectives.tensor.vectors import Ticket

Array = NDArray[Any]
PACK_BYTES = 4 << 20
"""Of many small arrays so many bytes travel as one."""


def is_device(x: Any) -> bool:
    """Whether it is an array in the memory of a GPU."""
    return type(x) is not np.ndarray and arrays.is_device(x)


def host(x: Any) -> Array:
    """The array as a NumPy view of its memory; TypeError, which says what to pass, where it has none on the host."""
    if type(x) is np.ndarray:
        return x
    if is_jax(x):
        return np.asarray(x)
    try:
        return arrays.host(x)
    except TypeError:
        raise
    except Exception as error:  # of whatever library it is
        raise TypeError(f"{type(x).__name__} cannot be viewed as a host array ({error})") from error


def viewed(x: Any) -> Any:
    """A CPU tensor of PyTorch's as a view of it, a list with such views in it; anything else as it is."""
    if type(x) is np.ndarray:
        return x
    if type(x) in (list, tuple):
        views = [viewed(one) for one in x]
        return x if all(map(is_, views, x)) else views
    if not arrays.is_torch(x) or x.device.type != "cpu":
        return x
    try:
        return arrays.host(x)
    except (TypeError, RuntimeError):  # the checks of a call say why
        return x


def is_jax(x: Any) -> bool:
    """Whether it is an array of JAX, which must not be written."""
    return type(x).__module__.split(".")[0] in ("jax", "jaxlib")


def runs(sizes: Iterable[int], most: int = PACK_BYTES) -> Iterator[slice]:
    """Yield slices of neighbours that have at most `most` bytes together; what is larger comes alone."""
    start, end, total = 0, 0, 0
    for size in sizes:
        if end > start and total + size > most:
            yield slice(start, end)
            start, total = end, 0
        end, total = end + 1, total + size
    if end > start:
        yield slice(start, end)


def packed(given: Sequence[Array]) -> Array:
    """Return the bytes of C-contiguous arrays, one behind the other; of one alone the array itself."""
    return given[0] if len(given) == 1 else np.concatenate([array.reshape(-1).view(np.uint8) for array in given])


def unpack(vector: Array, into: Sequence[Array]) -> None:
    """Write what `packed` returned on another rank to arrays like those."""
    if len(into) == 1:
        return  # it is the array itself
    at = 0
    for array in into:
        array.reshape(-1).view(np.uint8)[...] = vector[at : at + array.nbytes]
        at += array.nbytes


class Staged:
    """Arrays of one shape on GPUs (and perhaps the host), with one host array beside them in pinned memory.

    Made in the thread that calls the store, as what its streams hold comes first. `host` has the shape of the arrays.
    ValueError or TypeError where the arrays do not suit. The arrays stay as they are until a task of this is over.
    """

    def __init__(self, values: Sequence[Any], written: bool) -> None:
        from collectives.tensor.arguments import place
        from collectives.tensor.cuda import CudaVectors  # needs CuPy

        self._values = values  # places keep no array alive
        places = [place(value, f"array {index}", written) for index, value in enumerate(values)]
        shapes = {tuple(value.shape) for value in values}
        if len(shapes) > 1 or len({one.dtype for one in places}) > 1:
            kinds = ", ".join(f"{one.dtype.name}{tuple(value.shape)}" for one, value in zip(places, values))
            raise ValueError(f"the arrays of one key, one per device, differ in shape or dtype: {kinds}")
        self._vectors = CudaVectors(places, places, "add")
        self.host: Array = self._vectors.host(places[0].n).reshape(shapes.pop())
        self._open = False

    def begin(self) -> Ticket:
        """Queue `host` = the sum of the arrays, after what the caller has queued; the ticket says when it is there."""
        self._vectors.begin()
        self._open = True
        flat = self.host.reshape(-1)
        return self._vectors.gather(0, flat.size, None, flat)

    def gathered(self, ticket: Ticket) -> Task[None]:
        """Wait for the sum."""
        with contextlib.closing(self):
            while not ticket():
                yield False

    def spread(self) -> Task[None]:
        """Every array = `host`."""
        self._vectors.begin()
        self._open = True
        with contextlib.closing(self):
            ticket = self._vectors.spread(0, self.host.size, self.host.reshape(-1))
            while not ticket():
                yield False

    def close(self) -> None:
        """Nothing runs on the arrays and the pinned memory any more."""
        if self._open:
            self._open = False
            self._vectors.finish()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self.close()
