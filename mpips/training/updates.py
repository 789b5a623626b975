"""Three ways to turn gradients into the next parameters ("updates"): by the store, by each worker, or by each client.

- `StoreUpdate` works with all kinds of store (MXNET-MPI, figures 6 and 7). The store's optimizer updates parameters.
- `WorkerUpdate` is for clipping in a synchronous store. Only a rank that has the whole sum of gradients knows its norm.
  So the store sums without an optimizer, and every worker updates its own parameters.
- `ClientUpdate` lets clients (groups of workers) train independently (`local`). They exchange their parameters by
  elastic averaging (MXNET-MPI, figure 8), or the changes of their parameters (local SGD, DiLoCo).
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
from mpips.training.local import CenterExchange, Elastic, Local, LocalRounds, averaged, workers_in_a_sum
from mpips.training.model import Model, keys_of

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpips.store.api import KVStore

# number of elements that are squared at a time, so that no temporary array is as long as a gradient
BLOCK = 1 << 15
Arrays = Sequence[np.ndarray]
# store -> number of Trainers that have been created on it
_trainers: WeakKeyDictionary[KVStore, int] = WeakKeyDictionary()


def global_norm(gradients: Arrays) -> float:
    """Return the square root of the sum of the squares of all elements. The sum is in float64.

    The order of the additions depends only on the shapes, so equal gradients give equal bits.
    """
    total = 0.0
    for gradient in gradients:
        flat = gradient.reshape(-1)
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK].astype(np.float64)
            total += float(np.dot(block, block))
    return math.sqrt(total)


def clip(gradients: Arrays, limit: float) -> float:
    """Scale gradients so that their global norm is at most `limit`. Return the norm that they had.

    If the norm is not finite, nothing is scaled. The loss will then also show that something is wrong.
    """
    norm = global_norm(gradients)
    if limit < norm < math.inf:
        weigh(gradients, limit / norm)
    return norm


@quiet
def weigh(gradients: Arrays, factor: float) -> None:
    """Multiply gradients by a factor in place. With a factor of 1 no bit changes. With 0 all become 0, even NaN."""
    for gradient in gradients if factor != 1.0 else ():
        if factor == 0.0:
            gradient[...] = 0
        else:
            np.multiply(gradient, factor, out=gradient, casting="same_kind")


def check_clip(clip_norm: float | None) -> float | None:
    """Return `clip_norm` as a float, or None. Raises ValueError unless it is None or a finite number above 0."""
    if clip_norm is None:
        return None
    if isinstance(clip_norm, bool) or not isinstance(clip_norm, (int, float)) or not 0 < clip_norm < math.inf:
        raise ValueError(f"clip_norm={clip_norm!r}: give a finite number above 0")
    return float(clip_norm)


def own_keys(model: Model, kv: KVStore) -> list[str]:
    """Return the keys under which a new Trainer stores its model's parameters. Count the Trainers of the store.

    The keys of the store's first Trainer have no prefix. Every later Trainer gets a prefix of its own, so that Trainers
    do not share keys.
    """
    number = _trainers[kv] = _trainers.get(kv, 0) + 1
    return [key if number == 1 else f"trainer{number}/{key}" for key in keys_of(model)]


def create_keys(kv: KVStore, keys: Sequence[str], parameters: Sequence[np.ndarray]) -> bool:
    """Create the keys of a model, with rank 0's parameters as values, and return True. Collective, blocking.

    On a spare that has replaced a dead worker, create nothing and return False, because the other workers have already
    created the keys. Raise ValueError on the spare if the existing keys do not fit its model.
    """
    if not kv.worker.fresh:
        kv.init(list(keys), list(parameters))
        return True
    for key, array in zip(keys, parameters):
        known = kv.worker.keys.get(key)
        kind = "no such key" if known is None else f"{known.dtype}{known.shape}"
        if kind != (own_kind := f"{array.dtype}{array.shape}"):
            raise ValueError(
                f"Trainer: key {key!r} is {own_kind} in the program of this spare, and the other workers have "
                f"{kind}: start all with the same program, and let Trainer make its keys before a death"
            )
    return False


def rescaled(optimizer: Optimizer, like: Optimizer) -> Optimizer:
    """Return the optimizer with its `rescale` replaced by the `rescale` of `like`, a result of `averaged`."""
    return replace(optimizer, rescale=like.rescale)  # type: ignore[call-arg, attr-defined]


class StoreUpdate:
    """Pushes gradients and pulls parameters. The store runs the optimizer, on its servers or, without any, on workers.

    Args:
        model: The model.
        kv: The store.
        optimizer: The optimizer for the mean gradient.
        clip_norm: The largest norm of a push. For asynchronous stores whose clients have one worker each.

    Attributes:
        keys: The keys of the parameters in the store. Each key is pushed to once in an exchange.
        name: The name of this kind of update in checkpoints and reports.
    """

    name = "none"
    # True if workers train independently between two exchanges with the store
    apart = False
    # the optimizer that runs on every worker, with its current hyperparameters, or None if the store runs it
    optimizer = None

    def __init__(self, model: Model, kv: KVStore, optimizer: Optimizer, clip_norm: float | None = None) -> None:
        self._model = model
        self._kv = kv
        self.keys = own_keys(model, kv)
        self._clip = clip_norm
        self._optimizer = optimizer
        if create_keys(kv, self.keys, model.parameters):
            kv.set_optimizer(averaged(optimizer, workers_in_a_sum(kv)), keys=self.keys)
            self._pull()

    @property
    def group(self) -> MPI.Intracomm:
        """The communicator of the workers whose gradients are summed for one update."""
        layout = self._kv.layout
        return layout.client if layout.asynchronous else layout.workers  # type: ignore[return-value]

    def exchange(self) -> None:
        """Send the model's gradients, and replace its parameters by the updated ones.

        All workers of `group` must call it. Blocking.
        """
        if self._clip is not None:
            clip(self._model.gradients, self._clip)
        self._kv.pushpull(self.keys, list(self._model.gradients), out=list(self._model.parameters))

    def change(self, numbers: Mapping[str, Any]) -> None:
        """Change hyperparameters of the optimizer, such as `learning_rate`. Its state stays.

        All workers of the store must call it.
        """
        self._kv.update_optimizer(self.keys, **numbers)

    @property
    def numbers(self) -> Optimizer:
        """The optimizer with its current hyperparameters, whether the store or the workers run it."""
        optimizer = self._kv.worker.groups.of(self.keys[0])
        assert optimizer is not None
        return optimizer

    def share(self) -> None:
        """Give all workers the same parameters: in an asynchronous store, take those of the servers. Collective."""
        if self._kv.layout.asynchronous:
            self._kv.barrier()
            self._pull()

    def owners(self) -> list[int]:
        """Return the ranks of the workers whose arrays a checkpoint saves: one from each group with equal parameters.

        The list is empty if the store holds everything that a checkpoint needs.
        """
        return []

    def arrays(self) -> dict[str, np.ndarray]:
        """Return this worker's arrays that the store does not hold, by name. Some may be copies."""
        return {}

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Restore arrays and parameters after `kv.load`. Collective over all workers, blocking.

        The optimizer's `rescale` is set for the current number of workers.

        Args:
            arrays: This worker's arrays from the checkpoint, or None if the store holds everything.
            optimizer: The optimizer with the hyperparameters of the checkpoint. None leaves the hyperparameters
                unchanged.
        """
        now = self.numbers
        wanted = rescaled(optimizer or now, averaged(self._optimizer, workers_in_a_sum(self._kv)))
        pairs = {field.name: getattr(wanted, field.name) for field in fields(now)}
        if numbers := {name: number for name, number in pairs.items() if getattr(now, name) != number}:
            self._kv.update_optimizer(self.keys, **numbers)
        self._pull()

    def rejoin(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer) -> None:
        """Restore arrays and parameters after a death. All workers must call it.

        Args:
            arrays: The arrays of a worker of this group, or None if no worker that has them is left in the group.
            optimizer: The optimizer, with the hyperparameters that it had at the step to which the training goes back.
        """
        self.restore(arrays, optimizer)

    def _pull(self) -> None:
        """Pull the store's parameters into the model. Collective over all workers, blocking.

        All workers get the same parameters. In an asynchronous store this needs a barrier at the end: a worker that
        went on could push at once, and the workers that pull later would get other parameters. In a synchronous store
        nothing changes until all workers have pushed.
        """
        self._kv.pull(self.keys, list(self._model.parameters))
        if self._kv.layout.asynchronous:
            self._kv.barrier()


class WorkerUpdate:
    """The store sums gradients. Every worker clips the mean gradient by its global norm and updates its own parameters.

    Equal sums give equal norms and equal parameters on all workers, bit for bit. Each worker keeps the optimizer's
    state. `StoreUpdate` documents the methods.
    """

    name = "none, clipped"
    apart = False

    def __init__(self, model: Model, kv: KVStore, optimizer: Optimizer, clip_norm: float | None) -> None:
        self._model = model
        self._kv = kv
        self.keys = own_keys(model, kv)
        self._clip = clip_norm
        self._optimizer = optimizer
        if create_keys(kv, self.keys, model.parameters):
            self._prepare()
            kv.pull(self.keys, list(model.parameters))
        self._updater = self._new_updater(optimizer)

    def _prepare(self) -> None:
        """Set up the store after its keys have been created. Collective."""

    def _new_updater(self, optimizer: Optimizer) -> Updater:
        """Return an updater without state for the sum of the group's gradients.

        It has the hyperparameters of `optimizer`, except for `rescale`.
        """
        mean = rescaled(optimizer, averaged(self._optimizer, self.group.Get_size()))
        return Updater(mean, self._model.parameters)

    @property
    def group(self) -> MPI.Intracomm:
        return self._kv.layout.workers  # type: ignore[return-value]

    def exchange(self) -> None:
        gradients = list(self._model.gradients)
        self._kv.pushpull(self.keys, gradients)
        self._update(gradients)

    def _update(self, sums: Arrays) -> None:
        """Clip gradients that are sums over the group, and update the parameters with them. Local."""
        if self._clip is not None:
            # The limit applies to the mean, so scale it for the sum.
            clip(sums, self._clip * self.group.Get_size())
        self._updater.update(sums)

    def owners(self) -> list[int]:
        """Return [0], because all workers have equal arrays."""
        return [0]

    def share(self) -> None:
        """Do nothing, because all workers have equal parameters already."""

    def change(self, numbers: Mapping[str, Any]) -> None:
        made, refusal = attempt(lambda: changed(self._updater.optimizer, **numbers))
        arguments = [(name, repr(numbers[name])) for name in sorted(numbers)]
        self._kv.worker.agree("update_optimizer", arguments, refusal, noun="argument")
        self._updater.optimizer = made

    @property
    def optimizer(self) -> Optimizer:
        return self._updater.optimizer

    numbers = optimizer

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the parameters, and the optimizer's arrays and its step, by name."""
        arrays = {"step": np.array([self._updater.step], np.int64)}
        for key, parameter, state in zip(self.keys, self._model.parameters, self._updater.states):
            arrays[f"parameter/{key}"] = parameter
            arrays.update((f"state{slot}/{key}", array) for slot, array in enumerate(state))
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        """Write the arrays back, and take the hyperparameters of `optimizer`."""
        assert arrays is not None and optimizer is not None
        self._updater.optimizer = rescaled(optimizer, averaged(self._optimizer, self.group.Get_size()))
        self._updater.step = int(arrays["step"][0])
        for name, array in self.arrays().items():
            if name != "step":
                array[...] = arrays[name]

    def rejoin(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer) -> None:
        self.restore(arrays, optimizer)


