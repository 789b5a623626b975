"""Three ways for a DistributedOptimizer to update parameters: on servers, on workers, or by elastic averaging.

- `ServerExchange`: the store's servers update the parameters, with the optimizer of `mpips.optimizers` that is
  equivalent to PyTorch's.
- `WorkerExchange`: every worker runs PyTorch's optimizer on the mean of all workers' gradients.
- `ElasticExchange`: every worker runs PyTorch's optimizer on its own. Now and then the worker's parameters and the
  centre, a copy of the parameters on the servers, move towards each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

import mpips.collectives as collectives
from mpips.collectives.fabric.wait import Limits
from mpips.optimizers import SGD, AdaGrad, Adam, AdamW, Optimizer, RMSProp
from mpips.optimizers.elastic import Elastic1
from mpips.store.keys import arguments
from mpips.store.keys.row_sparse import EmptyPush
from mpips.torch.lockstep import content, gather_rows
from mpips.torch.state import broadcast_state, broadcast_tensors, worker_collectives

if TYPE_CHECKING:
    from mpips.store.api import KVStore
    from mpips.store.roles import Layout
    from mpips.store.runtime.generation import Generation

# In an asynchronous store, a worker that waits this long in a collective call warns that other workers are missing.
WARN_SECONDS = 10.0


class AgreedStep(NamedTuple):
    """The result of the comparison between the workers that make a step together."""

    # for each parameter, whether any worker has a gradient; all False if the step is skipped
    used: Sequence[bool]
    # for each parameter, whether any worker has a sparse gradient
    sparse: Sequence[bool]
    # True if a gradient has overflowed on some worker (GradScaler); then no parameter changes
    skipped: bool
    # key of a parameter that the program itself has changed since the last step; "" unless every worker has changed one
    changed: str


class GradientExchange:
    """Base class of the ways to turn gradients into new parameters.

    A step calls `push`, or after some deaths `take`, and then `end`.
    """

    # True if gradients of this step may have been pushed
    sent = False
    # True if the program has loaded an optimizer state, and the servers do not have the model's parameters yet
    is_loaded = False

    def begin(self, new: bool) -> None:
        """Take the parameters that the other workers have. Blocking.

        `new` is True if this worker has just replaced a dead worker. Then `give` has already received the values that
        the store does not keep.
        """
        raise NotImplementedError

    def push(self, step: AgreedStep) -> None:
        """Exchange gradients, and take the result. Blocking. The caller may call it again after a StoreError."""
        raise NotImplementedError

    def take(self) -> None:
        """Take the result of an exchange that the store has already completed. Blocking."""

    def end(self, step: AgreedStep) -> None:
        """Finish the step on this worker. Local."""
        raise NotImplementedError

    def put_loaded(self) -> None:
        """If `is_loaded`, copy the model's parameters to the servers. Collective and blocking in that case."""

    def renew(self) -> None:
        """Continue with a store that has loaded a file, or that has recovered and may have fewer workers."""

    def give(self, giver: int, new: bool) -> None:
        """Broadcast the values that the store does not keep from worker `giver` to new workers. Collective, blocking.

        `new` is True if this worker has just replaced a dead worker.
        """


