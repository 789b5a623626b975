"""DataParallel: training on all ranks is training on the joined batch."""

from __future__ import annotations

import copy
import io
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'mpips[torch]'")

from torch import nn  # noqa: E402

import mpips.torch  # noqa: E402
from collectives import MismatchError  # noqa: E402
from mpips.torch.lockstep import difference  # noqa: E402
from tests.mpi.torch.support import (  # noqa: E402
    BATCH,
    WORLD,
    batch,
    far,
    joined_batch,
    network,
    train,
    worst,
)  # fmt: skip


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), 0.1, 0.9)


def serial(steps: int) -> nn.Module:
    model = network()
    train(model, sgd(model), steps, joined_batch)
    return model


@pytest.mark.parametrize("buckets", ["auto", "merged", "optimal", "single", "layerwise", 0.001])
def test_training_equals_that_on_the_joined_batch(buckets: str | float) -> None:
    model = mpips.torch.DataParallel(network(), buckets=buckets)
    train(model, sgd(model), 8, batch)
    named = [name for bucket in model.buckets for name in bucket]
    assert worst(far(model.module, serial(8))) < 1e-12
    assert sorted(named) == sorted(name for name, _ in model.module.named_parameters())


def test_losses_are_those_of_the_joined_batch_for_200_steps() -> None:
    model, plain = mpips.torch.DataParallel(network(torch.float32)), network(torch.float32)
    ours = np.array(train(model, sgd(model), 200, lambda step: batch(step, torch.float32)))
    theirs = np.array(train(plain, sgd(plain), 200, lambda step: joined_batch(step, torch.float32)))
    WORLD.Allreduce(MPI.IN_PLACE, ours)
    np.testing.assert_allclose(ours / WORLD.size, theirs, rtol=1e-6)


def test_a_paper_s_algorithm_by_name() -> None:
    algorithm = f"bcube(n={WORLD.size},k=1)" if WORLD.size > 1 else "auto"
    model = mpips.torch.DataParallel(network(), algorithm=algorithm)
    train(model, sgd(model), 5, batch)
    assert worst(far(model.module, serial(5))) < 1e-12


def test_rank_0_s_parameters_are_taken() -> None:
    torch.manual_seed(WORLD.rank)
    model = nn.Linear(3, 2)
    mpips.torch.DataParallel(model)
    torch.manual_seed(0)
    difference = worst(far(model, nn.Linear(3, 2)))
    assert difference == 0


def test_gradients_add_up_without_an_exchange() -> None:
    model, plain = mpips.torch.DataParallel(network()), network()
    for number in range(3):
        with model.no_sync() if number < 2 else nullcontext():
            x, y = batch(number)
            nn.functional.mse_loss(model(x), y).backward()
        x, y = joined_batch(number)
        nn.functional.mse_loss(plain(x), y).backward()
    for a, b in zip(model.parameters(), plain.parameters()):
        a.grad.sub_(b.grad)
    largest = worst(max(float(p.grad.abs().max()) for p in model.parameters()))
    assert largest < 1e-12


