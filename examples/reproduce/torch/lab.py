"""Compares DataParallel's buckets with DistributedDataParallel's 25 MB and with one bucket, on 8 emulated hosts.

    python -m examples.reproduce.torch.lab [--rate 100mbit] [--json FILE] [--quick]

For each choice of buckets, the time of a step is predicted from a step without exchange and the cost of an allreduce.
Then the steps are measured in turns.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from collectives.simulator.topology import parse_rate
from collectives.terminal import Interruptible, OutFile, show_table, write_json
from examples.reproduce import lab

HOSTS = 8
WIDTHS = [784, 1200, 1200, 1200, 1200, 1200, 10]
LIMIT_SECONDS = 540
QUICK_HOSTS, QUICK_WIDTHS = 2, [64, 128, 10]


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--rate", default="100mbit", help="Rate of every link.")
@click.option("--batch", default=512, type=click.IntRange(1), help="Samples on each host.")
@click.option("--steps", default=5, type=click.IntRange(1), help="Of each strategy.")
@click.option("--quick", is_flag=True, help="2 hosts, a small network, one step: shows that all of it works.")
@click.option("--json", "json_path", type=OutFile())
def command(rate: str, batch: int, steps: int, quick: bool, json_path: Path | None) -> None:
    """Train an MLP of PyTorch on 8 emulated hosts, its gradients in buckets by four strategies."""
    hosts, widths, steps = (QUICK_HOSTS, QUICK_WIDTHS, 1) if quick else (HOSTS, WIDTHS, steps)
    with lab.networks({"star": f"star:{hosts}"}, parse_rate(rate)) as names:
        request = {"widths": widths, "batch": batch, "steps": steps}
        found = lab.ask(names["star"], hosts, "examples.reproduce.torch.lab_ranks", request, limit=LIMIT_SECONDS)
    compute = found["compute"]["backward"] + found["compute"]["update"]
    table = Table(title=f"a step of {sum(found['rows'][0]['nbytes']) / 4e6:.1f} M parameters, {compute:.2f} s alone")
    for column in ("buckets", "MB of each", "predicted, s", "measured, s", "measured / predicted"):
        table.add_column(column, justify="left" if column == "buckets" else "right")
    for row in found["rows"]:
        table.add_row(
            row["buckets"],
            ", ".join(f"{n / 1e6:.1f}" for n in row["nbytes"]),
            f"{row['predicted']:.2f}",
            f"{row['measured']:.2f}",
            f"{row['measured'] / row['predicted']:.2f}",
        )
    show_table(table)
    if json_path:
        write_json(json_path, {"rate": rate, "hosts": hosts, **request, **found})


if __name__ == "__main__":
    command()
