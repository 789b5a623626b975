"""What all keys of a store without servers have in common: optimizers and compression, as every worker knows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mpips import compression, optimizers
from mpips.compression import Compressor, Residuals
from mpips.keys.key import Name
from mpips.optimizers import Groups, Optimizer


class _Record(msgspec.Struct, array_like=True):
    default: bytes
    own: list[tuple[Name, bytes]]
    compression: dict[str, Any] | None


class Settings:
    """Changes are made by all workers, after they have compared them; `changes` counts them."""

    def __init__(self) -> None:
        self.changes = 0
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
        self.residuals = Residuals(compressor)
        self.changes += 1

    def forget(self, names: Sequence[Name]) -> None:
        """These keys are gone."""
        self.groups.forget(names)
        if self.residuals is not None:
            self.residuals.forget(names)

    def encode(self) -> bytes:
        """All of it but the residuals, which each worker has of its own."""
        default = self.groups.default
        return msgspec.msgpack.encode(
            _Record(
                b"" if default is None else optimizers.encode(default),
                [(name, optimizers.encode(optimizer)) for name, optimizer in self.groups.own.items()],
                None if self.residuals is None else compression.options(self.residuals.compressor),
            )
        )

    def take(self, data: bytes, changes: int) -> None:
        """What another worker has encoded, after so many changes. Residuals stay where the compressor is the same."""
        record = msgspec.msgpack.decode(data, type=_Record)
        default = optimizers.decode(record.default) if record.default else None
        self.groups = Groups(default, {name: optimizers.decode(optimizer) for name, optimizer in record.own})
        compressor = None if record.compression is None else compression.create(record.compression)
        if self.residuals is None or self.residuals.compressor != compressor:
            self.residuals = None if compressor is None else Residuals(compressor)
        self.changes = changes
