"""Time steps of the MLP beside PyTorch: one process, batch parallel, model parallel.

python -m mpips.parallel.bench [--batch 100,1000] [--width 1024]                one process beside PyTorch
mpirun -n 2 python -m mpips.parallel.bench --grid 2x1 --batch 1000              speedup; beside DDP over gloo
mpirun -n 2 python -m mpips.parallel.bench --grid 1x2 --batch 1000 --width 4096 speedup of model parallelism
"""

from __future__ import annotations

import importlib.util
import os

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table
from threadpoolctl import threadpool_limits

from collectives.console import console
from mpips.optimizers import SGD

from .. import report
from ..grid import Grid, parse
from ..hybrid import Hybrid
from ..mlp import MLP
from ..slices import interval
from . import rivals
from .timing import Contender, compare

INPUTS, OUTPUTS = 16, 2


@click.command(context_settings={"show_default": True})
@click.option("--grid", "grid_text", default="", help="BATCHxMODEL. [default: all ranks batch parallel]")
@click.option("--batch", default="100,1000", help="Minibatches, commas between.")
@click.option("--width", default="1024", help="Widths of the two hidden layers, commas between.")
@click.option("--seconds", default=10.0, help="About how long each case is timed.")
@click.option("--rounds", default=7, type=click.IntRange(1))
@click.option("--torch/--no-torch", "with_torch", default=True, help="PyTorch beside it, where it is installed.")
@click.option("--json", "json_path", help="Write the rows as JSON.")
def command(
    grid_text: str, batch: str, width: str, seconds: float, rounds: int, with_torch: bool, json_path: str | None
) -> None:
    """Time steps of a 16-width-width-2 network, float32, one BLAS thread a rank, beside PyTorch."""
    comm = MPI.COMM_WORLD
    grid = Grid(*(parse(grid_text) if grid_text else (comm.size, 1)), comm)
    with_torch = with_torch and importlib.util.find_spec("torch") is not None
    rows = []
    with threadpool_limits(1):
        if with_torch and comm.size > 1:
            rivals.join(comm)
        for hidden in (int(word) for word in width.split(",")):
            for samples in (int(word) for word in batch.split(",")):
                rows.append(_case(grid, hidden, samples, seconds, rounds, with_torch))
    if comm.rank == 0:
        _show(rows)
        if json_path:
            report.write_json(json_path, {"grid": str(grid), "cores": os.cpu_count(), "rows": rows})
    if with_torch and comm.size > 1:
        rivals.leave()


def _case(grid: Grid, width: int, batch: int, seconds: float, rounds: int, with_torch: bool) -> dict[str, float]:
    """One width and batch: seconds a step of every contender, and the ratios that matter."""
    sizes = (INPUTS, width, width, OUTPUTS)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, INPUTS), dtype=np.float32)
    y = rng.standard_normal((batch, OUTPUTS), dtype=np.float32)
    contenders = _ours(grid, sizes, x, y)
    if with_torch:
        contenders += _theirs(grid, sizes, x, y)
    times = compare(contenders, grid.comm, seconds, rounds)
    return {"width": width, "batch": batch, **times, **_ratios(times)}


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


def _theirs(grid: Grid, sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray) -> list[Contender]:
    """PyTorch at each of its settings; the best of them counts."""
    contenders = []
    for fused in (False, True):
        name = "fused" if fused else "plain"
        contenders.append(Contender(f"torch {name}", rivals.torch_step(sizes, x, y, 1, fused), everyone=False))
    if grid.comm.size > 1 and grid.model == 1:
        mine = slice(*interval(len(x), grid.batch, grid.batch_index))
        for bucket in (1, 25):
            step = rivals.ddp_step(sizes, x[mine], y[mine], 1, True, bucket)
            contenders.append(Contender(f"ddp {bucket} MB", step, everyone=True))
    return contenders


def _ratios(times: dict[str, float]) -> dict[str, float]:
    best = {
        kind: min((t for name, t in times.items() if name.startswith(kind)), default=0.0) for kind in ("torch", "ddp")
    }
    ratios = {"Python share": times["Python"] / times["one process"]}
    if best["torch"]:
        ratios["one process / torch"] = times["one process"] / best["torch"]
    if "grid" in times:
        ratios["speedup"] = times["one process"] / times["grid"]
    if best["ddp"]:
        ratios["ddp / grid"] = best["ddp"] / times["grid"]
    return ratios


def _show(rows: list[dict[str, float]]) -> None:
    names = [name for name in rows[0] if name not in ("width", "batch")]
    table = Table(title="ms a step, medians; ratios")
    table.add_column("")
    for row in rows:
        table.add_column(f"width {row['width']}, batch {row['batch']}", justify="right")
    ratios = _ratios(dict.fromkeys(names, 1.0))
    for name in names:
        factor = 1.0 if name in ratios else 1e3
        table.add_row(name, *(f"{factor * row[name]:.3f}" for row in rows))
    console().print(table)


if __name__ == "__main__":
    command()
