"""Tables hold what a serial dictionary of rows holds, bit for bit, and refuse bad input by a sentence."""

from __future__ import annotations

import copy
import itertools
import os
import threading
import time
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import pytest

import mpips
from collectives.fabric.tasks import Task
from collectives.kernels import engine
from mpips.tables import eviction, index, initial, messages, places
from mpips.tables.table import push_together
from tests.mpi.mpips.reference_table import UPDATES, ReferenceTable, ServingCopy
from tests.mpi.mpips.support import WORLD, failure, meet, need, run
from tests.mpi.sizes import either_mpi

SERVERS = [
    {"servers": servers, "shared_memory": shared} for servers, shared in itertools.product((1, 2, 3), (True, False))
]
EDGES = np.array([0, -1, 1, 2**63 - 1, -(2**63), 2**62, -(2**40)], np.int64)
LIVES: list[dict[str, Any]] = [
    {"evict": 2},
    {"limit": 11},
    {"admit": mpips.seen(2), "evict": 3, "limit": 20},
    {"admit": mpips.seen(3, 15)},
    {"admit": mpips.chance(0.4), "limit": 25},
    {"admit": mpips.seen(1, 4)},
]
# Rows may also go by count, by score and by the clock.
ORDERS: list[dict[str, Any]] = [
    {"evict_by": "count", "limit": 11},
    {"evict_by": "score", "limit": 11},
    {"evict_after": 2},
    {"evict_by": "count", "limit": 20, "admit": mpips.seen(2), "evict": 4, "evict_after": 5},
    {"evict_by": "score", "limit": 14, "admit": mpips.chance(0.6), "evict_after": 4},
]
SMALL_RATE = {"learning_rate": 0.1}


def batch(repeat: int, worker: int, dim: int, dtype: Any) -> tuple[Any, Any]:
    """Ids with repeats, some shared by all workers, some of nobody else; nothing in one repeat of one worker."""
    random = np.random.default_rng(100 * repeat + worker)
    shape = (0,) if (repeat, worker) == (2, 0) else (6, 5)
    ids = random.integers(-20, 20, shape) * np.where(random.random(shape) < 0.5, 1, 10**15)
    ids.reshape(-1)[:3] = EDGES[(repeat + worker) % len(EDGES)]
    return ids, random.standard_normal((*shape, dim)).astype(dtype)


