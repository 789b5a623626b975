"""The summary of a job's traces tells who waited for whom."""

from __future__ import annotations

import pytest

from collectives.recorder.ring import CallRecord
from collectives.recorder.tracing import RankTrace
from launch.observe.summary import summarize

RANKS, CALLS, MS = 3, 5, 1_000_000


def allreduce(number: int, begun_ms: int, ended_ms: int) -> CallRecord:
    times = begun_ms * MS, begun_ms * MS, ended_ms * MS
    return CallRecord(number, number, 0, *times, 1, 1, 4000, 1000, -1, "allreduce", "float32", "", "")


def test_the_rank_that_comes_last_makes_the_others_wait() -> None:
    """Rank 1 comes 20 ms after the others to each call, and 10 ms later the call ends."""
    begun = {rank: 20 * (rank == 1) for rank in range(RANKS)}
    calls = [100 * number for number in range(1, CALLS + 1)]
    traces = [
        RankTrace({"rank": rank}, [allreduce(at // 100, at + begun[rank], at + 30) for at in calls], 0)
        for rank in range(RANKS)
    ]
    summary = summarize(traces)
    assert [(score.rank, score.calls) for score in summary.scores] == [(rank, CALLS) for rank in range(RANKS)]
    assert [score.straggles_s for score in summary.scores] == pytest.approx([0, CALLS * 0.02, 0])
    # From its first to its last call rank 1 takes 410 ms, and each other rank 430 ms.
    assert [score.straggles for score in summary.scores] == pytest.approx([0, 100 / 410, 0])
    assert [score.waits for score in summary.scores] == pytest.approx([100 / 430, 0, 100 / 430])
    (line,) = summary.lines
    assert (line.operation, line.nbytes, line.calls) == ("allreduce", 4000, RANKS * CALLS)
    assert line.mean_us == pytest.approx(70_000 / 3) and line.waiting_us == pytest.approx(40_000 / 3)
    # An allreduce of n bytes moves 4/3 n between 3 ranks, here in the 10 ms that are no waiting.
    assert line.busbw_GBps == pytest.approx(4000 * 4 / 3 / 0.01 / 1e9)
