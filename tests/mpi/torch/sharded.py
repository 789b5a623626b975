"""A job in which FSDP2 trains on after deaths. Each shard is on several ranks, so a lost one comes from another rank.

mpips run -w 4 --spares 1 -m tests.mpi.torch.sharded FOLDER
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.mpi.deaths import die, wait_until_dead
from tests.mpi.torch.reconfigured import ME, Job
from tests.mpi.torch.support import heard

SHARDS, STEPS, BATCH = 2, 3, 4
# The ranks of the job that are in each group, in the order of their ranks there. After STEPS steps the victim dies.
# The first SHARDS ranks of a group have been in the group before, and still have their shard.
GROUPS: tuple[tuple[list[int], int | None], ...] = (([0, 1, 2, 3], 1), ([2, 3, 0, 4], 0), ([2, 3], None))


class Sharded:
    """A model and its optimizer, sharded over the present group, with several replicas of each shard."""

    def __init__(self, number: int) -> None:
        shape, names = (dist.get_world_size() // SHARDS, SHARDS), (f"replica{number}", f"shard{number}")
        # PyTorch takes meshes of equal shapes and names for the same, and would go on using the groups of the old one.
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.replicas = mesh.get_group(0)
        self.model = network()
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)

    def shard(self) -> list[dict[str, Tensor]]:
        """Return this rank's part of each parameter and of the optimizer's state. Local."""
        states = ({"value": parameter, **self.optimizer.state[parameter]} for parameter in self.model.parameters())
        return [{name: local(tensor) for name, tensor in state.items()} for state in states]

    @torch.no_grad()
    def load(self, parts: list[dict[str, Tensor]]) -> None:
        """Take over a part that `shard` has returned on a rank with the same shard. Local."""
        for parameter, part in zip(self.model.parameters(), parts, strict=True):
            local(parameter).copy_(part.pop("value"))
            placed: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            for name, tensor in part.items():
                if name != "step":
                    tensor = DTensor.from_local(tensor, parameter.device_mesh, parameter.placements, **placed)
                self.optimizer.state[parameter][name] = tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, ranks: list[int]) -> None:
    """Make a step with the batches of these ranks of a group."""
    batches = [torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(10 * step + rank)) for rank in ranks]
    optimizer.zero_grad()
    model(torch.cat(batches).double()).pow(2).mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    job, sharded, done = Job(folder, 0, True), None, 0
    seen: dict[str, Any] = {"errors": []}
    for number, (ranks, victim) in enumerate(GROUPS):
        job.uuid = number
        if ME not in ranks:
            continue
        assert not (said := job.join(ranks)), said
        state = [done, sharded and sharded.shard()]
        sharded = Sharded(number)
        if number:
            dist.broadcast_object_list(state, group=sharded.replicas, group_src=0)
            sharded.load(state[1])
        for done in range(state[0] + 1, state[0] + STEPS + 1):
            train(sharded.model, sharded.optimizer, done, [dist.get_rank()])
        job.wait(f"trained {number}", ranks)
        job.wait(f"trained {number}", ranks)
        if victim == ME:
            die()
        if victim is not None:
            step = partial(train, sharded.model, sharded.optimizer, done + 1, [dist.get_rank()])
            seen["errors"].append(heard(step))
            wait_until_dead([victim])
    if ME in GROUPS[-1][0]:
        alone = network()
        optimizer = torch.optim.AdamW(alone.parameters(), 0.05)
        for number, (ranks, _) in enumerate(GROUPS):
            for step in range(STEPS):
                train(alone, optimizer, number * STEPS + step + 1, list(range(len(ranks))))
        pairs = zip(sharded.model.parameters(), alone.parameters(), strict=True)
        seen["near"] = all(torch.allclose(mine.full_tensor(), expected) for mine, expected in pairs)
    Path(folder, f"rank-{ME}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