def choose_exchange(
    store: KVStore,
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    passes: int,
    elastic: float | None,
    interval: int,
) -> GradientExchange:
    """Return the kind of exchange that suits an optimizer and a store. Collective over the workers, blocking.

    Args:
        store: The store, whose keys exist.
        optimizer: PyTorch's optimizer.
        names: The key of each parameter.
        passes: The number of backward passes before each step.
        elastic: The alpha of elastic averaging, or None.
        interval: The number of steps between two exchanges of elastic averaging.

    Raises:
        ValueError: No exchange suits this optimizer and this store.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [names[p] for p in parameters]
    if elastic is not None:
        store.set_optimizer(Elastic1(alpha=elastic))
        return ElasticExchange(store, optimizer, parameters, keys, passes, elastic, interval)
    if store.layout.num_servers:
        rescale = gradient_share(store.layout, passes)
        records = [server_optimizer(optimizer, group, rescale) for group in optimizer.param_groups]
        if None not in records:
            every = [each for own in optimizer.state.values() for each in own.values()]
            if any(isinstance(each, Tensor) and each.any() for each in every):
                raise ValueError(
                    f"{type(optimizer).__name__} has made steps, and the servers would begin its state "
                    "anew: wrap it before, or choose a store without servers, which keeps it"
                )
            return ServerExchange(store, optimizer, names, [each for each in records if each is not None], passes)
    if store.layout.asynchronous:
        raise ValueError(
            f"{type(optimizer).__name__} with these options or hooks has no counterpart on the servers, "
            "which an asynchronous store needs: choose SGD, Adam, AdamW, RMSprop or Adagrad, or a "
            "synchronous kind"
        )
    if store.resumed and not store.worker.fresh:
        raise ValueError(
            f"{type(optimizer).__name__} runs on the workers, and the store's checkpoint has neither "
            "parameters nor state of it: choose an optimizer that runs on servers, or save by "
            "torch.save and load_state_dict"
        )
    return WorkerExchange(store, optimizer, parameters, keys, passes)


def check_elastic(store: KVStore, elastic: float | None) -> None:
    """Raise ValueError if `elastic` is set and the store does not support elastic averaging."""
    if elastic is None:
        return
    if not store.layout.asynchronous:
        raise ValueError(f"elastic={elastic} needs an asynchronous store, as mpi_async, not {store.type}")
    if store.layout.survives:
        raise ValueError(
            f"elastic={elastic} does not go on after a death: leave out spares={store.layout.spares}, or elastic"
        )


# ---- on servers


class ServerExchange(GradientExchange):
    """The servers update the parameters, and a step pulls the new values.

    Each parameter group of PyTorch's optimizer becomes an optimizer of the store.
    """

    def __init__(
        self,
        store: KVStore,
        optimizer: torch.optim.Optimizer,
        names: Mapping[Tensor, str],
        records: Sequence[Optimizer],
        passes: int,
    ) -> None:
        """Set the store's optimizers. Collective over the workers, blocking."""
        self._store = store
        self._optimizer = optimizer
        self._names = names
        self._passes = passes
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._all_keys = [names[parameter] for parameter in self._parameters]
        # for each group, the store's optimizer, and the hyperparameters that it was created from
        self._records = list(records)
        self._numbers = [group_numbers(group) for group in optimizer.param_groups]
        for group, record in zip(optimizer.param_groups, records, strict=True):
            store.set_optimizer(record, keys=self._keys(group))
        # A store that was loaded from a checkpoint has the hyperparameters that were saved with it.
        if store.resumed != 0:
            self.renew()

    def begin(self, new: bool) -> None:
        self.take()

    def push(self, step: AgreedStep) -> None:
        """Push gradients, let the servers update, and pull the parameters.

        A parameter without a gradient on any worker keeps its value. In a synchronous store that survives deaths, all
        servers have completed the update when this call returns, and no recovery can undo it.
        """
        if self.is_loaded:
            self.put_loaded()
        elif step.changed and (changed := self._find_changed()):
            raise RuntimeError(
                f"parameter {changed!r} was changed since the last step, and the servers have the old "
                "one: call set_parameters() of this optimizer first, on all workers, or put the old one "
                "back before the step, from a copy"
            )
        if has_step_hooks(self._optimizer):
            raise RuntimeError(
                f"{type(self._optimizer).__name__} has got a hook on its step, which servers do not "
                "call: register it before the optimizer is wrapped"
            )
        self._check_sparse(step)
        self._update_numbers()
        self.sent = True
        store = self._store
        each = [*zip(self._all_keys, self._parameters, step.used)]
        used = [(key, parameter) for key, parameter, has in each if has]
        rest = [(key, parameter) for key, parameter, has in each if not has]
        # Every key must be pushed to equally often, so a parameter without a gradient gets an empty push.
        if rest:
            keys = [store.worker.keys[key] for key, _ in rest]
            store.push([key.name for key in keys], [EmptyPush(key.shape, key.dtype) for key in keys])
        if used:
            with values_of([parameter for _, parameter in used]) as outs:
                store.pushpull([key for key, _ in used], [gradient(p, True) for _, p in used], out=outs)
        # In an asynchronous store other workers may have updated the parameters that have no gradient here.
        if rest and store.layout.asynchronous:
            with values_of([parameter for _, parameter in rest]) as outs:
                store.pull([key for key, _ in rest], outs)
        elif rest and store.layout.survives:
            store.worker.settle()

    def _find_changed(self) -> str:
        """Return the key of a parameter that differs from the servers' value, or "" if all are equal. Blocking.

        In a synchronous store all workers return a key if any of them finds one, so that all raise the error.
        """
        servers = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in self._parameters]
        self._store.pull(self._all_keys, servers)
        # 4 rounding errors can remain when a program has changed weights and changed them back.
        place = find_unlike(self._parameters, servers, 4)
        layout = self._store.layout
        if not layout.asynchronous and layout.num_workers > 1:
            with worker_collectives(self._store, "step") as workers:
                place = int(gather_rows(np.array([place]), workers, "parameters that have changed").max())
        return self._all_keys[place] if place >= 0 else ""

    def take(self) -> None:
        with values_of(self._parameters) as outs:
            self._store.pull(self._all_keys, outs)

    def end(self, step: AgreedStep) -> None:
        self.sent = False

    def renew(self) -> None:
        """Take over the store's optimizers, after the store has loaded a file or has recovered.

        If the hyperparameters of the groups differ from those of the store, the next `push` sends them to the servers
        before the update. Raises ValueError if an optimizer of the store is of another kind.
        """
        for at, group in enumerate(self._optimizer.param_groups):
            for name in self._keys(group):
                current, record = self._store.worker.groups.of(name), self._records[at]
                if current is None or type(current) is not type(record):
                    kind = type(record).__name__
                    raise ValueError(
                        f"key {name!r} was saved with {current}, and is updated by {kind} here: make the "
                        "DistributedOptimizer as the saved one was"
                    )
                self._records[at], self._numbers[at] = current, {}

    def put_loaded(self) -> None:
        if self.is_loaded:
            self.put()
            self.take()

    def put(self) -> None:
        """Copy rank 0's parameters to the servers. Collective over the workers, blocking."""
        worker = self._store.worker
        worker.agree_settled("set_parameters")
        keys = [worker.keys[name] for name in self._all_keys]
        tensors = [parameter.detach().contiguous() for parameter in self._parameters]
        values = [arguments.first_value(key.name, [tensor]) for key, tensor in zip(keys, tensors, strict=True)]
        worker.run("set_parameters", worker.backend.store_values(keys, values))
        self.is_loaded = False

    def by_parameter(self) -> dict[Tensor, Optimizer]:
        """Return the servers' optimizers by parameter."""
        groups = zip(self._optimizer.param_groups, self._records)
        return {parameter: record for group, record in groups for parameter in group["params"]}

    def _update_numbers(self) -> None:
        """Send changed hyperparameters of the groups, such as a learning rate, to the servers.

        If hyperparameters have changed, the workers wait for each other. Raises ValueError if the servers have no
        optimizer that supports the new values.
        """
        for at, group in enumerate(self._optimizer.param_groups):
            if (numbers := group_numbers(group)) == self._numbers[at]:
                continue
            record = server_optimizer(self._optimizer, group, gradient_share(self._store.layout, self._passes))
            if record is None:
                raise ValueError(
                    f"group {at} of the optimizer has {numbers}, which the servers cannot compute: make "
                    "another DistributedOptimizer"
                )
            before = asdict(self._records[at])
            changed = {name: value for name, value in asdict(record).items() if value != before[name]}
            if changed:
                patience = warn_soon(self._store.worker.generation) if self._store.layout.asynchronous else None
                with patience or nullcontext():
                    self._store.update_optimizer(keys=self._keys(group), **changed)
            self._records[at], self._numbers[at] = record, numbers

    def _check_sparse(self, step: AgreedStep) -> None:
        """Raise TypeError on all workers if a gradient is sparse and PyTorch's optimizer would refuse it."""
        kind, groups = type(self._optimizer), self._optimizer.param_groups
        decays = [bool(group["weight_decay"]) for group in groups for _ in group["params"]]
        for name, sparse, decay in zip(self._all_keys, step.sparse, decays):
            if sparse and (decay or kind not in (torch.optim.SGD, torch.optim.Adagrad)):
                why = " with weight_decay" if decay else ""
                raise TypeError(
                    f"parameter {name!r} has a sparse gradient, which {kind.__name__}{why} does not take: "
                    "make its layer with sparse=False, or choose SGD or Adagrad"
                )

    def _keys(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[parameter] for parameter in group["params"]]


