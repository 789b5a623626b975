"""Training: what must agree and fit before it begins, then epoch after epoch, the same for every mesh.

One epoch: a pass over the minibatches, a test, and what it tells of losses and times.

One rank's worker: its slice of the network, what updates it, and its step of training.

Source: the paper, section 7, Algorithm 3; with one model rank it is Algorithm 1, with one batch rank Algorithm 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

import collectives
from mpips.mlp.data.loading import Data, Rule, load, order
from mpips.mlp.data.sources import Source
from mpips.mlp.mesh import Mesh, TrainingError, agree, alike, counted, of_network, of_optimizer, parse, spans_nodes
from mpips.mlp.network.layers import Specification
from mpips.mlp.network.mlp import MLP
from mpips.mlp.network.slice import Network
from mpips.mlp.parallel import PHASES, Clock, LocalUpdate, LossScale, TensorExchange, Update, on_host
from mpips.mlp.prediction import choose_mesh
from mpips.optimizers.base import Optimizer
from mpips.optimizers.sgd import SGD

_LOADING = ("batch", "seed", "test_share", "way", "link", "labels")


class Trained(NamedTuple):
    """The history, and this rank's slice of the trained network with its optimizer."""

    epochs: list[Epoch]
    worker: Worker


class _Asked(NamedTuple):
    """What `train` is asked to do it with; None, and "auto" for the mesh, where the caller leaves it open."""

    model: MLP
    mesh: Mesh | str
    optimizer: Optimizer | None
    mode: str | None
    overlap: bool | None
    half: bool | None
    servers: UpdateServers | None


def train(
    model: MLP, data: Data | Callable[[], Source], mesh: Mesh | str = "auto", epochs: int = 10,
    optimizer: Optimizer | None = None, mode: str | None = None, on_epoch: Callable[[Epoch], None] | None = None,
    worker: Worker | None = None, overlap: bool | None = None, half: bool | None = None,
    servers: UpdateServers | None = None, **loading: Any,
) -> Trained:  # fmt: skip
    """Train `model` on the rows that `data` gave this rank. Collective over the mesh; blocking; every rank returns the
    same history.

    The minibatches and so, up to rounding, the losses do not depend on the mesh. `optimizer`: SGD(learning_rate=0.01)
    by default. `mode` is how model ranks cut the layers: "pairs", the default, or "columns". `on_epoch` is called on
    every rank after each epoch. `overlap`: whether messages travel beside computation, `half`: whether a "mixed"
    network sends float16; None: where the ranks are on several nodes. With elastic `servers` losses are means over the
    clients, each with its own weights on its own rows.

    `worker` goes on with an earlier run (`Trained.worker`) or a checkpoint: with its weights, network, mesh, optimizer,
    mode, overlap, half and servers. Whatever else of these is given must be the same.

    In place of loaded data, `data` may be the function that opens them, with `batch` and other arguments of `load`:
    then `mesh` may be "auto", the one with the shortest predicted step (`choose_mesh`), or a text like "2x2", of all
    ranks of the job. TrainingError on every rank if the ranks give different arguments, if mesh, network, data and
    `worker` do not fit, or when a loss is no longer finite.
    """
    asked = _Asked(model, mesh, optimizer, mode, overlap, half, servers)
    mesh, optimizer, mode, servers = chosen = _chosen(asked, worker)
    with _told_to(asked.servers or servers, mesh):
        _agree(asked, chosen, data, epochs, worker, loading)
        mesh, data = _load(model, data, mesh, optimizer, mode, worker, loading)
    if worker is None:
        worker = Worker(model, mesh, optimizer, mode, overlap, half, servers)
        worker.labels = data.labels
    data = data.on(worker.network.xp)
    done = worker.updates // len(data.deal.samples)
    history = []
    for epoch in range(done, done + epochs):
        history.append(run_epoch(worker, data, epoch))
        if on_epoch:
            on_epoch(history[-1])
    return Trained(history, worker)


def _chosen(asked: _Asked, worker: Worker | None) -> tuple[Mesh | str, Optimizer, str, UpdateServers | None]:
    """Mesh, optimizer, mode and servers: the worker's where it goes on, else what was asked for, or the defaults."""
    if worker is not None:
        return worker.mesh, worker.optimizer, worker.network.mode, worker.servers
    return asked.mesh, asked.optimizer or SGD(learning_rate=0.01), asked.mode or "pairs", asked.servers


@contextmanager
def _told_to(servers: UpdateServers | None, mesh: Mesh | str) -> Iterator[None]:
    """Servers end, with the sentence, where the training cannot begin."""
    try:
        if servers is not None and isinstance(mesh, str):
            raise TrainingError(f"with servers, give train the Mesh that their join returned, not {mesh!r}")
        yield
    except TrainingError as error:
        if servers is not None:
            servers.give_up(str(error))
        raise


