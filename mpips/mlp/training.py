"""`train`: check that the arguments fit together on all ranks, and run the epochs. `Worker` makes one rank's steps.

Source: the paper, section 7, Algorithm 3. With one model rank this is Algorithm 1, and with one batch rank Algorithm 2.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives import log
from mpips.mlp.clock import PHASES, PhaseClock, hidden_share
from mpips.mlp.data.base import DataSource
from mpips.mlp.data.loading import Data, DealRule, epoch_order, load
from mpips.mlp.mesh import Mesh, TrainingError, agree, alike, arguments_of, counted, parse, spans_nodes
from mpips.mlp.network import Network, Specification
from mpips.mlp.parallel import LocalUpdate, LossScale, TensorExchange, on_host
from mpips.mlp.perceptron import MLP
from mpips.mlp.prediction import choose_mesh
from mpips.mlp.servers import Servers, SynchronousUpdate
from mpips.optimizers.base import Optimizer
from mpips.optimizers.sgd import SGD

# arguments of `load` that `train` passes on
_LOADING = ("batch", "seed", "test_share", "way", "labels")
# largest number of samples in one forward pass of an evaluation
_EVALUATE_SAMPLES = 1000
LOG = log.get("mpips.mlp")


class EpochResult(NamedTuple):
    """The results of one epoch."""

    # number of the epoch, from 1
    epoch: int
    # mean losses over samples; the test loss is None without test rows
    train_loss: float
    test_loss: float | None
    # share of the test rows classified correctly; None without test rows, and for the loss "l2"
    test_accuracy: float | None
    seconds: float
    # phase (`PHASES`) -> seconds of this epoch, mean over ranks
    phases: dict[str, float]
    # seconds with messages in flight, whether or not computation waited for them; mean over ranks
    under_way: float


def hidden_of(epochs: Sequence[EpochResult]) -> float | None:
    """Return the share of communication time hidden behind computation, over all epochs. None if nothing was sent."""
    waited = sum(epoch.phases["forward"] + epoch.phases["backward"] for epoch in epochs)
    return hidden_share(waited, sum(epoch.under_way for epoch in epochs))


class Trained(NamedTuple):
    """The result of `train`."""

    # equal on every rank
    epochs: list[EpochResult]
    # this rank's slice of the trained network, with its optimizer
    worker: Worker


class TrainingChoices(NamedTuple):
    """The arguments of `train` that say how to train. They must be the same on all ranks."""

    mesh: Mesh | str
    optimizer: Optimizer
    mode: str
    # None in `overlap` or `half` means True if the ranks are on several nodes, else False
    overlap: bool | None
    half: bool | None
    servers: Servers | None

    def arguments(self, model: MLP | Network) -> dict[str, object]:
        """Return a dict of these choices and of the network's specification by name, for `mesh.alike`."""
        return arguments_of(model.specification, self.optimizer, self.mode) | {
            "array module": model.xp.__name__,
            "mesh": self.mesh,
            "overlap": self.overlap,
            "half": self.half,
            "servers": self.servers,
        }


