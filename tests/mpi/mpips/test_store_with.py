"""A store in a `with` statement closes at its end, on all workers, however it ends; copies of it are refused."""

import copy
import os
import pickle
import time
from functools import partial

import numpy as np
import pytest

import collectives
import mpips
from mpips.mlp import MLP
from tests.mpi.mpips.faults import workers
from tests.mpi.mpips.support import WORLD, failure, need
from tests.mpi.sizes import only_on


@only_on(1, 2, 3)
@pytest.mark.parametrize("servers", [0, 1])
def test_with_closes_at_its_end(servers: int) -> None:
    need(1, servers=servers)
    try:
        with mpips.create("dist_sync", comm=WORLD, servers=servers) as kv:
            kv.init("w", np.zeros(2))
            kv.pushpull("w", np.ones(2), np.zeros(2))
    except SystemExit:
        return
    assert "the store is closed" in failure(kv.barrier)


@only_on(2, 3)
@pytest.mark.parametrize("servers", [0, 1])
def test_an_error_in_with_is_heard_by_all(servers: int) -> None:
    need(2, servers=servers)
    begun = time.monotonic()

    def program():
        with mpips.create("dist_sync", comm=WORLD, servers=servers) as kv:
            w = np.zeros(2)
            kv.init("w", w)
            for step in range(3):
                if step == 1 and kv.rank == 1:
                    raise ValueError("no column price")
                kv.pushpull("w", w)

    try:
        said = failure(program)
    except SystemExit:
        return
    every = workers(servers).allgather(said)
    assert every[1] == "no column price" and "no column price" in every[0], every
    assert "rank 1 has given up" in every[0], every
    assert time.monotonic() - begun < 30


@only_on(1, 2)
def test_copies_are_refused_by_a_sentence() -> None:
    with mpips.create("mpi_sync", comm=WORLD, servers=0) as kv:
        kv.init("w", np.zeros(2))
        trainer = mpips.Trainer(MLP((2, 4, 2), loss="softmax"), kv, "sgd", learning_rate=0.1)
        plan = collectives.plan("allreduce", np.zeros(2), WORLD)
        handle = kv.ipush("w", np.zeros(2))
        handle.wait()
        things = (kv, trainer, plan, handle)
        said = [failure(partial(call, it)) for it in things for call in (copy.copy, copy.deepcopy, pickle.dumps)]
    assert all("cannot be copied or pickled: they hold memory and communicators" in one for one in said), said


@only_on(2, 3)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_a_fork_is_refused_and_disturbs_nothing(kind: str) -> None:
    """As a worker of a DataLoader, whose memory is the rank's."""
    need(1, servers=1)
    try:
        with mpips.create(kind, comm=WORLD, servers=1) as kv:
            kv.init("w", np.zeros(2))
            kv.set_optimizer("sgd", learning_rate=1.0)
            table, ids = kv.table("t", 2, init=mpips.uniform(0), learning_rate=1.0), np.arange(3)
            ones, out = -np.ones((3, 2), np.float32), np.zeros(2)
            calls = {
                "pull": lambda: table.pull(ids),
                "ipull": lambda: table.ipull(ids).wait(),
                "stats": table.stats,
                "push": lambda: table.push(ids, ones),
                "pushpull": lambda: kv.pushpull("w", -np.ones(2), out),
                "barrier": kv.barrier,
                "init": lambda: kv.init("v", out),
            }
            kv.pushpull("w", -np.ones(2), out)
            table.push(ids, ones)
            read, write = os.pipe()
            if not (child := os.fork()):
                try:
                    wrong = [name for name, call in calls.items() if f"a fork of rank {kv.rank}" not in failure(call)]
                    kv.close()
                    os.write(write, f"refused, but {wrong}".encode())
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            assert os.read(read, 1000) == b"refused, but []"
            for end in (read, write):
                os.close(end)
            kv.pushpull("w", -np.ones(2), out)
            table.push(ids, ones)
            kv.barrier()
            kv.pull("w", out)
            kv.layout.workers.Barrier()
            assert (out == 2 * kv.num_workers).all() if kind == "dist_async" else out.any()
            table.stats()
            kv.layout.workers.Barrier()
            assert (table.pull(ids) == 2 * kv.num_workers).all()
    except SystemExit:
        return
