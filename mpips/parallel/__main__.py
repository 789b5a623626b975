"""`mpips train`: train a multi-layer perceptron on a process grid."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from collectives.console import OutFile, Picture, console
from mpips import optimizers

from . import checkpoint, report
from .activations import ACTIVATIONS
from .agreement import TrainingError, agree
from .data import Data, describe, load
from .devices import DEVICES, array_module
from .distribution import WAYS
from .grid import Grid, misfit, parse
from .mlp import MLP
from .predict import Prediction, predict_all
from .served import INTERVAL, STORES, Servers
from .served import misfit as misfit_of_servers
from .sources import BUILT_IN, Source, open_source
from .specification import DTYPES, Specification
from .splits import MODES
from .training import Epoch, train

SHARE = click.FloatRange(0, 1, max_open=True)
_OPTIMIZERS = ("sgd", "adagrad", "rmsprop", "adam", "adamw")


@click.command(context_settings={"show_default": True})
@click.option("--data", required=True, help="digits, airfoil, mnist, synthetic[:ROWS,FEATURES,TARGETS], a text, .npz.")
@click.option("--data-directory", default=".", envvar="MPIPS_DATA", help="Where the files of airfoil and mnist lie.")
@click.option("--target", default="", show_default="last", help="Target columns of a text: names or numbers.")
@click.option("--features", default="", show_default="all others", help="Feature columns of a text.")
@click.option("--classify", is_flag=True, help="The target of a file is a class number (softmax loss).")
@click.option("--test-share", default=0.2, type=SHARE, help="Share of the rows kept for testing.")
@click.option("--way", default="auto", type=click.Choice(["auto", *WAYS]), help="How rows reach the ranks.")
@click.option("--hidden", default="512,512", help="Widths of the hidden layers, commas between.")
@click.option("--activation", default="relu", type=click.Choice(list(ACTIVATIONS)))
@click.option("--split", default="pairs", type=click.Choice(MODES), help="How model ranks cut layers.")
@click.option("--grid", "grid_text", default="auto", help="BATCHxMODEL ranks, for instance 4x2, or auto.")
@click.option("--explain", is_flag=True, help="Print the predicted time of every grid.")
@click.option("--epochs", default=10, type=click.IntRange(1))
@click.option("--batch", default=100, type=click.IntRange(1), help="Samples of a whole minibatch.")
@click.option("--seed", default=1, type=click.IntRange(0))
@click.option("--dtype", default="float32", type=click.Choice(DTYPES), help="mixed: float16 travels between nodes.")
@click.option("--device", default="cpu", type=click.Choice(DEVICES), help="gpu: CuPy; the node's GPUs are dealt out.")
@click.option("--optimizer", default="sgd", type=click.Choice(_OPTIMIZERS))
@click.option("--learning-rate", default=0.01)
@click.option("--momentum", default=0.0, help="For sgd.")
@click.option("--overlap/--no-overlap", default=None, show_default="between nodes", help="Send beside computation.")
@click.option("--servers", default=0, type=click.IntRange(0), help="Ranks that are servers; they are the last ones.")
@click.option("--clients", default=1, type=click.IntRange(1), help="With servers: clients, each of them a --grid.")
@click.option("--averaging", default="sync", type=click.Choice(list(STORES)), help="With servers: what they do.")
@click.option("--every", default=INTERVAL, type=click.IntRange(1), help="Elastic: steps between two exchanges.")
@click.option("--alpha", default=0.5, type=click.FloatRange(0, 1, min_open=True), help="Elastic: how far they move.")
@click.option("--threads", default=0, type=click.IntRange(0), help="BLAS threads a rank; 0: cores / ranks of the node.")
@click.option("--save", "save_path", type=OutFile(), help="Write a checkpoint (safetensors) after the last epoch.")
@click.option("--load", "load_path", help="Go on from a checkpoint of any grid, with its network and optimizer.")
@click.option("--json", "json_path", type=OutFile(), help="Write epochs, phases, memory as JSON.")
@click.option("--plot", "plot_path", type=Picture(), help="Write a picture of losses and time budget.")
def command(**options: Any) -> None:
    """Train a multi-layer perceptron, batch, model or hybrid parallel over all ranks of the job.

    Start the ranks with `mpips train ... --ranks P` or with mpirun.
    """
    comm = MPI.COMM_WORLD
    try:
        _Run(comm, **options).run()
    except (TrainingError, ValueError) as error:
        if not isinstance(error, TrainingError) and comm.size > 1:
            _abort(comm)
        if comm.rank == 0:
            click.echo(f"mpips train: {error}", err=True)
        sys.exit(1)
    except Exception:
        if comm.size == 1:
            raise
        _abort(comm)


def check(ranks: int, **options: Any) -> None:
    """Refuses a command line that cannot be for that many ranks, by click.UsageError. Starts no MPI."""
    try:
        _widths(options["hidden"])
        _optimizer(options["optimizer"], options["learning_rate"], options["momentum"])
        if problem := _grid_misfit(ranks, options["grid_text"], options["servers"], options["clients"]):
            raise TrainingError(problem)
        if options["data"].startswith("synthetic"):
            open_source(options["data"])
        elif options["data"] not in BUILT_IN and not os.path.isfile(options["data"]):
            raise TrainingError(f"there is no data file {options['data']!r}, nor is it one of {', '.join(BUILT_IN)}")
        if options["load_path"] and not os.path.isfile(options["load_path"]):
            raise TrainingError(f"there is no checkpoint {options['load_path']!r}")
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _abort(comm: MPI.Comm) -> None:
    """One rank's unforeseen error ends all of them: the others would wait for ever."""
    traceback.print_exc()
    sys.stderr.flush()
    comm.Abort(1)