def train(
    model: MLP,
    data: Data | Callable[[], DataSource],
    mesh: Mesh | str = "auto",
    epochs: int = 10,
    optimizer: Optimizer | None = None,
    mode: str | None = None,
    on_epoch: Callable[[EpochResult], None] | None = None,
    worker: Worker | None = None,
    overlap: bool | None = None,
    half: bool | None = None,
    servers: Servers | None = None,
    **loading: Any,
) -> Trained:
    """Train a network on the ranks of a mesh.

    Collective over the mesh; blocking. Every rank returns the same history. Minibatches are the same on every mesh, so
    the losses are also the same, up to rounding. With elastic `servers`, every client has weights and rows of its own,
    and losses are means over the clients.

    Args:
        model: The network. Training starts from its weights.
        data: This rank's rows, as `load` returns them, or the function that opens the source. With a function, also
            give `batch`, and any other arguments of `load`.
        mesh: The mesh for which the rows were loaded. If `data` is a function, this may also be "auto" (the mesh with
            the shortest predicted step, see `choose_mesh`) or a text like "2x2". Both use all ranks of the job.
        epochs: Number of passes over the training rows.
        optimizer: Default: SGD(learning_rate=0.01).
        mode: How model ranks cut the layers: "pairs" (the default) or "columns".
        on_epoch: Called on every rank after each epoch.
        worker: Continue an earlier run (`Trained.worker`) or a checkpoint, with its weights, network, mesh, optimizer,
            mode, overlap, half and servers. An argument for any of these must then be equal to the worker's.
        overlap: Send messages during computation. Default: True if the ranks are on several nodes.
        half: Send float16 in a "mixed" network. Default: True if the ranks are on several nodes.
        servers: Keep the weights on servers, see `Servers`.
        **loading: Arguments of `load`, if `data` is a function.

    Raises:
        TrainingError: On every rank, if the ranks give different arguments, if mesh, network, data and `worker` do not
            fit together, or if a loss is not finite.

    >>> rows = lambda: mpips.mlp.open_source("synthetic:400,4,1")
    >>> model = mpips.mlp.MLP([4, 16, 1], seed=1)
    >>> trained = mpips.mlp.train(model, rows, mesh="auto", epochs=3, batch=40)
    >>> trained.epochs[-1].train_loss < trained.epochs[0].train_loss
    True
    """
    optimizer = optimizer or (worker.optimizer if worker is not None else SGD(learning_rate=0.01))
    mode = mode or (worker.network.mode if worker is not None else "pairs")
    asked = TrainingChoices(mesh, optimizer, mode, overlap, half, servers)
    serving = servers or (worker.choices.servers if worker is not None else None)
    try:
        how = _agree(model, data, asked, epochs, worker, loading)
        mesh = how.mesh
        if mesh == "auto":
            mesh = choose_mesh(model, loading["batch"], how.optimizer, how.mode)
        elif isinstance(mesh, str):
            mesh = Mesh(*parse(mesh))
        if not isinstance(data, Data):
            if worker is not None and worker.labels:
                loading = {"labels": worker.labels, **loading}
            data = load(data, mesh, dtype=model.specification.dtype, **loading)
        check_fit(model.specification, data, mesh, worker)
    except TrainingError as error:
        if serving is not None:
            serving.give_up(str(error))
        raise
    if worker is None:
        worker = Worker(model, mesh, how.optimizer, how.mode, overlap, half, servers)
        worker.labels = data.labels
    return Trained(_run_epochs(worker, data.on(worker.network.xp), epochs, on_epoch), worker)


def _run_epochs(
    worker: Worker, data: Data, epochs: int, on_epoch: Callable[[EpochResult], None] | None
) -> list[EpochResult]:
    done, history = worker.updates // len(data.deal.samples), []
    LOG.info("training begins: grid %s, epoch %d, %d epochs, %d rows", data.mesh, done + 1, epochs, data.train_rows)
    for epoch in range(done, done + epochs):
        history.append(_run_epoch(worker, data, epoch))
        LOG.info("epoch %d is over: loss %g, %.2f s", epoch + 1, history[-1].train_loss, history[-1].seconds)
        if on_epoch:
            on_epoch(history[-1])
    return history


def _run_epoch(worker: Worker, data: Data, epoch: int) -> EpochResult:
    """Train on every minibatch once, then evaluate the test rows. `epoch` counts from 0.

    The loss of a minibatch is computed before the update by this minibatch.
    """
    start, clock = perf_counter(), worker.clock
    before = np.array([*clock.seconds.values(), clock.under_way])
    # NumPy would warn of every overflow. The check of the loss below reports it once.
    with np.errstate(all="ignore"):
        bounds, samples = data.deal.bounds, data.deal.samples
        total = np.zeros(1)
        for index in epoch_order(len(samples), epoch, data.seed):
            begin = perf_counter()
            part = slice(bounds[index], bounds[index + 1])
            x, y = data.x[part], data.y[part]
            clock.add("data", begin)
            total[0] += worker.step(x, y, int(samples[index]))
        worker.mesh.batch_comm.Allreduce(MPI.IN_PLACE, total)
        loss = float(total[0]) / data.train_rows
        overflow = f"the loss of epoch {epoch + 1} is {loss}: lower the learning rate"
        agree(worker.mesh.comm, None if isfinite(loss) else overflow)
        test_loss = accuracy = None
        if data.test_rows:
            test_sum, right = worker.evaluate(data.test_x, data.test_y, _EVALUATE_SAMPLES)
            test_loss, accuracy = test_sum / data.test_rows, right / data.test_rows if data.classes else None
    spent = np.array([*clock.seconds.values(), clock.under_way]) - before
    worker.mesh.comm.Allreduce(MPI.IN_PLACE, spent)
    *phases, under_way = (spent / worker.mesh.comm.size).tolist()
    seconds = perf_counter() - start
    return EpochResult(epoch + 1, loss, test_loss, accuracy, seconds, dict(zip(PHASES, phases)), under_way)


