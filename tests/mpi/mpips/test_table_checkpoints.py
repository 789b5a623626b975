"""Tables in a store's checkpoints: of one round with all keys, whatever is pushed meanwhile, for any other servers."""

from __future__ import annotations

import functools
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import mpips
from launch import Job, build, find, this_machine
from mpips.tables import eviction, initial
from mpips.tables.table import push_together
from tests.child import outside
from tests.mpi.mpips.reference_table import ReferenceTable
from tests.mpi.mpips.support import WORLD, failure, need, run
from tests.mpi.sizes import either_mpi, only_on

DIM, STEPS, SAVED = 5, 12, 4
KINDS = {"users": "row_adam", "items": "ftrl"}
INITS = {"users": mpips.normal(std=0.5), "items": mpips.constant(0.25)}
LIVES: dict[str, dict[str, Any]] = {
    "users": {"dtype": "float32", "admit": mpips.seen(2), "evict": 5},
    "items": {"dtype": "bfloat16", "rounding": "stochastic", "evict_after": 4},
}
CALLS = {3: "set", 7: "remove"}
"""Of some steps what is called instead of a push."""


def batch(step: int, dtype: Any) -> tuple[Any, Any]:
    random = np.random.default_rng(step)
    ids = random.integers(-300, 300, 200) * 10**13
    return ids, random.standard_normal((200, DIM)).astype(dtype)


def nothing(dtype: Any) -> tuple[Any, Any]:
    return np.zeros(0, np.int64), np.zeros((0, DIM), dtype)


def at_second(step: int) -> Any:
    """Let a second of the wall clock pass with each step."""
    return mock.patch.object(eviction, "now", return_value=step * 10**6 + 1)


def tables(kv: mpips.KVStore) -> dict[str, Any]:
    return {
        name: kv.table(name, DIM, init=INITS[name], optimizer=optimizer, learning_rate=0.1, **LIVES[name])
        for name, optimizer in KINDS.items()
    }


def train(kv: mpips.KVStore, made: dict[str, Any], steps: range) -> None:
    """Worker 0 pushes everything, so that it does not count how many there are."""
    for step in steps:
        pushes = [
            (table, *(batch(step, table.dtype) if kv.rank == 0 else nothing(table.dtype))) for table in made.values()
        ]
        with at_second(step):
            for some in [pushes] if step % 2 else [[push] for push in pushes]:
                push_together(some)
        kv.push("w", np.full(3, -float(kv.rank == 0)))


def check(kv: mpips.KVStore, made: dict[str, Any], steps: int) -> None:
    ids = np.concatenate([batch(step, "float32")[0] for step in range(STEPS)])
    for name, optimizer in KINDS.items():
        expected = ReferenceTable(name, DIM, init=INITS[name], optimizer=optimizer, **LIVES[name])
        for step in range(steps):
            expected.push([batch(step, LIVES[name]["dtype"])], step * 10**6 + 1)
        assert made[name].pull(ids).tobytes() == expected.pull(ids).tobytes(), name
        assert made[name].stats()["updates"] == steps
    kv.pull("w", out := np.zeros(3))
    assert (out == steps).all()
    kv.barrier()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(WORLD.bcast(str(tmp_path_factory.mktemp("saved")) if WORLD.rank == 0 else ""))


@pytest.mark.core(2)
@either_mpi
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_a_checkpoint_holds_tables_of_its_round(folder: Path, wait: bool, known: bool) -> None:
    need(servers=1)

    def save(kv: mpips.KVStore) -> None:
        kv.init("w", np.zeros(3))
        kv.set_optimizer("sgd", learning_rate=1.0)
        made = tables(kv)
        train(kv, made, range(SAVED))
        saving = kv.save(folder / "x", wait=wait)
        train(kv, made, range(SAVED, STEPS))
        if saving is not None:
            saving.wait()
        check(kv, made, STEPS)

    def loaded(kv: mpips.KVStore) -> None:
        made = None
        if known:
            kv.init("w", np.ones(3))
            made = tables(kv)
            train(kv, made, range(3, 9))  # is forgotten
        kv.load(folder / "x")
        made = made or tables(kv)
        train(kv, made, range(SAVED, STEPS))
        check(kv, made, STEPS)

    run("dist_sync", save, servers=1)
    for servers in range(1, min(3, WORLD.size)):
        run("dist_sync", loaded, servers=servers)


