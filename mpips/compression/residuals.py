"""What compression has kept back of pushes: a residual for every interval that this worker sends."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.compression.base import Compressor

Array = NDArray[Any]


class Residuals:
    """A compressor with a residual by name; each begins as zeros with the first gradient. Memory: one array a name."""

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._kept: dict[Hashable, Array] = {}

    def payload(self, name: Hashable, gradient: Array) -> Array:
        """What to send for this gradient (1-D), uint8; what is left out stays in the residual."""
        kept = self._kept.get(name)
        if kept is None:
            kept = self._kept[name] = self.compressor.init(gradient)
        return self.compressor.encode(gradient, kept)

    def decoded(self, name: Hashable, gradient: Array) -> Array:
        """What a receiver makes of `payload(name, gradient)`: an array like the gradient."""
        payload = self.payload(name, gradient)
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
