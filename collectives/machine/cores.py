"""How many cores this process may use: by its affinity, and by the CPU quotas of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class Quota(NamedTuple):
    """The whole cores that a control group allows all its processes together, and which group that is."""

    cores: int
    group: int


def usable(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use: those of its affinity, or of its quota if they are less."""
    found = quota(root)
    return bounded(len(os.sched_getaffinity(0)), [found] if found else [])


def bounded(cores: int, quotas: Sequence[Quota | None]) -> int:
    """Return how many of `cores` the processes with these quotas may use together; a process without one has no bound.

    Processes of one group share its quota.
    """
    known = [quota for quota in quotas if quota]
    if not known or len(known) < len(quotas):
        return cores
    return min(cores, sum({quota.group: quota.cores for quota in known}.values()))


def quota(root: Path = ROOT) -> Quota | None:
    """Return the smallest quota of this process' control groups and their parents; None where there is none.

    Quotas are rounded down, but for less than one core. Ranks that wait keep looking: those on a part of a core use the
    quota up, and then the kernel stops all ranks of the group until the next period.
    """
    found = []
    for folder in _groups(root):
        with suppress(OSError, ValueError, ZeroDivisionError):
            spent, period = _figures(folder)
            if spent > 0:
                found.append(Quota(max(1, spent // period), folder.stat().st_ino))
    return min(found, default=None)


def _figures(folder: Path) -> tuple[int, int]:
    """Microseconds of processor time in a period, by cgroups v2 or v1; -1 or ValueError where there is no bound."""
    if (folder / "cpu.max").exists():
        spent, period = (folder / "cpu.max").read_text().split()
        return int(spent), int(period)
    return int((folder / "cpu.cfs_quota_us").read_text()), int((folder / "cpu.cfs_period_us").read_text())


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process' control groups that may bound its cores, and of their parents."""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines if line)}
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            kind, _, options = (after.split(" ", 2) + ["", ""])[:3]
            mounted, point = before.split(" ")[3:5]
            for controllers, path in paths.items():
                version_1 = kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(",")
                if version_1 or (kind == "cgroup2" and not controllers):
                    yield from _upwards(root / point.lstrip("/").replace("\\040", " "), mounted, path)


def _upwards(top: Path, mounted: str, path: str) -> Iterator[Path]:
    """Yield the group's folder and its parents up to `top`, where the group `mounted` is; `top` where it is outside."""
    group = PurePosixPath(path)
    inside = group.relative_to(mounted) if group.is_relative_to(mounted) and ".." not in group.parts else None
    folder = top / inside if inside else top
    yield folder
    while folder != top:
        folder = folder.parent
        yield folder
