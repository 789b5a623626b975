"""Measures the CPU time that a process takes while it waits for messages.

    python -m examples.reproduce.store.waiting [--seconds 2] [--repeats 3]

There is one process, which waits for a message that is never sent (a receive from itself), until the time is over. The
result is the CPU time of the whole process over the elapsed time. The training thread sleeps meanwhile, or waits in
`Handle.wait`. For comparison it is also measured with no message under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

from collectives.fabric.tasks import Task
from collectives.terminal import Interruptible, show_progress, show_table
from mpips import Options
from mpips.store import roles
from mpips.store.runtime.engine import Engine
from mpips.store.runtime.generation import Generation

# share of a core that waiting may take
LIMIT = 0.05


def receives(count: int, gate: threading.Event) -> Task[None]:
    """Test `count` receives until the gate opens."""
    comm = MPI.COMM_SELF
    requests = [comm.Irecv(np.empty(1), 0, tag) for tag in range(count)]
    while not gate.is_set():
        for request in requests:
            request.Test()
        yield False
    for request in requests:
        request.Cancel()
        request.Wait()


def share(engine: Engine, count: int, seconds: float, inside: bool) -> float:
    """Return the CPU seconds that the process takes in a second, with `count` receives under way.

    `inside`: the training thread waits in `Handle.wait`; otherwise it sleeps.
    """
    gate = threading.Event()
    handle = engine.submit([], receives(count, gate), 0, "receive") if count else None
    timer = threading.Timer(seconds, gate.set)
    begin, cpu = time.perf_counter(), time.process_time()
    timer.start()
    if inside and handle is not None:
        handle.wait()
    else:
        timer.join()
    found = (time.process_time() - cpu) / (time.perf_counter() - begin)
    if handle is not None:
        handle.wait()
    timer.join()
    return found


CASES: dict[str, Callable[[Engine, float], float]] = {
    "nothing under way": lambda engine, seconds: share(engine, 0, seconds, False),
    "1 receive, training thread asleep": lambda engine, seconds: share(engine, 1, seconds, False),
    "12 receives, training thread asleep": lambda engine, seconds: share(engine, 12, seconds, False),
    "1 receive, training thread in wait()": lambda engine, seconds: share(engine, 1, seconds, True),
    "12 receives, training thread in wait()": lambda engine, seconds: share(engine, 12, seconds, True),
}


@click.command(cls=Interruptible)
@click.option("--seconds", default=2.0, show_default=True, help="Of every wait.")
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True, help="The median counts.")
def command(seconds: float, repeats: int) -> None:
    """CPU of a process that waits for messages, as a share of one core."""
    generation = Generation(roles.create(MPI.COMM_WORLD, "mpi_sync", Options()))
    engine, late = Engine(generation), 0
    table = Table("while", "share of a core", f"under {LIMIT:.0%}")
    with show_progress("waits", len(CASES)) as begin:
        for name, case in CASES.items():
            begin(name)
            found = float(np.median([case(engine, seconds) for _ in range(repeats)]))
            late += found >= LIMIT
            table.add_row(name, f"{found:.2%}", "yes" if found < LIMIT else "no")
    engine.close()
    generation.close()
    show_table(table)
    if late:
        raise SystemExit(1)


if __name__ == "__main__":
    command()
