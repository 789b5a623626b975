"""The table at the end of a job: each operation by size, how often, how long, how fast, and who made others wait.

Of a call that all make together the shortest time of a rank is communication, as that rank came last; what the others
took more is waiting, for it. A push waits for nobody: who pushes late makes others wait in their pulls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from mpips.collectives.recorder.ring import Record
from mpips.collectives.recorder.tracing import RankTrace
from mpips.collectives.schedule.model import BUS_FACTOR
from mpips.collectives.terminal import show_bytes
from mpips.launch.observe.timeline import STEP, SUMS, count_calls


class CallSummary(NamedTuple):
    """An operation of one size, or of one table, over all ranks. `share`: of the time between first call and last, of a
    rank that makes it. `busbw_GBps`: of the calls without the waiting; 0 where nothing is moved, or nothing is known of
    it."""

    operation: str
    nbytes: int
    calls: int
    mean_us: float
    waiting_us: float
    busbw_GBps: float
    share: float


class RankSummary(NamedTuple):
    """Say how long one rank made each other one wait, in seconds and as a share of the time, and its own waiting."""

    rank: int
    calls: int
    straggles_s: float
    straggles: float
    waits: float


class Summary(NamedTuple):
    """All of it. `left_out`: calls that are not in it, as newer ones have replaced their records."""

    lines: list[CallSummary]
    scores: list[RankSummary]
    left_out: int


def summarize(traces: Sequence[RankTrace]) -> Summary:
    """Return the summary of a job."""
    seconds: dict[int, float] = {}
    together: dict[tuple[Any, ...], list[tuple[int, Record]]] = defaultdict(list)
    by_size: dict[tuple[str, int], list[tuple[int, Record]]] = defaultdict(list)
    for one in traces:
        ended = [record for record in one.records if record.ended_ns and record.operation != STEP]
        if ended:
            spent = max(record.ended_ns for record in ended) - min(record.begun_ns for record in ended)
            seconds[one.rank] = seconds.get(one.rank, 0.0) + spent / 1e9
        for record in ended:
            kind = record.operation, record.nbytes
            if record.subject.startswith("table "):  # its calls are of any size
                kind = f"{record.operation} of {record.subject}", 0
            by_size[kind].append((one.rank, record))
            if (record.number or record.round) and record.operation not in (*SUMS, "push"):
                key = (record.lane, record.operation, record.subject, record.number, record.round)
                together[key].append((one.rank, record))
    least: dict[int, float] = {}
    made_wait: dict[int, float] = defaultdict(float)
    waited: dict[int, float] = defaultdict(float)
    for calls in together.values():
        ranks = {rank for rank, _ in calls}
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


def _took(record: Record) -> float:
    return (record.ended_ns - record.begun_ns) / 1e9


def _line(
    operation: str,
    nbytes: int,
    calls: Sequence[tuple[int, Record]],
    least: dict[int, float],
    together: dict[tuple[Any, ...], list[tuple[int, Record]]],
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
    """Return the summary for people."""
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
    """Return the summary as data."""
    return {
        "calls": [line._asdict() for line in summary.lines],
        "ranks": [one._asdict() for one in summary.scores],
        "left_out": summary.left_out,
    }
