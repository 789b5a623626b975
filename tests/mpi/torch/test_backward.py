"""Backward in every shape: gradients of `DataParallel` are gloo's DDP's, or the mean of what ranks compute alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'mpips[torch]'")

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpips.torch  # noqa: E402
from tests.mpi.torch.support import WORLD, groups  # noqa: E402

Program = Callable[[nn.Module, nn.Module], None]
"""Gets the wrapped model and its module, and leaves gradients."""
EARLY = 0.00001
"""MiB of a bucket: every gradient travels alone, as soon as it is there."""


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


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def x(number: int = 0) -> Tensor:
    """One rank's batch."""
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * WORLD.rank + number))


def two_forwards(model: nn.Module, module: nn.Module) -> None:
    (model(x(0)).mean() - model(x(1)).pow(2).mean()).backward()


def generator_and_critic(model: nn.Module, module: nn.Module) -> None:
    (model(x(0).detach()).mean() - model(x(1)).pow(2).mean()).backward()
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
        model(x(number)).pow(2).mean().backward()


def without_sync(to_none: bool) -> Program:
    def program(model: nn.Module, module: nn.Module) -> None:
        for step in range(3):
            model.zero_grad(set_to_none=to_none)
            for number in range(3):
                no_sync = getattr(model, "no_sync", nullcontext)
                with no_sync() if number < 2 else nullcontext():
                    model(x(3 * step + number)).pow(2).mean().backward()

    return program


def gradient_penalty(model: nn.Module, module: nn.Module) -> None:
    given = x().requires_grad_()
    out = model(given)
    (gradient,) = torch.autograd.grad(out.sum(), given, create_graph=True)
    (out.mean() + gradient.pow(2).sum()).backward()


def create_graph(model: nn.Module, module: nn.Module) -> None:
    for number in range(2):
        model(x(number)).pow(2).mean().backward(create_graph=True)


def saliency_on_one_rank(model: nn.Module, module: nn.Module) -> None:
    if WORLD.rank == 0 and not isinstance(model, DistributedDataParallel):
        given = x().requires_grad_()
        torch.autograd.grad(model(given).sum(), given)
    model(x()).pow(2).mean().backward()


def frozen_afterwards(model: nn.Module, module: nn.Module) -> None:
    model(x()).pow(2).mean().backward()
    model.zero_grad()
    module[2].requires_grad_(False)
    model(x(1)).pow(2).mean().backward()


def tensor_hooks(model: nn.Module, module: nn.Module) -> None:
    module[2].weight.register_hook(lambda gradient: gradient * 2)
    model(x()).pow(2).mean().backward()


def tripled(parameter: Tensor) -> None:
    parameter.grad.mul_(3)


def accumulation_hooks(model: nn.Module, module: nn.Module) -> None:
    module[0].bias.register_post_accumulate_grad_hook(tripled)
    module[2].weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", weight.grad * 2))
    model(x()).pow(2).mean().backward()


def replaced(model: nn.Module, module: nn.Module) -> None:
    model(x()).pow(2).mean().backward()
    module[2].weight.grad = torch.ones(4, 4)
    module[0].weight.grad = None
    model(x(1)).pow(2).mean().backward()


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
    "gradient penalty": (plain, gradient_penalty, {}),
    "create_graph": (plain, create_graph, None),
    "saliency on one rank": (plain, saliency_on_one_rank, {}),
    "frozen afterwards": (plain, frozen_afterwards, None),
    "hooks of tensors": (plain, tensor_hooks, {}),
    "hooks of accumulation": (plain, accumulation_hooks, {}),
    "replaced gradients": (plain, replaced, None),
}
"""Module, program, and options of DDP; None where DDP has another meaning, or refuses."""


