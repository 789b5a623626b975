"""`mpips train`: train a multi-layer perceptron on a device mesh, and report losses, times and memory."""

from __future__ import annotations

import json
import resource
import sys
import traceback
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from types import ModuleType, SimpleNamespace
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table
from threadpoolctl import threadpool_limits

from mpips import optimizers
from mpips.collectives import files
from mpips.collectives.machine import usable_cores
from mpips.collectives.terminal import (
    OutFile,
    Picture,
    RankedCommand,
    console,
    describe_unwritable,
    leave,
    show_table,
    write_text,
    writing,
)
from mpips.mlp import checkpoint, train_options
from mpips.mlp.clock import PHASES
from mpips.mlp.data.base import name_classes
from mpips.mlp.data.loading import WAYS, Data, load_opened, open_everywhere
from mpips.mlp.mesh import Mesh, TrainingError, agree, counted, parse
from mpips.mlp.network import ACTIVATIONS, DTYPES, MODES, Specification
from mpips.mlp.perceptron import MLP
from mpips.mlp.prediction import MeshPrediction, predict_all
from mpips.mlp.servers import STORES, Servers
from mpips.mlp.train_options import FiniteRange
from mpips.mlp.training import EpochResult, Trained, check_fit, hidden_of, train
from mpips.optimizers.elastic import INTERVAL

# phase -> the name that the table and the picture show
MEANINGS = {
    "compute": "computation and updates",
    "forward": "forward gathers and sums",
    "backward": "backward reductions",
    "data": "data",
    "evaluate": "evaluation",
}


@click.command(cls=RankedCommand, context_settings={"show_default": True})
@click.option(
    "--data", required=True, help="digits, airfoil, mnist, synthetic[:ROWS,FEATURES,TARGETS], or a file: text or .npz."
)
@click.option("--data-directory", default=".", help="Where the files of airfoil and mnist lie.")
@click.option("--target", default="", show_default="last", help="Target columns of a text: names or numbers.")
@click.option("--features", default="", show_default="all others", help="Feature columns of a text.")
@click.option("--header/--no-header", default=None, show_default="look", help="The first line of a text holds names.")
@click.option("--classify", is_flag=True, help="The target of a file is a label: a number or a word (softmax loss).")
@click.option(
    "--test-share", default=0.2, type=FiniteRange(0, 1, max_open=True), help="Share of the rows kept for testing."
)
@click.option("--way", default="auto", type=click.Choice(["auto", *WAYS]), help="How rows reach the ranks.")
@click.option("--hidden", default="512,512", help="Widths of the hidden layers, commas between.")
@click.option("--activation", default="relu", type=click.Choice(list(ACTIVATIONS)))
@click.option("--split", default="pairs", type=click.Choice(MODES), help="How model ranks cut layers.")
@click.option("--grid", "grid_text", default="auto", help="BATCHxMODEL ranks, for instance 4x2, or auto.")
@click.option("--explain", is_flag=True, help="Print the predicted time of every grid.")
@click.option("--epochs", default=10, type=click.IntRange(1))
@click.option(
    "--batch", default=100, type=click.IntRange(1), help="Samples of a whole minibatch. With --load: as before."
)
@click.option("--seed", default=1, type=click.IntRange(0), help="Determines the first weights and how rows are dealt.")
@click.option("--dtype", default="float32", type=click.Choice(DTYPES), help="mixed: float16 travels between nodes.")
@click.option(
    "--device",
    default="cpu",
    type=click.Choice(train_options.DEVICES),
    help="gpu: compute by CuPy; the ranks of a node share its GPUs evenly.",
)
@click.option("--optimizer", default="sgd", type=click.Choice(optimizers.of_gradients()))
@click.option("--learning-rate", default=0.01, type=FiniteRange(0))
@click.option("--momentum", default=0.0, type=FiniteRange(0, 1, max_open=True), help="For sgd.")
@click.option(
    "--overlap/--no-overlap", default=None, show_default="between nodes", help="Send messages during computation."
)
@click.option("--servers", default=0, type=click.IntRange(0), help="Ranks that are servers; they are the last ones.")
@click.option("--clients", default=1, type=click.IntRange(1), help="With servers: number of clients; each is a --grid.")
@click.option(
    "--averaging", default="sync", type=click.Choice(list(STORES)), help="With servers: how they update weights."
)
@click.option("--every", default=INTERVAL, type=click.IntRange(1), help="Elastic: steps between two exchanges.")
@click.option(
    "--alpha",
    default=0.5,
    type=FiniteRange(0, 1, min_open=True),
    help="Elastic: share of their distance by which they move.",
)
@click.option("--threads", default=0, type=click.IntRange(0), help="BLAS threads a rank; 0: cores / ranks of the node.")
@click.option("--save", "save_path", type=OutFile(), help="Write a checkpoint (safetensors) after the last epoch.")
@click.option("--load", "load_path", help="Go on from a checkpoint of any grid, with its network and optimizer.")
@click.option("--json", "json_path", type=OutFile(), help="Write epochs, phases, memory as JSON.")
@click.option("--plot", "plot_path", type=Picture(), help="Write a picture of losses and time budget.")
def command(**given: Any) -> None:
    """Train a multi-layer perceptron, batch, model or hybrid parallel over all ranks of the job.

    Start the ranks with `mpips train ... --ranks P` or with mpirun.
    """
    comm = MPI.COMM_WORLD
    train_options.check_texts(comm.size, **given)
    run = _Run(comm, SimpleNamespace(**given))
    try:
        run.run()
    except TrainingError as error:
        if comm.rank == 0:
            click.echo(f"mpips train: {error}", err=True)
        leave(1 if run.began else click.UsageError.exit_code)
    except Exception:
        if comm.size == 1:
            raise
        # An unforeseen error on one rank must end all ranks, because the other ranks would wait for this rank for ever.
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)


