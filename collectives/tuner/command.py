"""`mpips tune --ranks P`, or `mpirun -n P python -m collectives.tuner.command`: measure what `auto` picks.

On one node: up to which size vectors should pass through slots (eager), and how long each way through shared memory
takes. Between nodes: which algorithm is fastest, for every kind and size. Both: what a message costs (alpha, beta) and
an addition (gamma). The results join those of other numbers of ranks in the user's table (`collectives.tuner.table`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import click
import msgspec
import numpy as np
from mpi4py import MPI
from rich.table import Table as Listing

from collectives.benchmark.harness import measure
from collectives.errors import CollectiveError
from collectives.node import arena
from collectives.plan import Plan, plan
from collectives.schedule import catalog
from collectives.schedule.model import KINDS, cut
from collectives.session import Session, session
from collectives.simulator import cost
from collectives.terminal.console import RankedCommand, Seconds, console, progress
from collectives.transport.desks import SLOT_BYTES
from collectives.tuner import table
from collectives.tuner.table import EVERYTHING, Eager, Line, Range, Table

EAGER_SIZES = tuple(1 << e for e in range(11, 18))
MEMORY_SIZES = tuple(1 << e for e in range(16, 25, 2))
BETWEEN_SIZES = tuple(1 << e for e in range(6, 25, 3))
CLEARLY = 0.97  # a change must win by more than noise


def check(ranks: int, *, dry_run: bool, **_: Any) -> None:
    """click.ClickException, before anything is measured, where the result could not be kept."""
    if not dry_run:
        with _told():
            table.see_writable()


@click.command(cls=RankedCommand)
@click.option("--seconds", default=0.3, type=Seconds(), show_default=True, help="time to spend on each size")
@click.option("--dry-run", is_flag=True, help="show the table, but do not keep it")
def command(seconds: float, dry_run: bool) -> None:
    """Measure, and keep the result for `auto` in the user's cache folder.

    Start the ranks with `mpips tune --ranks P` or with mpirun.
    """
    comm = MPI.COMM_WORLD
    with _told():
        found = table.shared(comm, lambda: _known(dry_run))
    home = session(comm, found)
    if comm.size > 1:
        with progress("tune", 3 if home.nodes == 1 else 1 + len(KINDS), comm.rank == 0) as done:
            found = tuned(home, comm, seconds, done)
    if comm.rank == 0:
        _show(found, comm.size, home.nodes)
        with _told():
            click.echo("not kept" if dry_run else f"kept in {table.save(found)}")


@contextmanager
def _told() -> Iterator[None]:
    """What cannot be done ends the command in one sentence."""
    try:
        yield
    except CollectiveError as error:
        raise click.ClickException(str(error)) from None


def _known(dry_run: bool) -> Table:
    """The table to go on from: the shipped one where the user's is spoilt. CollectiveError where it cannot be kept."""
    if not dry_run:
        table.see_writable()
    try:
        return table.load()
    except CollectiveError as error:
        click.echo(f"note: {table.path()} is spoilt ({error.__cause__}); starting from the shipped table", err=True)
        return Table()


def tuned(home: Session, comm: MPI.Comm, seconds: float, done: Callable[[str], None] = lambda what: None) -> Table:
    """The session's table with this number of ranks measured anew; `done` hears of parts. Collective, blocking."""
    found = home.table
    changes: dict[str, Any] = {"gamma": _gamma()}
    if home.nodes == 1:
        changes["eager"] = {**found.eager, comm.size: _eager(home, comm, seconds)}
        home.table = msgspec.structs.replace(found, eager=changes["eager"])
        done("slots")
        changes["memory"] = {**found.memory, **_memory(home, comm, seconds)}
        done("memory")
        changes["near"] = _message(comm, 1, seconds)
    else:
        other = next(rank for rank, node in enumerate(home.node_of) if node != home.node_of[0])
        changes["far"] = _message(comm, other, seconds)
        done("messages")
        changes["between"] = {**found.between, **_between(home, comm, seconds, done)}
    return msgspec.structs.replace(found, **changes)


def _eager(home: Session, comm: MPI.Comm, seconds: float) -> Eager:
    """The largest sizes at which slots beat what comes after: direct for node-shared arrays, staged for ordinary."""
    direct = _largest(home, comm, seconds, _shared_zeros)
    return Eager(direct, max(direct, _largest(home, comm, seconds, np.zeros)))


