"""A store of many small keys: what all keys need together is done together, never key by key."""

import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from tests.mpi.mpips.support import WORLD, need, run
from tests.mpi.sizes import only_on

KEYS = 8_000
SECONDS = 5.0
"""More than it takes on a busy machine, and less than one meeting a key takes on a quiet one."""


@pytest.mark.slow
@only_on(2, 3)
@pytest.mark.parametrize("servers", [0, 1])
def test_many_keys_are_loaded_together(servers: int) -> None:
    need(1, servers=servers)
    path = Path(tempfile.gettempdir()) / f"many_keys_{servers}_{WORLD.bcast(np.random.default_rng().integers(2**40))}"

    def body(kv):
        keys = [f"k{i}" for i in range(KEYS)]
        values = [np.full(3, i, np.float32) for i in range(KEYS)]
        took = {}

        def timed(what, call):
            begun = time.monotonic()
            call()
            took[what] = time.monotonic() - begun

        timed("init", lambda: kv.init(keys, values))
        kv.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        timed("push", lambda: kv.push(keys, values))
        kv.save(path)
        kv.push(keys, values)
        timed("load", lambda: kv.load(path))
        found = [np.empty(3, np.float32) for _ in keys]
        kv.pushpull(keys, values, out=found)
        kv.barrier()
        if kv.rank == 0:
            path.unlink()
        return took, found, values, kv.num_workers

    made = run("dist_sync", body, servers=servers)
    if made is None:
        return
    took, found, values, workers = made
    for got, value in zip(found, values):  # round 1 with its momentum, and round 2
        assert np.array_equal(got, value * (1 - 0.5 * workers - 0.75 * workers)), got
    assert all(seconds < SECONDS for seconds in took.values()), took
