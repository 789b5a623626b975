"""The paper's figures 5, 6 and 7 (strong scaling): predicted to 32 processes, measured as far as there are cores.

For a prediction, the computation of one rank is measured here, alone, on its slice of the network and the minibatch.
The time of communication comes from the paper's formulas, with the paper's constants for its machine, Cori.

    python -m examples.reproduce.mlp --json FILE --plot FILE [--predict-only] [--quick]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click
import msgspec
from rich.table import Table
from threadpoolctl import threadpool_limits

import examples.reproduce.without_mpi  # noqa: F401 before mpips.mlp
from collectives import files
from collectives.machine import usable_cores
from collectives.terminal import Interruptible, OutFile, Picture, show_table, write_json, writing
from mpips.mlp.mesh import factorings
from mpips.mlp.network import Specification, interval, largest_slice
from mpips.mlp.prediction import LinkCost, allreduce_seconds, exchange_seconds, messages, time_events
from mpips.optimizers import SGD

# section 7: "bandwidth is 5.6TB/s and latency is 1 us"
CORI = LinkCost(1e-6, 1 / 5.6e12)
WIDTHS = (32, 64, 128, 512, 1024)
PROCESSES = (1, 2, 4, 8, 16, 32)
QUICK_WIDTHS, QUICK_PROCESSES = (32, 512), (1, 2, 4)
FIGURE_7_WIDTH = 512
BATCH = 100
# the paper's Algorithm 2
SPLIT = "columns"
# The paper's end points (section 9). It gives 5.8 for width 512 in section 9, and for width 1,024 in section 10.
PAPER = {"figure 5, 32x1": 5.8, "figure 6, width 1,024": 1.2, "figure 7, best hybrid over batch": 0.99}


class Point(NamedTuple):
    """One step on a mesh, at one width of the hidden layers."""

    width: int
    # shape of the mesh
    batch: int
    model: int
    # seconds
    predicted: float
    # None if the machine does not have a core for every rank
    measured: float | None


def sizes(width: int) -> tuple[int, ...]:
    """Return the sizes of a network for the paper's large data set: 16 inputs, two hidden layers, 2 outputs."""
    return (16, width, width, 2)


def predicted(width: int, batch: int, model: int, link: LinkCost) -> float:
    """Return the seconds of a step: measured computation, and communication by the paper's formulas."""
    samples = interval(BATCH, batch, 0)[1]
    specification = Specification(sizes(width), "relu", "l2", "float32", 1)
    events = time_events(specification, model, samples, BATCH, SGD(learning_rate=0.01), SPLIT)
    seconds = sum(event.compute for event in events)
    if batch > 1:
        seconds += allreduce_seconds(batch, 4 * sum(largest_slice(sizes(width), model, SPLIT)), link)
    return seconds + exchange_seconds(messages(sizes(width), model, samples, 4, SPLIT), model, link)


def measured(width: int, batch: int, model: int) -> float:
    """Return the seconds of a step in a run of `mpips train`: the median over its epochs, without the first."""
    steps = 40
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        words = [
            *("train", "--ranks", str(batch * model), "--data", f"synthetic:{BATCH * steps},16,2"),
            *("--hidden", f"{width},{width}", "--grid", f"{batch}x{model}", "--split", SPLIT, "--batch", str(BATCH)),
            *("--epochs", "4", "--test-share", "0", "--threads", "1", "--json", str(path)),
        ]
        subprocess.run([sys.executable, "-m", "launch.cli", *words], check=True, timeout=120, stdout=subprocess.DEVNULL)
        epochs = msgspec.json.decode(path.read_bytes())["epochs"]
    return median(epoch["seconds"] for epoch in epochs[1:]) / steps


def points(link: LinkCost, measure: bool, quick: bool = False) -> list[Point]:
    """Return the points of the three figures, or with `quick` some of them.

    With `measure`, meshes that have a core for each rank are also run.
    """
    widths, processes = (QUICK_WIDTHS, QUICK_PROCESSES) if quick else (WIDTHS, PROCESSES)
    wanted = {(width, p, 1) for width in widths for p in processes}
    wanted |= {(width, 1, p) for width in widths for p in processes}
    wanted |= {(FIGURE_7_WIDTH, *mesh) for p in processes[2:] for mesh in factorings(p)}
    cores = usable_cores() if measure else 0
    return [
        Point(
            width,
            batch,
            model,
            predicted(width, batch, model, link),
            measured(width, batch, model) if batch * model <= cores else None,
        )
        for width, batch, model in sorted(wanted)
    ]


