"""DistributedOptimizer: a store trains a model as PyTorch's optimizer would with the joined batch."""

from __future__ import annotations

import contextlib
import operator
import re
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


KINDS = [{}, {"servers": 1}, {"servers": 1, "kind": "dist_sync"}]


def made(model: nn.Module, optimizer: Any, options: dict[str, Any]) -> Any:
    """A worker's DistributedOptimizer."""
    if WORLD.size == 1 and options.get("servers"):
        pytest.skip("a server needs a worker beside it")
    return mpips.torch.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def mine(optimizer: Any) -> Any:
    """The batches of one worker, by step."""
    return lambda step: batch(step, rank=optimizer.store.rank)


@pytest.mark.parametrize("options", KINDS)
def test_training_goes_on_from_a_state_dict_as_if_it_had_not_stopped(tmp_path: Path, options: dict[str, Any]) -> None:
    path, losses = WORLD.bcast(tmp_path) / "state.pt", []
    with contextlib.suppress(SystemExit):
        model = network()
        optimizer = made(model, torch.optim.Adam(model.parameters(), 0.01), options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        train(model, optimizer, 3, mine(optimizer), scheduler.step)
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rate": scheduler.state_dict()}
        if optimizer.store.rank == 0:
            torch.save(saved, path)
        losses.append(train(model, optimizer, 3, mine(optimizer), scheduler.step))
        optimizer.close()
    with contextlib.suppress(SystemExit):
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)).double()
        optimizer = made(model, torch.optim.Adam(model.parameters(), 0.3), options)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["rate"])
        losses.append(train(model, optimizer, 3, mine(optimizer), scheduler.step))
        optimizer.close()
    assert all(WORLD.allgather(len(losses) == 0 or losses[0] == losses[1]))


@pytest.mark.parametrize("options", KINDS)
def test_parameters_that_the_program_changes(options: dict[str, Any]) -> None:
    """The servers hear of it, or the next step says that they have not."""
    verdict = True
    with contextlib.suppress(SystemExit):
        model = network()
        optimizer = made(model, torch.optim.SGD(model.parameters(), 0.0), options)
        mpips.torch.broadcast_parameters(model.state_dict(), comm=optimizer.store.layout.workers)  # changes nothing
        train(model, optimizer, 1, mine(optimizer))
        with torch.no_grad():
            model[0].bias.fill_(7.0)
        if options:
            with pytest.raises(RuntimeError, match=r"'0.bias' was changed.*set_parameters"):
                optimizer.step()
        optimizer.set_parameters()
        train(model, optimizer, 1, mine(optimizer))
        verdict = bool((model[0].bias == 7.0).all())
        optimizer.close()
    assert all(WORLD.allgather(verdict))


@pytest.mark.parametrize("options", KINDS)
def test_every_number_of_a_group_is_live(options: dict[str, Any]) -> None:
    off = 0.0
    with contextlib.suppress(SystemExit):
        ends = []
        for serial in (False, True):
            model = network()
            optimizer: Any = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
            if not serial:
                optimizer = made(model, optimizer, options)
                workers = optimizer.store.num_workers
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8)

            def after(optimizer: Any = optimizer, scheduler: Any = scheduler) -> None:
                scheduler.step()
                optimizer.param_groups[0]["weight_decay"] *= 1.5

            def joined(step: int, workers: int = workers) -> Any:
                x, y = joined_batch(step)
                return x[: BATCH * workers], y[: BATCH * workers]

            train(model, optimizer, 6, joined if serial else mine(optimizer), after)
            ends.append(model)
            if not serial:
                optimizer.close()
        off = far(*ends)
    assert worst(off) < 1e-6


@pytest.mark.parametrize("options", KINDS[:2])
def test_parameters_that_join_or_leave_the_wrapped_optimizer_are_refused(options: dict[str, Any]) -> None:
    said: list[str] = []
    for changed in (
        lambda inner, model: inner.add_param_group({"params": [model[2].weight], "lr": 0.1}),
        lambda inner, model: inner.param_groups[0]["params"].append(model[2].weight),
        lambda inner, model: inner.param_groups[0]["params"].pop(),
        lambda inner, model: operator.setitem(inner.param_groups[0]["params"], 1, model[2].bias),
    ):
        with contextlib.suppress(SystemExit):
            model: Any = network()
            inner = torch.optim.SGD(model[0].parameters(), 0.1)
            optimizer = made(model, inner, options)
            train(model, optimizer, 1, mine(optimizer))
            changed(inner, model)
            try:
                train(model, optimizer, 1, mine(optimizer))
                said.append("trained")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            optimizer.close()
    every = [one for found in WORLD.allgather(said) for one in found]
    assert every and all(
        re.match(r"RuntimeError: step: SGD on rank \d has \d parameters .* the 2 .*wrap it", one) for one in every
    ), every


@pytest.mark.parametrize("options", KINDS[:2])
def test_what_cannot_change_is_refused(options: dict[str, Any]) -> None:
    with contextlib.suppress(SystemExit):
        model = network()
        optimizer = made(model, torch.optim.Adam(model.parameters(), 0.01), options)
        with pytest.raises(RuntimeError, match="wrap it in a new"):
            optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
        train(model, optimizer, 1, mine(optimizer))
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        if options:
            with pytest.raises(ValueError, match="beta"):
                optimizer.step()
        optimizer.close()
    with pytest.raises(ValueError, match="LBFGS"):
        mpips.torch.DistributedOptimizer(torch.optim.LBFGS(network().parameters()), [])
    with pytest.raises(TypeError, match="Linear"):
        mpips.torch.DistributedOptimizer(nn.Linear(1, 1), [])  # type: ignore[arg-type]
