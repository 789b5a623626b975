"""`mpips bench kvstore`: times push and pull for several sizes of keys, beside the memory copies that they need.

Every round pushes new values, and the values that are pulled are checked. With `--optimizer` the servers update weights
with the pushed values, and a worker compares the pulled weights with weights that it has updated itself.

The floor is the time of the memory copies that every push and pull needs. They are measured with NumPy and barriers
only, without keys, signals or updates. For n bytes, W workers and S servers on one node there are three phases:

1. Each worker copies n bytes into shared memory. Arrays of `mpips.empty` need no such copy.
2. Each server sums its n/S bytes of all W contributions into its own memory.
3. Each worker copies n bytes out.

All ranks work at the same time, and a phase takes as long as its slowest rank.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table

from mpips import optimizers
from mpips.collectives import files
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import empty
from mpips.collectives.machine import check_memory, count_local_ranks, usable_cores
from mpips.collectives.terminal import (
    OutFile,
    Picture,
    RankedCommand,
    Seconds,
    Whole,
    parse_counts,
    show_bytes,
    show_progress,
    show_table,
    write_json,
    writing,
)
from mpips.optimizers.base import Optimizer, initial
from mpips.store.api import KVStore
from mpips.store.create import create
from mpips.store.options import kind_of, read, uneven

ARRAYS = ("ordinary", "empty")
# The largest number of keys in one call. Models have fewer, and this many names and arrays still fit in memory.
MOST_KEYS = 10_000
# number of elements of an array that are set in each round before the push, and checked after the pull
MARKS = 64
# elements that the floor sums at a time, so that the sum is still in cache when the next contribution is added
BLOCK_ELEMENTS = 262_144


class StoreRow(NamedTuple):
    """The result of one case. Times are seconds on worker 0, medians over the repeats, for all keys in one call."""

    kind: str
    # "" without an optimizer
    optimizer: str
    servers: int
    workers: int
    clients: int
    masters: str
    # the kind of array, one of ARRAYS
    array: str
    keys: int
    # size of each key
    bytes: int
    repeats: int
    push_s: float
    pull_s: float
    # time of a push followed by a pull
    push_pull_s: float
    # time of one call of pushpull
    pushpull_s: float
    # The *floor*: the time of the memory copies that no push and pull can avoid (see the module's docstring). None if
    # it was not measured.
    floor_s: float | None
    # push_pull_s / floor_s: how many times longer than these copies a push and a pull take. None if floor_s is None.
    over_floor: float | None


class StoreOptions(NamedTuple):
    """The options of the command line, parsed and checked."""

    # the kind of store by our own name, even if the user gave the paper's name for it
    kind: str
    # sizes of a key, in elements
    counts: list[int]
    # the kinds of array to time, from ARRAYS
    arrays: list[str]
    optimizer: Optimizer | None


def check(
    ranks: int,
    *,
    kind: str,
    servers: int,
    clients: int,
    masters: str,
    sizes: str,
    keys: int,
    arrays: str,
    optimizer: str | None,
    momentum: float,
    **_: Any,
) -> StoreOptions:
    """Parse the command line for a job of `ranks` ranks. Raise click.UsageError if it is wrong. Starts no MPI."""
    try:
        resolved = kind_of(kind)
        if resolved == "local":
            raise ValueError("a local store has no servers to time")
        if servers >= ranks:
            least = f"ask for --ranks {servers + 1} or more"
            raise ValueError(f"--ranks {ranks} and --servers {servers} leave no worker: {least}")
        if clients > 1 and not resolved.startswith("mpi"):
            raise ValueError(f"--clients {clients} is for mpi_* stores: in {resolved} every worker is its own client")
        if momentum and optimizer != "sgd":
            raise ValueError(f"--momentum is for --optimizer sgd, not for {optimizer or 'none'}")
        made = optimizers.create(optimizer, **({"momentum": momentum} if momentum else {})) if optimizer else None
        read({"servers": servers, "clients": clients, "masters": masters}).clients_of(resolved, ranks)
        counts = parse_counts(sizes, 4, "float32")
        # The memory is needed twice, because a worker pushes one array and pulls into another.
        what = f"--sizes {sizes}{f' --keys {keys}' if keys > 1 else ''}"
        check_memory(what, 4 * keys * max(counts), 2, max(1, count_local_ranks() - servers))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if len(set(counts)) < len(counts):
        raise click.UsageError(f"--sizes {sizes}: each size once")
    kinds = [array.strip() for array in arrays.split(",")]
    if unknown := [array for array in kinds if array not in ARRAYS]:
        raise click.UsageError(f"--arrays {unknown[0]!r} is none of {', '.join(ARRAYS)}")
    return StoreOptions(resolved, counts, kinds, made)


@click.command("kvstore", cls=RankedCommand)
@click.option(
    "--kind",
    default="dist_sync",
    show_default=True,
    help="Kind of store: dist_sync, dist_async, mpi_sync or mpi_async.",
)
@click.option(
    "--servers", default=1, type=Whole(0), show_default=True, help="Number of servers; all other ranks are workers."
)
@click.option("--clients", default=1, type=Whole(1), show_default=True, help="Number of clients, in an mpi_* store.")
@click.option(
    "--masters",
    type=click.Choice(("one", "all")),
    default="one",
    show_default=True,
    help="Members of a client that push.",
)
@click.option("--sizes", default="1024,262144,4194304,67108864", show_default=True, help="MIN:MAX[:FACTOR] or a list.")
@click.option("--keys", default=1, type=Whole(1, MOST_KEYS), show_default=True, help="Keys of each size, in one call.")
@click.option("--arrays", default="ordinary,empty", show_default=True, help="NumPy's (ordinary) or mpips.empty's.")
@click.option(
    "--optimizer",
    type=click.Choice(list(optimizers.OPTIMIZERS)),
    help="Optimizer of the servers. Default: they sum, or in an async store add.",
)
@click.option("--momentum", default=0.0, type=click.FloatRange(0, 1, max_open=True), help="For sgd.")
@click.option("--seconds", default=1.0, type=Seconds(), show_default=True, help="Time for each case, about.")
@click.option("--json", "json_path", type=OutFile(), help="Write the rows as JSON.")
@click.option("--plot", "plot_path", type=Picture(), help="Draw latency by size (PNG).")
def command(
    kind: str,
    servers: int,
    clients: int,
    masters: str,
    sizes: str,
    keys: int,
    arrays: str,
    optimizer: str | None,
    momentum: float,
    seconds: float,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Time push and pull of a float32 key, or of several in one call, and the memory copies that cannot be avoided.

    Start the ranks with -n/--ranks, or with mpirun: mpirun -n P python -m mpips.bench.kvstore.
    """
    world = MPI.COMM_WORLD
    wanted = check(
        world.size,
        kind=kind,
        servers=servers,
        clients=clients,
        masters=masters,
        sizes=sizes,
        keys=keys,
        arrays=arrays,
        optimizer=optimizer,
        momentum=momentum,
    )
    kind, counts, kinds, updates = wanted
    cases = [(n, array) for n in counts for array in kinds]
    one_node = world.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == world.size
    plain = one_node and servers > 0 and kind == "dist_sync"
    floors = {n: measure_floor(world, servers, 4 * n, 7) for n in counts} if plain else {}
    if world.rank == 0 and (world.size - servers) % clients:
        click.echo(uneven(world.size - servers, clients), err=True)
    # Load kernels from the start, because a long job also uses compiled kernels after a while.
    os.environ.setdefault("MPIPS_KERNELS", "numba")
    kv = create(kind, servers=servers, clients=clients, masters=masters)
    if updates or kind.endswith("async"):
        kv.set_optimizer(updates or "add")
    rows: list[StoreRow] = []
    with show_progress("push and pull", len(cases), kv.rank == 0) as begin:
        for n, array in cases:
            begin(f"{show_bytes(4 * n)}, {array}")
            if array == kinds[0]:
                kv.init(name_keys(n, keys), [np.zeros(n, np.float32)] * keys)
                expect = expected_values(updates)
            roles = kv.type, optimizer or "", kv.layout.num_servers, kv.num_workers, len(kv.layout.clients), masters
            measured = measure_rounds(kv, n, array, keys, seconds, expect)
            floor_s = keys * floors[n][array] if n in floors else None
            over = measured[3] / floor_s if floor_s else None
            rows.append(StoreRow(*roles, array, keys, 4 * n, *measured, floor_s, over))
    first = kv.rank == 0
    # Close before writing files: if rank 0 fails to write, the other ranks do not wait for it.
    kv.close()
    if first:
        show_table(build_table(rows))
        if json_path:
            write_json(json_path, [row._asdict() for row in rows])
        if plot_path:
            draw(rows, plot_path)


