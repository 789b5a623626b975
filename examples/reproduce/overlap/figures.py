"""Shared by both reproductions: speedup curves, comparisons with a paper's values, and how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from collectives import files
from collectives.terminal import show_table


@dataclass(frozen=True)
class Point:
    """A simulated point. `speedup` is that of the throughput over one node, under weak scaling."""

    model: str
    strategy: str
    nodes: int
    iteration_s: float
    speedup: float


@dataclass(frozen=True)
class Comparison:
    """A value that the paper states, and our value."""

    what: str
    paper: float
    ours: float
    optimal: float | None = None
    # True if a constant of the simulation was chosen so that `ours` equals `paper`
    fitted: bool = False


@dataclass(frozen=True)
class Figure:
    """A reproduced figure."""

    title: str
    # every constant of the simulation, and its source
    settings: dict[str, Any]
    points: tuple[Point, ...]
    comparisons: tuple[Comparison, ...]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def speedup(points: Sequence[Point], model: str, strategy: str, nodes: int) -> float:
    """Return the speedup of one point. Raise KeyError if it was not simulated."""
    return {(p.model, p.strategy, p.nodes): p.speedup for p in points}[model, strategy, nodes]


def show(figure: Figure, console: Console) -> None:
    """Print the curves, the comparison and the settings."""
    for model in dict.fromkeys(p.model for p in figure.points):
        console.print(_curves(figure, model))
    table = Table("paper's statement", "paper", "ours", "optimal", "ours / paper", title="paper, ours, optimum")
    for c in figure.comparisons:
        optimal = "" if c.optimal is None else f"{c.optimal:.2f}"
        verdict = "fitted" if c.fitted else f"{c.ours / c.paper:.2f}"
        table.add_row(c.what, f"{c.paper:.2f}", f"{c.ours:.2f}", optimal, verdict)
    show_table(table, console)
    for name, value in figure.settings.items():
        console.print(f"{name}: {value}", highlight=False)


def draw(figure: Figure, path: str | Path) -> None:
    """Draw speedup over nodes, with a panel for each model. Needs matplotlib (extra `plot`)."""
    import matplotlib.figure

    models = list(dict.fromkeys(p.model for p in figure.points))
    picture = matplotlib.figure.Figure(figsize=(4.4 * len(models), 4.2), layout="constrained")
    for axes, model in zip(picture.subplots(1, len(models), squeeze=False)[0], models):
        points = [p for p in figure.points if p.model == model]
        for strategy in dict.fromkeys(p.strategy for p in points):
            curve = [(p.nodes, p.speedup) for p in points if p.strategy == strategy]
            axes.plot(
                *zip(*curve), marker="o", markersize=3, label=strategy, linestyle="--" if strategy == "optimal" else "-"
            )
        nodes = sorted({p.nodes for p in points})
        axes.plot(nodes, nodes, color="grey", linewidth=0.8, label="linear")
        axes.set(title=model, xlabel="nodes", ylabel="speedup")
        axes.legend()
    picture.suptitle(figure.title)
    files.write_picture(path, picture, dpi=110)


def _curves(figure: Figure, model: str) -> Table:
    points = [p for p in figure.points if p.model == model]
    strategies = list(dict.fromkeys(p.strategy for p in points))
    table = Table("nodes", *strategies, title=f"{model}: speedup")
    for nodes in sorted({p.nodes for p in points}):
        table.add_row(str(nodes), *(f"{speedup(points, model, name, nodes):.1f}" for name in strategies))
    return table
