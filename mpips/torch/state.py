"""Broadcast parameters and optimizer state from one rank to all, like Horovod's functions of the same names.

`store_bytes` gives all workers the state of a store as bytes, and `load_bytes` loads such bytes into a store.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

import mpips.collectives as collectives
from mpips.store.create import workers_of
from mpips.torch.lockstep import agree
from mpips.torch.tensors import bytes_of

if TYPE_CHECKING:
    from mpips.store.api import KVStore


def broadcast_parameters(
    parameters: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    root_rank: int = 0,
    comm: MPI.Intracomm | None = None,
) -> None:
    """Copy the root's values of a `state_dict`, or of named parameters, to all ranks, in place. Collective, blocking.

    Args:
        parameters: A `state_dict`, or pairs of names and tensors. Entries that are not tensors are skipped.
        root_rank: The rank in `comm` whose values are taken.
        comm: The communicator. None means the workers of the open store if that store has servers, and otherwise
            COMM_WORLD.

    Raises:
        MismatchError: Names, dtypes, shapes or their order differ. All ranks raise it, and nothing has changed.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> mpips.torch.broadcast_parameters(model.state_dict())
    """
    comm = workers_of(MPI.COMM_WORLD) if comm is None else comm
    pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
    named = [(name, tensor) for name, tensor in pairs if isinstance(tensor, Tensor)]
    kinds = [f"{name!r}, {tensor.dtype} of shape {tuple(tensor.shape)}" for name, tensor in named]
    # Values travel as bytes, so the sizes of tensors with different dtypes and shapes could match by chance.
    agree([(f"tensor {place}", kind) for place, kind in enumerate(kinds)], comm, "broadcast_parameters")
    broadcast_tensors([tensor for _, tensor in named], root_rank, comm)


def broadcast_tensors(tensors: Iterable[Tensor], root: int = 0, comm: MPI.Comm | None = None) -> None:
    """Copy the root's values to all ranks, in place. Collective, blocking.

    Shapes and dtypes must be the same on all ranks.
    """
    given = list(tensors)
    for tensor, other in zip(given, broadcast_values(given, root, comm)):
        # Equal values are not written, because DistributedOptimizer would take the write for a change by the program.
        if other is not None:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(other)


def broadcast_values(tensors: Sequence[Tensor], root: int = 0, comm: MPI.Comm | None = None) -> list[Tensor | None]:
    """Return the root's values as new tensors, with None in place of equal values. Collective, blocking."""
    packed = np.concatenate([bytes_of(tensor.detach().contiguous()) for tensor in tensors] or [np.empty(0, np.uint8)])
    if not packed.size:
        return [None] * len(tensors)
    collectives.broadcast(packed, comm, root)
    new_values: list[Tensor | None] = []
    start = 0
    for tensor in tensors:
        stretch = slice(start, start + tensor.numel() * tensor.element_size())
        start = stretch.stop
        if np.array_equal(packed[stretch], bytes_of(tensor.detach().contiguous())):
            new_values.append(None)
        else:
            # Tensors that are created in inference mode can never be part of a backward pass.
            with torch.inference_mode(False):
                new_values.append(torch.from_numpy(packed[stretch].copy()).view(tensor.dtype).view(tensor.shape))
    return new_values


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, comm: MPI.Comm | None = None
) -> None:
    """Load the root's state of a PyTorch optimizer on all ranks. Collective, blocking.

    The state that the other ranks had is replaced.

    Args:
        optimizer: An optimizer of torch.optim.
        root_rank: The rank in `comm` whose state is taken.
        comm: The communicator. None means the workers of the open store if that store has servers, and otherwise
            COMM_WORLD.

    Raises:
        TypeError: The state holds something other than numbers, strings and tensors. Only the root raises it.

    Example:
        >>> optimizer = torch.optim.Adam(torch.nn.Linear(3, 2).parameters())
        >>> mpips.torch.broadcast_optimizer_state(optimizer)
    """
    comm = workers_of(MPI.COMM_WORLD) if comm is None else comm
    state = broadcast_state(optimizer.state_dict() if comm.rank == root_rank else {}, root_rank, comm)
    if comm.rank != root_rank:
        optimizer.load_state_dict(state)


