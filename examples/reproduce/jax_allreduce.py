"""Times an allreduce of JAX arrays by mpips.jax, by mpi4jax if it is installed, and by JAX's own over gloo.

    mpips run -w 2 -m examples.reproduce.jax_allreduce [--sizes 8B,1KiB] [--json FILE]

All contenders take turns in one job, with `jit`. "alone" is the time of a program that does one allreduce. "in a loop"
is a tenth of the time of a program that does ten in a row: so it hardly includes the time that JAX takes to start a
program.
"""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import jax
import numpy as np
from mpi4py import MPI
from rich.table import Table

import mpips.jax
from collectives.benchmark import harness
from collectives.terminal import (
    OutFile,
    RankedCommand,
    Seconds,
    parse_sizes,
    show_bytes,
    show_progress,
    show_table,
    write_text,
)

SIZES = "8B,64B,1KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB"
LOOP = 10
Arrays = Callable[[jax.Array], jax.Array]


class Row(NamedTuple):
    """One contender at one size. Times are seconds of an allreduce on the slowest rank, medians over the rounds."""

    nbytes: int
    ranks: int
    contender: str
    alone_s: float
    in_a_loop_s: float


def looped(allreduce: Arrays) -> Arrays:
    """Return a function that does LOOP allreduces in a row. Halving keeps the numbers from overflowing."""
    return lambda x: jax.lax.fori_loop(0, LOOP, lambda _, y: allreduce(y) * 0.5, x)


def step_by_gloo(program: Callable[[Arrays], Arrays], x: jax.Array) -> Callable[[], object]:
    """Return a step that runs `program` with JAX's own allreduce, over one device of each process."""
    mesh = jax.make_mesh((MPI.COMM_WORLD.size,), ("rank",))
    spec = jax.sharding.PartitionSpec("rank")

    def allreduce(y: jax.Array) -> jax.Array:
        return jax.lax.pcast(jax.lax.psum(y, "rank"), "rank", to="varying")

    run = jax.jit(jax.shard_map(program(allreduce), mesh=mesh, in_specs=spec, out_specs=spec))
    whole = jax.make_array_from_process_local_data(jax.sharding.NamedSharding(mesh, spec), np.asarray(x))
    return lambda: jax.block_until_ready(run(whole))


def step_by(allreduce: Arrays, program: Callable[[Arrays], Arrays], x: jax.Array) -> Callable[[], object]:
    """Return a step that runs `program` with a library's allreduce, a function of the rank's own array."""
    run = jax.jit(program(allreduce))
    return lambda: jax.block_until_ready(run(x))


def contenders(program: Callable[[Arrays], Arrays], x: jax.Array) -> dict[str, Callable[[], object]]:
    """Return the name of each library that is installed -> a step that runs `program` with it."""
    steps = {"mpips": step_by(lambda y: mpips.jax.allreduce(y, "sum"), program, x)}
    if importlib.util.find_spec("mpi4jax"):
        import mpi4jax

        steps["mpi4jax"] = step_by(lambda y: mpi4jax.allreduce(y, op=MPI.SUM), program, x)
    steps["gloo"] = step_by_gloo(program, x)
    return steps


def measure(nbytes: int, rounds: int, seconds: float) -> list[Row]:
    """Time all contenders at one size. Collective."""
    x = jax.numpy.ones(max(1, nbytes // 4), np.float32)
    alone, loops = contenders(lambda allreduce: allreduce, x), contenders(looped, x)
    calls = [*alone.values(), *loops.values()]
    medians = [timing.median for timing in harness.measure(MPI.COMM_WORLD, calls, seconds, rounds)]
    return [
        Row(x.nbytes, MPI.COMM_WORLD.size, name, one, many / LOOP)
        for name, one, many in zip(alone, medians[: len(alone)], medians[len(alone) :], strict=True)
    ]


def table(rows: list[Row]) -> Table:
    """Build the table of the rows, in microseconds."""
    view = Table(title=f"an allreduce of float32 on {rows[0].ranks} ranks, us")
    for column in ("size", "by", "alone", "in a loop"):
        view.add_column(column, justify="left" if column == "by" else "right")
    for row in rows:
        view.add_row(
            show_bytes(row.nbytes),
            row.contender,
            f"{1e6 * row.alone_s:.1f}",
            f"{1e6 * row.in_a_loop_s:.1f}",
            end_section=row.contender == "gloo",
        )
    return view


@click.command(cls=RankedCommand)
@click.option("--sizes", default=SIZES, show_default=True)
@click.option("--rounds", default=7, type=click.IntRange(1), show_default=True)
@click.option("--seconds", default=4.0, type=Seconds(), show_default=True, help="For each size.")
@click.option("--json", "json_path", type=OutFile(), help="Write the rows as JSON.")
def main(sizes: str, rounds: int, seconds: float, json_path: Path | None) -> None:
    """Measure and print; a program of every rank."""
    try:
        asked = parse_sizes(sizes)
    except ValueError as error:
        raise click.UsageError(f"--sizes {error}") from None
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize()
    rows: list[Row] = []
    first = MPI.COMM_WORLD.rank == 0
    with show_progress("sizes", len(asked), first) as begin:
        for nbytes in asked:
            begin(show_bytes(nbytes))
            rows += measure(nbytes, rounds, seconds)
    if first:
        show_table(table(rows))
        if json_path:
            write_text(json_path, json.dumps([row._asdict() for row in rows], indent=1))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
