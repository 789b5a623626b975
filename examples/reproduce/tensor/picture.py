"""The picture of `examples.reproduce.tensor`: figure 15, figures 17 to 19, figure 20."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from collectives import files

MIB = 1 << 20


def draw(report: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    rows = report["rows"]
    sizes = sorted({row["nbytes"] for row in rows})
    figure = Figure(figsize=(5 * (2 + len(sizes)), 4.5))
    axes = figure.subplots(1, 2 + len(sizes))
    _scaling(axes[0], [row for row in rows if row["nbytes"] == sizes[-1]])
    for place, (nbytes, number) in zip(axes[1:], zip(sizes, (17, 18, 19))):
        _times(place, [row for row in rows if row["nbytes"] == nbytes], number, nbytes)
    _rings(axes[-1], rows)
    figure.suptitle(f"{report['vectors']} vectors a host, links of {8e-6 * report['rate']:g} Mbit/s; dashed: predicted")
    figure.tight_layout()
    files.write_picture(path, figure, dpi=90)


def _lines(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return algorithm -> rows."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["algorithm"], []).append(row)
    return found


def _scaling(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draw figure 15 for a plain tensor: tensors of all hosts synchronised in a second."""
    lines = _lines(rows)
    for colour, name in (("C0", "multi_ring"), ("C3", "reg")):
        line = lines[name]
        hosts = [row["hosts"] for row in line]
        axes.plot(hosts, [row["hosts"] / row["measured"] for row in line], colour, marker="o", label=name)
        axes.plot(hosts, [row["hosts"] / row["predicted"] for row in line], colour, linestyle="--")
    axes.set(xlabel="hosts", ylabel="tensors a second", title=f"Figure 15, {rows[0]['nbytes'] // MIB} MiB", ylim=0)
    axes.legend(fontsize=8)


def _times(axes: Any, rows: list[dict[str, Any]], number: int, nbytes: int) -> None:
    for place, (name, line) in enumerate(_lines(rows).items()):
        hosts = [row["hosts"] for row in line]
        axes.plot(hosts, [row["measured"] for row in line], f"C{place}", marker="o", label=name)
        axes.plot(hosts, [row["predicted"] for row in line], f"C{place}", linestyle="--")
    axes.set(xlabel="hosts", ylabel="seconds", title=f"Figure {number}, {nbytes // MIB} MiB", ylim=0)
    axes.legend(fontsize=8)


def _rings(axes: Any, rows: list[dict[str, Any]]) -> None:
    for marker, name in (("o", "multi_ring"), ("s", "vector_ring")):
        for colour, hosts in enumerate(sorted({row["hosts"] for row in rows})):
            line = [row for row in rows if (row["algorithm"], row["hosts"]) == (name, hosts)]
            size = [row["nbytes"] / MIB for row in line]
            label = f"{name}, {hosts} hosts"
            axes.plot(size, [row["measured"] for row in line], f"C{colour}", marker=marker, label=label)
            axes.plot(size, [row["predicted"] for row in line], f"C{colour}", linestyle="--")
    axes.set(xlabel="MiB", ylabel="seconds", title="Figure 20")
    axes.legend(fontsize=8)