def broadcast_state(state: dict[str, Any], root: int, comm: MPI.Comm) -> dict[str, Any]:
    """Return the root's `state_dict` of an optimizer on all ranks. Collective, blocking."""
    tensors: list[Tensor] = []
    message = msgspec.msgpack.encode(_pack(state, tensors)) if comm.rank == root else b""
    packed = msgspec.msgpack.decode(broadcast_bytes(message, root, comm))
    if comm.rank != root:
        state = _unpack(packed, tensors)
    broadcast_tensors(tensors, root, comm)
    return state


def broadcast_bytes(data: bytes, root: int, comm: MPI.Comm | None) -> bytes:
    """Return the root's data on all ranks. Collective, blocking."""
    size = np.array([len(data)])
    collectives.broadcast(size, comm, root)
    buffer = np.zeros(int(size[0]), np.uint8)
    if len(data) == buffer.size:
        buffer[:] = np.frombuffer(data, np.uint8)
    collectives.broadcast(buffer, comm, root)
    return buffer.tobytes()


# ---- a store's state as bytes


@contextmanager
def worker_collectives(store: KVStore, what: str, comm: MPI.Intracomm | None = None) -> Iterator[MPI.Intracomm]:
    """Yield the communicator of the workers, or `comm`, for collectives in this context.

    If one of them fails, the store's generation (its life between two failures) ends on all ranks.
    """
    ranks, generation = comm or store.layout.workers, store.worker.generation
    assert ranks is not None
    with generation.failing(what):
        generation.within(ranks)
        yield ranks


def store_bytes(store: KVStore) -> bytes:
    """Return the content of the file that `store.save` writes. Collective over the workers, blocking."""
    with _shared_file(store, "state_dict") as path:
        store.save(path)
        data = path.read_bytes() if store.rank == 0 else b""
    with worker_collectives(store, "state_dict") as workers:
        return broadcast_bytes(data, 0, workers)


def load_bytes(store: KVStore, data: bytes) -> None:
    """Load the bytes that `store_bytes` returned into the store.

    Only worker 0's `data` is used. Collective over the workers, blocking.
    """
    with _shared_file(store, "load_state_dict") as path:
        if store.rank == 0:
            path.write_bytes(data)
        store.load(path)


@contextmanager
def _shared_file(store: KVStore, what: str) -> Iterator[Path]:
    """Yield the path of a temporary file on worker 0's machine. All workers get the same path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(store.worker.agree(what, data=folder.encode())[0].decode(), "store.safetensors")


# ---- a state as one message, followed by its tensors


class _Tensor(msgspec.Struct, tag="tensor"):
    """A tensor in a message. Its bytes follow after the message."""

    dtype: str
    shape: list[int]


class _Tuple(msgspec.Struct, tag="tuple"):
    """A tuple in a message. Without this record it would come back as a list."""

    items: list[Any]


class _Map(msgspec.Struct, tag="map"):
    """A dict in a message. Its keys may be numbers."""

    keys: list[Any]
    values: list[Any]


def _pack(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _Tensor(str(value.dtype).removeprefix("torch."), list(value.shape))
    if isinstance(value, dict):
        return _Map([_pack(key, tensors) for key in value], [_pack(item, tensors) for item in value.values()])
    if isinstance(value, tuple):
        return _Tuple([_pack(item, tensors) for item in value])
    if isinstance(value, list):
        return [_pack(item, tensors) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"an optimizer's state holds a {type(value).__name__}: numbers, texts and tensors can be sent")


def _unpack(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [_unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value["type"] == "tensor":
        # An optimizer could not change a tensor that was made in inference mode.
        with torch.inference_mode(False):
            tensors.append(torch.empty(value["shape"], dtype=getattr(torch, value["dtype"])))
        return tensors[-1]
    if value["type"] == "tuple":
        return tuple(_unpack(item, tensors) for item in value["items"])
    keys = [_unpack(key, tensors) for key in value["keys"]]
    return dict(zip(keys, [_unpack(item, tensors) for item in value["values"]]))
