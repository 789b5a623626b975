"""The rest of the store's contract: asynchronous kinds, staleness, handles, lists, optimizer states on disk."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import mpips
from mpips.optimizers import SGD, Adam
from tests.mpi.mpips.support import WORLD, failure, need, run
from tests.mpi.sizes import only_on

ASYNCHRONOUS = [
    ("dist_async", {"servers": 1}),
    ("dist_async", {"servers": 2, "big_array": 100}),
    ("dist_async", {"servers": 1, "shared_memory": False}),
    ("mpi_async", {"servers": 1, "clients": 2}),
    ("mpi_async", {"servers": 1, "clients": 1, "masters": "all"}),
]


def gradients_of(rank, size, count=5):
    return [np.random.default_rng(10 * rank + i).normal(size=size).astype(np.float32) for i in range(count)]


@pytest.mark.parametrize("kind, options", ASYNCHRONOUS)
def test_an_additive_optimizer_ends_with_the_sum_of_all_pushes(kind, options):
    need(**options)

    def body(kv):
        for size in (6, 300_000):
            kv.init(f"w{size}", np.zeros(size, np.float32))
        kv.set_optimizer("add")
        for size in (6, 300_000):
            out = np.zeros(size, np.float32)
            for i in range(6):
                gradient = mpips.empty(size) if i % 2 else np.empty(size, np.float32)
                gradient[...] = kv.rank + 1
                kv.push(f"w{size}", gradient)
                gradient[...] = 99
                kv.pull(f"w{size}", out)
                assert size > 6 or (out == out[0]).all()  # a key on one server is never read half updated
            kv.barrier()
            kv.pull(f"w{size}", out)
            assert (out == 6 * kv.num_workers * (kv.num_workers + 1) / 2).all(), out

    run(kind, body, **options)


@only_on(1)
def test_a_local_store_refuses_arguments_that_ask_for_other_processes(monkeypatch):
    monkeypatch.setenv("MPIPS_SERVERS", "1")  # of the job, beside whose store it stands
    mpips.create("local").close()
    with pytest.raises(mpips.OptionError, match="servers=1 in a store of kind local"):
        mpips.create("local", servers=1)


@pytest.mark.parametrize("kind", ["dist_async", "mpi_async"])
def test_an_asynchronous_store_needs_an_optimizer_before_the_first_push(kind):
    workers = need(servers=1)

    def body(kv):
        kv.init("w", np.ones(4, np.float32))
        out = np.zeros(4, np.float32)

        for call in (kv.push, kv.ipush, kv.pushpull, kv.ipushpull):
            said = failure(partial(call, "w", out))
            assert said.endswith("an asynchronous store needs an optimizer; call set_optimizer first"), said
        kv.pull("w", out)
        assert (out == 1).all()
        kv.set_optimizer("add")
        kv.push("w", out)
        kv.barrier()
        kv.pull("w", out)
        assert (out == 1 + workers).all()

    run(kind, body, servers=1)


@pytest.mark.parametrize("kind", ["dist_async", "mpi_async"])
def test_an_asynchronous_store_needs_an_optimizer_of_the_key_that_is_pushed(kind):
    workers = need(servers=1)

    def body(kv):
        one, out = np.ones(4, np.float32), np.empty(4, np.float32)
        kv.init(["w", "v"], [one, one])
        kv.set_optimizer("add", keys=["w"])
        for key, value in (("v", one), (["w", "v"], [one, one])):
            for call in (kv.push, kv.ipush, kv.pushpull):
                said = failure(partial(call, key, value))
                assert "key 'v' has no optimizer" in said and said.endswith("call set_optimizer first"), said
        kv.push("w", one)
        kv.forget("w")
        kv.init("w", one)
        assert "key 'w' has no optimizer" in failure(lambda: kv.push("w", one))
        kv.set_optimizer("add", keys="w")
        kv.push("w", one)
        kv.barrier()
        kv.pull("w", out)
        assert (out == 1 + workers).all()
        kv.set_optimizer("add")
        kv.push("v", one)

    run(kind, body, servers=1)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_runs_further_ahead_than_the_staleness(staleness):
    n = need(2, servers=1)
    steps = 6

    def body(kv):
        kv.init("w", np.zeros(n, np.float32))
        kv.set_optimizer("add")
        mine = np.zeros(n, np.float32)
        mine[kv.rank] = 1
        out = np.zeros(n, np.float32)
        for step in range(1, steps + 1):
            if kv.rank == 1:
                time.sleep(0.01)
            kv.push("w", mine)
            kv.pull("w", out)
            assert out.min() >= step - staleness, (step, out)
            assert out[kv.rank] == step

    run("dist_async", body, servers=1, staleness=staleness)


@pytest.mark.parametrize("meets", ["barrier", "init"])
@pytest.mark.parametrize(
    "kind, options, rows",
    [
        ("dist_async", {"servers": 1, "staleness": 0}, False),
        ("dist_async", {"servers": 2, "staleness": 1}, False),
        ("dist_async", {"servers": 1, "staleness": 1, "shared_memory": False}, False),
        ("dist_async", {"servers": 1, "staleness": 0}, True),
        ("dist_async", {"servers": 2, "staleness": 1}, True),
        ("mpi_async", {"servers": 1, "clients": 2, "staleness": 1}, False),
        ("mpi_async", {"servers": 1, "clients": 2, "staleness": 1, "masters": "all"}, False),
    ],
)
def test_a_worker_that_waits_for_all_holds_nobody_back(kind, options, rows, meets):
    """One client (each worker, in a dist kind) pushes ten times less than the others; then all are counted anew."""
    n, steps, staleness = need(2, **options), 6, options["staleness"]

    def body(kv):
        groups = kv.layout.clients
        mine = next(place for place, client in enumerate(groups) if kv.rank in range(*client))
        one, out, ids = np.zeros(n), np.zeros(n), np.arange(n)
        one[mine] = 1
        if rows:
            table = kv.table("t", 1, np.float64, init=mpips.uniform(0), learning_rate=1.0)
        else:
            kv.init("w", out)
            kv.set_optimizer("add")

        def exchange():
            if rows:
                table.push(ids, -one[:, None])
                table.pull(ids, out[:, None])
            else:
                kv.pushpull("w", one, out)
            return out[: len(groups)] / ([1] * len(groups) if rows else np.diff(groups)[:, 0])

        for _ in range(3 if mine == 0 else 13):
            exchange()
        if meets == "barrier":
            kv.barrier()
        else:
            kv.init("another", out)
        before = np.array([3, *[13] * (len(groups) - 1)])
        for step in range(1, steps + 1):
            counts = exchange() - before
            assert counts.min() >= step - staleness and counts[mine] == step, (step, counts)
        for _ in range(0 if mine == 0 else 5):
            exchange()  # who has closed holds nobody back, either

    run(kind, body, **options)


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_optimizer_states_survive_in_a_file(tmp_path_factory, servers):
    need(servers=servers)
    path = WORLD.bcast(str(tmp_path_factory.mktemp("states") / "states.safetensors"))
    size = 3001

    def first(kv):
        kv.init("w", np.ones(size, np.float32))
        assert "needs an optimizer" in failure(lambda: kv.save_optimizer_states(path))
        kv.set_optimizer(Adam(0.01))
        out = np.zeros(size, np.float32)
        for gradient in gradients_of(kv.rank, size):
            kv.pushpull("w", gradient, out)
        kv.save_optimizer_states(path)
        kv.pushpull("w", gradients_of(kv.rank, size, 6)[5], after := np.zeros(size, np.float32))
        return out, after

    weights, after = run("dist_sync", first, servers=servers, big_array=100) or (None, None)

    def second(kv):
        kv.init("w", weights)
        kv.set_optimizer(Adam(0.01))
        kv.load_optimizer_states(path)
        out = np.zeros(size, np.float32)
        kv.pushpull("w", gradients_of(kv.rank, size, 6)[5], out)
        assert np.allclose(out, after, atol=1e-7)
        assert "nowhere" in failure(lambda: kv.load_optimizer_states("/nowhere"))

    run("dist_sync", second, servers=servers)


@only_on(3)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_states_of_more_keys_than_are_under_way_at_a_time_go_to_their_own(tmp_path_factory, shared_memory):
    path = WORLD.bcast(str(tmp_path_factory.mktemp("states") / "states.safetensors"))
    keys = list(range(700))

    def body(kv):
        def pushed(scale):
            out = [np.zeros(1 + i % 5) for i in keys]
            kv.pushpull(keys, [np.full(1 + i % 5, scale * (i + 1.0)) for i in keys], out)
            return out

        kv.init(keys, [np.zeros(1 + i % 5) for i in keys])
        kv.set_optimizer(SGD(1.0, momentum=0.5))
        pushed(1)
        kv.save_optimizer_states(path)
        before = pushed(7)
        kv.load_optimizer_states(path)
        for i, was, now in zip(keys, before, pushed(0)):
            assert (now - was == -0.5 * (i + 1)).all(), (i, was, now)

    run("dist_sync", body, servers=2, shared_memory=shared_memory, chunks_in_flight=1)


@pytest.mark.parametrize("servers", [0, 1])
def test_the_state_of_another_optimizer_is_refused(tmp_path_factory, servers):
    need(servers=servers)
    path = WORLD.bcast(str(tmp_path_factory.mktemp("states") / "states.safetensors"))

    def body(kv):
        kv.init("w", np.zeros(5))
        kv.set_optimizer(SGD(1.0, momentum=0.5))
        kv.push("w", np.ones(5))
        kv.save_optimizer_states(path)
        kv.set_optimizer(Adam(0.5))
        said = kv.layout.workers.allgather(failure(lambda: kv.load_optimizer_states(path)))
        assert len(set(said)) == 1 and "key 'w': the saved state does not fit Adam" in said[0], said
        assert "set the optimizer that it was saved of" in said[0]
        out = np.empty(5)
        kv.pushpull("w", np.ones(5), out)
        assert np.allclose(out, -kv.num_workers - 0.5)

    run("dist_sync", body, servers=servers)


def test_a_state_of_no_update_yet_comes_back(tmp_path_factory):
    path = WORLD.bcast(str(tmp_path_factory.mktemp("states") / "states.safetensors"))

    def body(kv):
        kv.init("w", np.zeros(5))
        kv.set_optimizer(SGD(1.0, momentum=0.5))
        kv.save_optimizer_states(path)
        kv.push("w", np.ones(5))
        kv.load_optimizer_states(path)
        out = np.empty(5)
        kv.pushpull("w", np.ones(5), out)
        assert (out == -2 * kv.num_workers).all()

    run("dist_sync", body, servers=0)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_push_that_staleness_holds_back_is_read_as_it_was_compressed(shared_memory):
    options = {"servers": 1, "staleness": 0, "shared_memory": shared_memory}
    need(2, **options)

    def body(kv):
        kv.init("w", np.zeros(5))
        kv.set_optimizer("add")
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        for _ in range(0 if kv.rank else 2):
            kv.push("w", np.ones(5))
        kv.set_gradient_compression({"type": "2bit", "threshold": 2})
        if kv.rank:
            kv.push("w", np.full(5, 2.0))
        kv.barrier()
        if kv.rank:
            out = np.empty(5)
            kv.pull("w", out)
            assert (out == 2 * 0.5 + 2 * (kv.num_workers - 1)).all(), out

    run("dist_async", body, **options)


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_files_that_cannot_be_used_are_named_everywhere(tmp_path_factory, servers):
    need(servers=servers)
    folder = WORLD.bcast(str(tmp_path_factory.mktemp("states")))
    corrupt, other = f"{folder}/corrupt", f"{folder}/other"
    if WORLD.rank == 0:
        Path(corrupt).write_bytes(b"no tensors")
        save_file({"x": np.zeros(3)}, other)

    def body(kv):
        kv.init("w", np.zeros(5))
        kv.set_optimizer(SGD(1.0, momentum=0.5))
        kv.barrier()
        for call, path in (
            (kv.save_optimizer_states, f"{folder}/nowhere/x"),
            (kv.load_optimizer_states, corrupt),
            (kv.load_optimizer_states, other),
            (kv.load_optimizer_states, folder),
        ):
            said = kv.layout.workers.allgather(failure(lambda: call(path)))  # noqa: B023
            assert len(set(said)) == 1 and path in said[0] and ("rank 0" in said[0] or len(said) == 1), said
            assert call != kv.save_optimizer_states or f"no folder {folder}/nowhere: make it first" in said[0], said
        out = np.empty(5)
        kv.pushpull("w", np.ones(5), out)
        assert (out == -kv.num_workers).all()

    run("dist_sync", body, servers=servers)
