"""Ordinary training programs, as people write them, on each way to exchange gradients.

    mpips run -w 2 tests/mpi/torch/programs.py WAY FILE [PROGRAM ...]

WAY is `gloo` or `mpips` (DistributedDataParallel on that backend), `data_parallel`, or `optimizer`
(DistributedOptimizer, with servers where the job has some). FILE gets, by program, the parameters after 20 steps on
worker 0, how far the workers are apart, and each worker's error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import OneCycleLR

import mpips.torch

STEPS, BATCH, FEATURES = 20, 8, 6


class Way:
    """One way to exchange gradients, and who takes part in it."""

    def __init__(self, name: str, comm: MPI.Comm) -> None:
        self.name, self.rank, self.size = name, comm.rank, comm.size
        self._wrapped: Any = None

    def begin(self, model: nn.Module, optimizer: Any, **ddp: Any) -> tuple[nn.Module, Any]:
        """Wrap the model or the optimizer. `ddp` goes to DistributedDataParallel alone."""
        if self.name == "data_parallel":
            return mpips.torch.DataParallel(model, buckets=0.0005), optimizer
        if self.name == "optimizer":
            self._wrapped = mpips.torch.DistributedOptimizer(optimizer, model.named_parameters(), kind="dist_sync")
            return model, self._wrapped
        dist.init_process_group(self.name)
        return nn.parallel.DistributedDataParallel(model, **{"bucket_cap_mb": 0.0005, **ddp}), optimizer

    def end(self) -> None:
        """Close what `begin` has opened."""
        if self._wrapped is not None:
            self._wrapped.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def without_exchange(self, model: Any) -> Any:
        """Return the context in which a backward pass only adds to the gradients."""
        return nullcontext() if self.name == "optimizer" else model.no_sync()

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return this worker's inputs (BATCH, FEATURES) and targets (BATCH, 1) of a step."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        x = torch.randn(BATCH, FEATURES, generator=generator)
        return x, x[:, :1] + 0.1 * torch.randn(BATCH, 1, generator=generator)

    def words(self, step: int, most: int = 11) -> Tensor:
        """Return BATCH words of this worker."""
        return torch.randint(most, (BATCH,), generator=torch.Generator().manual_seed(77 * step + self.rank))


Program = Callable[[Way], nn.Module]
Loss = Callable[[Any, int], Tensor]
"""Gets the wrapped model and the step."""
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """Put a program into the table."""
    PROGRAMS[function.__name__] = function
    return function


def mlp(outputs: int = 1) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, outputs))


def sgd(parameters: Iterable[Any], lr: float = 0.05) -> torch.optim.SGD:
    """Return SGD whose momentum and decay move a parameter that has no gradient, if anything may."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.05)


def nothing(step: int) -> None:
    pass


def train(
    way: Way,
    model: nn.Module,
    optimizer: Any = None,
    loss: Loss | None = None,
    before: Any = nothing,
    clip: Any = nothing,
    scheduler: Any = None,
    to_none: bool = True,
    **ddp: Any,
) -> nn.Module:
    """Train by the usual loop, and return the model as it was before it was wrapped."""

    def regression(net: Any, step: int) -> Tensor:
        x, y = way.batch(step)
        return mse_loss(net(x), y)

    net, optimizer = way.begin(model, optimizer or sgd(model.parameters()), **ddp)
    schedule = scheduler(optimizer) if scheduler else None
    for step in range(STEPS):
        before(step)
        optimizer.zero_grad(set_to_none=to_none)
        (loss or regression)(net, step).backward()
        clip(step)
        optimizer.step()
        if schedule:
            schedule.step()
    return model


# ---- what is trained


@program
def plain(way: Way) -> nn.Module:
    return train(way, mlp())


@program
def frozen(way: Way) -> nn.Module:
    model = mlp()
    model[2].requires_grad_(False)
    return train(way, model)


@program
def frozen_later(way: Way) -> nn.Module:
    """Freeze a layer in mid-training. DDP itself needs to be told that gradients may miss."""
    model = mlp()
    freeze = lambda step: step == STEPS // 2 and model[0].requires_grad_(False)  # noqa: E731
    return train(way, model, before=freeze, find_unused_parameters=True)


class Branches(nn.Module):
    """A trunk and two branches, of which a call takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(FEATURES, 8), nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        return (self.left if left else self.right)(torch.tanh(self.trunk(x)))


def branches(way: Way, takes_left: Callable[[int], bool]) -> nn.Module:
    def loss(net: Any, step: int) -> Tensor:
        x, y = way.batch(step)
        return mse_loss(net(x, takes_left(step)), y)

    return train(way, Branches(), loss=loss, find_unused_parameters=True)


@program
def branch_by_step(way: Way) -> nn.Module:
    return branches(way, lambda step: step % 3 == 0)


@program
def branch_by_rank(way: Way) -> nn.Module:
    return branches(way, lambda step: (step + way.rank) % 2 == 0)


class Tied(nn.Module):
    """A language model whose embedding is its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.mix = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embedding(words))))


