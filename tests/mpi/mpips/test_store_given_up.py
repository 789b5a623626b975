"""A worker that gives up in the middle of a call: the others hear of it, and the store goes on."""

from __future__ import annotations

import time

import numpy as np
import pytest

from collectives.errors import CollectiveError
from tests.mpi.mpips.support import failure, need, run

LONG = 30.0  # seconds after which a test says that it hangs


def steps(task, until):
    """Go on with a task until something is there."""
    end = time.monotonic() + LONG
    while not until() and time.monotonic() < end:
        next(task)
        time.sleep(1e-3)
    assert until()


def sums(kv, key="w", size=4000, rounds=2):
    """The store still sums."""
    out = np.zeros(size, np.float32)
    for round_ in range(1, rounds + 1):
        kv.pushpull(key, np.full(size, round_ * (kv.rank + 1), np.float32), out)
        assert (out == round_ * kv.num_workers * (kv.num_workers + 1) / 2).all()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("abandoned", [True, False])
def test_a_push_that_raises_halfway_withdraws_the_rest(servers, abandoned):
    """Rank 0 has yet to wait for a server when it hears that rank 1's push is bad, or is given up itself."""
    need(2, servers=servers)
    size = 4000

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        value = np.ones(size, np.float32)
        kv.pushpull("w", value)
        if kv.rank == 0:
            key = kv._keys["w"]
            part = key.parts[-1]
            words, part.words = part.words, [0] * len(part.words)
            push = kv._session.push_long(key, value, 0)
            next(push)
            kv.layout.workers.Barrier()
            if abandoned:
                push.close()
            else:
                with pytest.raises(CollectiveError, match=f"rank {kv.num_workers - 1}: "):
                    steps(push, lambda: False)
            part.words = words
        else:
            kv.layout.workers.Barrier()
            bad = ["ones"] if kv.rank == kv.num_workers - 1 and not abandoned else value
            said = failure(lambda: kv.pushpull("w", bad, np.zeros(size, np.float32)))
            assert ("rank 0 has given up its push of round 2" if abandoned else f"rank {kv.num_workers - 1}: ") in said
        sums(kv)

    run("dist_sync", body, servers=servers, big_array=1000, block_bytes=4096, timeout_seconds=20)
