"""A timeline as a picture, and as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collectives import files

from .problem import shown
from .timeline import Task

_COLOURS = {"forward": "#4c72b0", "backward": "#55a868", "compute": "#4c72b0", "push": "#c44e52", "pull": "#dd8452"}


def draw(timelines: Mapping[str, Sequence[Task]], path: str | Path, title: str = "") -> None:
    """Writes a PNG: one block of lanes a timeline, all on one axis of seconds. Needs matplotlib (extra `plot`)."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [(name, lane) for name, tasks in timelines.items() for lane in _lanes(tasks)]
    figure = Figure(figsize=(12, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, (name, lane) in enumerate(rows):
        for task in timelines[name]:
            if task.lane == lane:
                axes.barh(y, task.seconds, left=task.start, height=0.8, color=_COLOURS[task.kind],
                          edgecolor="white", linewidth=0.4)
    axes.set_yticks(range(len(rows)), [f"{name}: {lane}" for name, lane in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    kinds = sorted({task.kind for tasks in timelines.values() for task in tasks})
    handles = [Patch(color=_COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    files.write_picture(path, figure, dpi=110)


def chrome(timelines: Mapping[str, Sequence[Task]], names: Sequence[str] = ()) -> dict[str, Any]:
    """Trace events in microseconds; one process a timeline, one thread a lane. `names` are the layers', if known."""
    events: list[dict[str, Any]] = []
    for pid, (title, tasks) in enumerate(timelines.items()):
        lanes = {lane: tid for tid, lane in enumerate(_lanes(tasks))}
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}})
        events += [{"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}}
                   for lane, tid in lanes.items()]
        events += [_event(task, pid, lanes[task.lane], names) for task in tasks]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_chrome(timelines: Mapping[str, Sequence[Task]], path: str | Path, names: Sequence[str] = ()) -> None:
    files.write(path, json.dumps(chrome(timelines, names)).encode() + b"\n")


def _event(task: Task, pid: int, tid: int, names: Sequence[str]) -> dict[str, Any]:
    event = {"ph": "X", "name": f"{task.kind} {shown((task.first, task.last))}", "cat": task.kind, "pid": pid,
             "tid": tid, "ts": task.start * 1e6, "dur": task.seconds * 1e6}
    if names:
        event["args"] = {"layers": list(names[task.first - 1 : task.last])}
    return event


def _lanes(tasks: Sequence[Task]) -> list[str]:
    return sorted({task.lane for task in tasks})
