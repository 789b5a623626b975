"""DataParallel: training on all ranks is training on the joined batch."""

from __future__ import annotations

import copy
import io
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from collectives import MismatchError
from mpips.torch import DataParallel, broadcast_optimizer_state
from tests.mpi.torch.support import (
    BATCH,
    WORLD,
    Words,
    alike,
    batch,
    far,
    joined_batch,
    network,
    rows,
    several,
    sums,
    train,
)


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, 0.9)


def serial(steps: int) -> nn.Module:
    model = network()
    train(model, sgd(model), steps, joined_batch)
    return model


PAPER = f"bcube(n={WORLD.size},k=1)" if WORLD.size > 1 else "auto"


@pytest.mark.parametrize(
    "options",
    [
        *({"buckets": each} for each in ("auto", "merged", "optimal", "single", "layerwise", 0.001)),
        {"algorithm": PAPER},
    ],
    ids=str,
)
def test_training_equals_that_on_the_joined_batch(options: dict[str, Any]) -> None:
    model = DataParallel(network(), **options)
    train(model, sgd(model), 8, batch)
    named = [name for bucket in model.buckets for name in bucket]
    assert far(model.module, serial(8)) < 1e-12
    assert sorted(named) == sorted(name for name, _ in model.module.named_parameters())


def test_rank_0_s_parameters_and_buffers_are_taken() -> None:
    torch.manual_seed(WORLD.rank)
    model = nn.Linear(3, 2)
    DataParallel(model)
    torch.manual_seed(0)
    assert far(model, nn.Linear(3, 2)) == 0
    normed = DataParallel(nn.BatchNorm1d(3))
    normed(torch.full((2, 3), float(WORLD.rank)) + torch.rand(2, 3))
    normed(torch.zeros(2, 3))
    assert alike(normed.module.running_mean.tolist())


def sum_of_gradients(model: nn.Module) -> float:
    return sum(float(p.grad.sum()) for p in model.parameters())


@pytest.mark.parametrize("by_attribute", [False, True])
def test_gradients_add_up_without_an_exchange(by_attribute: bool) -> None:
    model, plain = DataParallel(network()), network()
    for number in range(3):
        if by_attribute:
            model.require_backward_grad_sync = number == 2
        with model.no_sync() if number < 2 and not by_attribute else nullcontext():
            x, y = batch(number)
            mse_loss(model(x), y).backward()
        assert WORLD.size == 1 or alike(sum_of_gradients(model)) == (number == 2)
        x, y = joined_batch(number)
        mse_loss(plain(x), y).backward()
    assert max(float((a.grad - b.grad).abs().max()) for a, b in zip(model.parameters(), plain.parameters())) < 1e-12


def test_ranks_with_different_numbers_of_batches_join() -> None:
    model, plain = DataParallel(network()), network()
    optimizer, beside = sgd(model), sgd(plain)
    with model.join():
        train(model, optimizer, 1 + WORLD.rank, batch)
    for step in range(WORLD.size):
        beside.zero_grad()
        x, y = joined_batch(step)
        there = slice(BATCH * step, None)  # ranks that have so many batches
        mse_loss(plain(x[there]), y[there]).backward()
        beside.step()
    assert far(model.module, plain) < 1e-12


def test_models_of_other_types_train() -> None:
    model = DataParallel(network(torch.bfloat16))
    losses = train(model, torch.optim.SGD(model.parameters(), 0.1), 5, lambda step: batch(step, torch.bfloat16))
    assert alike(sums(model)) and all(0 < loss < 100 for loss in losses)
    model, plain = DataParallel(network(torch.float32)), network(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, sgd(model), 3, lambda step: batch(step, torch.float32))
        train(plain, sgd(plain), 3, lambda step: joined_batch(step, torch.float32))
    assert far(model.module, plain) < 0.05


def test_parameters_of_two_types_train() -> None:
    model = network()
    model[2].to(torch.float32)

    def mixed(x: Any) -> Any:
        x = model[1](model[0](x))
        return model[4](model[3](model[2](x.float())).double())

    model.forward = mixed
    parallel = DataParallel(model, buckets="layerwise")
    train(parallel, sgd(parallel), 5, batch)
    assert alike(sums(parallel))


def images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all ranks' pictures of one step, in channels_last, and targets."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH * WORLD.size, 3, 6, 6, generator=generator).to(memory_format=torch.channels_last)
    return x, torch.randn(BATCH * WORLD.size, 4, 2, 2, generator=generator)


