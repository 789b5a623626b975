"""`mpips train`: train a multi-layer perceptron on a device mesh."""

from __future__ import annotations

import sys
import traceback
from functools import partial
from time import perf_counter
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

from collectives.machine import usable_cores
from collectives.terminal import OutFile, Picture, RankedCommand, console, describe_unwritable, leave, show_table
from mpips.mlp import checkpoint
from mpips.mlp import options as usage
from mpips.mlp import results as report
from mpips.mlp.data.loading import WAYS, Data, Opened, load_opened, open_everywhere
from mpips.mlp.data.sources import open_source
from mpips.mlp.data.text import told
from mpips.mlp.mesh import Mesh, TrainingError, agree, counted, parse
from mpips.mlp.network.layers import ACTIVATIONS, DTYPES, MODES, Specification
from mpips.mlp.network.mlp import MLP
from mpips.mlp.options import DEVICES, Finite, array_module, options_of, widths, words
from mpips.mlp.prediction import Prediction, predict_all
from mpips.mlp.servers import STORES, Servers
from mpips.mlp.training import Epoch, check_fit, train
from mpips.optimizers.elastic import INTERVAL


@click.command(cls=RankedCommand, context_settings={"show_default": True})
@click.option("--data", required=True,
              help="One of digits, airfoil, mnist, synthetic[:ROWS,FEATURES,TARGETS], a text, .npz.")
@click.option("--data-directory", default=".", help="Where the files of airfoil and mnist lie.")
@click.option("--target", default="", show_default="last", help="Target columns of a text: names or numbers.")
@click.option("--features", default="", show_default="all others", help="Feature columns of a text.")
@click.option("--header/--no-header", default=None, show_default="look", help="A text's first line holds names.")
@click.option("--classify", is_flag=True, help="The target of a file is a label: a number or a word (softmax loss).")
@click.option("--test-share", default=0.2, type=Finite(0, 1, max_open=True), help="Share of the rows kept for testing.")
@click.option("--way", default="auto", type=click.Choice(["auto", *WAYS]), help="How rows reach the ranks.")
@click.option("--hidden", default="512,512", help="Widths of the hidden layers, commas between.")
@click.option("--activation", default="relu", type=click.Choice(list(ACTIVATIONS)))
@click.option("--split", default="pairs", type=click.Choice(MODES), help="How model ranks cut layers.")
@click.option("--grid", "grid_text", default="auto", help="BATCHxMODEL ranks, for instance 4x2, or auto.")
@click.option("--explain", is_flag=True, help="Print the predicted time of every grid.")
@click.option("--epochs", default=10, type=click.IntRange(1))
@click.option("--batch", default=100, type=click.IntRange(1), help="Samples of a whole minibatch; --load: as before.")
@click.option("--seed", default=1, type=click.IntRange(0), help="Of weights and of how rows are dealt.")
@click.option("--dtype", default="float32", type=click.Choice(DTYPES), help="In mixed, float16 travels between nodes.")
@click.option("--device", default="cpu", type=click.Choice(DEVICES), help="With gpu: CuPy; the node's GPUs are dealt.")
@click.option("--optimizer", default="sgd", type=click.Choice(usage.OPTIMIZERS))
@click.option("--learning-rate", default=0.01, type=Finite(0))
@click.option("--momentum", default=0.0, type=Finite(0, 1, max_open=True), help="For sgd.")
@click.option("--overlap/--no-overlap", default=None, show_default="between nodes", help="Send beside computation.")
@click.option("--servers", default=0, type=click.IntRange(0), help="Ranks that are servers; they are the last ones.")
@click.option("--clients", default=1, type=click.IntRange(1), help="With servers: clients, each of them a --grid.")
@click.option("--averaging", default="sync", type=click.Choice(list(STORES)), help="With servers: what they do.")
@click.option("--every", default=INTERVAL, type=click.IntRange(1), help="Elastic: steps between two exchanges.")
@click.option("--alpha", default=0.5, type=Finite(0, 1, min_open=True), help="Elastic: how far they move.")
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
    usage.check_words(comm.size, **options)
    run = _Run(comm, options)
    try:
        run.run()
    except TrainingError as error:
        if comm.rank == 0:
            click.echo(f"mpips train: {error}", err=True)
        leave(1 if run.began else click.UsageError.exit_code)
    except Exception:
        if comm.size == 1:
            raise
        _abort(comm)


check = usage.check


def _abort(comm: MPI.Comm) -> None:
    """One rank's unforeseen error ends all of them: the others would wait for ever."""
    traceback.print_exc()
    sys.stderr.flush()
    comm.Abort(1)


