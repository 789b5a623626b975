"""Workers that wait for one another in calls that do not fit together hear of it at once; who may wait does not."""

import time
from pathlib import Path

import numpy as np
import pytest

import mpips
from mpips.tables import places
from tests.choice import once
from tests.mpi.jobs import job
from tests.mpi.mpips.faults import workers
from tests.mpi.mpips.support import failure, need, run
from tests.mpi.sizes import only_on

SECONDS = 20.0
"""In which a very busy machine says what an idle one says in half a second; the limit is 300 s."""
TOGETHER = {
    "barrier": lambda kv: kv.barrier(),
    "update_optimizer": lambda kv: kv.update_optimizer(learning_rate=0.5),
    "init": lambda kv: kv.init("new", np.zeros(2)),
    "save": lambda kv: kv.save("/nowhere"),
}
PUSHES = {
    "pushpull": lambda kv, w: kv.pushpull("w", w),
    "two pushes": lambda kv, w: [kv.push("w", w) for _ in range(2)],
    "list": lambda kv, w: kv.pushpull(["w", "x"], [w, w.copy()]),
    "handle": lambda kv, w: kv.ipushpull("w", w, w).wait(),
    "in place": lambda kv, w: kv.push("x", mpips.empty(2, np.float64)),
}


@pytest.mark.core(2)
@only_on(2, 3)
@once(servers=[0, 1], kind=["dist_sync", "mpi_sync"], together=list(TOGETHER), pushes=list(PUSHES))
def test_a_wait_that_cannot_end_is_said(servers: int, kind: str, together: str, pushes: str) -> None:
    need(2, servers=servers)

    def body(kv):
        w = np.zeros(2)
        kv.init(["w", "x"], [w, w])
        kv.set_optimizer("sgd", learning_rate=0.1)
        for _ in range(2):
            kv.pushpull("w", np.ones(2), w)
        kv.barrier()
        begun = time.monotonic()
        said = failure(lambda: TOGETHER[together](kv) if kv.rank == 0 else PUSHES[pushes](kv, w))
        took = time.monotonic() - begun
        kv.recover()
        kv.pushpull("w", np.ones(2), w)  # all is well again
        return said, took

    made = run(kind, body, servers=servers)
    if made is not None:
        said, took = made
        assert workers(servers).allgather(said) == [said] * workers(servers).size
        assert f"rank 0 waits in {together} for all workers, and rank" in said and "in push" in said, said
        assert took < SECONDS, took


TABLES_TOGETHER = {
    "barrier": lambda kv, table: kv.barrier(),
    "save of table 't'": lambda kv, table: table.save("/nowhere/t"),
    "update_optimizer of table 't'": lambda kv, table: table.update_optimizer(learning_rate=0.5),
    "table 'new'": lambda kv, table: kv.table("new", 2),
    "save": lambda kv, table: kv.save("/nowhere/s"),
}
TABLE_WAITS = {
    "pull": lambda table, ids, ones: table.pull(ids),
    "stats": lambda table, ids, ones: table.stats(),
    "push": lambda table, ids, ones: [table.push(ids, ones) for _ in range(2)],
    "ipull": lambda table, ids, ones: table.ipull(ids).wait(),
}


@pytest.mark.core(2)
@only_on(2, 3)
@once(kind=["dist_sync", "mpi_sync"], shared=[True, False], together=list(TABLES_TOGETHER), waits=list(TABLE_WAITS))
def test_a_wait_for_a_table_that_cannot_end_is_said(kind: str, shared: bool, together: str, waits: str) -> None:
    """As in `if kv.rank == 0: table.save(...)` one push too early."""
    need(2, servers=1)

    def body(kv):
        ids, ones = np.arange(3), np.ones((3, 2), np.float32)
        table = kv.table("t", 2, init=mpips.uniform(0), learning_rate=1.0)
        table.push(ids, -ones)
        kv.barrier()
        begun = time.monotonic()

        def wait() -> None:
            table.push(ids, -ones)
            TABLE_WAITS[waits](table, ids, -ones)

        said = failure(lambda: TABLES_TOGETHER[together](kv, table) if kv.rank == 0 else wait())
        took = time.monotonic() - begun
        kv.recover()
        table.push(ids, -ones)  # all is well again
        assert (table.pull(ids) == 2 * kv.num_workers).all()
        kv.barrier()
        return said, took

    made = run(kind, body, servers=1, shared_memory=shared)
    if made is not None:
        said, took = made
        assert workers(1).allgather(said) == [said] * workers(1).size
        assert f"rank 0 waits in {together} for all workers, and rank" in said, said
        order = "let all make these calls in the same order"
        assert f"in {waits} of table 't' after push 2 for rank 0: {order}" in said, said
        assert took < SECONDS, took


