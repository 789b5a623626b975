"""A parameter server for PyTorch's models: `DistributedOptimizer(optimizer, ...)`, in the manner of Horovod's.

    optimizer = mpips.torch.DistributedOptimizer(optimizer, model.named_parameters(), kind="mpi_async", servers=2)
    loss.backward(); optimizer.step()           # pushes gradients, pulls parameters
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import collectives
import mpips
from mpips.optimizers import Elastic1
from mpips.torch import translation


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a PyTorch optimizer: `step` exchanges gradients through a store and leaves the new parameters.

    optimizer           of torch.optim. SGD, Adam, AdamW, RMSprop and Adagrad run on the store's servers, where it has
                        any (without amsgrad, dampening, ...); any other runs here, on gradients averaged over the
                        workers.
    named_parameters    as `model.named_parameters()`; parameters that the optimizer has not are left out.
    kind, **options     of the store, see `mpips.create`: "mpi_sync", "dist_async", ..., servers=2, staleness=4.
                        A server serves within this call and leaves by SystemExit when the workers have closed.
    store               a store that is there already, in place of `kind` and options.
    backward_passes_per_step    how many backward passes the program makes before each `step`: gradients add up, and
                        are averaged over the passes.
    compression         as of `kv.set_gradient_compression`, such as {"type": "2bit", "threshold": 0.5}.
    elastic             alpha of elastic averaging (an asynchronous store): the optimizer runs here, and every
                        `interval` steps this worker and the servers' centre attract each other.

    Every worker starts from rank 0's parameters. Learning rates are live: any scheduler of torch may change them
    between steps. Making it, and `step` of a synchronous store, are collective over the workers, and block.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]],
        kind: str = "mpi_sync", *, store: mpips.KVStore | None = None, backward_passes_per_step: int = 1,
        compression: dict[str, Any] | None = None, elastic: float | None = None, interval: int = 64, **options: Any,
    ) -> None:  # fmt: skip
        if backward_passes_per_step < 1 or interval < 1:
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step}, interval={interval}: at least 1")
        self.optimizer = optimizer
        self._names = _named(optimizer, named_parameters)
        self.store = store if store is not None else mpips.create(kind, **options)
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
        self._rates: list[float] = []
        self.on_servers = elastic is None and self._move_to_servers()
        if elastic is not None:
            self.store.set_optimizer(Elastic1(alpha=elastic))
        elif not self.on_servers and self.store.type.endswith("async"):
            raise ValueError(f"{type(optimizer).__name__} with these options has no counterpart on the servers, which "
                             "an asynchronous store needs: choose SGD, Adam, AdamW, RMSprop or Adagrad, or a "
                             "synchronous kind (docs/torch.md, DistributedOptimizer)")  # fmt: skip
        self._pull(self._parameters)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Exchange gradients and update the parameters; what `closure` returns. Blocking: the parameters are new."""
        loss = closure() if closure is not None else None
        if self._elastic is not None:
            self._step_elastic()
        elif self.on_servers:
            self._follow_rates()
            with torch.no_grad():
                self.store.pushpull(self._keys, self._gradients(), out=[p.detach() for p in self._parameters])
        else:
            self._step_here()
        self._steps += 1
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As of the wrapped optimizer."""
        self.optimizer.zero_grad(set_to_none)

    def save(self, path: str | Path, wait: bool = True) -> Any:
        """Parameters and the servers' state in one file, see `kv.save`. All workers call; blocking.

        An optimizer that runs here keeps its own state, which `optimizer.state_dict()` gives as ever.
        """
        if self._elastic is None and not self.on_servers:
            self._give_parameters()
        return self.store.save(path, wait=wait)

    def load(self, path: str | Path) -> None:
        """What `save` wrote, of any number of servers; the model then has it. All workers call; blocking."""
        self.store.load(path)
        self._pull(self._parameters)

    def close(self) -> None:
        """Close the store: its servers leave. A program that ends does so by itself."""
        self.store.close()

    # ---- inside

    def _move_to_servers(self) -> bool:
        """Let the store update, group by group; whether it can."""
        if not self.store.layout.num_servers:
            return False
        share = 1.0 / (self._contributors() * self._passes)
        records = [translation.record(self.optimizer, group, share) for group in self.optimizer.param_groups]
        if None in records:
            return False
        for group, record in zip(self.optimizer.param_groups, records):
            assert record is not None
            self.store.set_optimizer(record, keys=[self._names[p] for p in group["params"]])
        self._rates = [translation.rate(group) for group in self.optimizer.param_groups]
        return True

    def _contributors(self) -> float:
        """Workers whose gradients make one update."""
        workers, clients = self.store.num_workers, len(self.store.layout.clients)
        return workers / clients if self.store.type.endswith("async") else workers

    def _follow_rates(self) -> None:
        """Tell the servers of learning rates that have changed."""
        for number, group in enumerate(self.optimizer.param_groups):
            rate = translation.rate(group)
            if rate != self._rates[number]:
                names = [self._names[p] for p in group["params"]]
                self.store.update_optimizer(keys=names, learning_rate=rate)
                self._rates[number] = rate

    def _gradients(self) -> list[Tensor]:
        return [_gradient(parameter) for parameter in self._parameters]

    def _step_here(self) -> None:
        gradients = self._gradients()
        self.store.pushpull(self._keys, gradients)
        share = 1.0 / (self._contributors() * self._passes)
        for parameter, gradient in zip(self._parameters, gradients):
            parameter.grad = gradient.mul_(share)
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

    def _pull(self, parameters: list[Tensor]) -> None:
        self.store.pull(self._keys, [parameter.detach() for parameter in parameters])


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