# ---- on workers


class WorkerExchange(GradientExchange):
    """The store sums gradients, and each worker updates its own parameters. For synchronous stores."""

    def __init__(
        self,
        store: KVStore,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        keys: Sequence[str],
        passes: int,
    ) -> None:
        self._store = store
        self._optimizer = optimizer
        self._passes = passes
        self._parameters = parameters
        self._keys = keys
        # Separate memory for the sums, only for a store that survives deaths. After a death the same gradients are
        # pushed again, so the sums must not overwrite them.
        self._sums: list[Tensor] = []
        if store.layout.survives:
            self._sums = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in parameters]
        # the summed gradients of this step, once they have been exchanged
        self._totals: list[Tensor] = []
        self._share = 1.0
        # position of a parameter with a sparse gradient in this step -> the rows for which any worker has a gradient
        self._rows: dict[int, Tensor] = {}
        # parameters that this worker, if it is new, has received from another worker; kept until the first step
        self._given: list[Tensor] = []

    def begin(self, new: bool) -> None:
        """Take rank 0's parameters, which the store holds until the first step.

        A new worker uses the parameters that it has received from another worker (`give`).
        """
        if not new:
            with values_of(self._parameters) as outs:
                self._store.pull(self._keys, outs)
        for parameter, given in zip(self._parameters, self._given):
            parameter.detach().copy_(given)

    def push(self, step: AgreedStep) -> None:
        given, self._given = own_gradients(self._parameters, step.used), []
        sparse = [place for place, each in enumerate(step.sparse) if each and step.used[place]]
        self._rows = {}
        if sparse:
            with worker_collectives(self._store, "rows of sparse gradients") as workers:
                self._rows = gather_used_rows(self._parameters, sparse, workers)
        self._share, self.sent = gradient_share(self._store.layout, self._passes), True
        self._store.pushpull(self._keys, given, out=self._sums or given)
        self._totals = self._sums or given

    def take(self) -> None:
        self._store.pull(self._keys, self._sums)
        self._totals = self._sums

    def end(self, step: AgreedStep) -> None:
        """Run the optimizer on the mean gradients, unless the step is skipped.

        A parameter that no worker used has no gradient, so it keeps its value.
        """
        self.sent = False
        if step.skipped:
            return
        for place, (parameter, total, used) in enumerate(zip(self._parameters, self._totals, step.used)):
            if used:
                mean = total * self._share if self._sums else total.mul_(self._share)
                give_gradient(parameter, mean, self._rows.get(place))
        self._optimizer.step()
        self._totals = []

    def give(self, giver: int, new: bool) -> None:
        """Send the parameters and the optimizer's state to new workers.

        A new worker keeps the hyperparameters of its own groups, because its schedulers start from them.
        """
        with worker_collectives(self._store, "rejoin") as workers:
            broadcast_tensors([parameter.detach() for parameter in self._parameters], giver, workers)
            own_state = self._optimizer.state_dict()
            theirs = broadcast_state(own_state, giver, workers)
        if new:
            self._optimizer.load_state_dict({**theirs, "param_groups": own_state["param_groups"]})
            self._given = [parameter.detach().clone() for parameter in self._parameters]


