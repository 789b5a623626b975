"""Make the next parameters of a step's gradients: by the store's optimizer, by every worker, or by elastic averaging.

`Gradients` serves all kinds of store (MXNET-MPI, figures 6 and 7). `Summed` is for clipping in a synchronous store,
since
only a rank with the whole sum knows its norm. The store then sums, and has no optimizer. `ElasticAveraging` exchanges
whole models (MXNET-MPI, figure 8; equations in `optimizers.elastic`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

import collectives
from mpips.optimizers.base import Optimizer, Updater, changed
from mpips.optimizers.elastic import INTERVAL, Elastic1, Elastic2
from mpips.store.runtime.rendezvous import attempt
from mpips.training.model import Model, keys_of
from mpips.training.step import clip

_trainers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many Trainers a store has had."""


def own_keys(model: Model, kv: Any) -> list[str]:
    """`keys_of` for the first Trainer of a store; with a prefix for those after it."""
    number = _trainers[kv] = _trainers.get(kv, 0) + 1
    return [key if number == 1 else f"trainer{number}/{key}" for key in keys_of(model)]


def begins(kv: Any, keys: Sequence[str], parameters: Sequence[np.ndarray]) -> bool:
    """Make the keys, of rank 0's parameters; False on a spare that has taken a place: the others did so long ago.

    ValueError there where they did not.
    """
    if not kv.settings.fresh:
        kv.init(list(keys), list(parameters))
        return True
    for key, array in zip(keys, parameters):
        known = kv.settings.keys.get(key)
        there = "no such key" if known is None else f"{known.dtype}{known.shape}"
        if there != (here := f"{array.dtype}{array.shape}"):
            raise ValueError(f"Trainer: key {key!r} is {here} in the program of this spare, and the other workers have "
                             f"{there}: start all with the same program, and let Trainer make its keys before a death")
    return False


def averaged(optimizer: Optimizer, workers: float) -> Optimizer:
    """The optimizer for gradients that arrive as a sum over workers: `rescale` divided by their number."""
    if "rescale" not in {field.name for field in fields(optimizer)}:
        raise ValueError(f"{optimizer!r} has no rescale: a Trainer needs an optimizer of gradients")
    return replace(optimizer, rescale=optimizer.rescale / workers)  # type: ignore[call-arg, attr-defined]


def rescale_of(optimizer: Optimizer) -> float:
    """By how much it multiplies a gradient; every optimizer that `averaged` made can tell."""
    rescale: float = optimizer.rescale  # type: ignore[attr-defined]
    return rescale


def workers_in_a_sum(kv: Any) -> float:
    """Workers whose gradients make one update: all of a synchronous store, a client's of an asynchronous one.

    Where clients differ in size it is their mean: a store has one optimizer, and larger clients take larger steps.
    """
    return kv.num_workers / len(kv.layout.clients) if kv.layout.asynchronous else kv.num_workers


def difference(now: Optimizer, wanted: Optimizer) -> dict[str, Any]:
    """The numbers by which an optimizer differs from another of its class."""
    pairs = ((field.name, getattr(wanted, field.name)) for field in fields(now))
    return {name: number for name, number in pairs if getattr(now, name) != number}


class Gradients:
    """Push gradients, pull parameters; the store's optimizer updates (on servers, or on the workers without any).

    `clip_norm`: in an asynchronous store whose clients have one worker each; what is clipped is a push.
    """

    name = "none"

    def __init__(self, model: Model, kv: Any, optimizer: Optimizer, clip_norm: float | None = None) -> None:
        self._model, self._kv, self.keys, self._clip = model, kv, own_keys(model, kv), clip_norm
        self._optimizer = optimizer
        if begins(kv, self.keys, model.parameters):
            kv.set_optimizer(self._averaged(), keys=self.keys)
            self._pull()

    @property
    def group(self) -> Any:
        """All workers of a synchronous store, a client's of an asynchronous one."""
        layout = self._kv.layout
        return layout.client if layout.asynchronous else layout.workers

    def exchange(self) -> None:
        """Gradients out, parameters back."""
        if self._clip is not None:
            clip(self._model.gradients, self._clip)
        self._kv.pushpull(self.keys, list(self._model.gradients), out=list(self._model.parameters))

    def change(self, numbers: Mapping[str, Any]) -> None:
        """See `KVStore.update_optimizer`."""
        self._kv.update_optimizer(self.keys, **numbers)

    @property
    def numbers(self) -> Optimizer:
        """The store's."""
        found: Optimizer = self._kv.settings.groups.of(self.keys[0])
        return found

    def share(self) -> None:
        """In an asynchronous store: what all have pushed is in the parameters of all."""
        if self._kv.layout.asynchronous:
            self._kv.barrier()
            self._pull()

    def owners(self) -> list[int]:
        """The store's file holds everything."""
        return []

    @property
    def optimizer(self) -> None:
        """The store has it."""

    def arrays(self) -> dict[str, np.ndarray]:
        """None."""
        return {}

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """The parameters are the store's. Its optimizer's `rescale` becomes that of as many workers as are here."""
        now = self.numbers
        wanted = replace(optimizer or now, rescale=rescale_of(self._averaged()))  # type: ignore[call-arg]
        if numbers := difference(now, wanted):
            self._kv.update_optimizer(self.keys, **numbers)
        self._pull()

    def _averaged(self) -> Optimizer:
        return averaged(self._optimizer, workers_in_a_sum(self._kv))

    def _pull(self) -> None:
        """The store's parameters for all workers, before any of them pushes again."""
        self._kv.pull(self.keys, list(self._model.parameters))
        if self._kv.layout.asynchronous:
            self._kv.barrier()


