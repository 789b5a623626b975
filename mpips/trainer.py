"""`Trainer`: the loops of examples/ for users who do not want to write one (MXNET-MPI, section 5, figures 6 to 8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

import collectives
from mpips import optimizers
from mpips.keys.key import Name
from mpips.optimizers import Elastic1, Elastic2, Optimizer, Updater
from mpips.overlap.exchange import Overlapped
from mpips.overlap.layers import check_model
from mpips.overlap.measure import job_profile
from mpips.overlap.profile import Profile, save_profile
from mpips.overlap.report import Recorder, Report, blocking
from mpips.runtime.rendezvous import attempt
from mpips.store import KVStore

INTERVAL = 64
"""Iterations between two exchanges of elastic averaging (MXNET-MPI, section 5)."""


class Model(Protocol):
    """What a Trainer trains: arrays that stay where they are, and a function that fills the gradients."""

    @property
    def parameters(self) -> Sequence[np.ndarray]: ...

    @property
    def gradients(self) -> Sequence[np.ndarray]: ...

    def loss_and_gradients(self, x: np.ndarray, y: np.ndarray) -> float:
        """Mean loss of a batch; `gradients` become the gradients of that mean."""
        ...


class Epoch(NamedTuple):
    """One epoch as this worker saw it: seconds since `fit` began, mean local loss, accuracy on test data if given."""

    epoch: int
    seconds: float
    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class Elastic:
    """Elastic averaging (equations 2 and 3): every `interval` iterations client and centre move together by `alpha`."""

    alpha: float = 0.5
    interval: int = INTERVAL

    def __post_init__(self) -> None:
        Elastic1(alpha=self.alpha)
        if self.interval < 1:
            raise ValueError(f"Elastic(interval={self.interval}): give a number of iterations >= 1")


class Exchange(Protocol):
    """One way to train: an iteration's compute and its communication."""

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Forward, backward, exchange, update; the loss of this worker's batch."""
        ...

    def finish(self) -> None:
        """Wait until the parameters are those that the last step made."""
        ...

    def report(self) -> Report:
        """What the last steps were on this worker. Local."""
        ...


def keys_of(model: Model) -> list[Name]:
    """A key for every array of the model: its names where it has them, otherwise "0", "1", ...

    Texts, as the keys are with which messages are measured: a store's keys are of one type.
    """
    return list(getattr(model, "names", map(str, range(len(model.parameters)))))


_trainers: WeakKeyDictionary[KVStore, int] = WeakKeyDictionary()
"""How many Trainers a store has had."""


def own_keys(model: Model, kv: KVStore) -> list[Name]:
    """`keys_of` for the first Trainer of a store; with a prefix for those after it."""
    number = _trainers[kv] = _trainers.get(kv, 0) + 1
    return [key if number == 1 else f"trainer{number}/{key}" for key in keys_of(model)]


def averaged(optimizer: Optimizer, workers: float) -> Optimizer:
    """The optimizer for gradients that arrive as a sum over workers: `rescale` divided by their number."""
    if "rescale" not in {field.name for field in fields(optimizer)}:
        raise ValueError(f"{optimizer!r} has no rescale: a Trainer needs an optimizer of gradients")
    return replace(optimizer, rescale=optimizer.rescale / workers)  # type: ignore[call-arg, attr-defined]


class Blocking:
    """An exchange that ends before its step does."""

    def __init__(self, model: Model, name: str) -> None:
        self._model, self._name, self._recorder = model, name, Recorder()

    def _step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        """An iteration: the loss, and time.perf_counter() when the gradients were there."""
        raise NotImplementedError

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """Forward, backward, exchange, update; the loss of this worker's batch."""
        begin = time.perf_counter()
        loss, computed = self._step(x, y)
        blocking(self._recorder, len(self._model.parameters), begin, computed, time.perf_counter())
        return loss

    def finish(self) -> None:
        """Nothing is under way."""

    def report(self) -> Report:
        """What the last steps were on this worker. Local."""
        return self._recorder.report(self._name, ((1, len(self._model.parameters)),), (), 0, None)


class Gradients(Blocking):
    """Push gradients, pull parameters; the store's optimizer updates (on servers, or on the workers without any)."""

    def __init__(self, model: Model, kv: Any, optimizer: Optimizer) -> None:
        super().__init__(model, "none")
        self._kv, self._keys = kv, own_keys(model, kv)
        kv.init(self._keys, list(model.parameters))
        kv.set_optimizer(averaged(optimizer, workers_in_a_sum(kv)), keys=self._keys)
        kv.pull(self._keys, list(model.parameters))

    def _step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        loss = self._model.loss_and_gradients(x, y)
        computed = time.perf_counter()
        self._kv.pushpull(self._keys, list(self._model.gradients), out=list(self._model.parameters))
        return loss, computed