# ---- elastic averaging


class ElasticExchange(WorkerExchange):
    """Elastic averaging (MXNET-MPI, equations 2 and 3). For stores that do not survive deaths.

    The workers of a client average their gradients, and each worker runs the optimizer. The centre on the servers
    starts as rank 0's parameters. Every `interval` steps the worker's parameters and the centre move towards each
    other, by `alpha` times their difference.
    """

    def __init__(
        self,
        store: KVStore,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        keys: Sequence[str],
        passes: int,
        alpha: float,
        interval: int,
    ) -> None:
        super().__init__(store, optimizer, parameters, keys, passes)
        self._alpha = alpha
        self._interval = interval
        # number of exchanges of gradients so far
        self._steps = 0
        self._client = store.layout.client
        self._members = self._client.Get_size() if self._client is not None else 1

    def push(self, step: AgreedStep) -> None:
        """Exchange parameters with the centre, if that is due. Then sum the gradients over the client's workers."""
        if self._steps % self._interval == 0:
            # A push sums over the client's workers. So each worker divides its parameters by the number of workers.
            share = 1.0 / self._members
            centers = [(p.detach() * share).contiguous() for p in self._parameters]
            self._store.push(self._keys, centers)
            self._store.pull(self._keys, centers)
            with torch.no_grad():
                for parameter, center in zip(self._parameters, centers):
                    if parameter.requires_grad:
                        parameter.lerp_(center, self._alpha)
        used = [place for place, has in enumerate(step.used) if has]
        self._rows = gather_used_rows(self._parameters, [place for place in used if step.sparse[place]], self._client)
        self._share = 1.0 / (self._members * self._passes)
        self._totals = own_gradients(self._parameters, step.used)
        if self._members > 1 and used:
            collectives.grouped_allreduce([self._totals[place] for place in used], self._client)
        self._steps += 1


