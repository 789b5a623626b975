"""The program of each host for `examples.reproduce.torch.lab`: predicts and times an MLP's steps by its buckets.

python -m examples.reproduce.torch.lab_ranks REQUEST ANSWER
REQUEST holds {"widths": [N, ...], "batch": B, "steps": S}.

A step is predicted from the same step without exchange, and from alpha and beta, which two timed allreduces give. The
sum of a bucket starts when its last gradient is complete on all ranks and the bucket before it is done. It takes alpha
+ beta x bytes.
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
from collectives.benchmark.harness import measure
from collectives.simulator.cost import LinkCost
from examples.reproduce import rank
from mpips.torch.buckets import Bucket, cut_by_strategy, measure_allreduce

WORLD = MPI.COMM_WORLD
# steps in which DataParallel makes its plan, and DistributedDataParallel its buckets
WARM_STEPS = 4
MIB = 1 << 20
# DistributedDataParallel closes its first bucket, and each other one, when it reaches this size.
DDP_BYTES = MIB, 25 * MIB


class Compute(NamedTuple):
    """The times of a step without exchange, in seconds, on the slowest rank."""

    # numbers of the parameters, in the order in which their gradients become ready
    order: list[int]
    # times from the beginning of the step at which they are ready, in that order
    ready: list[float]
    # time at which the backward pass ends
    backward: float
    # duration of the rest of the step
    update: float


class Row(NamedTuple):
    """The result of one strategy: the bytes of its buckets, and the seconds of a step."""

    buckets: str
    nbytes: list[int]
    predicted: float
    measured: float


def network(widths: Sequence[int]) -> nn.Module:
    """Return a ReLU network with the same weights on all ranks."""
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def stepping(model: nn.Module, x: Tensor) -> Callable[[], float]:
    """Return a step of SGD. The step returns the time (perf_counter) at which its backward pass ended."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()
        ended = time.perf_counter()
        optimizer.step()
        return ended

    return step


def slowest(seconds: Sequence[float]) -> np.ndarray:
    """Return the largest value over all ranks of each number. Collective."""
    most = np.array(seconds)
    WORLD.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    return most


def alone(model: nn.Module, x: Tensor, steps: int) -> Compute:
    """Time steps without exchange that all ranks run at the same time. Collective."""
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


def predicted(found: Compute, nbytes: Sequence[int], cost: LinkCost, buckets: Sequence[Bucket]) -> float:
    """Predict the seconds of a step with these buckets. `nbytes`: size of each gradient, in the order of readiness."""
    end = 0.0
    for first, last in buckets:
        end = max(end, found.ready[last - 1]) + cost.alpha + cost.beta * sum(nbytes[first:last])
    return max(end, found.backward) + found.update


def by_ddp(nbytes: Sequence[int]) -> list[Bucket]:
    """Return the buckets that DistributedDataParallel makes of gradients of these sizes."""
    found, first, held = [], 0, 0
    for index, n in enumerate(nbytes):
        held += n
        if held >= DDP_BYTES[bool(found)] or index == len(nbytes) - 1:
            found.append(Bucket(first, index + 1))
            first, held = index + 1, 0
    return found


def main(widths: Sequence[int], batch: int, steps: int) -> dict[str, Any]:
    """Return the answer: the times without exchange, alpha, beta, and the rows of the table. Collective."""
    torch.set_num_threads(1)
    dist.init_process_group("mpips")
    model = network(widths)
    x = torch.randn(batch, widths[0], generator=torch.Generator().manual_seed(WORLD.rank))
    found = alone(copy.deepcopy(model), x, steps)
    cost = measure_allreduce(WORLD, "auto")
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    nbytes = [sizes[index] for index in found.order]
    strategies = {"optimal": "optimal", "MG-WFBP": "merged", "one bucket": "single"}
    cuts = {name: cut_by_strategy(nbytes, found.ready, cost, word) for name, word in strategies.items()}
    cuts["DDP, 25 MB"] = by_ddp(nbytes)
    models: dict[str, nn.Module] = {
        name: mpips.torch.DataParallel(copy.deepcopy(model), buckets=word) for name, word in strategies.items()
    }
    models["DDP, 25 MB"] = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=True)
    calls = [stepping(each, x) for each in models.values()]
    for call in calls:
        for _ in range(WARM_STEPS):
            call()
    timings = measure(WORLD, calls, 0.0, steps)
    rows = []
    for (name, each), timing in zip(models.items(), timings, strict=True):
        if isinstance(each, mpips.torch.DataParallel):
            named = dict(each.module.named_parameters())
            lengths = [sum(4 * named[word].numel() for word in words) for words in each.buckets]
        else:
            lengths = [sum(nbytes[slice(*bucket)]) for bucket in cuts[name]]
        rows.append(Row(name, lengths, predicted(found, nbytes, cost, cuts[name]), timing.median))
    dist.destroy_process_group()
    return {"compute": found._asdict(), "alpha": cost.alpha, "beta": cost.beta, "rows": [row._asdict() for row in rows]}


if __name__ == "__main__":
    found = main(**rank.request())
    if WORLD.rank == 0:
        rank.answer(found)
