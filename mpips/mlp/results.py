"""The results of `mpips train`: tables on a terminal, one JSON record, one picture."""

from __future__ import annotations

import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from collectives import files
from collectives.terminal import writing
from mpips.mlp.data.loading import Data
from mpips.mlp.parallel import PHASES, hidden_share
from mpips.mlp.prediction import MeshPrediction
from mpips.mlp.servers import Servers
from mpips.mlp.training import EpochResult, Worker

MEANINGS = {
    "compute": "computation and updates", "forward": "forward gathers and sums", "backward": "backward reductions",
    "data": "data", "evaluate": "evaluation",
}  # fmt: skip


def prediction_table(predictions: list[MeshPrediction], steps: int) -> Table:
    """Return the predicted times of every mesh, the fastest first; `steps`: minibatches of an epoch."""
    table = Table(title="Predicted time of a step, ms")
    for column in ("grid", "compute", "gradient sums", "model exchange", "hidden", "step", "epoch, s", "alpha, us",
                   "1/beta, GB/s"):  # fmt: skip
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


def epoch_line(epoch: EpochResult, epochs: int) -> str:
    """Return one line of progress."""
    parts = [f"epoch {epoch.epoch:>{len(str(epochs))}}/{epochs}", f"train {epoch.train_loss:.6f}"]
    if epoch.test_loss is not None:
        parts.append(f"test {epoch.test_loss:.6f}")
    if epoch.test_accuracy is not None:
        parts.append(f"accuracy {100 * epoch.test_accuracy:.2f} %")
    return "  ".join([*parts, f"{epoch.seconds:.2f} s"])


def total_phases(epochs: list[EpochResult], data_seconds: float) -> dict[str, float]:
    """Return seconds by phase over all epochs; data includes reading and distribution before the first one."""
    total = {phase: sum(epoch.phases[phase] for epoch in epochs) for phase in PHASES}
    total["data"] += data_seconds
    return total


def total_hidden(epochs: list[EpochResult]) -> float | None:
    """Return the share of communication that was hidden behind computation over all epochs; None without any."""
    waited = sum(epoch.phases["forward"] + epoch.phases["backward"] for epoch in epochs)
    return hidden_share(waited, sum(epoch.under_way for epoch in epochs))


def budget_table(phases: dict[str, float], share: float | None) -> Table:
    """Return seconds and share of each phase, the mean over ranks; `share` of communication is hidden."""
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
    worker: Worker, data: Data, epochs: list[EpochResult], data_seconds: float, memory: list[int],
    overlap: bool | None, servers: Servers | None,
) -> dict[str, Any]:  # fmt: skip
    """Return everything as one JSON-ready record; memory is the peak resident bytes of every rank that trains.

    `overlap` is None where nodes decided, `averaging` without servers, `every` and `alpha` without elastic averaging.
    """
    mesh, specification = worker.mesh, worker.network.specification
    elastic = servers is not None and servers.kind == "elastic"
    return {
        "grid": {"batch": mesh.batch, "model": mesh.model},
        "ranks": mesh.comm.size,
        "servers": servers.count if servers else 0,
        "clients": servers.clients if servers else 1,
        "averaging": servers.kind if servers else None,
        "every": servers.every if servers and elastic else None,
        "alpha": servers.alpha if servers and elastic else None,
        "network": {**specification._asdict(), "sizes": list(specification.sizes)},
        "split": worker.network.mode,
        "overlap": overlap,
        "optimizer": {"name": type(worker.optimizer).__name__.lower(), **asdict(worker.optimizer)},
        "rows": {"train": data.train_rows, "test": data.test_rows},
        "labels": list(data.labels),
        "batch": data.batch,
        "distribution": {"way": data.way},
        "epochs": [epoch._asdict() for epoch in epochs],
        "phases": total_phases(epochs, data_seconds),
        "hidden": total_hidden(epochs),
        "memory_bytes": memory,
    }


def peak_memory() -> int:
    """Return the peak resident bytes of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def draw_picture(path: Path, epochs: list[EpochResult], phases: dict[str, float], title: str) -> None:
    """Draw loss curves and the time budget, side by side. Needs matplotlib (extra `plot`).

    click.ClickException where `path` cannot be written.
    """
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
