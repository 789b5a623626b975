"""`mpips bench COLLECTIVE`: times a collective over the ranks of a job, and compares it with MPI's own best call.

    mpips bench COLLECTIVE -n P        or: mpirun -n P python -m collectives.benchmark COLLECTIVE

The function `check` checks all options before anything starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from mpi4py import MPI

from mpips.collectives import api
from mpips.collectives.benchmark import GLOO_KINDS, report
from mpips.collectives.benchmark.case import (
    FLOOR_SHARE,
    MPI_NAME,
    OPS,
    BenchmarkCase,
    Candidate,
    why_no_gloo,
)
from mpips.collectives.benchmark.harness import measure, ping_pong
from mpips.collectives.benchmark.report import OverlapRow, Row
from mpips.collectives.call import REDUCING, find_reduction
from mpips.collectives.kernels import engine
from mpips.collectives.machine import check_memory, count_local_ranks
from mpips.collectives.plan import plan as compiled
from mpips.collectives.schedule import catalog
from mpips.collectives.schedule.model import BUS_FACTOR, parse
from mpips.collectives.terminal import (
    OutFile,
    Picture,
    RankedCommand,
    Seconds,
    leave,
    parse_counts,
    show_bytes,
    show_progress,
    split_words,
)

BESIDE_MPI = "beside the MPI's own best call in the same run. Times are of one call on the slowest rank."
# the name of each subcommand, and its help text
CASES = {
    **{kind: f"Time {kind} over the ranks of the job, {BESIDE_MPI}" for kind in BUS_FACTOR},
    "pt2pt": "Time a ping-pong of ranks 0 and 1 by size.",
    "iallreduce": "Measure how much of an allreduce hides behind compute of the same length, as the OSU benchmarks do.",
}
# algorithms that `schedule.catalog` does not have
PLANS = ("auto", "shared_memory", "native")
# algorithms that have only a blocking call, and no separate start and wait
ONE_SHOTS = ("one_shot", "gloo", MPI_NAME)
ARRAYS = ("ordinary", "empty")

# options of every command
PARAMETERS: tuple[click.Parameter, ...] = (
    click.Option(
        ["--sizes"], default="1KiB:64MiB", show_default=True, help="A list of sizes and of ranges MIN:MAX[:FACTOR]."
    ),
    click.Option(
        ["--algorithms"], default="auto", show_default=True, help="A list such as auto,native,one_shot,gloo,ring."
    ),
    click.Option(
        ["--arrays"],
        default="ordinary,empty",
        show_default=True,
        help="Arrays of NumPy (ordinary), of collectives.empty, or both.",
    ),
    click.Option(["--dtype"], default="float32", show_default=True, help="Element type: a NumPy name or bfloat16."),
    click.Option(
        ["--op"],
        type=click.Choice(tuple(OPS)),
        default="sum",
        show_default=True,
        help="Reduction, if the collective reduces.",
    ),
    click.Option(["--seconds"], default=1.0, type=Seconds(), show_default=True, help="Time to spend on each size."),
    click.Option(["--check", "checked"], is_flag=True, help="Count wrong elements; exit 1 if there are any."),
    click.Option(["--json", "json_path"], type=OutFile(), help="Write the rows as JSON."),
    click.Option(["--csv", "csv_path"], type=OutFile(), help="Write the rows as CSV."),
    click.Option(["--plot", "plot_path"], type=Picture(), help="Draw time and bandwidth (PNG)."),
)


class _Cases(RankedCommand, click.Group):
    """The group of commands, one for each entry of `CASES`. Every rank of a job gets the same command line."""


command = _Cases("bench", help="Time a collective over the ranks of the job.")


def run(
    collective: str,
    sizes: str,
    algorithms: str,
    arrays: str,
    dtype: str,
    op: str,
    seconds: float,
    checked: bool,
    json_path: Path | None,
    csv_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Run the command of a case. The arguments are the options of the command line."""
    comm = MPI.COMM_WORLD
    wanted = check(
        comm.size, collective=collective, sizes=sizes, algorithms=algorithms, arrays=arrays, dtype=dtype, op=op
    )
    title = f"{collective}, {comm.size} rank{'s' * (comm.size > 1)}"
    if comm.size == 1:
        click.echo("one rank alone exchanges nothing: start more with -n/--ranks", err=True)
    if collective == "iallreduce":
        hidden = []
        cases = list(product(wanted.counts, wanted.algorithms, wanted.arrays))
        with show_progress(title, len(cases), comm.rank == 0) as begin:
            for n, algorithm, array in cases:
                begin(f"{show_bytes(n * wanted.dtype.itemsize)}, {algorithm}, {array}")
                x = BenchmarkCase("allreduce", "sum", wanted.dtype, n, comm).arrays(array)[0]
                hidden.append(measure_overlap(comm, algorithm, x, array, seconds))
        if comm.rank == 0:
            report.print_overlap(hidden, title)
            if json_path:
                report.write_rows(hidden, json_path)
        return
    rows: list[Row] = []
    with show_progress(title, len(wanted.counts), comm.rank == 0) as begin:
        for n in wanted.counts:
            begin(show_bytes(n * wanted.dtype.itemsize))
            if collective == "pt2pt":
                timings = ping_pong(comm, np.zeros(n, wanted.dtype), seconds)
                row = partial(Row.measured, "pt2pt", wanted.dtype, "none", comm.size, n, native=timings["blocking"])
                rows += [row(name, "ordinary", timing) for name, timing in timings.items()]
            else:
                case = BenchmarkCase(collective, op, wanted.dtype, n, comm)
                rows += _collective(case, wanted.algorithms, wanted.arrays, seconds, checked)
    if comm.rank == 0:
        report.print_table(rows, title)
        if json_path:
            report.write_rows(rows, json_path)
        if csv_path:
            report.write_csv(rows, csv_path)
        if plot_path:
            report.draw(rows, plot_path, title)
    if any(row.wrong for row in rows):
        leave(1)


