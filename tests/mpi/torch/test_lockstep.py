"""One sentence tells all ranks what only one of them does differently, before its numbers are used."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpips.torch import DataParallel
from tests.mpi.torch.support import EARLY, ODD, WORLD, alike, batch, heard, network, several, sums

STEPS = 6
SECONDS = 20.0
"""The machine may be busy."""
Change = Callable[[Any, Any, Any], str | None]
"""What the odd rank does in a step: it gets the wrapped model, the optimizer and the loss."""
buckets = pytest.mark.parametrize("buckets", ["single", EARLY])


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The first step of a process imports PyTorch's compiler, which takes seconds."""
    layer = nn.Linear(1, 1)
    torch.optim.SGD(layer.parameters(), 0.1).step()


def no_memory(gradient: Any) -> None:
    raise MemoryError("of the user's")


def leave_out(model: Any, optimizer: Any, loss: Any) -> str:
    return "no backward"


def keep_weights(model: Any, optimizer: Any, loss: Any) -> str:
    return "no step"


def step_twice(model: Any, optimizer: Any, loss: Any) -> None:
    optimizer.step()


def lower_rate(model: Any, optimizer: Any, loss: Any) -> None:
    """As ReduceLROnPlateau does that sees this rank's loss alone."""
    optimizer.param_groups[0]["lr"] = 0.05


def change_weights(model: Any, optimizer: Any, loss: Any) -> None:
    model.module[0].weight.data.mul_(1.1)


def unfreeze(model: Any, optimizer: Any, loss: Any) -> None:
    model.module[4].requires_grad_(True)


def change_strides(model: Any, optimizer: Any, loss: Any) -> None:
    weight = model.module[4].weight
    weight.data = weight.data.t().contiguous().t()


def freeze(model: Any, optimizer: Any, loss: Any) -> None:
    model.module[4].bias.requires_grad_(False)


def add_layer(model: Any, optimizer: Any, loss: Any) -> None:
    model.module.append(nn.Linear(3, 3))


def raise_within(model: Any, optimizer: Any, loss: Any) -> str:
    model.module[0].weight.register_hook(no_memory)
    with pytest.raises(MemoryError):
        loss.backward()
    model.module[0].weight._backward_hooks.clear()
    return "no backward"


def train(model: Any, change: Change, at: int = 2, on: int = ODD) -> None:
    """Train, and make the change in one step of one rank."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        left_out = change(model, optimizer, loss) if WORLD.rank == on and step == at else ""
        if left_out != "no backward":
            loss.backward()
            if left_out != "no step":
                optimizer.step()


@several
@buckets
@pytest.mark.parametrize(
    ("change", "at", "words"),
    [
        (leave_out, 2, "pass 3: the number of forward passes without a backward pass is 0 on rank 0 and 1 on rank"),
        (keep_weights, 2, "pass 4: the number of optimizer steps since the last backward pass is 1 on rank 0 and 0"),
        (step_twice, 2, "pass 3: the number of optimizer steps since the last backward pass is 1 on rank 0 and 2"),
        (lower_rate, 2, "backward pass 4: lr of SGD's group 0 is 0.1 on rank 0 and 0.05 on rank"),
        (change_weights, 2, "backward pass 4: parameter '0.weight' has norm"),
        (unfreeze, 2, "unfrozen"),
        (change_strides, 2, "a parameter has got another type or order"),
        (freeze, 2, "parameter '4.bias' requires a gradient on rank 0 and none on rank"),
        (add_layer, 0, "parameter '5.weight' is not known to DataParallel: wrap the model when it is complete"),
        (raise_within, 2, ""),
    ],
)
def test_all_hear_what_one_rank_does_differently(change: Change, at: int, words: str, buckets: str | float) -> None:
    module, begin = network(), time.monotonic()
    if change is unfreeze:
        module[4].requires_grad_(False)
    if change is raise_within:
        words = "raised is 0 on rank 0 and 1" if buckets == "single" else f"it has raised on rank {ODD}"
    model = DataParallel(module, WORLD.Dup(), buckets)
    said = heard(lambda: train(model, change, at))
    assert words in said and time.monotonic() - begin < SECONDS, said


def test_a_backward_that_raises_on_all_ranks_counts_as_none() -> None:
    model = DataParallel(network(), WORLD.Dup())
    train(model, raise_within, on=WORLD.rank)
    assert alike(sums(model))


def test_a_step_within_backward_is_refused() -> None:
    """Its gradients are one rank's alone."""
    model = DataParallel(network(), WORLD.Dup())
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(RuntimeError, match="backward has not ended, and gradients are this rank's alone"):
        model(batch(0)[0]).sum().backward()


@several
def test_a_step_that_has_raised_hides_no_later_one() -> None:
    with pytest.raises(MemoryError):
        torch.optim.LBFGS(nn.Linear(1, 1).parameters()).step(lambda: no_memory(None))
    model = DataParallel(network(), WORLD.Dup())
    assert "lr of SGD" in heard(lambda: train(model, lower_rate))


@several
def test_the_limit_names_the_pass_in_which_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank has left forward and backward out, and makes no other pass."""
    monkeypatch.setenv("MPIPS_TIMEOUT_SECONDS", "2")
    model = DataParallel(network(), WORLD.Dup())

    def program() -> None:
        for step in range(3):
            if WORLD.rank != ODD or step != 1:
                model(batch(step)[0]).sum().backward()

    everybody = WORLD.allgather(heard(program))
    assert everybody[0].startswith("StallError") and not everybody[ODD]
    for words in (f"rank {ODD} has not come", "rank 0 is in DataParallel, backward pass 3"):
        assert words in everybody[0], everybody


def test_ranks_may_evaluate_and_train_other_models_alone() -> None:
    """Evaluation, other optimizers, a loss that is looked at: nobody is refused."""
    model = DataParallel(network(), WORLD.Dup())
    optimizer, own = torch.optim.SGD(model.parameters(), 0.1), nn.Linear(2, 2)
    beside = torch.optim.SGD(own.parameters(), 0.1 * (1 + WORLD.rank))
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        losses = [nn.functional.mse_loss(model(x), y) for _ in range(1 + WORLD.rank)]
        sum(losses).backward()
        optimizer.step()
        for _ in range(WORLD.rank):
            own(torch.ones(2, 2)).sum().backward()
            beside.step()
            with torch.no_grad():
                model(x)
            model.eval()
            model(x)
            model.train()
    assert alike(sums(model))
