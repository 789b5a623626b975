"""How idle the cores of this machine were."""

from __future__ import annotations

from pathlib import Path

Ticks = tuple[int, int]


def processor() -> Ticks:
    """(idle, all) ticks of the machine's cores so far."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks)


def idle_share(before: Ticks, after: Ticks) -> float:
    """The share of the cores that was idle between two answers of `processor`."""
    return (after[0] - before[0]) / max(1, after[1] - before[1])