class Worker:
    """The slice of a network that this rank of the mesh trains, with the object that updates its weights.

    Creating a `Worker` is collective over the mesh. Training starts from the weights of `model`. If its arrays exist
    already (`MLP.used`), they must be equal on every rank. Otherwise the weights are drawn by the model's seed.

    Args:
        mode: How model ranks cut the layers: "pairs" or "columns".
        overlap: Send gradients during the computation. None means True if the ranks are on several nodes.
        half: Send float16 in a "mixed" network. None means True if the ranks are on several nodes.
        servers: Keep the weights on servers, see `Servers`.
        start: Called with this rank's network before the first step, to write other weights.
    """

    def __init__(
        self,
        model: MLP,
        mesh: Mesh,
        optimizer: Optimizer,
        mode: str = "pairs",
        overlap: bool | None = None,
        half: bool | None = None,
        servers: Servers | None = None,
        start: Callable[[Network], None] | None = None,
    ) -> None:
        self.mesh = mesh
        self.optimizer = optimizer
        self.clock = PhaseClock()
        self.choices = TrainingChoices(mesh, optimizer, mode, overlap, half, servers)
        spans, mixed = spans_nodes(mesh), model.specification.dtype == "mixed"
        narrow = [mixed and (each if half is None else half) for each in spans]
        self._exchange = TensorExchange(mesh.model_comm, self.clock, narrow[1]) if mesh.model > 1 else None
        empty = partial(collectives.empty, comm=mesh.comm)
        self.network = Network(model.specification, self._exchange, mode, empty, model.xp)
        if model.used:
            self.network.copy_slices(model.parameters)
        if start is not None:
            start(self.network)
        # steps taken, including those before a checkpoint
        self.updates = 0
        # the seed, test share and batch by which the rows were dealt before the checkpoint; None if they are not known
        self.rule: DealRule | None = None
        # names of the classes 0, 1, 2, ...; empty if the classes have no names
        self.labels: tuple[str, ...] = ()
        self.update: LocalUpdate | SynchronousUpdate
        if servers is None:
            beside = spans.batch if overlap is None else overlap
            scale = LossScale(mesh.model_comm) if mixed else None
            self.update = LocalUpdate(self.network, mesh, optimizer, self.clock, beside, narrow[0], scale)
        else:
            self.update = servers.connect(self.network, mesh, optimizer, self.clock, overlap)
        # True if poll() must progress sums between model ranks
        self._polls_model = self._exchange is not None and (spans.model if overlap is None else overlap)
        # True if messages may be in flight during the backward pass, which must then poll
        self._sends_meanwhile = any(spans) or bool(overlap) or (servers is not None and servers.between)

    def step(self, x: np.ndarray, y: np.ndarray, samples: int) -> float:
        """Train on one minibatch. Collective over the mesh.

        Args:
            x: Inputs of this rank's part of the minibatch, which may be empty.
            y: Targets or class numbers of this part.
            samples: Size of the whole minibatch.

        Returns:
            The sum of the losses of (x, y) before the update, equal on all ranks of a model communicator.
        """
        start, before = perf_counter(), self.clock.communication()
        progress = self if self._sends_meanwhile else None
        loss = self.network.step(x, y, self.update.divisor(samples), progress=progress)
        self.updates += 1
        self.update.run(self.updates)
        self.clock.add("compute", start + self.clock.communication() - before)
        return loss

    def gradient(self, layer: int) -> None:
        """Send the gradients of a layer during the backward pass, see `StepProgress`."""
        self.update.gradient(layer)

    def poll(self) -> None:
        """Progress the messages in flight during the backward pass, see `StepProgress`."""
        if self._polls_model and self._exchange is not None:
            self._exchange.poll()
        self.update.poll()

    def evaluate(self, x: np.ndarray, y: np.ndarray, block: int) -> tuple[float, float]:
        """Return the sum of the losses and the number of samples classified correctly, over all batch indices.

        Collective over the mesh. All ranks of a model communicator must give the same (x, y). `block` is the largest
        number of samples in one forward pass.
        """
        start, before, under_way = perf_counter(), dict(self.clock.seconds), self.clock.under_way
        totals = np.zeros(2)
        for first in range(0, len(x), block):
            totals += self.network.evaluate(x[first : first + block], y[first : first + block])
        self.mesh.batch_comm.Allreduce(MPI.IN_PLACE, totals)
        # The exchanges above were counted as "forward". Count them as "evaluate" instead.
        self.clock.seconds.update(before)
        self.clock.under_way = under_way
        self.clock.add("evaluate", start)
        return float(totals[0]), float(totals[1])


# ---- arguments that agree and fit


