"""The tables of `examples.reproduce.bml`: the paper's, predicted and measured values side by side."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from examples.reproduce.bml.model import BML, MIB, SERVER

# the size for which every NIC is shown; the JSON has those of all sizes
NICS_AT = 4 * MIB


def show(report: dict[str, Any]) -> None:
    """Print all tables and the notes between them."""
    console = Console(width=140)
    if report["exchanges"]:
        console.print(_exchanges(report))
        console.print(
            "paper: 2(N-1)/(kN) bytes / rate.  NICs: worst difference of a NIC's payload bytes from theory.  "
            "idle: of the machine's cores."
        )
        console.print("MPI_Allreduce blocks: nine ranks that spin leave no core idle.")
        for r in report["ratios"]:
            console.print(
                f"BML / parameter server at {r['nbytes'] / MIB:.4g} MiB: measured {r['measured']:.3f}, "
                f"predicted {r['predicted']:.3f}, paper 0.500"
            )
        for key, name in ((SERVER, "the parameter server"), (BML, "BML")):
            rows = (r for r in report["exchanges"] if (r["topology"], r["algorithm"]) == key)
            console.print(_nics(next(r for r in rows if r["nbytes"] == NICS_AT), name))
    console.print(_models(report["models"]))
    console.print(_jobs(report["jobs"]))
    console.print(
        "paper: figures 6 and 7. Its text has the largest and the smallest gain, which belong to the "
        "smallest and the largest batch; gains between are only drawn. The largest hold the imbalance of "
        "TensorFlow's servers. Compute per sample fits the smallest."
    )
    console.print(_figure5(report["figure5"]))
    console.print(
        'paper: 2(N-1)/N, half of it for BML on BCube, and for the server there "double" of that. '
        "Simulated, the server there takes 2(n-1)/n, n servers a switch: a pair under one switch needs one "
        "hop only."
    )


def _table(title: str, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    """Make an empty table: columns of words at the left, columns of numbers at the right."""
    table = Table(title=title)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _exchanges(report: dict[str, Any]) -> Table:
    title = f"Gradient synchronisation, 9 hosts, links of {8e-6 * report['rate']:g} Mbit/s (seconds)"
    numbers = ("MiB", "paper", "predicted", "measured", "/ paper", "/ predicted", "NICs", "idle")
    table = _table(title, ("network", "algorithm"), numbers)
    for r in [*report["exchanges"], *report["native"]]:
        seconds = [f"{r[k]:.4f}" for k in ("bound", "predicted", "measured")]
        ratios = [f"{r['measured'] / r[k]:.3f}" for k in ("bound", "predicted")]
        worst = f"{100 * max(nic['difference'] for nic in r['nics']):.2f} %" if r["nics"] else ""
        ends = (worst, f"{100 * r['idle']:.0f} %")
        table.add_row(r["topology"], r["algorithm"], f"{r['nbytes'] / MIB:.4g}", *seconds, *ratios, *ends)
    return table


def _nics(row: dict[str, Any], name: str) -> Table:
    title = f"Payload bytes through every NIC, {name} on {row['topology']}, {row['nbytes'] / MIB:g} MiB"
    numbers = ("out: counted", "theory", "in: counted", "theory", "difference")
    table = _table(title, ("host", "NIC"), numbers)
    for nic in row["nics"]:
        words = [f"{value:,.0f}" for way in ("out", "in") for value in nic[way]]
        table.add_row(nic["host"], nic["nic"], *words, f"{100 * nic['difference']:.2f} %")
    return table


def _models(rows: list[dict[str, Any]]) -> Table:
    title = "Gradient synchronisation, 9 servers, links of 40 Gbit/s, simulated (milliseconds)"
    table = _table(title, ("model",), ("MiB", "PS paper", "PS predicted", "BML paper", "BML predicted", "BML / PS"))
    for r in rows:
        pairs = [f"{1e3 * v:.2f}" for both in zip(r["paper"], r["predicted"]) for v in both]
        ratio = f"{r['predicted'][1] / r['predicted'][0]:.3f}"
        table.add_row(r["model"], f"{r['nbytes'] / MIB:.4g}", *pairs, ratio)
    return table


def _jobs(rows: list[dict[str, Any]]) -> Table:
    title = "Job completion time: 1,000 times an iteration of which compute is emulated by sleeping (seconds)"
    predicted, measured = ("PS predicted", "BML predicted", "gain"), ("PS measured", "BML measured", "gain")
    table = _table(title, ("model", "where"), ("batch", "paper: gain", *predicted, *measured))
    for r in rows:
        paper = "drawn" if r["paper_gain"] is None else f"{100 * r['paper_gain']:.1f} %"
        words = [f"{v:,.1f}" for v in r["predicted"]] + [f"{100 * r['predicted_gain']:.1f} %"]
        if r["measured"]:
            words += [f"{v:,.1f}" for v in r["measured"]] + [f"{100 * r['measured_gain']:.1f} %"]
        table.add_row(r["model"], r["where"], str(r["batch"]), paper, *words)
    return table


def _figure5(rows: list[dict[str, Any]]) -> Table:
    table = _table("Figure 5: GST in units of T_F", ("servers", "case", "network"), ("paper", "simulated"))
    for r in rows:
        table.add_row(str(r["servers"]), r["case"], r["network"], f"{r['paper']:.3f}", f"{r['gst']:.3f}")
    return table
