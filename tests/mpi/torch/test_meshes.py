"""Device meshes and what PyTorch builds on them: FSDP2, DTensor, tensor parallelism, pipelines, checkpoints.

Each program is one that a user writes for gloo, with the backend's name changed. Results are those of one process, or
gloo's.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from tests.mpi.torch.support import WORLD, batch, far, groups, joined_batch, network, train

ROWS = 2 if WORLD.size % 2 == 0 else 1
SHAPE = (ROWS, WORLD.size // ROWS)
"""Of the 2-D mesh: 1 x 1, 2 x 1, 1 x 3, 2 x 2."""


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with groups():
        yield


@pytest.fixture(scope="module")
def square() -> DeviceMesh:
    return init_device_mesh("cpu", SHAPE, mesh_dim_names=("data", "tensor"))


@pytest.fixture(scope="module")
def line() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD.size,), mesh_dim_names=("all",))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that all ranks see."""
    with TemporaryDirectory() as mine:
        yield Path(WORLD.bcast(mine))
        WORLD.Barrier()


# ---- groups


def test_each_dimension_of_a_mesh_sums_its_ranks(square: DeviceMesh) -> None:
    row, column = divmod(WORLD.rank, SHAPE[1])
    expected = {"data": square.mesh[:, column].sum(), "tensor": square.mesh[row].sum()}
    for name, total in expected.items():
        x = torch.tensor([WORLD.rank])
        dist.all_reduce(x, group=square[name].get_group())
        assert x.item() == total
        assert dist.get_backend(square.get_group(name)) == "mpips"


def test_new_subgroups_sum_their_ranks() -> None:
    own, every = dist.new_subgroups(SHAPE[1])
    mine, listed = dist.new_subgroups_by_enumeration([[rank] for rank in range(WORLD.size)])
    x, y = torch.tensor([WORLD.rank]), torch.tensor([WORLD.rank])
    dist.all_reduce(x, group=own)
    dist.all_reduce(y, group=mine)
    first = WORLD.rank // SHAPE[1] * SHAPE[1]
    assert x.item() == sum(range(first, first + SHAPE[1])) and y.item() == WORLD.rank
    assert len(every) == SHAPE[0] and len(listed) == WORLD.size


# ---- FSDP2


def odd_network() -> nn.Sequential:
    """Return a network no size of which any number of ranks divides."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1, bias=False), nn.Tanh(), nn.Linear(1, 3))


def whole(model: nn.Module) -> nn.Module:
    """Return the network with the parameters of a sharded one."""
    plain = odd_network()
    for mine, sharded in zip(plain.parameters(), model.parameters(), strict=True):
        mine.data = sharded.full_tensor().detach().to(mine.dtype)
    return plain


@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("precise", [True, False])
def test_sharded_models_train_as_one_process(
    dimensions: int, precise: bool, line: DeviceMesh, square: DeviceMesh
) -> None:
    """On a 2-D mesh parameters are sharded over its rows and replicated over its columns. Gradients are clipped."""
    policy = MixedPrecisionPolicy() if precise else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, plain = odd_network(), odd_network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=line if dimensions == 1 else square, mp_policy=policy)
    fully_shard(model, mesh=line if dimensions == 1 else square, mp_policy=policy)
    optimizer, beside = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, plain))
    for step in range(5):
        norms = []
        for net, how, given in ((model, optimizer, batch), (plain, beside, joined_batch)):
            x, y = given(step, torch.float32)
            how.zero_grad()
            mse_loss(net(x).float(), y).backward()
            norm: Any = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            norms.append(float(norm.full_tensor() if isinstance(norm, DTensor) else norm))
            how.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5 if precise else 0.1)
    assert far(whole(model), plain) < (1e-4 if precise else 0.2)


# ---- DTensor

PLACEMENTS: tuple[Placement, ...] = (Shard(0), Shard(1), Replicate(), Partial("sum"), Partial("avg"), Partial("max"))
TARGETS = (Shard(0), Shard(1), Replicate())
"""Nothing is redistributed to `Partial` in PyTorch."""


def placed(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> tuple[DTensor, Tensor]:
    """Return a tensor of 5 x 7 with these placements, and the same in one piece."""
    total = torch.arange(35.0).reshape(5, 7)
    local = distribute_tensor(total, mesh, [Replicate() if p.is_partial() else p for p in placements]).to_local()
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Partial):
            index, size = mesh.get_local_rank(dimension), mesh.size(dimension)
            local = local + index
            added = {"sum": sum(range(size)), "avg": (size - 1) / 2, "max": size - 1}[placement.reduce_op]
            total = total * (size if placement.reduce_op == "sum" else 1) + added
    shape = torch.Size((5, 7))
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=(7, 1)), total


@pytest.mark.parametrize("source", PLACEMENTS, ids=str)
def test_a_dtensor_is_redistributed_from_each_placement_to_each(line: DeviceMesh, source: Placement) -> None:
    x, total = placed(line, (source,))
    for target in TARGETS:
        y = x.redistribute(placements=[target])
        assert torch.equal(y.full_tensor(), total)
        assert torch.equal(y.to_local(), distribute_tensor(total, line, [target]).to_local())


def test_a_dtensor_on_a_2d_mesh_is_redistributed(square: DeviceMesh) -> None:
    for source in itertools.product((*TARGETS, Partial("sum")), repeat=2):
        if source.count(Partial("sum")) == 2:
            continue
        x, total = placed(square, source)
        for target in itertools.product(TARGETS, repeat=2):
            y = x.redistribute(placements=target)
            assert torch.equal(y.full_tensor(), total), (source, target)


# ---- tensor parallelism


class Block(nn.Module):
    """A norm and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