def build_table(rows: list[StoreRow]) -> Table:
    """Build the table of the results, in microseconds."""
    first = rows[0]
    counts = {"server": first.servers, "worker": first.workers, "client": first.clients}
    roles = ", ".join(f"{count} {role}{'s' * (count != 1)}" for role, count in counts.items())
    several = f"{first.keys} keys in one call, " if first.keys > 1 else ""
    updated = f"{first.optimizer}, " if first.optimizer else ""
    title = f"{first.kind}, {roles}; {updated}{several}median us, worker 0"
    view = Table(title=title, caption="floor: the bare copies and sums, no update; / floor: push + pull over it")
    for column in ("size", "arrays", "push", "pull", "push + pull", "pushpull", "floor", "/ floor"):
        view.add_column(column, justify="left" if column == "arrays" else "right")
    for row in rows:
        times = [f"{1e6 * t:,.1f}" for t in (row.push_s, row.pull_s, row.push_pull_s, row.pushpull_s)]
        bare = "-" if row.floor_s is None else f"{1e6 * row.floor_s:,.1f}"
        view.add_row(show_bytes(row.bytes), row.array, *times, bare, f"{row.over_floor:.2f}" if row.over_floor else "-")
    return view


def draw(rows: list[StoreRow], path: Path) -> None:
    """Draw latency by size, with a line for each kind of array and its floor."""
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    for array in dict.fromkeys(row.array for row in rows):
        same = [row for row in rows if row.array == array]
        axes.loglog([r.bytes for r in same], [1e6 * r.push_pull_s for r in same], marker="o", label=f"{array} arrays")
        bare = [(r.bytes, 1e6 * r.floor_s) for r in same if r.floor_s]
        if bare:
            axes.loglog(*zip(*bare), linestyle=":", label=f"floor, {array}")
    axes.set(xlabel="bytes", ylabel="push + pull, microseconds", title=f"{rows[0].kind}, {rows[0].workers} workers")
    axes.legend()
    with writing(path):
        files.write_picture(path, figure, dpi=120)


