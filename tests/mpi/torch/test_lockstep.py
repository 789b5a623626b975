"""One sentence tells all ranks what only one of them does differently, before its numbers are used."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import mpips.horovod.torch as hvd
from mpips.torch import DataParallel
from mpips.torch.lockstep import Lockstep, content
from tests.mpi.torch.support import (
    EARLY,
    ODD,
    SERVERLESS,
    WORLD,
    alike,
    batch,
    far,
    groups,
    heard,
    joined_batch,
    network,
    several,
    sums,
    wrapped,
)

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
    optimizer.param_groups[-1]["lr"] = 0.05


def add_group(model: Any, optimizer: Any, loss: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


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
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": rest}], 0.1)
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
        (lower_rate, 2, "backward pass 4: lr of SGD's group 1 is 0.1 on rank 0 and 0.05 on rank"),
        (add_group, 2, "backward pass 4: the number of SGD's groups is 2 on rank 0 and 3 on rank"),
        (change_weights, 2, "backward pass 4: parameter '0.weight' has norm"),
        (unfreeze, 2, "unfrozen"),
        (change_strides, 2, "a parameter has got another type or order"),
        (freeze, 2, "parameter '4.bias' is trained on rank 0 and frozen on rank"),
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


# ---- what ranks compare


PAIRS: dict[str, Any] = {
    "tensors": lambda: (torch.tensor(0.9), torch.tensor(0.99)),
    "list": lambda: [0.9, 0.99],
    "arrays": lambda: np.array([0.9, 0.99]),
}
"""Betas as programs have them, after JSON and checkpoints."""
WORDS: list[dict[str, Any]] = [
    {"weight_decay": None, "alpha": "cosine"},
    {"alpha": {"warm": [1, 2.5], "then": ("flat", None)}},
    {"alpha": max, "momentum": float("nan")},
    {"alpha": {"a", "b", "c"}, "betas": [torch.arange(40.0), object()]},
]


@several
@pytest.mark.parametrize("name", PAIRS)
def test_hyperparameters_of_any_kind_train_as_on_the_joined_batch(name: str) -> None:
    model, plain = DataParallel(network(), WORLD.Dup(), EARLY), network()
    adam = functools.partial(torch.optim.AdamW, lr=0.01, foreach=False)
    optimizers = [adam(each.parameters(), betas=PAIRS[name]()) for each in (model, plain)]
    for step in range(STEPS):
        for one, optimizer, (x, y) in zip((model, plain), optimizers, (batch(step), joined_batch(step))):
            optimizer.zero_grad()
            mse_loss(one(x), y).backward()
            optimizer.step()
    assert far(model.module, plain) < 1e-6


class Odd(torch.optim.Optimizer):
    """An optimizer with words in its groups."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad * group["lr"])


@several
@pytest.mark.parametrize("words", WORDS, ids=["None", "nested", "function", "set"])
def test_words_in_a_group_are_equal_on_all_ranks(words: dict[str, Any]) -> None:
    model = DataParallel(network(), WORLD.Dup(), EARLY)
    optimizer = Odd(model.parameters(), {"lr": 0.1, **words})
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step)[0]).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
    if WORLD.rank == ODD:
        optimizer.param_groups[0]["alpha"] = "another"
    optimizer.step()
    said = heard(lambda: model(batch(3)[0]).sum().backward())
    assert "alpha of Odd's group 0 in step 2 is" in said and alike(said)


def test_contents_are_equal_in_all_processes() -> None:
    here = object()
    values = [
        None,
        True,
        3,
        2**70,
        10**400,
        -0.0,
        float("nan"),
        1j,
        "a word",
        b"bytes",
        Path("a"),
        np.float32(0.1),
        torch.bfloat16,
        torch.zeros(3, dtype=torch.complex64),
        torch.ones(50),
        torch.ones(2, device="meta"),
        here,
        np.array([here]),
        {"b": 1, "a": {2, 1}},
        {"x", "y", "z"},
        functools.partial(max, 1),
        lambda: here,
        network,
        torch.Tensor.add,
        str.upper,
        [].append,
    ]
    assert alike([repr(content(value)) for value in values])
    assert content([1.0, torch.tensor(2.0)]) == content((1, np.int64(2))) == [1, 2]
    assert content(torch.ones(50)) != content(torch.ones(50) * 2)


@several
def test_ranks_that_differ_without_words_do_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """No gradient is left behind in silence, whatever is wrong with what they compare."""
    monkeypatch.setattr(Lockstep, "token", lambda self: WORLD.rank)
    model = DataParallel(network(), WORLD.Dup(), EARLY)
    said = heard(lambda: model(batch(0)[0]).sum().backward())
    assert "backward pass 1: ranks differ in what they have done, and no word of theirs says in what" in said
    assert said.startswith("MismatchError") and alike(said)


# ---- weights that a program moves


def loss_of(model: Any, step: int) -> Any:
    dtype = next(model.parameters()).dtype
    x, y = batch(step, dtype)
    return mse_loss(model(x), y)


