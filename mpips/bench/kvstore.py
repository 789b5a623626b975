"""`mpips bench kvstore`: push and pull of a key of the store, or of some, by size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

from collectives import files
from collectives.benchmark.sizes import parse_counts, show_bytes
from collectives.machine import memory
from collectives.terminal.console import (
    OutFile,
    Picture,
    RankedCommand,
    Seconds,
    progress,
    write_text,
    writing,
)
from collectives.terminal.tables import show_table
from mpips.bench import floor
from mpips.bench.rounds import measure, names
from mpips.store.api import KVStore
from mpips.store.create import create
from mpips.store.options import kind_of, read, uneven

ARRAYS = ("ordinary", "empty")
MOST_KEYS = 10_000
"""More than a model has; names and arrays alone would fill the memory before long."""


class Row(NamedTuple):
    """One case: medians over the repeats on worker 0, in seconds, of all keys, which go as one list where they are
    more than one. `bytes`: of each key. The floor is that of `mpips.bench.floor`."""

    kind: str
    servers: int
    workers: int
    clients: int
    masters: str
    array: str
    keys: int
    bytes: int
    repeats: int
    push_s: float
    pull_s: float
    push_pull_s: float
    pushpull_s: float
    floor_s: float | None
    over_floor: float | None


class Wanted(NamedTuple):
    """The words of the command line, understood: the kind in mpips's own word, elements a key, kinds of array."""

    kind: str
    counts: list[int]
    arrays: list[str]


def check(
    ranks: int, *, kind: str, servers: int, clients: int, masters: str, sizes: str, keys: int, arrays: str, **_: Any
) -> Wanted:
    """What the command line means for that many ranks; click.UsageError where it cannot be. Starts no MPI."""
    try:
        word = kind_of(kind)
        if word == "local":
            raise ValueError("a local store has no servers to time")
        if servers >= ranks:
            least = f"ask for --ranks {servers + 1} or more"
            raise ValueError(f"--ranks {ranks} and --servers {servers} leave no worker: {least}")
        if clients > 1 and not word.startswith("mpi"):
            raise ValueError(f"--clients {clients} is for mpi_* stores: in {word} every worker is its own client")
        read({"servers": servers, "clients": clients, "masters": masters}).clients_of(word, ranks)
        counts = parse_counts(sizes, 4, "float32")
        # a worker pushes one array and pulls into another
        what = f"--sizes {sizes}{f' --keys {keys}' if keys > 1 else ''}"
        memory.check(what, 4 * keys * max(counts), 2, max(1, memory.ranks_here() - servers))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if len(set(counts)) < len(counts):
        raise click.UsageError(f"--sizes {sizes}: each size once")
    kinds = [array.strip() for array in arrays.split(",")]
    if unknown := [array for array in kinds if array not in ARRAYS]:
        raise click.UsageError(f"--arrays {unknown[0]!r} is none of {', '.join(ARRAYS)}")
    return Wanted(word, counts, kinds)


@click.command("kvstore", cls=RankedCommand)
@click.option("--kind", default="dist_sync", show_default=True,
              help="Of the store: dist_sync, dist_async, mpi_sync or mpi_async.")