class Summed:
    """The store sums gradients; every worker clips their mean by its global norm, and updates alike.

    Equal sums give equal norms and equal parameters on all workers, bit for bit. Each keeps the optimizer's state.
    """

    name = "none, clipped"

    def __init__(self, model: Model, kv: Any, optimizer: Optimizer, clip_norm: float) -> None:
        self._model, self._kv, self.keys, self._clip = model, kv, own_keys(model, kv), clip_norm
        self._optimizer = optimizer
        if begins(kv, self.keys, model.parameters):
            kv.pull(self.keys, list(model.parameters))
        self._updater = Updater(averaged(optimizer, kv.num_workers), model.parameters)

    @property
    def group(self) -> Any:
        """All workers."""
        return self._kv.layout.workers

    def exchange(self) -> None:
        """Gradients out, their sum back, and the update here."""
        gradients = list(self._model.gradients)
        self._kv.pushpull(self.keys, gradients)
        clip(gradients, self._clip * self._kv.num_workers)
        self._updater.update(gradients)

    def change(self, numbers: Mapping[str, Any]) -> None:
        """Other numbers for the optimizer of every worker."""
        change_here(self._kv, self._updater, numbers)

    def share(self) -> None:
        """All workers have the same parameters."""

    def owners(self) -> list[int]:
        """All are equal: rank 0's count."""
        return [0]

    @property
    def optimizer(self) -> Optimizer:
        """Every worker's."""
        return self._updater.optimizer

    numbers = optimizer

    def arrays(self) -> dict[str, np.ndarray]:
        """Parameters and the optimizer's state."""
        return arrays_here(self.keys, self._model.parameters, self._updater)

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Take them back."""
        rescale = rescale_of(averaged(self._optimizer, self._kv.num_workers))
        restore_here(self.keys, self._model.parameters, self._updater, arrays, optimizer, rescale)


# ---- what an update that is made here shares with elastic averaging


def change_here(kv: Any, updater: Updater, numbers: Mapping[str, Any]) -> None:
    """Other numbers for an optimizer that every worker has. Collective; ValueError or TypeError on all workers."""
    made, refusal = attempt(lambda: changed(updater.optimizer, **numbers))
    words = [(name, repr(numbers[name])) for name in sorted(numbers)]
    kv.settings.agree("update_optimizer", words, refusal, noun="argument")
    updater.optimizer = made


def arrays_here(keys: Sequence[str], parameters: Sequence[np.ndarray], updater: Updater) -> dict[str, np.ndarray]:
    """Parameters, the optimizer's arrays and its step, by name."""
    found = {"step": np.array([updater.step], np.int64)}
    for key, parameter, state in zip(keys, parameters, updater.states):
        found[f"parameter/{key}"] = parameter
        found.update((f"state{slot}/{key}", array) for slot, array in enumerate(state))
    return found


def restore_here(
    keys: Sequence[str], parameters: Sequence[np.ndarray], updater: Updater,
    arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None, rescale: float,
) -> None:  # fmt: skip
    """Write them back; the optimizer's numbers become those that were saved, but for `rescale`, the Trainer's."""
    assert arrays is not None and optimizer is not None
    updater.optimizer = replace(optimizer, rescale=rescale)  # type: ignore[call-arg]
    updater.step = int(arrays["step"][0])
    for name, array in arrays_here(keys, parameters, updater).items():
        if name != "step":
            array[...] = arrays[name]


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