def gradients(make: Callable[[], nn.Module], program: Program, wrap: Callable[[nn.Module], nn.Module]) -> list[Tensor]:
    torch.manual_seed(0)
    module = make()
    program(wrap(module), module)
    return [torch.zeros(0) if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def far(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference, infinity where one has a gradient and the other none."""
    return max(
        float("inf") if a.shape != b.shape else float((a - b).abs().max()) if a.numel() else 0.0
        for a, b in zip(some, others, strict=True)
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("buckets", ["single", EARLY])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_the_mean(shape: str, buckets: str | float, gloo: Any) -> None:
    make, program, options = SHAPES[shape]
    ours = gradients(make, program, lambda module: mpips.torch.DataParallel(module, buckets=buckets))
    theirs = gradients(make, program, lambda module: module)
    theirs = [sum(every) / WORLD.size for every in zip(*WORLD.allgather(theirs))]
    if shape == "two forwards, a buffer":  # rank 0's counts in all forward passes
        theirs = ours
    off = [far(ours, theirs)]
    if options is not None:
        ddp = gradients(make, program, lambda module: DistributedDataParallel(module, process_group=gloo, **options))
        off.append(far(ours, ddp))
    off.append(max(far(other, ours) for other in WORLD.allgather(ours)))
    everybody = WORLD.allgather(off)
    assert all(max(each) < 1e-6 for each in everybody), everybody


def test_a_buffer_that_autograd_has_saved_keeps_its_values() -> None:
    """The gradient of each forward pass is made with the buffers that it had."""
    torch.manual_seed(0)
    module = Scaled()
    model = mpips.torch.DataParallel(module)
    scales = []
    loss = torch.zeros(())
    for number in range(2):
        out = model(x(number))
        scales.append(WORLD.bcast(module.scale - x(number).mean()))
        loss = loss + out.sum()
    loss.backward()
    local = sum(scale[:, None] * x(number).sum(0) for number, scale in enumerate(scales))
    mean = sum(WORLD.allgather(local)) / WORLD.size
    off = WORLD.allgather(float((module.layer.weight.grad - mean).abs().max()))
    assert max(off) < 1e-4, off


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: Tensor, which: int | None) -> Tensor:
        return x.sum() * 1.0 if which is None else self.layers[which](x)


@pytest.mark.parametrize("buckets", ["single", EARLY])
def test_other_parameters_on_every_rank_and_in_every_step(buckets: str | float, gloo: Any) -> None:
    """A rank that uses none of them takes part: its loss comes from the model's output all the same."""
    found = []
    for wrap in (
        lambda module: mpips.torch.DataParallel(module, buckets=buckets),
        lambda module: DistributedDataParallel(module, process_group=gloo, find_unused_parameters=True),
    ):
        torch.manual_seed(0)
        module = Branching()
        model, every = wrap(module), []
        for step in range(4):
            model.zero_grad()
            which = (step + WORLD.rank) % 4
            given = x(step).requires_grad_()
            model(given, which if which < 3 else None).sum().backward()
            every += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in module.parameters()]
        found.append(every)
    off = WORLD.allgather(far(*found))
    assert max(off) < 1e-6, off


@pytest.mark.parametrize("buckets", ["single", EARLY])
def test_parameters_that_are_unfrozen_after_wrapping(buckets: str | float) -> None:
    torch.manual_seed(0)
    module = plain()
    module[0].requires_grad_(False)
    model = mpips.torch.DataParallel(module, buckets=buckets)
    model(x()).pow(2).mean().backward()
    module[0].requires_grad_(True)
    model.zero_grad()
    model(x(1)).pow(2).mean().backward()
    both = WORLD.allgather([p.grad for p in module.parameters()])
    alike = [far(both[0], each) for each in both]
    assert max(alike) == 0 and (WORLD.size == 1 or module[0].weight.grad.abs().max() > 0)


def test_join_with_evaluation_and_two_forwards_within() -> None:
    torch.manual_seed(0)
    module = normed()
    model = mpips.torch.DataParallel(module, buckets=EARLY)
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
    (model(x(1)).pow(2).mean()).backward()
    every = WORLD.allgather([*(p.detach() for p in module.parameters()), *(p.grad for p in module.parameters())])
    off = [far(every[0], each) for each in every]
    assert max(off) == 0, off


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_with_buffers() -> None:
    torch.manual_seed(0)
    module = normed()
    model = torch.compile(mpips.torch.DataParallel(module), backend="eager")
    for step in range(2):
        model(x(step)).pow(2).mean().backward()
    every = WORLD.allgather([p.grad for p in module.parameters()])
    off = [far(every[0], each) for each in every]
    assert max(off) == 0, off


@pytest.mark.filterwarnings("ignore")
def test_all_ranks_see_an_overflow_of_one() -> None:
    """GradScaler looks at averaged gradients: all leave the same step out, and have the same scale."""
    torch.manual_seed(0)
    module = plain()
    model = mpips.torch.DataParallel(module, buckets=EARLY)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(x(step)).pow(2).mean()
        if step == 1 and WORLD.rank == WORLD.size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    every = WORLD.allgather(([p.detach() for p in module.parameters()], scaler.get_scale()))
    finite = all(bool(torch.isfinite(p).all()) for p in module.parameters())
    assert finite and all(far(parameters, every[0][0]) == 0 and scale == 64.0 for parameters, scale in every), every