# ---- shared functions


def gradient(parameter: Tensor, used: bool) -> Tensor:
    """Return this rank's gradient, contiguous and dense, or zeros if the rank has no gradient or `used` is False."""
    grad = parameter.grad
    if grad is None or not used:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return (grad.detach().to_dense() if grad.is_sparse else grad.detach()).contiguous()


def own_gradients(parameters: Sequence[Tensor], used: Sequence[bool]) -> list[Tensor]:
    """Return `gradient` of each parameter. No two results share memory, so the sums can be written in place."""
    gradients = [gradient(parameter, each) for parameter, each in zip(parameters, used)]
    places = [each.data_ptr() for each in gradients if each.numel()]
    return gradients if len(set(places)) == len(places) else [each.clone() for each in gradients]


def gather_used_rows(
    parameters: Sequence[Tensor], places: Sequence[int], comm: MPI.Intracomm | None
) -> dict[int, Tensor]:
    """Return the rows for which any rank has a gradient, even a zero gradient. Collective, blocking.

    `places` are the positions in `parameters` to examine. The result maps each position to its rows.
    """
    sizes = [len(parameters[place]) for place in places]
    marks = torch.zeros(sum(sizes), dtype=torch.uint8)
    for place, part in zip(places, marks.split(sizes)):
        gradient = parameters[place].grad
        if gradient is not None:
            part[gradient._indices()[0] if gradient.is_sparse else slice(None)] = 1
    if places and comm is not None and comm.size > 1:
        collectives.allreduce(marks, comm, op="max")
    return {place: part.nonzero()[:, 0] for place, part in zip(places, marks.split(sizes))}


