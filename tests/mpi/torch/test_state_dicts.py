"""PyTorch's own way to save a model with its optimizer, `get_state_dict` and `set_state_dict`.

Saving changes nothing, and who loads goes on as if it had not stopped.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import mpips
import mpips.torch
from tests.mpi.mpips.support import run
from tests.mpi.torch.support import WORLD, batch, far, groups, heard, network, train

CLOSE = 1e-12
"""Adam's moments on servers are PyTorch's but for a factor, so they are rounded once."""
KINDS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1),
    "momentum": lambda ps: torch.optim.SGD(ps, 0.1, 0.9),
    "adam": lambda ps: torch.optim.Adam(ps, 0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, 0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 0.1),
    "dampened": lambda ps: torch.optim.SGD(ps, 0.1, 0.9, 0.5),
}
"""The last one runs on workers."""
OPTIONS = pytest.mark.parametrize(
    "options", [{}, pytest.param({"servers": 1}, marks=pytest.mark.mpi(min_size=2))], ids=str
)


class Run:
    """A model that trains over a store; each has keys of its own."""

    count = 0

    def __init__(self, kv: mpips.KVStore, kind: str, flat: bool = False) -> None:
        Run.count += 1
        self.kv, self.model, self.options = kv, network(), StateDictOptions(flatten_optimizer_state_dict=flat)
        named = [(f"{Run.count}.{name}", parameter) for name, parameter in self.model.named_parameters()]
        inner = KINDS[kind](self.model.parameters())
        self.optimizer = mpips.torch.DistributedOptimizer(inner, named, store=kv)

    def train(self, first: int, last: int) -> Run:
        train(self.model, self.optimizer, last - first, lambda step: batch(first + step, rank=self.kv.rank))
        self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": weights, "optimizer": state}

    def load(self, saved: dict[str, Any]) -> Run:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=self.options,
        )
        return self


@OPTIONS
def test_saving_changes_nothing_and_who_loads_goes_on(tmp_path: Path, options: dict[str, Any]) -> None:
    """Through files, into another model, whose own state serves as the template."""
    folder, wrong = WORLD.bcast(tmp_path), {}

    def body(kv: mpips.KVStore) -> None:
        for number, kind in enumerate(("sgd", "momentum", "adam", "dampened")):
            plain = Run(kv, kind).train(0, 6).model
            saver = Run(kv, kind, flat=bool(number % 2))
            saver.state()  # before the first step, too
            saver.train(0, 3)
            dcp.save(saver.state(), checkpoint_id=folder / kind)
            loader = Run(kv, kind, flat=bool(number % 2))
            loader.model.apply(lambda each: each.reset_parameters() if isinstance(each, nn.Linear) else None)
            dcp.load(saved := loader.state(), checkpoint_id=folder / kind)
            loader.load(saved).train(3, 6)
            found = far(saver.train(3, 6).model, plain), far(loader.model, plain)
            if found[0] or found[1] > CLOSE:
                wrong[kind] = found

    def with_group(kv: mpips.KVStore) -> None:
        with groups():
            body(kv)

    run("dist_sync", with_group, **options)
    assert not wrong


@pytest.mark.mpi(min_size=2)
def test_a_state_is_that_of_pytorchs_optimizer() -> None:
    """What servers gave goes on without them, and what PyTorch's optimizer gave goes on with servers."""
    wrong = {}

    def body(kv: mpips.KVStore) -> None:
        for kind in list(KINDS)[1:6]:
            served = Run(kv, kind).train(0, 3)
            weights, state = copy.deepcopy((served.model.state_dict(), served.optimizer.state_dict()))
            alone, begun = network(), Run(kv, kind)
            inner = KINDS[kind](alone.parameters())
            alone.load_state_dict(weights)
            inner.load_state_dict(state)
            begun.optimizer.load_state_dict(inner.state_dict())
            begun.model.load_state_dict(weights)  # which comes after the optimizer's here
            served.train(3, 6)
            for step in range(3, 6):
                inner.zero_grad()
                parts = [nn.functional.mse_loss(alone(x), y) for x, y in (batch(step, rank=r) for r in range(workers))]
                (sum(parts) / workers).backward()
                inner.step()
            found = far(alone, served.model), far(begun.train(3, 6).model, served.model)
            if max(found) > 1e-9:
                wrong[kind] = found

    workers = WORLD.size - 1
    run("dist_sync", body, servers=1)
    assert not wrong


@pytest.mark.mpi(min_size=2)
def test_a_state_that_does_not_fit_is_refused() -> None:
    said: dict[str, str] = {}

    def body(kv: mpips.KVStore) -> None:
        adam = Run(kv, "adam").train(0, 2)
        before = copy.deepcopy(adam.model)
        for name, change in (
            ("lacks", lambda state: state.pop("exp_avg")),
            ("shape", lambda state: state.update(exp_avg=torch.ones(2))),
        ):
            state = copy.deepcopy(adam.optimizer.state_dict())
            del state["store"]
            change(state["state"][0])
            said[name] = heard(lambda given=state: adam.optimizer.load_state_dict(given))
        empty = {"state": {}, "param_groups": adam.optimizer.state_dict()["param_groups"]}
        said["empty"] = heard(lambda: adam.optimizer.load_state_dict(empty))
        assert far(adam.model, before) == 0
        assert heard(lambda: adam.train(2, 4)) == ""

    run("dist_sync", body, servers=1)
    if said:
        assert "has no tensor 'exp_avg', it has 'step', 'exp_avg_sq': load what the same" in said["lacks"], said
        assert "has shape (2,), and the parameter (16, 5): load what was saved of this model" in said["shape"], said
        assert "the saved one has none: make it as the saved one was" in said["empty"], said
