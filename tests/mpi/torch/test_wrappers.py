"""What PyTorch wraps around a backend: short programs as users write them, beside the same on gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import hook_with_zero_step
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.mpi.torch.support import ODD, WORLD, alike, batch, far, groups, heard, joined_batch, network, several, train

Program = Callable[[Any], list[Tensor]]
"""Trains on a group, and returns what it has at the end."""
SMALL = 0.001
"""MiB of a bucket: several buckets are under way at once."""
pytestmark = pytest.mark.filterwarnings("ignore")


class Pair(NamedTuple):
    """Two groups of all ranks."""

    mpips: Any
    gloo: Any


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with groups():
        yield Pair(dist.new_group(backend="mpips"), dist.new_group(backend="gloo"))


def check_alike(program: Program, pair: Pair, tolerance: float = 1e-12) -> None:
    """Run a program on both groups: results differ by rounding at most."""
    ours, theirs = (program(group) for group in pair)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def trained(model: nn.Module, optimizer: Any = None, steps: int = 12, batches: Any = batch) -> list[Tensor]:
    """Train, and return the parameters."""
    train(model, optimizer or torch.optim.SGD(model.parameters(), 0.1, 0.9), steps, batches)
    return [parameter.detach().clone() for parameter in model.parameters()]


# ---- hooks of DistributedDataParallel


def unnamed(hook: Any) -> Any:
    """The hook by another name: PyTorch's CPU wheels refuse those of bfloat16 by theirs, on any backend."""
    return lambda state, bucket: hook(state, bucket)


PLAIN: dict[str, tuple[Any, float]] = {
    "allreduce_hook": (default_hooks.allreduce_hook, 1e-12),
    "fp16_compress_hook": (default_hooks.fp16_compress_hook, 1e-2),
    "bf16_compress_hook": (unnamed(default_hooks.bf16_compress_hook), 5e-2),
    "noop_hook": (debugging_hooks.noop_hook, 1e-12),
}
"""Hooks that take the group, and by how much sums in another order may differ after some steps."""


@pytest.mark.parametrize("name", PLAIN)
def test_ddp_trains_alike_with_a_hook(name: str, pair: Pair) -> None:
    hook, tolerance = PLAIN[name]

    def program(group: Any) -> list[Tensor]:
        model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=SMALL)
        model.register_comm_hook(group, hook)
        return trained(model)

    check_alike(program, pair, 1e-12 if WORLD.size < 3 else tolerance)


def compressed(group: Any, wrap: Any = None, **buckets: float) -> list[Tensor]:
    """Train with PowerSGD, which starts each of its operations in a callback of the one before."""
    model = DistributedDataParallel(network(torch.float32), process_group=group, **buckets)
    state = power.PowerSGDState(group, matrix_approximation_rank=2, start_powerSGD_iter=3)
    model.register_comm_hook(state, unnamed(wrap(power.powerSGD_hook)) if wrap else power.powerSGD_hook)
    return trained(model, batches=lambda step: batch(step, torch.float32))


@pytest.mark.parametrize("wrap", [None, default_hooks.fp16_compress_wrapper, default_hooks.bf16_compress_wrapper])
def test_ddp_trains_alike_with_powersgd(wrap: Any, pair: Pair) -> None:
    check_alike(lambda group: compressed(group, wrap), pair, 1e-4 if wrap is None or WORLD.size < 3 else 5e-2)


def test_powersgd_may_have_several_buckets_under_way(pair: Pair) -> None:
    """On gloo two such callbacks take both of its threads, and wait for ever."""
    assert alike([float(parameter.sum()) for parameter in compressed(pair.mpips, bucket_cap_mb=SMALL)])


def test_ddp_trains_alike_with_local_sgd(pair: Pair) -> None:
    """Gradients are averaged for some steps, then parameters each third step."""

    def program(group: Any) -> list[Tensor]:
        alone, _ = dist.new_subgroups(1, backend=dist.get_backend(group))
        model = DistributedDataParallel(network(), process_group=group)
        state = post_localSGD_hook.PostLocalSGDState(group, alone, start_localSGD_iter=4)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=3, warmup_steps=4, process_group=group)
        return trained(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager))

    check_alike(program, pair)