def next_word(way: Way) -> Loss:
    def loss(net: Any, step: int) -> Tensor:
        text = way.words(step)
        return cross_entropy(net(text), text.roll(1))

    return loss


@program
def tied(way: Way) -> nn.Module:
    return train(way, Tied(), loss=next_word(way))


@program
def sparse_embedding(way: Way) -> nn.Module:
    model = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 11))
    return train(way, model, torch.optim.SGD(model.parameters(), lr=0.1), next_word(way))


@program
def compiled(way: Way) -> nn.Module:
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    quick: list[Any] = []

    def loss(net: Any, step: int) -> Tensor:
        if not quick:
            quick.append(torch.compile(net, backend="eager"))
        x, y = way.batch(step)
        return mse_loss(quick[0](x), y)

    return train(way, model, sgd(model.parameters(), 0.01), loss, bucket_cap_mb=25)


# ---- how it is trained


@program
def adamw(way: Way) -> nn.Module:
    model = mlp()
    return train(way, model, torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1))


@program
def groups(way: Way) -> nn.Module:
    model = mlp()
    biases = [p for p in model.parameters() if p.dim() == 1]
    weights = [p for p in model.parameters() if p.dim() > 1]
    parts = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.01}]
    return train(way, model, torch.optim.Adam(parts, lr=0.005))


@program
def scheduled(way: Way) -> nn.Module:
    return train(
        way,
        mlp(),
        scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS, cycle_momentum=False),
    )


@program
def accumulated(way: Way) -> nn.Module:
    model = mlp()
    net, optimizer = way.begin(model, sgd(model.parameters()))
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            x, y = way.batch(3 * step + part)
            with way.without_exchange(net) if part < 2 else nullcontext():
                (mse_loss(net(x), y) / 3).backward()
        optimizer.step()
    return model


@program
def clipped(way: Way) -> nn.Module:
    """Clip what backward has left, as every recipe does."""
    model = mlp()
    return train(way, model, clip=lambda step: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


@program
def lbfgs(way: Way) -> nn.Module:
    model = mlp()
    net, optimizer = way.begin(model, torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2))
    for step in range(STEPS):
        x, y = way.batch(step)

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(net(x), y)
            loss.backward()
            return loss.detach() * 0 + 1  # the same on all ranks, as a line search asks

        optimizer.step(closure)
    return model


@program
def grad_scaler(way: Way) -> nn.Module:
    """The gradient of one rank overflows in one step, that of the other in the next."""
    model = mlp()
    net, optimizer = way.begin(model, sgd(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for step in range(STEPS):
        x, y = way.batch(step)
        optimizer.zero_grad()
        loss = mse_loss(net(x), y) * (float("inf") if step == 5 + way.rank else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return model


@program
def zeroed_gradients(way: Way) -> nn.Module:
    """Gradients stay zeros between steps; a hook doubles one."""
    model = mlp()
    model[4].weight.register_hook(lambda gradient: 2 * gradient)
    return train(way, model, to_none=False)


# ---- the job


def outcome(way: Way, run: Program) -> tuple[list[Tensor], str]:
    """Return the parameters that a program has trained, or nothing and its error on this worker."""
    torch.manual_seed(3)
    try:
        model = run(way)
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    finally:
        way.end()
    return [p.detach().clone() for p in model.parameters()], ""


def main(name: str, path: str, *chosen: str) -> None:
    """Run the programs one after the other; worker 0 writes the outcomes."""
    torch.set_num_threads(1)
    # Servers serve all stores inside this call, and leave when the last one is closed.
    keeper = mpips.create("dist_sync") if name == "optimizer" else None
    workers = keeper.layout.workers if keeper else MPI.COMM_WORLD
    found: dict[str, Any] = {}
    for each in chosen or PROGRAMS:
        trained, error = outcome(Way(name, workers), PROGRAMS[each])
        everybody = workers.allgather((trained, error))
        pairs = [pair for one, _ in everybody[1:] for pair in zip(everybody[0][0], one)]
        apart = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
        found[each] = (everybody[0][0], apart, [said for _, said in everybody])
        if workers.rank == 0:
            print(f"{name} {each}: {error or 'trained'}", file=sys.stderr, flush=True)
    if workers.rank == 0:
        torch.save(found, path)
    if keeper:
        keeper.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
