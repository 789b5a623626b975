"""What each host runs for `examples.reproduce.torch.lab`: an MLP's computation, then its training steps by buckets.

python -m examples.reproduce.torch.lab_ranks REQUEST ANSWER
REQUEST holds {"widths": [N, ...], "batch": B, "steps": S}. A step of which the exchange is measured is predicted from
the same step without any, and from the cost of two allreduces: a bucket starts when its last gradient is there on all
ranks and the bucket before it is through, and takes alpha + beta bytes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mpips.torch
from examples.reproduce import rank
from mpips.torch.buckets import AllreduceCosts, Bucket, cut_by_strategy, measure_costs

WORLD = MPI.COMM_WORLD
WARM_STEPS = 4
"""In which DataParallel makes its plan, and DistributedDataParallel its buckets."""
MIB = 1 << 20
DDP_BYTES = MIB, 25 * MIB
"""DistributedDataParallel's first bucket, and the others, are closed as they reach this."""


class Compute(NamedTuple):
    """Seconds of a step without exchange, from its begin on the slowest rank."""

    order: list[int]
    """Of parameters, as their gradients become ready."""
    ready: list[float]
    """In that order."""
    backward: float
    """When backward has ended."""
    update: float
    """What follows it."""


class Row(NamedTuple):
    """Buckets by one strategy: their bytes, and seconds of a step."""

    buckets: str
    nbytes: list[int]
    predicted: float
    measured: float


def network(widths: Sequence[int]) -> nn.Module:
    """A ReLU network, the same on all ranks."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stepping(model: nn.Module, x: Tensor) -> Callable[[], float]:
    """A step of SGD; it returns when backward had ended."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        ended = time.perf_counter()
        optimizer.step()
        return ended

    return step


def slowest(seconds: Sequence[float]) -> np.ndarray:
    """Of each number the largest of all ranks'."""
    most = np.array(seconds)
    WORLD.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    return most


def alone(model: nn.Module, x: Tensor, steps: int) -> Compute:
    """Steps that all ranks make at once, without exchange."""
    parameters = list(model.parameters())
    at = np.zeros(len(parameters))

    def note(index: int) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            at[index] = time.perf_counter()

        return hook

    for index, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(note(index))
    step, rows = stepping(model, x), []
    for _ in range(steps + 1):
        WORLD.Barrier()
        begun = time.perf_counter()
        ended = step()
        rows.append(slowest([*(at - begun), ended - begun, time.perf_counter() - ended]))
    *ready, backward, update = (float(value) for value in np.median(rows[1:], axis=0))
    order = sorted(range(len(parameters)), key=ready.__getitem__)
    return Compute(order, [ready[index] for index in order], backward, update)


def predicted(found: Compute, nbytes: Sequence[int], cost: AllreduceCosts, buckets: Sequence[Bucket]) -> float:
    """Seconds of a step with these buckets of `nbytes`, which are in the order of readiness."""
    end = 0.0
    for first, last in buckets:
        end = max(end, found.ready[last - 1]) + cost.alpha + cost.beta * sum(nbytes[first:last])
    return max(end, found.backward) + found.update


def by_ddp(nbytes: Sequence[int]) -> list[Bucket]:
    """DistributedDataParallel's buckets."""
    found, first, held = [], 0, 0
    for index, n in enumerate(nbytes):
        held += n
        if held >= DDP_BYTES[bool(found)] or index == len(nbytes) - 1:
            found.append(Bucket(first, index + 1))
            first, held = index + 1, 0
    return found


def measured(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median seconds of a step of each, of its slowest rank, in turn."""
    rows = []
    for step in steps.values():
        for _ in range(WARM_STEPS):
            step()
    for _ in range(rounds):
        row = []
        for step in steps.values():
            WORLD.Barrier()
            begun = time.perf_counter()
            step()
            row.append(time.perf_counter() - begun)
        rows.append(slowest(row))
    return dict(zip(steps, np.median(rows, axis=0).tolist(), strict=True))


def main(widths: Sequence[int], batch: int, steps: int) -> dict[str, Any]:
    """The rows of the table. Collective."""
    torch.set_num_threads(1)
    dist.init_process_group("mpips")
    model = network(widths)
    x = torch.randn(batch, widths[0], generator=torch.Generator().manual_seed(WORLD.rank))
    found = alone(copy.deepcopy(model), x, steps)
    cost = measure_costs(WORLD, "auto")
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    nbytes = [sizes[index] for index in found.order]
    strategies = {"optimal": "optimal", "MG-WFBP": "merged", "one bucket": "single"}
    cuts = {name: cut_by_strategy(nbytes, found.ready, cost, word) for name, word in strategies.items()}
    cuts["DDP, 25 MB"] = by_ddp(nbytes)
    models: dict[str, nn.Module] = {
        name: mpips.torch.DataParallel(copy.deepcopy(model), buckets=word) for name, word in strategies.items()
    }
    models["DDP, 25 MB"] = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
    seconds = measured({name: stepping(each, x) for name, each in models.items()}, steps)
    rows = []
    for name, each in models.items():
        if isinstance(each, mpips.torch.DataParallel):
            named = dict(each.module.named_parameters())
            lengths = [sum(4 * named[word].numel() for word in words) for words in each.buckets]
        else:
            lengths = [sum(nbytes[slice(*bucket)]) for bucket in cuts[name]]
        rows.append(Row(name, lengths, predicted(found, nbytes, cost, cuts[name]), seconds[name]))
    dist.destroy_process_group()
    return {"compute": found._asdict(), "alpha": cost.alpha, "beta": cost.beta, "rows": [row._asdict() for row in rows]}


if __name__ == "__main__":
    found = main(**rank.request())
    if WORLD.rank == 0:
        rank.answer(found)
