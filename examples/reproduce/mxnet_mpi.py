"""MXNET-MPI (Mamidala et al., 2018) on an emulated star of 14 hosts: 12 workers, 2 servers, clients of 6 workers.

    python -m examples.reproduce.mxnet_mpi --out out [--rate 100mbit] [--mxnet PYTHON] [--skip-training]

1. One synchronisation of 4 MiB: dist_sync, mpi_sync through one master a client and through all, and MXNet's own
   dist_sync where ``--mxnet`` names a Python that has mxnet 1.9.1; beside each, what the links allow (simulated).
2. Training in the paper's six modes, handwritten digits, a hidden layer wide enough that the network matters: seconds
   an epoch (figure 12), test accuracy against time (figures 11, 13, 14).
3. Both ESGD modes again with compute emulated by sleeping: the models of figures 13 and 14 compute longer than they
   talk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

from collectives.topology import parse_rate
from examples.reproduce import lab
from examples.reproduce.allreduce_ranks import processor
from examples.reproduce.mxnet_job import mxnet_seconds
from launch.lab import client
from mpips.options import Options
from mpips.predict import exchange

WORKERS, SERVERS, CLIENTS = 12, 2, 2
NBYTES = 4 << 20
PAPER_EPOCHS = 6.0  # figure 12: mpi modes take a sixth of the time of dist modes


class Way(NamedTuple):
    """A way to synchronise, and how often it is measured."""

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


class Mode(NamedTuple):
    """A mode of the paper: its example, and its clients; the paper has one master a client."""

    name: str
    script: str
    clients: int
    masters: str = "one"


MODES = tuple(
    Mode(f"{group}-{kind.upper()}", f"examples/{group}_{kind}.py", clients)
    for group, clients in (("dist", 1), ("mpi", CLIENTS))
    for kind in ("sgd", "asgd", "esgd")
)
ALL_MASTERS = Mode("mpi-SGD, all masters", "examples/mpi_sgd.py", CLIENTS, "all")


def predicted(way: Way, rate: float) -> dict[str, float]:
    """What the links allow: messages as in the store, one host each; and the fullest link's bytes over its rate."""
    options = way.options
    clients = WORKERS if way.kind.startswith("dist") else way.clients
    chunks = max(1, NBYTES // options.chunk_bytes)
    found = exchange(
        NBYTES, WORKERS, SERVERS, clients, way.masters, rate * lab.EFFICIENCY, chunks, options.chunks_in_flight
    )
    return {"predicted": found.seconds, "bound": found.bound}


def synchronise(name: str, rate: float, mxnet: str | None) -> list[dict[str, Any]]:
    """Rows of seconds for one synchronisation of NBYTES."""
    rows = []
    for way in WAYS:
        request = {"kind": way.kind, "nbytes": NBYTES, "repeats": way.repeats}
        found = lab.ask(name, WORKERS + SERVERS, "examples.reproduce.store_ranks", request, way.options.environment())
        row = {"way": way.name, "measured": median(found["seconds"]), "all": found["seconds"], "idle": found["idle"]}
        rows.append(row | predicted(way, rate))
    if mxnet:
        seconds = mxnet_seconds(name, mxnet, WORKERS, SERVERS, NBYTES, 2)
        rows.append({"way": "MXNet 1.9.1 dist_sync", "measured": median(seconds), "all": seconds, "idle": None})
        rows[-1] |= predicted(WAYS[0], rate)
    return rows


LONGER = 4  # ESGD exchanges every 64 iterations: it is given so many times the epochs, each far shorter
BATCH = 16
SAMPLE_SECONDS = 0.02  # emulated compute: an iteration then computes four times as long as a client's ring takes
COMPUTING_EPOCHS = {"dist-ESGD": 12, "mpi-ESGD": 8}


def train(
    name: str, mode: Mode, epochs: int, hidden: int, limit: float, sample_seconds: float = 0.0
) -> dict[str, Any]:
    """The curve of one mode: [(seconds, test accuracy)], an entry an epoch; idle cores, over the whole job."""
    options = Options(servers=SERVERS, workers=WORKERS, clients=mode.clients, masters=mode.masters)
    arguments = ["--lines", "1", "--epochs", str(epochs), "--hidden", str(hidden), "--batch-size", str(BATCH)]
    arguments += ["--sample-seconds", str(sample_seconds)]
    before = processor()
    argv = client.job_command(name, WORKERS + SERVERS, [sys.executable, "-m", "mpips", mode.script, *arguments])
    variables = {**os.environ, **lab.ONE_THREAD, **options.environment(), "PYTHONPATH": str(lab.ROOT)}
    done = subprocess.run(argv, cwd=lab.ROOT, env=variables, capture_output=True, text=True, timeout=limit)
    if done.returncode:
        raise SystemExit(f"{mode.name} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    after = processor()
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    curve = [(r["seconds"], r["test_accuracy"]) for r in records]
    row = {"mode": mode.name, "curve": curve, "epoch_seconds": curve[-1][0] / len(curve)}
    return row | {"idle": (after[0] - before[0]) / max(1, after[1] - before[1])}


def reached(row: dict[str, Any], target: float) -> tuple[int, float] | None:
    """(epochs, seconds) after which the test accuracy first was the target; None: never."""
    found = (number for number, (_, accuracy) in enumerate(row["curve"], 1) if accuracy >= target)
    epochs = next(found, None)
    return None if epochs is None else (epochs, row["curve"][epochs - 1][0])


def elastic(report: dict[str, Any], key: str) -> str:
    """How much sooner mpi-ESGD reaches the target than dist-ESGD, in a sentence."""
    rows = {row["mode"]: reached(row, report["target"]) for row in report[key]}
    dist, mpi = rows["dist-ESGD"], rows["mpi-ESGD"]
    if dist is None or mpi is None:
        return f"{report['target']:.0%} accuracy was not reached: give more --epochs"
    return (
        f"mpi-ESGD reaches {report['target']:.0%} {dist[1] / mpi[1]:.2f} times as soon as dist-ESGD ({mpi[1]:.2f} s "
        f"and {dist[1]:.2f} s), in {dist[0] / mpi[0]:.2f} times fewer epochs ({mpi[0]} and {dist[0]}); paper: 2 times."
    )


def reason(report: dict[str, Any]) -> str:
    """Why figure 14's order need not show where nothing is computed."""
    nbytes = 4 * report["hidden"] * (64 + 10)
    ring = 2 * (1 - CLIENTS / WORKERS) * nbytes / (report["rate"] * lab.EFFICIENCY)
    return (
        f"The client of mpi-ESGD sums {nbytes / 1e3:.0f} kB of gradients over the links in every iteration, "
        f"{ring:.3f} s; a worker of dist-ESGD talks every 64 iterations only, and computing on digits takes no time: "
        "nothing is left of its epoch. Where an iteration computes longer than it talks, epochs cost the same, and "
        "the fewer epochs of mpi-ESGD decide:"
    )


def show(report: dict[str, Any]) -> None:
    """The tables."""
    console = Console(width=120)
    links = f"links of {8e-6 * report['rate']:g} Mbit/s"
    table = Table(title=f"Synchronising 4 MiB between {WORKERS} workers and {SERVERS} servers, {links} (seconds)")
    for title in ("way", "measured", "links allow", "/ allowed", "faster than dist_sync", "idle"):
        table.add_column(title, justify="left" if title == "way" else "right")
    base = next(r for r in reversed(report["synchronisation"]) if r["way"].endswith("dist_sync"))
    for r in report["synchronisation"]:
        idle = "" if r["idle"] is None else f"{100 * r['idle']:.0f} %"
        words = (f"{r['measured']:.3f}", f"{r['predicted']:.3f}", f"{r['measured'] / r['predicted']:.2f}")
        table.add_row(r["way"], *words, f"{base['measured'] / r['measured']:.2f}", idle)
    console.print(table)
    console.print(f"compared with: {base['way']}. The paper's factor: {PAPER_EPOCHS:g} (figure 12).")
    if not report["training"]:
        return
    table = Table(title=f"Training on handwritten digits, hidden layer of {report['hidden']}, {WORKERS} workers")
    target = f"{report['target']:.2f}"
    for title in ("mode", "epochs", "seconds an epoch", "last accuracy", f"epochs to {target}", f"seconds to {target}"):
        table.add_column(title, justify="left" if title == "mode" else "right")
    table.add_column("idle", justify="right")
    computing = [r | {"mode": f"{r['mode']}, {SAMPLE_SECONDS:g} s a sample"} for r in report["computing"]]
    for r in [*report["training"], *computing]:
        found = reached(r, report["target"])
        when = ("not reached", "") if found is None else (str(found[0]), f"{found[1]:.2f}")
        words = (str(len(r["curve"])), f"{r['epoch_seconds']:.2f}", f"{r['curve'][-1][1]:.3f}", *when)
        table.add_row(r["mode"], *words, f"{100 * r['idle']:.0f} %")
    console.print(table)
    console.print("idle: of the machine's cores, the start of the processes included.")
    console.print("Nothing of the communication is hidden: push and pull block in these modes.")
    epoch = {r["mode"]: r["epoch_seconds"] for r in report["training"]}
    console.print(f"dist-SGD / mpi-SGD, seconds an epoch: {epoch['dist-SGD'] / epoch['mpi-SGD']:.2f}, with all masters "
                  f"{epoch['dist-SGD'] / epoch[ALL_MASTERS.name]:.2f}; paper: {PAPER_EPOCHS:g}.")  # fmt: skip
    for line in (elastic(report, "training"), reason(report), elastic(report, "computing")):
        console.print(line)


@click.command(context_settings={"show_default": True})
@click.option("--rate", default="100mbit", help="Of every link of the lab.")
@click.option("--mxnet", help="A Python with mxnet 1.9.1 and numpy 1.23, for MXNet's own figure in the same run.")
@click.option("--epochs", type=click.IntRange(1), default=5)
@click.option("--hidden", type=click.IntRange(1), default=2000, help="Width of the hidden layer: 300 bytes each.")
@click.option("--target", type=float, default=0.9, help="Test accuracy whose time is told.")
@click.option("--skip-training", is_flag=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("out"))
def command(
    rate: str, mxnet: str | None, epochs: int, hidden: int, target: float, skip_training: bool, out: Path
) -> None:
    """MXNET-MPI's results, measured and simulated on an emulated network."""
    speed = parse_rate(rate)
    report: dict[str, Any] = {"rate": speed, "epochs": epochs, "hidden": hidden, "target": target}
    report |= {"training": [], "computing": [], "sample_seconds": SAMPLE_SECONDS}
    with lab.networks({"star": f"star:{WORKERS + SERVERS}"}, speed) as names:
        report["synchronisation"] = synchronise(names["star"], speed, mxnet)
        for mode in () if skip_training else (*MODES, ALL_MASTERS):
            longer = LONGER if mode.name.endswith("ESGD") else 1
            report["training"].append(train(names["star"], mode, longer * epochs, hidden, limit=200))
        for mode in () if skip_training else MODES:
            if mode.name in COMPUTING_EPOCHS:
                found = train(names["star"], mode, COMPUTING_EPOCHS[mode.name], hidden, 200, SAMPLE_SECONDS)
                report["computing"].append(found)
    show(report)
    out.mkdir(parents=True, exist_ok=True)
    (out / "reproduce-mxnet-mpi.json").write_text(json.dumps(report, indent=1))
    from examples.reproduce.mxnet_picture import draw

    draw(report, out / "reproduce-mxnet-mpi.png")
    click.echo(f"{out / 'reproduce-mxnet-mpi.json'}, {out / 'reproduce-mxnet-mpi.png'}")


if __name__ == "__main__":
    command()