@click.option("--servers", default=1, type=click.IntRange(0), show_default=True, help="Server ranks; the others work.")
@click.option("--clients", default=1, type=click.IntRange(1), show_default=True, help="Of an mpi_* store.")
@click.option("--masters", type=click.Choice(("one", "all")), default="one", show_default=True, help="Of each client.")
@click.option("--sizes", default="1024,262144,4194304,67108864", show_default=True, help="MIN:MAX[:FACTOR] or a list.")
@click.option("--keys", default=1, type=click.IntRange(1, MOST_KEYS), show_default=True, help="Of each size, a list.")
@click.option("--arrays", default="ordinary,empty", show_default=True, help="NumPy's (ordinary) or mpips.empty's.")
@click.option("--seconds", default=1.0, type=Seconds(), show_default=True, help="About so long for each case.")
@click.option("--json", "json_path", type=OutFile(), help="Write the rows as JSON.")
@click.option("--plot", "plot_path", type=Picture(), help="Draw latency by size (PNG).")
def command(
    kind: str, servers: int, clients: int, masters: str, sizes: str, keys: int, arrays: str, seconds: float,
    json_path: Path | None, plot_path: Path | None,
) -> None:  # fmt: skip
    """Time push and pull of a float32 key, or of some in one call, beside the copies that must happen.

    Start the ranks with -n/--ranks, or with mpirun: mpirun -n P python -m mpips.bench.kvstore.
    """
    world = MPI.COMM_WORLD
    wanted = check(
        world.size, kind=kind, servers=servers, clients=clients, masters=masters, sizes=sizes, keys=keys, arrays=arrays
    )
    kind, counts, kinds = wanted
    cases = [(n, array) for n in counts for array in kinds]
    one_node = world.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == world.size
    plain = one_node and servers > 0 and kind == "dist_sync"
    floors = {n: floor.measure(world, servers, 4 * n, 7) for n in counts} if plain else {}
    if world.rank == 0 and (world.size - servers) % clients:
        click.echo(uneven(world.size - servers, clients), err=True)
    kv = create(kind, servers=servers, clients=clients, masters=masters)
    if kind.endswith("async"):
        kv.set_optimizer("add")
    rows: list[Row] = []
    with progress("push and pull", len(cases), kv.rank == 0) as begin:
        for n, array in cases:
            begin(f"{show_bytes(4 * n)}, {array}")
            if array == kinds[0]:
                kv.init(names(n, keys), [np.zeros(n, np.float32)] * keys)
            rows.append(_row(kv, (n, array, keys), masters, seconds, floors))
    first = kv.rank == 0
    kv.close()  # before files are written: nobody waits where that fails
    if first:
        show_table(table(rows))
        if json_path:
            write_text(json_path, json.dumps([row._asdict() for row in rows], indent=1))
        if plot_path:
            draw(rows, plot_path)


def _row(
    kv: KVStore, case: tuple[int, str, int], masters: str, seconds: float, floors: dict[int, dict[str, float]]
) -> Row:
    """One key size on one kind of array, measured."""
    n, array, keys = case
    floor_s = keys * floors[n][array] if n in floors else None
    layout = kv.layout
    roles = (kv.type, layout.num_servers, kv.num_workers, len(layout.clients), masters)
    repeats, push_s, pull_s, both_s, fused_s = measure(kv, n, array, keys, seconds)
    over = both_s / floor_s if floor_s else None
    return Row(*roles, array, keys, 4 * n, repeats, push_s, pull_s, both_s, fused_s, floor_s, over)


def table(rows: list[Row]) -> Table:
    """The rows as a table, microseconds."""
    first = rows[0]
    counts = {"server": first.servers, "worker": first.workers, "client": first.clients}
    roles = ", ".join(f"{count} {role}{'s' * (count != 1)}" for role, count in counts.items())
    several = f"{first.keys} keys in one call, " if first.keys > 1 else ""
    title = f"{first.kind}, {roles}; {several}median us, worker 0"
    view = Table(title=title, caption="floor: the bare copies and sums alone; / floor: push + pull over it")
    for column in ("size", "arrays", "push", "pull", "push + pull", "pushpull", "floor", "/ floor"):
        view.add_column(column, justify="left" if column == "arrays" else "right")
    for row in rows:
        times = [f"{1e6 * t:,.1f}" for t in (row.push_s, row.pull_s, row.push_pull_s, row.pushpull_s)]
        bare = "-" if row.floor_s is None else f"{1e6 * row.floor_s:,.1f}"
        view.add_row(show_bytes(row.bytes), row.array, *times, bare, f"{row.over_floor:.2f}" if row.over_floor else "-")
    return view


def draw(rows: list[Row], path: Path) -> None:
    """Latency by size, one line for each kind of array, and the floors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    for array in dict.fromkeys(row.array for row in rows):
        mine = [row for row in rows if row.array == array]
        axes.loglog([r.bytes for r in mine], [1e6 * r.push_pull_s for r in mine], marker="o", label=f"{array} arrays")
        bare = [(r.bytes, 1e6 * r.floor_s) for r in mine if r.floor_s]
        if bare:
            axes.loglog(*zip(*bare), linestyle=":", label=f"floor, {array}")
    axes.set(xlabel="bytes", ylabel="push + pull, microseconds", title=f"{rows[0].kind}, {rows[0].workers} workers")
    axes.legend()
    with writing(path):
        files.write_picture(path, figure, dpi=120)


if __name__ == "__main__":
    command()
