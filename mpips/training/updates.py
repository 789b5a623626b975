"""Make the next parameters of a step's gradients: by the store's optimizer, by every worker, or by elastic averaging.

`Gradients` serves all kinds of store (MXNET-MPI, figures 6 and 7). `Summed` is for clipping in a synchronous store: a
rank that has the whole sum alone knows its norm. The store then sums, and has no optimizer. `ElasticAveraging`
exchanges whole models (`local`; MXNET-MPI, figure 8), `LocalTraining` what they have changed (DiLoCo).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

import mpips.collectives as collectives
from mpips.collectives.kernels.quiet import quiet
from mpips.optimizers.base import Optimizer, changed
from mpips.optimizers.elastic import Elastic1
from mpips.optimizers.equation import Updater
from mpips.store.runtime.rendezvous import attempt
from mpips.training.local import Elastic, Exchange, Local, LocalRounds, averaged, workers_in_a_sum
from mpips.training.model import Model, keys_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpips.store.api import KVStore

BLOCK = 1 << 15
"""Elements that are squared at once, so that no array of a gradient's length is made."""
Arrays = Sequence[np.ndarray]
_trainers: WeakKeyDictionary[KVStore, int] = WeakKeyDictionary()
"""The number of Trainers that a store has had."""


def global_norm(gradients: Arrays) -> float:
    """Return the square root of the sum of all elements' squares, added in float64.

    The order of the sum depends on shapes alone: equal gradients give equal bits.
    """
    total = 0.0
    for gradient in gradients:
        flat = gradient.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK].astype(np.float64)
            total += float(np.dot(block, block))
    return math.sqrt(total)


def clip(gradients: Arrays, limit: float) -> float:
    """Scale gradients so that their global norm is at most `limit`; return the norm that they had.

    Where the norm is not finite nothing is scaled: the loss then says so, too.
    """
    norm = global_norm(gradients)
    if limit < norm < math.inf:
        weigh(gradients, limit / norm)
    return norm


@quiet
def weigh(gradients: Arrays, factor: float) -> None:
    """Multiply by a factor. 1 changes no bit; 0 gives zeros, whatever was there."""
    for gradient in gradients if factor != 1.0 else ():
        if factor == 0.0:
            gradient[...] = 0
        else:
            np.multiply(gradient, factor, out=gradient, casting="same_kind")


def check_clip(clip_norm: float | None) -> float | None:
    """Return the limit of a norm; ValueError where it is none."""
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm={clip_norm!r}: give a finite number above 0")
    return float(clip_norm)


def own_keys(model: Model, kv: KVStore) -> list[str]:
    """Return `keys_of` for the first Trainer of a store; with a prefix for those after it."""
    number = _trainers[kv] = _trainers.get(kv, 0) + 1
    return [key if number == 1 else f"trainer{number}/{key}" for key in keys_of(model)]


def begins(kv: KVStore, keys: Sequence[str], parameters: Sequence[np.ndarray]) -> bool:
    """Make the keys, of rank 0's parameters. Return False on a spare that has taken a place: the others have.

    ValueError there where they did not.
    """
    if not kv.worker.fresh:
        kv.init(list(keys), list(parameters))
        return True
    for key, array in zip(keys, parameters):
        known = kv.worker.keys.get(key)
        there = "no such key" if known is None else f"{known.dtype}{known.shape}"
        if there != (here := f"{array.dtype}{array.shape}"):
            raise ValueError(
                f"Trainer: key {key!r} is {here} in the program of this spare, and the other workers have "
                f"{there}: start all with the same program, and let Trainer make its keys before a death"
            )
    return False


def rescaled(optimizer: Optimizer, like: Optimizer) -> Optimizer:
    """Return the optimizer with the `rescale` of another, which `averaged` made."""
    return replace(optimizer, rescale=like.rescale)  # type: ignore[call-arg, attr-defined]


