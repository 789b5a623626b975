"""Keys are made beside pushes that others have yet to answer; where a server cannot make them, every worker is told."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from mpips import server, server_state
from tests.mpi.mpips.support import TAG, failure, need, run, tells
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


def test_the_first_values_of_many_keys_are_under_way_side_by_side(monkeypatch):
    """A server that sets none before 50 have come hears of 50."""
    options = {"servers": 1, "shared_memory": False, "timeout_seconds": 20}
    need(1, **options)
    held, step = [True], server_state.ServerState._set_next

    def late(self):
        held[0] = held[0] and len(self.setting) < 50
        return (False, []) if held[0] else step(self)

    monkeypatch.setattr(server_state.ServerState, "_set_next", late)

    def body(kv):
        sizes = [*range(50), 5000, 20_000]
        kv.init(list(range(len(sizes))), [np.full(size, size, np.float32) for size in sizes])
        for key, size in enumerate(sizes):
            out = np.zeros(size, np.float32)
            kv.pull(key, out)
            assert (out == size).all()

    run("dist_sync", body, chunk_bytes=16_384, block_bytes=16_384, **options)


@memory
@pytest.mark.parametrize("servers", [1, 2])
def test_an_init_that_rank_0_gives_up_is_told_to_all_and_can_be_made_again(servers, shared_memory):
    options = {"servers": servers, "shared_memory": shared_memory, "big_array": 1000, "chunk_bytes": 4096}
    need(2, **options)

    def body(kv):
        kv.init("a", np.zeros(10))
        first = kv._session.set

        def interrupted(pairs):
            task = first(pairs)
            next(task, None)
            task.close()
            raise KeyboardInterrupt
            yield

        if kv.rank:
            assert "rank 0 has given up init" in failure(lambda: kv.init(["b", "c"], [np.ones(4000), np.ones(3)]))
        else:
            kv._session.set = interrupted
            with pytest.raises(KeyboardInterrupt):
                kv.init(["b", "c"], [np.ones(4000), np.ones(3)])
            kv._session.set = first
        out, other = np.zeros(4000), np.zeros(10)
        assert "'b' was not initialised" in failure(lambda: kv.pull("b", out))
        kv.pushpull("a", np.ones(10), other)
        kv.init(["d", "b"], [np.full(5000, 5.0), np.full(4000, 7.0)])
        kv.pull("b", out)
        assert (out == 7).all() and (other == kv.num_workers).all()
        kv.pushpull("b", np.ones(4000), out)
        assert (out == kv.num_workers).all()

    run("dist_sync", body, **options, timeout_seconds=20)


@only_on(3, 4)
def test_an_init_that_another_worker_gives_up_is_told_to_all_and_can_be_made_again():
    options = {"servers": 1, "stall_seconds": 0.2}
    need(2, **options)

    def body(kv):
        last, request = kv.num_workers - 1, kv._session.request

        def late(*what):
            tells(kv, [last])
            return (yield from request(*what))

        def interrupt(*_):
            raise KeyboardInterrupt

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            if kv.rank == last:
                warnings.showwarning = interrupt
                with pytest.raises(KeyboardInterrupt):
                    kv.init("b", np.ones(10))
                kv.layout.workers.Send(b"1", 0, TAG)
            else:
                warnings.showwarning = lambda *_: None
                if not kv.rank:
                    kv._session.request = late
                assert f"rank {last} has given up init" in failure(lambda: kv.init("b", np.ones(10)))
                kv._session.request = request
        kv.init("b", np.full(10, 7.0))
        out = np.zeros(10)
        kv.pull("b", out)
        assert (out == 7).all()

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