class _Run:
    """One call of the command; the attributes are its options."""

    def __init__(
        self,
        comm: MPI.Comm,
        *,
        data: str,
        data_directory: str,
        target: str,
        features: str,
        classify: bool,
        test_share: float,
        way: str,
        hidden: str,
        activation: str,
        split: str,
        grid_text: str,
        explain: bool,
        epochs: int,
        batch: int,
        seed: int,
        dtype: str,
        device: str,
        optimizer: str,
        learning_rate: float,
        momentum: float,
        overlap: bool | None,
        servers: int,
        clients: int,
        averaging: str,
        every: int,
        alpha: float,
        threads: int,
        save_path: str | None,
        load_path: str | None,
        json_path: str | None,
        plot_path: str | None,
    ) -> None:
        self.comm, self.console = comm, console()
        self.open: Callable[[], Source] = partial(
            open_source, data, _words(target), _words(features), data_directory, classify
        )
        self.test_share, self.way, self.batch, self.seed, self.dtype = test_share, way, batch, seed, dtype
        self.hidden, self.activation, self.split = _widths(hidden), activation, split
        self.grid_text, self.explain, self.epochs, self.threads = grid_text, explain, epochs, threads
        self.last_epoch = epochs
        self.optimizer = _optimizer(optimizer, learning_rate, momentum)
        self.save_path, self.load_path, self.json_path, self.plot_path = save_path, load_path, json_path, plot_path
        self.overlap, self.device, self.xp = overlap, device, np
        if problem := _grid_misfit(comm.size, grid_text, servers, clients):
            raise TrainingError(problem)
        self.servers = Servers(servers, clients, averaging, every, alpha, comm) if servers else None
        if self.servers is not None and load_path:
            raise TrainingError("--load goes on without servers: leave --servers out")

    def run(self) -> None:
        with threadpool_limits(self.threads or _share_of_cores(self.comm), user_api="blas"):
            if self.servers is None:
                self._prepare_and_train(None)
                return
            grid = self.servers.join(*parse(self.grid_text))
            self.comm = grid.comm
            try:
                self._prepare_and_train(grid)
            except TrainingError as error:
                self.servers.give_up(str(error))
                raise
            self.servers.close()

    def _prepare_and_train(self, grid: Grid | None) -> None:
        self.xp = array_module(self.device, self.comm)
        shape = describe(self.open, self.comm)
        sizes = (shape.features, *self.hidden, shape.outputs)
        loss = "softmax" if shape.classes >= 0 else "l2"
        specification = Specification(sizes, self.activation, loss, self.dtype, self.seed)
        if grid is None:
            grid = self._grid(specification, shape.rows - int(shape.rows * self.test_share))
        start = perf_counter()
        data = load(self.open, grid, self.batch, self.dtype, self.seed, self.test_share, self.way)
        if self.explain:
            self._say(report.explain_way(data))
        specification = specification._replace(sizes=(*sizes[:-1], data.outputs))
        self._train(specification, data, grid, perf_counter() - start)

    def _grid(self, specification: Specification, train_rows: int) -> Grid:
        shape = None if self.grid_text == "auto" else parse(self.grid_text)
        predictions = []
        if self.explain or shape is None:
            if self.xp is not np:
                raise TrainingError("predictions are for --device cpu: give --grid, and leave --explain out")
            predictions = predict_all(specification, self.batch, self.comm, self.optimizer, self.split)
            self._explain(predictions, -(-train_rows // self.batch))
        return Grid(*(shape or (predictions[0].batch, predictions[0].model)), self.comm)

    def _explain(self, predictions: list[Prediction], steps: int) -> None:
        if self.explain and self.comm.rank == 0:
            self.console.print(report.explain(predictions, steps))

    def _train(self, specification: Specification, data: Data, grid: Grid, data_seconds: float) -> None:
        hybrid = None
        if self.load_path:
            hybrid = checkpoint.load(self.load_path, grid, self.split, self.xp, overlap=self.overlap)
        if hybrid is not None:
            specification = hybrid.network.specification
            self.last_epoch += hybrid.updates // len(data.deal.samples)
        self._say(
            f"{'-'.join(str(size) for size in specification.sizes)}, {data.train_rows:,} rows, batch {self.batch}, "
            f"grid {grid} (batch x model), {specification.dtype}, data by {data.way}"
        )
        trained = train(
            MLP(*specification, xp=self.xp), data, grid, self.epochs, self.optimizer, self.split, self._progress,
            hybrid, overlap=self.overlap, servers=self.servers,
        )  # fmt: skip
        if self.save_path:
            checkpoint.save(self.save_path, trained.hybrid, data.scaling)
        memory = np.zeros(self.comm.size, np.int64)
        self.comm.Gather(np.array([report.peak_memory()], np.int64), memory, root=0)
        content = report.record(specification, data, grid, trained.epochs, data_seconds, memory.tolist())
        phases = report.total_phases(trained.epochs, data_seconds)
        problem = None
        if self.comm.rank == 0:
            self.console.print(report.budget(phases))
            peaks = ", ".join(f"{peak / 2**20:,.0f}" for peak in memory)
            mean = report.mean_seconds(trained.epochs)
            self._say(f"mean of an epoch: {mean:.2f} s; peak memory by rank, MiB: {peaks}")
            problem = self._write(content, trained.epochs, phases, f"grid {grid}")
        agree(self.comm, problem)

    def _write(self, content: dict, epochs: list[Epoch], phases: dict[str, float], title: str) -> str | None:
        try:
            if self.json_path:
                report.write_json(self.json_path, content)
            if self.plot_path:
                report.picture(self.plot_path, epochs, phases, title)
        except (OSError, ImportError) as error:
            return f"the results cannot be written: {error}"
        return None

    def _progress(self, epoch: Epoch) -> None:
        self._say(report.epoch_line(epoch, self.last_epoch))

    def _say(self, text: str) -> None:
        if self.comm.rank == 0:
            self.console.print(text)


def _grid_misfit(ranks: int, grid: str, servers: int, clients: int) -> str | None:
    """Why the grid and the servers do not fit the ranks; None where they do."""
    if grid == "auto":
        if servers:
            return "with --servers, give the --grid of a client, for instance 1x2"
        return "--clients are clients of --servers: give some" if clients > 1 else None
    try:
        batch, model = parse(grid)
    except ValueError as error:
        return str(error)
    if servers:
        return misfit_of_servers(servers, clients, batch, model, ranks)
    return "--clients are clients of --servers: give some" if clients > 1 else misfit(batch, model, ranks)


def _optimizer(name: str, learning_rate: float, momentum: float) -> optimizers.Optimizer:
    if momentum and name != "sgd":
        raise TrainingError(f"--momentum is for sgd, not for {name}")
    extra = {"momentum": momentum} if name == "sgd" else {}
    try:
        return optimizers.create(name, learning_rate=learning_rate, **extra)
    except ValueError as error:
        raise TrainingError(str(error)) from error


def _share_of_cores(comm: MPI.Comm) -> int:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks = node.size
    node.Free()
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(word) for word in _words(text))
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise TrainingError(f"--hidden {text!r} must be widths of at least 1 with commas between, for instance 512,512")
    return widths


if __name__ == "__main__":
    command()
