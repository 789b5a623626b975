"""Row-sparse pushes and pulls are exact in every kind of store, and move only the rows that are named."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from mpips.store.keys.row_sparse import EmptyPush
from tests.choice import once
from tests.mpi.mpips.support import WORLD, need, run
from tests.mpi.sizes import either_mpi

STORES = [
    ("local", {}),
    ("dist_sync", {"servers": 0}),
    ("mpi_sync", {"servers": 0, "clients": 1}),
    ("dist_async", {"servers": 1}),
    ("dist_async", {"servers": 2, "shared_memory": False}),
    ("mpi_async", {"servers": 1, "clients": 2, "masters": "all"}),
    ("mpi_async", {"servers": 1, "clients": 1, "shared_memory": False}),
]
STORES += [
    (kind, {"servers": servers, "shared_memory": shared_memory} | options)
    for servers, shared_memory, (kind, options) in itertools.product(
        (1, 2, 3),
        (True, False),
        [("dist_sync", {}), ("mpi_sync", {"clients": 2}), ("mpi_sync", {"clients": 1, "masters": "all"})],
    )
]
SHAPE = (600, 6)


def gradient(repeat, worker):
    """A few rows, some of them twice; none in one repeat."""
    rows = np.random.default_rng(100 * repeat + worker).integers(0, SHAPE[0], 9 if repeat != 2 else 0)
    return mpips.RowSparse(rows, np.full((len(rows), 6), worker + 1, np.float32), SHAPE)


@either_mpi
@pytest.mark.parametrize("kind, options", STORES)
def test_rows_add_up_exactly(kind, options):
    need(**options)

    def body(kv):
        kv.init("e", np.zeros(SHAPE, np.float32))
        kv.set_optimizer("add")
        expected = np.zeros(SHAPE, np.float32)
        for repeat in range(4):
            for worker in range(kv.num_workers):
                expected += gradient(repeat, worker).to_dense()
            kv.push("e", gradient(repeat, kv.rank))
            if kv.type.endswith("_async"):
                kv.barrier()
            for ids in (np.array([3, 599, 3, kv.rank]), np.array([], int), np.arange(600)[:: -1 - kv.rank]):
                out = np.full((len(ids), 6), -1, np.float32)
                kv.row_sparse_pull("e", out, row_ids=ids)
                assert (out == expected[ids]).all()
            kv.barrier()
        out = np.empty(SHAPE, np.float32)
        kv.pull("e", out)
        assert (out == expected).all()

    run(kind, body, **{"big_array": 100, **options})


@pytest.mark.parametrize(
    "kind, options",
    [
        ("local", {}),
        ("dist_sync", {"servers": 0}),
        ("dist_sync", {"servers": 1}),
        ("dist_sync", {"servers": 1, "shared_memory": False}),
        ("mpi_sync", {"servers": 1, "clients": 1}),
    ],
)
def test_a_row_that_nobody_pushes_keeps_its_value_and_its_momentum(kind, options):
    n = 1 if kind == "local" else need(**options)

    def body(kv):
        kv.init("e", np.zeros(SHAPE, np.float32))
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        for row in (3, 4, 3):
            kv.push("e", mpips.RowSparse(np.array([row]), np.full((1, 6), -1, np.float32), SHAPE))
        out = np.empty((3, 6), np.float32)
        kv.row_sparse_pull("e", out, row_ids=np.array([3, 4, 5]))
        assert (out[0] == 2.5 * n).all() and (out[1] == n).all() and (out[2] == 0).all(), out

    run(kind, body, **options)


@pytest.mark.parametrize(
    "kind, options",
    [
        ("mpi_sync", {"servers": 1, "clients": 1, "masters": "all"}),
        ("dist_sync", {"servers": 2, "big_array": 100}),
    ],
)
def test_of_a_key_that_travels_whole_momentum_moves_rows_that_did_not_come(kind, options):
    n = need(2 if kind == "mpi_sync" else 1, **options)

    def body(kv):
        kv.init("e", np.zeros((7, 1001), np.float32))  # two to six workers cut seven rows within rows
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        for row in (0, 1):
            kv.push("e", mpips.RowSparse(np.array([row]), np.full((1, 1001), -1, np.float32), (7, 1001)))
        kv.pull("e", out := np.empty((7, 1001), np.float32))
        assert (out[0] == 1.5 * n).all() and (out[1] == n).all() and not out[2:].any(), out

    run(kind, body, **options)


class Counting(MPI.Intracomm):
    """A communicator that counts the bytes that this process sends to others through it and what is made of it."""

    sent = 0

    def Isend(self, buf, *args, **options):
        data = buf[0] if isinstance(buf, (list, tuple)) else buf
        Counting.sent += memoryview(data).nbytes
        return super().Isend(buf, *args, **options)

    def Iallgatherv(self, sendbuf, *args, **options):
        Counting.sent += memoryview(sendbuf).nbytes * (self.size - 1)
        return super().Iallgatherv(sendbuf, *args, **options)

    def Split(self, color=0, key=0):
        part = super().Split(color, key)
        return Counting(part) if part else part


@either_mpi
@once(
    **{"kind, servers": [("dist_sync", 1), ("mpi_sync", 1), ("mpi_sync", 0), ("dist_async", 2)]},
    masters=["one", "all"],
)
def test_bytes_grow_with_the_rows_and_not_with_the_table(kind, servers, masters):
    options = {"servers": servers, "shared_memory": False, "masters": masters}
    need(2, **options)
    shape, named = (20_000, 64), 50  # 5 MB
    before = []

    def body(kv):
        kv.init("e", np.zeros(shape, np.float32))
        kv.set_optimizer("add")
        kv.barrier()
        before.append(Counting.sent)
        rows = np.arange(named) * 397 + kv.rank
        kv.push("e", mpips.RowSparse(rows, np.ones((named, 64), np.float32), shape))
        kv.barrier()
        out = np.empty((named, 64), np.float32)
        kv.row_sparse_pull("e", out, row_ids=rows)
        assert (out == 1).all()

    Counting.sent = 0
    run(kind, body, comm=Counting(WORLD), **options)
    sent = np.array([Counting.sent - sum(before)])
    WORLD.Allreduce(MPI.IN_PLACE, sent)
    table = shape[0] * shape[1] * 4
    moved = WORLD.size * WORLD.size * named * (64 * 4 + 8)  # every row to everybody
    assert sent[0] < moved + 200_000 < table, (sent[0], moved, table)


@either_mpi
@pytest.mark.parametrize("servers", [1, 2])
def test_sorted_rows_of_many_messages_add_up_exactly(servers):
    """More rows than one message holds, in order, so that the server reads them where they arrived."""
    need(2, servers=servers)
    shape = (5000, 8)

    def body(kv):
        kv.init("e", np.zeros(shape, np.float32))
        for repeat in range(6):
            random = np.random.default_rng(repeat)
            pushes = [np.sort(random.choice(shape[0], 400, replace=False)) for _ in range(kv.num_workers)]
            values = [random.integers(-3, 4, (400, 8)).astype(np.float32) for _ in range(kv.num_workers)]
            kv.push("e", mpips.RowSparse(pushes[kv.rank], values[kv.rank], shape))
            kv.pull("e", out := np.empty(shape, np.float32))
            expected = np.zeros(shape, np.float32)
            for rows, value in zip(pushes, values):
                expected[rows] += value
            assert (out == expected).all(), (repeat, int((out != expected).sum()))

    run("dist_sync", body, servers=servers, shared_memory=False, chunk_bytes=4096, chunks_in_flight=1)


@pytest.mark.parametrize("shape", [(2,), (2, 3)])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_fewer_rows_than_members_and_servers(shared_memory, shape):
    """Some members own nothing of what a server keeps."""
    options = {"servers": 2, "masters": "all", "clients": 1, "big_array": 2, "shared_memory": shared_memory}
    need(2, **options)

    def body(kv):
        kv.init("e", np.zeros(shape))
        for step in range(1, 3):
            rows = np.arange(shape[0])[kv.rank % 2 :]
            kv.push("e", mpips.RowSparse(rows, np.full((len(rows), *shape[1:]), float(step)), shape))
            out = np.empty(shape)
            kv.row_sparse_pull("e", out, row_ids=np.arange(shape[0]))
            assert (out[0] == step * -(-kv.num_workers // 2)).all(), out
            assert (out[1:] == step * kv.num_workers).all(), out

    run("mpi_sync", body, **options)


@pytest.mark.parametrize("shape", [(), (7, 1001), (0, 3)])
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dist_sync", {"servers": 1, "big_array": 100}),
        ("dist_sync", {"servers": 1, "shared_memory": False}),
        ("mpi_sync", {"servers": 1, "clients": 1, "masters": "all"}),
        ("mpi_async", {"servers": 1, "clients": 1, "shared_memory": False}),
    ],
)
def test_a_push_of_nothing_counts_as_a_round_and_changes_nothing(kind, options, shape):
    need(**options)

    def body(kv):
        kv.init("e", np.zeros(shape, np.float32))
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.push("e", np.full(shape, -1, np.float32))
        kv.barrier()
        for _ in range(2):
            kv.push("e", EmptyPush(shape, np.float32))
        kv.barrier()
        kv.pull("e", before := np.empty(shape, np.float32))
        assert (before == kv.num_workers).all(), before
        kv.push("e", np.zeros(shape, np.float32))
        kv.barrier()
        kv.pull("e", after := np.empty(shape, np.float32))
        assert (after == 1.5 * before).all(), after

    run(kind, body, **options)


@pytest.mark.parametrize("masters", ["one", "all"])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_member_that_pushes_nothing_itself_reads_after_the_pushes_of_its_client(shared_memory, masters):
    options = {"servers": 1, "clients": 1, "masters": masters, "shared_memory": shared_memory}
    need(2, **options)

    def body(kv):
        kv.init("e", np.zeros(SHAPE, np.float32))
        kv.set_optimizer("add")
        rows = np.arange(SHAPE[0])
        for step in range(1, 21):
            mine = rows[kv.rank :: kv.num_workers]
            kv.push("e", mpips.RowSparse(mine, np.ones((len(mine), 6), np.float32), SHAPE))
            out = np.empty((4, 6), np.float32)
            kv.row_sparse_pull("e", out, row_ids=[0, 1, 598, 599])
            assert (out == step).all(), (step, out)

    run("mpi_async", body, **options)


@once(
    **{
        "kind, options": [
            ("dist_sync", {"servers": 0}),
            ("dist_sync", {"servers": 1, "shared_memory": False}),
            ("dist_async", {"servers": 1}),
            ("mpi_sync", {"servers": 1, "masters": "all"}),
            ("mpi_sync", {"servers": 1, "shared_memory": False}),
        ]
    },
    shape=[(3, 0), (0, 4)],
)
def test_rows_without_elements(kind, options, shape):
    need(**options)

    def body(kv):
        kv.init(["e", "w"], [np.zeros(shape), np.zeros(2)])
        kv.set_optimizer("add")
        rows = np.arange(shape[0])
        for _ in range(2):
            kv.push("e", mpips.RowSparse(rows, np.zeros(shape), shape))
            kv.row_sparse_pull("e", np.zeros((2 * len(rows), *shape[1:])), row_ids=np.tile(rows, 2))
        kv.push("w", np.ones(2))
        kv.barrier()
        kv.pull("w", out := np.zeros(2))
        assert (out == kv.num_workers).all()

    run(kind, body, **options)
