"""Draw the picture of demo.py: test accuracy over seconds of training, with a line for each mode."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives import files

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"SGD": "#2b6cb0", "ASGD": "#dd6b20", "ESGD": "#2f855a", "MPI": "#805ad5", "serial": "#1a202c"}
# the lowest accuracy on the axis
LOWEST = 0.8
SERIAL = (
    "serial: one process alone, with the mini-batch of all workers; the network is so small that sharing the work "
    "out costs more than it saves"
)


def style(mode: str) -> dict[str, Any]:
    """Return the style of a mode's line: a colour for the algorithm; dashed for dist modes, dotted for serial."""
    algorithm = mode.replace(" ", "-").split("-")[-1]
    if mode == "serial":
        return {"color": COLOURS[algorithm], "linestyle": ":", "linewidth": 2.2, "zorder": 5}
    return {"color": COLOURS[algorithm], "linestyle": "--" if mode.startswith("dist") else "-", "linewidth": 1.8}


def draw(results: Sequence[dict[str, Any]], target: float, title: str, path: Path) -> None:
    """Write the picture as PNG. Raise ModuleNotFoundError if matplotlib is missing."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.2), layout="constrained")
    axes = figure.add_subplot()
    for result in results:
        seconds, accuracy = zip(*result["curve"])
        axes.plot(seconds, accuracy, label=label(result), **style(result["mode"]))
        axes.plot(seconds[-1:], accuracy[-1:], "o", color=style(result["mode"])["color"], markersize=6, zorder=6)
    decorate(axes, target, title)
    files.write_picture(path, figure, dpi=130)


def label(result: dict[str, Any]) -> str:
    return f"{result['mode']:<9}  {result['test_accuracy']:.3f}  {result['seconds']:6.2f} s"


def decorate(axes: Axes, target: float, title: str) -> None:
    """Draw the axes, the target, and the legend, which is also a table of the results."""
    axes.axhline(target, color="#a0aec0", linewidth=1)
    axes.annotate(
        f"target {target}",
        (1, target),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        color="#718096",
    )
    axes.set(
        xlabel="seconds of training (log scale), from the first epoch on",
        ylabel="test accuracy",
        ylim=(LOWEST, 1.0),
        title=title,
    )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
    axes.grid(color="#edf2f7")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    legend = axes.legend(
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        frameon=False,
        prop={"family": "monospace", "size": 9},
        title="     mode     accuracy    time",
        alignment="left",
    )
    legend.get_title().set(family="monospace", size=9)
    axes.annotate(
        textwrap.fill(SERIAL, 44, break_on_hyphens=False),
        (1, 0),
        xycoords="axes fraction",
        xytext=(12, 0),
        textcoords="offset points",
        va="bottom",
        fontsize=8,
        color="#718096",
    )
