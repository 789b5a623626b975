"""Merge the records of all ranks into one timeline: bars for calls, compute and steps, and arrows from push to pull.

The timeline is a trace for Perfetto or chrome://tracing. Each rank is a process of the trace. Each thread of the rank
has a row for calls for which the program waits, and another row for calls that run while the program computes. The gaps
between the calls of a worker's main thread are shown as *compute*.

An arrow goes from a push to the sum on a server, and on to the pull that reads this sum. The pull has begun before the
sum, but a viewer draws an arrow only to a bar that begins after the arrow's start. So the part of the pull after the
sum gets its own bar, *receive*, and the arrow ends at this bar.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpips.collectives.recorder import chrome
from mpips.collectives.recorder.ring import CallRecord
from mpips.collectives.recorder.tracing import RankTrace
from mpips.launch.observe.clocks import HostClock

# Gaps between two calls that are shorter than this get no bar. There are many, and they are too short to be compute.
LEAST_COMPUTE_NS = 5_000
# names of operations in records
SUMS = ("sum", "update")
PUSHES = ("push", "pushpull")
PULLS = ("pull", "pushpull")
STEP = "step"
# The number of a rank's first row. It must differ from the rank, which is the number of the process in the trace:
# Perfetto labels a row as "main thread" if the row has the number of its process.
FIRST_ROW = 1001


class PlacedCall(NamedTuple):
    """A call and its place in the trace.

    `begin` and `end` are nanoseconds since the beginning of the trace, by the reference clock: the clock of this host.
    """

    record: CallRecord
    # the number of the process in the trace, which is the rank
    pid: int
    # the number of the row
    tid: int
    begin: int
    end: int


def merge(traces: Sequence[RankTrace], clocks: Mapping[str, HostClock]) -> tuple[list[chrome.Event], dict[str, Any]]:
    """Merge the records of all ranks into one trace.

    If a rank had several processes, as before and after a restart, these become one process of the trace.

    Args:
        traces: The records of each process.
        clocks: Name of a clock -> the clock, for all clocks except the reference clock.

    Returns:
        The events of the trace, and facts about it: ranks, errors of clocks, numbers of records and arrows.
    """
    timed = [(clocks.get(trace.who["clock"], HostClock()), trace) for trace in traces if trace.records]
    if not timed:
        return [], _describe(traces, clocks)
    first = min(clock.to_reference(record.made_ns) for clock, trace in timed for record in trace.records)
    last = max(clock.to_reference(max(record[3:6])) for clock, trace in timed for record in trace.records)
    events: list[chrome.Event] = []
    placed: list[PlacedCall] = []
    tids: dict[int, dict[int, str]] = defaultdict(dict)
    for clock, trace in timed:
        rows = _RankRows(trace, clock, first, last, tids[trace.rank])
        events += rows.events
        placed += rows.placed
    for _, trace in timed:
        who = trace.who
        process = f"rank {trace.rank} ({who.get('role') or 'worker'}) on {who.get('host', '')}"
        events += chrome.names(trace.rank, process, tids[trace.rank])
    about = _describe(traces, clocks)
    flows = list(find_flows(placed, about["clock_error_ns"]))
    events += _make_receive_bars(placed, flows)
    for number, flow in enumerate(flows, 1):
        events += chrome.arrow(number, f"round {flow.total.record.round} of {flow.total.record.subject}", flow.places())
    return events, about | {"flows": len(flows), "seconds": (last - first) / 1e9}


def count_calls(trace: RankTrace) -> int:
    """Return how many calls a process has recorded. Records that only mark the end of a step do not count."""
    return sum(record.operation != STEP for record in trace.records)


def _describe(traces: Sequence[RankTrace], clocks: Mapping[str, HostClock]) -> dict[str, Any]:
    """Return facts about a trace: its ranks, the errors of their clocks, and the numbers of records.

    "clock_error_ns" is the largest possible error when times of two ranks are compared.
    """
    ranks = [
        {
            "rank": trace.rank,
            "role": trace.who.get("role", ""),
            "host": trace.who.get("host", ""),
            "pid": trace.who["pid"],
            "records": count_calls(trace),
            "overwritten": trace.overwritten,
            "clock_error_ns": _clock_error(trace, clocks),
        }
        for trace in traces
    ]
    # name of a clock -> its largest error
    errors: dict[str, int] = defaultdict(int)
    for trace in traces:
        errors[trace.who["clock"]] = max(errors[trace.who["clock"]], _clock_error(trace, clocks))
    worst = sum(sorted(errors.values())[-2:]) if len(errors) > 1 else 0
    return {"flows": 0, "clock_error_ns": worst, "ranks": ranks}


def _clock_error(trace: RankTrace, clocks: Mapping[str, HostClock]) -> int:
    """Return the largest possible error of the times of a process after they are converted to the reference clock."""
    if not trace.records or trace.who["clock"] not in clocks:
        return 0
    first, last = trace.records[0].made_ns, max(max(record[3:6]) for record in trace.records)
    return clocks[trace.who["clock"]].error_ns(first, last)


class _RankRows:
    """The rows of one rank's process: its records, placed in the trace.

    Args:
        trace: The records of the process.
        clock: The clock that the process reads.
        first: The beginning of the whole trace, by the reference clock.
        last: The end of the whole trace, by the reference clock. A call that has not ended gets this time as its end.
        tids: The rows that the rank already has: number -> name. This object adds its new rows.

    Attributes:
        events: The bars of calls, steps and compute.
        placed: The calls with their places in the trace.
    """

    def __init__(self, trace: RankTrace, clock: HostClock, first: int, last: int, tids: dict[int, str]) -> None:
        self.events: list[chrome.Event] = []
        self.placed: list[PlacedCall] = []
        self._trace = trace
        self._tids = tids
        # (whether the calls run during compute, thread) -> a list with (record, begin, end) of each call
        groups: dict[tuple[bool, int], list[tuple[CallRecord, int, int]]] = defaultdict(list)
        steps = []
        for record in trace.records:
            begin = clock.to_reference(record.begun_ns or record.made_ns) - first
            end = clock.to_reference(record.ended_ns) - first if record.ended_ns else last - first
            if record.operation == STEP:
                steps.append((record.number, begin))
                continue
            # A call that runs during compute begins some time after the program has made the call. Other calls begin at
            # once.
            during_compute = record.begun_ns != record.made_ns
            groups[during_compute, record.thread].append((record, begin, max(begin, end)))
        self._add_steps(steps, min(begin for group in groups.values() for _, begin, _ in group) if groups else 0)
        main = trace.who.get("thread")
        for number, (during_compute, thread) in enumerate(sorted(groups, key=lambda key: (key[1] != main, key[0]))):
            name = "main" if thread == main else f"thread {number + 1}"
            calls = groups[during_compute, thread]
            row = self._add_calls(f"{name}, beside compute" if during_compute else name, calls)
            if thread == main and not during_compute and trace.who.get("role") != "server":
                self._add_compute(row, calls)

    def _new_row(self, name: str) -> int:
        tid = FIRST_ROW + len(self._tids)
        self._tids[tid] = name
        return tid

    def _add_steps(self, marks: Sequence[tuple[int, int]], begin: int) -> None:
        row = self._new_row("steps") if marks else 0
        for number, end in marks:
            if end > begin:
                self.events.append(chrome.bar(f"step {number}", "step", self._trace.rank, row, begin, end))
            begin = max(begin, end)

    def _add_calls(self, name: str, calls: Sequence[tuple[CallRecord, int, int]]) -> int:
        """Place the calls of a thread in a row, or in several rows if calls overlap. Return the first row's number."""
        rows = chrome.rows([(begin, end) for _, begin, end in calls])
        tids = [self._new_row(name if not row else f"{name} ({row + 1})") for row in range(max(rows) + 1)]
        for (record, begin, end), row in zip(calls, rows):
            call = PlacedCall(record, self._trace.rank, tids[row], begin, end)
            self.placed.append(call)
            details = {
                "bytes": record.nbytes,
                "dtype": record.dtype,
                "number": record.number,
                "round": record.round,
                "line": record.line,
                "part": max(record.part, 0),
            }
            title = f"{record.operation} {record.subject}".strip() + ("" if record.ended_ns else " (not over)")
            shown = {key: value for key, value in details.items() if value}
            self.events.append(chrome.bar(title, record.operation, call.pid, call.tid, begin, end, **shown))
        return tids[0]

    def _add_compute(self, row: int, calls: Sequence[tuple[CallRecord, int, int]]) -> None:
        """Add a bar *compute* to the row `row` in each gap between the calls of the main thread."""
        reached = calls[0][1]
        for _, begin, end in sorted(calls, key=lambda call: call[1]):
            if begin - reached >= LEAST_COMPUTE_NS:
                self.events.append(chrome.bar("compute", "compute", self._trace.rank, row, reached, begin))
            reached = max(reached, end)


