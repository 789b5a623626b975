"""What each host runs for `examples.reproduce.torch.slow_links`: one way to train a language model, for some seconds.

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
from diloco import batch_of, loss_at, parts, test_loss
from torch_language import Language, letters

WORLD = MPI.COMM_WORLD
LEARNING_RATE = 3e-3
NIC = "d0:"
"""Of a host of a lab whose switch is a star."""


class Way(NamedTuple):
    """One way to train."""

    model: nn.Module
    step: Callable[[], Any]
    rank: int
    close: Callable[[], Any]
    waits: bool
    """True where all workers end a step together in which they talk."""


def way_of(name: str, model: nn.Module, every: int) -> Way:
    """Make a way to train. A server serves in here, and leaves by SystemExit."""
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
    """Return the bytes that this host has sent through its link."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        if line.strip().startswith(NIC):
            return int(line.split()[9])
    return 0


def main(way: str, seconds: float, every: int, batch: int) -> dict[str, Any]:
    """Return the curve of worker 0, the model's bytes and what a host has sent."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text, count = letters()
    text, test = parts(text)
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
        before = before or sent()  # in the first steps DataParallel measures the network
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