class Gradients:
    """Push gradients, pull parameters; the store's optimizer updates (on servers, or on the workers without any).

    `clip_norm`: in an asynchronous store whose clients have one worker each; what is clipped is a push. `keys`: of the
    parameters in the store, each pushed once an exchange. `name`: what a checkpoint calls it, and a report.
    """

    name = "none"
    apart = False
    """Whether workers train by themselves between two exchanges."""
    optimizer = None
    """The optimizer of every worker, with the numbers of now; None where the store has it."""

    def __init__(self, model: Model, kv: KVStore, optimizer: Optimizer, clip_norm: float | None = None) -> None:
        self._model, self._kv, self.keys, self._clip = model, kv, own_keys(model, kv), clip_norm
        self._optimizer = optimizer
        if begins(kv, self.keys, model.parameters):
            kv.set_optimizer(averaged(optimizer, workers_in_a_sum(kv)), keys=self.keys)
            self._pull()

    @property
    def group(self) -> MPI.Intracomm:
        """Return the communicator of the workers whose gradients make one update."""
        layout = self._kv.layout
        return layout.client if layout.asynchronous else layout.workers  # type: ignore[return-value]

    def exchange(self) -> None:
        """Send the model's gradients, and leave the next parameters in it. All workers of `group` call it; blocking."""
        if self._clip is not None:
            clip(self._model.gradients, self._clip)
        self._kv.pushpull(self.keys, list(self._model.gradients), out=list(self._model.parameters))

    def change(self, numbers: Mapping[str, Any]) -> None:
        """Change numbers of the optimizer, such as `learning_rate`; its state stays. All workers of the store call."""
        self._kv.update_optimizer(self.keys, **numbers)

    @property
    def numbers(self) -> Optimizer:
        """Return the optimizer with the numbers of now, wherever it is."""
        found = self._kv.worker.groups.of(self.keys[0])
        assert found is not None
        return found

    def share(self) -> None:
        """Take the parameters that all workers have in common, where there are such. All workers call."""
        if self._kv.layout.asynchronous:
            self._kv.barrier()
            self._pull()

    def owners(self) -> list[int]:
        """Return the workers that keep arrays, one of each group of equal ones; none where the store holds all."""
        return []

    def arrays(self) -> dict[str, np.ndarray]:
        """Return this worker's arrays that the store does not hold, by name; live or copies."""
        return {}

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Take arrays and parameters back, after `kv.load`; `rescale` is that of the workers that are here.

        `optimizer`: the numbers of then; None: as they are. All workers call.
        """
        now = self.numbers
        wanted = rescaled(optimizer or now, averaged(self._optimizer, workers_in_a_sum(self._kv)))
        pairs = {field.name: getattr(wanted, field.name) for field in fields(now)}
        if numbers := {name: number for name, number in pairs.items() if getattr(now, name) != number}:
            self._kv.update_optimizer(self.keys, **numbers)
        self._pull()

    rejoin = restore
    """Take them back after a death. `arrays`: None, where nobody of the group is left that has them."""

    def _pull(self) -> None:
        """Pull the store's parameters on all workers, before any of them pushes again."""
        self._kv.pull(self.keys, list(self._model.parameters))
        if self._kv.layout.asynchronous:
            self._kv.barrier()


