"""DistributedOptimizer: a store trains a model as PyTorch's optimizer would with the joined batch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'mpips[torch]'")

from torch import nn  # noqa: E402

import mpips.torch  # noqa: E402
from tests.mpi.torch.support import BATCH, WORLD, batch, far, joined_batch, network, train, worst  # noqa: E402

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.Adamax, {"lr": 0.01}),  # has no counterpart on servers
]


@pytest.mark.parametrize("kind,options", OPTIMIZERS)
def test_training_equals_that_on_the_joined_batch(kind: Any, options: dict[str, Any]) -> None:
    model, plain = network(), network()
    wrapped = mpips.torch.DistributedOptimizer(kind(model.parameters(), **options), model.named_parameters())
    beside = kind(plain.parameters(), **options)
    train(model, wrapped, 6, batch)
    wrapped.close()
    train(plain, beside, 6, joined_batch)
    assert worst(far(model, plain)) < 1e-6


def test_schedulers_and_groups() -> None:
    ends = []
    for mine in (True, False):
        model = network()
        rest = [*model[2].parameters(), *model[4].parameters()]
        groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": rest}]
        optimizer: Any = torch.optim.SGD(groups, lr=0.1)
        if mine:
            optimizer = mpips.torch.DistributedOptimizer(optimizer, model.named_parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        train(model, optimizer, 6, batch if mine else joined_batch, scheduler.step)
        if mine:
            optimizer.close()
        ends.append(model)
    assert worst(far(*ends)) < 1e-6


def test_passes_add_up() -> None:
    model, plain = network(), network()
    optimizer = mpips.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.1), model.named_parameters(), backward_passes_per_step=2
    )
    for number in range(2):
        x, y = batch(number)
        nn.functional.mse_loss(model(x), y).backward()
        x, y = joined_batch(number)
        (nn.functional.mse_loss(plain(x), y) / 2).backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    optimizer.close()
    assert worst(far(model, plain)) < 1e-6


def test_saved_and_loaded(tmp_path: Path) -> None:
    path = WORLD.bcast(tmp_path) / "model.mpips"
    model = network()
    optimizer = mpips.torch.DistributedOptimizer(torch.optim.Adam(model.parameters(), 0.01), model.named_parameters())
    train(model, optimizer, 2, batch)
    optimizer.save(path)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, 2, batch)
    optimizer.load(path)
    same = all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    optimizer.close()
    everybody = WORLD.allgather(same)
    assert all(everybody)


def test_rank_0_s_state_for_all() -> None:
    torch.manual_seed(WORLD.rank)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (WORLD.rank + 1))
    if WORLD.rank == 0:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    mpips.torch.broadcast_parameters(model.state_dict())
    mpips.torch.broadcast_optimizer_state(optimizer)
    state = optimizer.state_dict()
    moment = float(state["state"][0]["exp_avg"].sum())
    mine = (float(model.weight.detach().sum()), state["param_groups"][0]["lr"], moment)
    everybody = WORLD.allgather(mine)
    assert all(each == everybody[0] for each in everybody)


def test_words_that_mean_nothing() -> None:
    model = network()
    with pytest.raises(ValueError, match="named_parameters"):
        mpips.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), [])
    with pytest.raises(ValueError, match="at least 1"):
        mpips.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), [], interval=0)


@pytest.mark.parametrize(
    "options",
    [{}, {"kind": "dist_sync"}, {"kind": "mpi_async"}, {"kind": "mpi_async", "staleness": 2},
     {"kind": "mpi_async", "elastic": 0.25, "interval": 2}],
)  # fmt: skip
def test_a_server(options: dict[str, Any]) -> None:
    """One rank serves; the others train. Elastic training only comes near."""
    if WORLD.size == 1:
        pytest.skip("a server needs a worker beside it")
    off = 0.0
    with contextlib.suppress(SystemExit):  # of a server whose workers have left
        model, plain = network(), network()
        optimizer = mpips.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), 0.05, 0.9), model.named_parameters(), servers=1, **options
        )
        rank, workers = optimizer.store.rank, optimizer.store.num_workers

        def mine(step: int) -> tuple[Any, Any]:
            return batch(step, rank=rank)

        def joined(step: int) -> tuple[Any, Any]:
            x, y = joined_batch(step)
            return x[: BATCH * workers], y[: BATCH * workers]

        train(model, optimizer, 5, mine)
        optimizer.close()
        train(plain, torch.optim.SGD(plain.parameters(), 0.05, 0.9), 5, joined)
        off = far(model, plain)
    assert worst(off) < (0.5 if "elastic" in options else 1e-6)
