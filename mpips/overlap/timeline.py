"""Compute the start and end of each compute and communication task of an iteration, for given groups, and draw them.

Recurrences, with groups g_1, .., g_K in layer order (MG-WFBP's names):

* push: backward of layer l ends at mu_b[l] = tf + sum of tb over l..L (Eq. 4, 6). Groups are sent from K to 1, each at
  tau_c[k] = max(end of k + 1, mu_b of the group's first layer), and take T(M_k) (Eq. 7, 20).
* pull: groups arrive from 1 to K without a gap, and each takes T_s + sum of T_t. A layer is computed once its group has
  arrived and the layer before it is computed (iBatch, figure 4c; where Eq. 5 holds this is Eq. 1 + 2 + 3).
* both: a push, then a pull of the next parameters, over one link or two (see `joint`).

A timeline can be drawn as a picture, or saved as a Chrome trace (chrome://tracing, Perfetto).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mpips.collectives import files
from mpips.collectives.recorder import chrome
from mpips.overlap.problem import Groups, JointPlan, Link, Problem, Profile, message_times, shown

Kind = Literal["forward", "backward", "compute", "push", "pull"]
COMPUTE, SEND, RECEIVE = "compute", "network", "network (receive)"


class Task(NamedTuple):
    """A task of layers first..last, drawn as one bar. Its times are in seconds from the start of the iteration.

    `lane` is the resource that the task occupies: COMPUTE, SEND or RECEIVE.
    """

    kind: Kind
    first: int
    last: int
    start: float
    end: float
    lane: str

    @property
    def seconds(self) -> float:
        return self.end - self.start


def push(problem: Problem, groups: Groups, start: float = 0.0) -> list[Task]:
    """Return the tasks of a backward pass from `start` on, and of the pushes of its gradients."""
    tasks = _compute("backward", problem, range(problem.layers, 0, -1), start)
    ready = {task.first: task.end for task in tasks}
    free = start
    for (first, last), seconds in reversed(list(zip(groups, message_times(problem, groups)))):
        begin = max(free, ready[first])
        free = begin + float(seconds)
        tasks.append(Task("push", first, last, begin, free, SEND))
    return tasks


def pull(problem: Problem, groups: Groups, start: float = 0.0, lane: str = SEND) -> list[Task]:
    """Return the tasks of the pulls from `start` on, and of the forward pass that uses the pulled parameters.

    Layers above the last group have their parameters already.
    """
    tasks: list[Task] = []
    arrival = np.full(problem.layers + 1, start)
    free = start
    for (first, last), seconds in zip(groups, message_times(problem, groups)):
        tasks.append(Task("pull", first, last, free, free + float(seconds), lane))
        free += float(seconds)
        arrival[first : last + 1] = free
    done = start
    for layer in range(1, problem.layers + 1):
        begin = max(done, float(arrival[layer]))
        done = begin + float(problem.compute[layer - 1])
        tasks.append(Task("forward", layer, layer, begin, done, COMPUTE))
    return tasks


def both(push_problem: Problem, pull_problem: Problem, plan: JointPlan, link: Link) -> list[Task]:
    """Return the tasks from the start of a backward pass to the end of the next forward pass (see `joint`)."""
    tasks = _compute("backward", push_problem, range(push_problem.layers, 0, -1), 0.0)
    ready = {task.first: task.end for task in tasks}
    receive_lane = SEND if link == "shared" else RECEIVE
    pushed, received = 0.0, 0.0
    sizes = zip(plan.push, message_times(push_problem, plan.push), message_times(pull_problem, plan.push))
    for (first, last), out, back in reversed(list(sizes)):
        begin = max(pushed, ready[first])
        pushed = begin + float(out)
        tasks.append(Task("push", first, last, begin, pushed, SEND))
        if first >= plan.first_early_layer:
            begin = max(received, pushed)
            received = begin + float(back)
            tasks.append(Task("pull", first, last, begin, received, receive_lane))
            if link == "shared":
                pushed = received
    return tasks + pull(pull_problem, plan.pull, max(pushed, received), receive_lane)


def push_iteration(profile: Profile, groups: Groups, nodes: int | None = None) -> list[Task]:
    """Return MG-WFBP's iteration: the forward pass, then backward with allreduces (Eq. 21)."""
    forward = _compute("forward", profile.pull(), range(1, len(profile.layers) + 1), 0.0)
    return forward + push(profile.push(nodes), groups, forward[-1].end)


