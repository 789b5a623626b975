"""`DistributedOptimizer(optimizer, ...)` over a store: its `step` pushes gradients when backward is over.

    optimizer = mpips.torch.DistributedOptimizer(optimizer, model.named_parameters(), kind="dist_sync", servers=2)
    loss.backward(); optimizer.step()           # pushes gradients, pulls parameters

A step: the workers agree (`consensus`), exchange gradients (`exchange`), and go on after a death (`survival`).
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

STATE_HOOKS = tuple(
    f"_optimizer_{kind}_hooks"
    for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
)
WRAP_LATER = "add groups to the PyTorch optimizer first, then wrap it in a new DistributedOptimizer"
LOG = log.get("mpips.torch")


@uncompiled("step", "zero_grad")
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

    A parameter that has a gradient on no worker stays as it is, in a step. Where some workers have one, it is the mean
    over all, those without counting as zero. Workers of one client, and all of a synchronous store, see before each
    step that they make the same one, with the same numbers in their groups; else all raise one sentence.

    Where the store survives deaths (`mpips run --spares`), `step` goes on after them by itself: a step that has ended
    is never undone, and one that has not is made again with the same gradients. A spare that takes a dead worker's
    place runs the program from its beginning, gets all here, and goes on at step `resumed`.
    """

    _step_supports_amp_scaling = True
    """GradScaler calls `step` though a gradient has overflowed here."""

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
        self._passes, self._elastic = backward_passes_per_step, elastic is not None
        self._cleared = 0
        """Calls of `zero_grad` since the last step."""
        try:
            with torch.inference_mode(False):  # else no step could change what is made here
                self._begin(compression, elastic, interval)
        except Exception:
            release_gradients(self)
            if store is None:
                self.store.close()
            raise

    @property
    def resumed(self) -> int:
        """The step at which the program goes on: 0 in a job that begins, more where others have made steps before this
        process began. All that the program did before those steps it does itself, such as `scheduler.step()`."""
        return self._resumed

    @property
    def on_servers(self) -> bool:
        """True where the store's servers make the updates."""
        return isinstance(self._exchange, ServerExchange)

    @property
    def state(self) -> LiveState:  # type: ignore[override]
        """The state of the wrapped optimizer. Where servers update, it is theirs: NaN stand in its place, and
        `state_dict()` has it."""
        return self._live

    @state.setter
    def state(self, state: Any) -> None:
        """Nothing: `torch.optim.Optimizer` sets it, and it is the wrapped optimizer's."""

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None) -> Any:
        """Exchange gradients and update the parameters. Return the result of `closure`. Blocking.

        `grad_scaler` is passed by `GradScaler.step`. Where a gradient has overflowed on one worker, all skip the step.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():  # as PyTorch's optimizers do
                loss = closure()
        self._check_groups()
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                "this PyTorch's GradScaler does not pass itself to step(), so workers do not learn of "
                "each other's overflows: use mpips.torch.DataParallel with it"
            )
        if grad_scaler is None:
            self._survival.step(Brought(cleared=self._cleared))
        else:  # all workers have the same overflows then, so their scales stay equal
            found = find_overflow(grad_scaler, self)
            skipped = self._survival.step(Brought(bool(found), grad_scaler.get_scale(), self._cleared))
            found.fill_(float(skipped))
        self._cleared = 0
        return loss

    def set_parameters(self) -> None:
        """Give all workers, and the servers, rank 0's parameters. All workers call; blocking.

        Call it where the program has changed parameters, as by `model.load_state_dict`.
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
        """Return the wrapped optimizer's state; the store's part, if it has one, is the tensor "store".

        It is equal on all workers then, which all call; blocking. `torch.save` writes it. The state of an optimizer on
        servers is in "store" with all its bits, and in "state" as PyTorch has it, for `get_state_dict` of
        `torch.distributed.checkpoint.state_dict`, and for PyTorch's optimizer alone.
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
        """Load what `state_dict` gave, with any number of servers. All workers call; blocking.

        The model then has its parameters, where the servers update them. What the wrapped optimizer's own `state_dict`
        gave, or PyTorch's `get_state_dict`, is loaded, too. The servers then take the model's parameters, rank 0's, in
        the next step: load the model before or afterwards.
        """
        state = dict(state_dict)
        data = state.pop("store", None)
        records = self._server_records()
        states = states_by_key(state, self._keys) if records and data is None else {}
        if (data is not None) is not self._in_store() and not states and not self._is_stateless():
            here, there = ("has", "has none") if self._in_store() else ("has none", "has")
            raise ValueError(
                f"load_state_dict: this optimizer {here} of its state in the store, the saved one "
                f"{there}: make it as the saved one was, and load what its state_dict() gave"
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
            if self.on_servers:  # else the model has its parameters, and the store the centre
                self._take_over()

        self._change("load_state_dict", load)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: groups are the wrapped optimizer's, as they were when this one was made."""
        if hasattr(self, "_exchange"):
            raise RuntimeError(f"add_param_group: {WRAP_LATER}")
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, as the wrapped optimizer does."""
        self._cleared += self._cleared != UNKNOWN
        self.optimizer.zero_grad(set_to_none)

    def save(self, path: str | Path, wait: bool = True) -> Saving | None:
        """Write parameters and the servers' state into one file, see `kv.save`. All workers call; blocking.

        An optimizer that runs here keeps its own state, which `optimizer.state_dict()` gives as ever.
        """

        def save() -> Saving | None:
            if not self._in_store():  # its keys have held gradients
                first = self.store.rank == 0
                values = [p.detach().clone() if first else torch.zeros_like(p) for p in self._parameters]
                self.store.pushpull(self._keys, [value.contiguous() for value in values])
            self._exchange.put_loaded()
            return self.store.save(path, wait=wait)

        return None if self._survival.new else self._survival.call("save", save)

    def load(self, path: str | Path) -> None:
        """Load what `save` wrote, of any number of servers; the model then has it. All workers call; blocking."""

        def load() -> None:
            self.store.load(path)
            self._take_over()

        self._change("load", load)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: a store is neither copied nor saved with the optimizer."""
        raise TypeError("a DistributedOptimizer is tied to its store: copy or save its `state_dict()`")

    def close(self) -> None:
        """Close the store: its servers leave. A program that ends does so by itself.

        Where the store survives deaths, call it nevertheless: it lets the others end their last step.
        """
        if self.store.layout.survives:
            self._survival.end()
        self.store.close()
        release_gradients(self)

    # ---- inside

    def _begin(self, compression: dict[str, Any] | None, elastic: float | None, interval: int) -> None:
        """Make the keys, choose the exchange, and take the parameters of all. Collective over the workers, blocking."""
        check_elastic(self.store, elastic)
        optimizer = self.optimizer
        self._live = LiveState(optimizer, self._server_records)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        for name in STATE_HOOKS:  # which are called where the wrapped optimizer gives or loads its state
            setattr(self, name, getattr(optimizer, name))
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._keys = [self._names[p] for p in self._parameters]
        self._of_key: dict[Name, Tensor] = dict(zip(self._keys, self._parameters))
        self.store.init(self._keys, [p.detach().contiguous() for p in self._parameters])
        if compression is not None:
            self.store.set_gradient_compression(compression)
        consensus = Consensus(self.store, optimizer, self._passes, self._parameters, self._keys)
        is_new = self.store.layout.survives and self.store.worker.fresh
        if is_new:
            self._cleared = UNKNOWN
        else:
            consensus.see_call("DistributedOptimizer", 0)
        self._exchange = choose_exchange(self.store, optimizer, self._names, self._passes, elastic, interval)
        self._survival: SurvivingSteps = SurvivingSteps(self.store, self._keys, self._exchange, consensus)
        self._survival.begin()
        self.param_groups = optimizer.param_groups
        self._resumed = self._survival.steps
        if self._resumed:
            self._opt_called = True  # schedulers of torch, which then catch up, warn where it has made no step
        LOG.info(
            "DistributedOptimizer: %s by %s on a %s store of %d parameters, from step %d",
            type(optimizer).__name__,
            type(self._exchange).__name__,
            self.store.type,
            len(self._keys),
            self._resumed,
        )

    def _check_groups(self) -> None:
        """Raise RuntimeError where the wrapped optimizer has got or lost parameters: new ones have no key."""
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        if len(held) != len(self._parameters) or any(p is not one for p, one in zip(held, self._parameters)):
            raise of_caller(
                RuntimeError(
                    f"step: {type(self.optimizer).__name__} on rank {self.store.rank} has {len(held)} parameters in "
                    f"its groups, and they are not the {len(self._parameters)} that it was wrapped with: {WRAP_LATER}"
                )
            )

    def _in_store(self) -> bool:
        """Return whether the store holds a part of the training's state."""
        return self.on_servers or self._elastic

    def _store_bytes(self) -> bytes:
        self._exchange.put_loaded()
        return store_bytes(self.store)

    def _server_records(self) -> dict[Tensor, Optimizer]:
        """The servers' optimizers by parameter; none where they make no updates."""
        exchange = getattr(self, "_exchange", None)
        return exchange.by_parameter() if isinstance(exchange, ServerExchange) else {}

    def _is_stateless(self) -> bool:
        """True where the optimizer, which runs on servers, has no state: what is saved of it is empty."""
        return self.on_servers and not any(map(array_names, self._server_records().values()))

    def _change(self, what: str, change: Callable[[], None]) -> None:
        """Change parameters or state, on all workers. One that has taken a dead worker's place has those of the others
        already, who were here before it began."""
        if self._survival.new:
            self._survival.begin()
        else:
            self._survival.call(what, change)

    def _take_over(self) -> None:
        """Take over a store that has been loaded, with its parameters."""
        self._exchange.is_loaded = False
        self._exchange.renew()
        self._exchange.begin(False)


def _check_optimizer(optimizer: object) -> None:
    """Raise TypeError or ValueError where it is none that steps once for each call."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps an optimizer of torch.optim, not a {type(optimizer).__name__}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, which cannot be "
            "distributed: choose another optimizer"
        )


def _name_keys(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    """Return the key of every parameter. ValueError where one has no name, TypeError where one is complex."""
    names = {parameter: name for name, parameter in named}
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
