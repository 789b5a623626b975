"""Keys are made beside pushes that others have yet to answer; where a server cannot make them, every worker is told."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from mpips import server
from tests.mpi.mpips.support import TAG, failure, need, run, tells
from tests.mpi.sizes import only_on

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


@pytest.mark.parametrize("kind, options", [
    ("dist_sync", {"servers": 1}), ("dist_sync", {"servers": 2, "big_array": 1000}),
    ("mpi_sync", {"servers": 1, "clients": 1}), ("mpi_sync", {"servers": 1, "clients": 2, "masters": "all"}),
])  # fmt: skip
@memory
def test_init_while_a_long_push_is_under_way(kind, options, shared_memory):
    need(2, **options)

    def body(kv):
        big = 400_000
        kv.init("a", np.zeros(big))
        value, out, other = np.full(big, kv.rank + 1.0), np.zeros(big), np.zeros(3)
        push = kv.ipush("a", value)
        kv.init("b", np.full(3, 7.0))
        push.wait()
        kv.pull(["a", "b"], [out, other])
        assert (out == kv.num_workers * (kv.num_workers + 1) / 2).all() and (other == 7).all()

    run(kind, body, chunk_bytes=16384, shared_memory=shared_memory, **options)


@memory
@pytest.mark.parametrize("servers", [1, 2])
def test_a_server_without_memory_is_told_to_every_worker(monkeypatch, servers, shared_memory):
    options = {"servers": servers, "big_array": 1000, "shared_memory": shared_memory}
    need(2, **options)
    make = server.Server._create

    def create(self, cards):
        if self._layout.rank == self._layout.num_workers + servers - 1 and any(card.key == "big" for card in cards):
            raise MemoryError("no memory for 42 bytes")
        return make(self, cards)

    monkeypatch.setattr(server.Server, "_create", create)

    def body(kv):
        kv.init("a", np.zeros(10))
        if not kv.rank:
            kv.push("a", np.ones(10))
        said = kv.layout.workers.allgather(failure(lambda: kv.init(["big", "b"], [np.zeros(5000), np.zeros(3)])))
        last = kv.num_workers + servers - 1
        assert set(said) == {f"init of keys 'big', 'b': server rank {last}: no memory for 42 bytes"}
        if kv.rank:
            kv.push("a", np.ones(10))
        out, large = np.zeros(10), np.zeros(5000)
        kv.pull("a", out)
        assert (out == kv.num_workers).all()
        assert "'b' was not initialised" in failure(lambda: kv.pull("b", np.zeros(3)))
        kv.init("large", large)
        kv.pushpull("large", large + 1, large)
        assert (large == kv.num_workers).all()

    run("dist_sync", body, **options)


@only_on(3, 4)
def test_a_long_wait_for_rank_0_in_init_is_told():
    options = {"servers": 1, "stall_seconds": 0.2}
    need(2, **options)

    def body(kv):
        request, texts = kv._backend.session.request, []

        def late(*what):
            tells(kv, range(1, kv.num_workers))
            return (yield from request(*what))

        def heard(message, *_):
            texts.append(str(message))
            if len(texts) == 1:
                kv.layout.workers.Send(b"1", 0, TAG)

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            if kv.rank:
                warnings.showwarning = heard
            else:
                kv._backend.session.request = late
            kv.init("b", np.full(10, 7.0))
        assert not kv.rank or (f"rank {kv.rank} waits for the other" in texts[0] and "in init" in texts[0]), texts
        out = np.zeros(10)
        kv.pull("b", out)
        assert (out == 7).all()

    run("dist_sync", body, **options)
