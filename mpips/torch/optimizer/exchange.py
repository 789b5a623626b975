"""Three ways in which a DistributedOptimizer makes new parameters of gradients: on servers, on workers, elastically.

`ServerExchange` lets the store's servers update, by the optimizer of `mpips.optimizers` that computes the same.
`WorkerExchange` runs PyTorch's optimizer on every worker, on summed gradients. `ElasticExchange` runs it on every
worker alone; now and then the worker and the servers' centre attract each other.
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

WARN_SECONDS = 10.0
"""After so long a worker of an asynchronous store warns that others have not come to a call of all."""


class AgreedStep(NamedTuple):
    """The agreement of the workers of a step."""

    used: Sequence[bool]
    """True for parameters with a gradient on any of them; for none where the step is skipped."""
    sparse: Sequence[bool]
    """True for those with a sparse one."""
    skipped: bool
    """True where a gradient has overflowed on any of them (GradScaler): no parameter changes."""
    changed: str
    """A parameter that the program has changed since the last step; "" where not all workers have changed any."""


class GradientExchange:
    """One way to make new parameters of gradients. A step calls `push`, or `take` after a death, then `end`."""

    sent = False
    """True where gradients of this step may have been pushed."""
    is_loaded = False
    """True where the parameters that the program has loaded beside a state are not on the servers yet."""

    def begin(self, new: bool) -> None:
        """Take the parameters that the others have. `new`: this worker was given some. Blocking."""
        raise NotImplementedError

    def push(self, step: AgreedStep) -> None:
        """Exchange gradients, and take the result. Blocking; may be called again after a StoreError."""
        raise NotImplementedError

    def take(self) -> None:
        """Take the result of an exchange that the store is done with. Blocking."""

    def end(self, step: AgreedStep) -> None:
        """Make what is left of the step on this worker."""
        raise NotImplementedError

    def put_loaded(self) -> None:
        """Give the servers the parameters that the program has loaded, if it has. Collective then, blocking."""

    def renew(self) -> None:
        """Go on with a store that was loaded, or has recovered, perhaps with fewer workers."""

    def give(self, giver: int, new: bool) -> None:
        """Give new workers, from worker `giver`, what the store does not have. Collective, blocking."""


def choose_exchange(
    store: KVStore,
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    passes: int,
    elastic: float | None,
    interval: int,
) -> GradientExchange:
    """Return the exchange for an optimizer and a store. Collective over the workers, blocking.

    ValueError where there is none.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [names[p] for p in parameters]
    if elastic is not None:
        store.set_optimizer(Elastic1(alpha=elastic))
        return ElasticExchange(store, optimizer, parameters, keys, passes, elastic, interval)
    if store.layout.num_servers:
        rescale = gradient_share(store.layout, passes)
        found = [server_optimizer(optimizer, group, rescale) for group in optimizer.param_groups]
        if None not in found:
            every = [each for own in optimizer.state.values() for each in own.values()]
            if any(isinstance(each, Tensor) and each.any() for each in every):
                raise ValueError(
                    f"{type(optimizer).__name__} has made steps, and the servers would begin its state "
                    "anew: wrap it before, or choose a store without servers, which keeps it"
                )
            return ServerExchange(store, optimizer, names, [each for each in found if each is not None], passes)
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
    """Raise ValueError where a store is not for elastic averaging."""
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
    """The optimizer's groups are records of the store, and the parameters are those that were pulled last."""

    def __init__(
        self,
        store: KVStore,
        optimizer: torch.optim.Optimizer,
        names: Mapping[Tensor, str],
        records: Sequence[Optimizer],
        passes: int,
    ) -> None:
        """Collective over the workers, blocking."""
        self._store, self._optimizer, self._names, self._passes = store, optimizer, names, passes
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._all_keys = [names[parameter] for parameter in self._parameters]
        self._records, self._numbers = list(records), [group_numbers(group) for group in optimizer.param_groups]
        for group, record in zip(optimizer.param_groups, records, strict=True):
            store.set_optimizer(record, keys=self._keys(group))
        if store.resumed != 0:  # the store goes on with numbers of its own
            self.renew()

    def begin(self, new: bool) -> None:
        """Take the servers' parameters."""
        self.take()

    def push(self, step: AgreedStep) -> None:
        """Let the servers update, and take the parameters from them. Those without a gradient stay as they are.

        Where a synchronous store survives deaths, the round is complete then on all servers: none can undo it."""
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
        if rest:
            keys = [store.worker.keys[key] for key, _ in rest]
            store.push([key.name for key in keys], [EmptyPush(key.shape, key.dtype) for key in keys])
        if used:
            with values_of([parameter for _, parameter in used]) as outs:
                store.pushpull([key for key, _ in used], [gradient(p, True) for _, p in used], out=outs)
        if rest and store.layout.asynchronous:  # others may have used them
            with values_of([parameter for _, parameter in rest]) as outs:
                store.pull([key for key, _ in rest], outs)
        elif rest and store.layout.survives:
            store.worker.settle()

    def _find_changed(self) -> str:
        """Return the key of a parameter that is another one on the servers, "" where all were moved back. Blocking.

        Workers of a synchronous store all return one, if any has one."""
        servers = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in self._parameters]
        self._store.pull(self._all_keys, servers)
        place = find_unlike(self._parameters, servers, 4)
        layout = self._store.layout
        if not layout.asynchronous and layout.num_workers > 1:
            with worker_collectives(self._store, "step") as workers:
                place = int(gather_rows(np.array([place]), workers, "parameters that have changed").max())
        return self._all_keys[place] if place >= 0 else ""

    def take(self) -> None:
        """Take the parameters from the servers."""
        with values_of(self._parameters) as outs:
            self._store.pull(self._all_keys, outs)

    def end(self, step: AgreedStep) -> None:
        """End the step."""
        self.sent = False

    def renew(self) -> None:
        """Take over the store's optimizers after it was loaded, or has recovered: the servers hear of other numbers of
        the groups before the next update. ValueError where they are optimizers of another kind."""
        for at, group in enumerate(self._optimizer.param_groups):
            for name in self._keys(group):
                found, mine = self._store.worker.groups.of(name), self._records[at]
                if found is None or type(found) is not type(mine):
                    kind = type(mine).__name__
                    raise ValueError(
                        f"key {name!r} was saved with {found}, and is updated by {kind} here: make the "
                        "DistributedOptimizer as the saved one was"
                    )
                self._records[at], self._numbers[at] = found, {}

    def put_loaded(self) -> None:
        if self.is_loaded:
            self.put()
            self.take()

    def put(self) -> None:
        """Give the servers rank 0's parameters. Collective over the workers, blocking."""
        worker = self._store.worker
        worker.agree_settled("set_parameters")
        keys = [worker.keys[name] for name in self._all_keys]
        tensors = [parameter.detach().contiguous() for parameter in self._parameters]
        values = [arguments.first_value(key.name, [tensor]) for key, tensor in zip(keys, tensors, strict=True)]
        worker.run("set_parameters", worker.backend.store_values(keys, values))
        self.is_loaded = False

    def by_parameter(self) -> dict[Tensor, Optimizer]:
        """The servers' optimizers by parameter."""
        groups = zip(self._optimizer.param_groups, self._records)
        return {parameter: record for group, record in groups for parameter in group["params"]}

    def _update_numbers(self) -> None:
        """Tell the servers of numbers of the groups that have changed. All workers then wait for each other.

        ValueError where the servers cannot go on with such numbers.
        """
        for at, group in enumerate(self._optimizer.param_groups):
            if (found := group_numbers(group)) == self._numbers[at]:
                continue
            record = server_optimizer(self._optimizer, group, gradient_share(self._store.layout, self._passes))
            if record is None:
                raise ValueError(
                    f"group {at} of the optimizer has {found}, which the servers cannot compute: make "
                    "another DistributedOptimizer"
                )
            before = asdict(self._records[at])
            changed = {name: value for name, value in asdict(record).items() if value != before[name]}
            if changed:
                patience = warn_soon(self._store.worker.generation) if self._store.layout.asynchronous else None
                with patience or nullcontext():
                    self._store.update_optimizer(keys=self._keys(group), **changed)
            self._records[at], self._numbers[at] = record, found

    def _check_sparse(self, step: AgreedStep) -> None:
        """Raise TypeError on all workers where PyTorch's optimizer would refuse sparse gradients."""
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
    """The store holds sums of gradients, and each worker has parameters and state. For synchronous stores."""

    def __init__(
        self,
        store: KVStore,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Tensor],
        keys: Sequence[str],
        passes: int,
    ) -> None:
        self._store, self._optimizer, self._passes = store, optimizer, passes
        self._parameters, self._keys = parameters, keys
        self._sums: list[Tensor] = []
        """Room for sums of gradients, where gradients have to stay until the exchange is over."""
        if store.layout.survives:
            self._sums = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in parameters]
        self._totals: list[Tensor] = []
        """The sums, once they are there."""
        self._share = 1.0
        self._rows: dict[int, Tensor] = {}
        """Of gradients that are sparse in this step, by place: the rows that any worker has."""
        self._given: list[Tensor] = []
        """Parameters that another worker gave, until the first step."""

    def begin(self, new: bool) -> None:
        """Take rank 0's parameters, which the store holds until the first step, or those that were given."""
        if not new:
            with values_of(self._parameters) as outs:
                self._store.pull(self._keys, outs)
        for parameter, given in zip(self._parameters, self._given):
            parameter.detach().copy_(given)

    def push(self, step: AgreedStep) -> None:
        """Sum gradients."""
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
        """Take the sums."""
        self._store.pull(self._keys, self._sums)
        self._totals = self._sums

    def end(self, step: AgreedStep) -> None:
        """Step, unless it is skipped. A parameter that nobody used has no gradient, so it stays as it is."""
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
        """Give new workers parameters and the optimizer's state. Numbers of groups stay a new worker's own, as
        schedulers begin with them."""
        with worker_collectives(self._store, "rejoin") as workers:
            broadcast_tensors([parameter.detach() for parameter in self._parameters], giver, workers)
            mine = self._optimizer.state_dict()
            theirs = broadcast_state(mine, giver, workers)
        if new:
            self._optimizer.load_state_dict({**theirs, "param_groups": mine["param_groups"]})
            self._given = [parameter.detach().clone() for parameter in self._parameters]