@either_mpi
@pytest.mark.parametrize("options", SERVERS)
@pytest.mark.parametrize("optimizer", sorted(UPDATES))
def test_a_table_equals_a_serial_dictionary(options: dict[str, Any], optimizer: str) -> None:
    need(**options)
    dim, dtype = (5, "float32") if optimizer != "adam" else (3, "float64")

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("users", dim, dtype, mpips.uniform(0.5), optimizer, seed=3, **SMALL_RATE)
        expected = ReferenceTable("users", dim, dtype, 0.5, optimizer, seed=3)
        for repeat in range(5):
            batches = [batch(repeat, worker, dim, dtype) for worker in range(kv.num_workers)]
            expected.push(batches)
            every = [np.concatenate([ids.reshape(-1), EDGES, EDGES[::-1] // (repeat + 2)]) for ids, _ in batches]
            wanted = every[kv.rank]
            if repeat % 2:
                table.push(*batches[kv.rank])
                out = np.full((len(wanted), dim), np.nan, dtype)
                assert table.pull(wanted, out) is out
            else:
                out = table.pushpull(*batches[kv.rank])
                assert out.tobytes() == expected.pull(batches[kv.rank][0]).tobytes()
                out = table.pull(wanted)
            assert out.tobytes() == expected.pull(wanted).tobytes(), repeat
        kv.barrier()
        assert table.rows == len(expected.rows)
        assert table.stats()["updates"] == 5

    run("dist_sync", body, **options)


@mpips.register_init
def fifths(ids: Any) -> Any:
    return ids[:, None] % 1000 / 5 + np.arange(5)


# (optimizer, its hyperparameters, first values)
RULES: list[tuple[str, dict[str, Any], Any]] = [
    ("sgd", {"weight_decay": 0.5, "clipnorm": 1.0}, mpips.normal(0.5, 0.1)),
    ("adagrad", {"weight_decay": 0.5}, mpips.constant(-0.5)),
    ("row_adagrad", {"clipnorm": 0.5}, mpips.truncated_normal(std=2)),
    ("adam", {"weight_decay": 0.1, "clipnorm": 2.0}, fifths),
    ("row_adam", {"weight_decay": 0.1, "clipnorm": 2.0}, mpips.normal()),
    ("ftrl", {"l1": 0.2, "l2": 0.1, "beta": 0.5, "clipnorm": 3.0}, fifths),
]


@either_mpi
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dist_sync", {"servers": 1}),
        ("dist_sync", {"servers": 2, "shared_memory": False}),
        ("mpi_sync", {"servers": 1, "clients": 1}),
        ("dist_async", {"servers": 2}),
        ("mpi_async", {"servers": 1, "clients": 1, "staleness": 1}),
    ],
)
def test_rows_begin_decay_and_are_clipped_as_asked(kind: str, options: dict[str, Any]) -> None:
    """Each worker pushes to ids of its own, so that its rows are those of a dictionary in every kind of store."""
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        for number, (optimizer, numbers, init) in enumerate(RULES):
            table = kv.table(f"t{number}", 5, init=init, optimizer=optimizer, **SMALL_RATE, **numbers)
            expected = ReferenceTable(table.name, 5, "float32", init, optimizer, **SMALL_RATE, **numbers)
            random = np.random.default_rng([number, kv.rank])
            for _ in range(4):
                ids = random.integers(0, 30, 40) * 1000 + kv.rank
                gradients = random.standard_normal((40, 5)).astype(np.float32)
                expected.push([(ids, gradients)])
                table.push(ids, gradients)
                wanted = np.concatenate([ids, EDGES * 1000 + kv.rank])
                assert table.pull(wanted).tobytes() == expected.pull(wanted).tobytes(), (optimizer, init)
            kv.barrier()

    run(kind, body, **options)


@either_mpi
@pytest.mark.parametrize("options", [{"servers": 1}, {"servers": 2}, {"servers": 3, "shared_memory": False}])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_half_rows_equal_a_serial_dictionary(options: dict[str, Any], dtype: str, rounding: str) -> None:
    need(**options)
    kind = {"dim": 5, "dtype": dtype, "rounding": rounding, **SMALL_RATE}

    def body(kv: mpips.KVStore) -> None:
        rules = [{"name": name, "optimizer": name, "init": init, **numbers, **kind} for name, numbers, init in RULES]
        tables, every = [kv.table(**rule) for rule in rules], [ReferenceTable(**rule) for rule in rules]
        for repeat in range(6):
            batches = [batch(repeat, worker, 5, dtype) for worker in range(kv.num_workers)]
            push_together([(table, *batches[kv.rank]) for table in tables])
            wanted = np.concatenate([ids.reshape(-1) for ids, _ in batches] + [EDGES])
            for table, expected in zip(tables, every):
                expected.push(batches)
                assert (found := table.pull(wanted)).dtype == dtype
                assert found.tobytes() == expected.pull(wanted).tobytes(), (table, repeat)
        kv.barrier()
        # values, state, id, age, and what an index of few rows has
        sgd = tables[0]
        assert sgd.stats()["bytes"] - (2 * 5 + 8 + 4) * sgd.rows <= 40 * sgd.rows + 32768 * kv.layout.num_servers

    run("dist_sync", body, **options)


@either_mpi
@pytest.mark.parametrize(
    "kind, options",
    [
        ("mpi_sync", {"servers": 1, "clients": 1}),
        ("mpi_sync", {"servers": 1, "clients": 2}),
        ("dist_async", {"servers": 1}),
        ("mpi_async", {"servers": 1, "clients": 1}),
        ("dist_async", {"servers": 2, "staleness": 1}),
        ("dist_async", {"servers": 1, "staleness": 0}),
    ],
)
def test_all_kinds_add_up_whole_numbers(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        tables = [kv.table(f"of {dtype}", 4, dtype, mpips.uniform(0), learning_rate=1) for dtype in messages.DTYPES]
        ids = np.array([7, -kv.rank - 1, 7])
        for step in range(6):
            for table in tables:
                table.push(ids, np.full((3, 4), -1, table.dtype))
                assert (table.pull(ids[1:2]) == step + 1).all()  # after this worker's own pushes
        kv.barrier()
        if kv.type.endswith("_async"):
            meet(kv)
        for table in tables:
            assert (table.pull(np.array([7])) == 12 * kv.num_workers).all()

    run(kind, body, **options)


@either_mpi
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dist_sync", {"servers": 1}),
        ("dist_sync", {"servers": 2, "shared_memory": False}),
        ("mpi_sync", {"servers": 1, "clients": 1}),
    ],
)
def test_ipull_reads_what_pull_would_have_read(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, init=mpips.uniform(0), learning_rate=1.0)
        ids, ones, out = np.array([3, -1, 3]), -np.ones((3, 2), np.float32), np.empty((3, 2), np.float32)
        for step in range(1, 6):
            table.push(ids, ones)
            handles = table.ipull(ids), table.ipull(ids[::-1], out)
            if step % 2:  # the push waits for both, wherever the others are
                table.push(ids, ones * 0)
            rows = handles[0].wait()
            assert handles[1].wait() is out
            assert (rows[:, 0] == kv.num_workers * step * np.array([2, 1, 2])).all()
            assert (out == rows).all()
        assert "int64" in failure(lambda: table.ipull(np.zeros(1)))
        assert (table.pushes, table.contributors, table.synchronous) == (8, kv.num_workers, True)

    run(kind, body, **options)


@pytest.mark.core(2)
@either_mpi
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dist_sync", {"servers": 1}),
        ("dist_sync", {"servers": 2, "shared_memory": False}),
        ("dist_async", {"servers": 1}),
    ],
)
def test_tables_are_pushed_together(kind: str, options: dict[str, Any]) -> None:
    """More tables than a ring has slots; a bad argument of the last sends none."""
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        tables = [kv.table(f"t{number}", 2, init=mpips.uniform(0), learning_rate=1.0) for number in range(300)]
        ids, ones = np.array([3, -1, 3]), -np.ones((3, 2), np.float32)
        for step in range(1, 4):
            tables[5].ipull(ids)
            push_together([(table, ids, (number + 1) * ones) for number, table in enumerate(tables)])
            assert "int64" in failure(lambda: push_together([(tables[0], ids, ones), (tables[1], [3], ones)]))
            assert {table.pushes for table in tables} == {step}
        meet(kv)
        for number, table in enumerate(tables):
            assert (table.pull(ids)[:, 0] == 3 * kv.num_workers * (number + 1) * np.array([2, 1, 2])).all()
        meet(kv)

    run(kind, body, **options)


def test_many_rows_are_found_again() -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, optimizer="sgd", learning_rate=1.0)
        ids = np.arange(40_000) * 7919 - 10**9
        first = np.concatenate([table.pull(part) for part in np.array_split(ids, 13)])
        assert table.rows == 0
        kv.barrier()
        for part in np.array_split(ids, 13):
            table.push(part, np.zeros((len(part), 2), np.float32))
        assert table.pull(ids).tobytes() == first.tobytes()
        assert table.rows == len(ids)
        assert table.stats()["bytes"] <= (2 * 4 + 8 + 4 + 24) * len(ids) + 16384

    run("dist_sync", body, servers=1)