def _agree(
    asked: _Asked, chosen: tuple[Mesh | str, Optimizer, str, UpdateServers | None],
    data: Data | Callable[[], Source], epochs: int, worker: Worker | None, loading: dict[str, Any],
) -> None:  # fmt: skip
    """TrainingError on every rank where ranks ask for different trainings, or for one that cannot be. Collective."""
    model, (mesh, optimizer, mode, servers) = asked.model, chosen
    arguments = {
        **of_network(model.specification), "array module": model.xp.__name__, "the grid": mesh, "epochs": epochs,
        **of_optimizer(optimizer), "mode": mode, "overlap": asked.overlap, "half": asked.half,
        **(data.arguments() if isinstance(data, Data) else {"data": "a function that opens them", **loading}),
        **_past(worker), **(servers.arguments() if servers is not None else {"servers": "not given"}),
    }  # fmt: skip
    comm = MPI.COMM_WORLD if isinstance(mesh, str) else mesh.comm
    problem = None if worker is None else _other_than(worker, asked)
    alike(comm, "train", arguments, problem or _wrong_loading(data, mesh, loading))
    if worker is None:
        _check_weights(model, comm)


def _past(worker: Worker | None) -> dict[str, object]:
    """What training goes on from, by name."""
    if worker is None:
        return {"worker": "not given"}
    past = {**of_optimizer(worker.optimizer), **of_network(worker.network.specification)}
    told = {f"{name} so far": value for name, value in past.items()}
    return {"worker": "given", "updates so far": worker.updates, "mode so far": worker.network.mode, **told}


def _other_than(worker: Worker, asked: _Asked) -> str | None:
    """What was asked for, and is not what the worker does that goes on; None where all of it is."""
    network = worker.network
    mine, theirs = (_described(each.specification, each.xp) for each in (asked.model, network))
    if asked.mesh != "auto":
        mine["mesh"], theirs["mesh"] = asked.mesh, worker.mesh
    if asked.optimizer is not None:
        mine |= of_optimizer(asked.optimizer)
        theirs |= of_optimizer(worker.optimizer)
    given = {"mode": asked.mode, "overlap": asked.overlap, "half": asked.half, "servers": asked.servers}
    its = {"mode": network.mode, "overlap": worker.overlap, "half": worker.half, "servers": worker.servers}
    for name in given:
        if given[name] is not None:
            mine[name], theirs[name] = given[name], its[name]
    for name, value in mine.items():
        if str(value) != str(theirs.get(name)):
            return f"train: {name} is {value}, but the worker that goes on has {theirs.get(name)}; give the same"
    if asked.servers is not None and asked.servers is not worker.servers:
        return f"train: servers is not the {worker.servers} that the worker goes on with, but another; give the same"
    return None


def _described(specification: Specification, xp: Any) -> dict[str, object]:
    """A network and its array module by name."""
    named = {f"{name} (model)": value for name, value in of_network(specification).items()}
    return {**named, "array module (model)": xp.__name__}


def _check_weights(model: MLP, comm: MPI.Comm) -> None:
    """Refuse, on every rank, first weights that differ: where any rank has used its arrays, all must hold the same.

    Collective. Where no rank has, the seed alone decides, and no rank makes arrays of the whole network.
    """
    used = np.array([model.used], np.int64)
    comm.Allreduce(MPI.IN_PLACE, used, MPI.MAX)
    if used[0]:
        weights = np.ascontiguousarray(on_host(model.flat_parameters))
        alike(comm, "train", {"checksum of the network's weights": f"{zlib.crc32(weights.data):08x}"})


def _wrong_loading(data: Data | Callable[[], Source], mesh: Mesh | str, loading: dict[str, Any]) -> str | None:
    """Why the data cannot be loaded so; None where they can, or already are."""
    if isinstance(data, Data):
        if not loading and not isinstance(mesh, str):
            return None
        return (
            f"these rows were loaded for a grid {data.mesh}: give train that Mesh, not {mesh!r}, nor how to load; "
            f"or give it the function that opens the data, with mesh='auto' and batch=..."
        )
    if unknown := [name for name in loading if name not in _LOADING] or ("batch" not in loading and ["no batch"]):
        return f"train with data to open takes batch=..., and may take {_LOADING}; here is {unknown[0]}"
    return None


def _load(
    model: MLP, data: Data | Callable[[], Source], mesh: Mesh | str, optimizer: Optimizer, mode: str,
    worker: Worker | None, loading: dict[str, Any],
) -> tuple[Mesh, Data]:  # fmt: skip
    """The mesh, chosen if it is to be, and this rank's rows, loaded if they are to be; TrainingError on every rank
    where they do not fit."""
    if isinstance(mesh, str):
        mesh = choose_mesh(model, loading["batch"], optimizer, mode) if mesh == "auto" else Mesh(*parse(mesh))
    if not isinstance(data, Data):
        if worker is not None and worker.labels:
            loading = {"labels": worker.labels, **loading}
        data = load(data, mesh, dtype=model.specification.dtype, **loading)
    check_fit(model.specification, data, mesh, worker)
    return mesh, data


