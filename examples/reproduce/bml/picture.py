"""The picture of `examples.reproduce.bml`: synchronisation times, job completion times, figure 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collectives import files
from examples.reproduce.bml.model import BML, MIB, SERVER

NAMES = {SERVER: "parameter server, star", BML: "BML, BCube(3,2)"}


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8))
    (sync, lenet), (vgg, five) = figure.subplots(2, 2)
    _synchronisation(sync, report)
    places = {"LeNet-5": lenet, "VGG-19": vgg}
    for model, axes in places.items():
        _jobs(axes, model, [row for row in report["jobs"] if row["model"] == model])
    _figure5(five, report["figure5"])
    figure.tight_layout()
    files.write_picture(path, figure, dpi=110)


def _synchronisation(axes: Any, report: dict[str, Any]) -> None:
    for colour, key in zip(("C0", "C1"), (SERVER, BML)):
        rows = [r for r in report["exchanges"] if (r["topology"], r["algorithm"]) == key]
        rows.sort(key=lambda row: row["nbytes"])
        size = [row["nbytes"] / MIB for row in rows]
        axes.plot(size, [row["bound"] for row in rows], colour, linestyle=":", label=f"{NAMES[key]}: paper")
        axes.plot(size, [row["predicted"] for row in rows], colour, linestyle="--", label="predicted")
        axes.plot(size, [row["measured"] for row in rows], colour, marker="o", linestyle="", label="measured")
    axes.set(xlabel="gradient (MiB)", ylabel="seconds", title="Gradient synchronisation, 9 hosts")
    axes.legend(fontsize=8)


def _jobs(axes: Any, model: str, rows: list[dict[str, Any]]) -> None:
    measured = [row for row in rows if row["measured"]] or rows
    kind = "measured" if measured[0]["measured"] else "predicted"
    place = range(len(measured))
    axes.bar([p - 0.2 for p in place], [row[kind][1] for row in measured], 0.4, color="C1", label=f"BML, {kind}")
    axes.bar([p + 0.2 for p in place], [row[kind][0] for row in measured], 0.4, color="C0", label=f"PS, {kind}")
    for shift, which in ((-0.2, 1), (0.2, 0)):
        axes.plot([p + shift for p in place], [row["predicted"][which] for row in measured], "k_", markersize=16)
    for p, row in zip(place, measured):
        axes.text(p, max(row[kind]), f"-{100 * row[f'{kind}_gain']:.0f} %", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(list(place), [str(row["batch"]) for row in measured])
    axes.set(xlabel="sub-minibatch", ylabel="1,000 x seconds of an iteration", title=f"{model}, {measured[0]['where']}")
    axes.legend(fontsize=8)


def _figure5(axes: Any, rows: list[dict[str, Any]]) -> None:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for number, case in enumerate(cases):
        values = [row for row in rows if row["case"] == case]
        places = [p + 0.2 * number for p in range(len(values))]
        axes.bar(places, [row["gst"] for row in values], 0.2, label=case)
        axes.plot(places, [row["paper"] for row in values], "k_", markersize=14, label="paper" if not number else None)
    axes.set_xticks([0.3, 1.3], sorted({str(row["servers"]) for row in rows}, key=int))
    axes.set(xlabel="servers", ylabel="GST / T_F", ylim=(0, 2.8), title="Figure 5, simulated")
    axes.legend(fontsize=8)