check = train_options.check


class _Run:
    """A run of the command. Its options have been checked."""

    def __init__(self, comm: MPI.Intracomm, o: SimpleNamespace) -> None:
        self.comm: MPI.Comm = comm
        self.console = console()
        self.options = o
        self.optimizer = train_options.optimizer_of(o)
        # True once training begins. An earlier error is a usage error, and the command exits with code 2.
        self.began = False
        self.xp: ModuleType = np
        self.servers = Servers(o.servers, o.clients, o.averaging, o.every, o.alpha, comm) if o.servers else None

    def run(self) -> None:
        """On a server, serve until training ends. On all other ranks, train."""
        threads = self.options.threads or max(1, usable_cores() // train_options.place_on_node(self.comm)[1])
        with threadpool_limits(threads, user_api="blas"):
            if self.servers is None:
                self._prepare_and_train(None)
                return
            mesh = self.servers.join(*parse(self.options.grid_text))
            self.comm = mesh.comm
            try:
                self._prepare_and_train(mesh)
            except TrainingError as error:
                self.servers.give_up(str(error))
                raise
            self.servers.close()

    def _prepare_and_train(self, mesh: Mesh | None) -> None:
        o = self.options
        agree(self.comm, self._unwritable() if self.comm.rank == 0 else None)
        self.xp = train_options.array_module(o.device, self.comm)
        saved = checkpoint.read_header(o.load_path, self.comm) if o.load_path else None
        labels = None
        if saved is not None:
            labels = saved.labels or tuple(str(number) for number in range(saved.specification.sizes[-1]))
            if saved.rule:
                train_options.take_deal_rule(saved.rule, o)
        start = perf_counter()
        opened = open_everywhere(partial(train_options.open_data, o), self.comm, o.way, labels)
        seconds = perf_counter() - start
        if saved is not None:
            specification = saved.specification
        else:
            loss, hidden = "l2" if opened.classes is None else "softmax", train_options.widths(o.hidden)
            sizes = (opened.features, *hidden, opened.outputs)
            specification = Specification(sizes, o.activation, loss, o.dtype, o.seed)
        agree(self.comm, train_options.too_large(o, specification, opened, self.comm, mesh))
        if mesh is None:
            mesh = self._choose_mesh(specification, opened.rows - int(opened.rows * o.test_share))
        start = perf_counter()
        scaling = checkpoint.read_scaling(o.load_path, mesh.comm) if o.load_path else None
        data = load_opened(opened, mesh, o.batch, specification.dtype, o.seed, o.test_share, scaling)
        if o.explain:
            why = "every rank reads one part of the rows" if data.way == "read" else "rank 0 sends them by scatter"
            self._print(f"data: {why}")
        self._print(f"{o.data}: {counted(opened.rows, 'row')}; {opened.columns}; data by {data.way}")
        if named := name_classes(opened.labels):
            self._print(named)
        self._train(specification, data, mesh, seconds + perf_counter() - start)

    def _choose_mesh(self, specification: Specification, train_rows: int) -> Mesh:
        o = self.options
        shape = None if o.grid_text == "auto" else parse(o.grid_text)
        predictions: list[MeshPrediction] = []
        if o.explain or shape is None:
            predictions = predict_all(specification, o.batch, self.comm, self.optimizer, o.split)
            if o.explain and self.comm.rank == 0:
                show_table(_prediction_table(predictions, -(-train_rows // o.batch)), self.console)
        return Mesh(*(shape or (predictions[0].batch, predictions[0].model)), self.comm)

    def _train(self, specification: Specification, data: Data, mesh: Mesh, data_seconds: float) -> None:
        o, worker, last = self.options, None, self.options.epochs
        check_fit(specification, data, mesh)
        grid = f"grid {mesh}"
        # `mesh` has the workers of all clients; --grid is the grid of one client.
        if self.servers and self.servers.clients > 1:
            grid = f"{self.servers.clients} clients of grid {mesh.batch // self.servers.clients}x{mesh.model}"
        if o.load_path:
            worker = checkpoint.load_checkpoint(
                o.load_path, mesh, o.split, self.xp, overlap=o.overlap, servers=self.servers
            )
            last += worker.updates // len(data.deal.samples)
        self._print(
            f"{'-'.join(str(size) for size in specification.sizes)}, {counted(data.train_rows, 'row')}, "
            f"batch {o.batch}, {grid} (batch x model), {specification.dtype}"
        )
        self.began = True
        trained = train(
            MLP(*specification, xp=self.xp),
            data,
            mesh,
            o.epochs,
            None if worker else self.optimizer,
            o.split,
            partial(self._print_epoch, last),
            worker,
            overlap=o.overlap,
            servers=self.servers,
        )
        memory = self.comm.gather(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        problem = None if memory is None else self._report(trained, data, data_seconds, memory)
        # Save even if _report() could not write its files, and raise that error afterwards.
        if o.save_path:
            checkpoint.save_checkpoint(str(o.save_path), trained.worker, data)
        agree(self.comm, problem)

    def _print_epoch(self, last: int, epoch: EpochResult) -> None:
        """Print a line of progress. `last` is the number of the last epoch."""
        parts = [f"epoch {epoch.epoch:>{len(str(last))}}/{last}", f"train {epoch.train_loss:.6f}"]
        if epoch.test_loss is not None:
            parts.append(f"test {epoch.test_loss:.6f}")
        if epoch.test_accuracy is not None:
            parts.append(f"accuracy {100 * epoch.test_accuracy:.2f} %")
        self._print("  ".join([*parts, f"{epoch.seconds:.2f} s"]))

    def _report(self, trained: Trained, data: Data, data_seconds: float, memory: list[int]) -> str | None:
        """Print the time budget, and write the files of --json and --plot.

        Return an error message if a file cannot be written, else None.

        Args:
            data_seconds: Seconds spent on reading and distributing rows before the first epoch.
            memory: Peak memory of each rank, in bytes.
        """
        epochs, hidden = trained.epochs, hidden_of(trained.epochs)
        phases = {phase: sum(epoch.phases[phase] for epoch in epochs) for phase in PHASES}
        phases["data"] += data_seconds
        caption = "nothing was sent" if hidden is None else f"{hidden:.0%} of the time that messages took is hidden"
        table = Table(title="Time budget, mean over ranks", caption=caption)
        table.add_column("phase")
        for column in ("s", "%"):
            table.add_column(column, justify="right")
        for phase, seconds in phases.items():
            table.add_row(MEANINGS[phase], f"{seconds:.3f}", f"{100 * seconds / (sum(phases.values()) or 1.0):.1f}")
        show_table(table, self.console)
        mean = sum(epoch.seconds for epoch in epochs) / len(epochs)
        peaks = ", ".join(f"{peak / 2**20:,.0f}" for peak in memory)
        self._print(f"mean of an epoch: {mean:.2f} s; peak memory by rank, MiB: {peaks}")
        try:
            if self.options.json_path:
                content = self._record(trained, data) | {"phases": phases, "hidden": hidden, "memory_bytes": memory}
                write_text(self.options.json_path, json.dumps(content, indent=1) + "\n")
            if self.options.plot_path:
                _draw(self.options.plot_path, epochs, phases, f"grid {data.mesh}")
        except click.ClickException as error:
            return error.message
        except (ImportError, ValueError) as error:
            return f"the results cannot be written: {error}"
        return None

    def _record(self, trained: Trained, data: Data) -> dict[str, Any]:
        """Return the content of the --json file, except the totals over epochs.

        `overlap` is None unless the user gave --overlap or --no-overlap. `averaging` is None without servers. `every`
        and `alpha` are None without elastic servers.
        """
        worker, servers = trained.worker, self.servers
        mesh, specification = worker.mesh, worker.network.specification
        elastic = servers if servers is not None and servers.kind == "elastic" else None
        return {
            "grid": {"batch": mesh.batch, "model": mesh.model},
            "ranks": mesh.comm.size,
            "servers": servers.count if servers else 0,
            "clients": servers.clients if servers else 1,
            "averaging": servers.kind if servers else None,
            "every": elastic.every if elastic else None,
            "alpha": elastic.alpha if elastic else None,
            "network": {**specification._asdict(), "sizes": list(specification.sizes)},
            "split": worker.network.mode,
            "overlap": self.options.overlap,
            "optimizer": {"name": type(worker.optimizer).__name__.lower(), **asdict(worker.optimizer)},
            "rows": {"train": data.train_rows, "test": data.test_rows},
            "labels": list(data.labels),
            "batch": data.batch,
            "distribution": {"way": data.way},
            "epochs": [epoch._asdict() for epoch in trained.epochs],
        }

    def _unwritable(self) -> str | None:
        """Return an error message if a file of --save, --json or --plot could not be written, else None."""
        for name in ("save", "json", "plot"):
            path = getattr(self.options, f"{name}_path")
            if path and (reason := describe_unwritable(path)):
                return f"--{name} {path} {reason}"
        return None

    def _print(self, text: str) -> None:
        if self.comm.rank == 0:
            self.console.print(text, markup=False)


def _prediction_table(predictions: list[MeshPrediction], steps: int) -> Table:
    """Build the table of predictions. `steps` is the number of minibatches of an epoch."""
    table = Table(title="Predicted time of a step, ms")
    for column in (
        "grid",
        "compute",
        "gradient sums",
        "model exchange",
        "hidden",
        "step",
        "epoch, s",
        "alpha, us",
        "1/beta, GB/s",
    ):
        table.add_column(column, justify="right")
    for each in predictions:
        links = [link for ranks, link in ((each.batch, each.batch_link), (each.model, each.model_link)) if ranks > 1]
        parts = (each.compute, each.reduction, each.exchange, each.hidden, each.seconds)
        table.add_row(
            f"{each.batch}x{each.model}",
            *(f"{1e3 * seconds:.3f}" for seconds in parts),
            f"{steps * each.seconds:.2f}",
            ", ".join(f"{1e6 * link.alpha:.1f}" for link in links),
            ", ".join(f"{1e-9 / link.beta:.3g}" if link.beta else "-" for link in links),
        )
    return table


def _draw(path: Path, epochs: list[EpochResult], phases: dict[str, float], title: str) -> None:
    """Draw the loss curves and the time budget, side by side. Needs matplotlib (extra `plot`).

    Raise click.ClickException if `path` cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    curves.plot(*zip(*((epoch.epoch, epoch.train_loss) for epoch in epochs)), marker=".", label="train")
    tested = [(epoch.epoch, epoch.test_loss) for epoch in epochs if epoch.test_loss is not None]
    if tested:
        curves.plot(*zip(*tested), marker=".", label="test")
    curves.set(xlabel="epoch", ylabel="loss", title=title)
    curves.legend()
    bars.barh([MEANINGS[phase] for phase in phases], list(phases.values()))
    bars.invert_yaxis()
    bars.set(xlabel="s, mean over ranks", title="time budget")
    with writing(path):
        files.write_picture(path, figure, dpi=120)


if __name__ == "__main__":
    command()