def name_keys(n: int, keys: int) -> list[str]:
    return [f"{n} {key}" for key in range(keys)]


def expected_values(optimizer: Optimizer | None) -> Callable[[float], float]:
    """Return a function that takes the sum of a round's pushes and returns the value that the round must pull.

    Without an optimizer the value is the sum itself. With an optimizer it is a weight that begins as 0 and is updated
    by the sum of each round, so the function must be called once a round, in order.
    """
    if optimizer is None:
        return lambda total: total
    weight = np.zeros(1, np.float32)
    state, steps = initial(optimizer, weight), itertools.count(1)

    def expect(total: float) -> float:
        optimizer.update(weight, np.array([total], np.float32), state, next(steps))
        return float(weight[0])

    return expect


class TimedRounds:
    """Rounds of pushes and pulls, which are timed. Each round uses `keys` keys with n elements each.

    The values that a synchronous store returns are checked. `expect` is the result of `expected_values` for these keys.
    """

    def __init__(self, kv: KVStore, n: int, array: str, keys: int, expect: Callable[[float], float]) -> None:
        self._kv = kv
        self._numbers = itertools.count(1)
        self._expect = expect
        self._values, self._outs = ([_make_array(n, array) for _ in range(keys)] for _ in range(2))
        lists: list[Any] = [name_keys(n, keys), self._values, self._outs]
        self._key, self._value, self._out = lists if keys > 1 else [each[0] for each in lists]
        # seconds of each push, pull and pushpull
        self.pushes: list[float] = []
        self.pulls: list[float] = []
        self.fused: list[float] = []

    def push_then_pull(self) -> None:
        """Run one round, a push and then a pull, and record the time of each."""
        number = self._begin()
        start = time.perf_counter()
        self._kv.push(self._key, self._value)
        pushed = time.perf_counter()
        self._kv.pull(self._key, self._out)
        pulled = time.perf_counter()
        self.pushes.append(pushed - start)
        self.pulls.append(pulled - pushed)
        self._end(number)

    def pushpull(self) -> None:
        """Run one round, which is a single call of `pushpull`, and record its time."""
        number = self._begin()
        start = time.perf_counter()
        self._kv.pushpull(self._key, self._value, self._out)
        self.fused.append(time.perf_counter() - start)
        self._end(number)

    def _begin(self) -> int:
        number = next(self._numbers)
        mark(self._values, self._kv.rank + number)
        return number

    def _end(self, number: int) -> None:
        if self._kv.type.endswith("_sync"):
            total = sum(worker + number for worker in range(self._kv.num_workers))
            check_marks(self._outs, self._expect(total), f"{self._kv.type}, round {number}")


