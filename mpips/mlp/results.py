"""What `mpips train` reports: tables on a terminal, one JSON record, one picture."""

from __future__ import annotations

import json
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from collectives import files
from collectives.terminal import write_text, writing
from mpips.mlp.data.loading import Data
from mpips.mlp.parallel import PHASES, hidden
from mpips.mlp.prediction import Prediction
from mpips.mlp.servers import ServerOptions
from mpips.mlp.training import Epoch, Worker

MEANINGS = {
    "compute": "computation and updates",
    "forward": "forward gathers and sums",
    "backward": "backward reductions",
    "data": "data",
    "evaluate": "evaluation",
}


def explain(predictions: list[Prediction], steps: int) -> Table:
    """Predicted times of every mesh, the fastest first; `steps` is the number of minibatches of an epoch."""
    table = Table(title="Predicted time of a step, ms")
    for column in (
        "grid",
        "compute",
        "gradient sums",
        "model exchange",
        "hidden",
        "step",
        "epoch, s",
        "alpha, us",
        "1/beta, GB/s",
    ):
        table.add_column(column, justify="right")
    for each in predictions:
        links = [link for ranks, link in ((each.batch, each.batch_link), (each.model, each.model_link)) if ranks > 1]
        parts = (each.compute, each.reduction, each.exchange, each.hidden, each.seconds)
        table.add_row(
            f"{each.batch}x{each.model}",
            *(f"{1e3 * seconds:.3f}" for seconds in parts),
            f"{steps * each.seconds:.2f}",
            ", ".join(f"{1e6 * link.alpha:.1f}" for link in links),
            ", ".join(f"{1e-9 / link.beta:.3g}" if link.beta else "-" for link in links),
        )
    return table


def explain_way(data: Data) -> str:
    """How the rows reached the ranks, and what sending them was predicted to take."""
    costs = ", ".join(f"{way} {seconds:.3g} s" for way, seconds in data.way_seconds.items())
    why = "every rank reads one part of the rows" if data.way == "read" else f"rank 0 sends them by {data.way}"
    return f"data: {why} (sending: {costs})"


def epoch_line(epoch: Epoch, epochs: int) -> str:
    """One line of progress."""
    parts = [f"epoch {epoch.epoch:>{len(str(epochs))}}/{epochs}", f"train {epoch.train_loss:.6f}"]
    if epoch.test_loss is not None:
        parts.append(f"test {epoch.test_loss:.6f}")
    if epoch.test_accuracy is not None:
        parts.append(f"accuracy {100 * epoch.test_accuracy:.2f} %")
    return "  ".join([*parts, f"{epoch.seconds:.2f} s"])


def mean_seconds(epochs: list[Epoch]) -> float:
    """Seconds of an epoch, its evaluation included."""
    return sum(epoch.seconds for epoch in epochs) / len(epochs)


def total_phases(epochs: list[Epoch], data_seconds: float) -> dict[str, float]:
    """Seconds by phase over all epochs; data includes reading and distribution before the first one."""
    total = {phase: sum(epoch.phases[phase] for epoch in epochs) for phase in PHASES}
    total["data"] += data_seconds
    return total


def total_hidden(epochs: list[Epoch]) -> float | None:
    """The share of communication that was hidden behind computation over all epochs; None where nothing moved."""
    return hidden(total_phases(epochs, 0.0), sum(epoch.under_way for epoch in epochs))


def budget(phases: dict[str, float], share: float | None) -> Table:
    """The time budget: seconds and share of each phase, the mean over ranks; `share` of communication is hidden."""
    whole = sum(phases.values()) or 1.0
    caption = "nothing was sent" if share is None else f"{share:.0%} of the time that messages took is hidden"
    table = Table(title="Time budget, mean over ranks", caption=caption)
    table.add_column("phase")
    for column in ("s", "%"):
        table.add_column(column, justify="right")
    for phase in PHASES:
        table.add_row(MEANINGS[phase], f"{phases[phase]:.3f}", f"{100 * phases[phase] / whole:.1f}")
    return table


def record(
    worker: Worker, data: Data, epochs: list[Epoch], data_seconds: float, memory: list[int], overlap: bool | None,
    servers: ServerOptions | None,
) -> dict[str, Any]:  # fmt: skip
    """Everything as one JSON-ready record; memory is the peak resident bytes of every rank that trains.

    `overlap` is None where nodes decided, `averaging` without servers, `every` and `alpha` without elastic averaging.
    """
    mesh, specification = worker.mesh, worker.network.specification
    return {
        "grid": {"batch": mesh.batch, "model": mesh.model},
        "ranks": mesh.comm.size,
        **_servers(servers),
        "network": {**specification._asdict(), "sizes": list(specification.sizes)},
        "split": worker.network.mode,
        "overlap": overlap,
        "optimizer": {"name": type(worker.optimizer).__name__.lower(), **asdict(worker.optimizer)},
        "rows": {"train": data.train_rows, "test": data.test_rows},
        "labels": list(data.labels),
        "batch": data.batch,
        "distribution": {"way": data.way, "predicted_seconds": data.way_seconds},
        "epochs": [epoch._asdict() for epoch in epochs],
        "phases": total_phases(epochs, data_seconds),
        "hidden": total_hidden(epochs),
        "memory_bytes": memory,
    }


def _servers(servers: ServerOptions | None) -> dict[str, Any]:
    if servers is None:
        return {"servers": 0, "clients": 1, "averaging": None, "every": None, "alpha": None}
    moves = (servers.every, servers.alpha) if servers.kind == "elastic" else (None, None)
    return {
        "servers": servers.count, "clients": servers.clients, "averaging": servers.kind,
        "every": moves[0], "alpha": moves[1],
    }  # fmt: skip


def peak_memory() -> int:
    """Peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`content` as JSON at `path`; click.ClickException where that cannot be written."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def picture(path: Path, epochs: list[Epoch], phases: dict[str, float], title: str) -> None:
    """Loss curves and the time budget, side by side. Needs matplotlib (extra `plot`). click.ClickException where `path`
    cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    curves, bars = figure.subplots(1, 2)
    numbers = [epoch.epoch for epoch in epochs]
    curves.plot(numbers, [epoch.train_loss for epoch in epochs], marker=".", label="train")
    tested = [(epoch.epoch, epoch.test_loss) for epoch in epochs if epoch.test_loss is not None]
    if tested:
        curves.plot(*zip(*tested), marker=".", label="test")
    curves.set(xlabel="epoch", ylabel="loss", title=title)
    curves.legend()
    bars.barh([MEANINGS[phase] for phase in PHASES], [phases[phase] for phase in PHASES])
    bars.invert_yaxis()
    bars.set(xlabel="s, mean over ranks", title="time budget")
    with writing(path):
        files.write_picture(path, figure, dpi=120)
