"""A parameter server for PyTorch's models: `DistributedOptimizer(optimizer, ...)`, in the manner of Horovod's.

    optimizer = mpips.torch.DistributedOptimizer(optimizer, model.named_parameters(), kind="dist_sync", servers=2)
    loss.backward(); optimizer.step()           # pushes gradients, pulls parameters
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import collectives
from mpips.optimizers.elastic import Elastic1
from mpips.processes import create
from mpips.store import KVStore
from mpips.torch.agreement import see_joined
from mpips.torch.optimizer.on_servers import OnServers, records
from mpips.torch.optimizer.stored import restore, stored
from mpips.torch.state import broadcast_tensors


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a PyTorch optimizer: `step` exchanges gradients through a store and leaves the new parameters.

    optimizer           of torch.optim. SGD, Adam, AdamW, RMSprop and Adagrad run on the store's servers, where it has
                        any (without amsgrad, dampening, ...); any other runs here, on gradients averaged over the
                        workers.
    named_parameters    as `model.named_parameters()`; parameters that the optimizer has not are left out.
    kind, **options     of the store, see `mpips.create`: "mpi_sync", "dist_async", ..., servers=2, staleness=4. The
                        workers of one client wait for each other, also of "mpi_async": choose "dist_async", or clients.
                        A server serves within this call and leaves by SystemExit when the workers have closed.
    store               a store that is there already, in place of `kind` and options.
    backward_passes_per_step    how many backward passes the program makes before each `step`: gradients add up, and
                        are averaged over the passes.
    compression         as of `kv.set_gradient_compression`, such as {"type": "2bit", "threshold": 0.5}.
    elastic             alpha of elastic averaging (an asynchronous store): the optimizer runs here, and every
                        `interval` steps this worker and the servers' centre attract each other.

    Every worker starts from rank 0's parameters. Numbers of the groups are live: any scheduler of torch may change them
    between steps, on all workers, which then wait for each other. Making it, and `step` of a synchronous store, are
    collective over the workers, and block.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]],
        kind: str = "mpi_sync", *, store: KVStore | None = None, backward_passes_per_step: int = 1,
        compression: dict[str, Any] | None = None, elastic: float | None = None, interval: int = 64, **options: Any,
    ) -> None:  # fmt: skip
        see_joined()
        _see_optimizer(optimizer)
        if backward_passes_per_step < 1 or interval < 1:
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step}, interval={interval}: at least 1")
        self.optimizer = optimizer
        self._names = _named(optimizer, named_parameters)
        self.store = store if store is not None else create(kind, **options)
        if elastic is not None and not self.store.type.endswith("async"):
            raise ValueError(f"elastic={elastic} needs an asynchronous store, as mpi_async, not {self.store.type}")
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.state = optimizer.state
        self._passes, self._elastic, self._interval = backward_passes_per_step, elastic, interval
        self._steps = 0
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._keys = [self._names[p] for p in self._parameters]
        self.store.init(self._keys, [p.detach().contiguous() for p in self._parameters])
        if compression is not None:
            self.store.set_gradient_compression(compression)
        self._served: OnServers | None = None
        if elastic is not None:
            self.store.set_optimizer(Elastic1(alpha=elastic))
        elif self.store.layout.num_servers and (found := records(optimizer, self._share())) is not None:
            self._served = OnServers(self.store, optimizer, self._names, found, self._share())
        elif self.store.type.endswith("async"):
            raise ValueError(f"{type(optimizer).__name__} with these options has no counterpart on the servers, which "
                             "an asynchronous store needs: choose SGD, Adam, AdamW, RMSprop or Adagrad, or a "
                             "synchronous kind")  # fmt: skip
        self._pull()

    @property
    def on_servers(self) -> bool:
        """Whether the store's servers make the updates."""
        return self._served is not None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange gradients and update the parameters; what `closure` returns. Blocking: the parameters are new."""
        loss = closure() if closure is not None else None
        if self._elastic is not None:
            self._step_elastic()
        elif self._served is not None:
            self._served.see_unchanged(self._parameters)
            self._served.follow()
            self.store.pushpull(self._keys, self._gradients(), out=[p.detach() for p in self._parameters])
            self._served.noted(self._parameters)
        else:
            self._step_here()
        self._steps += 1
        return loss

    def set_parameters(self) -> None:
        """Rank 0's parameters for all workers, and for the servers: call it where the program has changed them, as by
        `model.load_state_dict`. All workers call; blocking."""
        if self._served is not None:
            self._served.take(self._parameters)
            self._pull()
        else:
            broadcast_tensors([p.detach() for p in self._parameters], 0, self.store.layout.workers)

    def state_dict(self) -> dict[str, Any]:
        """As of the wrapped optimizer; where the store has a part in it, its values and state are the tensor "store".
        Equal on all workers then, which all call; blocking. `torch.save` writes it."""
        state = self.optimizer.state_dict()
        return state if not self._in_store() else {**state, "store": stored(self.store)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """What `state_dict` gave, with any number of servers; the model then has its parameters, where the servers
        update them. All workers call; blocking."""
        state = dict(state_dict)
        data = state.pop("store", None)
        if (data is not None) is not self._in_store():
            here, there = ("has", "has none") if self._in_store() else ("has none", "has")
            raise ValueError(f"load_state_dict: this optimizer {here} of its state in the store, the saved one "
                             f"{there}: make it as the saved one was")  # fmt: skip
        self.optimizer.load_state_dict(state)
        self.state, self.param_groups = self.optimizer.state, self.optimizer.param_groups
        if data is not None:
            restore(self.store, data)
        if self._served is not None:
            self._served.restored()
            self._pull()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """RuntimeError: groups are the wrapped optimizer's, as they were when this one was made."""
        if hasattr(self, "_served"):
            raise RuntimeError("add_param_group: add groups to the PyTorch optimizer first, then wrap it in a new "
                               "DistributedOptimizer")  # fmt: skip
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the wrapped optimizer."""
        self.optimizer.zero_grad(set_to_none)

    def save(self, path: str | Path, wait: bool = True) -> Any:
        """Parameters and the servers' state in one file, see `kv.save`. All workers call; blocking.

        An optimizer that runs here keeps its own state, which `optimizer.state_dict()` gives as ever.
        """
        if not self._in_store():
            self._give_parameters()
        return self.store.save(path, wait=wait)

    def load(self, path: str | Path) -> None:
        """What `save` wrote, of any number of servers; the model then has it. All workers call; blocking."""
        self.store.load(path)
        if self._served is not None:
            self._served.restored()
        self._pull()

    def close(self) -> None:
        """Close the store: its servers leave. A program that ends does so by itself."""
        self.store.close()

    # ---- inside

    def _share(self) -> float:
        """What a sum of gradients is multiplied by to be the mean of one update."""
        workers, clients = self.store.num_workers, len(self.store.layout.clients)
        return 1.0 / ((workers / clients if self.store.type.endswith("async") else workers) * self._passes)

    def _in_store(self) -> bool:
        """Whether the store holds a part of the training's state."""
        return self._served is not None or self._elastic is not None

    def _gradients(self) -> list[Tensor]:
        return [_gradient(parameter) for parameter in self._parameters]

    def _step_here(self) -> None:
        gradients = self._gradients()
        self.store.pushpull(self._keys, gradients)
        for parameter, gradient in zip(self._parameters, gradients):
            parameter.grad = gradient.mul_(self._share())
        self.optimizer.step()

    def _step_elastic(self) -> None:
        """MXNET-MPI, equations 2 and 3: the centre moves towards this worker, and it towards the centre."""
        client = self.store.layout.client
        members = client.Get_size() if client is not None else 1
        if self._steps % self._interval == 0:
            centers = [parameter.detach() / members for parameter in self._parameters]  # a push adds up the client's
            self.store.push(self._keys, centers)
            self.store.pull(self._keys, centers)
            with torch.no_grad():
                for parameter, center in zip(self._parameters, centers):
                    parameter.lerp_(center, self._elastic)
        gradients = self._gradients()
        if members > 1:
            collectives.grouped_allreduce(gradients, client)
        for parameter, gradient in zip(self._parameters, gradients):
            parameter.grad = gradient.mul_(1.0 / (members * self._passes))
        self.optimizer.step()

    def _give_parameters(self) -> None:
        """Let the store's keys, which have held gradients, hold the parameters: rank 0's, to which others add zeros."""
        first = self.store.rank == 0
        values = [p.detach().clone() if first else torch.zeros_like(p) for p in self._parameters]
        self.store.pushpull(self._keys, [value.contiguous() for value in values])

    def _pull(self) -> None:
        self.store.pull(self._keys, [parameter.detach() for parameter in self._parameters])
        if self._served is not None:
            self._served.noted(self._parameters)


def _see_optimizer(optimizer: Any) -> None:
    """TypeError or ValueError where it is none that steps once for each call."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps an optimizer of torch.optim, not a {type(optimizer).__name__}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(f"{type(optimizer).__name__} evaluates the loss several times in a step, which cannot be "
                         "distributed: choose another optimizer")  # fmt: skip


def _gradient(parameter: Tensor) -> Tensor:
    """This rank's gradient, contiguous; zeros where it has none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, memory_format=torch.contiguous_format)
    return parameter.grad.detach().contiguous()


def _named(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    """The key of every parameter of the optimizer. ValueError where one has no name."""
    names = {parameter: name for name, parameter in named}
    missing = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if missing:
        raise ValueError(f"named_parameters names not all of the optimizer's parameters, {missing} are missing: pass "
                         "model.named_parameters()")  # fmt: skip
    return names
