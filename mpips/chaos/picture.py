"""What a program noted against time, under faults and without, with the faults marked."""

from __future__ import annotations

from pathlib import Path

from collectives import files
from mpips.chaos.report import began_at, notes_of
from mpips.chaos.watch import Run

INCHES = (7.0, 4.0)


def draw(path: Path, run: Run, reference: Run | None = None) -> None:
    """Write a picture of the values that worker 0 noted. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    axes = figure.subplots()
    if reference is not None:
        axes.plot(*curve(reference), color="0.6", linewidth=3, label="without faults")
    axes.plot(*curve(run), color="tab:blue", label="with faults")
    began = began_at(run)
    for place, done in enumerate(done for done in run.done if not done.undone):
        kind = run.plan.faults[done.fault].kind
        axes.axvline(done.time - began, color="tab:red", linestyle=":", label="" if place else "a fault")
        axes.text(done.time - began, 1.0, f"{kind} {done.rank}", transform=axes.get_xaxis_transform(), fontsize=7,
                  rotation=90, va="top", ha="right")  # fmt: skip
    axes.set_xlabel("seconds since the first store was made")
    axes.set_ylabel("noted")
    axes.legend()
    files.write_picture(path, figure)


def curve(run: Run) -> tuple[list[float], list[float]]:
    """Seconds and values of what worker 0, whichever process that was, noted as numbers."""
    began = began_at(run)
    found = [note for note in notes_of(run) if note.worker == 0 and note.value is not None]
    return [note.time - began for note in found], [note.value for note in found if note.value is not None]
