"""The same network and step in PyTorch: alone, or with DistributedDataParallel over gloo."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

Step = Callable[[], object]


def torch_step(sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray, threads: int, fused: bool) -> Step:
    """One step of SGD on a fully connected ReLU network with mean squared error. ImportError without PyTorch."""
    import torch

    torch.set_num_threads(threads)
    return _step(_network(sizes), x, y, fused)


def ddp_step(
    sizes: tuple[int, ...], x: np.ndarray, y: np.ndarray, threads: int, fused: bool, bucket_megabytes: int
) -> Step:
    """The same, data parallel over the process group that `join` made; x and y are this rank's samples."""
    import torch

    torch.set_num_threads(threads)
    network = torch.nn.parallel.DistributedDataParallel(
        _network(sizes), gradient_as_bucket_view=True, bucket_cap_mb=bucket_megabytes
    )
    return _step(network, x, y, fused)


def join(comm: MPI.Comm) -> None:
    """Make PyTorch's gloo process group of the ranks of `comm`, over the loopback. Collective."""
    import torch.distributed as group

    port = np.zeros(1, np.int64)
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port[0] = free.getsockname()[1]
    comm.Bcast(port)
    address = f"tcp://127.0.0.1:{port[0]}"
    group.init_process_group("gloo", address, timedelta(seconds=60), comm.size, comm.rank)


def leave() -> None:
    """Undo `join`."""
    import torch.distributed as group

    group.barrier()
    group.destroy_process_group()


def _network(sizes: tuple[int, ...]) -> Any:
    import torch

    torch.manual_seed(0)
    layers: list[Any] = []
    for inputs, outputs in pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def _step(network: Any, x: np.ndarray, y: np.ndarray, fused: bool) -> Step:
    import torch

    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, fused=fused)
    loss = torch.nn.MSELoss()
    inputs, targets = torch.from_numpy(x), torch.from_numpy(y)

    def step() -> None:
        optimizer.zero_grad()
        loss(network(inputs), targets).backward()
        optimizer.step()

    return step