class ElasticAveraging(Blocking):
    """SGD inside a client; every `interval` iterations the client and the servers' centre attract each other."""

    def __init__(self, model: Model, kv: Any, optimizer: Optimizer, elastic: Elastic) -> None:
        if not kv.type.endswith("async"):
            raise ValueError(f"elastic averaging needs a store of kind dist_async or mpi_async, not {kv.type}")
        super().__init__(model, "none, elastic")
        self._kv, self._keys, self._interval = kv, own_keys(model, kv), elastic.interval
        self._workers = kv.layout.client.Get_size()
        kv.init(self._keys, list(model.parameters))
        kv.set_optimizer(Elastic1(alpha=elastic.alpha), keys=self._keys)
        kv.pull(self._keys, list(model.parameters))
        self._centers = [np.empty_like(array) for array in model.parameters]
        self._attract = Updater(Elastic2(alpha=elastic.alpha), model.parameters)
        self._descend = Updater(averaged(optimizer, self._workers), model.parameters)
        self._iteration = 0

    def _step(self, x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
        loss = self._model.loss_and_gradients(x, y)
        computed = time.perf_counter()
        if self._iteration % self._interval == 0:
            for center, parameter in zip(self._centers, self._model.parameters):
                np.divide(parameter, self._workers, out=center)  # a push sums over the client's workers, who are equal
            self._kv.push(self._keys, self._centers)
            self._kv.pull(self._keys, self._centers)
            self._attract.update(self._centers)
        for gradient in self._model.gradients:
            collectives.allreduce(gradient, self._kv.layout.client)
        self._descend.update(self._model.gradients)
        self._iteration += 1
        return loss, computed


def workers_in_a_sum(kv: Any) -> float:
    """Workers whose gradients make one update: all of a synchronous store, a client's of an asynchronous one.

    Where clients differ in size it is their mean: a store has one optimizer, and larger clients take larger steps.
    """
    return kv.num_workers / len(kv.layout.clients) if kv.type.endswith("async") else kv.num_workers


class Trainer:
    """Trains `model` through a store: synchronous, asynchronous or elastic, with servers or without.

    `optimizer` is a name with options, or an Optimizer; its gradient is the mean over the samples of all workers that
    contribute to an update. Every worker starts from rank 0's parameters. `elastic` needs an asynchronous store.
    `overlap` exchanges beside the compute, by a strategy of `mpips plan` or "auto", which measures the job and takes
    the best; the model then offers a little more (`mpips.overlap.LayeredModel`, as `MLP` does).
    Collective over all workers of the store: every worker makes it, with equal arguments, and calls `step` equally
    often. ValueError or TypeError on every worker where arguments are wrong or differ.
    """

    def __init__(
        self,
        model: Model,
        kv: Any,
        optimizer: str | Optimizer = "sgd",
        *,
        elastic: Elastic | None = None,
        overlap: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(kv, KVStore):
            raise TypeError(f"a Trainer trains through a store, as mpips.create makes it, not {type(kv).__name__}")

        def chosen() -> Optimizer:
            if elastic is not None and overlap is not None:
                raise ValueError(f"elastic={elastic} has nothing to overlap: leave overlap={overlap!r} out")
            if overlap is None:  # otherwise it is a model in layers, which Overlapped checks
                trainable(model)
            return optimizers.create(optimizer, **options)

        made, refusal = attempt(chosen)
        words: list[tuple[Name, str]] = [
            ("optimizer", repr(made)), ("elastic", repr(elastic)), ("overlap", repr(overlap)),
        ]  # fmt: skip
        kv.settings.agree("Trainer", words, refusal, noun="argument")
        self.model, self.kv = model, kv
        self.exchange: Exchange
        if elastic is not None:
            self.exchange = ElasticAveraging(model, kv, made, elastic)
        elif overlap is not None:
            self.exchange = Overlapped(model, kv, averaged(made, workers_in_a_sum(kv)), overlap)  # type: ignore[arg-type]
        else:
            self.exchange = Gradients(model, kv, made)

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        """One iteration on this worker's batch, blocking until its parameters are the new ones; the batch's loss."""
        loss = self.exchange.step(x, y)
        self.exchange.finish()
        return loss

    def report(self) -> Report:
        """What the last steps were on this worker: seconds of an iteration, measured and predicted, the share of the
        communication that compute hid, groups, and the last one's tasks (`save_trace`, `save_picture`). Local.

        RuntimeError before the first step has ended.
        """
        return self.exchange.report()

    def profile(self, x: np.ndarray, y: np.ndarray, save: str | Path | None = None) -> Profile:
        """The profile of this job, measured on its ranks now: layers on a batch, messages through the store.

        Collective over the workers, blocking; gradients are overwritten, parameters stay. Rank 0 writes it to `save`,
        for `mpips plan`. The model is one in layers, as `overlap` needs it; ValueError otherwise, and with `elastic`.
        """
        check_model(self.model, "profile")
        if isinstance(self.exchange, ElasticAveraging):
            raise ValueError("elastic averaging sends its model whole, every few iterations: there is nothing to plan")
        if isinstance(self.exchange, Overlapped):
            found = self.exchange.measure(x, y)
        else:
            found = job_profile(self.model, self.kv, x, y)  # type: ignore[arg-type]
        if save is not None and self.kv.rank == 0:
            save_profile(found, save)
        return found

    def fit(
        self,
        x: np.ndarray,
        y: np.ndarray,
        *,
        batch_size: int,
        epochs: int,
        seed: int = 0,
        test: tuple[np.ndarray, np.ndarray] | None = None,
        on_epoch: Callable[[Epoch], None] | None = None,
    ) -> list[Epoch]:
        """Train on x and y (samples, ...), the same on every worker, with `batch_size` samples a worker and step.

        Every epoch is a new order of the samples, the same on every worker, of which each takes its share; the
        samples that do not fill a mini-batch of all workers wait for another epoch. `test` is measured after each.
        Collective; ValueError or TypeError on every worker where arguments are wrong, or differ between workers.
        """
        words, refusal = attempt(lambda: fitting(self.model, x, y, batch_size, epochs, seed, test))
        self.kv.settings.agree("fit", words or [], refusal, noun="argument")
        start, history = time.perf_counter(), []
        for epoch in range(1, epochs + 1):
            rows = shares(len(x), batch_size, epoch, seed, self.kv)
            losses = [self.exchange.step(x[mine], y[mine]) for mine in rows]
            self.exchange.finish()
            accuracy = self.model.accuracy(*test) if test else None  # type: ignore[attr-defined]
            history.append(Epoch(epoch, time.perf_counter() - start, float(np.mean(losses)), accuracy))
            if on_epoch:
                on_epoch(history[-1])
        return history


def trainable(model: object) -> None:
    """TypeError or ValueError that says what the model lacks of `Model`."""
    lacks = [name for name in ("parameters", "gradients", "loss_and_gradients") if not hasattr(model, name)]
    if lacks:
        raise TypeError(f"a Trainer's model has parameters, gradients and loss_and_gradients, but "
                        f"{type(model).__name__} has no {', '.join(lacks)} (docs/training.md, Trainer)")
    parameters, gradients = (
        [f"{array.dtype}{tuple(array.shape)}" for array in getattr(model, name)] for name in ("parameters", "gradients")
    )
    if len(parameters) != len(gradients):
        raise ValueError(f"the model has {len(parameters)} parameters, but {len(gradients)} gradients: one for each")
    for number, (mine, theirs) in enumerate(zip(parameters, gradients)):
        if mine != theirs:
            raise ValueError(f"parameters[{number}] is {mine}, but gradients[{number}] {theirs}: they must be equal")


def fitting(
    model: object,
    x: np.ndarray,
    y: np.ndarray,
    batch_size: int,
    epochs: int,
    seed: int,
    test: tuple[np.ndarray, np.ndarray] | None,
) -> list[tuple[Name, str]]:
    """The arguments of `fit` that are equal on all workers, by name; TypeError or ValueError where they are wrong."""
    if test is not None and not callable(getattr(model, "accuracy", None)):
        raise TypeError(f"fit(test=...) needs a model with accuracy(x, y), which {type(model).__name__} has not: "
                        "add it, or leave test out")
    for name, pair in {"x and y": (x, y), "test": test}.items():
        if pair is None:
            continue
        wrong = [type(array).__name__ for array in pair if not np.ndim(array) or not hasattr(array, "shape")]
        if wrong or len(pair) != 2:
            raise TypeError(f"{name}: give two arrays, inputs (samples, ...) and targets (samples, ...), "
                            f"not {', '.join(wrong) or len(pair)}")
        if len(pair[0]) != len(pair[1]):
            raise ValueError(f"{name}: {len(pair[0])} inputs, but {len(pair[1])} targets: give one for each sample")
    for name, number, least in (("batch_size", batch_size, 1), ("epochs", epochs, 0)):
        if number < least:
            raise ValueError(f"{name}={number}: give at least {least}")
    return [("x", str(x.shape)), ("y", str(y.shape)), ("batch_size", str(batch_size)),
            ("epochs", str(epochs)), ("seed", str(seed))]


def shares(samples: int, batch_size: int, epoch: int, seed: int, kv: Any) -> Iterator[np.ndarray]:
    """This worker's rows of every mini-batch of an epoch: int arrays (batch_size,)."""
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    mini_batch = batch_size * kv.num_workers
    if mini_batch > samples:
        raise ValueError(
            f"batch_size={batch_size} on {kv.num_workers} workers needs {mini_batch} samples a step, "
            f"but there are {samples}"
        )
    for start in range(kv.rank * batch_size, samples - samples % mini_batch, mini_batch):
        yield order[start : start + batch_size]
