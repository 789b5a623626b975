"""The share of this machine's cores that was idle."""

from __future__ import annotations

from pathlib import Path

# (idle, all)
Ticks = tuple[int, int]


def processor() -> Ticks:
    """Return the (idle, all) ticks of the machine's cores since it started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks)


def idle_share(before: Ticks, after: Ticks) -> float:
    """Return the share of the cores that was idle between two results of `processor`."""
    return (after[0] - before[0]) / max(1, after[1] - before[1])