def my_images(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine = slice(BATCH * WORLD.rank, BATCH * (WORLD.rank + 1))
    x, y = images(step)
    return x[mine], y[mine]


@pytest.mark.parametrize("moved", ["before", "after", "never"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_fused_optimizers_take_parameters_of_any_strides(optimizer: Any, moved: str) -> None:
    """These walk through memory, and expect gradients in the order of their parameters."""

    def convolutions() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3))

    model, plain = convolutions(), convolutions()
    if moved == "before":
        model.to(memory_format=torch.channels_last)
    parallel = DataParallel(model)
    if moved == "after":
        train(parallel, torch.optim.SGD(parallel.parameters(), 0.1), 1, my_images)
        train(plain, torch.optim.SGD(plain.parameters(), 0.1), 1, images)
        model.to(memory_format=torch.channels_last)
    train(parallel, optimizer(parallel.parameters(), 0.01, fused=True), 4, my_images)
    train(plain, optimizer(plain.parameters(), 0.01), 4, images)
    assert far(model, plain) < 1e-4


def test_a_model_may_get_another_type_after_wrapping() -> None:
    model, plain = DataParallel(network(torch.float32)), network(torch.float32)
    for parallel, batches in ((model, batch), (plain, joined_batch)):
        train(parallel, sgd(parallel), 2, lambda step, of=batches: of(step, torch.float32))
        parallel.double()
        train(parallel, sgd(parallel), 3, batches)
    assert far(model.module, plain) < 1e-5 and alike(sums(model))


@pytest.mark.parametrize("buckets", ["single", "layerwise"])
def test_complex_parameters_train(buckets: str) -> None:
    def turning() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 3).to(torch.complex128), nn.Linear(5, 3).double())
        model.forward = lambda x: model[0](x.to(torch.complex128)).abs() - model[1](x)
        torch.manual_seed(3)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        return model

    model, plain = DataParallel(turning(), buckets=buckets), turning()
    train(model, sgd(model), 5, batch)
    train(plain, sgd(plain), 5, joined_batch)
    assert far(model.module, plain) < 1e-12
    assert torch.allclose(model.clip_grad_norm_(1.0), nn.utils.clip_grad_norm_(plain.parameters(), 1.0))


def rows_on(rank: int, step: int) -> torch.Tensor:
    """Return the rows of one rank's batch: at step 2 rank 0 takes none, and at step 3 nobody."""
    return rows(step, rank)[: 0 if step == 3 or (step == 2 and rank == 0) else None]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
@pytest.mark.parametrize("buckets", ["single", "layerwise"])
def test_rows_of_sparse_embeddings_stay_rows(optimizer: Any, buckets: str) -> None:
    model, plain = Words(), Words()
    parallel = DataParallel(model, buckets=buckets)
    ours, theirs = optimizer(model.table.parameters(), 0.1), optimizer(plain.table.parameters(), 0.1)
    for step in range(6):
        ours.zero_grad()
        if step == 4:
            with parallel.no_sync():
                parallel(rows(9)).backward()
        parallel(rows_on(WORLD.rank, step)).backward()
        theirs.zero_grad()
        for rank in range(WORLD.size):
            if step == 4:
                (plain(rows(9, rank)) / WORLD.size).backward()
            (plain(rows_on(rank, step)) / WORLD.size).backward()
        gradient, wanted = model.table.weight.grad, plain.table.weight.grad
        if wanted is None:
            assert gradient is None
        else:
            assert gradient.is_sparse and gradient.indices().equal(wanted.coalesce().indices())
        ours.step()
        theirs.step()
    assert far(model, plain) < 1e-12 and alike(sums(model))
    norms = [p.grad.to_dense().norm() for p in plain.parameters()]
    assert torch.allclose(parallel.clip_grad_norm_(1.0), torch.stack(norms).norm())


def test_ranks_with_sparse_rows_join() -> None:
    model, plain = Words(), Words()
    parallel = DataParallel(model)
    ours, theirs = (torch.optim.SparseAdam(each.table.parameters(), 0.1) for each in (model, plain))
    with parallel.join():
        for step in range(1 + WORLD.rank):
            ours.zero_grad()
            parallel(rows(step)).backward()
            ours.step()
    for step in range(WORLD.size):
        there = range(step, WORLD.size)  # ranks that have so many batches
        theirs.zero_grad()
        (sum(plain(rows(step, rank)) for rank in there) / len(there)).backward()
        theirs.step()
    assert far(model, plain) < 1e-12


def test_a_sparse_table_s_gradient_may_be_dense() -> None:
    model, plain = Words(tied=True), Words(tied=True)
    parallel = DataParallel(model)
    ours, theirs = torch.optim.Adam(model.parameters(), 0.1), torch.optim.Adam(plain.parameters(), 0.1)
    for step in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        parallel(rows(step)).backward()
        (sum(plain(rows(step, rank)) for rank in range(WORLD.size)) / WORLD.size).backward()
        ours.step()
        theirs.step()
    assert far(model, plain) < 1e-12


def test_clipping_takes_the_norm_of_all_ranks() -> None:
    model, plain = DataParallel(network()), network()
    train(model, sgd(model), 1, batch)
    train(plain, sgd(plain), 1, joined_batch)
    norm = model.clip_grad_norm_(1e-3)
    theirs = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    after = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    assert abs(float(norm - theirs)) < 1e-6 and abs(float(after) - 1e-3) < 1e-6


