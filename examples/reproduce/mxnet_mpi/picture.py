"""The picture of `examples.reproduce.mxnet_mpi`: synchronisation, seconds an epoch, accuracy against time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collectives import files


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5))
    sync, epochs, curves = figure.subplots(1, 3)
    rows = report["synchronisation"]
    sync.barh([row["way"] for row in rows], [row["measured"] for row in rows], color="C0", label="measured")
    sync.plot(
        [row["predicted"] for row in rows], [row["way"] for row in rows], "k|", markersize=24, label="links allow"
    )
    sync.set(xlabel="seconds", title="4 MiB, 12 workers, 2 servers")
    sync.legend(fontsize=8)
    training = report["training"]
    modes = [row["mode"] for row in training]
    epochs.barh(modes, [row["epoch_seconds"] for row in training], label="measured")
    for mark, place, name in (("b|", 0, "predicted, overlapped"), ("k|", 1, "predicted, in turn")):
        epochs.plot([row["predicted"][place] for row in training], modes, mark, markersize=16, label=name)
    epochs.set(xlabel="seconds an epoch", title="Figure 12")
    if training:
        epochs.legend(fontsize=8)
    for row in training:
        style = "--" if row["mode"].startswith("dist") else "-"
        seconds, accuracy = zip(*row["curve"])
        curves.plot(seconds, accuracy, style, label=row["mode"])
    curves.set(xlabel="seconds", ylabel="test accuracy", title="Figures 11, 13, 14")
    if training:
        curves.legend(fontsize=8)
    figure.tight_layout()
    files.write_picture(path, figure, dpi=110)