class Flow(NamedTuple):
    """The three calls that an arrow connects."""

    # a worker's push
    push: PlacedCall
    # the sum of the round on a server
    total: PlacedCall
    # the pull by which the same worker reads the sum, or None if no such pull was recorded
    pull: PlacedCall | None

    def places(self) -> list[tuple[int, int, float]]:
        """Return the points (process, row, time) of the arrow."""
        push, total, pull = self
        summed = max(total.begin, min(push.begin, total.end - 1))
        points = [(push, push.begin), (total, summed), *([(pull, pull.end - 1)] if pull else [])]
        return [(call.pid, call.tid, at) for call, at in points]


def find_flows(placed: Sequence[PlacedCall], error_ns: int) -> Iterator[Flow]:
    """Find the pushes and pulls that belong to each sum.

    After a recovery a round is run again, so a worker may have several pushes and pulls of one round. The push and the
    pull nearest to the sum in time belong to the sum. `error_ns` is the largest possible error when times of two clocks
    are compared.
    """
    pushes: dict[tuple[int, str, int], list[PlacedCall]] = defaultdict(list)
    pulls: dict[tuple[int, str, int], list[PlacedCall]] = defaultdict(list)
    for call in placed:
        key = call.record.lane, call.record.subject, call.record.round
        if call.record.operation in PUSHES:
            pushes[key].append(call)
        if call.record.operation in PULLS:
            pulls[key].append(call)
    for total in placed:
        if total.record.operation not in SUMS:
            continue
        key = total.record.lane, total.record.subject, total.record.round
        readers = _nearest([call for call in pulls[key] if call.end + error_ns >= total.begin], total.begin)
        for pid, push in _nearest(pushes[key], total.begin, last=True).items():
            yield Flow(push, total, readers.get(pid))