def _collective(
    case: BenchmarkCase, algorithms: list[str], arrays: list[str], seconds: float, checked: bool
) -> list[Row]:
    """Measure a collective at one size. Collective over the ranks of the job, blocking.

    Returns a row for the fastest of MPI's own calls, and a row for each algorithm with each kind of array.
    """
    native = case.mpi()
    chosen = list(_candidates(case, algorithms, arrays))
    try:
        native_wrong = sum(candidate.check() for candidate in native) if checked else None
        faults = [candidate.check() if checked else None for candidate in chosen]
        for candidate in chosen:
            candidate.run()
        # The runs above have requested compiled kernels. Load them before the timing, because later in a job the calls
        # use them too.
        engine.load_all()
        copy, *timings = measure(
            case.comm, [case.copy(), *(c.run for c in [*native, *chosen])], seconds, renew=case.renew
        )
    finally:
        for candidate in chosen:
            candidate.close()
    best = min(timings[: len(native)], key=lambda t: t.median, default=None)
    floor = copy.median * FLOOR_SHARE[case.kind](case.comm.size)
    op = case.op if case.kind in REDUCING else "none"
    row = partial(Row.measured, case.kind, case.dtype, op, case.comm.size, case.n, native=best, floor=floor)
    rows = [] if best is None else [row(MPI_NAME, "ordinary", best, wrong=native_wrong)]
    for candidate, timing, wrong in zip(chosen, timings[len(native) :], faults):
        rows.append(row(candidate.algorithm, candidate.array, timing, wrong=wrong, predicted=candidate.predicted))
    return rows


def _candidates(case: BenchmarkCase, algorithms: list[str], arrays: list[str]) -> Iterable[Candidate]:
    for algorithm in algorithms:
        if algorithm == MPI_NAME:
            # MPI's own calls are measured in every run, whichever algorithms are listed. The name adds nothing to them.
            # It exists so that a user who gives it alone (`--algorithms MPI`) measures only these calls.
            continue
        if algorithm == "gloo":
            reason = why_no_gloo(case.kind, case.dtype)
            if reason is None:
                yield case.gloo()
            elif case.comm.rank == 0:
                click.echo(f"gloo is left out: {reason}", err=True)
            continue
        for array in arrays:
            try:
                if algorithm == "one_shot":
                    yield case.one_shot(getattr(api, case.kind), array)
                else:
                    yield case.plan(algorithm, array)
            except ValueError as error:
                raise click.UsageError(str(error)) from None


# The computation is done in this many slices. After each slice the computing thread calls `test`, which advances the
# communication.
SLICES = 32


