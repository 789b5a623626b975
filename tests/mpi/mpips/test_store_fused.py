"""Lists of small keys, which workers of a client sum together: every key gets what it would get alone."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpips.store.remote import client as bundle
from tests.choice import once
from tests.mpi.mpips.support import failure, need, run

STORES = [
    ("mpi_sync", {"servers": 0}),
    ("mpi_sync", {"servers": 0, "shared_memory": False}),
    ("mpi_sync", {"servers": 1, "clients": 1}),
    ("mpi_sync", {"servers": 2, "clients": 2, "big_array": 100}),
    ("mpi_sync", {"servers": 1, "clients": 1, "masters": "all"}),
    ("mpi_sync", {"servers": 1, "clients": 1, "shared_memory": False}),
    ("mpi_sync", {"servers": 2, "clients": 2, "shared_memory": False, "chunk_bytes": 4096}),
]
ASYNCHRONOUS = [
    ("mpi_async", {"servers": 1, "clients": 1}),
    ("mpi_async", {"servers": 2, "clients": 2, "shared_memory": False}),
]
ALONE = [(kind, options) for kind, options in STORES if options.get("clients", 1) == 1 and "masters" not in options]
SHAPES = [(100,), (), (7, 3), (0,), (1,), (2000,), (128,), (64, 2), (200,), (300,), (5,)]
DTYPES = ["float32", "float64", "float16", "int64", "float32", "float32"]
KEYS = [(f"k{index}", shape, DTYPES[index % len(DTYPES)]) for index, shape in enumerate(SHAPES * 3)]
NAMES = [name for name, _, _ in KEYS]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Several vectors a call, and keys that go alone."""
    monkeypatch.setattr(bundle, "SMALL_BYTES", dict.fromkeys((True, False), 2048))
    monkeypatch.setattr(bundle, "MOST_BYTES", 4096)


def zeros():
    return [np.zeros(shape, dtype) for _, shape, dtype in KEYS]


def pushed(worker, round_):
    """Values of which all sums are exact."""
    return [
        (np.arange(np.prod(shape, dtype=int)) % 5 + index % 7 + worker + round_).reshape(shape).astype(dtype)
        for index, (_, shape, dtype) in enumerate(KEYS)
    ]


def summed(workers, rounds):
    """The sum over workers and rounds."""
    every = [pushed(worker, round_) for worker in range(workers) for round_ in rounds]
    return [sum(values[1:], values[0]) for values in zip(*every)]


def wrong(outs, expected):
    return [name for name, out, one in zip(NAMES, outs, expected) if not np.array_equal(out, one)]


@once(**{"kind, options": STORES}, how=["push, pull", "pushpull", "in place", "two outs", "handles"])
def test_every_key_of_a_list_has_its_sum(kind, options, how):
    workers = need(**options)

    def body(kv):
        kv.init(NAMES, zeros())
        found = []
        for round_ in range(3):
            values, outs = pushed(kv.rank, round_), zeros()
            if how == "push, pull":
                kv.push(NAMES, values)
                kv.pull(NAMES, outs)
            elif how == "pushpull":
                kv.pushpull(NAMES, values, out=outs)
            elif how == "in place":
                kv.pushpull(NAMES, values)
                outs = values
            elif how == "handles":
                handles = [kv.ipush(NAMES, values), kv.ipull(NAMES, outs)]
                for handle in handles:
                    handle.wait()
            else:
                others = zeros()
                kv.pushpull(NAMES, values, out=[list(pair) for pair in zip(outs, others)])
                found += wrong(others, summed(workers, [round_]))
            found += wrong(outs, summed(workers, [round_]))
        return found

    assert not run(kind, body, **options)


@pytest.mark.parametrize("kind, options", ASYNCHRONOUS)
def test_an_asynchronous_store_counts_all_that_lists_push(kind, options):
    workers = need(**options)

    def body(kv):
        kv.init(NAMES, zeros())
        floats = [index for index, (_, _, dtype) in enumerate(KEYS) if dtype != "int64"]
        names = [NAMES[index] for index in floats]
        kv.set_optimizer("add", keys=names)
        outs = [zeros()[index] for index in floats]
        for round_ in range(4):
            values = pushed(kv.rank, round_)
            kv.pushpull(names, [values[index] for index in floats], out=outs)
        kv.barrier()
        kv.pull(names, outs)
        expected = summed(workers, range(4))
        return [name for name, out, index in zip(names, outs, floats) if not np.array_equal(out, expected[index])]

    assert not run(kind, body, **options)


