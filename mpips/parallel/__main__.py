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
from .distribution import WAYS
from .grid import Grid, misfit, parse
from .mlp import MLP
from .network import Specification
from .predict import Prediction, predict_all
from .sources import BUILT_IN, Source, open_source
from .splits import MODES
from .training import Epoch, train

SHARE = click.FloatRange(0, 1, max_open=True)
_OPTIMIZERS = ("sgd", "adagrad", "rmsprop", "adam", "adamw")


@click.command(context_settings={"show_default": True})
@click.option("--data", required=True, help="digits, airfoil, mnist, synthetic[:ROWS,FEATURES,TARGETS], a text, .npz.")
@click.option("--data-directory", default=".", envvar="MPIPS_DATA", help="Where airfoil_self_noise.dat lies.")
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
@click.option("--dtype", default="float32", type=click.Choice(["float32", "float64"]))
@click.option("--optimizer", default="sgd", type=click.Choice(_OPTIMIZERS))
@click.option("--learning-rate", default=0.01)
@click.option("--momentum", default=0.0, help="For sgd.")
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
        if options["grid_text"] != "auto" and (problem := misfit(*parse(options["grid_text"]), ranks)):
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
        optimizer: str,
        learning_rate: float,
        momentum: float,
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
        self.optimizer = _optimizer(optimizer, learning_rate, momentum)
        self.save_path, self.load_path, self.json_path, self.plot_path = save_path, load_path, json_path, plot_path

    def run(self) -> None:
        with threadpool_limits(self.threads or _share_of_cores(self.comm), user_api="blas"):
            shape = describe(self.open, self.comm)
            sizes = (shape.features, *self.hidden, shape.outputs)
            loss = "softmax" if shape.classes >= 0 else "l2"
            specification = Specification(sizes, self.activation, loss, self.dtype, self.seed)
            train_rows = shape.rows - int(shape.rows * self.test_share)
            grid = self._grid(specification, train_rows)
            start = perf_counter()
            data = load(self.open, grid, self.batch, self.dtype, self.seed, self.test_share, self.way)
            specification = specification._replace(sizes=(*sizes[:-1], data.outputs))
            self._train(specification, data, grid, perf_counter() - start)

    def _grid(self, specification: Specification, train_rows: int) -> Grid:
        shape, predictions = None, []
        if self.grid_text != "auto":
            try:
                shape = parse(self.grid_text)
            except ValueError as error:
                raise TrainingError(str(error)) from error
            grid = Grid(*shape, self.comm)
        if self.explain or shape is None:
            predictions = predict_all(specification, self.batch, self.comm, self.optimizer, self.split)
            self._explain(predictions, -(-train_rows // self.batch))
        if shape is None:
            grid = Grid(predictions[0].batch, predictions[0].model, self.comm)
        return grid

    def _explain(self, predictions: list[Prediction], steps: int) -> None:
        if self.explain and self.comm.rank == 0:
            self.console.print(report.explain(predictions, steps))

    def _train(self, specification: Specification, data: Data, grid: Grid, data_seconds: float) -> None:
        hybrid = checkpoint.load(self.load_path, grid, self.split) if self.load_path else None
        if hybrid is not None:
            specification = hybrid.network.specification
        self._say(
            f"{'-'.join(str(size) for size in specification.sizes)}, {data.train_rows:,} rows, batch {self.batch}, "
            f"grid {grid} (batch x model), {specification.dtype}, data by {data.way}"
        )
        trained = train(
            MLP(*specification), data, grid, self.epochs, self.optimizer, self.split, self._progress, hybrid
        )
        if self.save_path:
            checkpoint.save(self.save_path, trained.hybrid, data.scaling)
        memory = np.zeros(self.comm.size, np.int64)
        self.comm.Gather(np.array([report.peak_memory()], np.int64), memory, root=0)
        content = report.record(specification, data, grid, trained.epochs, data_seconds, memory.tolist())
        phases = report.total_phases(trained.epochs, data_seconds)
        problem = None
        if self.comm.rank == 0:
            self.console.print(report.budget(phases))
            self._say(f"peak memory of a rank: {memory.max() / 2**20:,.0f} MiB")
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
        self._say(report.epoch_line(epoch, self.epochs))

    def _say(self, text: str) -> None:
        if self.comm.rank == 0:
            self.console.print(text)


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