def _make_receive_bars(placed: Sequence[PlacedCall], flows: Sequence[Flow]) -> Iterator[chrome.Event]:
    """For each pull that has waited for sums, yield a bar from the end of the last sum to the end of the pull."""
    # pull -> the time at which the last of its sums ended
    summed: dict[PlacedCall, int] = defaultdict(int)
    for flow in flows:
        if flow.pull:
            summed[flow.pull] = max(summed[flow.pull], flow.total.end)
    bars = sorted(((call.pid, call.tid, call.begin, call.end) for call in placed), key=lambda bar: bar[:3])
    for pull, begin in summed.items():
        if begin <= pull.begin:
            continue
        begin = min(begin, pull.end - 2)
        for pid, tid, other, end in bars[bisect_right(bars, (pull.pid, pull.tid, pull.begin, pull.end)) :]:
            if (pid, tid) != pull[1:3] or other >= begin:
                break
            # A call within the pull has its own bar. Bars of one row must not cross, so begin after that bar.
            begin = max(begin, end)
        if begin < pull.end:
            yield chrome.bar("receive", "receive", pull.pid, pull.tid, begin, pull.end)


def _nearest(calls: Sequence[PlacedCall], at: int, last: bool = False) -> dict[int, PlacedCall]:
    """Choose one call of each rank, and return a dict: rank -> call.

    Without `last` this is the rank's first call. With `last` it is the rank's last call that began at the time `at` or
    earlier. If all calls of the rank began later, this is the rank's first call.
    """
    nearest: dict[int, PlacedCall] = {}
    for call in sorted(calls, key=lambda call: call.begin, reverse=not last):
        if not last or call.begin <= at or call.pid not in nearest:
            nearest[call.pid] = call
    return nearest
