"""Summarize a job: the calls of each operation and size, their time and speed, and which ranks made others wait.

Several ranks make a collective call together. The rank that begins the call last takes the shortest time for it, and
this time counts as communication. The other ranks take longer, and the difference counts as waiting for the last rank.
A push never waits. If a rank pushes late, other ranks wait in their pulls.
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
    """A line of the summary: the calls of one operation with one size, or on one embedding table, on all ranks."""

    operation: str
    # the size of a call in bytes; for an embedding table, the mean size of its calls
    nbytes: int
    # number of calls
    calls: int
    # the mean time of a call
    mean_us: float
    # the part of the mean time that was spent waiting for other ranks
    waiting_us: float
    # the bus bandwidth, computed without the time spent waiting; 0 if the calls move no bytes
    busbw_GBps: float
    # The time of these calls as a share of the whole time of the ranks that make them. The whole time of a rank is from
    # its first to its last call.
    share: float


class RankSummary(NamedTuple):
    """How much a rank makes others wait, and how much it waits itself.

    A share is a part of the rank's whole time, from its first to its last call.
    """

    rank: int
    # number of calls of this rank
    calls: int
    # seconds that each other rank has waited for this rank, on average
    straggles_s: float
    # `straggles_s` as a share of the rank's whole time
    straggles: float
    # the share of the rank's time in which the rank itself has waited
    waits: float


class Summary(NamedTuple):
    # the kinds of calls, the largest share first
    lines: list[CallSummary]
    # the ranks, in the order of their numbers
    scores: list[RankSummary]
    # the number of calls that are missing because their records were overwritten by later records
    left_out: int


def summarize(traces: Sequence[RankTrace]) -> Summary:
    """Summarize what the ranks of a job have recorded."""
    # rank -> seconds from the beginning of its first call to the end of its last call
    seconds: dict[int, float] = {}
    # A call that several ranks make together -> (rank, record) for each of these ranks. The key that identifies such a
    # call is (communicator or store, operation, subject, number, round).
    together: dict[tuple[Any, ...], list[tuple[int, CallRecord]]] = defaultdict(list)
    # A line of the summary -> (rank, record) for each of its calls. The key is (operation, size).
    by_size: dict[tuple[str, int], list[tuple[int, CallRecord]]] = defaultdict(list)
    for trace in traces:
        ended = [record for record in trace.records if record.ended_ns and record.operation != STEP]
        if ended:
            spent = max(record.ended_ns for record in ended) - min(record.begun_ns for record in ended)
            seconds[trace.rank] = seconds.get(trace.rank, 0.0) + spent / 1e9
        for record in ended:
            kind = record.operation, record.nbytes
            # The calls of an embedding table have many sizes, so put all its calls into one line.
            if record.subject.startswith("table "):
                kind = f"{record.operation} of {record.subject}", 0
            by_size[kind].append((trace.rank, record))
            if (record.number or record.round) and record.operation not in (*SUMS, "push"):
                key = (record.lane, record.operation, record.subject, record.number, record.round)
                together[key].append((trace.rank, record))
    # id of a record -> the shortest time that any rank took for the record's call
    least: dict[int, float] = {}
    # rank -> seconds that each other rank has waited for this rank, on average
    made_wait: dict[int, float] = defaultdict(float)
    # rank -> seconds that this rank has waited for others
    waited: dict[int, float] = defaultdict(float)
    for calls in together.values():
        ranks = {rank for rank, _ in calls}
        # Skip a call that only one rank has made. Also skip it if a rank has made it twice, because it is then unknown
        # which records belong together.
        if len(ranks) < 2 or len(ranks) < len(calls):
            continue
        shortest, last = min((_took(record), rank) for rank, record in calls)
        for rank, record in calls:
            least[id(record)] = shortest
            waited[rank] += _took(record) - shortest
            made_wait[last] += (_took(record) - shortest) / (len(calls) - 1)
    lines = [_summarize_calls(*key, calls, least, together, seconds) for key, calls in by_size.items()]
    scores = [
        RankSummary(
            rank,
            sum(count_calls(trace) for trace in traces if trace.rank == rank),
            made_wait[rank],
            made_wait[rank] / seconds[rank] if seconds[rank] else 0.0,
            waited[rank] / seconds[rank] if seconds[rank] else 0.0,
        )
        for rank in sorted(seconds)
    ]
    lines.sort(key=lambda line: -line.share)
    return Summary(lines, scores, sum(trace.overwritten for trace in traces))


def _took(record: CallRecord) -> float:
    return (record.ended_ns - record.begun_ns) / 1e9


def _summarize_calls(
    operation: str,
    nbytes: int,
    calls: Sequence[tuple[int, CallRecord]],
    least: dict[int, float],
    together: dict[tuple[Any, ...], list[tuple[int, CallRecord]]],
    seconds: dict[int, float],
) -> CallSummary:
    """Make a line of the summary.

    Args:
        operation: The operation.
        nbytes: The size of the calls, or 0 for calls of many sizes.
        calls: (rank, record) for each call.
        least: Id of a record -> the shortest time that any rank took for the record's call.
        together: The calls that several ranks made together, as in `summarize`.
        seconds: Rank -> seconds from its first to its last call.
    """
    took = [_took(record) for _, record in calls]
    # the times of the calls, without the time spent waiting for other ranks
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
    """Return the summary as two tables for the terminal: one of calls, and one of ranks."""
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
    """Return the summary as data that can be written as JSON."""
    return {
        "calls": [line._asdict() for line in summary.lines],
        "ranks": [score._asdict() for score in summary.scores],
        "left_out": summary.left_out,
    }