class _Run:
    """One call of the command, whose options have been checked."""

    def __init__(self, comm: MPI.Intracomm, options: dict[str, Any]) -> None:
        self.comm: MPI.Comm = comm
        self.console, self.options = console(), options_of(options)
        self.optimizer = usage.optimizer_of(self.options)
        self.last_epoch = self.options.epochs
        self.began = False
        """Whether steps have been taken: until then a training is refused."""
        self.xp: Any = np
        o = self.options
        self.servers = Servers(o.servers, o.clients, o.averaging, o.every, o.alpha, comm) if o.servers else None

    def run(self) -> None:
        with threadpool_limits(self.options.threads or _share_of_cores(self.comm), user_api="blas"):
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
        agree(self.comm, _unwritable(o) if self.comm.rank == 0 else None)
        self.xp = array_module(o.device, self.comm)
        if o.load_path and (rule := checkpoint.rule(o.load_path, self.comm)):
            usage.deal_by(rule, o)
        start = perf_counter()
        opened = open_everywhere(
            partial(
                open_source, o.data, words(o.target), words(o.features), o.data_directory, o.classify, o.header
            ), self.comm, o.way, checkpoint.labels(o.load_path, self.comm) if o.load_path else None,
        )  # fmt: skip
        opening = perf_counter() - start
        specification = self._specification(opened)
        agree(self.comm, self._too_large(specification, opened, mesh))
        if mesh is None:
            mesh = self._mesh(specification, opened.shape.rows - int(opened.shape.rows * o.test_share))
        start = perf_counter()
        scaling = checkpoint.scaling(o.load_path, mesh.comm) if o.load_path else None
        data = load_opened(opened, mesh, o.batch, specification.dtype, o.seed, o.test_share, scaling=scaling)
        if o.explain:
            self._say(report.explain_way(data))
        self._say(f"{o.data}: {counted(opened.shape.rows, 'row')}; {opened.columns}; data by {data.way}")
        if said := told(opened.labels):
            self._say(said)
        self._train(specification, data, mesh, opening + perf_counter() - start)

    def _specification(self, opened: Opened) -> Specification:
        """The network: the checkpoint's, or the one that fits data and options."""
        o, shape = self.options, opened.shape
        if o.load_path:
            return checkpoint.specification(o.load_path, self.comm)
        loss = "softmax" if shape.classes >= 0 else "l2"
        return Specification((shape.features, *widths(o.hidden), shape.outputs), o.activation, loss, o.dtype, o.seed)

    def _too_large(self, specification: Specification, opened: Opened, mesh: Mesh | None) -> str | None:
        o = self.options
        if mesh is not None:
            batch, model = mesh.batch, mesh.model
        else:  # where a mesh is predicted, every rank holds the whole network for a while
            batch, model = (self.comm.size, 1) if o.grid_text == "auto" else parse(o.grid_text)
            model = 1 if o.explain else model
        ranks = _ranks_of_node(self.comm)
        return usage.too_large(specification, opened.shape, batch, model, o.split, ranks, self.xp is np)

    def _mesh(self, specification: Specification, train_rows: int) -> Mesh:
        o = self.options
        shape = None if o.grid_text == "auto" else parse(o.grid_text)
        predictions: list[Prediction] = []
        if o.explain or shape is None:
            predictions = predict_all(specification, o.batch, self.comm, self.optimizer, o.split)
            if o.explain and self.comm.rank == 0:
                show_table(report.explain(predictions, -(-train_rows // o.batch)), self.console)
        return Mesh(*(shape or (predictions[0].batch, predictions[0].model)), self.comm)

    def _train(self, specification: Specification, data: Data, mesh: Mesh, data_seconds: float) -> None:
        o, worker = self.options, None
        check_fit(specification, data, mesh)
        if o.load_path:
            worker = checkpoint.load_checkpoint(
                o.load_path, mesh, o.split, self.xp, overlap=o.overlap, servers=self.servers
            )
            self.last_epoch += worker.updates // len(data.deal.samples)
        self._say(
            f"{'-'.join(str(size) for size in specification.sizes)}, {counted(data.train_rows, 'row')}, "
            f"batch {o.batch}, grid {mesh} (batch x model), {specification.dtype}"
        )
        self.began = True
        trained = train(
            MLP(*specification, xp=self.xp), data, mesh, o.epochs, None if worker else self.optimizer, o.split,
            self._progress, worker, overlap=o.overlap, servers=self.servers,
        )  # fmt: skip
        memory = np.zeros(self.comm.size, np.int64)
        self.comm.Gather(np.array([report.peak_memory()], np.int64), memory, root=0)
        content = report.record(
            trained.worker, data, trained.epochs, data_seconds, memory.tolist(), o.overlap,
            None if self.servers is None else self.servers.options,
        )
        phases = report.total_phases(trained.epochs, data_seconds)
        problem = None
        if self.comm.rank == 0:
            show_table(report.budget(phases, report.total_hidden(trained.epochs)), self.console)
            peaks = ", ".join(f"{peak / 2**20:,.0f}" for peak in memory)
            mean = report.mean_seconds(trained.epochs)
            self._say(f"mean of an epoch: {mean:.2f} s; peak memory by rank, MiB: {peaks}")
            problem = self._write(content, trained.epochs, phases, f"grid {mesh}")
        if o.save_path:  # neither the table nor the checkpoint is lost where another file cannot be written
            checkpoint.save_checkpoint(str(o.save_path), trained.worker, data)
        agree(self.comm, problem)

    def _write(self, content: dict, epochs: list[Epoch], phases: dict[str, float], title: str) -> str | None:
        try:
            if self.options.json_path:
                report.write_json(self.options.json_path, content)
            if self.options.plot_path:
                report.picture(self.options.plot_path, epochs, phases, title)
        except click.ClickException as error:
            return error.message
        except (ImportError, ValueError) as error:
            return f"the results cannot be written: {error}"
        return None

    def _progress(self, epoch: Epoch) -> None:
        self._say(report.epoch_line(epoch, self.last_epoch))

    def _say(self, text: str) -> None:
        if self.comm.rank == 0:
            self.console.print(text, markup=False)


def _unwritable(options: Any) -> str | None:
    """Why one of the files to come cannot be written; asked before training, of the rank that will write."""
    for name in ("save", "json", "plot"):
        path = getattr(options, f"{name}_path")
        if path and (reason := describe_unwritable(path)):
            return f"--{name} {path} {reason}"
    return None


def _share_of_cores(comm: MPI.Comm) -> int:
    return max(1, usable_cores() // _ranks_of_node(comm))


def _ranks_of_node(comm: MPI.Comm) -> int:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks: int = node.size
    node.Free()
    return ranks


if __name__ == "__main__":
    command()
