"""The program of each host for `examples.reproduce.torch.slow_links`: trains a language model in one way.

python -m examples.reproduce.torch.slow_links_ranks REQUEST ANSWER
REQUEST holds {"way": WAY, "seconds": S, "every": H, "batch": B}.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import nn

import mpips.torch
from examples.reproduce import rank

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from diloco import batch_of, loss_at, split, test_loss
from torch_language import Language, letters

WORLD = MPI.COMM_WORLD
LEARNING_RATE = 3e-3
# the network interface of a host in a lab whose topology is a star
NIC = "d0:"


class Way(NamedTuple):
    """A way to train."""

    model: nn.Module
    # updates the weights
    step: Callable[[], Any]
    # number of this worker
    rank: int
    close: Callable[[], Any]
    # True if all workers take the same number of steps, because they exchange with each other
    waits: bool


def way_of(name: str, model: nn.Module, every: int) -> Way:
    """Set up a way to train. On a server this call serves, and ends in SystemExit."""
    inner = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    if name == "allreduce":
        parallel = mpips.torch.DataParallel(model)
        return Way(parallel, inner.step, WORLD.rank, lambda: None, True)
    if name == "elastic":
        options = {"kind": "dist_async", "servers": 1, "elastic": 0.5, "interval": every}
        averaged = mpips.torch.DistributedOptimizer(inner, model.named_parameters(), **options)
        return Way(model, averaged.step, averaged.store.rank, averaged.close, False)
    options = {"servers": 1, "compression": {"type": "int", "bits": 8}} if name == "DiLoCo, 8 bits" else {}
    trainer = mpips.torch.LocalSGD(model, inner, every=every, **options)
    return Way(model, trainer.step, trainer.store.rank, trainer.close, not options)


def sent() -> int:
    """Return the bytes that this host has sent through its link since it was made."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith(NIC):
            return int(line.split()[9])
    return 0


def main(way: str, seconds: float, every: int, batch: int) -> dict[str, Any]:
    """Train for `seconds`, and return the answer.

    It has worker 0's curve [(step, seconds, test loss)], the model's bytes, and the bytes that a host sent in a step.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, count = letters()
    text, test = split(text)
    model = Language(count, layers=1)
    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    made = way_of(way, model, every)
    curve = [(0, 0.0, test_loss(model, test))]
    step, over, before, begun = 0, False, 0, time.perf_counter()
    while not over:
        for parameter in model.parameters():
            parameter.grad = None if way != "allreduce" else parameter.grad
        if way == "allreduce":
            made.model.zero_grad(set_to_none=False)
        loss_at(made.model, text, batch_of(step, made.rank, text, batch)).backward()
        made.step()
        step += 1
        if step % every:
            continue
        # Count from here on, because DataParallel measures the network in the first steps.
        before = before or sent()
        if made.rank == 0:
            curve.append((step, time.perf_counter() - begun, test_loss(model, test)))
        over = time.perf_counter() - begun > seconds
        if made.waits:
            over = WORLD.bcast(over)
    through = sent() - before
    made.close()
    return {"curve": curve, "nbytes": nbytes, "sent": through / (step - every), "steps": step, "rank": made.rank}


if __name__ == "__main__":
    found = main(**rank.request())
    if found["rank"] == 0:
        rank.answer(found)
