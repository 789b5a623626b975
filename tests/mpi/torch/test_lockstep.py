"""What only one rank does differently is told by one sentence on all ranks, before its numbers are used."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'mpips[torch]'")

import mpips.torch  # noqa: E402
from collectives import StallError  # noqa: E402
from tests.mpi.torch.support import WORLD, batch, network, nn  # noqa: E402

ODD = WORLD.size - 1
STEPS = 6
EARLY = 0.00001
SECONDS = 20.0
"""The machine may be busy."""
Change = Callable[[int, Any, Any, Any], str]
"""What the odd rank does in a step: it gets its number, the wrapped model, the optimizer and the loss."""


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    """The first step of a process imports PyTorch's compiler, which takes seconds."""
    layer = nn.Linear(1, 1)
    torch.optim.SGD(layer.parameters(), 0.1).step()


def leave_out(step: int, model: Any, optimizer: Any, loss: Any) -> str:
    return "left out" if step == 2 else ""


def keep_weights(step: int, model: Any, optimizer: Any, loss: Any) -> str:
    return "not stepped" if step == 2 else ""


def lower_rate(step: int, model: Any, optimizer: Any, loss: Any) -> str:
    """As ReduceLROnPlateau does that sees this rank's loss alone."""
    if step == 2:
        optimizer.param_groups[0]["lr"] = 0.05
    return ""


def change_weights(step: int, model: Any, optimizer: Any, loss: Any) -> str:
    if step == 2:
        model.module[0].weight.data.mul_(1.1)
    return ""


def step_twice(step: int, model: Any, optimizer: Any, loss: Any) -> str:
    if step == 2:
        optimizer.step()
    return ""


def add_layer(step: int, model: Any, optimizer: Any, loss: Any) -> str:
    if step == 0:
        model.module.append(nn.Linear(3, 3))
    return ""


def unfreeze(step: int, model: Any, optimizer: Any, loss: Any) -> str:
    if step == 2:
        model.module[4].requires_grad_(True)
    return ""


def freeze(step: int, model: Any, optimizer: Any, loss: Any) -> str:
    if step == 2:
        model.module[4].bias.requires_grad_(False)
    return ""


def train(model: Any, change: Change) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        what = change(step, model, optimizer, loss) if WORLD.rank == ODD else ""
        if what == "left out":
            continue
        loss.backward()
        if what != "not stepped":
            optimizer.step()


def heard(model: Any, change: Change) -> list[tuple[str, float]]:
    """What every rank has raised, and after how many seconds."""
    said, begin = "", time.monotonic()
    try:
        train(model, change)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return WORLD.allgather((said, time.monotonic() - begin))


@pytest.mark.parametrize("buckets", ["single", EARLY])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (leave_out, "pass 3: the number of forward passes without a backward pass is 0 on rank 0 and 1 on rank"),
        (keep_weights, "pass 4: the number of optimizer steps since the last backward pass is 1 on rank 0 and 0"),
        (lower_rate, "backward pass 4: lr of SGD's group 0 is 0.1 on rank 0 and 0.05 on rank"),
        (step_twice, "pass 3: the number of optimizer steps since the last backward pass is 1 on rank 0 and 2"),
        (change_weights, "backward pass 4: parameter '0.weight' has norm"),
        (unfreeze, "unfrozen"),
        (freeze, "parameter '4.bias' requires a gradient on rank 0 and none on rank"),
        (add_layer, "parameter '5.weight' is not known to DataParallel: wrap the model when it is complete"),
    ],
)
def test_what_one_rank_does_differently(change: Change, words: str, buckets: str | float) -> None:
    if WORLD.size == 1:
        pytest.skip("one rank has nobody to differ from")
    module = network()
    if change is unfreeze:
        module[4].requires_grad_(False)
    everybody = heard(mpips.torch.DataParallel(module, WORLD.Dup(), buckets), change)
    assert all(words in said and seconds < SECONDS for said, seconds in everybody), everybody


@pytest.mark.parametrize("buckets", ["single", EARLY])
def test_a_backward_that_raises_on_one_rank(buckets: str | float) -> None:
    """Who catches it and goes on hears it from all others, or they from it."""
    if WORLD.size == 1:
        pytest.skip("one rank has nobody to differ from")

    def raise_within(step: int, model: Any, optimizer: Any, loss: Any) -> str:
        if step == 2:
            model.module[0].weight.register_hook(no_memory)
            try:
                loss.backward()
            except MemoryError:
                model.module[0].weight._backward_hooks.clear()
                return "left out"
        return ""

    everybody = heard(mpips.torch.DataParallel(network(), WORLD.Dup(), buckets), raise_within)
    one = "raised is 0 on rank 0 and 1" if buckets == "single" else f"it has raised on rank {ODD}"
    assert all(one in said and seconds < SECONDS for said, seconds in everybody), everybody


def no_memory(gradient: Any) -> None:
    raise MemoryError("of the user's")


def test_a_backward_that_raises_on_all_ranks_counts_as_none() -> None:
    model = mpips.torch.DataParallel(network(), WORLD.Dup())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        hook = model.module[0].weight.register_hook(no_memory) if step == 2 else None
        try:
            loss.backward()
        except MemoryError:
            hook.remove()
            continue
        optimizer.step()
    sums = WORLD.allgather(float(sum(p.detach().sum() for p in model.parameters())))
    assert all(each == sums[0] for each in sums), sums


def test_an_optimizer_that_steps_within_backward() -> None:
    """Its gradients are one rank's alone."""
    model = mpips.torch.DataParallel(network(), WORLD.Dup())
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(RuntimeError, match="backward has not ended, and gradients are this rank's alone"):
        model(batch(0)[0]).sum().backward()


def test_a_step_that_has_raised_hides_no_later_one() -> None:
    if WORLD.size == 1:
        pytest.skip("one rank has nobody to differ from")
    layer = nn.Linear(1, 1)
    with pytest.raises(MemoryError):
        torch.optim.LBFGS(layer.parameters()).step(lambda: no_memory(None))
    everybody = heard(mpips.torch.DataParallel(network(), WORLD.Dup()), lower_rate)
    assert all("lr of SGD" in said for said, _ in everybody), everybody


def test_the_limit_says_in_which_pass_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one rank has left forward and backward out, and makes no other pass."""
    if WORLD.size == 1:
        pytest.skip("one rank has nobody to wait for")
    monkeypatch.setenv("MPIPS_TIMEOUT_SECONDS", "2")
    model, said = mpips.torch.DataParallel(network(), WORLD.Dup()), ""
    for step in range(3):
        if WORLD.rank == ODD and step == 1:
            continue
        try:
            model(batch(step)[0]).sum().backward()
        except StallError as error:
            said = str(error)
    everybody = WORLD.allgather(said)
    for words in (f"rank {ODD} has not come", "rank 0 is in DataParallel, backward pass 3"):
        assert words in everybody[0] and not everybody[ODD], everybody


def test_what_ranks_may_do_differently() -> None:
    """Evaluation, other optimizers, a loss that is looked at: nobody is refused."""
    model = mpips.torch.DataParallel(network(), WORLD.Dup())
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
    sums = WORLD.allgather(float(sum(p.detach().sum() for p in model.parameters())))
    assert all(each == sums[0] for each in sums), sums
