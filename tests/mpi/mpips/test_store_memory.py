"""What a server keeps: weights, optimizer state and at most two more copies of the model, whatever is under way."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from collectives.fabric import arena
from tests.mpi.mpips.support import WORLD, run
from tests.mpi.sizes import only_on

MODEL = 24 << 20  # bytes
NOISE = 12 << 20  # messages of MPI's own, stacks, and the like
MOMENTUM = 1  # copies of the model in the optimizer's state


def owned():
    """Bytes of this process alone, and of node-shared memory that it has made."""
    status = Path("/proc/self/status").read_text()
    private = int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))) << 10
    own = arena.locate(arena.empty(1, np.uint8))
    assert own is not None
    return private + os.stat(f"/proc/self/fd/{own.fd}").st_blocks * 512


class Gauge(threading.Thread):
    """The most that this process has owned beyond what it owned at the start."""

    def __init__(self):
        super().__init__(daemon=True)
        self.start_bytes = self.peak = owned()
        self.over = threading.Event()

    def run(self):
        while not self.over.wait(2e-3):
            self.peak = max(self.peak, owned())

    def stop(self):
        self.over.set()
        self.join()
        return self.peak - self.start_bytes


def pushes(kv, names, size):
    """Many rounds of every key under way at a time, and worker 0 late; then one exact pull."""
    kv.init(names, [np.zeros(size, np.float32) for _ in names])
    kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    gradient = np.full(size, -1, np.float32)
    if kv.rank == 0:
        time.sleep(0.3)
    handles = [kv.ipush(name, gradient) for _ in range(3) for name in names]
    for handle in handles:
        handle.wait()
    kv.barrier()
    out = np.empty(size, np.float32)
    for name in names:
        kv.pull(name, out)
        yield out


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "kind, key_bytes, shared_memory",
    [
        ("dist_sync", 192 << 10, False),
        ("dist_sync", 8 << 20, False),
        ("dist_async", 400 << 10, False),
        ("dist_sync", 400 << 10, True),
    ],
)
def test_a_server_keeps_two_copies_of_the_model_at_most(kind, key_bytes, shared_memory):
    if WORLD.size != 4:
        pytest.skip("once is enough; with fewer than three workers nothing piles up")
    size, names = key_bytes // 4, list(range(MODEL // key_bytes))

    def body(kv):
        n = kv.num_workers
        for out in pushes(kv, names, size):
            if kind == "dist_sync":  # steps n, 1.5 n, 1.75 n
                assert (out == 4.25 * n).all(), (n, out)
            else:
                assert (out > 3 * n).all() and (out < 6 * n).all(), (n, out)

    gauge = Gauge()
    gauge.start()
    run(kind, body, servers=1, shared_memory=shared_memory)
    grown = gauge.stop()
    server = np.array([grown if WORLD.rank == WORLD.size - 1 else 0])
    WORLD.Allreduce(MPI.IN_PLACE, server)
    limit = (1 + MOMENTUM + 2) * MODEL + NOISE
    assert server[0] <= limit, f"{server[0] / MODEL:.2f} copies of the model, at most {limit / MODEL:.2f}"


@only_on(2, 3)
@pytest.mark.parametrize("kind, options", [("dist_sync", {"servers": 1}), ("mpi_sync", {"servers": 1, "clients": 1})])
def test_a_closed_store_holds_nothing(kind, options):
    held = []

    def body(kv):
        kv.init("w", np.zeros(1000, np.float32))
        kv.pushpull("w", np.ones(1000, np.float32))
        held.append(weakref.ref(kv))

    run(kind, body, **options)
    gc.collect()
    assert not any(store() for store in held)
