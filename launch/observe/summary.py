"""The table at the end of a job: calls of each operation and size, their time and speed, and who made others wait.

When several ranks make a call together, the rank that came last took the shortest time, and that time is communication.
The time that the other ranks took beyond it is waiting for that rank. A push never waits, so a rank that pushes late
makes others wait in their pulls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from mpips.collectives.recorder.ring import CallRecord
from mpips.collectives.recorder.tracing import RankTrace
from mpips.collectives.schedule.model import BUS_FACTOR
from mpips.collectives.terminal import show_bytes
from mpips.launch.observe.timeline import STEP, SUMS, count_calls


class CallSummary(NamedTuple):
    """All calls of an operation with one size, or on one embedding table, on all ranks."""

    operation: str
    # for a table, the mean size of its calls
    nbytes: int
    calls: int
    # the mean time of a call, and how much of it is waiting
    mean_us: float
    waiting_us: float
    # bus bandwidth without the waiting; 0 if nothing is moved
    busbw_GBps: float
    # the share of the time between a rank's first and last call, on the ranks that make these calls
    share: float


class RankSummary(NamedTuple):
    """How much a rank makes others wait, and waits itself."""

    rank: int
    calls: int
    # how long it has made each other rank wait, in seconds and as a share of the time
    straggles_s: float
    straggles: float
    # the share of the time that it has waited itself
    waits: float


class Summary(NamedTuple):
    """The summary of a job."""

    # the largest share of time first
    lines: list[CallSummary]
    # one for each rank, in order
    scores: list[RankSummary]
    # number of calls that are not included, because newer records have replaced theirs
    left_out: int


def summarize(traces: Sequence[RankTrace]) -> Summary:
    """Summarize what the ranks of a job have recorded."""
    # rank -> time between its first call and its last
    seconds: dict[int, float] = {}
    # (lane, operation, subject, number, round) of a call that ranks make together -> (rank, record) of each
    together: dict[tuple[Any, ...], list[tuple[int, CallRecord]]] = defaultdict(list)
    # (operation, size), the key of a line -> (rank, record) of its calls
    by_size: dict[tuple[str, int], list[tuple[int, CallRecord]]] = defaultdict(list)
    for one in traces:
        ended = [record for record in one.records if record.ended_ns and record.operation != STEP]
        if ended:
            spent = max(record.ended_ns for record in ended) - min(record.begun_ns for record in ended)
            seconds[one.rank] = seconds.get(one.rank, 0.0) + spent / 1e9
        for record in ended:
            kind = record.operation, record.nbytes
            # The calls of a table have many sizes. They go into one line.
            if record.subject.startswith("table "):
                kind = f"{record.operation} of {record.subject}", 0
            by_size[kind].append((one.rank, record))
            if (record.number or record.round) and record.operation not in (*SUMS, "push"):
                key = (record.lane, record.operation, record.subject, record.number, record.round)
                together[key].append((one.rank, record))
    # id of a record -> the shortest time of the ranks that made the call together
    least: dict[int, float] = {}
    # rank -> seconds that it has made each other rank wait, and that it has waited itself
    made_wait: dict[int, float] = defaultdict(float)
    waited: dict[int, float] = defaultdict(float)
    for calls in together.values():
        ranks = {rank for rank, _ in calls}
        # Skip calls of a single rank, and those that a rank has made twice: it is not known which belong together.
        if len(ranks) < 2 or len(ranks) < len(calls):
            continue
        shortest, last = min((_took(record), rank) for rank, record in calls)
        for rank, record in calls:
            least[id(record)] = shortest
            waited[rank] += _took(record) - shortest
            made_wait[last] += (_took(record) - shortest) / (len(calls) - 1)
    lines = [_line(*key, calls, least, together, seconds) for key, calls in by_size.items()]
    scores = [
        RankSummary(
            rank,
            sum(count_calls(one) for one in traces if one.rank == rank),
            made_wait[rank],
            made_wait[rank] / seconds[rank] if seconds[rank] else 0.0,
            waited[rank] / seconds[rank] if seconds[rank] else 0.0,
        )
        for rank in sorted(seconds)
    ]
    lines.sort(key=lambda line: -line.share)
    return Summary(lines, scores, sum(one.overwritten for one in traces))


def _took(record: CallRecord) -> float:
    return (record.ended_ns - record.begun_ns) / 1e9


def _line(
    operation: str,
    nbytes: int,
    calls: Sequence[tuple[int, CallRecord]],
    least: dict[int, float],
    together: dict[tuple[Any, ...], list[tuple[int, CallRecord]]],
    seconds: dict[int, float],
) -> CallSummary:
    took = [_took(record) for _, record in calls]
    moving = [least.get(id(record), _took(record)) for _, record in calls]
    mean, pure = sum(took) / len(took), sum(moving) / len(moving)
    record = calls[0][1]
    nbytes = nbytes or sum(record.nbytes for _, record in calls) // len(calls)
    key = (record.lane, record.operation, record.subject, record.number, record.round)
    members = len(together.get(key, ()))
    factor = BUS_FACTOR[operation](members) if operation in BUS_FACTOR and members else 1.0
    share = sum(took) / sum(seconds[rank] for rank in {rank for rank, _ in calls}) if sum(took) else 0.0
    return CallSummary(
        operation,
        nbytes,
        len(calls),
        mean * 1e6,
        (mean - pure) * 1e6,
        nbytes * factor / pure / 1e9 if pure else 0.0,
        share,
    )


def tables(summary: Summary) -> list[Table]:
    """Return the summary as two tables for a terminal: calls and ranks."""
    first = Table(title="calls")
    for name in ("operation", "size", "calls", "mean us", "of it waiting", "busbw GB/s", "share of time"):
        first.add_column(name, justify="left" if name == "operation" else "right")
    for line in summary.lines:
        first.add_row(
            line.operation,
            show_bytes(line.nbytes),
            str(line.calls),
            f"{line.mean_us:.1f}",
            f"{line.waiting_us:.1f}",
            f"{line.busbw_GBps:.3f}" if line.nbytes else "",
            f"{100 * line.share:.1f} %",
        )
    second = Table(title="ranks")
    for name in ("rank", "calls", "makes each other wait", "straggler score", "waits itself"):
        second.add_column(name, justify="right")
    for score in summary.scores:
        second.add_row(
            str(score.rank),
            str(score.calls),
            f"{score.straggles_s:.3f} s",
            f"{100 * score.straggles:.1f} %",
            f"{100 * score.waits:.1f} %",
        )
    return [first, second]


def as_json(summary: Summary) -> dict[str, Any]:
    """Return the summary as JSON-serialisable data."""
    return {
        "calls": [line._asdict() for line in summary.lines],
        "ranks": [one._asdict() for one in summary.scores],
        "left_out": summary.left_out,
    }
