"""How idle the cores of this machine were."""

from __future__ import annotations

from pathlib import Path


def processor() -> tuple[int, int]:
    """(idle, all) ticks of the machine's cores so far."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return ticks[3] + ticks[4], sum(ticks)
