"""Compares DiLoCo with an allreduce in every step and with elastic averaging, on 8 emulated hosts at three rates.

    python -m examples.reproduce.torch.slow_links [--rate 10mbit ...] [--seconds 40] [--out out] [--quick]

Each way trains the same small language model for `--seconds` seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.table import Table

from collectives import files
from collectives.simulator.topology import parse_rate
from collectives.terminal import Interruptible, show_table
from examples.reproduce import lab
from examples.reproduce.results import leave, out_option

HOSTS = 8
WAYS = ("allreduce", "elastic", "DiLoCo", "DiLoCo, 8 bits")
WITH_SERVER = "elastic", "DiLoCo, 8 bits"
RATES = ("10mbit", "100mbit", "1000mbit")
EVERY, BATCH = 25, 4
LIMIT_SECONDS = 240
NAME = "reproduce-slow-links"


def per_step(way: str, nbytes: int, hosts: int, every: int) -> float:
    """Return the bytes that a host sends in a step on average, by an allreduce or by pushes to a server."""
    allreduce = 2 * (hosts - 1) / hosts * nbytes
    return {
        "allreduce": allreduce,
        "elastic": nbytes / every,
        "DiLoCo": allreduce / every,
        "DiLoCo, 8 bits": nbytes / every * (1 + 4 / 256) / 4,
    }[way]


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--rate", "rates", multiple=True, default=RATES, help="Rates of every link; each is a lab of its own.")
@click.option("--way", "ways", multiple=True, default=WAYS, type=click.Choice(WAYS), help="Ways to train.")
@click.option("--seconds", default=40.0, type=click.FloatRange(1), help="Of training, each way.")
@click.option("--quick", is_flag=True, help="2 hosts, a few steps: shows that all of it works.")
@out_option
def command(rates: tuple[str, ...], ways: tuple[str, ...], seconds: float, quick: bool, out: Path) -> None:
    """Train a language model on 8 emulated hosts that talk in every step, or rarely."""
    hosts, rates, seconds = (2, rates[:1], 1.0) if quick else (HOSTS, rates, seconds)
    rows = []
    for rate in rates:
        with lab.networks({"star": f"star:{hosts + 1}"}, parse_rate(rate)) as names:
            for way in ways:
                ranks = hosts + (way in WITH_SERVER)
                request = {"way": way, "seconds": seconds, "every": EVERY, "batch": BATCH}
                found = lab.ask(
                    names["star"], ranks, "examples.reproduce.torch.slow_links_ranks", request, limit=LIMIT_SECONDS
                )
                computed = per_step(way, found["nbytes"], hosts, EVERY)
                rows.append({"rate": rate, "way": way, "computed": computed, **found})
                click.echo(f"{rate}, {way}: {found['steps']} steps, loss {found['curve'][-1][2]:.3f}")
    table = Table(title=f"{hosts} hosts, a model of {rows[0]['nbytes'] / 1e3:.0f} kB, exchanges every {EVERY} steps")
    for column in ("rate", "way", "steps", "loss", "kB a step, sent", "as computed"):
        table.add_column(column, justify="left" if column in ("rate", "way") else "right")
    for row in rows:
        table.add_row(
            row["rate"],
            row["way"],
            str(row["steps"]),
            f"{row['curve'][-1][2]:.3f}",
            f"{row['sent'] / 1e3:.1f}",
            f"{row['computed'] / 1e3:.1f}",
        )
    show_table(table)
    leave(out, NAME, {"hosts": hosts, "every": EVERY, "batch": BATCH, "rows": rows}, draw)


def draw(report: dict[str, Any], path: Path) -> None:
    """Draw the loss against bytes sent, and against seconds at each rate."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(row["rate"] for row in report["rows"]))
    figure = Figure(figsize=(4 * (1 + len(rates)), 4))
    bytes_axes, *axes = figure.subplots(1, 1 + len(rates), sharey=True)
    for row in report["rows"]:
        color = f"C{WAYS.index(row['way'])}"
        _, seconds, losses = zip(*row["curve"])
        axes[rates.index(row["rate"])].plot(seconds, losses, color, label=row["way"])
    for way, row in {row["way"]: row for row in report["rows"]}.items():
        steps, _, losses = zip(*row["curve"][1:])
        sent = [step * row["sent"] / 1e6 for step in steps]
        bytes_axes.plot(sent, losses, f"C{WAYS.index(way)}", label=way)
    bytes_axes.set(xscale="log", xlabel="MB that a host has sent", title="Against bytes")
    bytes_axes.set(ylabel="loss, nats a letter", ylim=(None, 3))
    bytes_axes.legend(fontsize=8)
    for rate, place in zip(rates, axes):
        place.set(xlabel="seconds", title=f"{rate.removesuffix('mbit')} Mbit/s")
    figure.tight_layout()
    files.write_picture(path, figure, dpi=90)


if __name__ == "__main__":
    command()
