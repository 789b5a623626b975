"""A PyTorch optimizer that runs on every worker, on gradients that a synchronous store has summed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpips.store.api import KVStore
from mpips.torch.optimizer.exchange import Step, among, gradient, share
from mpips.torch.state import broadcast_state, broadcast_tensors


class OnWorkers:
    """A way (`survival.Way`): the store holds sums of gradients, and each worker has parameters and state."""

    def __init__(
        self, store: KVStore, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], keys: Sequence[str],
        passes: int,
    ) -> None:  # fmt: skip
        self._store, self._optimizer, self._passes = store, optimizer, passes
        self._parameters, self._keys = parameters, keys
        self._sums: list[Tensor] = []
        """Where gradients have to stay until the exchange is over: room for their sums."""
        if store.layout.survives:
            self._sums = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in parameters]
        self._totals: list[Tensor] = []
        """The sums, once they are there."""
        self._share, self.sent = 1.0, False
        self._given: list[Tensor] = []
        """Parameters that another worker gave, until the first step."""

    def begin(self, new: bool) -> None:
        """Rank 0's parameters, which the store holds until the first step, or those that were given."""
        if not new:
            self._store.pull(self._keys, [parameter.detach() for parameter in self._parameters])
        for parameter, given in zip(self._parameters, self._given):
            parameter.detach().copy_(given)

    def push(self, step: Step) -> None:
        """Sum gradients."""
        given, self._given = [gradient(p, used) for p, used in zip(self._parameters, step.used)], []
        self._share, self.sent = share(self._store.layout, self._passes), True
        self._store.pushpull(self._keys, given, out=self._sums or given)
        self._totals = self._sums or given

    def take(self) -> None:
        """Have the sums."""
        self._store.pull(self._keys, self._sums)
        self._totals = self._sums

    def end(self, step: Step) -> None:
        """Step, unless it is skipped. A parameter that nobody used has no gradient, so it stays as it is."""
        self.sent = False
        if step.skipped:
            return
        for parameter, total, used, sparse in zip(self._parameters, self._totals, step.used, step.sparse):
            if not used:
                continue
            if sparse:
                parameter.grad = (total * self._share).to_sparse(1)
                continue
            if parameter.grad is None:
                parameter.grad = total.clone() if self._sums else total
            elif parameter.grad.data_ptr() != total.data_ptr():
                parameter.grad.copy_(total)
            parameter.grad.mul_(self._share)
        self._optimizer.step()
        self._totals = []

    def renew(self) -> None:
        """Nothing here is the store's."""

    def give(self, giver: int, new: bool) -> None:
        """Parameters and the optimizer's state. Numbers of groups stay the new worker's own, as schedulers begin with
        them."""
        with among(self._store.layout, self._store.settings.generation, "rejoin") as workers:
            broadcast_tensors([parameter.detach() for parameter in self._parameters], giver, workers)
            mine = self._optimizer.state_dict()
            theirs = broadcast_state(mine, giver, workers)
        if new:
            self._optimizer.load_state_dict({**theirs, "param_groups": mine["param_groups"]})
            self._given = [parameter.detach().clone() for parameter in self._parameters]