@either_mpi
@pytest.mark.parametrize("options", SERVERS)
@pytest.mark.parametrize("life", LIVES)
def test_rows_come_and_go_as_in_a_dictionary(options: dict[str, Any], life: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("users", 3, "float64", mpips.uniform(0.5), "adam", **life, **SMALL_RATE)
        expected = ReferenceTable("users", 3, "float64", 0.5, "adam", **life, servers=options["servers"])
        for repeat in range(9):
            batches = [batch(repeat, worker, 3, "float64") for worker in range(kv.num_workers)]
            expected.push(batches)
            table.push(*batches[kv.rank])
            wanted = np.concatenate([ids.reshape(-1) for ids, _ in batches] + [np.arange(-20, 20)])
            assert table.pull(wanted).tobytes() == expected.pull(wanted).tobytes(), repeat
            stats = table.stats()
            assert (stats["rows"], stats["evicted"]) == (len(expected.rows), len(expected.evicted))
            assert (stats["refused"], stats["counted"]) == (expected.refused, len(expected.counts))
            kv.barrier()

    run("dist_sync", body, **options)


@either_mpi
@pytest.mark.parametrize("options", SERVERS)
@pytest.mark.parametrize("life", ORDERS)
def test_rows_are_set_removed_and_dropped_as_in_a_dictionary(
    options: dict[str, Any], life: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("users", 3, "float64", mpips.uniform(0.5), "adam", **life, **SMALL_RATE)
        expected = ReferenceTable("users", 3, "float64", 0.5, "adam", **life, servers=options["servers"])
        for repeat, call in enumerate(["push", "set", "push", "remove", "push", "set", "remove", "push", "push"]):
            now = 10**15 + (repeat - 3 * (repeat == 4)) * 10**6  # set back once
            clock = now if kv.rank == 0 else 10**17  # of worker 0 alone
            monkeypatch.setattr(eviction, "now", lambda clock=clock: clock)
            batches: list[Any] = [batch(repeat, worker, 3, "float64") for worker in range(kv.num_workers)]
            if expected.by_score:
                batches = [(ids, rows, rows[..., 0].round()) for ids, rows in batches]
            if call == "remove":
                batches = [ids[:2] for ids, *_ in batches]
                table.remove(batches[kv.rank])
                expected.remove(batches, now)
            else:
                getattr(table, call)(*batches[kv.rank])
                getattr(expected, call)(batches, now)
            wanted = np.concatenate([EDGES, np.arange(-20, 20), np.arange(-20, 20) * 10**15])
            assert table.pull(wanted).tobytes() == expected.pull(wanted).tobytes(), repeat
            assert table.exists(wanted.reshape(-1, 29)).reshape(-1).tolist() == [
                one in expected.rows for one in wanted.tolist()
            ]
            stats = table.stats()
            assert [stats[word] for word in ("rows", "evicted", "removed", "refused", "counted")] == [
                len(expected.rows),
                len(expected.evicted),
                expected.removed,
                expected.refused,
                len(expected.counts),
            ]
            assert [
                stats[word] for word in ("evicted_unused", "evicted_by_time", "evicted_by_limit")
            ] == expected.reasons
            assert table.pushes == repeat + 1
            kv.barrier()
        assert expected.removed and expected.evicted

    run("dist_sync", body, **options)


@either_mpi
@pytest.mark.parametrize(
    "kind, options",
    [
        ("mpi_sync", {"servers": 1, "clients": 1}),
        ("dist_async", {"servers": 2}),
        ("mpi_async", {"servers": 1, "clients": 1}),
        ("dist_async", {"servers": 1, "staleness": 0}),
    ],
)
def test_all_kinds_set_and_remove_rows_in_the_order_of_calls(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, init=mpips.uniform(0), learning_rate=1.0, evict_by="count", limit=1000)
        ids, row = np.array([kv.rank, -kv.rank - 1, kv.rank]), np.ones((3, 2), np.float32)
        for step in range(1, 5):  # of ids of this worker alone
            table.set(ids, row * np.array([[9], [7], [step]], np.float32))  # the last of an id counts
            table.push(ids[:2], -row[:2])
            assert (table.pull(ids) == np.array([[step + 1], [8], [step + 1]])).all()
            table.remove(ids[1:2])
            assert table.exists(ids).tolist() == [True, False, True]
            assert (table.pull(ids[1:2]) == 0).all()
        meet(kv)
        assert (table.rows, table.stats()["removed"]) == (kv.num_workers, 4 * kv.num_workers)
        meet(kv)

    run(kind, body, **options)


def test_orders_that_cannot_be_are_refused() -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, init=mpips.uniform(0), limit=9)
        best = kv.table("b", 2, init=mpips.uniform(0), limit=9, evict_by="score")
        ids, rows, scores = np.arange(2), np.ones((2, 2), np.float32), np.zeros(2)
        calls = {
            "push of table 'b': evict_by='score' needs a score for each id: pass scores=": lambda: best.push(ids, rows),
            "set of table 'b': evict_by='score' needs a score for each id": lambda: best.set(ids, rows),
            "push of table 't': the table keeps no scores": lambda: table.push(ids, rows, scores),
            "push of table 'b': scores have shape (1,), and ids of shape (2,) need (2,): give one for each id": (
                lambda: best.push(ids, rows, scores[:1])
            ),
            "push of table 'b': scores have dtype int64, and need float64: pass scores.astype(numpy.float64)": (
                lambda: best.push(ids, rows, scores.astype(int))
            ),
            "set of table 'b': scores are of type list: pass numpy.array(scores, numpy.float64)": (
                lambda: best.set(ids, rows, [0.5, 1.0])
            ),
            "pushpull of table 'b': scores hold 1 NaN among 2, the first of id 1, and NaN has no place in an order": (
                lambda: best.pushpull(ids, rows, None, np.array([0, np.nan]))
            ),
            "set of table 't': values has dtype float64, and the table float32": lambda: table.set(
                ids, rows.astype(float)
            ),
            "remove of table 't': ids are of type list": lambda: table.remove([1]),
            "exists of table 't': ids have dtype float64, and need int64": lambda: table.exists(scores),
            "evict_by='score' says which rows limit= drops first: give limit, too": lambda: kv.table(
                "u", 3, evict_by="score"
            ),
            "evict_by='size': give 'age', 'count' or 'score'": lambda: kv.table("u", 3, limit=9, evict_by="size"),
            "evict_after='soon': give a time above 0, such as '7d'": lambda: kv.table("u", 3, evict_after="soon"),
        }
        for sentence, call in calls.items():
            assert sentence in failure(call), sentence
        assert (table.pushes, best.pushes, table.rows, best.rows) == (0, 0, 0, 0)

    run("dist_sync", body, servers=1)


def test_all_ranks_hear_of_different_calls_in_one_round() -> None:
    need(workers=2, servers=1)

    def body(kv: mpips.KVStore) -> str:
        table, ids = kv.table("t", 2), np.arange(2)
        try:
            for _ in range(3):
                table.remove(ids) if kv.rank else table.set(ids, np.ones((2, 2), np.float32))
                table.pull(ids)
        except mpips.StoreError as error:
            return str(error)
        return ""

    try:
        said = run("dist_sync", body, servers=1)
    except mpips.StoreError as error:  # of the close
        said = str(error)
    if said is not None:
        assert "table 't': round 1 is a set on rank 0 and a remove on rank 1: make the same call on all workers" in said


@either_mpi
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dist_sync", {"servers": 1}),
        ("dist_sync", {"servers": 2}),
        ("mpi_sync", {"servers": 1, "clients": 1}),
        ("dist_sync", {"servers": 1, "shared_memory": False}),
    ],
)
@pytest.mark.parametrize("life", [{}, *LIVES[:2]])
def test_rows_are_read_in_place(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any, kind: str, options: dict[str, Any], life: dict[str, Any]
) -> None:
    need(**options)
    path = WORLD.bcast(str(tmp_path_factory.mktemp("table") / "users.safetensors"))
    monkeypatch.setattr(index, "MOVED_AT_ONCE", 64)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("users", 3, "float64", mpips.uniform(0.5), "adam", **life, **SMALL_RATE)
        expected = ReferenceTable("users", 3, "float64", 0.5, "adam", **life, servers=options["servers"])
        table.pull(EDGES)
        engine.load_all()
        kv.barrier()
        in_place = engine.status().engine == "numba" and "shared_memory" not in options
        for repeat in range(12):
            batches = [batch(repeat, worker, 3, "float64") for worker in range(kv.num_workers)]
            expected.push(batches)
            table.push(*batches[kv.rank])
            wanted = np.concatenate([ids.reshape(-1) for ids, _ in batches] + [np.arange(-20, 20)])
            with monkeypatch.context() as patch:
                if in_place:  # another request would be refused
                    patch.delattr(messages, "PullRows")
                assert table.pull(wanted).tobytes() == expected.pull(wanted).tobytes(), repeat
            if repeat == 5:
                table.save(path)
            if repeat == 6:
                before = table.pull(wanted)
                table.load(path)
                again = table.pull(wanted)
                table.push(*batches[kv.rank])
                assert table.pull(wanted).tobytes() == before.tobytes() != again.tobytes()

    run(kind, body, **options)


