"""Check that the bars and arrows of a timeline are consistent."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

# Kinds of bars that an arrow connects, in their order. If a pull begins after the sum, it has no bar "receive".
WAYS = [[push, "sum", read] for push, read in (("push", "receive"), ("push", "pull"), ("pushpull", "receive"))]


def read_flows(trace: dict[str, Any]) -> list[list[str]]:
    """Check a trace, and return the kinds of bars that each arrow connects.

    Bars of a row must not cross. Each arrow must go from bar to bar, forward in time up to the error of the clocks.
    """
    rows, arrows = defaultdict(list), defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["cat"]))
        elif event["ph"] in "stf":
            arrows[event["id"]].append(event)
    for bars in rows.values():
        open_ends: list[float] = []
        for begin, end, _ in sorted(bars, key=lambda bar: (bar[0], -bar[1])):
            while open_ends and open_ends[-1] <= begin + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)
    slack = 1e-3 + trace["otherData"]["clock_error_ns"] / 1e3
    joined = []
    for events in arrows.values():
        assert [event["ph"] for event in events] == ["s", *"t" * (len(events) - 2), "f"]
        bars = []
        for event in events:
            at, row = event["ts"], rows[event["pid"], event["tid"]]
            around = [bar for bar in row if bar[0] - 1e-3 <= at <= bar[1] + 1e-3 and bar[2] != "compute"]
            bars.append(min(around, key=lambda bar: bar[1] - bar[0]))
        assert bars[0][0] <= bars[1][0] + slack, "the sum has begun before its push"
        assert bars[1][0] <= bars[-1][0] + slack, "what was read was not summed yet"
        joined.append([bar[2] for bar in bars])
    return joined
