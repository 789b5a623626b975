"""Elastic averaging: the optimizer runs on every worker, and now and then it and the servers' centre attract each other
(MXNET-MPI, equations 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import collectives
from mpips.store.api import KVStore
from mpips.torch.optimizer.exchange import Step, gradient


class Elastic:
    """A way (`survival.Way`), for stores that do not survive deaths. `alpha`: how strong they attract each other, every
    `interval` steps."""

    def __init__(
        self, store: KVStore, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], keys: Sequence[str],
        passes: int, alpha: float, interval: int,
    ) -> None:  # fmt: skip
        self._store, self._optimizer, self._passes = store, optimizer, passes
        self._parameters, self._keys = parameters, keys
        self._alpha, self._interval, self._steps = alpha, interval, 0
        self.sent = False
        client = store.layout.client
        self._members = client.Get_size() if client is not None else 1

    def begin(self, new: bool) -> None:
        """Rank 0's parameters, which are the centre's."""
        self._store.pull(self._keys, [parameter.detach() for parameter in self._parameters])

    def push(self, step: Step) -> None:
        """The centre moves towards this worker, and it towards the centre."""
        if self._steps % self._interval == 0:
            centers = [p.detach() / self._members for p in self._parameters]  # a push adds up the client's
            self._store.push(self._keys, centers)
            self._store.pull(self._keys, centers)
            with torch.no_grad():
                for parameter, center in zip(self._parameters, centers):
                    if parameter.requires_grad:
                        parameter.lerp_(center, self._alpha)
        used = [place for place, has in enumerate(step.used) if has]
        given = [gradient(self._parameters[place], True) for place in used]
        if self._members > 1 and given:
            collectives.grouped_allreduce(given, self._store.layout.client)
        for place, total in zip(used, given):
            total.mul_(1.0 / (self._members * self._passes))
            self._parameters[place].grad = total.to_sparse(1) if step.sparse[place] else total

    def take(self) -> None:
        """There is no way back to what this worker was."""

    def end(self, step: Step) -> None:
        """Step, unless it is skipped."""
        if not step.skipped:
            self._optimizer.step()
        self._steps += 1

    def renew(self) -> None:
        """Stores that recover are refused."""

    def give(self, giver: int, new: bool) -> None:
        """No worker is ever new."""