def measure_overlap(comm: MPI.Comm, algorithm: str, x: np.ndarray, array: str, budget_s: float) -> OverlapRow:
    """Measure how far an in-place allreduce of `x` overlaps with a computation of the same duration.

    Collective and blocking. The overlap is defined as in the OSU benchmarks: 100 x (1 - (overall - compute) / pure
    communication) percent, where `overall` is the time of start, compute and wait together. Returns the same row on
    every rank.
    """
    plan = compiled("allreduce", x, comm, algorithm=algorithm)
    try:
        pure = measure(comm, [plan], budget_s / 3)[0].median
        block = np.ones(16_384, np.float32)

        def compute(look: bool) -> None:
            for _ in range(SLICES):
                until = time.perf_counter() + pure / SLICES
                while time.perf_counter() < until:
                    np.multiply(block, 1.0001, out=block)
                if look:
                    plan.test()
            block.fill(1)

        def together() -> None:
            plan.start()
            compute(look=True)
            plan.wait()

        alone, overall = measure(comm, [lambda: compute(look=False), together], 2 * budget_s / 3)
    finally:
        plan.free()
    hidden = 1 - (overall.median - alone.median) / pure
    return OverlapRow(
        "allreduce",
        algorithm,
        array,
        x.dtype.name,
        comm.size,
        x.nbytes,
        1e6 * overall.median,
        1e6 * alone.median,
        1e6 * pure,
        100 * min(1.0, max(0.0, hidden)),
    )


for _name, _measures in CASES.items():
    command.add_command(
        RankedCommand(
            _name,
            callback=partial(run, _name),
            params=list(PARAMETERS),
            help=f"{_measures} Start the ranks with -n/--ranks, or with mpirun: mpirun -n P python -m "
            f"collectives.benchmark {_name}.",
        )
    )


class BenchmarkOptions(NamedTuple):
    """The options of the command line, parsed and checked."""

    dtype: np.dtype[Any]
    counts: list[int]
    algorithms: list[str]
    arrays: list[str]


def check(
    ranks: int, *, collective: str, sizes: str, algorithms: str, arrays: str, dtype: str, op: str, **_: Any
) -> BenchmarkOptions:
    """Parse and check the options for a number of ranks. Does not start MPI.

    Raises:
        click.UsageError: An option is wrong, or the arrays do not fit into memory.
    """
    try:
        element = _element(dtype)
        if collective in (*REDUCING, "iallreduce"):
            find_reduction(op, element)
        counts = parse_counts(sizes, element.itemsize, element.name)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    largest = max(counts) * element.itemsize
    kinds, names = split_words(arrays), split_words(algorithms)
    if unknown := [kind for kind in kinds if kind not in ARRAYS]:
        raise click.UsageError(f"--arrays {unknown[0]!r} is unknown: choose from {', '.join(ARRAYS)}")
    if not kinds or not names:
        raise click.UsageError(f"--{'algorithms' if kinds else 'arrays'} is empty")
    if collective == "iallreduce" and ranks < 2:
        raise click.UsageError("overlap with compute needs two ranks: use --ranks 2")
    if collective == "pt2pt":
        if ranks < 2:
            raise click.UsageError("a ping-pong needs two ranks: use --ranks 2")
        _fits(sizes, largest, 1)
        return BenchmarkOptions(element, counts, [], [])
    for name in names:
        if reason := _refusal(collective, name, ranks):
            raise click.UsageError(f"--algorithms {name}: {reason}")
    # The number of arrays that have the size of the larger buffer: one or two for each kind of array, and two for the
    # bare copy.
    arrays_of_all = 2 + len(set(kinds)) * (2 if collective in ("reduce", "alltoall") else 1)
    _fits(sizes, largest, 1 if collective == "iallreduce" else arrays_of_all)
    return BenchmarkOptions(element, counts, names, kinds)


def _fits(sizes: str, largest: int, arrays: int) -> None:
    try:
        check_memory(f"--sizes {sizes}", largest, arrays, count_local_ranks())
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _refusal(collective: str, algorithm: str, ranks: int) -> str | None:
    kind, others = ("allreduce", PLANS) if collective == "iallreduce" else (collective, PLANS + ONE_SHOTS)
    if algorithm in others:
        return None
    try:
        name, parameters = parse(algorithm)
    except ValueError as error:
        return str(error)
    if name not in catalog.names(kind):
        choices = [other for other in others if other != "gloo" or kind in GLOO_KINDS]
        known = ", ".join([*choices, *catalog.names(kind)])
        return f"{name!r} is not an algorithm for {collective}: choose one of {known}"
    # The number of ranks on a node becomes known only in the job.
    if name == "hierarchical" and "local" not in parameters:
        return None
    return catalog.serves(kind, algorithm, ranks)


def _element(dtype: str) -> np.dtype[Any]:
    if dtype == "bfloat16":
        try:
            import ml_dtypes
        except ImportError:
            raise ValueError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes") from None
        return np.dtype(ml_dtypes.bfloat16)
    try:
        element = np.dtype(dtype)
    except TypeError:
        element = np.dtype(object)
    if element.kind not in "biufc":
        raise ValueError(f"--dtype {dtype!r} is not a number type such as float32, float16, bfloat16, float64, int32")
    return element


if __name__ == "__main__":
    command()
