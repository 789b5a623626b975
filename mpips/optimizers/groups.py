"""Which optimizer a key has: a default, and others for groups of keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mpips.optimizers.base import Optimizer, changed

Name = int | str


class Groups:
    """The optimizers of a store's keys, as data. Every change is whole or, where it raises, none.

    `default`: that of all keys without one of their own, or None. `own`: those of single keys.
    """

    def __init__(self, default: Optimizer | None = None, own: Mapping[Name, Optimizer] | None = None) -> None:
        self.default = default
        self.own: dict[Name, Optimizer] = dict(own or {})

    def of(self, key: Name) -> Optimizer | None:
        """The optimizer of a key; None: its value becomes the sum of what is pushed."""
        return self.own.get(key, self.default)

    def set(self, optimizer: Optimizer, keys: Iterable[Name] | None = None) -> None:
        """This optimizer for these keys; without `keys` for every key, also those to come: groups end."""
        if keys is None:
            self.default, self.own = optimizer, {}
        else:
            self.own.update(dict.fromkeys(keys, optimizer))

    def update(self, numbers: Mapping[str, Any], keys: Iterable[Name] | None = None) -> None:
        """Other numbers for these keys' optimizers, or for all: see `changed`, whose errors it raises.

        Raises ValueError where there is no optimizer yet.
        """
        if keys is None:
            if self.default is None and not self.own:
                raise ValueError("there is no optimizer to update: call set_optimizer first")
            default = None if self.default is None else changed(self.default, **numbers)
            own = {key: changed(optimizer, **numbers) for key, optimizer in self.own.items()}
            self.default, self.own = default, own
            return
        own = dict(self.own)
        for key in keys:
            optimizer = self.of(key)
            if optimizer is None:
                raise ValueError(f"key {key!r} has no optimizer to update: call set_optimizer first")
            own[key] = changed(optimizer, **numbers)
        self.own = own

    def forget(self, keys: Iterable[Name]) -> None:
        """These keys are gone: a key made anew under such a name has the default."""
        for key in keys:
            self.own.pop(key, None)

    def __bool__(self) -> bool:
        """Whether any key has an optimizer."""
        return self.default is not None or bool(self.own)
