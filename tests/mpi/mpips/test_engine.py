"""The store's i-calls through the engine: beside compute, in order where they must, with the numbers of push."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.engine import Engine, Task
from tests.mpi.sizes import either_mpi

COMM = MPI.COMM_WORLD
KEYS = 12


def all_ranks(ok: bool) -> bool:
    return bool(COMM.allreduce(int(ok), op=MPI.MIN))


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(stall_seconds=20, timeout_seconds=40)
    yield engine
    engine.close()


def summed(comm: MPI.Comm, values: np.ndarray) -> Task:
    out = np.empty_like(values)
    request = comm.Iallreduce(values, out)
    while not request.Test():
        yield
    return out


def test_collectives_that_take_turns_match_whatever_their_priority(engine: Engine) -> None:
    """Ranks submit at their own pace; each collective has another length, so a wrong order would not go unnoticed."""
    comm = COMM.Dup()
    handles = []
    for number in range(20):
        if (number + COMM.rank) % 3 == 0:
            time.sleep(0.002)
        values = np.full(number + 1, COMM.rank + number, np.float64)
        handles.append(engine.push(lambda v=values: summed(comm, v), mutates=["comm"], priority=number % 5))
    ranks = sum(range(COMM.size))
    right = [np.array_equal(handle.wait(), np.full(n + 1, ranks + n * COMM.size)) for n, handle in enumerate(handles)]
    assert all_ranks(all(right))
    comm.Free()


def test_communication_goes_on_while_the_training_thread_sleeps(engine: Engine) -> None:
    comm = COMM.Dup()
    handle = engine.push(lambda: summed(comm, np.ones(1000)), mutates=["comm"])
    for _ in range(2000):
        if handle.done:
            break
        time.sleep(0.005)
    done = handle.done
    assert all_ranks(done and np.array_equal(handle.wait(), np.full(1000, COMM.size)))
    comm.Free()


def test_an_error_on_one_rank_surfaces_there_and_the_others_go_on(engine: Engine) -> None:
    def work() -> None:
        if COMM.rank == 0:
            raise ValueError("only here")

    handle = engine.push(work, mutates=["x"])
    try:
        handle.wait()
        seen = ""
    except ValueError as error:
        seen = str(error)
    assert all_ranks(seen == ("only here" if COMM.rank == 0 else ""))


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


def test_a_bad_call_in_flight_raises_at_wait_on_every_rank() -> None:
    kv = mpips.create("mpi_sync")
    kv.init("w", np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="'w'"):
        kv.ipush("w", np.zeros(4, np.float32)).wait()
    out = np.empty(3, np.float32)
    kv.pushpull("w", np.ones(3, np.float32), out=out)
    kv.close()
    assert all_ranks(np.array_equal(out, np.full(3, kv.num_workers)))
