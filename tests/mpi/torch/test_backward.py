"""Backward in every shape: gradients of `DataParallel` are gloo's DDP's, or the mean of what ranks compute alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mpips.torch import DataParallel
from tests.mpi.torch.support import EARLY, WORLD, batch, far, groups, heard, network, train

Program = Callable[[nn.Module, nn.Module], None]
"""Gets the wrapped model and its module, and leaves gradients."""
buckets = pytest.mark.parametrize("buckets", ["single", EARLY])


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[Any]:
    with groups():
        yield


@pytest.fixture(scope="module")
def gloo(group: Any) -> Any:
    return dist.new_group(backend="gloo")


class Scaled(nn.Module):
    """Multiplies by a buffer, which it then changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x) * self.scale
        self.scale = self.scale + x.detach().mean()
        return out


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x) if which < 3 else x.sum() * 1.0


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def x(number: int = 0) -> Tensor:
    """Return one rank's batch."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * WORLD.rank + number))


def backward(model: nn.Module, number: int = 0, **options: Any) -> None:
    model(x(number)).pow(2).mean().backward(**options)


def two_forwards(model: nn.Module, module: nn.Module) -> None:
    (model(x(0)).mean() - model(x(1)).pow(2).mean()).backward()


def generator_and_critic(model: nn.Module, module: nn.Module) -> None:
    two_forwards(model, module)
    model.zero_grad()
    model(x(2)).mean().backward()


def shared_weights(model: nn.Module, module: nn.Module) -> None:
    model(torch.tanh(model(x()).expand(-1, 4))).pow(2).mean().backward()


def checkpointed(reentrant: bool, whole: bool = False) -> Program:
    def program(model: nn.Module, module: nn.Module) -> None:
        first, block, last = module[0], module[2], module[4]

        def body(given: Tensor) -> Tensor:
            return checkpoint(block, checkpoint(block, given, use_reentrant=reentrant), use_reentrant=reentrant)

        given = x().requires_grad_()
        if whole:  # all parameters are within one checkpoint
            checkpoint(lambda z: last(body(first(z))), given, use_reentrant=reentrant).pow(2).mean().backward()
        else:
            last(body(first(given))).pow(2).mean().backward()

    return program


def retained(model: nn.Module, module: nn.Module) -> None:
    out = model(x())
    out.mean().backward(retain_graph=True)
    out.pow(2).mean().backward()


def accumulated(model: nn.Module, module: nn.Module) -> None:
    for number in range(3):
        backward(model, number)


def without_sync(to_none: bool) -> Program:
    def program(model: nn.Module, module: nn.Module) -> None:
        for step in range(3):
            model.zero_grad(set_to_none=to_none)
            for number in range(3):
                with getattr(model, "no_sync", nullcontext)() if number < 2 else nullcontext():
                    backward(model, 3 * step + number)

    return program


def without_sync_elsewhere(model: nn.Module, module: nn.Module) -> None:
    with getattr(model, "no_sync", nullcontext)():
        model(x(0), 0).pow(2).mean().backward()
    model(x(1), 1).pow(2).mean().backward()


def gradient_penalty(model: nn.Module, module: nn.Module) -> None:
    given = x().requires_grad_()
    out = model(given)
    (gradient,) = torch.autograd.grad(out.sum(), given, create_graph=True)
    (out.mean() + gradient.pow(2).sum()).backward()


def create_graph(model: nn.Module, module: nn.Module) -> None:
    for number in range(2):
        backward(model, number, create_graph=True)


def saliency_on_one_rank(model: nn.Module, module: nn.Module) -> None:
    if WORLD.rank == 0 and not isinstance(model, DistributedDataParallel):
        given = x().requires_grad_()
        torch.autograd.grad(model(given).sum(), given)
    backward(model)


def frozen_afterwards(model: nn.Module, module: nn.Module) -> None:
    backward(model)
    model.zero_grad()
    module[2].requires_grad_(False)
    backward(model, 1)


def tensor_hooks(model: nn.Module, module: nn.Module) -> None:
    module[2].weight.register_hook(lambda gradient: gradient * 2)
    backward(model)


def tripled(parameter: Tensor) -> None:
    parameter.grad.mul_(3)


def accumulation_hooks(model: nn.Module, module: nn.Module) -> None:
    module[0].bias.register_post_accumulate_grad_hook(tripled)
    module[2].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", weight.grad * 2))
    backward(model)


def replaced(model: nn.Module, module: nn.Module) -> None:
    backward(model)
    module[2].weight.grad = torch.ones(4, 4)
    module[0].weight.grad = None
    backward(model, 1)


SHAPES: dict[str, tuple[Callable[[], nn.Module], Program, dict[str, Any] | None]] = {
    "two forwards": (plain, two_forwards, {}),
    "two forwards, batch norm": (normed, two_forwards, {"broadcast_buffers": False}),
    "two forwards, a buffer": (Scaled, two_forwards, None),
    "generator and critic": (normed, generator_and_critic, {"broadcast_buffers": False}),
    "shared weights": (plain, shared_weights, {}),
    "checkpoints": (plain, checkpointed(False), None),
    "reentrant checkpoints": (plain, checkpointed(True), None),
    "reentrant checkpoint of all": (plain, checkpointed(True, True), None),
    "retain_graph": (plain, retained, None),
    "several backwards": (plain, accumulated, {}),
    "no_sync": (plain, without_sync(True), None),
    "no_sync, zeros": (plain, without_sync(False), None),
    "no_sync, another layer": (Branching, without_sync_elsewhere, None),
    "gradient penalty": (plain, gradient_penalty, {}),
    "create_graph": (plain, create_graph, None),
    "saliency on one rank": (plain, saliency_on_one_rank, {}),
    "frozen afterwards": (plain, frozen_afterwards, None),
    "hooks of tensors": (plain, tensor_hooks, {}),
    "hooks of accumulation": (plain, accumulation_hooks, {}),
    "replaced gradients": (plain, replaced, None),
}
"""Module, program, and options of DDP; None where DDP has another meaning, or refuses."""


def left_by(module: nn.Module) -> list[Tensor]:
    """Return the gradients of a module; one without elements for none."""
    return [torch.zeros(0) if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def apart(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference, infinity where one has a gradient and the other none."""
    return max(
        float("inf") if a.shape != b.shape else float((a - b).abs().max()) if a.numel() else 0.0
        for a, b in zip(some, others, strict=True)
    )