# ---- elastically


class ElasticExchange(GradientExchange):
    """The optimizer runs on every worker; every `interval` steps it and the servers' centre attract each other by
    `alpha` (MXNET-MPI, equations 2 and 3). For stores that do not survive deaths."""

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
        self._store, self._optimizer, self._passes = store, optimizer, passes
        self._parameters, self._keys = parameters, keys
        self._alpha, self._interval, self._steps = alpha, interval, 0
        self._client = store.layout.client
        self._members = self._client.Get_size() if self._client is not None else 1

    def begin(self, new: bool) -> None:
        """Take rank 0's parameters, which are the centre's."""
        with values_of(self._parameters) as outs:
            self._store.pull(self._keys, outs)

    def push(self, step: AgreedStep) -> None:
        """Move the centre towards this worker, and it towards the centre, where it is time; average gradients."""
        if self._steps % self._interval == 0:
            share = 1.0 / self._members  # a push adds up the client's
            centers = [(p.detach() * share).contiguous() for p in self._parameters]
            self._store.push(self._keys, centers)
            self._store.pull(self._keys, centers)
            with torch.no_grad():
                for parameter, center in zip(self._parameters, centers):
                    if parameter.requires_grad:
                        parameter.lerp_(center, self._alpha)
        used = [place for place, has in enumerate(step.used) if has]
        rows = gather_used_rows(self._parameters, [place for place in used if step.sparse[place]], self._client)
        given = own_gradients([self._parameters[place] for place in used], [True] * len(used))
        if self._members > 1 and given:
            collectives.grouped_allreduce(given, self._client)
        for place, total in zip(used, given):
            mean = total.mul_(1.0 / (self._members * self._passes))
            give_gradient(self._parameters[place], mean, rows.get(place))

    def end(self, step: AgreedStep) -> None:
        """Step, unless it is skipped."""
        if not step.skipped:
            self._optimizer.step()
        self._steps += 1


