"""`LocalSGD`: local SGD and DiLoCo for PyTorch models.

    inner = torch.optim.AdamW(model.parameters(), 1e-3)
    trainer = mpips.torch.LocalSGD(model, inner, every=500, kind="dist_sync", servers=1)
    while trainer.steps < steps:
        trainer.zero_grad()
        loss_of(model(x), y).backward()
        trainer.step()

Between two exchanges workers train without communication, which suits slow links. The exchanges themselves are in
`training.local`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.amp.grad_scaler import GradScaler

from mpips.collectives import arrays, log
from mpips.collectives.errors import of_caller
from mpips.optimizers.base import Optimizer
from mpips.store.api import KVStore
from mpips.store.create import create
from mpips.store.runtime.rendezvous import attempt
from mpips.torch.backend import check_joined
from mpips.torch.state import load_bytes, store_bytes
from mpips.torch.tensors import find_overflow
from mpips.training.local import TOKENS, InFlight, Local, LocalRounds, averaged, workers_in_a_sum
from mpips.training.recovery import Recovery, check_alike
from mpips.training.updates import create_keys

LOG = log.get("mpips.torch")
# the entries of a `state_dict`
STATE_ENTRIES = "inner", "steps", "since", "centers", "store"


class LocalSGD:
    """Local SGD and DiLoCo: workers train independently, and an outer optimizer combines their changes now and then.

    Each worker trains `model` on its own, with the optimizer `inner`. In an exchange it pushes how much its parameters
    have changed since the last exchange. The outer optimizer applies the changes to the common ("outer") parameters,
    and the worker continues from the outer parameters. Creating a LocalSGD is collective over the workers and blocks.

    In a synchronous store an exchange waits for all workers, so all must call `step` equally often. In an asynchronous
    store the outer optimizer applies the changes of each worker (or client) as they arrive.

    An asynchronous store has the options `quorum` and `grace_seconds`. With them, an exchange takes the mean of the
    changes of `quorum` clients. A client that is late does not wait: its changes go into the exchange that is open when
    they arrive, with weight 1 / (1 + exchanges late) (arXiv 2604.21428, 1903.03934).

    If the store survives deaths of processes (option `spares`), `step` recovers from a death. A worker that replaces a
    dead worker begins with the outer parameters, at the step count of the others (`steps`), and with a new inner
    optimizer.

    `torch.amp.GradScaler` accepts a LocalSGD as an optimizer: `scaler.unscale_(trainer)`, `scaler.step(trainer)`. Each
    worker has its own scale. If a worker's gradients have overflowed, its `inner` makes no step. `steps` is still
    increased, so that all workers exchange at the same steps.

    Args:
        model: A model on the host, whose parameters are contiguous and of float16, bfloat16, float32 or float64. All
            workers begin with rank 0's parameters. Buffers, and parameters that require no gradient, are not exchanged.
        inner: Any optimizer of torch.optim. Its state is not exchanged.
        outer: "nesterov" (DiLoCo: SGD with rate 0.7 and momentum 0.9), "average" (the mean of all workers' parameters),
            or an optimizer of `mpips.optimizers`, whose gradient is the mean of the workers' changes.
        every: The number of inner steps between two exchanges of a parameter.
        fragments: Split the model into this many parts. Each part is exchanged every `every` steps, at a different
            step.
        delay: The number of inner steps that a worker makes while an exchange is in flight. With 0, `step` waits for
            the exchange.
        keep: The weight of a worker's own parameters when it mixes in the result of an exchange, from 0 to 1.
        compression: How exchanged values are compressed, with error feedback, as in `kv.set_gradient_compression`.
        by_tokens: Weight each worker by the number of tokens that it has trained on since the last exchange. Each step
            passes its number to `step(tokens=count)`. Needs a synchronous store or a quorum.
        kind: The kind of the store, as in `mpips.create`.
        store: An existing store, used in place of `kind` and `options`.
        options: Options of the store, as in `mpips.create`. In a server process this call does not return: it runs the
            server, and raises SystemExit when the workers have closed the store.

    Raises:
        TypeError, ValueError: An argument is invalid, or differs between workers.
        mpips.OptionError: An option of the store is invalid.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> trainer = mpips.torch.LocalSGD(model, torch.optim.AdamW(model.parameters()), every=2)
        >>> while trainer.steps < 4:
        ...     trainer.zero_grad()
        ...     model(torch.ones(4, 3)).square().mean().backward()
        ...     trainer.step()
        >>> trainer.close()
    """

    # Tells GradScaler to call `step` even if a gradient has overflowed.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        model: torch.nn.Module,
        inner: torch.optim.Optimizer,
        outer: str | Optimizer = "nesterov",
        every: int = 500,
        *,
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.0,
        compression: dict[str, Any] | None = None,
        by_tokens: bool = False,
        kind: str = "dist_sync",
        store: KVStore | None = None,
        **options: Any,
    ) -> None:
        check_joined()
        rule = Local(every, outer, fragments, delay, keep)
        if not isinstance(model, torch.nn.Module):
            raise of_caller(TypeError(f"LocalSGD: model is a {type(model).__name__}: pass a torch.nn.Module"))
        if not callable(getattr(inner, "step", None)) or not hasattr(inner, "param_groups"):
            raise of_caller(
                TypeError(
                    f"LocalSGD: inner is a {type(inner).__name__}: pass an optimizer of torch.optim, "
                    "or one with step, zero_grad, param_groups and state_dict as those have"
                )
            )
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        for name, parameter in named:
            _check_parameter(name, parameter)
        self.inner = inner
        self._parameters = [p for _, p in named]
        self._keys = [name for name, _ in named]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._by_tokens = by_tokens
        self.store = store if store is not None else create(kind, **options)
        self._recovery = Recovery(self.store, self._keys, self._meet)
        try:
            self._begin(rule, compression)
        except Exception:
            if store is None:
                self.store.close()
            raise

    def _begin(self, rule: Local, compression: dict[str, Any] | None) -> None:
        """Create the keys and take rank 0's parameters. Collective over the workers, blocking."""
        kv, joins = self.store, self.store.worker.fresh
        outer, refusal = attempt(lambda: self._check_store(rule))
        arguments = {
            "every": rule.every,
            "outer": outer,
            "fragments": rule.fragments,
            "delay": rule.delay,
            "keep": rule.keep,
            "compression": compression,
            "by_tokens": self._by_tokens,
        }
        check_alike(kv, "LocalSGD", [(name, repr(value)) for name, value in arguments.items()], refusal)
        assert outer is not None
        if create_keys(kv, self._keys, self._views()):
            kv.set_optimizer(outer, keys=self._keys)
            if compression is not None:
                kv.set_gradient_compression(compression)
            if self._by_tokens and not kv.layout.asynchronous:
                kv.init(TOKENS, np.zeros(1, np.int64))
        self._rounds = LocalRounds(kv, self._keys, self._views(), rule, self._by_tokens, joins)
        LOG.info("LocalSGD: %r on a %s store of %d parameters", rule, kv.type, len(self._keys))
        if joins:
            self._recovery.run_once(self._meet)
            return
        self._rounds.begin_at((kv.resumed or 0) * rule.every)
        # No worker may push before all workers have pulled rank 0's parameters.
        kv.barrier()

    def _check_store(self, rule: Local) -> Optimizer:
        """Return the outer optimizer for this store. Raise ValueError if the arguments do not fit the store."""
        layout = self.store.layout
        self._check_inner("LocalSGD")
        if layout.survives and layout.asynchronous and len(layout.clients) < layout.num_workers:
            raise ValueError(
                f"LocalSGD: with spares each client of an asynchronous store has one worker, and this "
                f"{layout.kind} store has {layout.num_workers} in {len(layout.clients)} clients: take "
                "dist_async, or leave spares out"
            )
        if self._by_tokens and layout.asynchronous and layout.options.quorum < 0:
            raise ValueError(
                f"LocalSGD: by_tokens needs all workers in one sum, and a store of kind {self.store.type} "
                "takes each one's changes alone: take dist_sync, give a quorum, or leave by_tokens out"
            )
        if self._by_tokens and layout.asynchronous and len(layout.clients) < layout.num_workers:
            raise ValueError(
                f"LocalSGD: by_tokens with a quorum counts the tokens of a client, and each of the "
                f"{len(layout.clients)} clients of this {self.store.type} store has several workers: take "
                "dist_async, or leave by_tokens out"
            )
        return averaged(rule.optimizer, workers_in_a_sum(self.store))

    @property
    def steps(self) -> int:
        """The number of inner steps made so far. After a death it may jump ahead (see `step`)."""
        return self._rounds.steps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the inner optimizer, for `GradScaler`."""
        groups: list[dict[str, Any]] = self.inner.param_groups
        return groups

    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        tokens: int | None = None,
        grad_scaler: GradScaler | None = None,
    ) -> Any:
        """Make an inner step, and exchange the fragments that are due. Blocks if an exchange is due.

        After a death that the store survives, all workers continue from the step count of the worker that is furthest
        ahead. So a training loop should use `steps` as its counter.

        Args:
            closure: Passed to the inner optimizer.
            tokens: The number of tokens of this step on this worker. Required with `by_tokens`, and not allowed
                otherwise.
            grad_scaler: Passed by `GradScaler.step`. If gradients have overflowed, the inner step is left out, and the
                tokens of the step do not count.

        Returns:
            The result of the inner optimizer's `step`, or None if it was left out.

        Raises:
            ValueError: `tokens` is missing, invalid or not allowed, or `inner` trains a parameter that workers do not
                exchange.
        """
        if not self._by_tokens and tokens is not None:
            raise of_caller(ValueError(f"LocalSGD.step: tokens={tokens}: make it with by_tokens=True, or give none"))
        if self._by_tokens and (not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 0):
            raise of_caller(ValueError(f"LocalSGD.step: tokens={tokens!r}: give the step's tokens, an int, 0 or more"))
        self._check_inner("LocalSGD.step")
        loss = None
        if grad_scaler is not None and find_overflow(grad_scaler, self):
            tokens = 0
        else:
            loss = self.inner.step(closure) if closure is not None else self.inner.step()
        self._recovery.run_once(lambda: self._rounds.step(self._views(), tokens or 0))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, as the inner optimizer does. Local."""
        self.inner.zero_grad(set_to_none)

    def share(self) -> None:
        """Copy the outer parameters, which all workers have in common, into the model, to evaluate or save the model.

        Collective over the workers, blocking. Changes that inner steps have made since the last exchange are lost, so
        call `share` at a multiple of `every`. In an asynchronous store that survives deaths, a worker does not wait for
        the other workers: it takes the newest parameters, which others may change later.
        """
        layout = self.store.layout
        self._recovery.run(lambda: self._rounds.finish(self._views()))
        if waits := layout.asynchronous and not layout.survives:
            self.store.barrier()
        self._recovery.run(lambda: self._rounds.share(self._views(), newest=layout.asynchronous))
        if waits:
            self.store.barrier()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this worker needs to resume training, besides the model's own `state_dict()`.

        Collective over the workers, blocking: all must call it after the same step. It waits for an exchange in flight,
        and does not change parameters. The entry "store" is a tensor with the state of the outer optimizer. It is the
        same on all workers.

        Raises:
            RuntimeError: A process died during the call. Training can continue: call it again after another step.
        """
        self._recovery.run(self._rounds.wait)
        data = self._recovery.run_once(lambda: store_bytes(self.store))
        if data is None:
            raise RuntimeError("state_dict: a process has died meanwhile: call it again after the next step")
        return {
            "inner": self.inner.state_dict(),
            "steps": self.steps,
            "since": list(self._rounds.since),
            "open": list(self._rounds.in_flight[:2]) if self._rounds.in_flight is not None else [],
            "centers": [_tensor(center, like) for center, like in zip(self._rounds.centers, self._parameters)],
            "store": torch.from_numpy(np.frombuffer(data, np.uint8).copy()),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`. The model must load its own state. Collective over the workers, blocking.

        With as many workers as before, training continues bit for bit as if it had not been interrupted. The numbers of
        servers and workers may also differ from those of the saved run. If the number of workers differs, each worker
        loads the state of any of the old workers.

        Args:
            state_dict: This worker's own state or, if the number of workers has changed, the state of any worker.

        Raises:
            ValueError: The state lacks an entry, or does not fit the model or `fragments`.
            RuntimeError: A process died during the call. Load the model's state and this state again.
        """
        kv = self.store
        centers, refusal = attempt(lambda: self._centers_of(state_dict))
        steps = [] if kv.layout.asynchronous else [("steps", str(state_dict.get("steps")))]

        def all_are_ready() -> bool:
            kv.worker.agree("load_state_dict", steps, refusal, noun="argument")
            self._rounds.wait()
            return True

        if not self._recovery.run_once(all_are_ready):
            raise RuntimeError("load_state_dict: a process has died meanwhile: load the model and this again")
        self.inner.load_state_dict(state_dict["inner"])
        load_bytes(self.store, state_dict["store"].numpy().tobytes())
        for center, loaded in zip(self._rounds.centers, centers or ()):
            center[...] = loaded
        self._rounds.average_over_workers()
        due = state_dict.get("open")
        in_flight = InFlight(due[0], due[1], arrived=True) if due else None
        self._rounds.begin_at(state_dict["steps"], state_dict["since"], in_flight)

    def _centers_of(self, state: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the outer parameters ("centers") in a state. Raise ValueError if the state does not fit."""
        if lacks := [name for name in STATE_ENTRIES if name not in state]:
            raise ValueError(
                f"load_state_dict: there is no {', '.join(map(repr, lacks))}: give what LocalSGD.state_dict() gave"
            )
        centers = [arrays.host(center) for center in state["centers"]]
        saved, own = ([center.shape for center in each] for each in (centers, self._rounds.centers))
        if saved != own:
            raise ValueError(
                f"load_state_dict: the state is of parameters {saved}, and the model has {own}: give the model that "
                "it was saved with"
            )
        if (fragments := len(state["since"])) != len(self._rounds.fragments):
            raise ValueError(
                f"load_state_dict: the state was saved with fragments={fragments}, and this LocalSGD has "
                f"{len(self._rounds.fragments)}: give it as many"
            )
        return centers

    def close(self) -> None:
        """Wait for an exchange in flight, and close the store, so that its servers exit.

        Collective over the workers.
        """
        self._recovery.run(lambda: self._rounds.finish(self._views()))
        if self.store.layout.survives:
            self._recovery.run(self.store.barrier)
        self.store.close()

    def _meet(self) -> None:
        """After a recovery, agree with the other workers and finish the exchanges in flight. Collective, blocking."""
        self._rounds.rejoin(self._views())

    def _check_inner(self, call: str) -> None:
        """Raise ValueError if `inner` trains a parameter that is not exchanged: its values would drift apart."""
        exchanged = set(map(id, self._parameters))
        for number, group in enumerate(self.inner.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in exchanged:
                    name = self._names.get(id(parameter), f"{place} of group {number} of inner, which the model lacks")
                    raise of_caller(
                        ValueError(
                            f"{call}: inner trains parameter {name}, {tuple(parameter.shape)}, and workers do not "
                            "exchange it: make LocalSGD with a model that has it, when it asks for a gradient"
                        )
                    )

    def _views(self) -> list[Any]:
        """Return the memory of the parameters as NumPy arrays."""
        return [arrays.host(parameter.detach()) for parameter in self._parameters]


def _tensor(array: Any, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of an array as a tensor with the dtype and shape of `like`.

    `torch.from_numpy` would fail for bfloat16, because PyTorch does not know NumPy's bfloat16.
    """
    tensor = torch.empty_like(like, requires_grad=False)
    arrays.host(tensor)[...] = array
    return tensor


def _check_parameter(name: str, parameter: torch.Tensor) -> None:
    """Raise ValueError if a parameter cannot be exchanged in its own memory."""
    if parameter.device.type != "cpu":
        raise of_caller(ValueError(f"LocalSGD: parameter {name!r} is on {parameter.device}: move the model to the CPU"))
    if not parameter.is_contiguous() or not parameter.is_floating_point():
        kind = f"{parameter.dtype}, strides {parameter.stride()}"
        raise of_caller(ValueError(f"LocalSGD: parameter {name!r} is {kind}: make it contiguous, and of floats"))