def test_a_hook_in_c_sums_alike(pair: Pair) -> None:
    def program(group: Any) -> list[Tensor]:
        model = DistributedDataParallel(network(), process_group=group, bucket_cap_mb=SMALL)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return trained(model)

    check_alike(program, pair)


def test_hooks_that_pytorch_refuses(pair: Pair) -> None:
    """Batched PowerSGD breaks on its own tensors, on any backend; one in C++ wants futures of C++'s types."""

    def refusal(group: Any, register: Callable[[Any], Any]) -> str:
        model = DistributedDataParallel(network(), process_group=group)
        register(model)
        return heard(lambda: trained(model))

    def batched(model: Any) -> None:
        state = power.PowerSGDState(model.process_group, start_powerSGD_iter=2)
        model.register_comm_hook(state, power.batched_powerSGD_hook)

    ours, theirs = (refusal(group, batched) for group in pair)
    said = refusal(pair.mpips, lambda model: model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS))
    assert ours and theirs
    assert "ProcessGroup::allreduce should return TensorList" in said


# ---- options of DistributedDataParallel


class Branches(nn.Module):
    """A part is used in even steps only, and buffers change in each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.extra = network(), nn.BatchNorm1d(3).double(), nn.Linear(3, 3).double()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.body(x))
        self.step += 1
        return out if self.step % 2 else self.extra(out)


OPTIONS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "static_graph": (network, {"static_graph": True}),
    "find_unused_parameters": (Branches, {"find_unused_parameters": True}),
    "gradient_as_bucket_view": (network, {"gradient_as_bucket_view": True}),
    "buckets": (network, {"bucket_cap_mb": SMALL, "broadcast_buffers": False}),
    "buffers": (lambda: nn.Sequential(network(), nn.BatchNorm1d(3).double()), {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_ddp_trains_alike_with_an_option(name: str, pair: Pair) -> None:
    make, options = OPTIONS[name]

    def program(group: Any) -> list[Tensor]:
        model = DistributedDataParallel(make(), process_group=group, **options)
        return [*trained(model), *(buffer.double() for buffer in model.buffers())]

    check_alike(program, pair)


class Words(nn.Module):
    """The gradient of the table is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head = nn.Embedding(50, 6, sparse=True), nn.Linear(6, 2)
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(words).mean(1))
        return out


@pytest.mark.parametrize("hooked", [False, True])
def test_ddp_trains_alike_with_sparse_gradients(hooked: bool, pair: Pair) -> None:
    def words(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7 * step + WORLD.rank)
        return torch.randint(0, 50, (6, 4), generator=generator), torch.zeros(6, 2, dtype=torch.float64)

    def program(group: Any) -> list[Tensor]:
        model = DistributedDataParallel(Words(), process_group=group)
        if hooked:
            model.register_comm_hook(group, default_hooks.allreduce_hook)
        return trained(model, torch.optim.SGD(model.parameters(), 0.1), batches=words)

    check_alike(program, pair)


def test_a_distributed_sampler_gives_each_rank_its_part(pair: Pair) -> None:
    """Two shuffled epochs: as one process that takes all ranks' batches together."""
    x, y = (torch.cat(parts) for parts in zip(*(joined_batch(step) for step in range(4))))
    model, plain = DistributedDataParallel(network(), process_group=pair.mpips), network()
    data = TensorDataset(x, y)
    samplers = [DistributedSampler(data, WORLD.size, rank, seed=5) for rank in range(WORLD.size)]
    own = DistributedSampler(data, seed=5)  # rank and size are the default group's
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for epoch in range(2):
        for sampler in (own, *samplers):
            sampler.set_epoch(epoch)
        parts = [list(DataLoader(data, batch_size=4, sampler=sampler)) for sampler in samplers]
        for step, mine in enumerate(DataLoader(data, batch_size=4, sampler=own)):
            whole = [torch.cat([part[step][place] for part in parts]) for place in range(2)]
            for each, optimizer, (inputs, targets) in zip((model, plain), optimizers, (mine, whole)):
                optimizer.zero_grad()
                mse_loss(each(inputs), targets).backward()
                optimizer.step()
    assert far(model.module, plain) < 1e-12


# ---- Join, ZeroRedundancyOptimizer, SyncBatchNorm


