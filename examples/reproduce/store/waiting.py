"""What the communication thread costs while messages are waited for.

    python -m examples.reproduce.store.waiting [--seconds 2] [--repeats 3]

One process; the message never comes (a receive from itself that nobody sends) until the time is over. CPU time of the
whole process over elapsed time, the training thread asleep, in `Handle.wait`, or without anything under way.
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
from collectives.terminal import Interruptible, show_table
from mpips import Options
from mpips.store import roles
from mpips.store.runtime.engine import Engine
from mpips.store.runtime.generation import Generation

LIMIT = 0.05  # of a core


def receives(count: int, gate: threading.Event) -> Task[None]:
    """Look at `count` receives until the gate opens."""
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
    """CPU seconds a second with `count` receives under way; `inside`: the training thread waits for them."""
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
    for name, case in CASES.items():
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