def check_fit(specification: Specification, data: Data, mesh: Mesh, worker: Worker | None = None) -> None:
    """TrainingError on every rank unless this network can be trained on these rows on this mesh, going on from
    `worker` where it is given. Collective over the mesh."""
    agree(mesh.comm, _misfit(specification, data, mesh) or _mixture(worker, data))


def _misfit(specification: Specification, data: Data, mesh: Mesh) -> str | None:
    if str(mesh) != data.mesh:
        return f"the data were loaded for a grid {data.mesh}, not for {mesh}: load them for the grid that trains"
    sizes, loss = specification.sizes, specification.loss
    features = data.x.shape[1]
    if (sizes[0], sizes[-1]) != (features, data.outputs):
        return (
            f"a network of {counted(sizes[0], 'input')} and {counted(sizes[-1], 'output')} cannot learn "
            f"{counted(features, 'feature')} -> {data.outputs}"
        )
    if (loss == "softmax") != data.classes:
        targets, fitting = ("class numbers", "softmax") if data.classes else ("numbers", "l2")
        return f"loss {loss!r} does not fit the targets, which are {targets}: make the MLP with loss={fitting!r}"
    return None


def _mixture(worker: Worker | None, data: Data) -> str | None:
    """Why rows that were for testing would be trained on, or the other way round; None where they would not."""
    before = None if worker is None else worker.rule
    labels = () if worker is None else worker.labels
    if labels and labels != data.labels:
        return (
            f"the labels of these rows are {', '.join(data.labels) or 'class numbers'}, and the checkpoint's are "
            f"{', '.join(labels)}: load the data with labels=worker.labels"
        )
    if before is None or before[:2] == data.rule[:2]:
        return None
    return (
        f"the rows were dealt by seed {data.seed} and test share {data.test_share}, but those of the checkpoint by "
        f"seed {before.seed} and test share {before.test_share}: rows for training and rows for testing would mix; "
        f"load the data with the checkpoint's"
    )


_EVALUATE_SAMPLES = 1000


class Epoch(NamedTuple):
    """One epoch (from 1). Losses are means over samples; `test_loss` is None without test rows, `test_accuracy`
    with "l2".

    `phases` are seconds of this epoch by phase, the mean over ranks; `under_way` those with messages under way, waited
    for or not.
    """

    epoch: int
    train_loss: float
    test_loss: float | None
    test_accuracy: float | None
    seconds: float
    phases: dict[str, float]
    under_way: float


def run_epoch(worker: Worker, data: Data, epoch: int) -> Epoch:
    """Epoch number `epoch`, from 0. Collective over the mesh; TrainingError on every rank if the loss is not finite."""
    start, before = perf_counter(), _clocked(worker)
    with np.errstate(all="ignore"):  # the sentence tells what NumPy would warn of, once
        loss = _pass(worker, data, epoch)
        overflow = f"the loss of epoch {epoch + 1} is {loss}: lower the learning rate"
        agree(worker.mesh.comm, None if isfinite(loss) else overflow)
        test_loss, accuracy = _test(worker, data)
    *spent, under_way = _mean(_clocked(worker) - before, worker.mesh)
    phases = dict(zip(PHASES, spent))
    return Epoch(epoch + 1, loss, test_loss, accuracy, perf_counter() - start, phases, under_way)


def _pass(worker: Worker, data: Data, epoch: int) -> float:
    """Mean training loss of one pass over the minibatches, each loss taken before its update."""
    bounds, samples = data.deal.bounds, data.deal.samples
    total = 0.0
    for index in order(len(samples), epoch, data.seed):
        start = perf_counter()
        part = slice(bounds[index], bounds[index + 1])
        x, y = data.x[part], data.y[part]
        worker.clock.add("data", start)
        total += worker.step(x, y, int(samples[index]))
    sums = np.array([total])
    worker.mesh.batch_comm.Allreduce(MPI.IN_PLACE, sums)
    return float(sums[0]) / data.train_rows


def _test(worker: Worker, data: Data) -> tuple[float | None, float | None]:
    if not data.test_rows:
        return None, None
    loss, right = worker.evaluate(data.test_x, data.test_y, _EVALUATE_SAMPLES)
    return loss / data.test_rows, right / data.test_rows if data.classes else None


def _clocked(worker: Worker) -> np.ndarray:
    """Seconds of each phase so far, and with messages under way."""
    return np.array([*(worker.clock.seconds[phase] for phase in PHASES), worker.clock.under_way])


