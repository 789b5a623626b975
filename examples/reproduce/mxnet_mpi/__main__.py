"""Runs MXNET-MPI (Mamidala et al., 2018) on an emulated star of 14 hosts: 12 workers in 2 clients, and 2 servers.

    python -m examples.reproduce.mxnet_mpi --out out [--rate 100mbit] [--mxnet PYTHON] [--skip-training] [--quick]

1. One synchronisation of 4 MiB by dist_sync, by mpi_sync with one master in each client, and with all workers as
   masters. With ``--mxnet``, a Python that has mxnet 1.9.1, also by MXNet's own dist_sync. Beside each is the time that
   the links allow (simulated).
2. Training on handwritten digits in the paper's six modes: the seconds of an epoch (figure 12), and test accuracy
   against time (figures 11, 13, 14). The hidden layer is so wide that the speed of the network matters.
3. Both ESGD modes again, with compute emulated by sleeping, because the models of figures 13 and 14 compute longer than
   they communicate.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from collectives.simulator.topology import parse_rate
from collectives.terminal import Interruptible
from examples.reproduce import lab
from examples.reproduce.interpreter import Interpreter
from examples.reproduce.mxnet_mpi import training
from examples.reproduce.mxnet_mpi.mxnet import synchronised
from examples.reproduce.mxnet_mpi.picture import draw
from examples.reproduce.mxnet_mpi.predicted import exchange
from examples.reproduce.mxnet_mpi.tables import show
from examples.reproduce.mxnet_mpi.training import ALL_MASTERS, BATCH, CLIENTS, MODES, SAMPLE_SECONDS, SERVERS, WORKERS
from examples.reproduce.results import leave, out_option
from mpips.store.options import Options

NBYTES = 4 << 20
WITH_MXNET = Interpreter("install them there: pip install mxnet==1.9.1 numpy==1.23.5", "mxnet", "numpy")


class Way(NamedTuple):
    """A way to synchronise. `repeats` is the number of times that it is measured."""

    name: str
    kind: str
    clients: int
    masters: str
    repeats: int

    @property
    def options(self) -> Options:
        return Options(servers=SERVERS, workers=WORKERS, clients=self.clients, masters=self.masters)


WAYS = (
    Way("dist_sync", "dist_sync", 1, "one", 2),
    Way('mpi_sync, masters="one"', "mpi_sync", CLIENTS, "one", 3),
    Way('mpi_sync, masters="all"', "mpi_sync", CLIENTS, "all", 5),
)


def predicted(way: Way, rate: float) -> dict[str, float]:
    """Simulate the messages of the store. Return the seconds that the links allow, and the fullest link's alone."""
    options = way.options
    clients = WORKERS if way.kind.startswith("dist") else way.clients
    chunks = max(1, NBYTES // options.chunk_bytes)
    found = exchange(
        NBYTES, WORKERS, SERVERS, clients, way.masters, rate * lab.EFFICIENCY, chunks, options.chunks_in_flight
    )
    return {"predicted": found.seconds, "bound": found.bound}


def synchronise(name: str, rate: float, mxnet: str | None, quick: bool) -> list[dict[str, Any]]:
    """Measure a synchronisation of NBYTES in each way, and return the rows. `quick`: measure each once."""
    rows = []
    for way in WAYS:
        request = {"kind": way.kind, "nbytes": NBYTES, "repeats": 1 if quick else way.repeats}
        program = "examples.reproduce.mxnet_mpi.store_ranks"
        found = lab.ask(name, WORKERS + SERVERS, program, request, way.options.environment())
        row = {"way": way.name, "measured": median(found["seconds"]), "all": found["seconds"], "idle": found["idle"]}
        rows.append(row | predicted(way, rate))
    if mxnet:
        found = synchronised(name, mxnet, WORKERS, SERVERS, NBYTES, 2)
        row = {"way": "MXNet 1.9.1 dist_sync", "measured": median(found["seconds"]), "all": found["seconds"]}
        rows.append(row | {"idle": found["idle"]} | predicted(WAYS[0], rate))
    return rows


# ESGD exchanges only every 64 iterations. Its epochs are far shorter, so it runs this many times as many.
LONGER = 4
COMPUTING_EPOCHS = {"dist-ESGD": 12, "mpi-ESGD": 8}
QUICK_MODES = ("dist-SGD", "mpi-SGD")
QUICK_HIDDEN = 64


def trained(name: str, report: dict[str, Any], quick: bool) -> list[dict[str, Any]]:
    """Train in every mode, then in the ESGD modes with emulated compute. Return rows with curves and predictions."""
    epochs, hidden, rate = report["epochs"], report["hidden"], report["rate"] * lab.EFFICIENCY
    jobs = [(mode, (LONGER if "ESGD" in mode.name else 1) * epochs, 0.0) for mode in (*MODES, ALL_MASTERS)]
    jobs += [(mode, COMPUTING_EPOCHS[mode.name], SAMPLE_SECONDS) for mode in MODES if mode.name in COMPUTING_EPOCHS]
    if quick:
        jobs = [job for job in jobs if job[0].name in QUICK_MODES]
    rows = []
    for mode, count, slept in jobs:
        compute = report["compute"] + training.ITERATIONS * BATCH * slept
        row = training.train(name, mode, count, hidden, 200, slept)
        rows.append(row | {"predicted": training.predicted(mode, count, hidden, rate, compute)})
    return rows


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--rate", default="100mbit", help="Of every link of the lab.")
@click.option("--mxnet", type=WITH_MXNET, help="A Python with mxnet 1.9.1, for MXNet's own figure in the same run.")
@click.option("--epochs", type=click.IntRange(1), default=5)
@click.option("--hidden", type=click.IntRange(1), default=2000, help="Width of the hidden layer: 300 bytes each.")
@click.option("--target", type=float, default=0.9, help="Test accuracy whose time is told.")
@click.option("--skip-training", is_flag=True)
@click.option("--quick", is_flag=True, help="Each way once, and one epoch of two modes: shows that all of it works.")
@out_option
def command(
    rate: str, mxnet: str | None, epochs: int, hidden: int, target: float, skip_training: bool, quick: bool, out: Path
) -> None:
    """MXNET-MPI's results, measured and simulated on an emulated network."""
    speed = parse_rate(rate)
    if quick:
        epochs, hidden = 1, QUICK_HIDDEN
    report: dict[str, Any] = {"rate": speed, "epochs": epochs, "hidden": hidden, "target": target}
    report |= {"training": [], "claims": [], "sample_seconds": SAMPLE_SECONDS}
    with lab.networks({"star": f"star:{WORKERS + SERVERS}"}, speed) as names:
        report["synchronisation"] = synchronise(names["star"], speed, mxnet, quick)
        if not skip_training:
            report["compute"] = training.computing(names["star"], hidden)
            report["training"] = trained(names["star"], report, quick)
            report["claims"] = training.claims(report["training"], target)
    show(report)
    leave(out, "reproduce-mxnet-mpi", report, draw)


if __name__ == "__main__":
    command()
