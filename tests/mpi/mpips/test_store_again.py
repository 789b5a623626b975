"""One small key that is pushed and pulled again and again, by workers of which one is put off now and then."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from tests.mpi.delays import put_off
from tests.mpi.mpips.support import need, run
from tests.mpi.sizes import only_on

ROUNDS = 60
STORES = [{"servers": 0}, {"servers": 1, "clients": 1}, {"servers": 1, "clients": 1, "masters": "all"}]


@pytest.mark.mpi
@only_on(2, 3, 4)
@pytest.mark.parametrize("options", STORES)
@pytest.mark.parametrize("calls", ["pushes", "pulls"])
def test_every_call_is_the_same_on_all_workers(options, calls):
    workers = need(2, **options)

    def body(kv):
        kv.init("bias", np.zeros(10, np.float32))
        value, wrong, kept = np.zeros(10, np.float32), 0, []
        with put_off(0.002, 0.0046) if kv.rank == 1 else nullcontext():
            for number in range(ROUNDS):
                gradient = np.full(10, kv.rank + number, np.float32)
                kept.append(gradient)  # so that the next one lies elsewhere
                if calls != "pulls" or not number:
                    kv.push("bias", gradient)
                    expected = workers * number + workers * (workers - 1) // 2
                if calls != "pushes" or number == ROUNDS - 1:
                    kv.pull("bias", value)
                    wrong += int((value != expected).sum())
        return wrong

    assert run("mpi_sync", body, **options) in (0, None)
