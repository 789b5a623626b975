"""The results of a benchmark, shown as a table or written as JSON, CSV or a picture."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from rich.table import Table

from mpips.collectives import files
from mpips.collectives.benchmark.harness import Timing
from mpips.collectives.machine import usable_cores
from mpips.collectives.schedule.model import BUS_FACTOR
from mpips.collectives.terminal import show_bytes, show_table, write_json, write_text, writing

# The ratio to the floor (`Row.floor_us`) is shown only from this size on, because the time of smaller calls hardly
# depends on their size.
FLOOR_BYTES = 1 << 20


@dataclass(frozen=True)
class Row:
    """One line of the results. Times are in microseconds, rates in 10^9 bytes a second.

    Attributes:
        algbw_GBps: Bytes / median time.
        busbw_GBps: `algbw_GBps` times the share of the bytes that each rank's link must carry, as nccl-tests defines
            that share. This rate can be compared with the rate of the hardware.
        wrong: The number of wrong elements; None if results were not checked.
        vs_native: The median of MPI's own best call, measured in turn with ours in the same run, divided by this row's
            median. A value above 1 means that this row's algorithm is faster than MPI.
        predicted_us: The time that the tuning table predicts; None if unknown.
        floor_us: The least time that the memory traffic of the collective takes
            (`collectives.benchmark.case.FLOOR_SHARE`), at the speed at which all ranks copied in the same run. A
            collective that finds its target in the cache can be faster.
    """

    collective: str
    algorithm: str
    array: str
    dtype: str
    op: str
    ranks: int
    bytes: int
    count: int
    min_us: float
    p50_us: float
    p99_us: float
    algbw_GBps: float
    busbw_GBps: float
    wrong: int | None
    vs_native: float | None
    predicted_us: float | None = None
    floor_us: float | None = None

    @classmethod
    def measured(
        cls,
        kind: str,
        dtype: np.dtype[Any],
        op: str,
        ranks: int,
        n: int,
        algorithm: str,
        array: str,
        t: Timing,
        wrong: int | None = None,
        native: Timing | None = None,
        predicted: float | None = None,
        floor: float | None = None,
    ) -> Row:
        """Make a row from timings in seconds.

        Args:
            kind: The collective.
            dtype: The type of the elements.
            op: The reduction, or "none".
            ranks: The number of ranks.
            n: The number of elements.
            algorithm: The name of the algorithm.
            array: The kind of the arrays: "ordinary", or "empty" for arrays from `collectives.empty`.
            t: The time of a call.
            wrong: The number of wrong elements, if they were checked.
            native: The time of MPI's own best call.
            predicted: The predicted time of a call in seconds.
            floor: The least time that the memory traffic of a call takes, in seconds.
        """
        nbytes = n * dtype.itemsize
        algbw = nbytes / t.median / 1e9
        busbw = algbw * BUS_FACTOR.get(kind, lambda p: 1.0)(ranks)
        return cls(
            kind,
            algorithm,
            array,
            dtype.name,
            op,
            ranks,
            nbytes,
            n,
            1e6 * t.least,
            1e6 * t.median,
            1e6 * t.p99,
            algbw,
            busbw,
            wrong,
            vs_native=None if native is None else native.median / t.median,
            predicted_us=None if predicted is None else 1e6 * predicted,
            floor_us=None if floor is None else 1e6 * floor,
        )


@dataclass(frozen=True)
class OverlapRow:
    """One line of the results: the overlap of a collective with a computation. Times are medians.

    Attributes:
        overall_us: The time of start, compute and wait together.
        compute_us: The time of the computation alone.
        pure_us: The time of the collective alone.
        overlap_percent: The share of the collective's time that was hidden behind the computation.
    """

    collective: str
    algorithm: str
    array: str
    dtype: str
    ranks: int
    bytes: int
    overall_us: float
    compute_us: float
    pure_us: float
    overlap_percent: float


def machine() -> dict[str, Any]:
    """Return the software and hardware on which the figures were measured."""
    return {
        "mpi": MPI.Get_library_version().split("\n")[0].strip("\0 ,"),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": usable_cores(),
    }


COLUMNS = (
    "algbw: size / p50. busbw: algbw x the share of it that a link carries. vs MPI: MPI's p50 / ours. "
    "/ floor: p50 / time of bare copies."
)


def print_table(rows: Sequence[Row], title: str) -> None:
    """Print rows on standard output as a table that fits into 80 columns."""
    first = rows[0]
    what = f"{title}, {first.dtype}" + ("" if first.op == "none" else f", {first.op}")
    checked = any(row.wrong is not None for row in rows)
    table = Table(title=what, caption=COLUMNS)
    table.add_column("size", justify="right", no_wrap=True)
    for name in ("algorithm", "array"):
        table.add_column(name)
    for name in ("min us", "p50 us", "p99 us", "algbw GB/s", "busbw GB/s", *(["#wrong"] if checked else ())):
        table.add_column(name, justify="right")
    for name in ("vs MPI", "/ floor"):
        table.add_column(name, justify="right")
    last = None
    for row in rows:
        if last is not None and row.bytes != last:
            table.add_section()
        last = row.bytes
        times = [f"{t:.1f}" if t < 1000 else f"{t:,.0f}" for t in (row.min_us, row.p50_us, row.p99_us)]
        rates = [f"{r:.2f}" for r in (row.algbw_GBps, row.busbw_GBps)]
        wrong = "-" if row.wrong is None else f"[red]{row.wrong}[/red]" if row.wrong else "0"
        ratio = "-" if row.vs_native is None else f"{row.vs_native:.2f}x"
        floor = "-" if row.floor_us is None or row.bytes < FLOOR_BYTES else f"{row.p50_us / row.floor_us:.2f}"
        numbers = [*times, *rates, *([wrong] if checked else ()), ratio, floor]
        table.add_row(show_bytes(row.bytes), row.algorithm, row.array, *numbers)
    show_table(table)


def print_overlap(rows: Sequence[OverlapRow], title: str) -> None:
    """Print rows as a table on standard output."""
    caption = (
        "overall: compute and the call together. pure comm.: the call alone. "
        "overlap: the share of the call that compute hides."
    )
    table = Table(title=title, caption=caption)
    for name in ("size", "algorithm", "array", "overall us", "compute us", "pure comm. us", "overlap %"):
        table.add_column(name, justify="left" if name in ("algorithm", "array") else "right")
    for row in rows:
        numbers = [f"{value:.1f}" for value in (row.overall_us, row.compute_us, row.pure_us, row.overlap_percent)]
        table.add_row(show_bytes(row.bytes), row.algorithm, row.array, *numbers)
    show_table(table)


def write_rows(rows: Sequence[Any], path: Path) -> None:
    """Write rows (of any dataclass) as a JSON list. Each row also gets `on`, a description of the machine."""
    where = machine()
    write_json(path, [asdict(row) | {"on": where} for row in rows])


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write rows as comma-separated values with a header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=list(asdict(rows[0])))
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_text(path, text.getvalue())


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw median time and bus bandwidth over size as a PNG, with a line for each algorithm and kind of array."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for algorithm, array in dict.fromkeys((row.algorithm, row.array) for row in rows):
        line = [row for row in rows if (row.algorithm, row.array) == (algorithm, array)]
        style = {"marker": "o", "ms": 3.5, "ls": "-" if array == "empty" else "--", "label": f"{algorithm}, {array}"}
        left.plot([r.bytes for r in line], [r.p50_us for r in line], **style)
        right.plot([r.bytes for r in line], [r.busbw_GBps for r in line], **style)
    left.set(xscale="log", yscale="log", xlabel="bytes", ylabel="median time (us)")
    right.set(xscale="log", xlabel="bytes", ylabel="bus bandwidth (GB/s)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_xscale("log", base=2)
    left.legend(fontsize=8)
    figure.suptitle(title, fontsize=11)
    with writing(path):
        files.write_picture(path, figure, dpi=130)