def test_a_schedule_counts_updates_of_the_table() -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        schedule = mpips.optimizers.StepDecay(1.0, every=1, factor=0.5)
        table = kv.table("t", 1, init=mpips.uniform(0), learning_rate=schedule)
        found = []
        for one in (1, 2, 1):
            mine = np.full(1, one, np.int64)
            found.append(float(table.pushpull(mine, np.full((1, 1), -1, np.float32))[0, 0]) / kv.num_workers)
        assert found == [1.0, 0.5, 1.25]

    run("dist_sync", body, servers=1)


@pytest.mark.parametrize("kind, servers", [("dist_sync", 1), ("dist_sync", 2), ("dist_async", 1)])
def test_a_learning_rate_changes_between_updates(kind: str, servers: int) -> None:
    need(servers=servers)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 1, init=mpips.uniform(0), learning_rate=1.0)
        ids, ones = np.arange(9), -np.ones((9, 1), np.float32)
        table.push(ids, ones)
        table.update_optimizer(learning_rate=0.5)
        assert "'t': optimizer 'sgd' has no argument momentum" in failure(lambda: table.update_optimizer(momentum=0.9))
        assert "give a number >= 0" in failure(lambda: table.update_optimizer(learning_rate=-1))
        if kv.num_workers > 1:
            said = failure(lambda: table.update_optimizer(learning_rate=0.1 if kv.rank else 0.2))
            assert "numbers" in said and "on rank" in said, said
        table.push(ids, ones)
        meet(kv)
        assert (table.pull(ids) == 1.5 * kv.num_workers).all()
        meet(kv)

    run(kind, body, servers=servers)


def test_a_change_of_one_number_leaves_those_that_were_changed_before() -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, init=mpips.uniform(0.5), optimizer="adagrad", learning_rate=1.0)
        expected = ReferenceTable("t", 2, "float32", 0.5, "adagrad", learning_rate=1.0)
        ids, ones = np.arange(9), np.ones((9, 2), np.float32)
        for numbers in ({"learning_rate": 0.25}, {"epsilon": 0.5}):
            table.update_optimizer(**numbers)
            expected.numbers |= numbers
            table.push(ids, ones)
            expected.push([(ids, ones)] * kv.num_workers)
        assert table.pull(ids).tobytes() == expected.pull(ids).tobytes()

    run("dist_sync", body, servers=1)