def apart_on_ranks(some: list[Tensor]) -> float:
    """Return the largest difference between rank 0's tensors and those of any rank. Collective."""
    every = WORLD.allgather(some)
    return max(apart(every[0], each) for each in every)


@pytest.mark.filterwarnings("ignore")
@buckets
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_the_mean(shape: str, buckets: str | float, gloo: Any) -> None:
    make, program, options = SHAPES[shape]

    def run(wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
        torch.manual_seed(0)
        module = make()
        program(wrap(module), module)
        return left_by(module)

    ours = run(lambda module: DataParallel(module, buckets=buckets))
    means = [sum(every) / WORLD.size for every in zip(*WORLD.allgather(run(lambda module: module)))]
    off = [apart_on_ranks(ours)]
    if shape != "two forwards, a buffer":  # of which rank 0's counts in all forward passes
        off.append(apart(ours, means))
    if options is not None:
        ddp = run(lambda module: DistributedDataParallel(module, process_group=gloo, **options))
        off.append(apart(ours, ddp))
    assert max(off) < 1e-6, off


def test_a_buffer_that_autograd_has_saved_keeps_its_values() -> None:
    """The gradient of each forward pass is made with the buffers that it had."""
    torch.manual_seed(0)
    module = Scaled()
    model = DataParallel(module)
    scales, loss = [], torch.zeros(())
    for number in range(2):
        out = model(x(number))
        scales.append(WORLD.bcast(module.scale - x(number).mean()))
        loss = loss + out.sum()
    loss.backward()
    local = sum(scale[:, None] * x(number).sum(0) for number, scale in enumerate(scales))
    mean = sum(WORLD.allgather(local)) / WORLD.size
    assert float((module.layer.weight.grad - mean).abs().max()) < 1e-4


@buckets
def test_each_rank_and_step_uses_other_parameters(buckets: str | float, gloo: Any) -> None:
    """A rank that uses none of them takes part: its loss comes from the model's output all the same."""
    found = []
    for wrap in (
        lambda module: DataParallel(module, buckets=buckets),
        lambda module: DistributedDataParallel(module, process_group=gloo, find_unused_parameters=True),
    ):
        torch.manual_seed(0)
        module = Branching()
        model, every = wrap(module), []
        for step in range(4):
            model.zero_grad()
            model(x(step).requires_grad_(), (step + WORLD.rank) % 4).sum().backward()
            every += left_by(module)
        found.append(every)
    assert apart(*found) < 1e-6


@buckets
def test_parameters_may_be_unfrozen_after_wrapping(buckets: str | float) -> None:
    torch.manual_seed(0)
    module = plain()
    module[0].requires_grad_(False)
    model = DataParallel(module, buckets=buckets)
    backward(model)
    module[0].requires_grad_(True)
    model.zero_grad()
    backward(model, 1)
    assert apart_on_ranks(left_by(module)) == 0 and module[0].weight.grad.abs().max() > 0


def test_join_takes_evaluation_and_two_forwards_within() -> None:
    torch.manual_seed(0)
    module = normed()
    model = DataParallel(module, buckets=EARLY)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for step in range(1 + WORLD.rank):
            optimizer.zero_grad()
            (model(x(2 * step)).mean() - model(x(2 * step + 1)).pow(2).mean()).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(x())
            model.train()
    backward(model, 1)
    assert apart_on_ranks([*(p.detach() for p in module.parameters()), *left_by(module)]) == 0


@pytest.mark.parametrize("wrap", [DistributedDataParallel, DataParallel])
def test_a_compiled_model_trains_alike(wrap: Callable[[nn.Module], nn.Module]) -> None:
    made = []
    for compiled in (False, True):
        model = wrap(network())
        step = torch.compile(model, backend="aot_eager") if compiled else model
        train(step, torch.optim.SGD(model.parameters(), 0.1), 5, batch)
        made.append(model)
    assert far(*made) < 1e-12


def test_compiled_autograd_is_refused() -> None:
    model = DataParallel(plain())
    step = torch.compile(lambda: backward(model), backend="aot_eager")
    with torch._dynamo.config.patch(compiled_autograd=True):
        assert "set torch._dynamo.config.compiled_autograd = False" in heard(step)
    torch._dynamo.reset()
