"""`mpips tune`: measures the fastest ways to run calls on this machine, and writes the table that `auto` reads.

    mpips tune --ranks P        or: mpirun -n P python -m collectives.tuner.tune

A *way* is how a call on one node moves its data, such as through slots (`collectives.tuner.table`). On one node the
command measures three things: the size up to which vectors should pass through slots, the size from which on the kernel
should copy ordinary arrays between processes (process_vm_readv), and the time of each way. Between nodes it measures
the fastest algorithm for every kind and size. On one node and between nodes it measures the cost of a message (alpha,
beta) and of an addition (gamma). The results are added to the user's table, which may have results for other numbers of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import click
import msgspec
import numpy as np
from mpi4py import MPI
from rich.table import Table

from mpips.collectives.benchmark.harness import measure, measure_costs, ping_pong
from mpips.collectives.communicator import communicator
from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric.arena import empty
from mpips.collectives.plan import Plan
from mpips.collectives.plan import plan as compiled
from mpips.collectives.schedule import catalog
from mpips.collectives.schedule.catalog import check_algorithm
from mpips.collectives.schedule.model import KINDS, cut
from mpips.collectives.simulator.cost import fit
from mpips.collectives.terminal import RankedCommand, Seconds, console, show_progress
from mpips.collectives.tuner import table
from mpips.collectives.tuner.table import EVERYTHING, LinearCost, Range, Slots, TuningTable

SLOT_SIZES = tuple(1 << e for e in range(11, 18))
CROSS_SIZES = tuple(1 << e for e in range(24, 15, -1))
LINE_SIZES = tuple(1 << e for e in range(16, 25, 2))
BETWEEN_SIZES = tuple(1 << e for e in range(6, 25, 3))
# Slots are chosen only if they take at most this share of the time that stages take, so that noise does not decide.
SLOTS_WIN = 0.97
# The kernel's copies are chosen if they take at most this many times as long as stages. In a benchmark, a call through
# stages finds the arrays in the cache. In a program that computes between its calls, the arrays would not be in the
# cache.
COPIES_WIN = 1.5

Begin = Callable[[str], None]


def dup_with_table(comm: MPI.Comm, known: TuningTable) -> MPI.Comm:
    """Duplicate a communicator, so that calls on the new one use the given table. Collective and blocking."""
    duplicate = comm.Dup()
    communicator(duplicate, known_table=known)
    return duplicate


def check(ranks: int, *, dry_run: bool, **_: Any) -> None:
    """Raise click.ClickException, before anything is measured, if the result could not be saved."""
    if not dry_run:
        with _errors_as_sentences():
            table.check_writable()


@click.command(cls=RankedCommand)
@click.option("--seconds", default=0.3, type=Seconds(), show_default=True, help="Time to spend on each size.")
@click.option("--dry-run", is_flag=True, help="Show the table, but do not keep it.")
def command(seconds: float, dry_run: bool) -> None:
    """Measure, and keep the result for `auto` in the user's cache folder.

    Start the ranks with `mpips tune --ranks P` or with mpirun.
    """
    comm = MPI.COMM_WORLD
    with _errors_as_sentences():
        result = table.broadcast_table(comm, lambda: _starting_table(dry_run))
    home = dup_with_table(comm, result)
    nodes = len(set(communicator(home).node_of))
    if comm.size > 1:
        with show_progress("tune", 4 if nodes == 1 else 1 + len(KINDS), comm.rank == 0) as begin:
            result = measure_table(home, result, seconds, begin)
    if comm.rank == 0:
        _show(result, comm.size, nodes)
        with _errors_as_sentences():
            click.echo("not kept" if dry_run else f"kept in {table.save(result)}")


@contextmanager
def _errors_as_sentences() -> Iterator[None]:
    """A context that turns CollectiveError into a click.ClickException, so that no traceback is printed."""
    try:
        yield
    except CollectiveError as error:
        raise click.ClickException(str(error)) from None


def _starting_table(dry_run: bool) -> TuningTable:
    """Return the table to start from: the user's table, or the shipped table if the user's file is damaged.

    Raises:
        CollectiveError: The new table must be saved, but cannot be saved.
    """
    if not dry_run:
        table.check_writable()
    try:
        return table.load(check_algorithm)
    except CollectiveError as error:
        click.echo(f"note: {table.path()} is damaged ({error.__cause__}); starting from the shipped table", err=True)
        return TuningTable()


def measure_table(comm: MPI.Comm, known: TuningTable, seconds: float, begin: Begin = lambda what: None) -> TuningTable:
    """Measure, and return the known table with new results for this number of ranks. Collective and blocking.

    Args:
        comm: The ranks to measure with.
        known: The table to which the new results are added.
        seconds: The time to spend on each size.
        begin: Called with the name of each part when it begins.
    """
    # rank -> the lowest rank of its node
    node_of = communicator(comm).node_of
    # These arrays are small enough to stay in the cache while they are added again and again.
    x, y = np.zeros(1 << 16, np.float32), np.zeros(1 << 16, np.float32)
    changes: dict[str, Any] = {"gamma": measure(MPI.COMM_SELF, [lambda: np.add(x, y, x)], 0.05)[0].median / x.nbytes}
    if len(set(node_of)) == 1:
        slots, cross_memory, lines = _on_one_node(comm, seconds, begin)
        changes["slots"] = {**known.slots, comm.size: slots}
        changes["cross_memory"] = {**known.cross_memory, comm.size: cross_memory}
        changes["memory"] = {**known.memory, **lines}
        begin("messages")
        changes["near"] = _measure_message(comm, 1, seconds)
    else:
        other = next(rank for rank, node in enumerate(node_of) if node != node_of[0])
        begin("messages")
        changes["far"] = _measure_message(comm, other, seconds)
        changes["between"] = {**known.between, **_between(comm, node_of, seconds, begin)}
    return msgspec.structs.replace(known, **changes)


def forced_tables(ranks: int) -> dict[str, TuningTable]:
    """Return a dict: way -> a table with which every vector in an ordinary array on one node takes this way."""
    largest, none = Slots(SLOT_SIZES[-1], SLOT_SIZES[-1]), Slots(0, 0)
    return {
        "slots": TuningTable(slots={ranks: largest}, cross_memory={ranks: EVERYTHING}),
        "stages": TuningTable(slots={ranks: none}, cross_memory={ranks: EVERYTHING}),
        "cross_memory": TuningTable(slots={ranks: none}, cross_memory={ranks: 0}),
    }


def _on_one_node(comm: MPI.Comm, seconds: float, begin: Begin) -> tuple[Slots, int, dict[str, LinearCost]]:
    """Measure on one node.

    Return the limits of slots, the size from which on the kernel should copy, and the cost of each way (way -> cost).
    """
    ways = {name: dup_with_table(comm, forced) for name, forced in forced_tables(comm.size).items()}

    def wins(way: str, shared: bool, share: float, size: int) -> bool:
        """True if `way` takes at most `share` times as long as stages (if `shared`, as direct access) for this size."""
        x = _vector(ways[way], size, shared)
        times = _timed(comm, [compiled("allreduce", x, ways[each]) for each in (way, "stages")], seconds)
        return times[0] <= times[1] * share

    begin("slots")
    direct = last_winning_size(SLOT_SIZES, partial(wins, "slots", True, SLOTS_WIN), 0)
    slots = Slots(direct, max(direct, last_winning_size(SLOT_SIZES, partial(wins, "slots", False, SLOTS_WIN), 0)))
    begin("cross memory")
    cross_memory = last_winning_size(CROSS_SIZES, partial(wins, "cross_memory", False, COPIES_WIN), EVERYTHING)
    begin("lines through the times")
    lines = {}
    for way, shared, sizes in (
        ("slots", False, [size for size in (8, *SLOT_SIZES) if size <= slots.ordinary]),
        ("stages", False, [size for size in LINE_SIZES if size > slots.ordinary]),
        ("cross_memory", False, LINE_SIZES),
        ("direct", True, [size for size in LINE_SIZES if size > slots.always]),
    ):
        if len(sizes) > 1:
            home = ways["stages" if way == "direct" else way]
            plans = {size: compiled("allreduce", _vector(home, size, shared), home) for size in sizes}
            lines[f"{way} {comm.size}"] = LinearCost(*measure_costs(comm, plans, seconds * len(sizes)))
            for plan in plans.values():
                plan.free()
    for one in ways.values():
        one.Free()
    return slots, cross_memory, lines


def last_winning_size(sizes: Iterable[int], wins: Callable[[int], bool], otherwise: int) -> int:
    """Return the last of `sizes` for which `wins(size)` is true, or `otherwise` if it is true for none of them.

    Sizes are tried in the given order. After two losses in a row the remaining sizes are not measured.
    """
    last, losses = otherwise, 0
    for size in sizes:
        last, losses = (size, 0) if wins(size) else (last, losses + 1)
        if losses == 2:
            break
    return last


def _vector(home: MPI.Comm, size: int, shared: bool) -> np.ndarray[Any, Any]:
    """Return `size` bytes of zeros, in node-shared memory if `shared`, and otherwise in an ordinary array."""
    x = empty(size // 4, np.float32, home) if shared else np.empty(size // 4, np.float32)
    x.fill(0)
    return x


def _timed(comm: MPI.Comm, plans: Sequence[Plan], seconds: float) -> list[float]:
    """Return the median seconds of each plan, and free the plans."""
    try:
        return [timing.median for timing in measure(comm, plans, seconds)]
    finally:
        for plan in plans:
            plan.free()


def _between(comm: MPI.Comm, node_of: list[int], seconds: float, begin: Begin) -> dict[str, tuple[Range, ...]]:
    """Measure between nodes: return the fastest algorithm for each kind, by ranges of sizes."""
    fastest = {}
    alike = len({node_of.count(node) for node in node_of}) == 1
    for kind in KINDS:
        begin(kind)
        winners = []
        names = [name for name in catalog.names(kind) if catalog.serves(kind, name, comm.size) is None]
        if kind == "allreduce" and alike:
            names.append("hierarchical")
        for size in BETWEEN_SIZES:
            n = size // 4 // comm.size * comm.size
            times = _timed(comm, [_plan(kind, n, comm, name) for name in names], seconds)
            winners.append((size, names[int(np.argmin(times))]))
        fastest[f"{kind} {len(set(node_of))}x{comm.size}"] = ranges(winners)
    return fastest


def ranges(winners: Sequence[tuple[int, str]]) -> tuple[Range, ...]:
    """Make ranges of (size, best algorithm) pairs in ascending order.

    If two neighbouring sizes have different algorithms, the limit between them is the geometric mean of the sizes.
    """
    limits = []
    for (size, name), (following, other) in pairwise(winners):
        if name != other:
            limits.append(Range(int((size * following) ** 0.5), name))
    return (*limits, Range(EVERYTHING, winners[-1][1]))


def _plan(kind: str, n: int, comm: MPI.Comm, algorithm: str) -> Plan:
    if kind in ("reduce_scatter", "allgather"):
        own = int(cut(n, comm.size, comm.rank + 1)) - int(cut(n, comm.size, comm.rank))
        sizes = (n, own) if kind == "reduce_scatter" else (own, n)
        x, out = (np.zeros(size, np.float32) for size in sizes)
        return compiled(kind, x, comm, algorithm=algorithm, out=out)
    return compiled(kind, np.zeros(n, np.float32), comm, algorithm=algorithm)


def _measure_message(comm: MPI.Comm, other: int, seconds: float) -> LinearCost:
    """Measure alpha and beta of messages between ranks 0 and `other`."""
    sizes = (8, 1 << 12, 1 << 16, 1 << 20, 1 << 22)
    times = [ping_pong(comm, np.zeros(size, np.uint8), seconds, other)["blocking"].median for size in sizes]
    return LinearCost(*fit(list(zip(sizes, times))))


def _show(measured: TuningTable, ranks: int, nodes: int) -> None:
    listing = Table(title=f"measured with {ranks} ranks on {nodes} node{'s' if nodes > 1 else ''}")
    listing.add_column("what")
    listing.add_column("result")
    for what, result in (_lines_on_one_node if nodes == 1 else _lines_between_nodes)(measured, ranks, nodes):
        listing.add_row(what, result)
    listing.add_row("addition", f"{1e-9 / measured.gamma:.1f} GB/s")
    console().print(listing)


def _lines_on_one_node(result: TuningTable, ranks: int, nodes: int) -> Iterator[tuple[str, str]]:
    limits, copies = result.slot_limits(ranks, crowded=False), result.cross_memory_from(ranks)
    yield "slots up to", f"{limits.always} bytes, ordinary arrays {limits.ordinary}"
    yield "the kernel's copies from", f"{copies} bytes on" if copies < EVERYTHING else "no size on"
    for key, line in result.memory.items():
        way, _, ranks_text = key.partition(" ")
        if ranks_text == str(ranks):
            yield f"allreduce, {way}", _format_cost(line)
    yield "message inside a node", _format_cost(result.near)


def _lines_between_nodes(result: TuningTable, ranks: int, nodes: int) -> Iterator[tuple[str, str]]:
    for key, entries in result.between.items():
        kind, _, ranks_text = key.partition(" ")
        if ranks_text == f"{nodes}x{ranks}":
            limits = ["" if entry.most == EVERYTHING else f" to {entry.most} bytes" for entry in entries]
            yield kind, ", ".join(entry.algorithm + limit for entry, limit in zip(entries, limits))
    yield "message between nodes", _format_cost(result.far)


def _format_cost(line: LinearCost) -> str:
    speed = f"{1e-9 / line.beta:.2f} GB/s" if line.beta else "-"
    return f"{line.alpha * 1e6:.1f} us + bytes at {speed}"


if __name__ == "__main__":
    command()
