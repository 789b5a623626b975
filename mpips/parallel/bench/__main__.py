"""Time steps of the MLP beside PyTorch: one process, batch parallel, model parallel.

python -m mpips.parallel.bench [--batch 100,1000] [--width 1024]                one process beside PyTorch
mpirun -n 2 python -m mpips.parallel.bench --grid 2x1 --batch 1000              speedup; beside DDP over gloo
mpirun -n 2 python -m mpips.parallel.bench --grid 1x2 --batch 1000 --width 4096 speedup of model parallelism
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table
from threadpoolctl import threadpool_limits

from collectives.terminal.console import OutFile, RankedCommand, console
from mpips.mlp import MLP
from mpips.mlp.command import report
from mpips.mlp.intervals import interval
from mpips.mlp.mesh import Mesh as Grid
from mpips.mlp.mesh import parse
from mpips.mlp.worker import Worker as Hybrid
from mpips.optimizers import SGD

from . import rivals
from .timing import Contender, compare

INPUTS, OUTPUTS = 16, 2


class Counts(click.ParamType):
    """Whole numbers of at least 1, commas between."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(word) for word in str(value).split(","))
        except ValueError:
            found = (0,)
        if min(found) < 1:
            self.fail(f"{value!r} must be numbers of at least 1 with commas between, for instance 100,1000", param, ctx)
        return found


@click.command(cls=RankedCommand, context_settings={"show_default": True})
@click.option("--grid", "grid_text", default="", help="BATCHxMODEL. [default: all ranks batch parallel]")
@click.option("--batch", default="100,1000", type=Counts(), help="Minibatches, commas between.")
@click.option("--width", default="1024", type=Counts(), help="Widths of the two hidden layers, commas between.")
@click.option("--seconds", default=15.0, help="About how long each case is timed.")
@click.option("--rounds", default=15, type=click.IntRange(1))
@click.option("--torch/--no-torch", "with_torch", default=True, help="PyTorch beside it, where it is installed.")
@click.option("--json", "json_path", type=OutFile(), help="Write the rows as JSON.")
def command(
    grid_text: str, batch: tuple[int, ...], width: tuple[int, ...], seconds: float, rounds: int, with_torch: bool,
    json_path: Path | None,
) -> None:
    """Time steps of a 16-width-width-2 network, float32, one BLAS thread a rank, beside PyTorch."""
    comm = MPI.COMM_WORLD
    try:
        grid = Grid(*(parse(grid_text) if grid_text else (comm.size, 1)), comm)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with_torch = with_torch and importlib.util.find_spec("torch") is not None
    rows = []
    with_ddp = False
    with threadpool_limits(1):
        if with_torch and comm.size > 1 and grid.model == 1:
            refusal = rivals.join(comm)
            with_ddp = refusal is None
            if refusal and comm.rank == 0:
                console().print(f"without DistributedDataParallel: {refusal}", markup=False)
        for hidden in width:
            for samples in batch:
                rows.append(_case(grid, hidden, samples, seconds, rounds, with_torch, with_ddp))
    if with_ddp:
        rivals.leave(comm)
    if comm.rank == 0:
        _show(rows)
        if json_path:
            report.write_json(json_path, {"grid": str(grid), "cores": os.cpu_count(), "rows": rows})


def _case(
    grid: Grid, width: int, batch: int, seconds: float, rounds: int, with_torch: bool, with_ddp: bool
) -> dict[str, float]:
    """One width and batch: seconds a step of every contender, and the ratios that matter; medians over rounds."""
    sizes = (INPUTS, width, width, OUTPUTS)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, INPUTS), dtype=np.float32)
    y = rng.standard_normal((batch, OUTPUTS), dtype=np.float32)
    contenders = _ours(grid, sizes, x, y)
    if with_torch:
        contenders += _theirs(grid, sizes, x, y, with_ddp)
    times = compare(contenders, grid.comm, seconds, rounds)
    medians = {name: float(np.median(values)) for name, values in times.items()}
    return {"width": width, "batch": batch, **medians, **_ratios(times)}


def _ours(grid: Grid, sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray) -> list[Contender]:
    alone = Grid(1, 1, MPI.COMM_SELF)
    serial = Hybrid(MLP(sizes, seed=1), alone, SGD(learning_rate=1e-3))
    tiny = Hybrid(MLP((1, 1, 1, 1), seed=1), alone, SGD(learning_rate=1e-3))
    contenders = [
        Contender("one process", lambda: serial.step(x, y, len(x)), everyone=False),
        Contender("Python", lambda: tiny.step(x[:1, :1], y[:1, :1], 1), everyone=False),
    ]
    if grid.comm.size > 1:
        hybrid = Hybrid(MLP(sizes, seed=1), grid, SGD(learning_rate=1e-3))
        mine = slice(*interval(len(x), grid.batch, grid.batch_index))
        contenders.append(Contender("grid", lambda: hybrid.step(x[mine], y[mine], len(x)), everyone=True))
    return contenders


def _theirs(grid: Grid, sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray, with_ddp: bool) -> list[Contender]:
    """PyTorch at each of its settings; the best of them counts."""
    contenders = []
    for fused in (False, True):
        name = "fused" if fused else "plain"
        contenders.append(Contender(f"torch {name}", rivals.torch_step(sizes, x, y, 1, fused), everyone=False))
    if with_ddp:
        mine = slice(*interval(len(x), grid.batch, grid.batch_index))
        for bucket in (1, 25):
            step = rivals.ddp_step(sizes, x[mine], y[mine], 1, True, bucket)
            contenders.append(Contender(f"ddp {bucket} MB", step, everyone=True))
    return contenders


def _ratios(times: dict[str, np.ndarray]) -> dict[str, float]:
    """Medians of what each round says, whose contenders had the machine one after the other; of a rival's settings the
    one with the least median counts."""

    def best(kind: str) -> np.ndarray | None:
        found = [values for name, values in times.items() if name.startswith(kind)]
        return min(found, key=np.median) if found else None

    def ratio(above: np.ndarray, below: np.ndarray) -> float:
        return float(np.median(above / below))

    alone, torch, ddp, grid = times["one process"], best("torch"), best("ddp"), times.get("grid")
    ratios = {"Python share": ratio(times["Python"], alone)}
    if torch is not None:
        ratios["one process / torch"] = ratio(alone, torch)
    if grid is not None:
        ratios["speedup"] = ratio(alone, grid)
        if ddp is not None:
            ratios["ddp / grid"] = ratio(ddp, grid)
    return ratios


def _show(rows: list[dict[str, float]]) -> None:
    names = [name for name in rows[0] if name not in ("width", "batch")]
    table = Table(title="ms a step, medians; ratios")
    table.add_column("")
    for row in rows:
        table.add_column(f"width {row['width']}, batch {row['batch']}", justify="right")
    ratios = ("Python share", "one process / torch", "speedup", "ddp / grid")
    for name in names:
        factor = 1.0 if name in ratios else 1e3
        table.add_row(name, *(f"{factor * row[name]:.3f}" for row in rows))
    console().print(table)


if __name__ == "__main__":
    command()