@once(**{"kind, options": STORES}, setting=["optimizer", "compression"])
def test_optimizers_and_compression_see_every_key_by_itself(kind, options, setting):
    need(**options)

    def body(kv):
        names, sizes = ["a", "b", "c", "d"], [5, 300, 1, 77]
        kv.init(names, [np.ones(size, np.float32) for size in sizes])
        kv.init([f"{name} alone" for name in names], [np.ones(size, np.float32) for size in sizes])
        if setting == "optimizer":
            kv.set_optimizer("adam", learning_rate=0.01)
        else:
            kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        found = []
        for round_ in range(4):
            values = [np.sin(np.arange(size, dtype=np.float32) + round_ + kv.rank) for size in sizes]
            outs, others = ([np.empty(size, np.float32) for size in sizes] for _ in range(2))
            kv.pushpull(names, values, out=outs)
            for name, value, other in zip(names, values, others):
                kv.pushpull(f"{name} alone", value, out=other)
            close = [np.allclose(out, other, rtol=1e-5, atol=1e-6) for out, other in zip(outs, others)]
            found += [(round_, name) for name, same in zip(names, close) if not same]
        return found

    assert not run(kind, body, **options)


@pytest.mark.mpi(min_size=2)
@once(**{"kind, options": ALONE}, how=["another order", "other keys", "one by one"])
def test_who_calls_something_else_ends_the_generation_and_nothing_is_lost(kind, options, how):
    workers = need(2, **options)

    def body(kv):
        kv.init(["a", "b", "c"], [np.full(9, 5, np.float32)] * 3)
        ones, names = [np.ones(9, np.float32)] * 3, ["a", "b", "c"]
        if kv.rank == kv.num_workers - 1:
            if how == "another order":
                names = ["a", "c", "b"]
            elif how == "other keys":
                names, ones = ["a", "b"], ones[:2]
            else:
                names, ones = "a", ones[0]
        kv.layout.workers.Barrier()  # who is still in `init` would hear of it there
        said = failure(lambda: kv.push(names, ones))
        rounds = kv.recover()
        outs = [np.empty(9, np.float32) for _ in "abc"]
        kv.pull(["a", "b", "c"], outs)
        stored = [set(out.tolist()) for out in outs]
        kv.pushpull(["a", "b", "c"], [np.ones(9, np.float32)] * 3, out=outs)
        return kv.layout.workers.allgather(said), rounds, stored, [set(out.tolist()) for out in outs]

    found = run(kind, body, **options)
    if found is not None:
        said, rounds, stored, after = found
        assert len(set(said)) == 1, said
        assert "keys 'a', 'b', 'c'" in said[0]
        assert rounds == {"a": 0, "b": 0, "c": 0}
        assert stored == [{5.0}] * 3
        assert after == [{float(workers)}] * 3


@pytest.mark.parametrize("names", [["a", "b"], "a"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_pushes_ahead_of_another_client_change_no_sum_under_way(shared_memory, names):
    need(2, servers=1, clients=2)

    def body(kv):
        kv.init(["a", "b"], [np.zeros(9, np.float32)] * 2)
        late, wrong = kv.rank in range(*kv.layout.clients[-1]), []
        outs = [np.empty(9, np.float32) for _ in names] if len(names) > 1 else np.empty(9, np.float32)
        for round_ in range(6):
            kv.barrier()
            for value in (1, 10, 100):
                if late:
                    time.sleep(0.01)
                values = [np.full(9, value, np.float32) for _ in names]
                kv.push(names, values if len(names) > 1 else values[0])
                if late:
                    kv.pull(names, outs)
                    wrong += [(round_, value)] * bool(np.any(np.asarray(outs) != value * kv.num_workers))
        return wrong

    assert not run("mpi_sync", body, servers=1, clients=2, shared_memory=shared_memory)
