"""One timeline of all ranks from their records: rows of calls, compute and steps, and arrows from push to pull.

Each rank is a process of the trace. Each of its threads has a row for its calls, and another row for calls that run
beside the program. The gaps between the calls of a worker's main thread are shown as *compute*.

An arrow goes from a push to the sum on each server that has it, and on to the pull that reads that sum. The pull began
before the sum, but viewers of traces draw arrows only to bars that begin later. So the part of the pull after the sum
gets a bar of its own, *receive*, and the arrow ends there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mpips.collectives.recorder import chrome
from mpips.collectives.recorder.ring import CallRecord
from mpips.collectives.recorder.tracing import RankTrace
from mpips.launch.observe.clocks import Clock

# Shorter gaps between two calls get no bar. There are many of them, and nothing is computed in them.
LEAST_COMPUTE_NS = 5_000
# names of operations in records
SUMS = ("sum", "update")
PUSHES = ("push", "pushpull")
PULLS = ("pull", "pushpull")
STEP = "step"
# The number of a rank's first row. It is large so that rows and ranks have different numbers: Perfetto labels a row
# that has the number of its process, which is the rank, as "main thread".
FIRST_ROW = 1001


class PlacedCall(NamedTuple):
    """A call and its place in the trace."""

    record: CallRecord
    # its process (the rank) and its row
    pid: int
    tid: int
    # nanoseconds of the reference clock since the beginning of the trace
    begin: int
    end: int


def merge(traces: Sequence[RankTrace], clocks: Mapping[str, Clock]) -> tuple[list[chrome.Event], dict[str, Any]]:
    """Merge the records of all ranks into one trace.

    Several processes of the same rank, such as before and after a restart, become one process of the trace.

    Args:
        traces: What each process has recorded.
        clocks: The name of a clock -> its offsets, for each clock that is not the reference.

    Returns:
        The events, and facts about the trace: ranks, errors of clocks, numbers of records and arrows.
    """
    times = [(clocks.get(one.who["clock"], Clock()), one) for one in traces if one.records]
    if not times:
        return [], _about(traces, clocks)
    first = min(clock.to_reference(record.made_ns) for clock, one in times for record in one.records)
    last = max(clock.to_reference(max(record[3:6])) for clock, one in times for record in one.records)
    events: list[chrome.Event] = []
    placed: list[PlacedCall] = []
    tids: dict[int, dict[int, str]] = defaultdict(dict)
    for clock, one in times:
        found = _Rank(one, clock, first, last, tids[one.rank])
        events += found.events
        placed += found.placed
    for _, one in times:
        who = one.who
        process = f"rank {one.rank} ({who.get('role') or 'worker'}) on {who.get('host', '')}"
        events += chrome.names(one.rank, process, tids[one.rank])
    about = _about(traces, clocks)
    flows = list(find_flows(placed, about["clock_error_ns"]))
    events += _receives(placed, flows)
    for number, flow in enumerate(flows, 1):
        events += chrome.arrow(number, f"round {flow.total.record.round} of {flow.total.record.subject}", flow.places())
    return events, about | {"flows": len(flows), "seconds": (last - first) / 1e9}


def count_calls(one: RankTrace) -> int:
    """Return how many calls a process has recorded. The marks of steps do not count."""
    return sum(record.operation != STEP for record in one.records)


def _about(traces: Sequence[RankTrace], clocks: Mapping[str, Clock]) -> dict[str, Any]:
    """Return facts about a trace. "clock_error_ns" is the largest error when the times of two ranks are compared."""
    ranks = [
        {
            "rank": one.rank,
            "role": one.who.get("role", ""),
            "host": one.who.get("host", ""),
            "pid": one.who["pid"],
            "records": count_calls(one),
            "overwritten": one.overwritten,
            "clock_error_ns": _error(one, clocks),
        }
        for one in traces
    ]
    of_clocks: dict[str, int] = defaultdict(int)
    for one in traces:
        of_clocks[one.who["clock"]] = max(of_clocks[one.who["clock"]], _error(one, clocks))
    worst = sum(sorted(of_clocks.values())[-2:]) if len(of_clocks) > 1 else 0
    return {"flows": 0, "clock_error_ns": worst, "ranks": ranks}


def _error(one: RankTrace, clocks: Mapping[str, Clock]) -> int:
    """Return the largest error of the times of a process, compared with the reference clock."""
    if not one.records or one.who["clock"] not in clocks:
        return 0
    first, last = one.records[0].made_ns, max(max(record[3:6]) for record in one.records)
    return clocks[one.who["clock"]].error_ns(first, last)


class _Rank:
    """Places the records of one process in the trace, as `events` and `placed`.

    Args:
        trace: The records.
        clock: The clock that the process reads.
        first: The beginning of the whole trace, by the reference clock.
        last: Its end. Calls that are not over end there.
        tids: The rows that its rank has already, with their names. New rows are added.
    """

    def __init__(self, trace: RankTrace, clock: Clock, first: int, last: int, tids: dict[int, str]) -> None:
        self.events: list[chrome.Event] = []
        self.placed: list[PlacedCall] = []
        self._trace = trace
        self._tids = tids
        # (runs beside the program, thread) -> (record, begin, end) of its calls
        groups: dict[tuple[bool, int], list[tuple[CallRecord, int, int]]] = defaultdict(list)
        steps = []
        for record in trace.records:
            begin = clock.to_reference(record.begun_ns or record.made_ns) - first
            end = clock.to_reference(record.ended_ns) - first if record.ended_ns else last - first
            if record.operation == STEP:
                steps.append((record.number, begin))
                continue
            # A call that runs beside the program begins later than the program has made it.
            beside = record.begun_ns != record.made_ns
            groups[beside, record.thread].append((record, begin, max(begin, end)))
        self._add_steps(steps, min(one[1] for group in groups.values() for one in group) if groups else 0)
        main = trace.who.get("thread")
        for number, (beside, thread) in enumerate(sorted(groups, key=lambda one: (one[1] != main, one[0]))):
            name = "main" if thread == main else f"thread {number + 1}"
            calls = groups[beside, thread]
            row = self._add_calls(f"{name}, beside compute" if beside else name, calls)
            if thread == main and not beside and trace.who.get("role") != "server":
                self._add_compute(row, calls)

    def _row(self, name: str) -> int:
        tid = FIRST_ROW + len(self._tids)
        self._tids[tid] = name
        return tid

    def _add_steps(self, marks: Sequence[tuple[int, int]], begin: int) -> None:
        row = self._row("steps") if marks else 0
        for number, end in marks:
            if end > begin:
                self.events.append(chrome.bar(f"step {number}", "step", self._trace.rank, row, begin, end))
            begin = max(begin, end)

    def _add_calls(self, name: str, calls: Sequence[tuple[CallRecord, int, int]]) -> int:
        """Place the calls of a thread, in several rows if they overlap. Return the first row."""
        rows = chrome.rows([(begin, end) for _, begin, end in calls])
        tids = [self._row(name if not row else f"{name} ({row + 1})") for row in range(max(rows) + 1)]
        for (record, begin, end), row in zip(calls, rows):
            one = PlacedCall(record, self._trace.rank, tids[row], begin, end)
            self.placed.append(one)
            more = {
                "bytes": record.nbytes,
                "dtype": record.dtype,
                "number": record.number,
                "round": record.round,
                "line": record.line,
                "part": max(record.part, 0),
            }
            title = f"{record.operation} {record.subject}".strip() + ("" if record.ended_ns else " (not over)")
            shown = {key: value for key, value in more.items() if value}
            self.events.append(chrome.bar(title, record.operation, one.pid, one.tid, begin, end, **shown))
        return tids[0]

    def _add_compute(self, row: int, calls: Sequence[tuple[CallRecord, int, int]]) -> None:
        """Add bars of compute in the gaps between the calls of the main thread."""
        reached = calls[0][1]
        for _, begin, end in sorted(calls, key=lambda one: one[1]):
            if begin - reached >= LEAST_COMPUTE_NS:
                self.events.append(chrome.bar("compute", "compute", self._trace.rank, row, reached, begin))
            reached = max(reached, end)


class Flow(NamedTuple):
    """A worker's push of a round, the sum of it on a server, and the same worker's pull, or None if there is none."""

    push: PlacedCall
    total: PlacedCall
    pull: PlacedCall | None

    def places(self) -> list[tuple[int, int, float]]:
        """Return the points (process, row, time) that its arrow connects."""
        push, total, pull = self
        summed = max(total.begin, min(push.begin, total.end - 1))
        places = [(push, push.begin), (total, summed), *([(pull, pull.end - 1)] if pull else [])]
        return [(one.pid, one.tid, at) for one, at in places]


def find_flows(placed: Sequence[PlacedCall], error_ns: int) -> Iterator[Flow]:
    """Find the push and the pull that belong to each sum.

    After a recovery the same round is run again. So if there are several, those nearest in time belong together.
    `error_ns` is the error when times of two clocks are compared.
    """
    pushes: dict[tuple[int, str, int], list[PlacedCall]] = defaultdict(list)
    pulls: dict[tuple[int, str, int], list[PlacedCall]] = defaultdict(list)
    for one in placed:
        key = one.record.lane, one.record.subject, one.record.round
        if one.record.operation in PUSHES:
            pushes[key].append(one)
        if one.record.operation in PULLS:
            pulls[key].append(one)
    for total in placed:
        if total.record.operation not in SUMS:
            continue
        key = total.record.lane, total.record.subject, total.record.round
        readers = _nearest([one for one in pulls[key] if one.end + error_ns >= total.begin], total.begin)
        for pid, push in _nearest(pushes[key], total.begin, last=True).items():
            yield Flow(push, total, readers.get(pid))


def _receives(placed: Sequence[PlacedCall], flows: Sequence[Flow]) -> Iterator[chrome.Event]:
    """Yield a bar in each pull that has waited for sums, from the end of the last sum to the end of the pull."""
    summed: dict[PlacedCall, int] = defaultdict(int)
    for flow in flows:
        if flow.pull:
            summed[flow.pull] = max(summed[flow.pull], flow.total.end)
    inside = sorted(((one.pid, one.tid, one.begin, one.end) for one in placed), key=lambda bar: bar[:3])
    for pull, begin in summed.items():
        if begin <= pull.begin:
            continue
        begin = min(begin, pull.end - 2)
        for pid, tid, other, end in inside[bisect_right(inside, (pull.pid, pull.tid, pull.begin, pull.end)) :]:
            if (pid, tid) != pull[1:3] or other >= begin:
                break
            # A call within the pull has a bar of its own, and bars of a row must not cross: begin after it.
            begin = max(begin, end)
        if begin < pull.end:
            yield chrome.bar("receive", "receive", pull.pid, pull.tid, begin, pull.end)


def _nearest(calls: Sequence[PlacedCall], at: int, last: bool = False) -> dict[int, PlacedCall]:
    """Return one call of each rank: with `last`, its last call that began by the time `at`; otherwise its first call.

    With `last`, a rank whose calls all begin after `at` gets its first call.
    """
    found: dict[int, PlacedCall] = {}
    for one in sorted(calls, key=lambda call: call.begin, reverse=not last):
        if not last or one.begin <= at or one.pid not in found:
            found[one.pid] = one
    return found