# ---- what they share


def gradient(parameter: Tensor, used: bool) -> Tensor:
    """Return this rank's gradient, contiguous and dense; zeros where it has none, or nobody uses it."""
    found = parameter.grad
    if found is None or not used:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return (found.detach().to_dense() if found.is_sparse else found.detach()).contiguous()


def own_gradients(parameters: Sequence[Tensor], used: Sequence[bool]) -> list[Tensor]:
    """Return gradients to be summed in place, as those of `gradient`: no two share memory."""
    found = [gradient(parameter, each) for parameter, each in zip(parameters, used)]
    places = [each.data_ptr() for each in found if each.numel()]
    return found if len(set(places)) == len(places) else [each.clone() for each in found]


def gather_used_rows(
    parameters: Sequence[Tensor], places: Sequence[int], comm: MPI.Intracomm | None
) -> dict[int, Tensor]:
    """Return by place the rows of which any rank has a gradient, be it of zeros. Collective, blocking."""
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
    """Give a parameter its gradient: these rows, or all with its own strides, as PyTorch's fused optimizers ask for."""
    if rows is not None:
        parameter.grad = torch.sparse_coo_tensor(rows[None], mean[rows], mean.shape, is_coalesced=True)
    else:
        parameter.grad = mean if parameter.is_contiguous() else torch.empty_like(parameter.detach()).copy_(mean)


