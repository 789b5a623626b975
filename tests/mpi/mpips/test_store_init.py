"""Keys are made beside pushes that others have yet to answer; where a server cannot make them, every worker is told."""

from __future__ import annotations

import numpy as np
import pytest

from mpips.store.recovery.memory import UnitMemory
from tests.choice import once
from tests.mpi.mpips import faults
from tests.mpi.mpips.support import WORLD, failure, need, run
from tests.mpi.sizes import either_mpi, only_on

memory = pytest.mark.parametrize("shared_memory", [True, False])


@memory
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_some_push_before_they_init_and_some_after(kind, shared_memory):
    options = {"servers": 1, "shared_memory": shared_memory}
    need(2, **options)

    def body(kv):
        kv.init("a", np.zeros(10))
        if kv.layout.asynchronous:
            kv.set_optimizer("add")
        if kv.rank % 2:
            kv.init("b", np.full(3, 7.0))
        kv.push("a", np.ones(10))
        if not kv.rank % 2:
            kv.init("b", np.full(3, 7.0))
        out, other = np.zeros(10), np.zeros(3)
        kv.barrier()
        kv.pull(["a", "b"], [out, other])
        assert (out == kv.num_workers).all() and (other == 7).all()

    run(kind, body, **options)


@either_mpi
@once(
    **{
        "kind, options": [
            ("dist_sync", {"servers": 1}),
            ("dist_sync", {"servers": 2, "big_array": 1000}),
            ("mpi_sync", {"servers": 1, "clients": 1}),
            ("mpi_sync", {"servers": 1, "clients": 2, "masters": "all"}),
        ]
    },
    shared_memory=[True, False],
    waits=[False, True],
)
def test_init_while_a_long_push_is_under_way(kind, options, shared_memory, waits):
    need(2, **options)

    def body(kv):
        big = 400_000
        kv.init("a", np.zeros(big))
        value, out, other = np.full(big, kv.rank + 1.0), np.zeros(big), np.zeros(3)
        push = kv.ipush("a", value)
        if kv.rank % 2 and waits:
            push.wait()  # which needs what the others, in `init` already, have not sent yet
        kv.init("b", np.full(3, 7.0))
        push.wait()
        kv.pull(["a", "b"], [out, other])
        assert (out == kv.num_workers * (kv.num_workers + 1) / 2).all() and (other == 7).all()

    run(kind, body, chunk_bytes=16384, shared_memory=shared_memory, **options)


@memory
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_without_memory_is_told_to_every_worker(monkeypatch, servers, shared_memory):
    """Nothing has changed then: keys of before are there, and others can be made."""
    options = {"servers": servers, "big_array": 1000, "shared_memory": shared_memory}
    need(2, **options)
    make = UnitMemory.make

    def too_much(self, cards, groups):
        if WORLD.rank == WORLD.size - 1 and any(card.key == "big" for card in cards):
            raise MemoryError("no memory for 42 bytes")
        return make(self, cards, groups)

    monkeypatch.setattr(UnitMemory, "make", too_much)

    def body(kv):
        kv.init("a", np.zeros(10))
        if not kv.rank:
            kv.push("a", np.ones(10))
        try:
            kv.init(["big", "b"], [np.zeros(5000), np.zeros(3)])
            told = "nothing was raised"
        except MemoryError as error:
            told = str(error)
        said = faults.workers(servers).allgather(told)
        assert len(set(said)) == 1 and "no memory for 42 bytes" in said[0] and "'big'" in said[0], said
        if kv.rank:
            kv.push("a", np.ones(10))
        out, large = np.zeros(10), np.zeros(5000)
        kv.pull("a", out)
        assert (out == kv.num_workers).all() and kv.generation == 0
        assert "'b' was not initialised" in failure(lambda: kv.pull("b", np.zeros(3)))
        kv.init("large", large)
        kv.pushpull("large", large + 1, large)
        assert (large == kv.num_workers).all()

    run("dist_sync", body, **options)


@only_on(2, 3, 4)
def test_first_values_of_many_keys_between_nodes():
    options = {"servers": 1, "shared_memory": False}
    need(1, **options)

    def body(kv):
        sizes = [*range(50), 5000, 20_000, 300_000]
        kv.init(list(range(len(sizes))), [np.full(size, size, np.float32) for size in sizes])
        for key, size in enumerate(sizes):
            out = np.zeros(size, np.float32)
            kv.pull(key, out)
            assert (out == size).all()

    run("dist_sync", body, chunk_bytes=16_384, block_bytes=16_384, **options)


@memory
@pytest.mark.parametrize("who", [0, -1])
def test_an_interrupted_init_ends_the_generation_and_can_be_made_again(who, shared_memory):
    """Placement stays the same on all workers: what is made later is pushed to where it lies."""
    options = {"servers": 2, "shared_memory": shared_memory, "big_array": 1000, "chunk_bytes": 4096}
    need(2, **options)

    def body(kv):
        kv.init("a", np.zeros(10))
        odd = who % kv.num_workers
        values = [np.ones(4000), np.ones(3)]
        heard = faults.hear(lambda: _interrupted(kv, values) if kv.rank == odd else _goes_on(kv, values))
        every = faults.workers(2).allgather(heard)
        assert every[odd].error == "KeyboardInterrupt", every
        others = {one[:2] for rank, one in enumerate(every) if rank != odd}
        assert len(others) == 1 and every[odd - 1].error.startswith("Store"), every
        assert f"rank {odd} has given up init" in str(others), every
        rounds = kv.recover()
        assert rounds["a"] == 0
        out, other = np.zeros(4000), np.zeros(10)
        kv.pushpull("a", np.ones(10), other)
        assert (other == kv.num_workers).all()
        kv.init(["d", "e"], [np.full(5000, 5.0), np.full(4000, 7.0)])
        kv.pull("e", out)
        assert (out == 7).all()
        if "b" not in rounds:
            kv.init("b", np.zeros(4000))
        kv.pushpull(["b", "e"], [np.ones(4000), np.ones(4000)], [out, np.empty(4000)])
        assert (out == kv.num_workers).all()

    run("dist_sync", body, **options, timeout_seconds=20)


def _interrupted(kv, values):
    """`init`, and an interrupt when all have agreed on it."""
    task = kv.worker.backend.init

    def broken(*what):
        begun = task(*what)
        next(begun, None)
        begun.close()
        raise KeyboardInterrupt
        yield

    kv.worker.backend.init = broken
    try:
        kv.init(["b", "c"], values)
    finally:
        del kv.worker.backend.init


def _goes_on(kv, values):
    kv.init(["b", "c"], values)
    kv.barrier()
