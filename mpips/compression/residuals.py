"""What compression has kept back of pushes: a residual for every interval that this worker sends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError
from mpips.compression.base import Compressor, unfit
from mpips.store.keys.key import Name

Array = NDArray[Any]


class Residuals:
    """A compressor with a residual by name; each begins as zeros with the first gradient. Memory: one array a name."""

    def __init__(self, compressor: Compressor, rank: int = 0) -> None:
        """`rank`: of the worker that sends."""
        self.compressor, self._rank = compressor, rank
        self._kept: dict[Hashable, Array] = {}

    def payload(self, name: Hashable, gradient: Array, key: Name = "", start: int = 0) -> Array:
        """What to send for this gradient (1-D, elements from `start` on of the key), uint8; what is left out stays in
        the residual. CollectiveError, and nothing has changed, where it holds what is no finite float32."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = self.compressor.init(gradient)
        if (at := unfit(gradient, kept)) >= 0:
            raise CollectiveError(
                f"element {start + at} of what rank {self._rank} pushes of key {key!r} is {gradient[at]:g}, and "
                f"{type(self.compressor).__name__} sends finite numbers: leave the step out on all ranks, or clip it"
            )
        return self.compressor.encode(gradient, kept)

    def decoded(self, key: Name, gradient: Array) -> Array:
        """What a receiver makes of `payload(key, gradient)`: an array like the gradient."""
        payload = self.payload(key, gradient, key)
        out = np.empty_like(gradient)
        self.compressor.decode(payload, out, add=False)
        return out

    def get(self, name: Hashable) -> Array | None:
        """The residual of a name (n,), not copied; None before its first gradient."""
        return self._kept.get(name)

    def put(self, name: Hashable, values: Array, dtype: np.dtype) -> None:
        """Begin with this residual (n,) for gradients of that dtype; `values` is copied."""
        kept = self._kept[name] = self.compressor.init(np.empty(values.size, dtype))
        kept[...] = values

    def forget(self, names: Iterable[Hashable]) -> None:
        """These names are gone."""
        for name in names:
            self._kept.pop(name, None)
