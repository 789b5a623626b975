"""What a store holds has the same bits, whether its servers and workers run compiled kernels or NumPy."""

from __future__ import annotations

from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest

from collectives.kernels import engine
from mpips import RowSparse
from mpips.optimizers import SGD, Adam
from mpips.optimizers.equation import prepare
from mpips.store.keys.row_sparse import update_rows
from tests.mpi.mpips.support import WORLD, need, run
from tests.mpi.sizes import either_mpi

pytestmark = pytest.mark.skipif(engine.status().engine != "numba", reason=engine.status().reason)
STORES = [
    ("local", {}),
    ("dist_sync", {"servers": 0}),
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 2, "shared_memory": False, "big_array": 1000}),
    ("mpi_sync", {"servers": 1, "clients": 2, "masters": "all", "block_bytes": 8192}),
    ("dist_async", {"servers": 1}),
    ("mpi_async", {"servers": 1, "clients": 1, "shared_memory": False}),
]
KEYS = {
    "small": (7, np.float32),
    "long": (1_500_001, np.float32),
    "double": (3000, np.float64),
    "half": (40_000, np.float16),
    "brain": (40_000, ml_dtypes.bfloat16),
    "table": ((300, 8), np.float32),
}
OPTIMIZERS = (SGD(0.1, momentum=0.9, weight_decay=0.01), Adam(0.1))


@pytest.fixture(scope="module")
def kernels():
    """All kernels are there on every rank."""
    for optimizer in OPTIMIZERS:
        for _, dtype in KEYS.values():
            for parts in range(1, 1 + WORLD.size):
                prepare(optimizer, np.dtype(dtype), parts)
        table = np.zeros((4, 8), np.float32)
        one = RowSparse(np.arange(1), table[:1], table.shape)
        update_rows(optimizer, table, one, optimizer.init(table.reshape(-1)), 1)
    engine.load_all()
    WORLD.Barrier()


def train(kv, optimizer):
    """Push to all keys, in turn where workers push by themselves at any time; return what is stored then."""
    rng = np.random.default_rng(kv.rank)
    shapes = {name: (shape if isinstance(shape, tuple) else (shape,), dtype) for name, (shape, dtype) in KEYS.items()}
    kv.init(
        list(KEYS),
        [np.linspace(-1, 1, np.prod(shape)).reshape(shape).astype(dtype) for shape, dtype in shapes.values()],
    )
    kv.set_optimizer(optimizer)
    for _ in range(3):
        gradients = [rng.normal(size=shape).astype(dtype) for shape, dtype in shapes.values()]
        rows = RowSparse(rng.integers(300, size=40), rng.normal(size=(40, 8)).astype(np.float32), (300, 8))
        in_turn = kv.type == "dist_async"
        for turn in range(kv.num_workers if in_turn else 1):
            if turn == kv.rank or not in_turn:
                kv.push(list(KEYS), gradients)
                kv.push("table", rows)
            kv.barrier()
    outs = [np.empty(shape, dtype) for shape, dtype in shapes.values()]
    kv.pull(list(KEYS), outs)
    return [out.tobytes() for out in outs]


@pytest.mark.core(4)
@either_mpi
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("kind, options", STORES, ids=str)
def test_bits_are_the_same_by_both_engines(kernels, kind, options, optimizer):
    need(**options)
    ends = []
    for numpy in (False, True):
        with engine.numpy_only() if numpy else nullcontext():
            ends.append(run(kind, lambda kv: train(kv, optimizer), **options))
            WORLD.Barrier()
    assert ends[0] == ends[1]