def test_bad_arguments_lose_nothing() -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        kv.init("key", np.zeros(3))
        table = kv.table("t", 3)
        before = table.pull(np.arange(5))
        good = np.zeros((2, 3), np.float32)
        calls = {
            "ids have dtype int32, and need int64": lambda: table.pull(np.zeros(2, np.int32)),
            "gradients has dtype float64, and the table float32: pass gradients.astype('float32')": lambda: table.push(
                np.arange(2), np.zeros((2, 3))
            ),
            "gradients is of type list, which is not an array in memory: pass numpy.asarray(gradients)": (
                lambda: table.push(np.arange(2), [[0.0, 0.0, 0.0]] * 2)  # type: ignore[arg-type]
            ),
            "gradients has shape (2, 3), and ids of shape (3,) need (3, 3)": lambda: table.push(np.arange(3), good),
            "out has shape (2, 3), and ids of shape (1, 2) need (1, 2, 3)": lambda: table.pull(
                np.arange(2)[None], good
            ),
            "a key has the name 'key'": lambda: kv.table("key", 3),
            "a table has the name 't'": lambda: kv.init("t", np.zeros(3)),
            "'t' was already made": lambda: kv.table("t", 3),
            "unknown optimizer 'rprop' of a table: the known ones are sgd,": lambda: kv.table(
                "u", 3, optimizer="rprop"
            ),
            "a table has no argument momentum: beside its own (dtype, init,": lambda: kv.table("u", 3, momentum=0.9),
            "evict=0: give at least 1 and less than 2**31": lambda: kv.table("u", 3, evict=0),
            "admit=3: give mpips.seen(times), mpips.chance(probability) or None": lambda: kv.table("u", 3, admit=3),  # type: ignore[arg-type]
            "seen(times=0): give a whole number from 1 on": lambda: mpips.seen(0),
            "chance(probability=1.5): give a number above 0 and up to 1": lambda: mpips.chance(1.5),
            "limit=1.5 is not a whole number": lambda: kv.table("u", 3, limit=1.5),  # type: ignore[arg-type]
            "is infinite in float32: give a smaller one": lambda: kv.table("u", 3, init=mpips.uniform(1e300)),
            "is infinite in float16: give a smaller one": lambda: kv.table("u", 3, "float16", mpips.uniform(1e5)),
            "give mpips.uniform, mpips.normal": lambda: kv.table("u", 3, init="ones"),  # type: ignore[arg-type]
            "put @mpips.register_init above it": lambda: kv.table("u", 3, init=np.zeros),
            "float64 of shape (1, 5) for 1 ids, the first 0, which need float32 of shape (1, 3)": lambda: kv.table(
                "u", 3, init=fifths
            ),
            "those of optimizer 'ftrl': learning_rate, beta, l1": lambda: kv.table(
                "u", 3, optimizer="ftrl", weight_decay=0.1
            ),
            "a table holds float16, bfloat16, float32, float64": lambda: kv.table("u", 3, "int8"),
            "rounding='up': give 'nearest' or 'stochastic'": lambda: kv.table("u", 3, "float16", rounding="up"),
            "is for rows of float16 or bfloat16, and these are float32": lambda: kv.table(
                "u", 3, rounding="stochastic"
            ),
            "table 'u': dtype='nope', and a table holds": lambda: kv.table("u", 3, "nope"),
            "ids are of type list: pass numpy.array(ids, numpy.int64)": lambda: table.pull([1, 2]),
            "ids have dtype >i8, and need int64": lambda: table.pull(np.zeros(2, ">i8")),
            "table 'u': dtype=None, and a table holds": lambda: kv.table("u", 3, None),
            r"table: name '\ud800' holds '\ud800', which UTF-8 has no bytes for": lambda: kv.table("\ud800", 3),
            "table 'u': RowSGD(learning_rate=nan): give a finite number": lambda: kv.table(
                "u", 3, learning_rate=float("nan")
            ),
            "table 't': RowSGD(learning_rate=-1.0): give a": lambda: table.update_optimizer(learning_rate=-1),
            "Table objects cannot be copied or pickled": lambda: copy.deepcopy(table),
        }
        for sentence, call in calls.items():
            assert sentence in failure(call), sentence
        assert table.pull(np.arange(5)).tobytes() == before.tobytes()
        assert kv.table("u", 3).pull(np.arange(1)).shape == (1, 3)

    run("dist_sync", body, servers=1)