def pull_iteration(profile: Profile, groups: Groups, nodes: int | None = None) -> list[Task]:
    """Return iBatch's overlap alone: the forward pass with pulls, then backward without pushes."""
    tasks = pull(profile.pull(), groups)
    return tasks + _compute("backward", profile.push(nodes), range(len(profile.layers), 0, -1), end(tasks))


def end(tasks: Iterable[Task]) -> float:
    """Return the second at which the last task ends."""
    return max(task.end for task in tasks)


def hidden_share(tasks: Sequence[Task]) -> float:
    """Return the share of the communication's time during which something was computed, or 1.0 if nothing was sent.

    The tasks may be predicted or measured.

    >>> Task = mpips.overlap.Task
    >>> mpips.overlap.hidden_share(
    ...     [Task("backward", 1, 1, 0.0, 3.0, "compute"), Task("push", 1, 1, 2.0, 4.0, "network")]
    ... )
    0.5
    """
    busy = _union([(task.start, task.end) for task in tasks if task.lane == COMPUTE])
    messages = [task for task in tasks if task.lane != COMPUTE]
    total = sum(task.seconds for task in messages)
    hidden = sum(max(0.0, min(task.end, stop) - max(task.start, begin)) for task in messages for begin, stop in busy)
    return hidden / total if total else 1.0


def _compute(kind: Kind, problem: Problem, order: Iterable[int], start: float) -> list[Task]:
    tasks = []
    for layer in order:
        stop = start + float(problem.compute[layer - 1])
        tasks.append(Task(kind, layer, layer, start, stop, COMPUTE))
        start = stop
    return tasks


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, stop in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((begin, stop))
    return merged


_COLOURS = {"forward": "#4c72b0", "backward": "#55a868", "compute": "#4c72b0", "push": "#c44e52", "pull": "#dd8452"}


def draw(timelines: Mapping[str, Sequence[Task]], path: str | Path, title: str = "") -> None:
    """Draw timelines as a PNG, one below another, with a common time axis. Needs matplotlib (extra `plot`).

    Args:
        timelines: Name -> tasks, such as `OverlapPlan.tasks`.
        path: The file, PNG.
        title: The title of the picture.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [(name, lane) for name, tasks in timelines.items() for lane in _lanes(tasks)]
    figure = Figure(figsize=(12, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for y, (name, lane) in enumerate(rows):
        for task in timelines[name]:
            if task.lane == lane:
                axes.barh(
                    y,
                    task.seconds,
                    left=task.start,
                    height=0.8,
                    color=_COLOURS[task.kind],
                    edgecolor="white",
                    linewidth=0.4,
                )
    axes.set_yticks(range(len(rows)), [f"{name}: {lane}" for name, lane in rows])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    kinds = sorted({task.kind for tasks in timelines.values() for task in tasks})
    handles = [Patch(color=_COLOURS[kind], label=kind) for kind in kinds]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    files.write_picture(path, figure, dpi=110)


def save_chrome(timelines: Mapping[str, Sequence[Task]], path: str | Path, names: Sequence[str] = ()) -> None:
    """Write timelines as a trace for chrome://tracing or Perfetto: a process for each timeline, a row for each lane.

    Args:
        timelines: Name -> tasks, such as `OverlapPlan.tasks`.
        path: The file, JSON.
        names: The names of the layers. Default: the trace has their numbers only.

    Raises:
        OSError: The file cannot be written.

    >>> task = mpips.overlap.Task("push", 1, 1, 2.0, 4.0, "network")
    >>> mpips.overlap.save_chrome({"by hand": [task]}, folder / "trace.json")
    """
    events: list[chrome.Event] = []
    for pid, (title, tasks) in enumerate(timelines.items()):
        lanes = {lane: tid for tid, lane in enumerate(_lanes(tasks))}
        events += chrome.names(pid, title, {tid: lane for lane, tid in lanes.items()})
        for task in tasks:
            more: dict[str, Any] = {"layers": list(names[task.first - 1 : task.last])} if names else {}
            name, at = f"{task.kind} {shown((task.first, task.last))}", (task.start * 1e9, task.end * 1e9)
            events.append(chrome.bar(name, task.kind, pid, lanes[task.lane], *at, **more))
    chrome.save(path, events)


def _lanes(tasks: Sequence[Task]) -> list[str]:
    return sorted({task.lane for task in tasks})