@either_mpi
@pytest.mark.parametrize(
    "optimizer, life",
    [
        ("adam", {"dtype": "float16", "admit": mpips.seen(2), "evict": 3}),
        ("ftrl", {"dtype": "float32", "limit": 90}),
        ("adam", {"dtype": "float32", "limit": 70, "evict_by": "count", "evict_after": 4}),
        ("sgd", {"dtype": "bfloat16", "rounding": "stochastic"}),
    ],
)
def test_a_whole_file_and_its_increments_are_the_table(folder: Path, optimizer: str, life: dict[str, Any]) -> None:
    need(servers=1)
    whole = folder / "whole"

    def make(kv: mpips.KVStore) -> Any:
        return kv.table("t", DIM, init=mpips.uniform(0.5), optimizer=optimizer, learning_rate=0.1, **life)

    def pushed(kv: mpips.KVStore, table: Any, step: int) -> None:
        ids, rows = some(step, table.dtype) if kv.rank == 0 else nothing(table.dtype)
        with at_second(step):
            if step in CALLS:
                table.remove(ids[:20]) if CALLS[step] == "remove" else table.set(ids, rows)
            else:
                table.push(ids, rows)

    def save(kv: mpips.KVStore) -> None:
        table, since = make(kv), 0
        for step in range(STEPS):
            pushed(kv, table, step)
            if step == SAVED:
                table.export(folder / "served")  # other files of the same rows disturb nothing
            if step % 3 == 2:
                since = table.save(folder / f"{step}", since or None)
                assert since == step + 1 == table.stats()["updates"]
            elif step == STEPS - 2:
                table.save(whole)
        kv.barrier()
        assert "since=7: no file of these rows was written then" in failure(lambda: table.save(folder / "x", 7))
        if kv.num_workers > 1:
            said = failure(lambda: table.save(folder / "x", 12 if kv.rank else None))
            assert "'since' is None on rank 0 and 12 on rank 1" in said

    def loaded(kv: mpips.KVStore) -> None:
        table = make(kv)
        pushed(kv, table, 1)  # is forgotten
        for files in (5, 2), (2, 8), (2, 5, 5), (2, 2), (5,):
            paths = [folder / f"{step}" for step in files]
            said = failure(functools.partial(table.load, *paths))
            assert "give the file of all rows, then every increment in its order" in said, files
        if "rounding" not in life:
            assert "give those of one job" in failure(lambda: table.load(folder / "2", folder / "other"))
        table.load(*(folder / f"{step}" for step in (2, 5, 8)))
        for step in range(9, STEPS):
            pushed(kv, table, step)
        expected = ReferenceTable("t", DIM, init=0.5, optimizer=optimizer, servers=kv.layout.num_servers, **life)
        for step in range(STEPS):
            pushed_ids, rows = some(step, life["dtype"])
            if CALLS.get(step) == "remove":
                expected.remove([pushed_ids[:20]], step * 10**6 + 1)
            else:
                (expected.set if step in CALLS else expected.push)([(pushed_ids, rows)], step * 10**6 + 1)
        assert table.pull(ids).tobytes() == expected.pull(ids).tobytes()
        assert (table.stats()["updates"], table.rows) == (STEPS, len(expected.rows))
        said = failure(lambda: table.save(folder / "x", 9))
        assert "since=9: no file of these rows was written then" in said
        kv.barrier()

    def other(kv: mpips.KVStore) -> None:
        """Another job writes an increment since the same update."""
        table = make(kv)
        for step in range(20, 26):
            pushed(kv, table, step)
            if step == 22:
                since = table.save(folder / "first")
        table.save(folder / "other", since)

    ids = np.concatenate([some(step, "float32")[0] for step in range(STEPS)])
    run("dist_sync", save, servers=1)
    run("dist_sync", other, servers=1)
    run("dist_sync", loaded, servers=1 if "limit" in life else min(2, WORLD.size - 1))  # servers share the limit