def _mean(seconds: np.ndarray, mesh: Mesh) -> list[float]:
    """The mean over the ranks."""
    mesh.comm.Allreduce(MPI.IN_PLACE, seconds)
    means: list[float] = (seconds / mesh.comm.size).tolist()
    return means


class UpdateServers(Protocol):
    """Servers that keep the weights of a network, as training knows them; `mpips.mlp.Servers` are such."""

    between: bool
    """Whether the ranks of the job are on several nodes."""

    def arguments(self) -> dict[str, object]:
        """What must be the same on every rank, by name."""

    def connect(
        self, network: Network, mesh: Mesh, optimizer: Optimizer, clock: Clock, overlap: bool | None
    ) -> Update:
        """What updates this rank's slice. `overlap`: whether gradients leave during the backward pass; None: where
        ranks are on several nodes. Collective over the job; TrainingError where they cannot serve this network."""

    def give_up(self, sentence: str) -> None:
        """Tell the servers that there will be no training, and why; all workers call, then raise."""


class Worker:
    """The slice of a model that this rank of the mesh trains, and what updates it.

    Starts from the weights of `model`: its seed's, or, where its arrays were already used, what they hold (they
    must then be the same on every rank). Collective over the mesh. `overlap`: whether gradients travel beside the
    computation, and `half`: whether a "mixed" network sends float16; None: where the ranks are on several nodes.
    `servers` keep the weights and run the optimizer, or average elastically; see `mpips.mlp.Servers`. `start` may
    write the first weights.
    """

    def __init__(
        self,
        model: MLP,
        mesh: Mesh,
        optimizer: Optimizer,
        mode: str = "pairs",
        overlap: bool | None = None,
        half: bool | None = None,
        servers: UpdateServers | None = None,
        start: Callable[[Network], None] | None = None,
    ) -> None:
        self.mesh, self.optimizer, self.clock = mesh, optimizer, Clock()
        self.overlap, self.half, self.servers = overlap, half, servers
        spans, mixed = spans_nodes(mesh), model.specification.dtype == "mixed"
        narrow = [mixed and (each if half is None else half) for each in spans]
        self._exchange = TensorExchange(mesh.model_comm, self.clock, narrow[1]) if mesh.model > 1 else None
        empty = partial(collectives.empty, comm=mesh.comm)
        self.network = Network(model.specification, self._exchange, mode, empty, model.xp)
        if model.used:
            self.network.take(model.parameters)
        if start is not None:
            start(self.network)
        self.updates = 0
        self.rule: Rule | None = None
        self.labels: tuple[str, ...] = ()
        """By what the rows were dealt that it was trained on; None where that is not known."""
        self.update: Update
        if servers is None:
            beside = spans.batch if overlap is None else overlap
            scale = LossScale(mesh.model_comm) if mixed else None
            self.update = LocalUpdate(self.network, mesh.batch_comm, optimizer, self.clock, beside, narrow[0], scale)
        else:
            self.update = servers.connect(self.network, mesh, optimizer, self.clock, overlap)
        self._polls_model = self._exchange is not None and (spans.model if overlap is None else overlap)
        if any(spans) or overlap or (servers is not None and servers.between):
            self.network.progress = self

    def gradient(self, layer: int) -> None:
        """The network's word that a layer's gradients are there."""
        self.update.gradient(layer)

    def poll(self) -> None:
        """Look after what is on its way."""
        if self._polls_model and self._exchange is not None:
            self._exchange.poll()
        self.update.poll()

    def step(self, x: np.ndarray, y: np.ndarray, samples: int) -> float:
        """One minibatch of `samples` samples, of which this rank's batch index has (x, y), possibly none.

        Returns the sum of the losses of its own samples; the same on all ranks of a model communicator.
        """
        start, before = perf_counter(), self.clock.communication()
        loss = self.network.step(x, y, self.update.share(samples))
        self.updates += 1
        self.update.run(self.updates)
        self.clock.add("compute", start + self.clock.communication() - before)
        return loss

    def evaluate(self, x: np.ndarray, y: np.ndarray, block: int) -> tuple[float, float]:
        """Sum of the losses and number of right classes over the samples of all batch indices. Collective, in parallel.

        `block` is the most samples of one forward pass; every rank of a model communicator has the same (x, y).
        """
        start, before, under_way = perf_counter(), dict(self.clock.seconds), self.clock.under_way
        totals = np.zeros(2)
        for first in range(0, len(x), block):
            totals += self.network.evaluate(x[first : first + block], y[first : first + block])
        self.mesh.batch_comm.Allreduce(MPI.IN_PLACE, totals)
        self.clock.seconds.update(before)
        self.clock.under_way = under_way
        self.clock.add("evaluate", start)
        return float(totals[0]), float(totals[1])