def check_fit(specification: Specification, data: Data, mesh: Mesh, worker: Worker | None = None) -> None:
    """Raise TrainingError on every rank unless this network can be trained on these rows on this mesh. Collective.

    If `worker` comes from a checkpoint, the rows must also have the checkpoint's labels, and must be shuffled and split
    with the checkpoint's seed and test share.
    """
    sizes, loss, features, problem = specification.sizes, specification.loss, data.x.shape[1], None
    targets, fitting = ("class numbers", "softmax") if data.classes else ("numbers", "l2")
    if str(mesh) != data.mesh:
        problem = f"the data were loaded for a grid {data.mesh}, not for {mesh}: load them for the grid that trains"
    elif (sizes[0], sizes[-1]) != (features, data.outputs):
        problem = (
            f"a network of {counted(sizes[0], 'input')} and {counted(sizes[-1], 'output')} cannot learn "
            f"{counted(features, 'feature')} -> {data.outputs}"
        )
    elif loss != fitting:
        problem = f"loss {loss!r} does not fit the targets, which are {targets}: make the MLP with loss={fitting!r}"
    elif worker is not None and worker.labels and worker.labels != data.labels:
        problem = (
            f"the labels of these rows are {', '.join(data.labels) or 'class numbers'}, and the checkpoint's are "
            f"{', '.join(worker.labels)}: load the data with labels=worker.labels"
        )
    elif worker is not None and worker.rule is not None and worker.rule[:2] != data.rule[:2]:
        problem = (
            f"the rows were dealt by seed {data.seed} and test share {data.test_share}, but those of the checkpoint by "
            f"seed {worker.rule.seed} and test share {worker.rule.test_share}: rows for training and rows for testing "
            f"would mix; load the data with the checkpoint's"
        )
    agree(mesh.comm, problem)


def _agree(
    model: MLP,
    data: Data | Callable[[], DataSource],
    asked: TrainingChoices,
    epochs: int,
    worker: Worker | None,
    loading: Mapping[str, object],
) -> TrainingChoices:
    """Return the choices of how to train, after checking that they are equal on all ranks. Collective.

    If `worker` continues an earlier run, its choices are used, and the arguments must not contradict them. Raise
    TrainingError on every rank if the ranks' choices, data or first weights differ.
    """
    how, problem = asked if worker is None else worker.choices, None
    if worker is not None:
        its = how.arguments(worker.network)
        for name, value in reversed(asked.arguments(model).items()):
            if value not in (None, "auto") and str(value) != str(its.get(name)):
                problem = f"train: {name} is {value}, but the worker that goes on has {its.get(name)}; give the same"
        if problem is None and asked.servers not in (None, how.servers):
            problem = f"train: servers is not the {how.servers} of the worker that goes on, but another; give the same"
    if isinstance(how.mesh, str) and how.servers is not None:
        raise TrainingError(f"with servers, give train the Mesh that their join returned, not {how.mesh!r}")
    comm = MPI.COMM_WORLD if isinstance(how.mesh, str) else how.mesh.comm
    arguments = how.arguments(model) | {"epochs": epochs, "updates so far": None if worker is None else worker.updates}
    if isinstance(data, Data):
        names = ("batch", "seed", "mesh", "outputs", "classes", "train_rows", "test_rows")
        arguments |= {"data": "rows", "dtype of the data": data.x.dtype, "features of the data": data.x.shape[1]}
        arguments |= {f"{name} of the data": getattr(data, name) for name in names}
    else:
        arguments |= {"data": "a function that opens them"}
        arguments |= {name: loading.get(name, "not given") for name in _LOADING}
    alike(comm, "train", arguments, problem or _wrong_loading(data, how.mesh, loading))
    # If no rank has used its model yet, all models have the same weights, those of the seed. Then do not compute a
    # checksum, which would allocate all weights.
    if worker is None and any(comm.allgather(model.used)):
        weights = np.ascontiguousarray(on_host(model.flat_parameters))
        alike(comm, "train", {"checksum of the network's weights": f"{zlib.crc32(weights.data):08x}"})
    return how


def _wrong_loading(
    data: Data | Callable[[], DataSource], mesh: Mesh | str, loading: Mapping[str, object]
) -> str | None:
    """Return an error message if `train` cannot load the data with these arguments, else None."""
    if not isinstance(data, Data):
        if wrong := [name for name in loading if name not in _LOADING] or ("batch" not in loading and ["no batch"]):
            return f"train with data to open takes batch=..., and may take {_LOADING}; here is {wrong[0]}"
    elif loading or isinstance(mesh, str):
        return (
            f"these rows were loaded for a grid {data.mesh}: give train that Mesh, not {mesh!r}, nor how to load; "
            f"or give it the function that opens the data, with mesh='auto' and batch=..."
        )
    return None