def shift(parameters: list[Any], moves: list[Any], sign: float = 1.0) -> None:
    with torch.no_grad():
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move, alpha=sign)


def climb(model: Any, optimizer: Any, step: int, passes: int = 1) -> None:
    """Sharpness-aware minimization, each rank by its own gradient; several passes to a step."""
    parameters = list(model.parameters())
    with model.no_sync():
        for part in range(passes):
            loss_of(model, step + 100 * part).backward()
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    moves = [p.grad * (0.5 / norm) for p in parameters]
    shift(parameters, moves)
    optimizer.zero_grad()
    for part in range(passes):
        with model.no_sync() if part < passes - 1 else nullcontext():
            loss_of(model, step + 100 * part).backward()
    shift(parameters, moves, -1.0)
    optimizer.step()
    optimizer.zero_grad()


def climb_in_parts(model: Any, optimizer: Any, step: int) -> None:
    climb(model, optimizer, step, passes=3)


def noise(parameters: list[Any], step: int) -> list[Any]:
    generator = torch.Generator().manual_seed(10 * step + WORLD.rank)
    return [torch.randn(p.shape, generator=generator).to(p) for p in parameters]


def shake(model: Any, optimizer: Any, step: int) -> None:
    parameters = list(model.parameters())
    moves = noise(parameters, step)
    optimizer.zero_grad()
    shift(parameters, moves)
    loss_of(model, step).backward()
    shift(parameters, moves, -1.0)
    optimizer.step()


def shake_beyond_the_step(model: Any, optimizer: Any, step: int) -> None:
    parameters = list(model.parameters())
    moves = noise(parameters, step)
    optimizer.zero_grad()
    shift(parameters, moves)
    loss_of(model, step).backward()
    optimizer.step()
    shift(parameters, moves, -1.0)


def adapt(model: Any, optimizer: Any, step: int) -> None:
    """MAML of first order: an optimizer of its own makes each rank's inner steps."""
    parameters = list(model.parameters())
    before, inner = [p.detach().clone() for p in parameters], torch.optim.SGD(parameters, 0.3)
    for _ in range(2):
        inner.zero_grad()
        with model.no_sync():
            loss_of(model, step + 50).backward()
        inner.step()
    optimizer.zero_grad()
    loss_of(model, step).backward()
    with torch.no_grad():
        for parameter, value in zip(parameters, before):
            parameter.copy_(value)
    optimizer.step()


@several
@pytest.mark.parametrize(
    ("move", "dtype"),
    [
        *((move, torch.float64) for move in (climb, climb_in_parts, shake, shake_beyond_the_step, adapt)),
        (climb, torch.bfloat16),
    ],
)
def test_weights_that_each_rank_moves_back_train_as_under_ddp(move: Any, dtype: torch.dtype) -> None:
    nets = [network(dtype), network(dtype)]
    with groups(), warnings.catch_warnings(record=True) as heard_of:
        warnings.simplefilter("always")
        for wrap, net in zip((DataParallel, DistributedDataParallel), nets):
            model: Any = wrap(net)
            optimizer = torch.optim.SGD(net.parameters(), 0.05)
            for step in range(18):
                move(model, optimizer, step)
    told = [str(one.message) for one in heard_of if "the program moves weights itself" in str(one.message)]
    assert len(told) == (WORLD.rank == 0 and (move is shake_beyond_the_step or dtype is torch.bfloat16)), told
    assert dtype is torch.bfloat16 or far(*nets) < 1e-9


@several
def test_weights_that_one_rank_changes_before_a_forward_pass_are_found_in_the_next() -> None:
    model = DataParallel(network(), WORLD.Dup())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def program() -> None:
        for step in range(STEPS):
            if step == 3 and WORLD.rank == ODD:
                with torch.no_grad():
                    model.module[0].weight.mul_(1.1)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()

    said = heard(program)
    assert "backward pass 5: parameter '0.weight' has norm" in said and alike(said)


# ---- one thing averages gradients


def test_gradients_are_averaged_by_one_thing_alone() -> None:
    def both(first: Any, second: Any) -> str:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kept = first(model, optimizer)
        said = heard(lambda: second(model, optimizer))
        if hasattr(kept, "close"):
            kept.close()
            second(model, optimizer)
        return said

    hvd.init()
    makers = {
        "DataParallel": lambda model, optimizer: DataParallel(model),
        "DistributedOptimizer": lambda model, optimizer: wrapped(model, optimizer, SERVERLESS),
        "hvd.DistributedOptimizer": lambda model, optimizer: hvd.DistributedOptimizer(optimizer),
    }
    for one, other in [(0, 1), (1, 0), (0, 2), (2, 0)]:
        names = list(makers)
        said = both(makers[names[one]], makers[names[other]])
        assert said.startswith(f"ValueError: {names[other]}: gradients of parameter ")
        assert f"are averaged by {names[one]} already, and one is enough: use " in said
