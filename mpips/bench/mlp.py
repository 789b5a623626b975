"""`mpips bench mlp`: times steps of the MLP and of PyTorch, in one process, data parallel and tensor parallel.

    mpips bench mlp [--batch 100,1000] [--width 1024]                   one process, and PyTorch
    mpips bench mlp -n 2 --grid 2x1 --batch 1000                        speedup, and DDP over gloo
    mpips bench mlp -n 2 --grid 1x2 --batch 1000 --width 4096           speedup of tensor parallelism

PyTorch's step runs in one process. With data parallel ranks it also runs with DistributedDataParallel (DDP) over gloo.
"""

from __future__ import annotations

import importlib.util
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import click
import numpy as np
from mpi4py import MPI
from rich.table import Table
from threadpoolctl import threadpool_limits

from mpips.collectives.benchmark.case import join_gloo, leave_gloo
from mpips.collectives.benchmark.harness import TimedCall, measure
from mpips.collectives.machine import usable_cores
from mpips.collectives.terminal import (
    OutFile,
    RankedCommand,
    Whole,
    WholeList,
    console,
    show_progress,
    show_table,
    write_json,
)
from mpips.mlp.mesh import Mesh, misfit, parse
from mpips.mlp.network import interval
from mpips.mlp.perceptron import MLP
from mpips.mlp.training import Worker
from mpips.optimizers import SGD

INPUTS, OUTPUTS = 16, 2


def check(ranks: int, *, grid_text: str, **_: Any) -> None:
    """Raise click.UsageError if --grid is not a mesh of `ranks` ranks. Starts no MPI."""
    try:
        reason = misfit(*parse(grid_text), ranks) if grid_text else None
    except ValueError as error:
        reason = str(error)
    if reason:
        raise click.UsageError(reason)


@click.command("mlp", cls=RankedCommand, context_settings={"show_default": True})
@click.option("--grid", "grid_text", default="", show_default="all ranks data parallel", help="BATCHxMODEL.")
@click.option("--batch", default="100,1000", type=WholeList(), help="Minibatches, commas between.")
@click.option("--width", default="1024", type=WholeList(), help="Widths of the two hidden layers, commas between.")
@click.option("--seconds", default=15.0, help="About how long each case is timed.")
@click.option("--rounds", default=15, type=Whole(1), help="In each round each kind of step has a turn.")
@click.option("--torch/--no-torch", "with_torch", default=True, help="Also time PyTorch, if it is installed.")
@click.option("--json", "json_path", type=OutFile(), help="Write the rows as JSON.")
def command(
    grid_text: str,
    batch: tuple[int, ...],
    width: tuple[int, ...],
    seconds: float,
    rounds: int,
    with_torch: bool,
    json_path: Path | None,
) -> None:
    """Time steps of a 16-width-width-2 network by mpips and by PyTorch: float32, one BLAS thread a rank.

    Start the ranks with -n/--ranks, or with mpirun: mpirun -n P python -m mpips.bench.mlp.
    """
    comm = MPI.COMM_WORLD
    check(comm.size, grid_text=grid_text)
    mesh = Mesh(*(parse(grid_text) if grid_text else (comm.size, 1)), comm)
    with_torch = with_torch and importlib.util.find_spec("torch") is not None
    rows = []
    with_ddp = False
    with threadpool_limits(1):
        if with_torch and comm.size > 1 and mesh.model == 1:
            refusal = join_gloo(comm)
            with_ddp = not refusal
            if refusal and comm.rank == 0:
                console().print(f"without DistributedDataParallel: {refusal}", markup=False)
        cases = list(product(width, batch))
        with show_progress("steps", len(cases), comm.rank == 0) as begin:
            for hidden, samples in cases:
                begin(f"width {hidden}, batch {samples}")
                rows.append(_case(mesh, hidden, samples, seconds, rounds, with_torch, with_ddp))
    if with_ddp:
        leave_gloo(comm)
    if comm.rank == 0:
        _show(rows)
        if json_path:
            write_json(json_path, {"grid": str(mesh), "cores": usable_cores(), "rows": rows})


def _case(
    mesh: Mesh, width: int, batch: int, seconds: float, rounds: int, with_torch: bool, with_ddp: bool
) -> dict[str, float]:
    """Time the steps of mpips and PyTorch at one width and batch size.

    Return the row for the table: width, batch, the seconds of each kind of step, and the ratios between the steps.
    Times and ratios are medians over the rounds.
    """
    sizes = (INPUTS, width, width, OUTPUTS)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, INPUTS), dtype=np.float32)
    y = rng.standard_normal((batch, OUTPUTS), dtype=np.float32)
    steps = _ours(mesh, sizes, x, y)
    if with_torch:
        steps |= _theirs(mesh, sizes, x, y, with_ddp)
    # A step that needs only one process runs on rank 0, while the other ranks sleep.
    everyone = ("grid", *(name for name in steps if name.startswith("ddp")))
    calls = [step if mesh.comm.rank == 0 or name in everyone else None for name, step in steps.items()]
    timings = dict(zip(steps, measure(mesh.comm, calls, seconds, rounds), strict=True))
    medians = {name: timing.median for name, timing in timings.items()}
    return {"width": width, "batch": batch, **medians, **_ratios({name: t.rounds for name, t in timings.items()})}


