"""The backend of torch.distributed: calls beside gloo's, groups, progress beside compute, PyTorch's own wrappers."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'mpips[torch]'")

import torch.distributed as dist  # noqa: E402
from torch.distributed import rendezvous  # noqa: E402
from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from collectives import CollectiveError  # noqa: E402
from tests.mpi.torch import conformance  # noqa: E402
from tests.mpi.torch.support import WORLD, batch, far, groups, joined_batch, network, train, worst  # noqa: E402

FINE = ("equal", "refused by both", "more")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with groups():
        yield


@pytest.mark.filterwarnings("ignore")
def test_calls_give_what_gloo_s_give() -> None:
    ours, theirs = dist.new_group(backend="mpips"), dist.new_group(backend="gloo")
    chosen = [cell for cell in conformance.cells() if cell.dtype in CHOSEN and cell.shape in ((7,), (0,), (3, 5))]
    wrong = [cell[:3] for cell in chosen if conformance.verdict(cell, ours, theirs) not in FINE]
    everybody = WORLD.allgather(wrong)
    assert not any(everybody), everybody


CHOSEN = (torch.float32, torch.bfloat16, torch.int64, torch.bool)


def test_a_smaller_group() -> None:
    odd = dist.new_group(list(range(1, WORLD.size, 2)), backend="mpips") if WORLD.size > 1 else None
    x = torch.full((3,), float(WORLD.rank))
    if odd is not None and WORLD.rank % 2:
        dist.all_reduce(x, group=odd)
        expected = float(sum(range(1, WORLD.size, 2)))
    else:
        expected = float(WORLD.rank)
    off = worst(float((x - expected).abs().max()))
    assert off == 0


def test_objects() -> None:
    mine = {"rank": WORLD.rank, "words": ["a"] * WORLD.rank}
    found: list[Any] = [None] * WORLD.size
    dist.all_gather_object(found, mine)
    sent = [mine, None] if WORLD.rank == 0 else [None, None]
    dist.broadcast_object_list(sent)
    parts: list[Any] = [None]
    dist.scatter_object_list(parts, [f"for {rank}" for rank in range(WORLD.size)] if WORLD.rank == 0 else None)
    fine = found[-1]["rank"] == WORLD.size - 1 and sent[0]["rank"] == 0 and parts == [f"for {WORLD.rank}"]
    everybody = WORLD.allgather(fine)
    assert all(everybody)


def test_an_operation_goes_on_beside_compute() -> None:
    """It ends although this thread never waits for it, and only computes."""
    x = torch.ones(1 << 16)
    work = dist.all_reduce(x, async_op=True)
    compute, until = torch.ones(64, 64), time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < until:
        compute = compute @ compute * 1e-2
    done = WORLD.allgather(work.is_completed() and float(x.sum()) == WORLD.size * x.numel())
    work.wait()
    assert all(done)


def test_operations_end_in_the_order_in_which_they_began() -> None:
    x = torch.ones(1000)
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    dist.all_reduce(x)
    for work in works:
        work.wait()
    off = worst(float((x - WORLD.size**4).abs().max()))
    assert off == 0


@pytest.mark.parametrize("call", ["all_reduce", "all_reduce_coalesced", "barrier", "send"])
def test_overlapping_groups_may_be_called_in_an_order_of_each_rank(call: str) -> None:
    """Pairs of neighbours on a ring, of which every rank begins with another; as on gloo and NCCL, all end."""
    if WORLD.size < 3:
        pytest.skip("groups of two overlap on three ranks")
    pairs = [sorted((rank, (rank + 1) % WORLD.size)) for rank in range(WORLD.size)]
    ring = [dist.new_group(pair, backend="mpips") for pair in pairs]
    right, left = ring[WORLD.rank], ring[WORLD.rank - 1]
    totals = [float(sum(pairs[WORLD.rank])), float(sum(pairs[WORLD.rank - 1]))]
    begin, fine = time.monotonic(), True
    for _ in range(3):
        mine = [torch.full((1000,), float(WORLD.rank)) for _ in range(2)]
        works = [_begun(call, x, group) for x, group in zip(mine, (right, left))]
        if call == "send":  # a message goes beside a collective that waits for its receiver
            works += [dist.isend(mine[0], (WORLD.rank + 1) % WORLD.size)]
            dist.recv(torch.empty(1000), (WORLD.rank - 1) % WORLD.size)
        for work in works:
            work.wait()
        fine = fine and (not call.startswith("all_reduce") or [float(x[-1]) for x in mine] == totals)
    everybody = WORLD.allgather(fine and time.monotonic() - begin < 20)
    assert all(everybody)


def _begun(call: str, x: Any, group: Any) -> Any:
    if call == "all_reduce_coalesced":
        with dist._coalescing_manager(group, async_ops=True) as works:
            dist.all_reduce(x, group=group)
        return works
    return dist.barrier(group, async_op=True) if call == "barrier" else dist.all_reduce(x, group=group, async_op=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.int8])
def test_the_mean_of_integers_is_their_sum_divided_toward_0(dtype: Any) -> None:
    """As NCCL's; and what Lightning makes of gloo's sum."""
    sign = 1 if dtype is torch.uint8 else -1
    mine, whole = sign * (2 * WORLD.rank + 5), sign * sum(2 * rank + 5 for rank in range(WORLD.size))
    expected = int(whole / WORLD.size)
    x, strided = torch.full((3,), mine, dtype=dtype), torch.full((2, 3), mine, dtype=dtype).t()
    dist.all_reduce(x, dist.ReduceOp.AVG)
    dist.all_reduce(strided, dist.ReduceOp.AVG)
    own, alone = torch.full((3,), mine, dtype=dtype), torch.zeros(1, dtype=dtype)
    dist.reduce(own, 0, dist.ReduceOp.AVG)
    dist.reduce_scatter_tensor(alone, torch.full((WORLD.size,), mine, dtype=dtype), dist.ReduceOp.AVG)
    group = [torch.full((2,), mine, dtype=dtype), torch.full((1,), mine, dtype=dtype)]
    dist.all_reduce_coalesced(group, dist.ReduceOp.AVG)
    tensors = [x, strided, alone, *group, *([own] if WORLD.rank == 0 else [])]
    everybody = WORLD.allgather([sorted(set(tensor.flatten().tolist())) for tensor in tensors])
    assert all(values == [expected] for found in everybody for values in found), everybody


def test_ddp_s_losses_are_gloo_s() -> None:
    theirs = dist.new_group(backend="gloo")
    losses = []
    for group in (None, theirs):
        model = DistributedDataParallel(network(torch.float32), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        losses.append(train(model, optimizer, 200, lambda step: batch(step, torch.float32)))
    off = worst(max(abs(a - b) / b for a, b in zip(*losses)))
    assert off < 1e-6


def test_ddp_over_a_group_with_unused_parameters_and_no_sync() -> None:
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    plain = network()
    for step in range(3):
        with model.no_sync():
            torch.nn.functional.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
        torch.nn.functional.mse_loss(model(batch(step)[0]), batch(step)[1]).backward()
        for _ in range(2):
            torch.nn.functional.mse_loss(plain(joined_batch(step)[0]), joined_batch(step)[1]).backward()
    pairs = zip(model.parameters(), plain.parameters())
    off = worst(max(float((a.grad - b.grad).abs().max()) for a, b in pairs))
    assert off < 1e-12


@pytest.mark.filterwarnings("ignore")
def test_zero_redundancy_optimizer() -> None:
    model, plain = DistributedDataParallel(network()), network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, 5, batch)
    train(plain, torch.optim.Adam(plain.parameters(), lr=0.01), 5, joined_batch)
    assert worst(far(model.module, plain)) < 1e-9


def test_fully_sharded_data_parallel() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no fully_shard")
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    model, plain = network(torch.float32), network(torch.float32)
    fsdp.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, 4, lambda step: batch(step, torch.float32))
    train(plain, torch.optim.SGD(plain.parameters(), 0.1), 4, lambda step: joined_batch(step, torch.float32))
    whole = [p.full_tensor() for p in model.parameters()]
    off = worst(max(float((a - b).abs().max()) for a, b in zip(whole, plain.parameters())))
    assert off < 1e-5


def test_functional_collectives() -> None:
    functional = pytest.importorskip("torch.distributed._functional_collectives")
    x = functional.all_reduce(torch.ones(3) * (WORLD.rank + 1), "sum", dist.group.WORLD)
    off = worst(float((x - sum(range(1, WORLD.size + 1))).abs().max()))
    assert off == 0


@pytest.mark.parametrize(
    ("rank", "size", "words"),
    [
        (0, WORLD.size, "rank is 0 on MPI's rank 1: leave rank"),
        (WORLD.rank, 5, f"world_size is 5, and MPI's is {WORLD.size}: leave rank"),
    ],
)
def test_a_place_that_is_not_mpi_s(rank: int, size: int, words: str) -> None:
    if WORLD.size == 1:
        pytest.skip("one rank has no other place")
    with pytest.raises(ValueError, match=words):
        next(rendezvous("env://", rank, size))
    with pytest.raises(ValueError, match=words):
        next(rendezvous(f"env://?rank={rank}&world_size={size}"))


def test_torchrun_s_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", str(WORLD.size + 1))
    with pytest.raises(RuntimeError, match="instead of torchrun"):
        dist.new_group(backend="mpips")


def test_an_argument_error_is_one_rank_s() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            dist.all_reduce(torch.ones(2).to_sparse())
        with pytest.raises((TypeError, ValueError, RuntimeError)):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BOR)
    x = torch.ones(2)
    dist.all_reduce(x)
    off = worst(float((x - WORLD.size).abs().max()))
    assert off == 0


@pytest.mark.parametrize("beside", [False, True])
def test_a_shape_that_differs_is_raised_by_all(beside: bool) -> None:
    if WORLD.size == 1:
        pytest.skip("one rank has nobody to differ from")
    own = dist.new_group(backend="mpips")
    words, begin = "", time.monotonic()
    try:
        work = dist.all_reduce(torch.ones(3 + (WORLD.rank == 1)), group=own, async_op=beside)
        if beside:
            work.wait()
    except (CollectiveError, RuntimeError) as error:
        words = str(error)
    late = time.monotonic() - begin
    everybody = WORLD.allgather((words, late))
    assert all("all" in text and seconds < 1.5 for text, seconds in everybody), everybody


def test_ddp_on_a_group_that_is_over_raises() -> None:
    if WORLD.size == 1:
        pytest.skip("one rank has nobody to differ from")
    own = dist.new_group(backend="mpips")
    model = DistributedDataParallel(network(), process_group=own)
    words = ["", ""]
    try:
        dist.all_reduce(torch.ones(3 + WORLD.rank), group=own)
    except CollectiveError as error:
        words[0] = str(error)
    try:
        model(batch(0)[0]).sum().backward()
    except RuntimeError as error:
        words[1] = str(error)
    everybody = WORLD.allgather(bool(words[0]) and words[0] in words[1])
    assert all(everybody), words
