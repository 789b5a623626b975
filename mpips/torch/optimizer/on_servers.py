"""A PyTorch optimizer whose updates the store's servers make: its numbers there, and the parameters here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mpips.keys import calls
from mpips.optimizers.base import Optimizer
from mpips.store import KVStore
from mpips.torch.optimizer import translation


class OnServers:
    """The optimizer's groups as records of the store, and the parameters' versions since they were pulled last."""

    def __init__(
        self, store: KVStore, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str],
        records: Sequence[Optimizer], share: float,
    ) -> None:  # fmt: skip
        """Collective over the workers, blocking. `share`: gradients arrive as a sum, and are multiplied by it."""
        self._store, self._optimizer, self._names, self._share = store, optimizer, names, share
        self._records, self._numbers = list(records), [_numbers(group) for group in optimizer.param_groups]
        self._versions: list[int] = []
        for group, record in zip(optimizer.param_groups, records, strict=True):
            store.set_optimizer(record, keys=self._keys(group))

    def follow(self) -> None:
        """Tell the servers of numbers of the groups that have changed. All workers then wait for each other.

        ValueError where the servers cannot go on with such numbers.
        """
        for at, group in enumerate(self._optimizer.param_groups):
            if (numbers := _numbers(group)) == self._numbers[at]:
                continue
            record = translation.record(self._optimizer, group, self._share)
            if record is None:
                raise ValueError(f"group {at} of the optimizer has {numbers}, which the servers cannot compute: make "
                                 "another DistributedOptimizer")  # fmt: skip
            before = asdict(self._records[at])
            changed = {name: value for name, value in asdict(record).items() if value != before[name]}
            if changed:
                self._store.update_optimizer(keys=self._keys(group), **changed)
            self._records[at], self._numbers[at] = record, numbers

    def restored(self) -> None:
        """The store has been loaded, with the optimizers of the file: the servers hear of other numbers of the groups
        before the next update. ValueError where they are optimizers of another kind."""
        for at, group in enumerate(self._optimizer.param_groups):
            for name in self._keys(group):
                found, mine = self._store.settings.groups.of(name), self._records[at]
                if found is None or type(found) is not type(mine):
                    kind = type(mine).__name__
                    raise ValueError(f"key {name!r} was saved with {found}, and is updated by {kind} here: make the "
                                     "DistributedOptimizer as the saved one was")  # fmt: skip
                self._records[at], self._numbers[at] = found, {}

    def noted(self, parameters: Sequence[Tensor]) -> None:
        """The parameters are now those of the servers."""
        self._versions = [parameter._version for parameter in parameters]

    def see_unchanged(self, parameters: Sequence[Tensor]) -> None:
        """RuntimeError where the program has changed a parameter since: the servers have another."""
        for parameter, version in zip(parameters, self._versions, strict=True):
            if parameter._version != version:
                name = self._names[parameter]
                raise RuntimeError(f"parameter {name!r} was changed since the last step, and the servers have the old "
                                   "one: call set_parameters() of this optimizer first, on all workers")  # fmt: skip

    def take(self, parameters: Sequence[Tensor]) -> None:
        """The servers take over rank 0's parameters. Collective over the workers, blocking."""
        settings = self._store.settings
        settings.settled("set_parameters")
        keys = [settings.keys[self._names[parameter]] for parameter in parameters]
        tensors = [parameter.detach().contiguous() for parameter in parameters]
        values = [calls.first_value(key.name, [tensor]) for key, tensor in zip(keys, tensors, strict=True)]
        settings.run("set_parameters", settings.backend.put(keys, values))

    def _keys(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[parameter] for parameter in group["params"]]


def records(optimizer: torch.optim.Optimizer, share: float) -> list[Optimizer] | None:
    """What updates each group on a server; None where the servers cannot do it."""
    found = [translation.record(optimizer, group, share) for group in optimizer.param_groups]
    return None if None in found else [record for record in found if record is not None]


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
