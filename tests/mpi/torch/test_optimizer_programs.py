"""DistributedOptimizer with what programs do to an optimizer and its gradients: as in PyTorch, or refused.

Strides, hooks, gradients of one's own, an optimizer that has made steps, changes through `.data`, compiled steps.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.mpi.torch.support import PAIRS, SERVED, SERVERLESS, WORLD, batch, far, heard, on_workers, wrapped


def convolutions() -> nn.Module:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 2)).double()
    return model.to(memory_format=torch.channels_last)


def images(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 3, 6, 6, generator=generator).double().to(memory_format=torch.channels_last)


@PAIRS
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
@pytest.mark.parametrize("numbers", [{}, {"maximize": True}], ids=str)
def test_parameters_of_any_strides_train(kind: Any, numbers: dict[str, Any], options: dict[str, Any]) -> None:
    """Fused optimizers walk through memory. A worker has no gradient of the first layer now and then."""
    with on_workers(options):
        model, plain = convolutions(), convolutions()
        inner = kind(model.parameters(), 0.01, fused=True, **numbers)
        optimizer, alone = wrapped(model, inner, options), kind(plain.parameters(), 0.01, **numbers)
        workers = optimizer.store.num_workers

        def loss(of: nn.Module, step: int, rank: int) -> Any:
            hidden = of[0](images(step, rank))
            return of[2](torch.tanh(hidden.detach() if (step + rank) % 3 == 0 else hidden)).pow(2).mean()

        for step in range(5):
            optimizer.zero_grad()
            loss(model, step, optimizer.store.rank).backward()
            optimizer.step()
            alone.zero_grad()
            (sum(loss(plain, step, rank) for rank in range(workers)) / workers).backward()
            alone.step()
        optimizer.close()
        assert far(model, plain) < 1e-12


def train_lines(optimizer: Any, model: nn.Module, steps: int, ranks: Sequence[int], before: Any = lambda: None) -> None:
    """Train a line on the batches of some ranks together."""
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.cat([batch(step, rank=rank)[0] for rank in ranks])
        model(x).pow(2).mean().backward()
        before()
        optimizer.step()


def line() -> nn.Module:
    torch.manual_seed(6)
    return nn.Linear(5, 2).double()


@PAIRS
def test_a_hook_of_the_optimizer_clips_the_mean(options: dict[str, Any]) -> None:
    def clipped(model: nn.Module) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        optimizer.register_step_pre_hook(lambda *_: bool(nn.utils.clip_grad_norm_(model.parameters(), 0.01)) and None)
        return optimizer

    with on_workers(options):
        model, plain = line(), line()
        optimizer = wrapped(model, clipped(model), options)
        train_lines(optimizer, model, 4, [optimizer.store.rank])
        train_lines(clipped(plain), plain, 4, range(optimizer.store.num_workers))
        optimizer.close()
        assert not optimizer.on_servers and far(model, plain) < 1e-12


def test_a_hook_that_servers_would_not_call_is_refused() -> None:
    with on_workers(SERVED):
        model = line()
        inner = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = wrapped(model, inner, SERVED)
        inner.register_step_post_hook(lambda *_: None)
        said = heard(lambda: train_lines(optimizer, model, 1, [0]))
        optimizer.close()
        assert "SGD has got a hook on its step, which servers do not call: register it before" in said


def test_hooks_of_a_state_are_called() -> None:
    model, calls = line(), list[str]()
    optimizer = wrapped(model, torch.optim.NAdam(model.parameters(), 0.1), SERVERLESS)
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("given"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["given", "loaded"]


@PAIRS
def test_a_program_may_make_gradients_itself(options: dict[str, Any]) -> None:
    """They may share memory, and be broadcast from a number."""

    def train(parameters: Any, optimizer: Any, rates: Any) -> None:
        for step in range(3):
            one = torch.full((3,), sum(rates) / len(rates) * (step + 1)).double()
            for parameter, gradient in zip(parameters, (one, one, one[:1].expand(3))):
                parameter.grad = gradient
            optimizer.step()

    def ones() -> nn.Module:
        return nn.ParameterList([torch.ones(3).double() for _ in range(3)])

    with on_workers(options):
        for dampening in (0.0, 0.1):
            model, plain = ones(), ones()
            optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.1, 0.9, dampening), options)
            train(model.parameters(), optimizer, [optimizer.store.rank + 1.0])
            rates = [rank + 1.0 for rank in range(optimizer.store.num_workers)]
            train(plain.parameters(), torch.optim.SGD(plain.parameters(), 0.1, 0.9, dampening), rates)
            assert far(model, plain) < 1e-12
            if optimizer.store.layout.num_servers:
                break
        optimizer.close()


def test_servers_do_not_begin_a_state_anew() -> None:
    with on_workers(SERVED):
        model = line()
        inner = torch.optim.Adam(model.parameters(), 0.1)
        train_lines(inner, model, 1, [0])
        said = heard(lambda: wrapped(model, inner, SERVED))
        assert "Adam has made steps, and the servers would begin its state anew: wrap it before" in said


def test_all_hear_of_a_state_of_one_alone() -> None:
    with on_workers(SERVERLESS, 2):
        model = line()
        inner = torch.optim.Adam(model.parameters(), 0.1)
        if WORLD.rank == 0:
            train_lines(inner, model, 1, [0])
        assert "the optimizer's state is 6 tensors" in heard(lambda: wrapped(model, inner, SERVERLESS))


def test_servers_hear_of_changes_through_data() -> None:
    with on_workers(SERVED):
        model = line()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.1), SERVED)
        train_lines(optimizer, model, 1, [optimizer.store.rank])
        model.bias.data.clamp_(-1e-3, 1e-3)
        said = heard(lambda: train_lines(optimizer, model, 1, [optimizer.store.rank]))
        optimizer.close()
        assert "parameter 'bias' was changed since the last step" in said


@PAIRS
def test_a_step_may_be_compiled_and_have_a_closure(options: dict[str, Any]) -> None:
    with on_workers(options):
        model, plain = line(), line()
        optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.1), options)
        step = torch.compile(optimizer.step, backend="aot_eager")

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(batch(0, rank=0)[0]).pow(2).mean()
            loss.backward()
            return loss

        with torch.no_grad():
            step(closure)
            step(closure=closure)
        optimizer.close()
        alone = torch.optim.SGD(plain.parameters(), 0.1)
        for _ in range(2):
            train_lines(alone, plain, 1, [0])
        assert far(model, plain) < 1e-12


def test_its_state_is_copied_and_saved_instead() -> None:
    model = line()
    optimizer = wrapped(model, torch.optim.SGD(model.parameters(), 0.1), SERVERLESS)
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="tied to its store: copy or save its `state_dict\\(\\)`"):
            use(optimizer)
