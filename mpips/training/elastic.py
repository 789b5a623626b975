"""Elastic averaging in a Trainer (MXNET-MPI, figure 8): what is exchanged when. Equations: `optimizers.elastic`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import collectives
from mpips.optimizers.base import Optimizer
from mpips.optimizers.elastic import INTERVAL, Elastic1, Elastic2
from mpips.optimizers.updater import Updater
from mpips.training.clipping import clip
from mpips.training.gradients import arrays_here, averaged, begins, change_here, own_keys, rescale_of, restore_here
from mpips.training.model import Model


@dataclass(frozen=True)
class Elastic:
    """Elastic averaging: every `interval` iterations client and centre move together by `alpha`."""

    alpha: float = 0.5
    interval: int = INTERVAL

    def __post_init__(self) -> None:
        Elastic1(alpha=self.alpha)
        if self.interval < 1:
            raise ValueError(f"Elastic(interval={self.interval}): give a number of iterations >= 1")


class ElasticAveraging:
    """Every `interval` iterations the client and the servers' centre attract each other; else SGD inside the client.

    `clip_norm` bounds the mean gradient of the client's workers.
    """

    name = "none, elastic"

    def __init__(
        self, model: Model, kv: Any, optimizer: Optimizer, elastic: Elastic, clip_norm: float | None = None
    ) -> None:
        self._model, self._kv, self.keys, self._interval = model, kv, own_keys(model, kv), elastic.interval
        self._clip, self._workers, self._optimizer = clip_norm, kv.layout.client.Get_size(), optimizer
        if begins(kv, self.keys, model.parameters):
            kv.set_optimizer(Elastic1(alpha=elastic.alpha), keys=self.keys)
            kv.pull(self.keys, list(model.parameters))
        self._centers = [np.empty_like(array) for array in model.parameters]
        self._attract = Updater(Elastic2(alpha=elastic.alpha), model.parameters)
        self._descend = Updater(averaged(optimizer, self._workers), model.parameters)

    @property
    def group(self) -> Any:
        """This worker's client."""
        return self._kv.layout.client

    def exchange(self) -> None:
        """Attract, where it is time; then an update by the client's mean gradient."""
        if self._descend.step % self._interval == 0:
            for center, parameter in zip(self._centers, self._model.parameters):
                np.divide(parameter, self._workers, out=center)  # a push sums over the client's workers, who are equal
            self._kv.push(self.keys, self._centers)
            self._kv.pull(self.keys, self._centers)
            self._attract.update(self._centers)
        for gradient in self._model.gradients:
            collectives.allreduce(gradient, self.group)
        if self._clip is not None:
            clip(self._model.gradients, self._clip * self._workers)
        self._descend.update(self._model.gradients)

    def change(self, numbers: Mapping[str, Any]) -> None:
        """Other numbers for the optimizer of every worker."""
        change_here(self._kv, self._descend, numbers)

    def share(self) -> None:
        """Each client has parameters of its own."""

    def owners(self) -> list[int]:
        """The first worker of each client."""
        return [client.start for client in self._kv.layout.clients]

    @property
    def optimizer(self) -> Optimizer:
        """Every worker's; that of the centre is the store's."""
        return self._descend.optimizer

    numbers = optimizer

    def arrays(self) -> dict[str, np.ndarray]:
        """The client's parameters and its optimizer's state; the centre is the store's."""
        return arrays_here(self.keys, self._model.parameters, self._descend)

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Take them back. Without arrays: begin at the servers' centre."""
        self._workers = self._kv.layout.client.Get_size()
        averaging = averaged(self._optimizer, self._workers)
        if arrays is None:
            self._kv.pull(self.keys, list(self._model.parameters))
            self._descend = Updater(averaging, self._model.parameters)
            return
        restore_here(self.keys, self._model.parameters, self._descend, arrays, optimizer, rescale_of(averaging))