def _largest(home: Session, comm: MPI.Comm, seconds: float, make: Callable[[int, Any], Any]) -> int:
    """The largest size at which slots win, going up until they have lost twice in a row."""
    best = losses = 0
    for size in EAGER_SIZES:
        plans = []
        for limit in (SLOT_BYTES, 0):
            home.table = msgspec.structs.replace(home.table, eager={comm.size: Eager(limit, limit)})
            plans.append(plan("allreduce", make(size // 4, np.float32), comm))
        slots, other = _medians(comm, plans, seconds)
        best, losses = (size, 0) if slots <= other * CLEARLY else (best, losses + 1)
        if losses == 2:
            break
    return best


def _memory(home: Session, comm: MPI.Comm, seconds: float) -> dict[str, Line]:
    """Lines through the measured times of an allreduce by each protocol."""
    lines = {}
    limits = home.table.eager[comm.size]
    for protocol, sizes, make in (
        ("eager", [size for size in (8, *EAGER_SIZES) if size <= limits.ordinary], np.zeros),
        ("staged", [size for size in MEMORY_SIZES if size > limits.ordinary], np.zeros),
        ("direct", [size for size in MEMORY_SIZES if size > limits.always], _shared_zeros),
    ):
        if len(sizes) > 1:
            plans = [plan("allreduce", make(size // 4, np.float32), comm) for size in sizes]
            times = [_medians(comm, [made], seconds)[0] for made in plans]
            lines[f"{protocol} {comm.size}"] = Line(*cost.fit(list(zip(sizes, times))))
    return lines


def _shared_zeros(n: int, dtype: Any) -> Any:
    x = arena.empty(n, dtype)
    x[:] = 0
    return x


def _between(
    home: Session, comm: MPI.Comm, seconds: float, done: Callable[[str], None]
) -> dict[str, tuple[Range, ...]]:
    """The fastest algorithm of every kind for each size; neighbouring sizes with one answer make one range."""
    found = {}
    for kind in KINDS:
        winners = []
        names = [name for name in catalog.names(kind) if catalog.serves(kind, name, comm.size) is None]
        if kind == "allreduce" and home.across is not None and "hierarchical" not in names:
            names.append("hierarchical")
        for size in BETWEEN_SIZES:
            plans = [_plan(kind, size // 4 // comm.size * comm.size, comm, name) for name in names]
            times = _medians(comm, plans, seconds)
            winners.append((size, names[int(np.argmin(times))]))
            for made in plans:
                made.free()
        found[f"{kind} {home.nodes}x{comm.size}"] = ranges(winners)
        done(kind)
    return found


def ranges(winners: Sequence[tuple[int, str]]) -> tuple[Range, ...]:
    """Ranges from (size, best algorithm), sizes ascending: between two sizes the change is at their geometric mean."""
    found = []
    for (size, name), (following, other) in pairwise(winners):
        if name != other:
            found.append(Range(int((size * following) ** 0.5), name))
    return (*found, Range(EVERYTHING, winners[-1][1]))


def _plan(kind: str, n: int, comm: MPI.Comm, algorithm: str) -> Plan:
    if kind in ("reduce_scatter", "allgather"):
        own = int(cut(n, comm.size, comm.rank + 1)) - int(cut(n, comm.size, comm.rank))
        sizes = (n, own) if kind == "reduce_scatter" else (own, n)
        x, out = (np.zeros(size, np.float32) for size in sizes)
        return plan(kind, x, comm, algorithm=algorithm, out=out)
    return plan(kind, np.zeros(n, np.float32), comm, algorithm=algorithm)


def _medians(comm: MPI.Comm, runs: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    return [timing.median for timing in measure(comm, runs, seconds)]


def _message(comm: MPI.Comm, other: int, seconds: float) -> Line:
    """alpha and beta from a ping-pong of ranks 0 and `other`."""
    points = []
    for size in (8, 1 << 12, 1 << 16, 1 << 20, 1 << 22):
        raw = np.zeros(size, np.uint8)

        def there_and_back(raw: Any = raw) -> None:
            if comm.rank == 0:
                comm.Send(raw, other)
                comm.Recv(raw, other)
            elif comm.rank == other:
                comm.Recv(raw, 0)
                comm.Send(raw, 0)

        points.append((size, _medians(comm, [there_and_back], seconds)[0] / 2))
    return Line(*cost.fit(points))


def _gamma() -> float:
    """Seconds to add a byte, of arrays that fit the cache and are added again and again."""
    x, y = np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.float32)
    return measure(MPI.COMM_SELF, [lambda: np.add(x, y, x)], 0.05)[0].median / x.nbytes


def _show(found: Table, ranks: int, nodes: int) -> None:
    listing = Listing(title=f"measured with {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}")
    listing.add_column("what")
    listing.add_column("result")
    if nodes == 1:
        limits = found.eager_limits(ranks, crowded=False)
        listing.add_row("eager up to", f"{limits.always} bytes, ordinary arrays {limits.ordinary}")
        for key, line in found.memory.items():
            if key.endswith(f" {ranks}"):
                listing.add_row(f"allreduce, {key.split()[0]}", _line(line))
        listing.add_row("message inside a node", _line(found.near))
    else:
        for key, entries in found.between.items():
            if key.endswith(f" {nodes}x{ranks}"):
                words = [
                    f"{entry.algorithm} to {entry.most} bytes" if entry.most < EVERYTHING else entry.algorithm
                    for entry in entries
                ]
                listing.add_row(key.split()[0], ", ".join(words))
        listing.add_row("message between nodes", _line(found.far))
    listing.add_row("addition", f"{1e-9 / found.gamma:.1f} GB/s")
    console().print(listing)


def _line(line: Line) -> str:
    speed = f"{1e-9 / line.beta:.2f} GB/s" if line.beta else "-"
    return f"{line.alpha * 1e6:.1f} us + bytes at {speed}"


if __name__ == "__main__":
    command()
