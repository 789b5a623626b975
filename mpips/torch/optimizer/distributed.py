"""`DistributedOptimizer` wraps a PyTorch optimizer: its `step` pushes gradients to a store and updates parameters.

    optimizer = mpips.torch.DistributedOptimizer(optimizer, model.named_parameters(), kind="dist_sync", servers=2)
    loss.backward()
    optimizer.step()           # pushes gradients, pulls parameters

In each step the workers check that they all make the same step (`consensus`), exchange gradients (`exchange`), and
recover if a process dies (`rejoin`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from mpips.collectives import log
from mpips.collectives.errors import of_caller
from mpips.store.api import KVStore
from mpips.store.create import create
from mpips.store.keys.key import Name
from mpips.store.runtime.rendezvous import attempt
from mpips.torch.backend import check_joined
from mpips.torch.lockstep import claim_gradients, release_gradients
from mpips.torch.optimizer.consensus import UNKNOWN, Brought, Consensus
from mpips.torch.optimizer.exchange import ServerExchange, check_elastic, choose_exchange
from mpips.torch.optimizer.rejoin import SurvivingSteps
from mpips.torch.optimizer.server_state import LiveState, array_names, pack, states_by_key, unpack
from mpips.torch.state import broadcast_tensors, load_bytes, store_bytes, worker_collectives
from mpips.torch.tensors import find_overflow, uncompiled

if TYPE_CHECKING:
    from mpips.optimizers.base import Optimizer
    from mpips.store.checkpoint.save import Saving

# names of the attributes of torch's optimizers that hold the hooks on state_dict and load_state_dict
STATE_HOOKS = tuple(
    f"_optimizer_{kind}_hooks"
    for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
)
WRAP_LATER = "add groups to the PyTorch optimizer first, then wrap it in a new DistributedOptimizer"
LOG = log.get("mpips.torch")


@uncompiled("step", "zero_grad")
class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps a PyTorch optimizer so that `step` exchanges gradients through a store and updates the parameters.

    Every worker starts from rank 0's parameters. Creating a DistributedOptimizer is collective over the workers and
    blocking, and so is every `step` with a synchronous store.

    The hyperparameters of the optimizer's groups may change between steps, if they change in the same way on all
    workers. So torch's schedulers work as usual. If the servers update the parameters, all workers wait for each other
    when hyperparameters change.

    In a step, a parameter that has a gradient on no worker keeps its value. If only some workers have a gradient, the
    other workers count as zero in the mean. Before each step, all workers (in an asynchronous store, the workers of the
    same client) check that they make the same step with the same hyperparameters. If they do not, all of them raise an
    error that names the difference.

    If the store survives deaths of processes (`mpips run --spares`), `step` recovers from a death by itself. A finished
    step is never undone, and an unfinished step is repeated with the same gradients. A spare that replaces a dead
    worker runs the program from its beginning, gets parameters and state when it creates this object, and continues at
    step `resumed`.

    Args:
        optimizer: An optimizer of torch.optim. SGD, Adam, AdamW, RMSprop and Adagrad run on the store's servers, if the
            store has servers and the servers support all options of the optimizer (amsgrad and dampening, for example,
            are not supported). Any other optimizer runs on every worker, on gradients averaged over the workers.
        named_parameters: Pairs of name and parameter, such as `model.named_parameters()`. Parameters that the optimizer
            does not have are ignored.
        kind: The kind of the store, as in `mpips.create`, for example "mpi_sync" or "dist_async". The workers of one
            client wait for each other even with "mpi_async". If they should not, choose "dist_async" or several
            clients.
        store: An existing store, used in place of `kind` and `options`.
        backward_passes_per_step: The number of backward passes that the program makes before each `step`. Their
            gradients are averaged.
        compression: How gradients are compressed, as in `kv.set_gradient_compression`, for example
            {"type": "2bit", "threshold": 0.5}.
        elastic: The alpha of elastic averaging, which needs an asynchronous store. The optimizer then runs on every
            worker. Every `interval` steps the worker's parameters and the centre, a copy of the parameters on the
            servers, move towards each other.
        interval: The number of steps between two exchanges of elastic averaging.
        options: Options of the store, as in `mpips.create`, for example servers=2 and staleness=4. In a server process
            this call does not return: it runs the server, and raises SystemExit when the workers have closed the store.

    Raises:
        TypeError, ValueError: An argument is invalid, or the hyperparameters differ between workers.
        RuntimeError: A launcher such as torchrun has started processes that MPI has not joined.
        mpips.OptionError: An option of the store is invalid.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = mpips.torch.DistributedOptimizer(sgd, model.named_parameters(), kind="dist_sync")
        >>> model(torch.ones(4, 3)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.close()
    """

    # Tells GradScaler to call `step` even if a gradient has overflowed on this worker.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, Tensor]],
        kind: str = "mpi_sync",
        *,
        store: KVStore | None = None,
        backward_passes_per_step: int = 1,
        compression: dict[str, Any] | None = None,
        elastic: float | None = None,
        interval: int = 64,
        **options: Any,
    ) -> None:
        check_joined()
        _check_optimizer(optimizer)
        if backward_passes_per_step < 1 or interval < 1:
            raise ValueError(f"backward_passes_per_step={backward_passes_per_step}, interval={interval}: at least 1")
        self.optimizer = optimizer
        self._names = _name_keys(optimizer, named_parameters)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        claim_gradients(self, "DistributedOptimizer", [(self._names[p], p) for p in held])
        self.store = store if store is not None else create(kind, **options)
        self._passes = backward_passes_per_step
        self._elastic = elastic is not None
        # number of zero_grad calls since the last step
        self._cleared = 0
        try:
            # A tensor that is created in inference mode cannot be changed by a step.
            with torch.inference_mode(False):
                self._begin(compression, elastic, interval)
        except Exception:
            release_gradients(self)
            if store is None:
                self.store.close()
            raise

    @property
    def resumed(self) -> int:
        """The step at which this process joined the training.

        It is 0 at the start of a job. It is higher if the other workers had made steps before this process started. The
        program itself must then repeat whatever else it does at each step, such as `scheduler.step()`.
        """
        return self._resumed

    @property
    def on_servers(self) -> bool:
        """True if the store's servers update the parameters."""
        return isinstance(self._exchange, ServerExchange)

    @property
    def state(self) -> LiveState:  # type: ignore[override]
        """The state of the wrapped optimizer, by parameter.

        If the servers update the parameters, they also hold the state, and this mapping holds NaN in its place.
        `state_dict()` returns the real state.
        """
        return self._live

    @state.setter
    def state(self, state: Any) -> None:
        """Ignore the state that `torch.optim.Optimizer` assigns. The wrapped optimizer has the state."""

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None) -> Any:
        """Exchange gradients and update the parameters. Blocking.

        With a GradScaler, all workers skip the step if a gradient has overflowed on one of them.

        Args:
            closure: A function that computes the loss, as for torch's optimizers. It is called once.
            grad_scaler: Passed by `GradScaler.step`.

        Returns:
            The result of `closure`, or None.

        Raises:
            RuntimeError: Workers make different calls, or the program has changed the optimizer's groups or the
                parameters without telling the servers. All workers raise it, and nothing was sent.
            ValueError: Hyperparameters or parameters differ between workers. All workers raise it, and nothing was
                sent.
            mpips.StoreError: The store has failed, and it does not survive deaths.
        """
        loss = None
        if closure is not None:
            # PyTorch's own optimizers also enable gradients here.
            with torch.enable_grad():
                loss = closure()
        self._check_groups()
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "this PyTorch's GradScaler does not pass itself to step(), so workers do not learn of "
                "each other's overflows: use mpips.torch.DataParallel with it"
            )
        if grad_scaler is None:
            self._survival.step(Brought(cleared=self._cleared))
        # All workers set the same overflow flag, so the scales of their GradScalers stay equal.
        else:
            overflow = find_overflow(grad_scaler, self)
            skipped = self._survival.step(Brought(bool(overflow), grad_scaler.get_scale(), self._cleared))
            overflow.fill_(float(skipped))
        self._cleared = 0
        return loss

    def set_parameters(self) -> None:
        """Copy rank 0's parameters to all workers and to the servers. Collective over the workers, blocking.

        Call it after the program itself has changed parameters, for example by `model.load_state_dict`.
        """

        def put() -> None:
            if isinstance(self._exchange, ServerExchange):
                self._exchange.put()
                self._exchange.take()
            else:
                with worker_collectives(self.store, "set_parameters") as workers:
                    broadcast_tensors([p.detach() for p in self._parameters], 0, workers)

        self._change("set_parameters", put)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer. `torch.save` can write it.

        If the servers update the parameters, or with `elastic`, the store holds a part of the state. The call is then
        collective over the workers and blocking, and all workers get the same dict. Its entry "store" is a tensor with
        all of the store's part. If the servers update the parameters, the state of their optimizers is also in "state",
        in PyTorch's form. So `get_state_dict` of `torch.distributed.checkpoint.state_dict` works, and a plain PyTorch
        optimizer can load the dict.

        Raises:
            RuntimeError: A process has died, and the other workers have already finished this call. Call it again after
                the next step.
        """
        if not self._in_store():
            with self._live.shown():
                return self.optimizer.state_dict()

        data = None if self._survival.new else self._survival.call("state_dict", self._store_bytes)
        if data is None:
            raise RuntimeError(
                "state_dict: a process has died, and the other workers have theirs already: call it "
                "again after the next step"
            )
        records = self._server_records()
        with self._live.shown(unpack(data, self._of_key, records) if records else None):
            state = self.optimizer.state_dict()
        return {**state, "store": torch.from_numpy(np.frombuffer(data, np.uint8).copy())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a dict that `state_dict` has returned. Collective over the workers, blocking.

        The number of servers may differ from that when the dict was made.

        If the servers update the parameters, this call also gives the model the parameters that the dict contains.

        You can also load the `state_dict` of a plain PyTorch optimizer, or the result of PyTorch's `get_state_dict`.
        These contain no parameters, so the servers take the parameters of rank 0's model at the next step. The model
        may be loaded before or after this call.

        Args:
            state_dict: The state. It must be the same on all workers.

        Raises:
            ValueError: The saved optimizer was of another kind. Or one of the two optimizers keeps its state in the
                store, and the other one does not.
        """
        state = dict(state_dict)
        data = state.pop("store", None)
        records = self._server_records()
        states = states_by_key(state, self._keys) if records and data is None else {}
        if (data is not None) is not self._in_store() and not states and not self._is_stateless():
            own, saved = ("has", "has none") if self._in_store() else ("has none", "has")
            raise ValueError(
                f"load_state_dict: this optimizer {own} of its state in the store, the saved one "
                f"{saved}: make it as the saved one was, and load what its state_dict() gave"
            )

        if self._survival.new:
            state["state"] = self.optimizer.state_dict()["state"]
        self.optimizer.load_state_dict(state)
        self.param_groups = self.optimizer.param_groups
        if records:
            self.optimizer.state.clear()

        def load() -> None:
            if data is not None:
                load_bytes(self.store, data.numpy().tobytes())
            elif records:
                now = store_bytes(self.store)
                packed, refusal = attempt(lambda: pack(now, self._of_key, records, states))
                self.store.worker.agree("load_state_dict", [], refusal, noun="argument")
                load_bytes(self.store, packed or b"")
                self._exchange.renew()
                self._exchange.is_loaded = True
                return
            else:
                return
            # With elastic averaging the store has the centre, and the model keeps its own parameters.
            if self.on_servers:
                self._take_over()

        self._change("load_state_dict", load)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError, because groups cannot be added to an optimizer that is already wrapped."""
        if hasattr(self, "_exchange"):
            raise RuntimeError(f"add_param_group: {WRAP_LATER}")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the wrapped optimizer does. Local."""
        self._cleared += self._cleared != UNKNOWN
        self.optimizer.zero_grad(set_to_none)

    def save(self, path: str | Path, wait: bool = True) -> Saving | None:
        """Write the parameters and the servers' state into a file, as `kv.save` does.

        Collective over the workers, blocking. The state of an optimizer that runs on the workers is not in the file:
        save `optimizer.state_dict()` as usual.

        Args:
            path: The file, on rank 0's machine.
            wait: False to write the file in the background.

        Returns:
            With `wait=False`, a `Saving`, which can wait for the file. Otherwise None.

        Raises:
            ValueError: The file cannot be written. All workers raise it.
        """

        def save() -> Saving | None:
            # The store's keys hold sums of gradients, so put the parameters into them before the store writes the file.
            if not self._in_store():
                first = self.store.rank == 0
                values = [p.detach().clone() if first else torch.zeros_like(p) for p in self._parameters]
                self.store.pushpull(self._keys, [value.contiguous() for value in values])
            self._exchange.put_loaded()
            return self.store.save(path, wait=wait)

        return None if self._survival.new else self._survival.call("save", save)

    def load(self, path: str | Path) -> None:
        """Load a file that `save` has written, with any number of servers, and copy its parameters into the model.

        Collective over the workers, blocking.

        Args:
            path: The file, on rank 0's machine.

        Raises:
            ValueError: The file cannot be read, or does not fit the store. All workers raise it.
        """

        def load() -> None:
            self.store.load(path)
            self._take_over()

        self._change("load", load)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: an optimizer with its store can neither be copied nor pickled."""
        raise TypeError("a DistributedOptimizer is tied to its store: copy or save its `state_dict()`")

    def close(self) -> None:
        """Close the store, so that its servers exit. This happens automatically when the program ends.

        If the store survives deaths, call `close` explicitly: it waits until the other workers have finished their last
        step.
        """
        if self.store.layout.survives:
            self._survival.end()
        self.store.close()
        release_gradients(self)

    # ---- inside

    def _begin(self, compression: dict[str, Any] | None, elastic: float | None, interval: int) -> None:
        """Create the store's keys, choose the exchange, and take rank 0's parameters.

        Collective over the workers, blocking.
        """
        check_elastic(self.store, elastic)
        optimizer = self.optimizer
        self._live = LiveState(optimizer, self._server_records)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        # Hooks on the state belong to the wrapped optimizer, and run when it returns or loads its state.
        for name in STATE_HOOKS:
            setattr(self, name, getattr(optimizer, name))
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._keys = [self._names[p] for p in self._parameters]
        self._of_key: dict[Name, Tensor] = dict(zip(self._keys, self._parameters))
        self.store.init(self._keys, [p.detach().contiguous() for p in self._parameters])
        if compression is not None:
            self.store.set_gradient_compression(compression)
        consensus = Consensus(self.store, optimizer, self._passes, self._parameters, self._keys)
        if self.store.worker.fresh:
            self._cleared = UNKNOWN
        else:
            consensus.check_call("DistributedOptimizer", 0)
        self._exchange = choose_exchange(self.store, optimizer, self._names, self._passes, elastic, interval)
        self._survival: SurvivingSteps = SurvivingSteps(self.store, self._keys, self._exchange, consensus)
        self._survival.begin()
        self.param_groups = optimizer.param_groups
        self._resumed = self._survival.steps
        if self._resumed:
            # The program now calls its scheduler until it has caught up. Without this attribute torch would warn that
            # the optimizer has made no step.
            self._opt_called = True
        LOG.info(
            "DistributedOptimizer: %s by %s on a %s store of %d parameters, from step %d",
            type(optimizer).__name__,
            type(self._exchange).__name__,
            self.store.type,
            len(self._keys),
            self._resumed,
        )

    def _check_groups(self) -> None:
        """Raise RuntimeError if the wrapped optimizer's parameters are not those that the store has keys for."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(held) != len(self._parameters) or any(p is not known for p, known in zip(held, self._parameters)):
            raise of_caller(
                RuntimeError(
                    f"step: {type(self.optimizer).__name__} on rank {self.store.rank} has {len(held)} parameters in "
                    f"its groups, and they are not the {len(self._parameters)} that it was wrapped with: {WRAP_LATER}"
                )
            )

    def _in_store(self) -> bool:
        """True if the store holds parameters or optimizer state, not only sums of gradients."""
        return self.on_servers or self._elastic

    def _store_bytes(self) -> bytes:
        self._exchange.put_loaded()
        return store_bytes(self.store)

    def _server_records(self) -> dict[Tensor, Optimizer]:
        """Return the servers' optimizers by parameter, or an empty dict if servers do not update the parameters."""
        exchange = getattr(self, "_exchange", None)
        return exchange.by_parameter() if isinstance(exchange, ServerExchange) else {}

    def _is_stateless(self) -> bool:
        """True if the optimizer runs on servers and keeps no state, so that a state_dict contains none."""
        return self.on_servers and not any(map(array_names, self._server_records().values()))

    def _change(self, what: str, change: Callable[[], None]) -> None:
        """Run `change`, which changes parameters or state, on all workers.

        A worker that has just replaced a dead worker takes the parameters of the other workers instead. The other
        workers made this call before it started.
        """
        if self._survival.new:
            self._survival.begin()
        else:
            self._survival.call(what, change)

    def _take_over(self) -> None:
        """Continue with a store that has just loaded a file, and take its parameters."""
        self._exchange.is_loaded = False
        self._exchange.renew()
        self._exchange.begin(False)


def _check_optimizer(optimizer: object) -> None:
    """Raise TypeError or ValueError unless this is a torch optimizer whose `step` evaluates the loss at most once."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps an optimizer of torch.optim, not a {type(optimizer).__name__}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, which cannot be "
            "distributed: choose another optimizer"
        )


def _name_keys(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    """Return the key of each parameter.

    Raises ValueError if a parameter has no name, and TypeError if a parameter is complex.
    """
    pairs = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise of_caller(TypeError("named_parameters has no pairs (name, parameter): pass model.named_parameters()"))
    names = {parameter: name for name, parameter in pairs}
    missing = sum(p not in names for group in optimizer.param_groups for p in group["params"])
    if missing:
        raise ValueError(
            f"named_parameters names not all of the optimizer's parameters, {missing} are missing: pass "
            "model.named_parameters()"
        )
    for name, parameter in zip(names.values(), names):
        if parameter.is_complex():
            raise TypeError(
                f"parameter {name!r} is of type {parameter.dtype}, which no store keeps: let the model "
                "have torch.view_as_real of it, or use mpips.torch.DataParallel"
            )
    return names