def test_rows_that_were_saved_without_scores_and_times_get_them_at_the_load(folder: Path) -> None:
    need(servers=1)

    def body(kv: mpips.KVStore) -> None:
        ids, ones, zeros = np.arange(8), -np.ones((8, 2), np.float32), {"init": mpips.uniform(0), "learning_rate": 1.0}
        plain = kv.table("plain", 2, **zeros)
        counting = kv.table("counting", 2, limit=6, evict_by="count", evict_after=10, **zeros)
        scoring = kv.table("scoring", 2, limit=6, evict_by="score", **zeros)
        with at_second(1):
            plain.push(ids[:6], ones[:6] * (kv.rank == 0))
            plain.save(folder / "plain")
        with at_second(100), pytest.warns(RuntimeWarning) if kv.rank == 0 else nullcontext():
            counting.load(folder / "plain")
        with at_second(109):
            counting.push(ids[:3], ones[:3])
            counting.push(ids[7:], ones[7:])  # one too many: 3 is one of those without an update
            assert counting.exists(ids).tolist() == [True, True, True, False, True, True, False, True]
            assert (counting.pull(ids[:1]) == 1 + kv.num_workers).all() and counting.rows == 6
        with at_second(110):
            counting.push(ids[:0], ones[:0])
        assert counting.exists(ids).tolist() == [True, True, True, False, False, False, False, True]
        counting.save(folder / "counting")
        said = failure(lambda: scoring.load(folder / "counting"))
        assert "counting has evict_by count, and the table score: make it as it was saved" in said
        kv.barrier()

    run("dist_sync", body, servers=1)


def test_a_table_that_was_saved_without_counts_counts_from_0(folder: Path) -> None:
    """And one that does not count is loaded without those of the file; from a checkpoint as from a file of its own."""
    need(servers=1)
    ids, first = np.arange(4), -np.ones((2, 2), np.float32)

    def options(**more: Any) -> dict[str, Any]:
        return {"init": mpips.uniform(0), "learning_rate": 1.0, **more}

    def save(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, **options())
        table.push(ids[:2], first * (kv.rank == 0))
        table.save(folder / "t")
        kv.save(folder / "x")

    def load(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, **options(admit=mpips.seen(2)))
        for read in (lambda: kv.load(folder / "x"), lambda: table.load(folder / "t")):
            table.push(ids[3:], first[:1])  # counted once, and the load forgets it
            assert table.stats()["counted"] == 1
            read()
            assert (table.stats()["counted"], table.rows) == (0, 2)
            for rows in (2, 3):
                table.push(ids[2:3], first[:1])
                assert table.rows == rows
            assert table.pull(ids).tolist() == [[1, 1], [1, 1], [kv.num_workers] * 2, [0, 0]]

    def load_without(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, **options())
        for read in (lambda: kv.load(folder / "y"), lambda: table.load(folder / "u")):
            read()
            table.push(ids[2:3], first[:1])
            assert (table.stats()["counted"], table.rows) == (0, 3)

    def save_counts(kv: mpips.KVStore) -> None:
        table = kv.table("t", 2, **options(admit=mpips.seen(2)))
        table.load(folder / "t")
        table.push(ids[3:], first[:1])
        table.save(folder / "u")
        kv.save(folder / "y")

    for each in (save, load, save_counts, load_without):
        run("dist_sync", each, servers=1)


def some(step: int, dtype: Any) -> tuple[Any, Any]:
    """Some ids come in all steps, others seldom, so that rows are dropped and come again."""
    random = np.random.default_rng(step)
    ids = np.concatenate([random.integers(0, 20, 30), random.integers(-300, 300, 40) * 10**13])
    return ids, random.standard_normal((len(ids), DIM)).astype(dtype)


@pytest.mark.core(1)
@only_on(1)
@pytest.mark.parametrize("alone", [False, True])
def test_a_job_goes_on_from_its_folder_with_its_tables(tmp_path: Path, alone: bool) -> None:
    for first, stop, ranks, servers in ((0, 5, 3, 2), (5, STEPS, 3, 1)):
        words = [sys.executable, "-m", __name__, str(tmp_path), str(servers), str(first), str(stop), str(int(alone))]
        argv = build(find(python=sys.executable), Job(ranks, tuple(words)), this_machine())
        done = subprocess.run(argv, env=outside(), timeout=60, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]