class Branches(nn.Module):
    """Uses one of two layers; a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: Any, which: int) -> Any:
        return self.layers[which](x)


@pytest.mark.parametrize("steps", [1, 6])
def test_parameters_that_some_ranks_do_not_use(steps: int) -> None:
    model = mpips.torch.DataParallel(Branches(), buckets="layerwise")
    for _ in range(steps):
        model.zero_grad()
        model(torch.ones(1, 2), WORLD.rank % 2).sum().backward()
    gradients = [layer.weight.grad for layer in model.module.layers]
    odd = WORLD.size // 2 / WORLD.size
    first = gradients[0] is not None and torch.allclose(gradients[0], torch.full((2, 2), 1 - odd))
    second = torch.allclose(gradients[1], torch.full((2, 2), odd)) if WORLD.size > 1 else gradients[1] is None
    fine = WORLD.allgather(first and second and gradients[2] is None)
    assert all(fine)


def test_ranks_with_different_numbers_of_batches_join() -> None:
    model, plain = mpips.torch.DataParallel(network()), network()
    optimizer, beside = sgd(model), sgd(plain)
    with model.join():
        train(model, optimizer, 1 + WORLD.rank, batch)
    for step in range(WORLD.size):
        beside.zero_grad()
        x, y = joined_batch(step)
        there = slice(BATCH * step, None)  # ranks that have so many batches
        nn.functional.mse_loss(plain(x[there]), y[there]).backward()
        beside.step()
    assert worst(far(model.module, plain)) < 1e-12


def test_a_model_of_bfloat16() -> None:
    model = mpips.torch.DataParallel(network(torch.bfloat16))
    losses = train(model, torch.optim.SGD(model.parameters(), 0.1), 5, lambda step: batch(step, torch.bfloat16))
    same = WORLD.allgather([p.float().sum().item() for p in model.parameters()])
    assert all(each == same[0] for each in same)
    assert all(0 < loss < 100 for loss in losses)


def test_autocast() -> None:
    model, plain = mpips.torch.DataParallel(network(torch.float32)), network(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        train(model, sgd(model), 3, lambda step: batch(step, torch.float32))
        train(plain, sgd(plain), 3, lambda step: joined_batch(step, torch.float32))
    assert worst(far(model.module, plain)) < 0.05


def test_parameters_of_two_types() -> None:
    model = network()
    model[2].to(torch.float32)

    def mixed(x: Any) -> Any:
        x = model[1](model[0](x))
        return model[4](model[3](model[2](x.float())).double())

    model.forward = mixed
    parallel = mpips.torch.DataParallel(model, buckets="layerwise")
    train(parallel, sgd(parallel), 5, batch)
    sums = WORLD.allgather([float(p.sum()) for p in parallel.parameters()])
    assert all(each == sums[0] for each in sums)


def test_clipping_takes_the_norm_of_all_ranks() -> None:
    model, plain = mpips.torch.DataParallel(network()), network()
    train(model, sgd(model), 1, batch)
    train(plain, sgd(plain), 1, joined_batch)
    norm = model.clip_grad_norm_(1e-3)
    theirs = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    after = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
    off = worst(max(abs(float(norm - theirs)), abs(float(after) - 1e-3)))
    assert off < 1e-6


def test_plain_pytorch_loads_its_state() -> None:
    model, plain = mpips.torch.DataParallel(network()), network()
    train(model, sgd(model), 2, batch)
    plain.load_state_dict(model.state_dict())
    before = far(model.module, plain)
    model.load_state_dict(serial(1).state_dict())
    train(model, sgd(model), 1, batch)
    finite = all(torch.isfinite(p).all() for p in model.parameters())
    assert worst(before) == 0
    assert finite


def test_buffers_are_rank_0_s() -> None:
    model = mpips.torch.DataParallel(nn.BatchNorm1d(3))
    model(torch.full((2, 3), float(WORLD.rank)) + torch.rand(2, 3))
    model(torch.zeros(2, 3))
    means = WORLD.allgather(model.module.running_mean.tolist())
    assert all(mean == means[0] for mean in means)


@pytest.mark.parametrize(
    ("odd", "asked", "words"),
    [
        (lambda: nn.Linear(4, 2), {}, "parameter 'weight' is float32(2, 3) on rank 0 and float32(2, 4) on rank 1"),
        (lambda: nn.Linear(3, 2, dtype=torch.float64), {}, "float32(2, 3) on rank 0 and float64(2, 3) on rank 1"),
        (lambda: nn.Linear(3, 2, bias=False), {}, "rank 1 has no parameter 'bias', which rank 0 has"),
        (lambda: nn.Linear(3, 2), {"buckets": 4}, "buckets is 'auto' on rank 0 and 4 on rank 1"),
    ],
)
def test_models_that_differ(odd: Any, asked: dict, words: str) -> None:
    if WORLD.size == 1:
        pytest.skip("one rank has nobody to differ from")
    comm = WORLD.Dup()
    model, options = (odd(), asked) if comm.rank == 1 else (nn.Linear(3, 2), {})
    said, begin = "", time.monotonic()
    try:
        mpips.torch.DataParallel(model, comm, **options)
    except MismatchError as error:
        said = str(error)
    everybody = WORLD.allgather((said, time.monotonic() - begin))
    assert all(words in text and seconds < 1 for text, seconds in everybody), everybody


def test_what_differs_first() -> None:
    a, b, c = ("parameter 'a'", "float32(2,)"), ("parameter 'b'", "float32(2,)"), ("parameter 'c'", "float32(2,)")
    assert difference([[a, b], [a, b]]) == ""
    assert difference([[a], [a], [a, c]]) == "rank 0 has no parameter 'c', which rank 2 has"
    assert difference([[a, b], [b, a]]) == "rank 0 has parameter 'a' where rank 1 has parameter 'b'"


def test_torchrun_s_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", str(WORLD.size + 1))
    with pytest.raises(RuntimeError, match=f"torchrun started {WORLD.size + 1} .* MPI has {WORLD.size} .*mpips run -w"):
        mpips.torch.DataParallel(network())
    monkeypatch.setenv("WORLD_SIZE", str(WORLD.size))
    mpips.torch.DataParallel(network())


def test_words_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="choose"):
        mpips.torch.DataParallel(network(), buckets="clever")
    with pytest.raises(ValueError, match="requires_grad"):
        mpips.torch.DataParallel(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"module": "x"}, TypeError, "module is of type str: pass a torch.nn.Module"),
        ({"device_ids": [0]}, TypeError, "no argument device_ids: mpips works on CPU tensors, leave it out"),
        ({"find_unused_parameters": True}, TypeError, "no argument find_unused_parameters: leave it out"),
        ({"comm": [0]}, TypeError, "comm is of type list: pass an mpi4py communicator"),
        ({"module": nn.Linear(2, 2, device="meta")}, ValueError, "a tensor is on meta: pass CPU tensors"),
        ({"buckets": -1}, ValueError, "buckets is -1: pass .* a number of MiB above 0"),
        ({"buckets": float("nan")}, ValueError, "buckets is nan: pass"),
        ({"buckets": None}, TypeError, "buckets is of type NoneType: pass"),
    ],
)
def test_arguments_that_do_not_serve(arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        mpips.torch.DataParallel(**{"module": network(), **arguments})


@pytest.mark.parametrize(
    "use", [copy.deepcopy, lambda model: torch.save(model, io.BytesIO()), torch.optim.swa_utils.AveragedModel]
)
def test_the_module_is_copied_and_saved_not_its_wrapper(use: Any) -> None:
    model = mpips.torch.DataParallel(network())
    train(model, sgd(model), 1, batch)
    with pytest.raises(TypeError, match="copy or save its `module`, or its `state_dict\\(\\)`"):
        use(model)
    use(model.module)