@pytest.mark.parametrize("sharded", [False, True])
def test_tensor_parallel_blocks_train_as_one_process(square: DeviceMesh, sharded: bool) -> None:
    """Layers are split over the columns of the mesh, the norm's input by its positions; batches over the rows."""
    model, plain = Block(), Block()
    parallelize_module(
        model,
        square["tensor"],
        {
            "": PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_output=False
            ),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        },
    )
    if sharded:
        fully_shard(model, mesh=square["data"])
    optimizer, beside = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        x = torch.randn(2 * SHAPE[0], 12, 12, generator=generator)
        row = WORLD.rank // SHAPE[1]
        mine = x[2 * row : 2 * row + 2] if sharded else x
        for net, how, given in ((model, optimizer, mine), (plain, beside, x)):
            how.zero_grad()
            mse_loss(net(given), given).backward()
            how.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.full_tensor(), theirs, atol=1e-6)


# ---- pipelines


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_a_pipeline_trains_as_one_process(schedule: Any) -> None:
    """A stage on each rank, six microbatches."""
    torch.manual_seed(3)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(WORLD.size)]
    plain = nn.Sequential(*copy.deepcopy(stages))
    stage = PipelineStage(stages[WORLD.rank], WORLD.rank, WORLD.size, torch.device("cpu"))
    pipeline, last = schedule(stage, n_microbatches=6, loss_fn=mse_loss), WORLD.size - 1
    optimizer, beside = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (stages[WORLD.rank], plain))
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        x, y = torch.randn(12, 6, generator=generator), torch.randn(12, 6, generator=generator)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        targets = {"target": y, "losses": losses} if WORLD.rank == last else {}
        out = pipeline.step(*([x] if WORLD.rank == 0 else []), **targets)
        optimizer.step()
        beside.zero_grad()
        expected = plain(x)
        mse_loss(expected, y).backward()
        beside.step()
        if WORLD.rank == last:
            assert torch.allclose(out, expected, atol=1e-6)
            assert torch.stack(losses).mean().item() == pytest.approx(mse_loss(expected, y).item(), rel=1e-5)
    assert far(stages[WORLD.rank], plain[WORLD.rank]) < 1e-5


# ---- checkpoints


def sharded_state(mesh: DeviceMesh, factor: float) -> dict[str, Any]:
    x = torch.arange(35.0).reshape(5, 7) * factor
    return {
        "rows": distribute_tensor(x, mesh, [Shard(0)]),
        "columns": distribute_tensor(x, mesh, [Shard(1)]),
        "same": x.clone(),
        "step": 3 if factor else 0,
    }


def assert_loaded(state: dict[str, Any]) -> None:
    x = torch.arange(35.0).reshape(5, 7)
    assert torch.equal(state["rows"].full_tensor(), x) and torch.equal(state["columns"].full_tensor(), x)
    assert torch.equal(state["same"], x) and state["step"] == 3


@pytest.mark.parametrize("writers", ["all", "fewer"])
def test_a_checkpoint_is_read_by_more_or_fewer_ranks(line: DeviceMesh, folder: Path, writers: str) -> None:
    few = list(range((WORLD.size + 1) // 2))
    small, some = DeviceMesh("cpu", few), dist.new_group(few)
    written, read = ((line, None), (small, some)) if writers == "all" else ((small, some), (line, None))
    if written[0].get_coordinate() is not None:
        dcp.save(sharded_state(written[0], 1.0), checkpoint_id=folder, process_group=written[1])
    WORLD.Barrier()
    if read[0].get_coordinate() is not None:
        state = sharded_state(read[0], 0.0)
        dcp.load(state, checkpoint_id=folder, process_group=read[1])
        assert_loaded(state)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_is_written_while_training_goes_on(line: DeviceMesh, folder: Path) -> None:
    """Ranks write five of them, each beside steps of training in another group."""
    model, aside = DistributedDataParallel(network(torch.float32)), dist.new_group()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(5):
        saving = dcp.async_save(sharded_state(line, 1.0), checkpoint_id=folder / str(number), process_group=aside)
        if WORLD.rank % 2:
            time.sleep(0.01)
        train(model, optimizer, 3, lambda step: batch(step, torch.float32))
        saving.result()
    state = sharded_state(line, 0.0)
    dcp.load(state, checkpoint_id=folder / "4")
    assert_loaded(state)


# ---- compiled programs


@pytest.mark.filterwarnings("ignore")
def test_compiled_collectives_give_what_eager_ones_give(line: DeviceMesh) -> None:
    def program(x: Tensor) -> tuple[Tensor, ...]:
        total = functional.all_reduce(x * 2, "sum", line)
        every = functional.all_gather_tensor(x, 0, line)
        part = functional.reduce_scatter_tensor(every, "sum", 0, line)
        dealt = functional.all_to_all_single(every, None, None, line)
        return total + 1, every.sum(0), part * 2, dealt

    x = torch.arange(6.0).reshape(2, 3) + WORLD.rank
    for eager, compiled in zip(program(x), torch.compile(program, backend="aot_eager", fullgraph=True)(x)):
        assert torch.equal(eager, compiled)