@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_with_more_batches_join(sharded: bool, pair: Pair) -> None:
    def program(group: Any) -> list[Tensor]:
        model = DistributedDataParallel(network(), process_group=group)
        optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
        if sharded:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=0.01)
        with Join([model, optimizer] if sharded else [model]):
            train(model, optimizer, 3 + 2 * WORLD.rank, batch)
        return [parameter.detach() for parameter in model.parameters()]

    check_alike(program, pair)


@several
def test_all_raise_where_join_ends_early(pair: Pair) -> None:
    model = DistributedDataParallel(network(), process_group=pair.mpips)

    def uneven() -> None:
        with model.join(throw_on_early_termination=True):
            trained(model, steps=3 + WORLD.rank)

    assert "exhausted" in heard(uneven)


def test_a_zero_redundancy_optimizer_trains_alike(pair: Pair) -> None:
    def program(group: Any) -> list[Tensor]:
        model = DistributedDataParallel(network(), process_group=group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, process_group=group, lr=0.05, parameters_as_bucket_view=True
        )
        found = trained(model, optimizer)
        optimizer.consolidate_state_dict(to=0)
        if WORLD.rank == 0:
            optimizer.load_state_dict(optimizer.state_dict())
        return found

    check_alike(program, pair)


def test_a_zero_redundancy_optimizer_steps_within_ddp_s_backward(pair: Pair) -> None:
    """PyTorch refuses it on gloo. It leaves the first two steps out, in which DDP makes its buckets."""
    model, plain = DistributedDataParallel(network(), process_group=pair.mpips, bucket_cap_mb=SMALL), network()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, process_group=pair.mpips, lr=0.05, overlap_with_ddp=True
    )
    model.register_comm_hook(pair.mpips, hook_with_zero_step(default_hooks.allreduce_hook, model, optimizer))
    for step in range(10):
        x, y = batch(step)
        model.zero_grad()
        mse_loss(model(x), y).backward()
    train(plain, torch.optim.SGD(plain.parameters(), 0.05), 8, lambda step: joined_batch(step + 2))
    assert far(model.module, plain) < 1e-9


def test_synchronized_batch_norm_is_refused_on_cpus(pair: Pair) -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)))
    said = [heard(lambda group=group: DistributedDataParallel(model, process_group=group)) for group in pair]
    assert all("SyncBatchNorm layers only work with GPU modules" in sentence for sentence in said)


# ---- calls beside the usual collectives


@several
def test_a_monitored_barrier_names_who_has_not_come(pair: Pair) -> None:
    own = dist.new_group(backend="mpips")
    first = heard(lambda: dist.monitored_barrier(own, timedelta(seconds=20)))
    if "only implemented for GLOO" in first:
        pytest.skip("this PyTorch refuses it on other backends than gloo")
    assert not first
    if WORLD.rank == ODD:
        WORLD.Barrier()
        return
    begin = time.monotonic()
    said = heard(lambda: dist.monitored_barrier(own, timedelta(seconds=1)))
    WORLD.Barrier()
    assert f"rank {ODD} has not come" in said and 0.9 < time.monotonic() - begin < 10


def test_objects_travel(pair: Pair) -> None:
    """All calls that take objects, beside gloo's."""
    last, size = WORLD.size - 1, WORLD.size
    mine = {"rank": WORLD.rank, "words": ["a"] * WORLD.rank}

    def program(group: Any) -> list[Any]:
        every: list[Any] = [None] * size
        dist.all_gather_object(every, mine, group=group)
        gathered: Any = [None] * size if WORLD.rank == last else None
        dist.gather_object(mine, gathered, dst=last, group=group)
        sent = [mine, None] if WORLD.rank == 0 else [None, None]
        dist.broadcast_object_list(sent, group=group)
        part: list[Any] = [None]
        dist.scatter_object_list(part, [f"for {rank}" for rank in range(size)] if WORLD.rank == 0 else None, 0, group)
        came: list[Any] = [None, None]
        if WORLD.rank == 0 and size > 1:
            dist.send_object_list(["a word", mine], dst=last, group=group)
        elif WORLD.rank == last and size > 1:
            dist.recv_object_list(came, src=0, group=group)
        return [every, gathered, sent, part, came]

    ours, theirs = (program(group) for group in pair)
    assert ours == theirs and ours[0][-1]["rank"] == last and ours[3] == [f"for {WORLD.rank}"]
