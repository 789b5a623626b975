"""The demo's picture: test accuracy against seconds of training, one line a mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

COLOURS = {"SGD": "#1f77b4", "ASGD": "#d95f02", "ESGD": "#1b9e77", "MPI": "#7b3294", "serial": "#333333"}


def style(mode: str) -> dict[str, Any]:
    """A colour for the algorithm; dashed where each worker is its own client, dotted for the serial reference."""
    algorithm = mode.replace(" ", "-").split("-")[-1]
    line = ":" if mode == "serial" else "--" if mode.startswith("dist") else "-"
    return {"color": COLOURS[algorithm], "linestyle": line, "linewidth": 2.0 if mode != "serial" else 2.4}


def draw(results: Sequence[dict[str, Any]], target: float, path: Path) -> None:
    """Write the picture as PNG."""
    figure, (whole, close) = plt.subplots(1, 2, figsize=(12, 5.2), width_ratios=(1.6, 1), layout="constrained")
    for axes in (whole, close):
        for result in results:
            seconds, accuracy = zip(*result["curve"])
            name = f"{result['mode']}  {result['test_accuracy']:.3f} in {result['seconds']:.2f} s"
            axes.plot(seconds, accuracy, label=name, marker="o", markersize=3, **style(result["mode"]))
        decorate(axes, target)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def decorate(axes: Axes, target: float) -> None:
    axes.axhline(target, color="#999999", linewidth=0.8)
    axes.set_xlabel("seconds of training")