def summary(found: list[Point]) -> dict[str, float]:
    """Return our predictions of the paper's end points, or {} if points are missing."""
    seconds = {(point.width, point.batch, point.model): point.predicted for point in found}
    if (WIDTHS[-1], 1, PROCESSES[-1]) not in seconds:
        return {}
    width = FIGURE_7_WIDTH
    workers = [seconds[width, 32 // nm, nm] for nm in (2, 4, 8, 16)]
    return {
        "figure 5, 32x1": seconds[width, 1, 1] / seconds[width, 32, 1],
        "figure 6, width 1,024": max(seconds[1024, 1, 1] / seconds[1024, 1, p] for p in PROCESSES[1:]),
        "figure 7, best hybrid over batch": seconds[width, 32, 1] / min(workers),
    }


def draw(path: Path, found: list[Point]) -> None:
    """Draw figures 5, 6 and 7 side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.2), layout="constrained")
    five, six, seven = figure.subplots(1, 3)
    _speedups(five, found, batch=True)
    five.plot([32], [PAPER["figure 5, 32x1"]], "k*", markersize=12, label="paper, 512 at 32x1")
    five.set_title("Figure 5: batch parallel")
    _speedups(six, found, batch=False)
    six.axhline(PAPER["figure 6, width 1,024"], color="k", linestyle=":", label="paper, best at 1,024")
    six.set_title("Figure 6: model parallel")
    for axis in (five, six):
        axis.plot(PROCESSES, PROCESSES, color="0.8", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="processes", ylabel="speedup over one process")
        axis.set_xticks(PROCESSES, [str(p) for p in PROCESSES])
        axis.legend(fontsize=7)
    for index, p in enumerate(PROCESSES[1:]):
        if row := [point for point in found if _is(point, FIGURE_7_WIDTH, p)]:
            _hybrids(seven, row, f"C{index}", f"P = {p}")
    seven.axhline(PAPER["figure 7, best hybrid over batch"], color="k", linestyle=":", label="paper, best hybrid")
    seven.set(xscale="log", xlabel="model ranks of P", ylabel="speedup over Px1", title="Figure 7: hybrid, width 512")
    seven.set_xticks(PROCESSES, [str(p) for p in PROCESSES])
    seven.legend(fontsize=7)
    figure.suptitle("Lines: predicted, Cori's constants and computation measured here; crosses: measured here")
    files.write_picture(path, figure, dpi=120)


def _is(point: Point, width: int, ranks: int) -> bool:
    return point.width == width and point.batch * point.model == ranks


def _hybrids(axis: Any, points: list[Point], colour: str, label: str) -> None:
    """Draw the line of one P in figure 7: the speedup of each mesh of P ranks over Px1."""
    row = sorted(points, key=lambda point: point.model)
    whole = row[0]
    models = [point.model for point in row]
    axis.plot(models, [whole.predicted / point.predicted for point in row], "o-", color=colour, label=label)
    real = [(point.model, whole.measured / point.measured) for point in row if whole.measured and point.measured]
    if real:
        axis.plot(*zip(*real), "x", color=colour, markersize=9)


def _speedups(axis: Any, found: list[Point], batch: bool) -> None:
    for index, width in enumerate(WIDTHS):
        row = sorted(
            (point.batch * point.model, point)
            for point in found
            if point.width == width and (point.model if batch else point.batch) == 1
        )
        if not row:
            continue
        one = row[0][1]
        colour = f"C{index}"
        speedups = [one.predicted / point.predicted for _, point in row]
        axis.plot([p for p, _ in row], speedups, ".-", color=colour, label=width)
        real = [(p, one.measured / point.measured) for p, point in row if one.measured and point.measured]
        if real:
            axis.plot(*zip(*real), "x", color=colour)


def _table(ends: dict[str, float]) -> Table:
    table = Table(title="End points")
    for column in ("", "paper", "predicted"):
        table.add_column(column, justify="right" if column else "left")
    for name, value in ends.items():
        table.add_row(name, f"{PAPER[name]:.2f}", f"{value:.2f}")
    return table


@click.command(cls=Interruptible, context_settings={"show_default": True})
@click.option("--measure/--predict-only", default=True, help="Run every grid that has a core for each rank.")
@click.option("--alpha", default=CORI.alpha, help="Latency, s.")
@click.option("--beta", default=CORI.beta, help="Inverse bandwidth, s a byte.")
@click.option("--quick", is_flag=True, help="Few widths, and few processes: shows that all of it works, in seconds.")
@click.option("--json", "json_path", type=OutFile())
@click.option("--plot", "plot_path", type=Picture())
def command(
    measure: bool, alpha: float, beta: float, quick: bool, json_path: Path | None, plot_path: Path | None
) -> None:
    """Redraw the paper's figures 5, 6 and 7."""
    with threadpool_limits(1, user_api="blas"):
        found = points(LinkCost(alpha, beta), measure, quick)
    ends = summary(found)
    if ends:
        show_table(_table(ends))
    if json_path:
        rows = [point._asdict() for point in found]
        write_json(json_path, {"alpha": alpha, "beta": beta, "paper": PAPER, "predicted": ends, "points": rows})
    if plot_path:
        with writing(plot_path):
            draw(plot_path, found)


if __name__ == "__main__":
    command()