@only_on(3)
@once(order=["two tables", "a table and a key"], servers=[1, 2])
def test_tables_in_another_order_are_said(order: str, servers: int) -> None:
    need(2, servers=servers)

    def body(kv):
        ids, ones, w = np.arange(9), -np.ones((9, 2), np.float32), np.ones(2, np.float32)
        first, second = (kv.table(name, 2, init=mpips.uniform(0), learning_rate=1.0) for name in "tu")
        kv.init("w", w)
        calls = [lambda: first.pushpull(ids, ones)]
        calls.append(lambda: second.pushpull(ids, ones) if order == "two tables" else kv.pushpull("w", w.copy()))
        for call in calls:
            call()
        kv.barrier()
        begun = time.monotonic()
        said = failure(lambda: [call() for call in (calls[::-1] if kv.rank else calls)])
        took = time.monotonic() - begun
        kv.recover()
        for call in calls:
            call()
        kv.barrier()
        return said, took

    made = run("dist_sync", body, servers=servers)
    if made is not None:
        said, took = made
        assert "waits for round 2 of table 't', to which rank" in said, said
        nouns = "tables" if order == "two tables" else "keys and tables"
        assert f"has not pushed: use {nouns} in the same order on all ranks" in said, said
        assert took < SECONDS, took


@pytest.mark.core(1)
@only_on(3)
@pytest.mark.parametrize("shared", [True, False])
def test_a_push_after_a_refusal_of_which_another_does_not_hear_is_said(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits at another table for the one that waits for it to hear."""
    need(2, servers=1)
    monkeypatch.setattr(places, "free_memory", lambda: 0)

    def body(kv):
        ids, ones = np.arange(5000), np.ones((5000, 2), np.float32)
        first, second = kv.table("t", 2), kv.table("u", 2)
        if kv.rank:
            first.push(ids[:0], ones[:0])
        kv.layout.workers.Barrier()
        begun = time.monotonic()
        if kv.rank:
            second.push(ids[:0], ones[:0])
            said = failure(lambda: second.pull(ids))
        else:
            with pytest.raises(MemoryError):
                first.push(ids, ones)
            said = failure(lambda: first.push(ids, ones))
        took = time.monotonic() - begun
        kv.recover()
        first.push(ids[:0], ones[:0])
        kv.barrier()
        return said, took

    made = run("dist_sync", body, servers=1, shared_memory=shared)
    if made is not None:
        said, took = made
        assert "rank 0 waits for round 1 of table 't', to which rank 1 has not pushed; rank 1 waits for round 1" in said
        assert took < SECONDS, took


@only_on(3)
def test_calls_of_tables_that_do_not_fit_together_are_named(tmp_path_factory: pytest.TempPathFactory) -> None:
    need(2, servers=1)
    path = str(tmp_path_factory.mktemp("tables") / "file")

    def body(kv):
        tables = kv.table("t", 2), kv.table("u", 2)
        calls = {
            "save of table 't'; rank 1 calls barrier": (lambda: tables[0].save(path), kv.barrier),
            "save; rank 1 calls export of table 'u'": (lambda: kv.save(path), lambda: tables[1].export(path)),
            "save of table 't'; rank 1 calls save of table 'u'": (
                lambda: tables[0].save(path),
                lambda: tables[1].save(path),
            ),
        }
        for sentence, pair in calls.items():
            assert f"rank 0 calls {sentence}: let all ranks make the same call" in failure(pair[kv.rank > 0])
        kv.barrier()

    run("dist_sync", body, servers=1)


@pytest.mark.slow
@only_on(3)
@pytest.mark.parametrize("kind, servers", [("dist_sync", 0), ("dist_sync", 1), ("mpi_sync", 1), ("dist_async", 1)])
def test_who_may_wait_is_left_alone(kind: str, servers: int) -> None:
    """One is in a barrier, or saves, while others are late to a round that it has pushed to, or has yet to push to."""
    need(2, servers=servers)

    def body(kv):
        w, g, last = np.zeros(2), np.ones(2), kv.rank == kv.num_workers - 1
        kv.init(["w", "x"], [w, w])
        kv.set_optimizer("sgd", learning_rate=1.0)
        alone = servers and kind.startswith("dist")
        if alone:
            if kv.rank:
                kv.push("w", g)  # nobody needs to have come
            kv.barrier()
            time.sleep(0.5 * last)
            if kv.rank == 0:
                kv.push("w", g)
        if kv.rank == 0:
            handle = kv.ipushpull("x", g, w.copy())
            kv.barrier()
            handle.wait()
        else:
            time.sleep(0.8 * last)
            kv.pushpull("x", g, w.copy())
            kv.barrier()
        time.sleep(0.6 * last)
        kv.update_optimizer(learning_rate=0.5)
        kv.pushpull(["w", "x"], [g, g], [w, w.copy()])
        kv.barrier()
        kv.pull("w", w)
        return w[0], -kv.num_workers * ((1.0 if alone else 0) + 0.5)

    made = run(kind, body, servers=servers)
    assert made is None or made[0] == made[1]


LATE = """
import sys, time
import numpy as np
from mpi4py import MPI
import collectives, mpips

if MPI.COMM_WORLD.rank == 1:
    time.sleep(30)
elif sys.argv[1] == "create":
    mpips.create("dist_sync")
else:
    collectives.allreduce(np.ones(2), MPI.COMM_WORLD)
"""


@pytest.mark.core(1)
@only_on(1)
@pytest.mark.parametrize("call", ["create", "collective"])
def test_a_limit_names_who_is_late_and_the_setting(tmp_path: Path, call: str) -> None:
    """Where nothing stands yet, too."""
    done = job(tmp_path, LATE, "-w 3", call, MPIPS_TIMEOUT_SECONDS="1")
    late = "has waited for 1 s: rank 1 has not come; for longer waits raise the timeout (timeout_seconds, "
    assert done.returncode and late in done.stderr, done.stderr
