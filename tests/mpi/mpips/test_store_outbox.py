"""Ordinary arrays of many blocks go through few slots: every round counts what was pushed, whoever is late."""

import time

import numpy as np
import pytest

import mpips
from tests.mpi.delays import put_off
from tests.mpi.mpips.support import WORLD, need, run
from tests.mpi.sizes import core_on

pytestmark = core_on(2, 3)
SIZE = 150_000


def pushed(round_, worker):
    """Elements of which the sums are exact."""
    return np.arange(SIZE, dtype=np.float64) % 1000 * (worker + 1) + round_


def summed(round_, workers):
    return sum(pushed(round_, worker) for worker in range(workers))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("late", ["nobody", "one", "first"])
@pytest.mark.parametrize("servers", [1, 2])
def test_every_round_has_what_was_pushed(servers, late):
    workers = need(servers=servers)

    def body(kv):
        kv.init("w", np.zeros(SIZE))
        value, out, wrong = np.empty(SIZE), np.empty(SIZE), []
        if kv.rank == workers - 1:
            value = mpips.empty(SIZE, np.float64)
        for round_ in range(12):
            value[:] = pushed(round_, kv.rank)
            if late == "first" and kv.rank == 0:
                time.sleep(5e-3)
            kv.push("w", value)
            value[:] = -1
            kv.pull("w", out)
            if not np.array_equal(out, summed(round_, workers)):
                wrong.append(round_)
        return wrong

    options = {"servers": servers, "block_bytes": 4096, "big_array": 1000}
    if late == "one" and WORLD.rank == 0:
        with put_off(2e-3, 5e-3):
            assert not run("dist_sync", body, **options)
    else:
        assert not run("dist_sync", body, **options)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("optimizer", [None, "add"])
@pytest.mark.parametrize("servers", [1, 2])
def test_long_sums_at_default_settings(servers, optimizer):
    workers = need(servers=servers)
    size = 3_000_001

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        if optimizer:
            kv.set_optimizer(optimizer)
        base = np.arange(size, dtype=np.float32) % 1000
        values, out = [np.empty(size, np.float32), mpips.empty(size)], np.empty(size, np.float32)
        expected, wrong = 0, []
        for round_ in range(6):
            value = values[(round_ + kv.rank * (round_ > 3)) % 2]
            value[:] = base + round_ * (1 + kv.rank)
            kv.push("w", value)
            value[:] = -1
            kv.pull("w", out)
            total = workers * base + round_ * sum(range(1, workers + 1))
            expected = expected + total if optimizer else total
            if not np.array_equal(out, expected):
                wrong.append(round_)
        return wrong

    assert not run("dist_sync", body, servers=servers)


@pytest.mark.mpi(min_size=3)
def test_keys_in_another_order_on_every_worker():
    workers = need(2, servers=1)

    def body(kv):
        names = ["a", "b", "c"]
        kv.init(names, [np.zeros(SIZE)] * 3)
        wrong, mine = [], names[kv.rank % 3 :] + names[: kv.rank % 3]
        outs = {name: np.empty(SIZE) for name in names}
        for round_ in range(5):
            for name in mine:
                kv.push(name, pushed(round_, kv.rank))
            for name in mine:
                kv.pull(name, outs[name])
            wrong += [(round_, name) for name in names if not np.array_equal(outs[name], summed(round_, workers))]
        return wrong

    assert not run("dist_sync", body, servers=1, block_bytes=4096)