def _ours(mesh: Mesh, sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray) -> dict[str, TimedCall]:
    """Return steps of mpips: in one process, on the mesh ("grid"), and of a network of width 1 ("Python").

    The network of width 1 computes almost nothing, so the time of its step is the time that every step spends in
    Python.
    """
    alone = Mesh(1, 1, MPI.COMM_SELF)
    serial = Worker(MLP(sizes, seed=1), alone, SGD(learning_rate=1e-3))
    tiny = Worker(MLP((1, 1, 1, 1), seed=1), alone, SGD(learning_rate=1e-3))
    steps: dict[str, TimedCall] = {
        "one process": lambda: serial.step(x, y, len(x)),
        "Python": lambda: tiny.step(x[:1, :1], y[:1, :1], 1),
    }
    if mesh.comm.size > 1:
        worker = Worker(MLP(sizes, seed=1), mesh, SGD(learning_rate=1e-3))
        own = slice(*interval(len(x), mesh.batch, mesh.batch_index))
        steps["grid"] = lambda: worker.step(x[own], y[own], len(x))
    return steps


def _theirs(mesh: Mesh, sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray, with_ddp: bool) -> dict[str, TimedCall]:
    """Return PyTorch's steps, one for each setting. `_ratios` compares only the fastest of them."""
    steps = {"torch plain": torch_step(sizes, x, y, False), "torch fused": torch_step(sizes, x, y, True)}
    if with_ddp:
        own = slice(*interval(len(x), mesh.batch, mesh.batch_index))
        for bucket in (1, 25):
            steps[f"ddp {bucket} MB"] = torch_step(sizes, x[own], y[own], True, bucket)
    return steps


def _ratios(times: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the ratios between steps, as medians over the rounds. For PyTorch, the fastest setting is used.

    A ratio is taken within a round, in which the steps run one after another. So the machine is in about the same state
    for both steps of a ratio.
    """

    def best(kind: str) -> np.ndarray | None:
        candidates = [values for name, values in times.items() if name.startswith(kind)]
        return min(candidates, key=np.median) if candidates else None

    def ratio(above: np.ndarray, below: np.ndarray) -> float:
        return float(np.median(above / below))

    alone, torch, ddp, mesh = times["one process"], best("torch"), best("ddp"), times.get("grid")
    ratios = {"Python share": ratio(times["Python"], alone)}
    if torch is not None:
        ratios["one process / torch"] = ratio(alone, torch)
    if mesh is not None:
        ratios["speedup"] = ratio(alone, mesh)
        if ddp is not None:
            ratios["ddp / grid"] = ratio(ddp, mesh)
    return ratios


def _show(rows: list[dict[str, float]]) -> None:
    names = [name for name in rows[0] if name not in ("width", "batch")]
    caption = "Python: a step of a network of width 1; its share is of one process's step. speedup: one process / grid"
    table = Table(title="ms a step, medians; below them ratios", caption=caption)
    table.add_column("")
    for row in rows:
        table.add_column(f"width {row['width']}, batch {row['batch']}", justify="right")
    ratios = ("Python share", "one process / torch", "speedup", "ddp / grid")
    for name in names:
        factor = 1.0 if name in ratios else 1e3
        table.add_row(name, *(f"{factor * row[name]:.3f}" for row in rows))
    show_table(table)


def torch_step(
    sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray, fused: bool, bucket_megabytes: int = 0
) -> TimedCall:
    """Return PyTorch's step of SGD on a fully connected ReLU network with mean squared error, on one thread.

    Args:
        x: This rank's samples.
        fused: Use PyTorch's fused optimizer.
        bucket_megabytes: Size of DistributedDataParallel's buckets. It uses the process group that `join_gloo` made.
            0: no DistributedDataParallel, the step runs in this process alone.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[Any] = []
    for inputs, outputs in pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    network = torch.nn.Sequential(*layers[:-1])
    if bucket_megabytes:
        network = torch.nn.parallel.DistributedDataParallel(
            network, gradient_as_bucket_view=True, bucket_cap_mb=bucket_megabytes
        )
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, fused=fused)
    loss = torch.nn.MSELoss()
    samples, targets = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> None:
        optimizer.zero_grad()
        loss(network(samples), targets).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    command()
