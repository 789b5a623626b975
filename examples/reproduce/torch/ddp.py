"""Times a training step in PyTorch with gradients averaged by gloo, mpi4py, "mpips", and mpips's DataParallel.

    mpips run -w 4 -m examples.reproduce.torch.ddp [--models mlp-1M,cnn] [--forms plain,fp16] [--json FILE]

All contenders take turns in one job, with one thread for each rank. The forms are plain DistributedDataParallel, the
same with PyTorch's hooks for fp16 and PowerSGD (rank 2), and FSDP2, which cuts each layer.

In the plain form gloo is measured with buckets of 25 MB and of 1 MB, and the faster one counts. The cost of
communication is the time of a step minus that of the same step without any exchange, which all ranks run at the same
time. The ceiling is the speed, relative to gloo's, that a contender would have if communication cost nothing. A step
takes as long as its slowest rank, and the result is the median over the rounds.
"""

import copy
import json
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from mpi4py import MPI
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import mpips.torch
from collectives.benchmark import harness
from collectives.terminal import OutFile, RankedCommand, Seconds, show_progress, show_table, write_text

WIDTHS = {
    "mlp-0.3M": (64, 448, 448, 10),
    "mlp-1M": (784, 800, 400, 10),
    "mlp-4M": (784, 1600, 1600, 10),
    "mlp-17M": (1024, 3200, 3200, 1000),
}
MODELS = (*WIDTHS, "cnn")
FORMS = ("plain", "fp16", "powersgd", "fsdp2")
BATCH = 16
# Megabytes of a bucket, so large that there is only one: with several, PowerSGD sometimes hangs on gloo.
ONE = 1000.0
# name of the step without any exchange
ALONE = "alone"


class Row(NamedTuple):
    """The result of one contender with one model in one form."""

    model: str
    form: str
    parameters: int
    ranks: int
    contender: str
    # seconds of a step, and the part of them that communication costs
    step_s: float
    communication_s: float
    # its steps a second over gloo's
    over_gloo: float
    # the value that `over_gloo` would have if communication cost nothing
    ceiling_over_gloo: float
    # its cost of communication over gloo's
    share_of_gloo: float


def network(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model and a batch of inputs for it."""
    if name == "cnn":
        convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 64, 10)), torch.randn(BATCH, 1, 8, 8)
    widths = WIDTHS[name]
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(BATCH, widths[0])


def by_mpi4py(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook of DistributedDataParallel: the MPI library's blocking allreduce of a bucket."""
    gradients = bucket.buffer()
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, gradients.numpy())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients.div_(MPI.COMM_WORLD.size))
    return done


def hooked_by(hook: str, model: DistributedDataParallel, group: Any) -> DistributedDataParallel:
    """Register PyTorch's hook for fp16 or PowerSGD, and return the model."""
    if hook == "fp16":
        model.register_comm_hook(group, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def contenders(name: str, form: str, gloo: Any) -> dict[str, Callable[[], object]]:
    """Return contender -> its step, on models with the same first weights. Collective."""
    torch.manual_seed(1)
    model, x = network(name)

    def ddp(group: Any = None, megabytes: float = 25) -> DistributedDataParallel:
        return DistributedDataParallel(
            copy.deepcopy(model), process_group=group, bucket_cap_mb=megabytes, gradient_as_bucket_view=True
        )

    def sharded(group: Any) -> nn.Module:
        one = copy.deepcopy(model)
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in one.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=mesh)
        return fully_shard(one, mesh=mesh)

    made: dict[str, nn.Module] = {ALONE: copy.deepcopy(model)}
    if form == "plain":
        by_hand = ddp()
        by_hand.register_comm_hook(None, by_mpi4py)
        made |= {
            "gloo, 25 MB": ddp(gloo),
            "gloo, 1 MB": ddp(gloo, 1),
            "mpi4py": by_hand,
            "mpips": ddp(),
            "DataParallel": mpips.torch.DataParallel(copy.deepcopy(model)),
        }
    elif form == "fsdp2":
        made |= {"gloo": sharded(gloo), "mpips": sharded(dist.group.WORLD)}
    else:
        made |= {"gloo": hooked_by(form, ddp(gloo, ONE), gloo), "mpips": hooked_by(form, ddp(None, ONE), None)}
    return {contender: stepping(one, x) for contender, one in made.items()}