def test_plain_pytorch_loads_its_state() -> None:
    model, plain = DataParallel(network()), network()
    train(model, sgd(model), 2, batch)
    plain.load_state_dict(model.state_dict())
    assert far(model.module, plain) == 0
    model.load_state_dict(serial(1).state_dict())
    train(model, sgd(model), 1, batch)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    with pytest.raises(ValueError, match="assign=True"):
        model.load_state_dict(plain.state_dict(), assign=True)


@pytest.mark.parametrize(
    "use", [copy.deepcopy, lambda model: torch.save(model, io.BytesIO()), torch.optim.swa_utils.AveragedModel]
)
def test_its_module_is_copied_and_saved_instead(use: Any) -> None:
    model = DataParallel(network())
    train(model, sgd(model), 1, batch)
    with pytest.raises(TypeError, match="copy or save its `module`, or its `state_dict\\(\\)`"):
        use(model)
    use(model.module)


def transposed() -> nn.Module:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.zeros(3, 2).t())
    return model


@several
@pytest.mark.parametrize(
    ("odd", "asked", "words"),
    [
        (lambda: nn.Linear(4, 2), {}, "parameter 'weight' is float32(2, 3) on rank 0 and float32(2, 4) on rank 1"),
        (lambda: nn.Linear(3, 2, dtype=torch.float64), {}, "float32(2, 3) on rank 0 and float64(2, 3) on rank 1"),
        (transposed, {}, "float32(2, 3) on rank 0 and float32(2, 3) with strides (1, 2) on rank 1"),
        (lambda: nn.Embedding(2, 3, sparse=True), {}, "float32(2, 3) on rank 0 and float32(2, 3), sparse on rank 1"),
        (lambda: nn.Linear(3, 2, bias=False), {}, "parameter 'bias' is float32(2,) on rank 0 and missing on rank 1"),
        (lambda: nn.Linear(3, 2), {"buckets": 4}, "buckets is 'auto' on rank 0 and 4 on rank 1"),
    ],
)
def test_models_that_differ_are_refused(odd: Any, asked: dict, words: str) -> None:
    comm = WORLD.Dup()
    model, options = (odd(), asked) if comm.rank == 1 else (nn.Linear(3, 2), {})
    begin = time.monotonic()
    with pytest.raises(MismatchError) as error:
        DataParallel(model, comm, **options)
    assert words in str(error.value) and time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"module": "x"}, TypeError, "module is of type str: pass a torch.nn.Module"),
        ({"module": nn.Linear(2, 2).requires_grad_(False)}, ValueError, "no parameter with requires_grad"),
        ({"module": nn.Linear(2, 2, device="meta")}, ValueError, "a tensor is on meta: pass CPU tensors"),
        ({"device_ids": [0]}, TypeError, "no argument device_ids: mpips works on CPU tensors, leave it out"),
        ({"find_unused_parameters": True}, TypeError, "no argument find_unused_parameters: leave it out"),
        ({"comm": [0]}, TypeError, "comm is of type list: pass an mpi4py communicator"),
        ({"buckets": "clever"}, ValueError, "buckets='clever' is unknown: choose"),
        ({"buckets": -1}, ValueError, "buckets is -1: pass .* a number of MiB above 0"),
        ({"buckets": float("nan")}, ValueError, "buckets is nan: pass"),
        ({"buckets": None}, TypeError, "buckets is of type NoneType: pass"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        DataParallel(**{"module": network(), **arguments})


class Centered(nn.Module):
    """A buffer that is part of the backward pass, and which each rank changes by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(WORLD.rank)
        self.last = nn.Linear(3, 2)
        self.register_buffer("center", torch.ones(3) * (1 + WORLD.rank))

    def forward(self, x: Any) -> Any:
        return self.last(x * self.center)


@pytest.mark.parametrize("within", ["forward", "wrapping", "state"])
def test_inference_mode_leaves_nothing_that_backward_cannot_use(within: str) -> None:
    def mode(name: str) -> Any:
        return torch.inference_mode(name == within)

    net = Centered()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with mode("wrapping"):
        model = DataParallel(net)
    with mode("state"):
        broadcast_optimizer_state(optimizer)
    for _ in range(3):
        net.center.add_(WORLD.rank)
        with mode("forward"):
            model(torch.ones(1, 3))
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    assert alike(sums(model))


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = network()
    with pytest.raises(ValueError, match=r"parameter '0.weight' was made in torch.inference_mode\(\)"):
        DataParallel(model)
    for parameter in model.parameters():  # frozen ones are only read
        parameter.requires_grad_(False)
    DataParallel(nn.Sequential(nn.Linear(1, 1), model))
