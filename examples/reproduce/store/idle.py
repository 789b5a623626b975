"""Measures the CPU time that a server takes while no worker asks it anything.

    mpirun -n 2 python -m examples.reproduce.store.idle [--seconds 3]

The last rank is the server, the others are workers. They use the store and then sleep, and rank 0 reads the CPU time
that the server's process took meanwhile (/proc/PID/stat). This is done with shared memory, and with messages as between
nodes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

import mpips
from collectives.terminal import RankedCommand, show_progress, show_table

# share of a core that an idle server may take
LIMIT = 0.05
# pushpulls during which the server counts as used
USES = 2000
# seconds after the last use from which the server counts as idle
MOMENT = 0.5


def cpu(pid: int) -> float:
    """Return the CPU seconds, user and system, that a process of this machine has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(pid: int, shared_memory: bool, seconds: float) -> tuple[float, float] | None:
    """Return the CPU seconds that the server process `pid` takes in a second: while used, and while idle.

    Return None on the server itself.
    """
    try:
        kv = mpips.create("dist_sync", servers=1, shared_memory=shared_memory)
    except SystemExit:
        return None
    array = np.ones(1000, np.float32)
    kv.init("w", array)
    found = []
    for idle in (False, True):
        if idle:
            time.sleep(MOMENT)
        begin, before = time.perf_counter(), cpu(pid)
        if idle:
            time.sleep(seconds)
        else:
            for _ in range(USES):
                kv.pushpull("w", array)
        found.append((cpu(pid) - before) / (time.perf_counter() - begin))
    kv.close()
    return found[0], found[1]


@click.command(cls=RankedCommand)
@click.option("--seconds", default=3.0, show_default=True, help="Of idling.")
def command(seconds: float) -> None:
    """CPU of a server that nobody asks anything, as a share of one core; 2 or more ranks of one machine."""
    world = MPI.COMM_WORLD
    if world.size < 2:
        raise click.UsageError("one process: start it as `mpirun -n 2 python -m examples.reproduce.store.idle`")
    pids = np.empty(world.size, np.int64)
    world.Allgather(np.array([os.getpid()], np.int64), pids)
    table, late = Table("lines", "share of a core, used", "idle", f"under {LIMIT:.0%}"), 0
    with show_progress("lines", 2, world.rank == 0) as begin:
        for name, shared_memory in (("shared memory", True), ("messages", False)):
            begin(name)
            found = share(int(pids[-1]), shared_memory, seconds)
            if found is not None:
                late += found[1] >= LIMIT
                table.add_row(name, f"{found[0]:.0%}", f"{found[1]:.2%}", "yes" if found[1] < LIMIT else "no")
    if world.rank == 0:
        show_table(table)
        if late:
            raise SystemExit(1)


if __name__ == "__main__":
    command()