def goes_on(folder: str, servers: int, first: int, stop: int, alone: bool) -> None:
    """One rank of a job that has a table `alone`, or several beside a key."""
    kv = mpips.create("dist_sync", servers=servers, checkpoint=folder, every=2)
    assert kv.resumed == first
    if not alone:
        kv.init("w", np.zeros(3))
        kv.set_optimizer("sgd", learning_rate=1.0)
        made = tables(kv)
        train(kv, made, range(first, stop))
        check(kv, made, stop)
    else:
        table = kv.table("t", 2, init=mpips.uniform(0), learning_rate=1.0)
        for step in range(first, stop):
            value = -1.0 if kv.rank == 0 else 0.0
            assert (table.pushpull(np.arange(3), np.full((3, 2), value, np.float32)) == step + 1).all()
    kv.close()


def test_what_does_not_fit_a_table_changes_nothing(folder: Path) -> None:
    need(servers=1)
    without = folder / "without"

    def body(kv: mpips.KVStore) -> None:
        kv.save(without)
        table = kv.table("t", 3)
        table.push(np.arange(4), np.ones((4, 3), np.float32))
        kv.save(folder / "t")
        rows = table.pull(np.arange(4))
        kv.barrier()
        assert "has no table 't', which the store has" in failure(lambda: kv.load(without))
        assert table.pull(np.arange(4)).tobytes() == rows.tobytes()

    def other(kv: mpips.KVStore) -> None:
        kv.table("t", 4)
        assert "t has dim 3, and the table 4" in failure(lambda: kv.load(folder / "t"))

    def key(kv: mpips.KVStore) -> None:
        kv.init("t", np.zeros(3))
        assert "'t'" in failure(lambda: kv.load(folder / "t"))

    def claims(kv: mpips.KVStore) -> None:
        kv.load(folder / "t")
        assert "a table has the name 't'" in failure(lambda: kv.init("t", np.zeros(3)))
        assert "has dim 3, and this is 4" in failure(lambda: kv.table("t", 4))
        assert "has seed another one" in failure(lambda: kv.table("t", 3, seed=1))
        table = kv.table("t", 3)
        assert "already made" in failure(lambda: kv.table("t", 3))
        assert table.pull(np.arange(4)).shape == (4, 3)

    for each in (body, other, key, claims):
        run("dist_sync", each, servers=1)
    said = run("dist_sync", lambda kv: failure(lambda: kv.load(folder / "t")), servers=0)
    assert "which only servers keep" in said


@mpips.register_init
def eighths(ids: Any) -> Any:
    return ids[:, None] % 1000 / 8 + np.arange(3)


def test_what_rows_depend_on_must_be_there_to_load_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(servers=1)
    ids = np.arange(4)

    def save(kv: mpips.KVStore) -> None:
        table = kv.table("t", 3, init=eighths, optimizer="ftrl", learning_rate=0.1)
        table.push(ids[:2], np.ones((2, 3), np.float32))
        table.save(folder / "t")
        kv.save(folder / "x")

    def loaded(kv: mpips.KVStore) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(initial, "_FUNCTIONS", {})
            said = failure(lambda: kv.load(folder / "x"))
            assert "by the function 'eighths', which is not known here" in said
        kv.load(folder / "x")
        assert "has init eighths, and this is uniform" in failure(lambda: kv.table("t", 3, optimizer="ftrl"))
        table = kv.table("t", 3, init=eighths, optimizer="ftrl", learning_rate=0.1)
        assert table.pull(ids[2:]).tobytes() == eighths(ids[2:]).astype(np.float32).tobytes()
        other = kv.table("u", 3, optimizer="ftrl", learning_rate=0.2)
        said = failure(lambda: other.load(folder / "t"))
        assert "has state of ftrl with {'learning_rate': 0.1}, and the table has {'learning_rate': 0.2}" in said

    run("dist_sync", save, servers=1)
    run("dist_sync", loaded, servers=1)


def test_a_save_needs_one_round_of_a_table(folder: Path) -> None:
    need(workers=2, servers=1)

    def body(kv: mpips.KVStore) -> None:
        table = kv.table("t", 3)
        if kv.rank == 1:
            table.push(np.arange(4), np.ones((4, 3), np.float32))
        assert "pushes of table 't' is 0 on rank 0 and 1 on rank 1: call it after" in failure(
            lambda: kv.save(folder / "x")
        )
        if kv.rank != 1:
            table.push(np.arange(4), np.ones((4, 3), np.float32))
        kv.save(folder / "x")

    run("dist_sync", body, servers=1)


if __name__ == "__main__":
    goes_on(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5] == "1")
