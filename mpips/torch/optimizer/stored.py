"""What a store holds, as a tensor of bytes that stands in a `state_dict`: the file that `kv.save` writes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpips.store.api import KVStore
from mpips.torch.optimizer.exchange import among
from mpips.torch.state import broadcast_bytes


def stored(store: KVStore) -> Tensor:
    """Values, optimizers' state and what compression kept back, on all workers. Collective over them, blocking."""
    with _file(store) as path:
        store.save(path)
        data = path.read_bytes() if store.rank == 0 else b""
    with among(store.layout, store.settings.generation, "state_dict") as workers:
        data = broadcast_bytes(data, 0, workers)
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def restore(store: KVStore, data: Tensor) -> None:
    """Worker 0's `data` into the store. Collective over the workers, blocking."""
    with _file(store) as path:
        if store.rank == 0:
            path.write_bytes(data.numpy().tobytes())
        store.load(path)


@contextmanager
def _file(store: KVStore) -> Iterator[Path]:
    """The path of a file, the same on all workers; it lies on worker 0's machine, and is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        with among(store.layout, store.settings.generation, "a file for all workers") as workers:
            path = broadcast_bytes(folder.encode(), 0, workers).decode()
        yield Path(path, "store.safetensors")
