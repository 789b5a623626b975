"""The store's i-calls through the engine: beside compute, in order where they must, with the numbers of push."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from mpi4py import MPI

import collectives
import mpips
from tests.mpi.mpips.support import failure, need, run
from tests.mpi.sizes import either_mpi

COMM = MPI.COMM_WORLD
KEYS = 12


def all_ranks(ok: bool) -> bool:
    return bool(COMM.allreduce(int(ok), op=MPI.MIN))


@pytest.mark.parametrize("servers", [0, 1])
def test_communication_goes_on_while_the_training_thread_sleeps(servers: int) -> None:
    workers = need(servers=servers)

    def body(kv: mpips.KVStore) -> tuple[bool, float]:
        kv.init("w", np.zeros(1000))
        out = np.empty(1000)
        handle = kv.ipushpull("w", np.ones(1000), out=out)
        deadline = time.monotonic() + 10
        while not handle.done and time.monotonic() < deadline:
            time.sleep(0.005)
        done = handle.done
        handle.wait()
        return done, float(out[0])

    assert run("mpi_sync", body, servers=servers) in (None, (True, workers))


def exchange_in_flight(kv: mpips.KVStore) -> bool:
    """Many keys at once, priorities and turns mixed, the results read by later calls on the same keys."""
    values = [np.arange(100 * (key + 1), dtype=np.float32) + kv.rank for key in range(KEYS)]
    kv.init(list(range(KEYS)), [np.zeros_like(value) for value in values])
    outs = [np.empty_like(value) for value in values]
    ranks, ok = sum(range(kv.num_workers)), True
    for repeat in range(3):
        handles = []
        for key in range(KEYS):
            turns = ["link"] if key % 2 else []
            if repeat == 1:
                handles.append(kv.ipush(key, values[key], priority=-key, turns=turns))
                handles.append(kv.ipull(key, outs[key], priority=key, turns=turns))
            else:
                handles.append(kv.ipushpull(key, values[key], out=outs[key], priority=-key, turns=turns))
        for handle in reversed(handles):
            handle.wait()
        sums = [np.arange(len(out), dtype=np.float32) * kv.num_workers + ranks for out in outs]
        ok &= all(np.array_equal(out, right) for out, right in zip(outs, sums))
    return ok


@either_mpi
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dist_sync", {}),
        ("mpi_sync", {}),
        ("dist_sync", {"servers": 1}),
        ("mpi_sync", {"servers": 1}),
        ("mpi_sync", {"servers": 1, "masters": "all"}),
        ("mpi_sync", {"servers": 1, "shared_memory": False}),
    ],
)
def test_store_calls_in_flight_give_the_sums(kind: str, options: dict) -> None:
    if COMM.size <= options.get("servers", 0):
        pytest.skip("needs a worker beside the servers")
    ok = True
    try:
        kv = mpips.create(kind, **options)
        ok = exchange_in_flight(kv)
        kv.close()
    except SystemExit:
        pass  # a server's way out
    assert all_ranks(ok)


@pytest.mark.parametrize("servers", [0, 1])
def test_the_programs_own_collectives_beside_calls_in_flight(servers: int) -> None:
    """The store's thread begins a push earlier or later than the program its collective, by worker: nobody minds."""
    need(servers=servers)

    def body(kv: mpips.KVStore) -> bool:
        kv.init("w", np.zeros(50_000))
        ok, layout, out = True, kv.layout, np.empty(50_000)
        for _ in range(10):
            handle = kv.ipushpull("w", np.ones(50_000), out=out)
            if kv.rank == 0:  # this worker's push comes first, if it can
                handle.test()
            for comm in (layout.workers, layout.client):
                mine = np.full(50_000, 2.0)
                collectives.allreduce(mine, comm)
                ok &= bool((mine == 2.0 * comm.Get_size()).all())
            handle.wait()
            ok &= bool((out == kv.num_workers).all())
        return ok

    assert all_ranks(run("mpi_sync", body, servers=servers) is not False)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind, servers", [("mpi_sync", 0), ("mpi_sync", 1), ("dist_sync", 1)])
def test_one_worker_started_its_calls_and_another_blocks(kind: str, servers: int) -> None:
    """An i-call costs the store no fast path: fault 8."""
    workers = need(servers=servers)

    def body(kv: mpips.KVStore) -> list[float]:
        kv.init(["a", "b"], [np.zeros(3, np.float32)] * 2)
        found = []
        for round_ in range(6):
            out = [np.empty(3, np.float32) for _ in "ab"]
            ones = [np.full(3, round_ + 1, np.float32) for _ in "ab"]
            if kv.rank % 2:
                kv.pushpull("a", ones[0], out=out[0])
                kv.pushpull("b", ones[1], out=out[1])
            else:
                handles = [kv.ipushpull(name, ones[i], out=out[i]) for i, name in enumerate("ab")]
                for handle in handles:
                    handle.wait()
            found += [float(one[0]) for one in out]
        assert all(key.fast is not None for key in kv.worker.keys.values())
        return found

    expected = [float(workers * (round_ + 1)) for round_ in range(6) for _ in "ab"]
    assert run(kind, body, servers=servers) in (None, expected)


def test_numpy_integers_are_keys_everywhere() -> None:
    """Fault 10."""
    workers = need(servers=1)

    def body(kv: mpips.KVStore) -> float:
        kv.init(np.int64(3), np.zeros(3))
        kv.recut([np.int32(3)], {np.int64(4): 3})
        out = np.empty(3)
        kv.pushpull(np.uint8(4), np.ones(3), out=out)
        kv.forget(np.int64(4))
        return float(out[0])

    assert run("dist_sync", body, servers=1) in (None, workers)


@pytest.mark.mpi(min_size=2)
def test_a_bad_list_on_one_worker_is_told_to_all() -> None:
    """Fault 10."""
    need(2)

    def body(kv: mpips.KVStore) -> list[str]:
        kv.init("w", np.zeros(3))
        bad = kv.rank == 1
        said = [
            failure(lambda: kv.forget(3.5 if bad else ["w"])),
            failure(lambda: kv.recut("w", 7 if bad else {"v": 3})),
        ]
        kv.pushpull("w", np.ones(3))
        return said

    said = run("mpi_sync", body)
    assert said is None or ("a key is an int or a str" in said[0] and "a dict of names and sizes" in said[1])


@pytest.mark.parametrize("servers", [0, 1])
def test_a_second_thread_in_a_store_is_told_to_all(servers: int) -> None:
    """On one worker a thread waits in a barrier to which the others do not come, and the program pushes."""
    need(workers=2, servers=servers)

    def body(kv: mpips.KVStore) -> list[str]:
        kv.init("w", np.zeros(3))
        if kv.rank:
            kv.layout.workers.Barrier()
            return [failure(kv.barrier)]
        said: list[str] = []
        thread = threading.Thread(target=lambda: said.append(failure(kv.barrier)), name="loader")
        thread.start()
        while not kv.worker.generation.undescribed:  # until it is in the barrier
            time.sleep(1e-4)
        said.append(failure(lambda: kv.push("w", np.ones(3))))
        thread.join(30)
        kv.layout.workers.Barrier()
        return said

    everybody = [one for one in COMM.allgather(run("dist_sync", body, servers=servers)) if one is not None]
    words = "rank 0: thread 'MainThread' calls push while thread 'loader' is in a call of the store"
    assert len({said for one in everybody for said in one}) == 1 and words in everybody[0][0], everybody
