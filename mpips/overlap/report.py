"""What a training job says of its overlap: seconds of an iteration, the share hidden, the last iteration by task.

It comes from clocks of this worker; nothing is sent for it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import timeline, trace
from .problem import Groups, shown
from .runtime import sent_tasks
from .timeline import COMPUTE, Kind, Task

STEPS = 16
"""Iterations of which the clocks are kept."""


@dataclass(frozen=True)
class Report:
    """Medians over the last `iterations` on this worker; seconds. `print` shows it in words.

    push, pull: groups of layers, (first, last) from 1; early: how many of the last push groups are pulled right behind
    their push. predicted_*: by the profile of the job, None where none was measured. hidden: share of the seconds in
    which messages were under way that something was computed. tasks: of the last whole iteration, from its start.
    """

    strategy: str
    push: Groups
    pull: Groups
    early: int
    iterations: int
    measured_s: float
    predicted_s: float | None
    hidden: float
    predicted_hidden: float | None
    tasks: tuple[Task, ...]

    def __str__(self) -> str:
        predicted = "not predicted, since nothing was measured for it"
        if self.predicted_s is not None:
            predicted = f"predicted {self.predicted_s:.4g} s with {self.predicted_hidden:.0%} hidden"
        pulls = f", pulled as {_words(self.pull)}{f', the last {self.early} early' if self.early else ''}"
        return (f"overlap {self.strategy}: {self.measured_s:.4g} s an iteration (median of {self.iterations}), "
                f"{self.hidden:.0%} of the communication hidden; {predicted}; pushed as {_words(self.push)}"
                f"{pulls if self.pull else ''}")

    def row(self) -> dict[str, Any]:
        """The report as JSON data."""
        return {"strategy": self.strategy, "push": self.push, "pull": self.pull, "early": self.early,
                "iterations": self.iterations, "measured_s": self.measured_s, "predicted_s": self.predicted_s,
                "hidden": self.hidden, "predicted_hidden": self.predicted_hidden}  # fmt: skip

    def save_trace(self, path: str | Path) -> None:
        """The last iteration as a Chrome trace, for chrome://tracing or Perfetto."""
        trace.save_chrome({f"overlap {self.strategy}": self.tasks}, path)

    def save_picture(self, path: str | Path) -> None:
        """The last iteration as a PNG. Needs matplotlib (extra `plot`)."""
        trace.draw({f"overlap {self.strategy}": self.tasks}, path, str(self).split(";")[0])


class Step(NamedTuple):
    """One step as clocked: compute and messages by time.perf_counter(). Messages have (start, end) once they ended."""

    seconds: float
    compute: tuple[Task, ...]
    messages: tuple[tuple[Kind, int, int, Any], ...]


class Recorder:
    """The last steps of a worker."""

    def __init__(self) -> None:
        self._steps: deque[Step] = deque(maxlen=STEPS + 1)

    def step(self, seconds: float, compute: list[Task], messages: list[tuple[Kind, int, int, Any]]) -> None:
        """Messages are (kind, first, last, handle), and may still be under way."""
        self._steps.append(Step(seconds, tuple(compute), tuple(messages)))

    def waited(self, seconds: float) -> None:
        """The last step took so much longer."""
        if self._steps:
            last = self._steps.pop()
            self._steps.append(last._replace(seconds=last.seconds + seconds))

    def report(self, strategy: str, push: Groups, pull: Groups, early: int, predicted: list[Task] | None) -> Report:
        """RuntimeError where there was no step whose messages have ended."""
        whole = [tasks for tasks in map(self._tasks, range(len(self._steps))) if tasks]
        if not whole:
            raise RuntimeError("a report needs a step that has ended: call step or fit first")
        return Report(
            strategy, push, pull, early, len(whole),
            float(np.median([step.seconds for step in self._steps])),
            None if predicted is None else timeline.end(predicted),
            float(np.median([timeline.hidden_share(tasks) for tasks in whole])),
            None if predicted is None else timeline.hidden_share(predicted),
            tuple(whole[-1]),
        )  # fmt: skip

    def _tasks(self, index: int) -> list[Task]:
        """An iteration from its start on: its compute, its messages, and what the next step computed beside them.
        Empty while some are under way."""
        step = self._steps[index]
        if not all(handle.done for *_, handle in step.messages):
            return []
        messages = list(sent_tasks(step.messages))
        end = max(task.end for task in (*step.compute, *messages))
        behind = [task for later in list(self._steps)[index + 1 : index + 2] for task in later.compute]
        begin = step.compute[0].start
        return [task._replace(start=task.start - begin, end=task.end - begin)
                for task in (*step.compute, *messages, *(task for task in behind if task.start < end))]


class Ended(NamedTuple):
    """A message that blocked, as a handle."""

    started: float
    ended: float
    done: bool = True


def blocking(recorder: Recorder, arrays: int, begin: float, computed: float, exchanged: float) -> None:
    """Record a step without overlap: compute until `computed`, then the exchange of all arrays."""
    compute = Task("compute", 1, arrays, begin, computed, COMPUTE)
    recorder.step(exchanged - begin, [compute], [("push", 1, arrays, Ended(computed, exchanged))])


def _words(groups: Groups) -> str:
    """So many groups, and the first of them."""
    few = " ".join(map(shown, groups[:4]))
    return f"{len(groups)} group{'s' if len(groups) > 1 else ''} ({few}{' ..' if len(groups) > 4 else ''})"