class ClientUpdate(WorkerUpdate):
    """Each client trains by itself, and now and then exchanges its parameters with the centre.

    The centre is the store's own copy of the parameters. With the rule `Elastic` an exchange comes before an update
    (MXNET-MPI, figure 8). With the rule `Local` it comes after an update. `clip_norm` limits the mean gradient of the
    client's workers.
    """

    apart = True

    def __init__(
        self, model: Model, kv: KVStore, optimizer: Optimizer, rule: Elastic | Local, clip_norm: float | None = None
    ) -> None:
        self.rule = rule
        self.name = "none, elastic" if isinstance(rule, Elastic) else "none, local"
        super().__init__(model, kv, optimizer, clip_norm)
        joins = kv.worker.fresh
        self._exchange: CenterExchange | None = None
        self._rounds: LocalRounds | None = None
        if isinstance(rule, Elastic):
            self._exchange = CenterExchange(kv, self.keys, model.parameters, rule, self.group.Get_size())
            return
        self._rounds = LocalRounds(kv, self.keys, model.parameters, rule, joins=joins)
        if kv.layout.asynchronous and not joins:
            # Wait until all workers have pulled rank 0's values. A worker that pushed earlier would change the values
            # that the others pull.
            kv.barrier()

    def _prepare(self) -> None:
        center: Optimizer
        if isinstance(self.rule, Elastic):
            center = Elastic1(alpha=self.rule.alpha)
        else:
            center = averaged(self.rule.optimizer, workers_in_a_sum(self._kv))
        self._kv.set_optimizer(center, keys=self.keys)

    @property
    def group(self) -> MPI.Intracomm:
        return self._kv.layout.client  # type: ignore[return-value]

    def exchange(self) -> None:
        """Update with the client's mean gradient, and exchange parameters with the centre if that is due."""
        parameters, places = self._model.parameters, range(len(self.keys))
        if isinstance(self.rule, Elastic) and self._updater.step % self.rule.interval == 0:
            assert self._exchange is not None
            self._exchange.prepare(parameters, places)
            self._exchange.send(places)
            self._exchange.take(parameters, places)
        for gradient in self._model.gradients if self.group.Get_size() > 1 else ():
            collectives.allreduce(gradient, self.group)
        self._update(self._model.gradients)
        if self._rounds is not None:
            self._rounds.step(parameters)

    def owners(self) -> list[int]:
        """Return the first worker of each client."""
        return [client.start for client in self._kv.layout.clients]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays of `WorkerUpdate`. With `Local`, also return the last centre and the number of steps."""
        arrays = super().arrays()
        if self._rounds is not None:
            arrays.update((f"center/{key}", center) for key, center in zip(self.keys, self._rounds.centers))
            arrays["steps"] = np.array([self._rounds.steps], np.int64)
        return arrays

    def restore(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer | None) -> None:
        super().restore(arrays, optimizer)
        if self._rounds is not None:
            assert arrays is not None
            self._rounds.average_over_workers()
            self._rounds.begin_at(int(arrays["steps"][0]))

    def rejoin(self, arrays: Mapping[str, np.ndarray] | None, optimizer: Optimizer) -> None:
        """After a death, continue with `arrays`, which this client has saved.

        If they are None, begin with the store's weights (the centre) and a new optimizer.
        """
        if arrays is not None:
            super().restore(arrays, optimizer)
        else:
            self._kv.pull(self.keys, list(self._model.parameters))
            self._updater = self._new_updater(optimizer)
        if self._rounds is not None:
            self._rounds.rejoin(self._model.parameters)


# Any of the three kinds of update. The union does not name `ClientUpdate`, because it is a subclass of `WorkerUpdate`.
Update = StoreUpdate | WorkerUpdate
