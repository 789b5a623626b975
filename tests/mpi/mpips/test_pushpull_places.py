"""`pushpull` reads its result behind the servers, wherever value and result lie: the sums are exact all the same."""

from __future__ import annotations

import numpy as np
import pytest

import mpips
from collectives.machine import THRESHOLD, TUNABLES
from tests.mpi.mpips.support import need, run


def places(size):
    """(value, out) pairs: in place, apart, and overlapping both ways, in node-shared and in ordinary memory."""
    for make in (mpips.empty, lambda n: np.empty(n, np.float32)):
        both = make(size + 3)
        yield make(size), None
        yield make(size), make(size)
        yield both[:size], both[3:]
        yield both[3:], both[:size]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("size", "past_caches"), [(100, 0), (40_001, 0), (40_001, 24_576)])
def test_the_sum_is_exact_wherever_value_and_result_lie(monkeypatch, servers, size, past_caches):
    need(servers=servers)
    if past_caches:
        monkeypatch.setenv(TUNABLES, f"{THRESHOLD}={past_caches}")

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        ramp = np.arange(size, dtype=np.float32) % 1000
        for turn in range(3):
            for value, out in places(size):
                value[...] = ramp + kv.rank + turn
                kv.pushpull("w", value, out, priority=turn)
                expected = kv.num_workers * (ramp + turn) + sum(range(kv.num_workers))
                assert ((value if out is None else out) == expected).all()

    run("dist_sync", body, servers=servers, block_bytes=4096, big_array=1000, small_bytes=1024)