def test_a_function_that_servers_do_not_know_is_refused_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are in `mpips.create` when the workers register it, as where a program registers too late."""
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        monkeypatch.setattr(initial, "_FUNCTIONS", {})

        @mpips.register_init
        def late(ids: Any) -> Any:
            return np.ones((len(ids), 3))

        said = failure(lambda: kv.table("t", 3, init=late))
        assert "by the function 'late', which is not known here: put @mpips.register_init above it" in said
        assert kv.table("t", 3, init=mpips.constant(2)).pull(np.arange(2)).tolist() == [[2] * 3] * 2

    run("dist_sync", body, servers=1)


@mpips.register_init
def of_positive_ids(ids: Any) -> Any:
    if ids.min() < 0:
        raise KeyError(int(ids.min()))
    return np.ones((len(ids), 3))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_function_that_raises_ends_the_generation_with_its_text(shared_memory: bool) -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 3, init=of_positive_ids, learning_rate=1.0)
        said = failure(lambda: table.pushpull(np.array([-2]), np.ones((1, 3), np.float32)))
        assert "table 't': the function 'of_positive_ids' of init failed for 1 ids, the first -2: KeyError: -2" in said
        kv.recover()
        assert table.pushpull(np.array([2]), np.ones((1, 3), np.float32)).tolist() == [[1.0 - kv.num_workers] * 3]

    run("dist_sync", body, servers=1, shared_memory=shared_memory)


def test_what_one_rank_asks_otherwise_all_hear() -> None:
    """Or that rank alone, where the others need not wait. Then all go on."""
    need(workers=2, servers=1)
    asked: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
        "table 'u': argument 'dim' is 3 on rank 0 and 4 on rank": ("table", {"dim": 3}, {"dim": 4}),
        "argument 'dtype' is float32 on rank 0 and float64": ("table", {}, {"dtype": "float64"}),
        "argument 'optimizer' is RowSGD(learning_rate=0.01,": ("table", {}, {"optimizer": "adam"}),
        "argument 'init' is mpips.uniform(": ("table", {}, {"init": mpips.uniform(0.5)}),
        "unknown optimizer 'rprop' of a table: the known ones are sgd,": ("table", {}, {"optimizer": "rprop"}),
        "a table has no argument momentum": ("table", {}, {"momentum": 0.9}),
        "calls table 'v': let all ranks make the same call": ("table", {}, {"name": "v"}),
        "a key has the name 'key': choose another": ("table", {"name": "w"}, {"name": "key"}),
        "'t' was already made": ("table", {"name": "w"}, {"name": "t"}),
        "a table has the name 't': choose another": ("init", {"key": "w"}, {"key": "t"}),
    }
    alone: dict[str, dict[str, Any]] = {
        "ids have dtype int32, and need int64": {"ids": np.arange(2, dtype=np.int32)},
        "gradients has dtype float64, and the table float32": {"gradients": np.ones((2, 3))},
        "gradients has shape (2, 4), and ids of shape (2,) need (2, 3)": {"gradients": np.ones((2, 4), np.float32)},
    }

    def body(kv: mpips.KVStore) -> None:
        odd = kv.rank == kv.num_workers - 1
        kv.init("key", np.zeros(3))
        table = kv.table("t", 3, init=mpips.uniform(0), learning_rate=1.0)
        for sentence, (call, most, one) in asked.items():
            usual = {"name": "u", "dim": 3} if call == "table" else {"value": np.zeros(3)}
            said = failure(lambda: getattr(kv, call)(**{**usual, **(one if odd else most)}))  # noqa: B023
            assert sentence in said, (sentence, said)
        good = {"ids": np.arange(2), "gradients": -np.ones((2, 3), np.float32)}
        for step, (sentence, one) in enumerate(alone.items(), 1):
            if odd:
                said = failure(lambda: table.push(**{**good, **one}))  # noqa: B023
                assert sentence in said, (sentence, said)
            assert (table.pushpull(**good) == step * kv.num_workers).all()
            kv.barrier()

    run("dist_sync", body, servers=1)


class Memory:
    """The free memory of the last server's machine, as a file says; others have enough."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
        self._path = f"{folder}/free"
        monkeypatch.setattr(places, "SEEN_BYTES", 1 << 10)
        monkeypatch.setattr(places, "free_memory", self._read if WORLD.rank == WORLD.size - 1 else lambda: 1 << 30)

    def _read(self) -> int:
        with open(self._path) as file:
            return int(file.read())

    def set(self, kv: mpips.KVStore, free: int) -> None:
        """Let there be so much. Collective over the workers."""
        kv.barrier()
        if kv.rank == 0:
            with open(f"{self._path}.new", "w") as file:
                file.write(str(free))
            os.replace(file.name, self._path)  # servers read all the time
        kv.barrier()


