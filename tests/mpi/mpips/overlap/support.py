"""What the tests of overlap on ranks share."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

import mpips
from mpips import optimizers
from mpips.mlp import MLP
from mpips.overlap import Overlapped
from mpips.training.local import averaged, workers_in_a_sum

WORLD = MPI.COMM_WORLD
SIZES = (12, 30, 9, 40, 7, 5)
STORES = [("mpi_sync", {}), ("dist_sync", {"servers": 1}), ("mpi_sync", {"servers": 1})]


def all_ranks(ok: bool) -> bool:
    return bool(WORLD.allreduce(int(ok), op=MPI.MIN))


class SlowNetwork(Overlapped):
    """A startup takes 6 ms, the bytes of all layers 40 ms, or so it measures; whatever the test machine does."""

    def _costs(self) -> tuple[tuple[float, float], tuple[float, float]]:
        super()._costs()
        per_byte = 0.04 / 4 / sum(self._model.layer_elements)
        return (6e-3, per_byte), (6e-3, per_byte)


def worker(kind: str, options: dict[str, Any]) -> Any:
    """A store; None on a server, whose work is done by then."""
    if WORLD.size <= options.get("servers", 0):
        pytest.skip("needs a worker beside the servers")
    try:
        return mpips.create(kind, **options)
    except SystemExit:
        return None


def exchange_of(kv: Any, model: MLP, **options: Any) -> Overlapped:
    optimizer = averaged(optimizers.create("adam", learning_rate=0.01), workers_in_a_sum(kv))
    return SlowNetwork(model, kv, optimizer, **options)
