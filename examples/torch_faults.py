"""Train with torchft's Manager on a process group of mpips, while processes are killed.

torchft_lighthouse --min_replicas 2 --quorum_tick_ms 100 --join_timeout_ms 2000 --bind "[::]:29510" &
mpips run -w 3 --spares 1 examples/torch_faults.py
mpips chaos --faults 3 --every 10 --roles worker -- mpips run -w 3 --spares 3 examples/torch_faults.py --steps 1800

Needs `pip install torchft-nightly`. Each rank of the job is a replica of torchft. A spare becomes a replica when a rank
has died, and takes its state from a peer. At the end each replica prints a checksum of its parameters: they are equal.
"""

import argparse
import tempfile
import time
import zlib
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torchft import DistributedDataParallel, Manager, Optimizer

import mpips.chaos
import mpips.torch

ME, SIZE, WORKERS = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, mpips.size()
FEATURES, BATCH = 64, 32


def batch(step: int, replica: int) -> tuple[Tensor, Tensor]:
    """Return a replica's batch in a step: points, and the norm of each."""
    generator = torch.Generator().manual_seed(1000 * step + replica)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x, x.norm(dim=1, keepdim=True)


def wait_for_place(done: dist.Store) -> None:
    """On a spare, wait until more ranks have died than there are spares before it. Exit if the training is over."""
    while ME >= WORKERS and MPI.COMM_WORLD.Get_failed().size <= ME - WORKERS:
        if done.check(["done"]):
            raise SystemExit
        MPI.COMM_SELF.Iprobe()  # MPI learns of deaths only in its own calls
        time.sleep(0.05)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    done = dist.FileStore(MPI.COMM_WORLD.bcast(f"{tempfile.mkdtemp()}/store"), -1)
    dist.init_process_group("mpips", store=dist.HashStore(), rank=ME, world_size=SIZE, enable_reconfigure=True)
    wait_for_place(done)
    model = nn.Sequential(nn.Linear(FEATURES, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    own = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, object]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=dist.group.WORLD,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=min(2, WORKERS),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=own.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"rank-{ME}",
        hostname="localhost",
        timeout=timedelta(seconds=30),
    )
    replica, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while (step := manager.current_step()) < options.steps:
        x, y = batch(step, ME)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(replica(x), y)
        loss.backward()
        optimizer.step()
        time.sleep(options.step_seconds)
        # This is false if the step was not committed, or if this replica has just taken a later state from a peer.
        if manager.current_step() == step + 1:
            mpips.chaos.note(step, loss)
        if step % 100 == 0:
            print(f"rank {ME}: step {step}, {manager.num_participants()} replicas, loss {loss.item():.4f}", flush=True)
    done.set("done", "")
    data = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"rank {ME}: {step} steps, loss {loss.item():.4f}, checksum {zlib.crc32(data):08x}", flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-seconds", type=float, default=0.02, help="Pause after a step.")
    parser.add_argument("--lighthouse", default="http://localhost:29510", help="Address of torchft's lighthouse.")
    main(parser.parse_args())
