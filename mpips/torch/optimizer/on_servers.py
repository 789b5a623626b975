"""A PyTorch optimizer whose updates the store's servers make: its numbers there, and the parameters here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from mpips.optimizers.base import Optimizer
from mpips.store.api import KVStore
from mpips.store.keys import calls
from mpips.store.keys.row_sparse import EmptyPush
from mpips.torch.optimizer import translation
from mpips.torch.optimizer.consensus import impatient
from mpips.torch.optimizer.exchange import Step, gradient, share


class OnServers:
    """A way (`survival.Way`): the optimizer's groups are records of the store, and the parameters what was pulled last.
    """

    def __init__(
        self, store: KVStore, optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str],
        records: Sequence[Optimizer], passes: int,
    ) -> None:  # fmt: skip
        """Collective over the workers, blocking."""
        self._store, self._optimizer, self._names, self._passes = store, optimizer, names, passes
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._all_keys = [names[parameter] for parameter in self._parameters]
        self._records, self._numbers = list(records), [numbers(group) for group in optimizer.param_groups]
        self._versions: list[int] = []
        self.sent = False
        for group, record in zip(optimizer.param_groups, records, strict=True):
            store.set_optimizer(record, keys=self._keys(group))
        if store.resumed != 0:  # the store goes on with numbers of its own
            self.renew()

    def begin(self, new: bool) -> None:
        """The servers' parameters."""
        self.take()

    def push(self, step: Step) -> None:
        """Let the servers update, and take the parameters from them. Those without a gradient stay as they are."""
        if step.changed:
            self._see_unchanged()
        self._see_sparse(step)
        self._follow()
        self.sent = True
        each = [*zip(self._all_keys, self._parameters, step.used)]
        used = [(key, parameter) for key, parameter, has in each if has]
        if used:
            grads, outs = [gradient(p, True) for _, p in used], [p.detach() for _, p in used]
            self._store.pushpull([key for key, _ in used], grads, out=outs)
        if rest := [(key, parameter) for key, parameter, has in each if not has]:
            keys = [self._store.settings.keys[key] for key, _ in rest]
            self._store.push([key.name for key in keys], [EmptyPush(key.shape, key.dtype) for key in keys])
            if self._store.layout.asynchronous:  # others may have used them
                self._store.pull([key.name for key in keys], [parameter.detach() for _, parameter in rest])
        self._note()

    def take(self) -> None:
        """Take the parameters from the servers."""
        self._store.pull(self._all_keys, [parameter.detach() for parameter in self._parameters])
        self._note()

    def end(self, step: Step) -> None:
        """All of the step is done."""
        self.sent = False

    def give(self, giver: int, new: bool) -> None:
        """The servers have all."""

    def _follow(self) -> None:
        """Tell the servers of numbers of the groups that have changed. All workers then wait for each other.

        ValueError where the servers cannot go on with such numbers.
        """
        for at, group in enumerate(self._optimizer.param_groups):
            if (found := numbers(group)) == self._numbers[at]:
                continue
            record = translation.record(self._optimizer, group, share(self._store.layout, self._passes))
            if record is None:
                raise ValueError(f"group {at} of the optimizer has {found}, which the servers cannot compute: make "
                                 "another DistributedOptimizer")  # fmt: skip
            before = asdict(self._records[at])
            changed = {name: value for name, value in asdict(record).items() if value != before[name]}
            if changed:
                with impatient(self._store.settings.generation) if self._store.layout.asynchronous else nullcontext():
                    self._store.update_optimizer(keys=self._keys(group), **changed)
            self._records[at], self._numbers[at] = record, found

    def renew(self) -> None:
        """The store has been loaded, or has recovered, with optimizers of its own: the servers hear of other numbers of
        the groups before the next update. ValueError where they are optimizers of another kind."""
        for at, group in enumerate(self._optimizer.param_groups):
            for name in self._keys(group):
                found, mine = self._store.settings.groups.of(name), self._records[at]
                if found is None or type(found) is not type(mine):
                    kind = type(mine).__name__
                    raise ValueError(f"key {name!r} was saved with {found}, and is updated by {kind} here: make the "
                                     "DistributedOptimizer as the saved one was")  # fmt: skip
                self._records[at], self._numbers[at] = found, {}

    def put(self) -> None:
        """The servers take over rank 0's parameters. Collective over the workers, blocking."""
        settings = self._store.settings
        settings.settled("set_parameters")
        keys = [settings.keys[name] for name in self._all_keys]
        tensors = [parameter.detach().contiguous() for parameter in self._parameters]
        values = [calls.first_value(key.name, [tensor]) for key, tensor in zip(keys, tensors, strict=True)]
        settings.run("set_parameters", settings.backend.put(keys, values))

    def _note(self) -> None:
        """The parameters are now those of the servers."""
        self._versions = [parameter._version for parameter in self._parameters]

    def _see_unchanged(self) -> None:
        """RuntimeError where the program has changed a parameter since: the servers have another."""
        for parameter, version in zip(self._parameters, self._versions, strict=True):
            if parameter._version != version:
                name = self._names[parameter]
                raise RuntimeError(f"parameter {name!r} was changed since the last step, and the servers have the old "
                                   "one: call set_parameters() of this optimizer first, on all workers")  # fmt: skip

    def _see_sparse(self, step: Step) -> None:
        """TypeError on all workers where PyTorch's optimizer would refuse sparse gradients."""
        kind, groups = type(self._optimizer), self._optimizer.param_groups
        decays = [bool(group["weight_decay"]) for group in groups for _ in group["params"]]
        for name, sparse, decay in zip(self._all_keys, step.sparse, decays):
            if sparse and (decay or kind not in (torch.optim.SGD, torch.optim.Adagrad)):
                why = " with weight_decay" if decay else ""
                raise TypeError(f"parameter {name!r} has a sparse gradient, which {kind.__name__}{why} does not take: "
                                "make its layer with sparse=False, or choose SGD or Adagrad")  # fmt: skip

    def _keys(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[parameter] for parameter in group["params"]]


def records(optimizer: torch.optim.Optimizer, share: float) -> list[Optimizer] | None:
    """What updates each group on a server; None where the servers cannot do it."""
    found = [translation.record(optimizer, group, share) for group in optimizer.param_groups]
    return None if None in found else [record for record in found if record is not None]


def numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group of parameters, by name; tensors as numbers."""
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if name not in ("params", "param_names")
    }