class OnWorkers:
    """The optimizer runs on every worker, which keeps its state, by the mean of the group's gradients. Calls are those
    of `Gradients`."""

    name: str
    apart = False

    def __init__(self, model: Model, kv: KVStore, optimizer: Optimizer, clip_norm: float | None) -> None:
        self._model, self._kv, self.keys, self._clip = model, kv, own_keys(model, kv), clip_norm
        self._optimizer = optimizer
        if begins(kv, self.keys, model.parameters):
            self._prepare()
            kv.pull(self.keys, list(model.parameters))
        self._updater = self._new_updater()

    def _prepare(self) -> None:
        """Set the store up, once its keys are there. Collective."""

    def _new_updater(self) -> Updater:
        return Updater(averaged(self._optimizer, self.group.Get_size()), self._model.parameters)

    @property
    def group(self) -> MPI.Intracomm:
        raise NotImplementedError

    def exchange(self) -> None:
        raise NotImplementedError

    def owners(self) -> list[int]:
        raise NotImplementedError

    def share(self) -> None:
        """Do nothing: what workers have in common they have."""

    def change(self, numbers: Mapping[str, Any]) -> None:
        made, refusal = attempt(lambda: changed(self._updater.optimizer, **numbers))
        words = [(name, repr(numbers[name])) for name in sorted(numbers)]
        self._kv.worker.agree("update_optimizer", words, refusal, noun="argument")
        self._updater.optimizer = made

    @property
    def optimizer(self) -> Optimizer:
        return self._updater.optimizer

    numbers = optimizer

    def arrays(self) -> dict[str, np.ndarray]:
        """Return parameters, the optimizer's arrays and its step, by name."""
        found = {"step": np.array([self._updater.step], np.int64)}
        for key, parameter, state in zip(self.keys, self._model.parameters, self._updater.states):
            found[f"parameter/{key}"] = parameter
            found.update((f"state{slot}/{key}", array) for slot, array in enumerate(state))
        return found

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Write arrays back; the optimizer's numbers become those that were saved."""
        assert arrays is not None and optimizer is not None
        self._updater.optimizer = rescaled(optimizer, averaged(self._optimizer, self.group.Get_size()))
        self._updater.step = int(arrays["step"][0])
        for name, array in self.arrays().items():
            if name != "step":
                array[...] = arrays[name]

    def rejoin(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Take them back after a death."""
        self.restore(arrays, optimizer)


class Summed(OnWorkers):
    """The store sums gradients; every worker clips their mean by its global norm, and updates alike.

    Equal sums give equal norms and equal parameters on all workers, bit for bit.
    """

    name = "none, clipped"

    @property
    def group(self) -> MPI.Intracomm:
        return self._kv.layout.workers  # type: ignore[return-value]

    def exchange(self) -> None:
        gradients = list(self._model.gradients)
        self._kv.pushpull(self.keys, gradients)
        assert self._clip is not None
        clip(gradients, self._clip * self._kv.num_workers)
        self._updater.update(gradients)

    def owners(self) -> list[int]:
        """Return rank 0: all are equal."""
        return [0]


class ElasticAveraging(OnWorkers):
    """Every `interval` iterations the client and the servers' centre attract each other; else SGD inside the client.

    `clip_norm` bounds the mean gradient of the client's workers.
    """

    name = "none, elastic"

    def __init__(
        self, model: Model, kv: KVStore, optimizer: Optimizer, elastic: Elastic, clip_norm: float | None = None
    ) -> None:
        self._elastic = elastic
        super().__init__(model, kv, optimizer, clip_norm)
        self._exchange = Exchange(kv, self.keys, model.parameters, elastic, self.group.Get_size())

    def _prepare(self) -> None:
        self._kv.set_optimizer(Elastic1(alpha=self._elastic.alpha), keys=self.keys)

    @property
    def group(self) -> MPI.Intracomm:
        return self._kv.layout.client  # type: ignore[return-value]

    def exchange(self) -> None:
        """Attract, where it is time; then update by the client's mean gradient."""
        workers = self.group.Get_size()
        if self._updater.step % self._elastic.interval == 0:
            places = range(len(self.keys))
            self._exchange.measure(self._model.parameters, places)
            self._exchange.send(places)
            self._exchange.take(self._model.parameters, places)
        for gradient in self._model.gradients:
            collectives.allreduce(gradient, self.group)
        if self._clip is not None:
            clip(self._model.gradients, self._clip * workers)
        self._updater.update(self._model.gradients)

    def owners(self) -> list[int]:
        """Return the first worker of each client."""
        return [client.start for client in self._kv.layout.clients]

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Write arrays back; without any, begin at the servers' centre."""
        if arrays is None:
            self._kv.pull(self.keys, list(self._model.parameters))
            self._updater = self._new_updater()
        else:
            super().restore(arrays, optimizer)


class LocalTraining(OnWorkers):
    """Each client trains by itself, and its changes go through the store's outer optimizer now and then (`local`).

    `clip_norm` bounds the mean gradient of the client's workers.
    """

    name = "none, local"
    apart = True

    def __init__(
        self, model: Model, kv: KVStore, optimizer: Optimizer, local: Local, clip_norm: float | None = None
    ) -> None:
        self._local = local
        super().__init__(model, kv, optimizer, clip_norm)
        joins = bool(kv.worker.fresh)
        self._rounds = LocalRounds(kv, self.keys, model.parameters, local, joins=joins)
        if kv.layout.asynchronous and not joins:
            kv.barrier()  # all have pulled what rank 0 gave before anybody pushes

    def _prepare(self) -> None:
        outer = averaged(self._local.optimizer, workers_in_a_sum(self._kv))
        self._kv.set_optimizer(outer, keys=self.keys)

    @property
    def group(self) -> MPI.Intracomm:
        return self._kv.layout.client  # type: ignore[return-value]

    def exchange(self) -> None:
        """Update by the client's mean gradient; then exchange what is due."""
        workers = self.group.Get_size()
        for gradient in self._model.gradients if workers > 1 else ():
            collectives.allreduce(gradient, self.group)
        if self._clip is not None:
            clip(self._model.gradients, self._clip * workers)
        self._updater.update(self._model.gradients)
        self._rounds.step(self._model.parameters)

    def owners(self) -> list[int]:
        """Return the first worker of each client."""
        return [client.start for client in self._kv.layout.clients]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return also the centre of the last exchange, from which changes are counted, and the steps until now."""
        centers = {f"center/{key}": center for key, center in zip(self.keys, self._rounds.centers)}
        return {**super().arrays(), **centers, "steps": np.array([self._rounds.steps], np.int64)}

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Write arrays back, and go on counting from their step."""
        super().restore(arrays, optimizer)
        assert arrays is not None
        self._rounds.see_workers()
        self._rounds.begin_at(int(arrays["steps"][0]))

    def rejoin(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Go on with what this worker has; without arrays, from the outer parameters, with a new inner optimizer."""
        assert optimizer is not None
        if arrays is None:
            self._updater = self._new_updater()
        self._updater.optimizer = rescaled(optimizer, averaged(self._optimizer, self.group.Get_size()))
        self._rounds.rejoin(self._model.parameters)


Update = Gradients | OnWorkers
"""The ways from gradients to the next parameters."""