@contextmanager
def values_of(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield where to write parameters, contiguous: their memory, or copies that are copied back at the end."""
    values = [parameter.detach().contiguous() for parameter in parameters]
    yield values
    for parameter, value in zip(parameters, values):
        if value.data_ptr() != parameter.data_ptr():
            parameter.detach().copy_(value)


def find_unlike(parameters: Sequence[Tensor], others: Sequence[Tensor | None], roundings: int) -> int:
    """Return the place of a parameter that is unlike the other one (None: equal), -1 where none is.

    Those of 32 bits and more may differ by so many roundings of the largest value of all, as after a move that was
    subtracted again. Half precision rounds too much for that.
    """
    largest = max((float(p.detach().abs().max()) for p in parameters if p.numel()), default=0.0)
    for place, (parameter, other) in enumerate(zip(parameters, others)):
        if other is not None:
            far = roundings * torch.finfo(other.dtype).eps * largest if other.element_size() > 2 else 0.0
            if not torch.allclose(parameter.detach(), other.view_as(parameter), rtol=0, atol=far, equal_nan=True):
                return place
    return -1


def gradient_share(layout: Layout, passes: int) -> float:
    """Return the factor that makes the mean of one update of a sum of gradients, each of `passes` backward passes."""
    workers, clients = layout.num_workers, len(layout.clients)
    return 1.0 / ((workers / clients if layout.asynchronous else workers) * passes)


@contextmanager
def warn_soon(generation: Generation) -> Iterator[None]:
    """Warn soon in waits within for all workers of an asynchronous store: they may never come."""
    before = generation.limits
    generation.limits = Limits(min(before.stall_seconds, WARN_SECONDS), before.timeout_seconds)
    try:
        yield
    finally:
        generation.limits = before


# ---- PyTorch's optimizers as the store's


def group_numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of parameters, by name, as ranks compare them."""
    found: dict[str, Any] = content({k: v for k, v in group.items() if k not in ("params", "param_names")})
    return found


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the program has registered hooks that run before or after this optimizer's own steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def server_optimizer(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], rescale: float) -> Optimizer | None:
    """Return the store's optimizer that updates a group as `optimizer` does here; None where there is none.

    Gradients arrive as a sum, which `rescale` makes their mean.
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
