"""How much memory this machine has, and whether arrays fit into it."""

from __future__ import annotations

import os
from pathlib import Path

LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")


def total() -> int:
    """Bytes of memory and swap for all processes here: the machine's, or its control group's where that is less."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = number_in("/sys/fs/cgroup/memory.max")
    return min(found, found if limit is None else limit) + _swap()


def ranks_here() -> int:
    """Ranks of the job on this machine, as the launcher says; 1 where there is none or it does not say."""
    return next((int(os.environ[name]) for name in LOCAL_SIZES if name in os.environ), 1)


def check(words: str, nbytes: int, arrays: int, ranks: int = 1) -> None:
    """ValueError where `ranks` ranks of this machine cannot each hold so many arrays of `nbytes`; `words` asked for."""
    needed, held = nbytes * arrays * ranks, total()
    if needed > held:
        each = f"{arrays} array{'s' * (arrays > 1)} of {nbytes:,} bytes"
        whose = f" on each of {ranks} ranks" if ranks > 1 else ""
        raise ValueError(
            f"{words} takes at least {each}{whose}, {needed / 2**30:,.1f} GiB, and this machine has "
            f"{held / 2**30:,.1f} GiB of memory: ask for less"
        )


def number_in(path: str) -> int | None:
    """The whole number in a file of the kernel; None where there is no such file, or no limit in it."""
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _swap() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("SwapTotal:")), 0)