def give_gradient(parameter: Tensor, mean: Tensor, rows: Tensor | None) -> None:
    """Set a parameter's gradient to the mean. It is sparse with the rows `rows`, or dense if `rows` is None.

    A dense gradient gets the strides of the parameter, because PyTorch's fused optimizers need that.
    """
    if rows is not None:
        parameter.grad = torch.sparse_coo_tensor(rows[None], mean[rows], mean.shape, is_coalesced=True)
    else:
        parameter.grad = mean if parameter.is_contiguous() else torch.empty_like(parameter.detach()).copy_(mean)


@contextmanager
def values_of(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield contiguous tensors for new values of the parameters.

    A contiguous parameter is yielded itself, without autograd. For any other parameter, a copy is yielded and copied
    back when the context ends.
    """
    values = [parameter.detach().contiguous() for parameter in parameters]
    yield values
    for parameter, value in zip(parameters, values):
        if value.data_ptr() != parameter.data_ptr():
            parameter.detach().copy_(value)


def find_unlike(parameters: Sequence[Tensor], others: Sequence[Tensor | None], roundings: int) -> int:
    """Return the position of a parameter that differs from its counterpart in `others`, or -1.

    A counterpart of None is taken as equal. Differences of up to `roundings` rounding errors of the largest value of
    any parameter are allowed, because they remain when a program adds something and subtracts it again. Half precision
    is too coarse for this tolerance, so values in half precision must be equal.
    """
    largest = max((float(p.detach().abs().max()) for p in parameters if p.numel()), default=0.0)
    for place, (parameter, other) in enumerate(zip(parameters, others)):
        if other is not None:
            far = roundings * torch.finfo(other.dtype).eps * largest if other.element_size() > 2 else 0.0
            if not torch.allclose(parameter.detach(), other.view_as(parameter), rtol=0, atol=far, equal_nan=True):
                return place
    return -1


def gradient_share(layout: Layout, passes: int) -> float:
    """Return the factor that turns the sum of gradients of one update into their mean.

    The mean is over all workers whose gradients are in the sum, and over their backward passes.
    """
    workers, clients = layout.num_workers, len(layout.clients)
    return 1.0 / ((workers / clients if layout.asynchronous else workers) * passes)


@contextmanager
def warn_soon(generation: Generation) -> Iterator[None]:
    """Within this context, a worker soon warns about other workers that have not joined a collective call.

    In an asynchronous store workers do not run in step, and some of them may never make the call.
    """
    before = generation.limits
    generation.limits = Limits(min(before.stall_seconds, WARN_SECONDS), before.timeout_seconds)
    try:
        yield
    finally:
        generation.limits = before


# ---- PyTorch's optimizers as the store's


def group_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group by name, as plain data that ranks can compare."""
    numbers: dict[str, Any] = content({k: v for k, v in group.items() if k not in ("params", "param_names")})
    return numbers


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """True if the program has registered hooks that run before or after this optimizer's own steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def server_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rescale: float) -> Optimizer | None:
    """Return the store's optimizer that updates a group in the same way as `optimizer`, or None if none does.

    Servers get the sum of the gradients. The factor `rescale` turns the sum into the mean.
    """
    if group.get("maximize") or isinstance(group["lr"], Tensor) or has_step_hooks(optimizer):
        return None
    kind, numbers = type(optimizer), (float(group["lr"]), float(group.get("weight_decay", 0.0)), rescale)
    if kind is torch.optim.SGD and not group["dampening"]:
        return SGD(*numbers, group["momentum"], group["nesterov"])
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not group["amsgrad"]:
        decoupled = kind is torch.optim.AdamW or group.get("decoupled_weight_decay")
        beta1, beta2 = group["betas"]
        return (AdamW if decoupled else Adam)(*numbers, beta1, beta2, group["eps"])
    if kind is torch.optim.RMSprop and not (group["centered"] or group["momentum"]):
        return RMSProp(*numbers, group["alpha"], group["eps"])
    if kind is torch.optim.Adagrad and not (group["lr_decay"] or group["initial_accumulator_value"]):
        return AdaGrad(*numbers, group["eps"])
    return None
