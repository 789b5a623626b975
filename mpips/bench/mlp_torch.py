"""The network and step of `mpips bench mlp` in PyTorch: alone, or with DistributedDataParallel over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from typing import Any

import numpy as np
from mpi4py import MPI

from mpips.mlp.mesh import TrainingError, agree

Step = Callable[[], object]
_ATTEMPTS = 3
_SECONDS = 60.0  # for a collective of gloo's; rank 0 waits as long for the others to join


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


def join(comm: MPI.Comm) -> str | None:
    """Make PyTorch's gloo process group of the ranks of `comm`, over the loopback; the reason why there is none after
    some attempts. Collective.

    A port that was free may be taken by another process before gloo binds it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    refusal = None
    for _ in range(_ATTEMPTS):
        try:
            agree(comm, _join(comm))
            return None
        except TrainingError as error:
            refusal = str(error)
    return refusal


def _join(comm: MPI.Comm) -> str | None:
    """One attempt; why it failed on this rank."""
    import torch.distributed as group

    port = np.zeros(1, np.int64)
    if comm.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port[0] = free.getsockname()[1]
    comm.Bcast(port)
    address = f"tcp://127.0.0.1:{port[0]}"
    try:
        group.init_process_group("gloo", address, timedelta(seconds=_SECONDS), comm.size, comm.rank)
        group.barrier()
    except RuntimeError as error:  # DistNetworkError and others are among them
        if group.is_initialized():
            group.destroy_process_group()
        return f"gloo on rank {comm.rank}: {str(error).splitlines()[0]}"
    return None


def leave(comm: MPI.Comm) -> None:
    """Undo `join`, when nobody has anything under way. Collective."""
    import torch.distributed as group

    comm.Barrier()
    group.destroy_process_group()
    comm.Barrier()


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
