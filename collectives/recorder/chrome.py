"""Makes events in Chrome's trace format, and writes a file of them. Perfetto and chrome://tracing open such a file.

Kinds of event:

    X           a bar on a row; two bars of a row must not overlap, except that one may lie inside the other (see
    `rows`) s, t, f     an arrow through bars: it starts in the bar at event `s`, passes the bars at events `t`, and
    ends in the
                bar at event `f`
    M           names of processes and rows

The functions take times in nanoseconds; the format has microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpips.collectives import files

Event = dict[str, Any]


def bar(name: str, kind: str, pid: int, tid: int, begin: float, end: float, **more: object) -> Event:
    """Return a bar from `begin` to `end`. The viewer shows `more` when the bar is clicked."""
    event: Event = {
        "ph": "X",
        "name": name,
        "cat": kind,
        "pid": pid,
        "tid": tid,
        "ts": begin / 1e3,
        "dur": (end - begin) / 1e3,
    }
    return event | {"args": more} if more else event


def arrow(number: int, name: str, places: Sequence[tuple[int, int, float]]) -> list[Event]:
    """Return an arrow through two or more bars, each given as (pid, tid, a time inside the bar)."""
    kinds = ["s", *"t" * (len(places) - 2), "f"]
    return [
        {"ph": kind, "id": number, "name": name, "cat": "flow", "pid": pid, "tid": tid, "ts": at / 1e3, "bp": "e"}
        for kind, (pid, tid, at) in zip(kinds, places)
    ]


def names(pid: int, process: str, threads: Mapping[int, str]) -> list[Event]:
    """Return events that name a process and its rows, and make the viewer sort them by pid and tid."""
    events = [_meta(pid, None, "process_name", name=process), _meta(pid, None, "process_sort_index", sort_index=pid)]
    for tid, thread in threads.items():
        events += [_meta(pid, tid, "thread_name", name=thread), _meta(pid, tid, "thread_sort_index", sort_index=tid)]
    return events


def _meta(pid: int, tid: int | None, what: str, **args: object) -> Event:
    event: Event = {"ph": "M", "name": what, "pid": pid, "args": args}
    return event if tid is None else event | {"tid": tid}


def rows(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return a row for each span, so that two spans of a row are apart or one is inside the other.

    The spans are placed in the order in which they begin, each in the first row where it fits. So few rows are needed.
    """
    row_of, open_ends = [0] * len(spans), list[list[float]]()
    for index in sorted(range(len(spans)), key=lambda number: (spans[number][0], -spans[number][1])):
        begin, end = spans[index]
        for row, ends in enumerate(open_ends):  # noqa: B007
            while ends and ends[-1] <= begin:
                ends.pop()
            if not ends or end <= ends[-1]:
                break
        else:
            row, ends = len(open_ends), []
            open_ends.append(ends)
        ends.append(end)
        row_of[index] = row
    return row_of


def save(path: str | os.PathLike[str], events: Iterable[Event], about: Mapping[str, Any] | None = None) -> None:
    """Write a trace file. `about` is data on the whole trace. Raises OSError if the file cannot be written."""
    whole: dict[str, Any] = {"traceEvents": list(events), "displayTimeUnit": "ms"}
    if about:
        whole["otherData"] = about
    files.write(path, json.dumps(whole).encode() + b"\n")
