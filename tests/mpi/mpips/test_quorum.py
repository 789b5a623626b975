"""Stores whose rounds close by a quorum: exact values where the order is forced, and nobody waits for a worker that
stands still."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

from mpips import KVStore
from mpips.optimizers import SGD
from tests.mpi.mpips.support import TAG, WORLD, need, run

SIZE = 70_001
"""Elements of a key of several blocks, or parts on several servers."""


def keys(kv: KVStore) -> dict[str, np.ndarray]:
    """Make a short and a long key, updated by plain SGD."""
    made = {"short": np.arange(3, dtype=np.float32), "long": np.linspace(-1, 1, SIZE, dtype=np.float32)}
    kv.init(list(made), list(made.values()))
    kv.set_optimizer(SGD(0.5))
    kv.barrier()
    return {name: value.copy() for name, value in made.items()}


def gradient(name: str, rank: int, number: int) -> np.ndarray:
    size = 3 if name == "short" else SIZE
    return np.random.default_rng([rank, number, size]).standard_normal(size).astype(np.float32)


def exchange(kv: KVStore, values: dict[str, np.ndarray], number: int) -> None:
    kv.pushpull(list(values), [gradient(name, kv.rank, number) for name in values], out=list(values.values()))


@pytest.mark.parametrize("pushes", [0, 3])
@pytest.mark.parametrize("options", [{"servers": 1}, {"servers": 2, "big_array": 50_000}], ids=str)
@pytest.mark.mpi(min_size=3)
def test_a_quorum_of_all_has_the_bits_of_a_synchronous_store(options: dict[str, Any], pushes: int) -> None:
    """Also where workers push several times, behind one another, before they read."""
    workers = need(2, **options)

    def work(kv: KVStore) -> list[bytes]:
        values = keys(kv)
        if kv.type == "dist_sync":
            kv.update_optimizer(rescale=1 / workers)
        for number in range(3):
            for more in range(pushes):
                kv.push(list(values), [gradient(name, kv.rank, 10 + 10 * number + more) for name in values])
            exchange(kv, values, number)
        return [value.tobytes() for value in values.values()]

    plain = run("dist_sync", work, **options)
    assert run("dist_async", work, quorum=workers, grace_seconds=9, **options) == plain


@pytest.mark.parametrize("compression", [None, {"type": "fp16"}], ids=str)
@pytest.mark.mpi(min_size=3)
def test_a_worker_that_is_stopped_holds_nobody_up_and_what_it_gives_counts(compression: dict[str, Any] | None) -> None:
    """The last worker is stopped for three rounds of the others. Then it gives, late, before their fourth."""
    workers = need(2, servers=1)

    def work(kv: KVStore) -> None:
        values, last = keys(kv), workers - 1
        if compression is not None:
            kv.set_gradient_compression(compression)
            kv.barrier()
        if kv.rank == last:
            WORLD.send(os.getpid(), 0, TAG)
            WORLD.recv(source=0, tag=TAG)  # here it is stopped, and goes on
            exchange(kv, values, 1)
            for other in range(last):
                WORLD.send(None, other, TAG)
        else:
            if kv.rank == 0:
                process = WORLD.recv(source=last, tag=TAG)
                os.kill(process, signal.SIGSTOP)
            for number in (1, 2, 3):
                exchange(kv, values, number)
            if kv.rank == 0:
                os.kill(process, signal.SIGCONT)
                WORLD.send(None, last, TAG)
            WORLD.recv(source=last, tag=TAG)
            exchange(kv, values, 4)
        kv.barrier()
        kv.pull(list(values), list(values.values()))
        for name, value in values.items():
            expected = (np.arange(3) if name == "short" else np.linspace(-1, 1, SIZE)).astype(np.float64)
            for number in range(1, 5):
                here = [gradient(name, rank, number).astype(float) for rank in range(last)]
                weights = [1.0] * len(here)
                if number == 4:
                    here.append(gradient(name, last, 1).astype(float))
                    weights.append(1 / 4)
                expected -= 0.5 * sum(weight * one for weight, one in zip(weights, here)) / sum(weights)
            assert np.abs(value - expected).max() < (1e-5 if compression is None else 1e-2)

    run("dist_async", work, servers=1, quorum=workers - 1)


@pytest.mark.mpi(min_size=3)
def test_what_is_given_last_counts_though_nobody_else_comes() -> None:
    """One worker pushes three times and reads nothing, the others do nothing: a barrier closes its rounds."""
    workers = need(2, servers=1)

    def work(kv: KVStore) -> None:
        values = keys(kv)
        if kv.rank == 1:
            for number in range(3):
                kv.push("short", gradient("short", 1, number))
        kv.barrier()
        kv.pull("short", values["short"])
        total = sum(gradient("short", 1, number).astype(float) for number in range(3))
        assert np.abs(values["short"] - (np.arange(3) - 0.5 * total)).max() < 1e-5
        assert kv.pull("short", values["short"], newer_than=-1) == 3

    run("dist_async", work, servers=1, quorum=workers)


@pytest.mark.mpi(min_size=2)
def test_pushes_without_a_pull_are_rounds_of_their_own() -> None:
    """One worker is the quorum, and pushes ten times before it reads."""
    need(1, servers=1)

    def work(kv: KVStore) -> None:
        values = keys(kv)
        if kv.rank == 0:
            for number in range(10):
                kv.push("long", gradient("long", 0, number))
            kv.pull("long", values["long"])
            total = sum(gradient("long", 0, number).astype(float) for number in range(10))
            assert np.abs(values["long"] - (np.linspace(-1, 1, SIZE) - 0.5 * total)).max() < 1e-4
        kv.barrier()

    run("dist_async", work, servers=1, quorum=1)


@pytest.mark.mpi(min_size=5)
def test_clients_of_several_workers_count_as_one() -> None:
    need(4, servers=1)
    workers = (WORLD.size - 1) // 2 * 2

    def work(kv: KVStore) -> None:
        values = keys(kv)
        exchange(kv, values, 0)
        clients = [range(*client) for client in kv.layout.clients]
        sums = [sum(gradient("long", rank, 0).astype(float) for rank in client) for client in clients]
        expected = np.linspace(-1, 1, SIZE) - 0.5 * sum(sums) / len(sums)
        assert np.abs(values["long"] - expected).max() < 1e-5

    for masters in ("one", "all"):
        run("mpi_async", work, servers=WORLD.size - workers, clients=2, masters=masters, quorum=2)