def stepping(model: nn.Module, x: Tensor) -> Callable[[], object]:
    """Return a step of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def measure(name: str, form: str, gloo: Any, rounds: int, seconds: float) -> list[Row]:
    """Time all contenders with one model in one form. Collective."""
    steps = contenders(name, form, gloo)
    for step in steps.values():
        # DataParallel has its plan after a few steps.
        for _ in range(5):
            step()
    timings = harness.measure(MPI.COMM_WORLD, list(steps.values()), seconds, rounds)
    medians = {each: timing.median for each, timing in zip(steps, timings, strict=True)}
    best = min((each for each in medians if each.startswith("gloo")), key=lambda each: medians[each])
    cost = medians[best] - medians[ALONE]
    parameters = sum(parameter.numel() for parameter in network(name)[0].parameters())
    rows = []
    for each, step_s in medians.items():
        over = step_s - medians[ALONE]
        ratios = medians[best] / step_s, medians[best] / medians[ALONE], over / cost
        rows.append(Row(name, form, parameters, MPI.COMM_WORLD.size, each, step_s, over, *ratios))
    return rows


def table(rows: list[Row]) -> Table:
    """Build the table of the rows, in milliseconds."""
    view = Table(title=f"a step on {rows[0].ranks} ranks, batches of {BATCH}")
    words = ("model", "form", "contender")
    for column in (*words, "parameters", "step, ms", "communication, ms", "x gloo", "ceiling", "of gloo's cost"):
        view.add_column(column, justify="left" if column in words else "right")
    last = {row.form: row.contender for row in rows}
    for row in rows:
        view.add_row(
            row.model,
            row.form,
            row.contender,
            f"{row.parameters:,}",
            f"{1e3 * row.step_s:.2f}",
            f"{1e3 * row.communication_s:.2f}",
            f"{row.over_gloo:.2f}",
            f"{row.ceiling_over_gloo:.2f}",
            f"{row.share_of_gloo:.2f}",
            end_section=row.contender == last[row.form],
        )
    return view


@click.command(cls=RankedCommand)
@click.option("--models", default=",".join(MODELS), show_default=True)
@click.option("--forms", default=",".join(FORMS), show_default=True)
@click.option("--rounds", default=7, type=click.IntRange(1), show_default=True)
@click.option("--seconds", default=10.0, type=Seconds(), show_default=True, help="For each model and form.")
@click.option("--json", "json_path", type=OutFile(), help="Write the rows as JSON.")
def main(models: str, forms: str, rounds: int, seconds: float, json_path: Path | None) -> None:
    """Measure and print; a program of every rank."""
    names, shapes = models.split(","), forms.split(",")
    for option, words, known in (("models", names, MODELS), ("forms", shapes, FORMS)):
        if unknown := [word for word in words if word not in known]:
            raise click.UsageError(f"--{option} {unknown[0]!r} is none of {', '.join(known)}")
    torch.set_num_threads(1)
    dist.init_process_group("mpips")
    gloo = dist.new_group(backend="gloo", timeout=timedelta(minutes=2))
    rows: list[Row] = []
    first = MPI.COMM_WORLD.rank == 0
    pairs = [(name, form) for form in shapes for name in names]
    with show_progress("models", len(pairs), first) as begin:
        for name, form in pairs:
            begin(f"{name}, {form}")
            rows += measure(name, form, gloo, rounds, seconds)
    dist.destroy_process_group()
    if first:
        show_table(table(rows))
        if json_path:
            write_text(json_path, json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
