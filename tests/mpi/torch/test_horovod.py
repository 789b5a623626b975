"""Programs written for Horovod: operations by name, errors on all ranks, and its optimizer beside one rank."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpips.horovod.torch as hvd
from tests.mpi.torch.support import ODD, WORLD, batch, far, joined_batch, network, several

RANK, SIZE = WORLD.rank, WORLD.size


@pytest.fixture(autouse=True)
def horovod() -> Iterator[None]:
    hvd.init()
    yield
    hvd.shutdown()


def numbers(*shape: int, rank: int = RANK) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) + 10 * rank


def test_ranks_are_those_of_mpi() -> None:
    assert (hvd.rank(), hvd.size()) == (RANK, SIZE)
    assert 0 <= hvd.local_rank() < hvd.local_size() <= SIZE and hvd.cross_size() >= 1
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"call hvd\.init\(\) first"):
        hvd.rank()


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product])
def test_allreduce_reduces_what_all_ranks_bring(op: Any) -> None:
    every = torch.stack([numbers(2, 3, rank=rank) for rank in range(SIZE)])
    expected = {
        hvd.Average: every.mean(0),
        hvd.Sum: every.sum(0),
        hvd.Min: every.amin(0),
        hvd.Max: every.amax(0),
        hvd.Product: every.prod(0),
    }[op]
    given = numbers(2, 3)
    torch.testing.assert_close(hvd.allreduce(given, op=op), expected)
    assert torch.equal(given, numbers(2, 3))
    assert hvd.allreduce_(given, op=op) is given
    torch.testing.assert_close(given, expected)


def test_a_parameter_is_reduced_in_place_with_factors() -> None:
    parameter = nn.Parameter(torch.ones(3))
    assert hvd.allreduce_(parameter, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5) is parameter
    assert parameter.tolist() == [SIZE] * 3 and parameter.requires_grad


def test_allreduces_that_are_begun_together_have_factors_of_their_own() -> None:
    factors = [1.0, 0.5, 2.0]
    handles = [
        hvd.allreduce_async(torch.ones(3), name=f"times {factor}", op=hvd.Sum, postscale_factor=factor)
        for factor in factors
    ]
    assert [hvd.synchronize(handle).tolist() for handle in handles] == [[factor * SIZE] * 3 for factor in factors]


def test_a_group_of_several_types_is_averaged() -> None:
    given = [torch.tensor([4 * RANK]), torch.tensor([4.0 * RANK]), torch.tensor([RANK % 2 == 0]).half()]
    mean = 2 * (SIZE - 1)
    whole, real, half = hvd.grouped_allreduce(given, op=hvd.Average)
    assert (whole.item(), real.item()) == (mean, mean)
    assert half.item() == pytest.approx((SIZE + 1) // 2 / SIZE, abs=1e-3)


def test_ranks_may_begin_named_operations_in_any_order() -> None:
    names = [f"tensor {number}" for number in range(6)]
    mine = names[RANK % 6 :] + names[: RANK % 6]
    handles = {name: hvd.allreduce_async(torch.full((4,), float(names.index(name))), name=name) for name in mine}
    for name in reversed(mine):
        assert hvd.synchronize(handles[name]).tolist() == [names.index(name)] * 4


def test_other_collectives_give_each_rank_its_part() -> None:
    rows = hvd.allgather(numbers(RANK + 1, 2))
    assert torch.equal(rows, torch.cat([numbers(rank + 1, 2, rank=rank) for rank in range(SIZE)]))
    assert torch.equal(hvd.broadcast(numbers(3), root_rank=ODD), numbers(3, rank=ODD))
    received, counts = hvd.alltoall(torch.full((SIZE * (RANK + 1),), float(RANK)), splits=[RANK + 1] * SIZE)
    assert counts.tolist() == [rank + 1 for rank in range(SIZE)]
    assert received.tolist() == [float(rank) for rank in range(SIZE) for _ in range(rank + 1)]
    given, first = numbers(2 * SIZE + 1, 3, rank=0), 2 * RANK + (RANK > 0)  # rank 0 takes one row more
    part = hvd.reducescatter(given, op=hvd.Sum, prescale_factor=0.5)
    assert torch.equal(part, given[first : 2 * RANK + 3] * SIZE / 2)
    assert hvd.allgather_object({"rank": RANK}) == [{"rank": rank} for rank in range(SIZE)]
    assert hvd.broadcast_object([RANK, "x"], root_rank=ODD) == [ODD, "x"]


def test_gradients_flow_through_operations() -> None:
    x = numbers(2).requires_grad_()
    hvd.allreduce(x, op=hvd.Sum).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [SIZE, SIZE]
    x.grad = None
    (hvd.allgather(x) * (RANK + 1)).sum().backward()
    assert x.grad.tolist() == [(SIZE + 1) / 2] * 2


@several
def test_operations_that_differ_raise_on_all_ranks_and_training_goes_on() -> None:
    one = torch.zeros(3 if RANK == ODD else 2)
    with pytest.raises(hvd.HorovodInternalError, match=rf"allreduce 'x': shape is 2 on rank 0 and 3 on rank {ODD}"):
        hvd.allreduce(one, name="x")
    with pytest.raises(hvd.HorovodInternalError, match=rf"root_rank is 0 on rank 0 and {ODD} on rank {ODD}"):
        hvd.broadcast(torch.zeros(2), ODD if RANK == ODD else 0, name="y")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [SIZE]


@several
def test_names_that_differ_raise_within_seconds() -> None:
    begun = time.monotonic()
    with pytest.raises(hvd.HorovodInternalError, match=r"called it, and rank .* did not, and waits in"):
        hvd.allreduce(torch.ones(1), name="odd" if RANK == ODD else "even")
    assert time.monotonic() - begun < 20
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [SIZE]


@several
def test_join_lets_others_go_on() -> None:
    for step in range(0 if RANK == ODD else 3):
        assert hvd.allreduce(torch.ones(2), name=f"step {step}", op=hvd.Sum).tolist() == [SIZE - 1] * 2
    last = hvd.join()
    assert last != ODD and hvd.allgather_object(last) == [last] * SIZE


def test_a_set_that_is_removed_leaves_nothing_open() -> None:
    def use() -> None:
        odd = hvd.add_process_set(range(SIZE - 1, -1, -2))
        if odd.included():
            assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=odd).tolist() == [odd.size()] * 3
        hvd.remove_process_set(odd)

    counts = []
    for _ in range(2):
        for _ in range(6):
            use() if SIZE > 1 else None
        hvd.barrier()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] - counts[0] < 6, counts  # what each set leaves; the process may open files of its own meanwhile


@several
def test_a_limit_of_0_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.shutdown()
    monkeypatch.setenv("MPIPS_TIMEOUT_SECONDS", "0")
    hvd.init()
    if RANK:
        time.sleep(0.1)  # a hundred times what the limit was
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [SIZE] * 3


def test_many_small_gradients_travel_together() -> None:
    tensors = [numbers(3) + place for place in range(200)]
    handles = [
        hvd.allreduce_async(x, name=str(place), op=hvd.Sum if place % 50 else hvd.Max)
        for place, x in enumerate(tensors)
    ]
    every = torch.stack([numbers(3, rank=rank) for rank in range(SIZE)])
    for place, handle in enumerate(handles):
        expected = (every + place).sum(0) if place % 50 else (every + place).max(0).values
        assert torch.equal(hvd.synchronize(handle), expected)


@several
def test_process_sets_work_beside_each_other() -> None:
    even, odd = hvd.add_process_set(range(0, SIZE, 2)), hvd.add_process_set(range(1, SIZE, 2))
    mine, other = (odd, even) if RANK % 2 else (even, odd)
    assert hvd.allreduce(torch.tensor([RANK]), op=hvd.Max, process_set=mine).item() == mine.ranks[-1]
    with pytest.raises(ValueError, match=rf"has not rank {RANK}"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="has these ranks already"):
        hvd.add_process_set(even.ranks)
    assert hvd.remove_process_set(even) and hvd.remove_process_set(odd) and not hvd.remove_process_set(odd)


def trained(optimizer: Any, model: nn.Module, batches: Any, passes: int = 1) -> None:
    for step in range(6):
        optimizer.zero_grad()
        for part in range(passes):
            x, y = batches(passes * step + part)
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 2},
        {"backward_passes_per_step": 2},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
    ],
    ids=["plain", "groups", "two passes", "predivided", "float16"],
)
def test_optimizer_trains_as_one_rank_on_all_batches(options: dict[str, Any]) -> None:
    passes = options.get("backward_passes_per_step", 1)
    alone, model = network(), network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(RANK)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01), model.named_parameters(), **options
    )
    trained(torch.optim.Adam(alone.parameters(), lr=0.01), alone, joined_batch, passes)
    trained(optimizer, model, batch, passes)
    assert far(model, alone) < (0.05 if "compression" in options else 1e-6)


def test_optimizer_gives_the_mean_before_clipping() -> None:
    model = nn.Linear(2, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.full((1, 2), float(RANK))).sum().backward()
    optimizer.synchronize()
    assert model.weight.grad is not None and model.weight.grad.tolist() == [[(SIZE - 1) / 2] * 2]
    before = model.weight.detach().clone()
    with optimizer.skip_synchronize():
        optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * (SIZE - 1) / 2)


@pytest.mark.parametrize("as_dense", [False, True])
def test_optimizer_reduces_sparse_gradients(as_dense: bool) -> None:
    model = nn.Embedding(6, 2, sparse=True)
    hvd.broadcast_parameters(model.state_dict())
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sparse_as_dense=as_dense)
    model(torch.tensor([0, RANK + 1])).sum().backward()
    optimizer.step()
    moved = (before - model.weight.detach())[:, 0]
    torch.testing.assert_close(moved[: SIZE + 1], torch.tensor([1.0] + [1 / SIZE] * SIZE))


def test_optimizer_state_is_the_roots() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (RANK + 1))
    if RANK == 0:
        trained(optimizer, model, batch)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    steps = [float(state["step"]) for state in optimizer.state_dict()["state"].values()]
    assert steps == [6.0] * len(list(model.parameters()))


@pytest.mark.parametrize("loads", ["broadcast", "load_state_dict", "neither"])
def test_hooks_of_a_step_run_once_a_step(loads: str) -> None:
    """On the root, and where a state was loaded: PyTorch then wraps the step of classes that it does not know."""
    model, calls = network(), list[str]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.register_step_pre_hook(lambda *_: calls.append("inner"))
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if loads == "broadcast":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    elif loads == "load_state_dict":
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.register_step_post_hook(lambda *_: calls.append("outer"))
    trained(optimizer, model, batch)
    assert calls == ["inner", "outer"] * 6


def test_what_is_not_supported_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"choose op=hvd\.Average"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match=r"use torch\.profiler"):
        hvd.start_timeline("file")
    with pytest.raises(NotImplementedError, match="for GPUs"):
        hvd.SyncBatchNorm(3)
    with pytest.raises(NotImplementedError, match="--spares"):
        hvd.elastic.run(print)
    with pytest.raises(ValueError, match=r"split evenly|whose sum is 1"):
        hvd.alltoall(torch.zeros(SIZE + 1) if SIZE > 1 else torch.zeros(1), splits=None if SIZE > 1 else [2])
