"""Keep the optimizers and the compression that every worker of a store without servers applies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.compression.base import Compressor, Residuals
from mpips.optimizers.base import Optimizer
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Key, Name
from mpips.store.recovery.plan import decode_settings, encode_settings

Array = NDArray[Any]


class Settings:
    """Changes are made by all workers, after they have compared them; `changes` counts them."""

    def __init__(self, rank: int = 0) -> None:
        """`rank`: of this worker."""
        self.changes, self._rank = 0, rank
        self.groups = Groups()
        self.residuals: Residuals | None = None
        """None where nothing is compressed."""

    def set_optimizer(self, optimizer: Optimizer, keys: Sequence[Name] | None) -> None:
        """This optimizer for these keys; None: for all."""
        self.groups.set(optimizer, keys)
        self.changes += 1

    def update_optimizer(self, numbers: Mapping[str, Any], keys: Sequence[Name] | None) -> None:
        """Other numbers for these keys' optimizers; ValueError or TypeError where they do not fit."""
        self.groups.update(numbers, keys)
        self.changes += 1

    def set_compression(self, compressor: Compressor) -> None:
        """Residuals begin at zero."""
        self.residuals = Residuals(compressor, self._rank)
        self.changes += 1

    def compressing(self, key: Key) -> Residuals | None:
        """Return what compression keeps back, where it compresses the pushes of this key."""
        return self.residuals if key.floats else None

    def payload(self, key: Key, flat: Array) -> Array:
        """Return what this worker adds for a push: where pushes are compressed, what the others would decode."""
        residuals = self.compressing(key)
        return flat if residuals is None else residuals.decoded(key.name, flat)

    def kept(self, keys: Sequence[Key]) -> Array | None:
        """Return what compression has kept back of this worker's pushes, float64, one key behind the other; None where
        nothing is compressed."""
        if self.residuals is None:
            return None
        kept = [(key.size, self.residuals.get(key.name)) for key in keys]
        return np.concatenate([np.zeros(size) if each is None else each.astype(np.float64) for size, each in kept])

    def keep(self, keys: Sequence[Key], values: Sequence[Array]) -> None:
        """Give it back, one array a key."""
        for key, value in zip(keys, values, strict=True):
            if (residuals := self.compressing(key)) is not None:
                residuals.put(key.name, value, key.dtype)

    def forget(self, names: Sequence[Name]) -> None:
        """These keys are gone."""
        self.groups.forget(names)
        if self.residuals is not None:
            self.residuals.forget(names)

    def encode(self) -> bytes:
        """All of it but the residuals, which each worker has of its own."""
        return encode_settings(self.groups, None if self.residuals is None else self.residuals.compressor)

    def take(self, data: bytes, changes: int) -> None:
        """Take over the settings that another worker has encoded, after so many changes. Residuals stay where the
        compressor is the same."""
        self.groups, compressor = decode_settings(data)
        if self.residuals is None or self.residuals.compressor != compressor:
            self.residuals = None if compressor is None else Residuals(compressor, self._rank)
        self.changes = changes
