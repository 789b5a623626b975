"""DistributedOptimizer: a store trains a model as PyTorch's optimizer would with the joined batch."""

from __future__ import annotations

import operator
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpips.torch
from tests.mpi.torch.support import (
    SERVED,
    SERVERLESS,
    WORLD,
    alike,
    batch,
    far,
    heard,
    joined_batch,
    mine,
    network,
    on_workers,
    sums,
    train,
    wrapped,
)

OLD = Path(__file__).parents[2] / "data" / "e292923"
KINDS = pytest.mark.parametrize("options", [{}, {"servers": 1}, SERVED], ids=str)
TWO_KINDS = pytest.mark.parametrize("options", [{}, {"servers": 1}], ids=str)


def joined(workers: int) -> Any:
    """Return the joined batches of some workers, by step."""
    return lambda step: joined_batch(step, ranks=workers)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "dist_sync"},
        {"kind": "mpi_async"},
        {"kind": "mpi_async", "staleness": 2},
        {"kind": "mpi_async", "elastic": 0.25, "interval": 2},
    ],
    ids=str,
)
def test_workers_of_a_server_train_alike(options: dict[str, Any]) -> None:
    """One rank serves. Elastic training only comes near."""
    options = {"servers": 1, **options}
    with on_workers(options):
        model, plain = network(), network()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.05, 0.9), options)
        train(model, optimizer, 5, mine(optimizer))
        optimizer.close()
        train(plain, torch.optim.SGD(plain.parameters(), 0.05, 0.9), 5, joined(optimizer.store.num_workers))
        assert far(model, plain) < (0.5 if "elastic" in options else 1e-6)


def test_passes_add_up() -> None:
    model, plain = network(), network()
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.1), {"backward_passes_per_step": 2})
    for number in range(2):
        x, y = batch(number)
        nn.functional.mse_loss(model(x), y).backward()
        x, y = joined_batch(number)
        (nn.functional.mse_loss(plain(x), y) / 2).backward()
    optimizer.step()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    optimizer.close()
    assert far(model, plain) < 1e-6


@KINDS
def test_every_number_of_a_group_is_live(options: dict[str, Any]) -> None:
    with on_workers(options):
        ends, workers = [], 0
        for serial in (False, True):
            model = network()
            rest = [*model[2].parameters(), *model[4].parameters()]
            groups = [{"params": model[0].parameters(), "lr": 0.3}, {"params": rest}]
            inner: Any = torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
            optimizer = inner if serial else wrapped(model, inner, options)
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=8)

            def after(optimizer: Any = optimizer, scheduler: Any = scheduler) -> None:
                scheduler.step()
                optimizer.param_groups[0]["weight_decay"] *= 1.5

            train(model, optimizer, 6, joined(workers) if serial else mine(optimizer), after)
            ends.append(model)
            if not serial:
                workers = optimizer.store.num_workers
                optimizer.close()
        assert far(*ends) < 1e-6


# ---- states


def test_a_file_brings_parameters_back(tmp_path: Path) -> None:
    path = WORLD.bcast(tmp_path) / "model.mpips"
    model = network()
    optimizer = wrapped(model, torch.optim.Adam(model.parameters(), 0.01), {})
    train(model, optimizer, 2, batch)
    optimizer.save(path)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, optimizer, 2, batch)
    optimizer.load(path)
    optimizer.close()
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())


def test_the_rate_of_a_group_holds_after_a_load(tmp_path: Path) -> None:
    """Servers had another one when the file was saved."""
    path = WORLD.bcast(tmp_path) / "model.mpips"
    with on_workers(SERVED):
        model, plain = network(), network()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.4), SERVED)
        train(model, optimizer, 1, mine(optimizer))
        optimizer.save(path)
        optimizer.param_groups[0]["lr"] = 0.1
        train(model, optimizer, 1, mine(optimizer))
        optimizer.load(path)
        train(model, optimizer, 1, mine(optimizer))
        batches = joined(optimizer.store.num_workers)
        optimizer.close()
        for rate in (0.4, 0.1):
            train(plain, torch.optim.SGD(plain.parameters(), rate), 1, batches)
        assert far(model, plain) < 1e-6


def test_rank_0_s_state_is_broadcast() -> None:
    torch.manual_seed(WORLD.rank)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (WORLD.rank + 1))
    if WORLD.rank == 0:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    mpips.torch.broadcast_parameters(model.state_dict())
    mpips.torch.broadcast_optimizer_state(optimizer)
    state = optimizer.state_dict()
    assert alike((sums(model), state["param_groups"][0]["lr"], float(state["state"][0]["exp_avg"].sum())))


def test_parameters_that_differ_in_more_than_their_values_are_not_broadcast() -> None:
    """They have as many bytes."""
    one, other = torch.ones(2, 3, dtype=torch.float16), torch.ones(2, 3)
    for named in (
        {"a": one.bfloat16(), "b": other},
        {"a": one.view(3, 2), "b": other},
        {"b": other, "a": one},
        {"a": one, "c": other},
    ):
        mine = named if WORLD.rank == 1 else {"a": one, "b": other}
        said = heard(partial(mpips.torch.broadcast_parameters, mine, comm=WORLD.Dup()))
        assert ("MismatchError: broadcast_parameters: tensor " in said) is (WORLD.size > 1) and alike(said)


