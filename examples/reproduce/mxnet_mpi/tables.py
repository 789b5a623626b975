"""The tables of `examples.reproduce.mxnet_mpi`: the paper's, predicted and measured values side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from examples.reproduce import lab
from examples.reproduce.mxnet_mpi.training import CLIENTS, COMPUTING, SAMPLE_SECONDS, SERVERS, WORKERS, reached

# figure 12: dist modes take this many times as long as mpi modes
PAPER_EPOCHS = 6.0


def show(report: dict[str, Any]) -> None:
    """Print all tables and the notes between them."""
    console = Console(width=132)
    console.print(_synchronisation(report))
    console.print(f"compared with: {_base(report)['way']}. The paper's factor: {PAPER_EPOCHS:g} (figure 12).")
    if not report["training"]:
        return
    console.print(_training(report))
    console.print(
        f"predicted: an epoch's compute, measured without messages ({report['compute']:.2f} s, and what is "
        "slept), and its exchanges as the links allow, push and pull overlapped, and in turn, as the modes "
        "call them: where chunks are answered early a mode lies between. Seconds are worker 0's, which may "
        "be done before the last: ESGD can be some percent below. idle: of the machine's cores, the start "
        "of the processes included."
    )
    console.print(_claims(report))
    console.print(
        'The paper draws figures 11 to 14: "> 1" is what its text says of who is before whom, 1 that two '
        "epochs are the same, 6 is read from figure 12. On ImageNet mpi-ESGD reaches 0.67."
    )
    if any(row["mode"].endswith(COMPUTING) for row in report["training"]):
        for line in (elastic(report, ""), reason(report), elastic(report, COMPUTING)):
            console.print(line)


def _base(report: dict[str, Any]) -> dict[str, Any]:
    """Return the row with which the others are compared: MXNet's if it was measured, else our dist_sync."""
    return next(r for r in reversed(report["synchronisation"]) if r["way"].endswith("dist_sync"))


def _synchronisation(report: dict[str, Any]) -> Table:
    links = f"links of {8e-6 * report['rate']:g} Mbit/s"
    table = Table(title=f"Synchronising 4 MiB between {WORKERS} workers and {SERVERS} servers, {links} (seconds)")
    for title in ("way", "measured", "links allow", "/ allowed", "faster than dist_sync", "idle"):
        table.add_column(title, justify="left" if title == "way" else "right")
    base = _base(report)["measured"]
    for r in report["synchronisation"]:
        words = (f"{r['measured']:.3f}", f"{r['predicted']:.3f}", f"{r['measured'] / r['predicted']:.2f}")
        table.add_row(r["way"], *words, f"{base / r['measured']:.2f}", f"{100 * r['idle']:.0f} %")
    return table


def _training(report: dict[str, Any]) -> Table:
    title = f"Training on handwritten digits, hidden layer of {report['hidden']}, {WORKERS} workers"
    target = f"{report['target']:.2f}"
    table = Table(title=f"{title}; computing: {SAMPLE_SECONDS:g} s a sample are slept")
    table.add_column("mode", no_wrap=True)
    for column in (
        "epochs",
        "epoch, s, predicted: overlapped",
        "in turn",
        "measured",
        "last accuracy",
        f"epochs to {target}",
        f"seconds to {target}",
        "idle",
    ):
        table.add_column(column, justify="right")
    for r in report["training"]:
        found = reached(r, report["target"])
        when = ("not reached", "") if found is None else (str(found[0]), f"{found[1]:.2f}")
        epoch = (*r["predicted"], r["epoch_seconds"])
        words = (str(len(r["curve"])), *(f"{value:.2f}" for value in epoch), f"{r['curve'][-1][1]:.3f}", *when)
        table.add_row(r["mode"], *words, f"{100 * r['idle']:.0f} %")
    return table


def _claims(report: dict[str, Any]) -> Table:
    table = Table(title="Figures 11 to 14: one mode's time over another's")
    for column in ("figure", "time", "mode", "over"):
        table.add_column(column)
    for column in ("paper", "predicted", "measured"):
        table.add_column(column, justify="right")
    for r in report["claims"]:
        what = "of an epoch" if r["what"] == "epoch" else f"to {report['target']:.2f} accuracy"
        values = ["" if value is None else f"{value:.2f}" for value in (r["predicted"], r["measured"])]
        table.add_row(str(r["figure"]), what, r["of"], r["over"], r["paper"], *values)
    return table


def elastic(report: dict[str, Any], ending: str) -> str:
    """Return a sentence: how much sooner mpi-ESGD reaches the target than dist-ESGD.

    `ending` is "", or COMPUTING for the modes with emulated compute.
    """
    rows = {row["mode"]: reached(row, report["target"]) for row in report["training"]}
    dist, mpi = rows[f"dist-ESGD{ending}"], rows[f"mpi-ESGD{ending}"]
    if dist is None or mpi is None:
        return f"{report['target']:.0%} accuracy was not reached: give more --epochs"
    return (
        f"mpi-ESGD{ending} reaches {report['target']:.0%} {dist[1] / mpi[1]:.2f} times as soon as dist-ESGD{ending} "
        f"({mpi[1]:.2f} s and {dist[1]:.2f} s), in {dist[0] / mpi[0]:.2f} times fewer epochs ({mpi[0]} and {dist[0]})."
    )


def reason(report: dict[str, Any]) -> str:
    """Return a sentence: why figure 14's order need not show if an iteration computes almost nothing."""
    nbytes = 4 * report["hidden"] * (64 + 10)
    ring = 2 * (1 - CLIENTS / WORKERS) * nbytes / (report["rate"] * lab.EFFICIENCY)
    return (
        f"The client of mpi-ESGD sums {nbytes / 1e3:.0f} kB of gradients over the links in every iteration, "
        f"{ring:.3f} s; a worker of dist-ESGD talks every 64 iterations only, and computing on digits takes no time: "
        "nothing is left of its epoch. Where an iteration computes longer than it talks, epochs cost the same, and "
        "the fewer epochs of mpi-ESGD decide:"
    )