@either_mpi
@pytest.mark.parametrize("options", SERVERS)
@pytest.mark.parametrize("who", ["all", "one", "one, and nobody pulls"])
def test_a_server_without_memory_refuses_the_whole_round(
    options: dict[str, Any], who: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    need(**options)
    folder = WORLD.bcast(str(tmp_path_factory.mktemp("full")) if WORLD.rank == 0 else "")
    memory = Memory(monkeypatch, folder)

    def body(kv: mpips.KVStore) -> None:
        memory.set(kv, 1 << 30)
        table = kv.table("t", 2, init=mpips.uniform(0.5), optimizer="row_adagrad", **SMALL_RATE)
        expected = ReferenceTable("t", 2, "float32", 0.5, "row_adagrad")
        old, many = np.arange(50), np.arange(-9000, 9000)
        greedy = who == "all" or kv.rank == kv.num_workers - 1

        def step(ids: Any) -> None:
            table.push(ids, np.ones((len(ids), 2), np.float32))
            expected.push([(ids, np.ones((len(ids), 2), np.float32))] * kv.num_workers)
            assert table.pull(old).tobytes() == expected.pull(old).tobytes()

        def try_many() -> None:
            mine = many if greedy else old
            table.push(mine, np.ones((len(mine), 2), np.float32))
            if who == "one, and nobody pulls":
                table.save(f"{folder}/of others")
            table.pull(old)

        step(old)
        memory.set(kv, 0)
        for _ in range(2):
            with pytest.raises(MemoryError) as raised:
                try_many()
            assert f"push 2 of table 't' counts on no server, as server rank {WORLD.size - 1} has" in str(raised.value)
            assert "rows" in str(raised.value) and "bytes) beside" in str(raised.value)
            table.save(f"{folder}/saved")
            assert table.export(f"{folder}/exported") == table.pushes == table.stats()["updates"] == 1
            assert table.rows == len(old)
            assert table.pull(many[8990:9060]).tobytes() == expected.pull(many[8990:9060]).tobytes()
        copy = ServingCopy()
        copy.read(f"{folder}/exported")
        copy.check(expected)
        step(old)
        memory.set(kv, 1 << 30)
        table.load(f"{folder}/saved")
        assert table.rows == len(old)
        memory.set(kv, 0)  # room that was promised before is gone
        with pytest.raises(MemoryError):
            table.pushpull(many[:500], np.ones((500, 2), np.float32))
        memory.set(kv, 1 << 30)
        table.push(many, np.ones((len(many), 2), np.float32))
        assert table.rows == len(many)

    run("dist_sync", body, **options)


@pytest.mark.core(7)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize(
    "heard", ["pull of the one", "pull of the other", "pull of all", "pull of nothing", "next step", "stats"]
)
@pytest.mark.parametrize("options", SERVERS[1:4])
def test_a_step_of_several_tables_counts_for_all_or_for_none(
    options: dict[str, Any],
    heard: str,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Whoever has memory enough hears of each once, in whatever it calls next, however late."""
    need(**options)
    memory = Memory(monkeypatch, WORLD.bcast(str(tmp_path_factory.mktemp("full")) if WORLD.rank == 0 else ""))
    old, many = np.arange(50), np.arange(-9000, 9000)

    def step(tables: list[mpips.Table], *ids: Any) -> None:
        push_together([(table, each, -np.ones((len(each), 2), np.float32)) for table, each in zip(tables, ids)])

    def body(kv: mpips.KVStore) -> None:
        greedy, synchronous = kv.rank == kv.num_workers - 1, kind == "dist_sync"
        memory.set(kv, 1 << 30)
        tables = [kv.table(name, 2, init=mpips.uniform(0), learning_rate=1.0) for name in "tuv"]
        calls: dict[str, Any] = {
            "pull of the one": lambda: tables[1].pull(old),
            "pull of the other": lambda: tables[0].pull(old),
            "pull of all": lambda: mpips.pull_rows(dict.fromkeys(tables, old)),
            "pull of nothing": lambda: tables[1].pull(old[:0]),
            "next step": lambda: step(tables, old, old, old),
            "stats": lambda: tables[2].stats(),
        }
        step(tables, old, old, old)
        memory.set(kv, 0)

        def try_many() -> None:
            step(tables, old, many if greedy else old, old)
            calls[heard]()

        for number in range(3):
            meet(kv)
            time.sleep(0.1 if greedy == number % 2 else 0)
            if greedy or synchronous:
                with pytest.raises(MemoryError, match=r"of table 'u' counts on no server"):
                    try_many()
            assert [table.pushes for table in tables] == [1, 1, 1]
        meet(kv)
        memory.set(kv, 1 << 30)
        step(tables[1:], old, old)  # another step than before
        step(tables, old, many, old)
        kv.barrier()
        for table, rounds, ids in zip(tables, (2, 3, 3), (old, many, old)):
            table.stats()
            meet(kv)
            assert (table.pull(old) == rounds * kv.num_workers).all()
            assert (table.pushes, table.rows) == (rounds, len(ids))
            assert table.stats()["updates"] == rounds * (1 if synchronous else kv.num_workers)

    run(kind, body, **options)


def test_a_push_that_is_refused_is_of_one_worker_in_an_asynchronous_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    need(servers=2)
    memory = Memory(monkeypatch, WORLD.bcast(str(tmp_path_factory.mktemp("full")) if WORLD.rank == 0 else ""))

    def body(kv: mpips.KVStore) -> None:
        memory.set(kv, 0)
        table, many = kv.table("t", 1, init=mpips.uniform(0), learning_rate=1.0), np.arange(5000)
        if kv.rank == 0:
            with pytest.raises(MemoryError, match="push 1 of table 't' counts on no server"):
                table.push(many, -np.ones((5000, 1), np.float32))
        else:
            table.push(many[:0], np.ones((0, 1), np.float32))
        assert table.pushes == (kv.rank > 0)
        kv.barrier()
        assert table.rows == 0
        memory.set(kv, 1 << 30)
        table.push(many, -np.ones((5000, 1), np.float32))
        kv.barrier()
        meet(kv)
        table.stats()
        meet(kv)
        assert (table.pull(many) == kv.num_workers).all()

    run("dist_async", body, servers=2)


def test_room_of_a_refused_step_is_for_its_own_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Other ids, though no more of them, may need memory that nobody has promised."""
    need(servers=1)
    memory = Memory(monkeypatch, WORLD.bcast(str(tmp_path_factory.mktemp("full")) if WORLD.rank == 0 else ""))
    first, other, ones = np.arange(5000), np.arange(5000, 10000), -np.ones((5000, 1), np.float32)

    def body(kv: mpips.KVStore) -> None:
        memory.set(kv, 300_000)  # for 5,000 rows, and not for the room that a push of them usually gets for the next
        tables = [kv.table(name, 1, init=mpips.uniform(0), learning_rate=1.0) for name in "tu"]
        if kv.rank == 0:
            tables[0].push(first, ones)
        memory.set(kv, 0)
        if kv.rank == 0:
            with pytest.raises(MemoryError, match="of table 'u' counts on no server"):
                push_together([(table, first, ones) for table in tables])
            with pytest.raises(MemoryError, match="push 2 of table 't' counts on no server"):
                tables[0].push(other, ones)
        memory.set(kv, 1 << 30)
        if kv.rank == 0:
            tables[0].push(other, ones)
            assert [table.pushes for table in tables] == [2, 0]
        meet(kv)
        assert [table.rows for table in tables] == [10000, 0]

    run("dist_async", body, servers=1)


def test_stores_without_servers_refuse_a_table() -> None:
    for kind, options in (("local", {}), ("dist_sync", {"servers": 0})):
        said = run(kind, lambda kv: failure(lambda: kv.table("t", 3)), **options)
        assert "has no servers here" in said


@pytest.mark.parametrize(
    "dtype, ids, wrong, sentence",
    [
        ("float32", [5, 9], np.nan, "holds 1 NaN and 0 infinities among 4 elements, the first of id 9"),
        ("float16", [9, 9], 4e4, "sums the gradients of id 9 to infinity in float16"),
    ],
)
def test_all_ranks_hear_of_a_gradient_that_is_not_finite(
    dtype: str, ids: list[int], wrong: float, sentence: str
) -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> str:
        table = kv.table("t", 2, dtype)
        gradient = np.full((2, 2), 4e4 if kv.rank == 0 else 0, dtype)
        gradient[1, 0] = wrong if kv.rank == 0 else 0
        try:
            for _ in range(50):
                table.pushpull(np.array(ids), gradient)
        except Exception as error:
            return str(error)
        return ""

    try:
        said = run("dist_sync", body, servers=1, check_finite=True)
    except mpips.StoreError as error:  # of the close
        said = str(error)
    if said is not None:
        assert f"push 1 of rank 0 {sentence}" in said, said


def test_an_update_that_leaves_the_range_of_float16_ends_the_generation() -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        table, ids = kv.table("t", 2, "float16", mpips.constant(0), learning_rate=1.0), np.array([5, 9])
        gradient = np.array([[1, 2], [3, -4e4 * (kv.rank == 0)]], np.float16)
        table.push(ids, gradient)
        said = failure(lambda: table.pushpull(ids, gradient))
        assert "update 2 failed: a value of the row of id 9 is inf in float16: look at" in said
        assert "t" in kv.recover().torn

    run("dist_sync", body, servers=1, check_finite=True)


def test_a_worker_that_leaves_ends_the_wait_for_its_push() -> None:
    need(workers=2, servers=1)
    try:
        kv = mpips.create("dist_sync", servers=1, comm=WORLD)
    except SystemExit:
        WORLD.Barrier()
        return
    table = kv.table("t", 2)
    said = ""
    if kv.rank:
        try:
            table.pushpull(np.arange(2), np.zeros((2, 2), np.float32))
        except mpips.StoreError as error:
            said = str(error)
        assert "table 't': round 1 needs rank 0, which has left the store" in said
    with suppress(mpips.StoreError):
        kv.close()
    WORLD.Barrier()


def test_tensors_of_pytorch_serve_as_arrays() -> None:
    torch = pytest.importorskip("torch")
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, init=mpips.uniform(0), learning_rate=1.0)
        out = torch.zeros(3, 2)
        assert kv.table("u", 2, torch.float32).dtype == np.float32
        half = kv.table("v", 2, torch.bfloat16, mpips.uniform(0), learning_rate=1.0)
        rows = torch.zeros(3, 2, dtype=torch.bfloat16)
        assert half.pushpull(torch.tensor([1, 2, 1]), torch.full_like(rows, -0.25), rows) is rows
        assert (rows[:, 0] == kv.num_workers * torch.tensor([0.5, 0.25, 0.5])).all()
        sparse = failure(lambda: table.push(torch.tensor([1, 2]), torch.eye(2).to_sparse()))
        assert "gradients is a tensor of layout torch.sparse_coo: pass a dense one" in sparse
        meta = failure(lambda: table.push(torch.tensor([1, 2]), torch.ones(2, 2, device="meta")))
        assert "gradients is a tensor on meta: pass a CPU tensor" in meta
        assert "pass ids.to(torch.int64)" in failure(lambda: table.pull(torch.zeros(2, dtype=torch.int32)))
        assert table.pushpull(torch.tensor([1, 2, 1]), -torch.ones(3, 2), out) is out
        assert (out == kv.num_workers * torch.tensor([[2.0, 2], [1, 1], [2, 2]])).all()

    run("dist_sync", body, servers=1)


def test_a_file_that_does_not_fit_changes_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    need(servers=1)
    folder = WORLD.bcast(str(tmp_path_factory.mktemp("saved")) if WORLD.rank == 0 else "")

    def body(kv: mpips.KVStore) -> None:
        table, other = kv.table("t", 3), kv.table("u", 4)
        rows = table.pull(np.arange(5))
        kv.barrier()
        table.save(f"{folder}/t")
        third = kv.table("x", 3)
        with pytest.warns(RuntimeWarning, match="holds table 't', whose") if kv.rank == 0 else nullcontext():
            third.load(f"{folder}/t")
        assert "has dim 3, and the table 4" in failure(lambda: other.load(f"{folder}/t"))
        adam = kv.table("v", 3, optimizer="adam")
        assert "has optimizer sgd, and the table adam" in failure(lambda: adam.load(f"{folder}/t"))
        assert "none" in failure(lambda: table.load(f"{folder}/none"))
        assert "cannot be written" in failure(lambda: table.save(f"{folder}/none/t"))
        kv.init("w", np.zeros(3))
        kv.barrier()
        if kv.rank == 0:
            with open(f"{folder}/t", "r+b") as file:
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
        kv.barrier()
        assert "damaged" in failure(lambda: table.load(f"{folder}/t"))
        assert table.pull(np.arange(5)).tobytes() == rows.tobytes()

    run("dist_sync", body, servers=1)


def until(is_over: threading.Event) -> Task[None]:
    while not is_over.is_set():
        yield False


@either_mpi
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("life", [{}, {"evict": 2}, {"limit": 12}])
def test_exports_keep_a_serving_copy_up_to_date(
    servers: int, life: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    need(servers=servers)
    folder = WORLD.bcast(str(tmp_path_factory.mktemp("exports")) if WORLD.rank == 0 else "")

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("users", 4, init=mpips.uniform(0.5), optimizer="row_adagrad", **life, **SMALL_RATE)
        expected = ReferenceTable("users", 4, "float32", 0.5, "row_adagrad", **life, servers=servers)
        copy, since = ServingCopy(), None
        for repeat in range(9):
            batches = [batch(repeat, worker, 4, "float32") for worker in range(kv.num_workers)]
            expected.push(batches)
            table.push(*batches[kv.rank])
            if repeat % 2:
                since = table.export(f"{folder}/{repeat}", since)
                assert since == repeat + 1
                count = copy.read(f"{folder}/{repeat}")
                copy.check(expected)
                assert repeat == 1 or count == sum(step > repeat - 1 for step in expected.touched.values())
            kv.barrier()
        whole = ServingCopy()
        table.export(f"{folder}/all")
        whole.read(f"{folder}/all")
        whole.check(expected)
        assert "since=10: no file of these rows" in failure(lambda: table.export(f"{folder}/all", 10))
        assert "cannot be written" in failure(lambda: table.export(f"{folder}/none/x"))
        is_over = threading.Event()
        beside = kv.worker.start("as a checkpoint that is being written", until(is_over))
        assert "since=1: no file of these rows was written then" in failure(lambda: table.export(f"{folder}/all", 1))
        is_over.set()
        beside.wait()
        if kv.num_workers > 1:
            said = failure(lambda: table.export(f"{folder}/all", 9 if kv.rank else None))
            assert "'since' is None on rank 0 and 9 on rank 1" in said
            said = failure(lambda: table.export(f"{folder}/all", -1 if kv.rank else None))
            assert "rank 1: table 'users': since=-1: give what export has returned" in said
        table.save(f"{folder}/saved")  # loaded rows are others, though updates count on
        table.load(f"{folder}/saved")
        assert "since=9: no file of these rows" in failure(lambda: table.export(f"{folder}/all", 9))
        kv.barrier()

    run("dist_sync", body, servers=servers)