@KINDS
def test_training_goes_on_from_a_state_dict(tmp_path: Path, options: dict[str, Any]) -> None:
    """As if it had not stopped, bit for bit."""
    path, losses = WORLD.bcast(tmp_path) / "state.pt", []
    for again in (False, True):
        with on_workers(options):
            torch.manual_seed(7)
            model = network()
            if again:  # with other weights, and another rate
                model.apply(lambda layer: layer.reset_parameters() if isinstance(layer, nn.Linear) else None)
            optimizer = wrapped(model, torch.optim.Adam(model.parameters(), 0.3 if again else 0.01), options)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
            parts = {"model": model, "optimizer": optimizer, "rate": scheduler}
            if again:
                for name, state in torch.load(path).items():
                    parts[name].load_state_dict(state)
            else:
                train(model, optimizer, 3, mine(optimizer), scheduler.step)
                saved = {name: part.state_dict() for name, part in parts.items()}
                if optimizer.store.rank == 0:
                    torch.save(saved, path)
            losses.append(train(model, optimizer, 3, mine(optimizer), scheduler.step))
            optimizer.close()
    assert not losses or losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:.*has no checksums")
@pytest.mark.parametrize("file", ["torch.safetensors", "torch.pt"])
def test_checkpoints_of_older_versions_load(file: str) -> None:
    """What e292923 wrote after 3 steps of one worker; two more give what they gave then."""
    old = torch.load(OLD / "torch.pt")
    with on_workers({"servers": 1}):
        model = nn.Linear(3, 2)
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), {"servers": 1})
        if file == "torch.pt":
            optimizer.load_state_dict(old["optimizer"])
        else:
            optimizer.load(OLD / file)
        assert all(torch.equal(value, old["model"][name]) for name, value in model.state_dict().items())
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(4, 3)) ** 2).mean().backward()
            optimizer.step()
        optimizer.close()
        assert all(torch.allclose(value, old["after"][name]) for name, value in model.state_dict().items())


# ---- changes by the program


@KINDS
def test_servers_hear_of_changed_parameters(options: dict[str, Any]) -> None:
    """By `set_parameters`, or the next step says that they have not."""
    with on_workers(options):
        model = network()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.0), options)
        mpips.torch.broadcast_parameters(model.state_dict(), comm=optimizer.store.layout.workers)  # changes nothing
        train(model, optimizer, 1, mine(optimizer))
        with torch.no_grad():
            model[0].bias.fill_(7.0)
        if options:
            with pytest.raises(RuntimeError, match=r"'0.bias' was changed.*set_parameters"):
                optimizer.step()
        optimizer.set_parameters()
        train(model, optimizer, 1, mine(optimizer))
        optimizer.close()
        assert (model[0].bias == 7.0).all()


@TWO_KINDS
@pytest.mark.parametrize(
    "change",
    [
        lambda inner, model: inner.add_param_group({"params": [model[2].weight], "lr": 0.1}),
        lambda inner, model: inner.param_groups[0]["params"].append(model[2].weight),
        lambda inner, model: inner.param_groups[0]["params"].pop(),
        lambda inner, model: operator.setitem(inner.param_groups[0]["params"], 1, model[2].bias),
    ],
)
def test_parameters_neither_join_nor_leave(change: Any, options: dict[str, Any]) -> None:
    with on_workers(options):
        model = network()
        inner = torch.optim.SGD(model[0].parameters(), 0.1)
        optimizer = wrapped(model, inner, options)
        train(model, optimizer, 1, mine(optimizer))
        change(inner, model)
        said = heard(lambda: train(model, optimizer, 1, mine(optimizer)))
        optimizer.close()
        assert re.match(r"RuntimeError: step: SGD on rank \d has \d parameters .* the 2 .*wrap it", said), said


@TWO_KINDS
def test_groups_and_betas_cannot_change(options: dict[str, Any]) -> None:
    with on_workers(options):
        model = network()
        optimizer = wrapped(model, torch.optim.Adam(model.parameters(), 0.01), options)
        with pytest.raises(RuntimeError, match="wrap it in a new"):
            optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
        train(model, optimizer, 1, mine(optimizer))
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
        if options:
            with pytest.raises(ValueError, match="beta"):
                optimizer.step()
        optimizer.close()


@pytest.mark.parametrize(
    ("make", "options", "error", "words"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), 0.1), {}, ValueError, "named_parameters"),
        (lambda model: torch.optim.SGD(model.parameters(), 0.1), {"interval": 0}, ValueError, "at least 1"),
        (lambda model: torch.optim.LBFGS(model.parameters()), {}, ValueError, "LBFGS"),
        (lambda model: model, {}, TypeError, "not a Sequential"),
    ],
)
def test_wrong_arguments_are_refused(make: Any, options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        mpips.torch.DistributedOptimizer(make(network()), [], **options)


def test_parameters_without_names_are_refused() -> None:
    model = network()
    with pytest.raises(TypeError, match=r"no pairs \(name, parameter\): pass model.named_parameters\(\)"):
        mpips.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model.parameters())  # type: ignore[arg-type]


def test_complex_parameters_are_refused() -> None:
    model = torch.nn.ParameterDict({"turn": torch.ones(2, dtype=torch.complex64)})
    with pytest.raises(TypeError, match=r"parameter 'turn' is of type torch\.complex64.*torch\.view_as_real"):
        wrapped(model, torch.optim.SGD(model.parameters(), 0.1), SERVERLESS)


def test_an_asynchronous_store_needs_servers_that_can_update() -> None:
    options = SERVERLESS | {"kind": "mpi_async", "servers": 1}
    with on_workers(options):
        model = network()
        with pytest.raises(ValueError, match="Adamax with these options or hooks has no counterpart on the servers"):
            wrapped(model, torch.optim.Adamax(model.parameters()), options)
