"""Shows one case each in which a batch, a model and a hybrid mesh is fastest, on 8 emulated hosts.

    python -m examples.reproduce.mlp.lab [--rate 100mbit] [--json FILE] [--quick]

The time of a step on every mesh is predicted from alpha, beta and computation that are measured on this mesh, as
`--grid auto` does. Then it is measured in training. After that, steps with and without overlap and mixed precision are
compared, in turn in one run.
"""

from __future__ import annotations

from pathlib import Path

import click
from rich.table import Table

from collectives.simulator.topology import parse_rate
from collectives.terminal import Interruptible, OutFile, show_table, write_json
from examples.reproduce import lab

HOSTS = 8
CASES = (
    {"name": "batch", "hidden": [256, 256], "batch": 4096},
    {"name": "model", "hidden": [1024, 1024], "batch": 32},
    {"name": "hybrid", "hidden": [512, 512], "batch": 512},
)
COMPARISONS = (
    {"name": "deep", "hidden": [512] * 6, "batch": 12288, "grid": [8, 1]},
    {"name": "deep, model", "hidden": [512] * 6, "batch": 512, "grid": [1, 8]},
)
QUICK_CASES = ({"name": "small", "hidden": [16, 16], "batch": 32},)
QUICK_COMPARISONS = ({"name": "small, overlap", "hidden": [16, 16], "batch": 32, "grid": [2, 1]},)


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--rate", default="100mbit", help="Rate of every link.")
@click.option("--steps", default=5, type=click.IntRange(3))
@click.option("--quick", is_flag=True, help="2 hosts and small networks: shows that all of it works, in seconds.")
@click.option("--json", "json_path", type=OutFile())
def command(rate: str, steps: int, quick: bool, json_path: Path | None) -> None:
    """Train every mesh of 8 emulated hosts in three settings."""
    hosts, cases, comparisons = (2, QUICK_CASES, QUICK_COMPARISONS) if quick else (HOSTS, CASES, COMPARISONS)
    with lab.networks({"star": f"star:{hosts}"}, parse_rate(rate)) as names:
        request = {"cases": list(cases), "comparisons": list(comparisons), "steps": steps}
        found = lab.ask(names["star"], hosts, "examples.reproduce.mlp.lab_ranks", request)
    for each in cases:
        show(f"hidden {each['hidden']}, batch {each['batch']}", found[each["name"]])
    for each in comparisons:
        compare(f"{each['grid']}, hidden {each['hidden']}, batch {each['batch']}", found[each["name"]])
    if json_path:
        write_json(json_path, {"rate": rate, "hosts": hosts, **request, "found": found})


def show(title: str, rows: list[dict]) -> None:
    """Print the table of one case, in the predicted order. The mesh that was measured fastest is marked."""
    table = Table(title=f"{title}: ms a step")
    for column in ("grid", "predicted", "measured", "predicted / measured", "hidden", ""):
        table.add_column(column, justify="right")
    fastest = min(rows, key=lambda row: row["measured"])
    for row in rows:
        table.add_row(
            f"{row['batch']}x{row['model']}",
            f"{1e3 * row['predicted']:.1f}",
            f"{1e3 * row['measured']:.1f}",
            f"{row['predicted'] / row['measured']:.2f}",
            percent(row["measured_hidden"]),
            "fastest" if row is fastest else "",
        )
    show_table(table)


def compare(title: str, rows: list[dict]) -> None:
    """Print the table of one comparison. Gains are over float32 without overlap."""
    table = Table(title=f"{title}: ms a step")
    for column in ("", "predicted", "measured", "gain", "hidden"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(
            f"{row['dtype']}{', overlap' if row['overlap'] else ''}",
            f"{1e3 * row['predicted']:.1f}" if row["predicted"] else "",
            f"{1e3 * row['measured']:.1f}",
            f"{rows[0]['measured'] / row['measured']:.2f}",
            percent(row["measured_hidden"]),
        )
    show_table(table)


def percent(share: float | None) -> str:
    """Format the share of communication time that was hidden, or "" if nothing was sent."""
    return "" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    command()