def _make_array(n: int, array: str) -> np.ndarray:
    made: np.ndarray = empty(n) if array == "empty" else np.empty(n, np.float32)
    made[...] = 0
    return made


def measure_rounds(
    kv: KVStore, n: int, array: str, keys: int, seconds: float, expect: Callable[[float], float]
) -> tuple[int, float, float, float, float]:
    """Time rounds of `keys` keys with n elements each, for about `seconds`. Collective over the workers.

    Args:
        array: One of ARRAYS.
        expect: The result of `expected_values` for these keys.

    Returns:
        The number of repeats, and medians in seconds of push, pull, push and pull, and pushpull.
    """
    rounds = TimedRounds(kv, n, array, keys, expect)
    for _ in range(3):
        rounds.push_then_pull()
        rounds.pushpull()
    pushes, pulls, fused = rounds.pushes, rounds.pulls, rounds.fused
    assert kv.layout.workers is not None
    # Worker 0 decides how many rounds all workers run.
    count = np.array([max(5, min(2000, int(seconds / 2 / (pushes[-1] + pulls[-1]))))], np.int64)
    kv.layout.workers.Bcast(count)
    repeats = int(count[0])
    for sample in (pushes, pulls, fused):
        sample.clear()
    for run_round in (rounds.push_then_pull, rounds.pushpull):
        kv.barrier()
        for _ in range(repeats):
            run_round()
    both = statistics.median(map(sum, zip(pushes, pulls)))
    return repeats, statistics.median(pushes), statistics.median(pulls), both, statistics.median(fused)


def mark(arrays: Sequence[np.ndarray], number: float) -> None:
    """Set evenly spaced elements of each array to `number`, so that no two rounds push the same values."""
    for array in arrays:
        marked(array)[:] = number


def marked(array: np.ndarray) -> np.ndarray:
    """Return a view of the elements that `mark` sets."""
    return array[:: max(1, array.size // MARKS)]


def check_marks(arrays: Sequence[np.ndarray], number: float, what: str) -> None:
    """Raise RuntimeError unless the elements that `mark` sets are `number`."""
    for array in arrays:
        elements = marked(array)
        if wrong := elements[elements != number].tolist():
            raise RuntimeError(f"{what}: of {array.nbytes} bytes, an element came back as {wrong[0]:g}, not {number:g}")


def measure_floor(comm: MPI.Comm, servers: int, nbytes: int, repeats: int) -> dict[str, float]:
    """Measure the floor (see the module) of "ordinary" and "empty" arrays, in seconds. Collective over all ranks.

    The time of a phase is the processor time of its slowest rank, or, if this is longer, the processor time of all
    ranks divided by the number of cores. The result is the sum of the phases' medians over `repeats`.
    """
    rank, workers = comm.Get_rank(), comm.Get_size() - servers
    n = nbytes // 4
    shared, ordinary, out = arena.empty(n), np.ones(n, np.float32), np.zeros(n, np.float32)
    shared[...] = 1
    everyone = [arena.attach(region).view(np.float32) for region in comm.allgather(arena.locate(shared))]
    cuts = [n * server // servers for server in range(servers + 1)]

    def copy_in() -> None:
        if rank < workers:
            shared[...] = ordinary

    def add_up() -> None:
        if rank >= workers:
            for start in range(cuts[rank - workers], cuts[rank - workers + 1], BLOCK_ELEMENTS):
                part = slice(start, min(start + BLOCK_ELEMENTS, cuts[rank - workers + 1]))
                total = shared[part]
                np.copyto(total, everyone[0][part])
                for other in everyone[1:workers]:
                    np.add(total, other[part], out=total)

    def copy_out() -> None:
        if rank < workers:
            for server in range(servers):
                part = slice(cuts[server], cuts[server + 1])
                out[part] = everyone[workers + server][part]

    phases = copy_in, add_up, copy_out
    own = np.empty((repeats, len(phases)))
    for repeat in range(repeats):
        for number, phase in enumerate(phases):
            comm.Barrier()
            start = time.thread_time()
            phase()
            own[repeat, number] = time.thread_time() - start
    # (rank, repeat, phase)
    everybody = np.empty((comm.Get_size(), *own.shape))
    comm.Allgather(own, everybody)
    takes = np.maximum(everybody.max(0), everybody.sum(0) / usable_cores())
    medians = np.median(takes, 0).tolist()
    return {"ordinary": sum(medians), "empty": sum(medians[1:])}


if __name__ == "__main__":
    command()
