"""Every misuse gives every rank a sentence with key, rank and values; nothing stored is lost; the store goes on."""

from __future__ import annotations

import math
import os
import re
import shlex
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import mpips
from tests.mpi.mpips.support import TAG, WORLD, failure, need, run, tells
from tests.mpi.sizes import JOB_LIMIT, only_on

ROOT = Path(__file__).parents[3]
KINDS = [
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 1, "shared_memory": False}),
    ("dist_sync", {"servers": 0}),
    ("mpi_sync", {"servers": 1, "clients": 1}),
    ("mpi_sync", {"servers": 1, "clients": 2, "masters": "all"}),
]
kinds = pytest.mark.parametrize("kind, options", KINDS)


def sentences(kv, call):
    """What each worker's error says."""
    return kv.layout.workers.allgather(failure(call))


def goes_on(kv, key="w", shape=(4, 3)):
    """The store still sums."""
    out = np.zeros(shape, np.float32)
    kv.pushpull(key, np.full(shape, kv.rank + 1, np.float32), out)
    return bool((out == kv.num_workers * (kv.num_workers + 1) / 2).all())


def started(kv, shape=(4, 3)):
    kv.init("w", np.full(shape, 5, np.float32))
    return kv.num_workers - 1  # the rank that will do wrong


@kinds
@pytest.mark.parametrize("what", ["shape", "dtype", "strides", "list"])
def test_a_bad_push_on_one_rank(kind, options, what):
    need(2, **options)

    def body(kv):
        bad = started(kv)
        value = np.ones((4, 3), np.float32)
        if kv.rank == bad:
            value = {"shape": np.ones((3, 4), np.float32), "dtype": np.ones((4, 3)),
                     "strides": np.ones((8, 3), np.float32)[::2], "list": ["no array"]}[what]  # fmt: skip
        said = sentences(kv, lambda: kv.pushpull("w", value, np.zeros((4, 3), np.float32)))
        assert len(set(said)) == 1, said
        assert "'w'" in said[0]
        if what in ("shape", "dtype"):
            assert f"rank {bad}" in said[0] and "float32(4, 3)" in said[0], said
        out = np.zeros((4, 3), np.float32)
        kv.pull("w", out)
        assert (out == 5).all()
        assert goes_on(kv)

    run(kind, body, **options)


@kinds
def test_two_bad_calls_on_one_rank_do_not_spoil_a_good_one(kind, options):
    need(2, **options)

    def body(kv):
        bad = started(kv)
        value = np.ones((3, 4) if kv.rank == bad else (4, 3), np.float32)
        for _ in range(20):
            failure(lambda: kv.push("w", value))
            assert "'w'" in failure(lambda: kv.pushpull("w", value, np.zeros((4, 3), np.float32)))
            assert goes_on(kv)

    run(kind, body, **options)


@kinds
def test_a_bad_out_on_one_rank(kind, options):
    need(2, **options)

    def body(kv):
        big = (300, 300)
        kv.init("w", np.full(big, 5, np.float32))
        value, out = np.ones(big, np.float32), np.zeros(3 if kv.rank == kv.num_workers - 1 else big, np.float32)
        said = sentences(kv, lambda: kv.pushpull("w", value, out))
        assert len(set(said)) == 1 and "float32(3,)" in said[0], said
        assert goes_on(kv, "w", big)

    run(kind, body, **options)


@kinds
def test_init_must_be_the_same_everywhere(kind, options):
    need(2, **options)

    def body(kv):
        last = kv.num_workers - 1
        wrong = kv.rank == last
        said = sentences(kv, lambda: kv.init("w", np.zeros((3, 4) if wrong else (4, 3), np.float32)))
        assert set(said) == {f"init: key 'w' is float32(4, 3) on rank 0 and float32(3, 4) on rank {last}"}
        said = sentences(kv, lambda: kv.init("w", np.zeros((4, 3), "f8" if wrong else "f4")))
        assert set(said) == {f"init: key 'w' is float32(4, 3) on rank 0 and float64(4, 3) on rank {last}"}
        two = [np.zeros((4, 3), np.float32)] * 2
        foreign = np.dtype("f4").newbyteorder() if wrong else np.float32
        said = sentences(kv, lambda: kv.init("w", np.zeros((4, 3), foreign)))
        assert len(set(said)) == 1 and said[0].startswith(f"init: rank {last}: key 'w' has elements of dtype"), said
        said = sentences(kv, lambda: kv.init(["b", "a"] if wrong else ["a", "b"], two))
        assert set(said) == {f"init: rank 0 gives key 'a', rank {last} key 'b' in its place"}
        said = sentences(kv, lambda: kv.init(["a", 1] if wrong else ["a", "b"], two))
        assert len(set(said)) == 1 and f"rank {last}" in said[0] and "mixed" in said[0]
        said = sentences(kv, lambda: kv.init(["a", "b"], two[: 1 if wrong else 2]))
        assert len(set(said)) == 1 and f"rank {last}" in said[0] and "2 keys" in said[0]
        kv.init("w", np.full((4, 3), 5, np.float32))
        said = sentences(kv, lambda: kv.init("w", np.zeros((4, 3), np.float32)))
        assert len(set(said)) == 1 and "'w' was already initialised" in said[0]
        said = sentences(kv, lambda: kv.init(7, np.zeros((4, 3), np.float32)))
        assert len(set(said)) == 1 and "the keys before, such as 'w'" in said[0]
        out = np.zeros((4, 3), np.float32)
        kv.pull("w", out)
        assert (out == 5).all()

    run(kind, body, **options)


@kinds
def test_wrong_calls_of_all_ranks(kind, options):
    need(**options)

    def body(kv):
        started(kv)
        good = np.zeros((4, 3), np.float32)
        locked = good.copy()
        locked.flags.writeable = False
        assert "'x' was not initialised" in failure(lambda: kv.pull("x", good))
        assert "'x' was not initialised" in failure(lambda: kv.push("x", good))
        assert "read-only" in failure(lambda: kv.pull("w", locked))
        assert "not contiguous" in failure(lambda: kv.pull("w", np.zeros((8, 3), np.float32)[::2]))
        assert "float32(4, 3)" in failure(lambda: kv.pull("w", np.zeros(3, np.float32)))
        assert "mixed" in failure(lambda: kv.push(["w", 1], [good, good]))
        assert "2 keys needs a list of 2 as out, not a list of 1" in failure(lambda: kv.pull(["w", "v"], [good]))
        for dtype in (np.dtype("f4").newbyteorder(), "S5", bool):
            assert "pass float16" in failure(lambda: kv.init("v", np.zeros(3, dtype)))  # noqa: B023
        for call in (kv.push, kv.pull, kv.pushpull, lambda *words, **named: kv.ipushpull(*words, **named).wait()):
            for bad in (1.5, True):
                said = failure(lambda: call("w", good, priority=bad))  # noqa: B023
                assert f"priority={bad} is no int: pass one" in said
            said = failure(lambda: call("w", good, priority=-(1 << 31)))  # noqa: B023
            assert "priority=-2147483648 is out of range: pass an int from -2147483647 to 2147483647" in said
        assert "unknown optimizer" in failure(lambda: kv.set_optimizer("sdg"))
        assert "unknown capability" in failure(lambda: kv.is_capable("magic"))
        assert goes_on(kv)

    run(kind, body, **options)


def test_workers_of_a_client_with_keys_in_another_order():
    options = {"servers": 1, "clients": 1}
    need(2, **options)

    def body(kv):
        kv.init(["a", "b"], [np.full((4, 3), 5, np.float32)] * 2)
        mine = "a" if kv.rank else "b"
        said = sentences(kv, lambda: kv.push(mine, np.ones((4, 3), np.float32)))
        assert len(set(said)) == 1, said
        assert "rank 0: push of key 'b'" in said[0] and "rank 1: push of key 'a'" in said[0]
        out = np.zeros((4, 3), np.float32)
        for key in ("a", "b"):
            kv.pull(key, out)
            assert (out == 5).all()
            assert goes_on(kv, key)

    run("mpi_sync", body, **options)


@pytest.mark.parametrize("options", [{}, {"masters": "all"}, {"shared_memory": False},
                                     {"masters": "all", "shared_memory": False}])  # fmt: skip
def test_workers_of_a_client_with_another_key_than_one_without_elements(options):
    options = {"servers": 1, "clients": 1, **options}
    need(2, **options)

    def body(kv):
        kv.init(["none", "some"], [np.zeros(0), np.zeros(5)])
        none, some = np.zeros(0), np.zeros(5)
        for _ in range(2):
            said = sentences(kv, lambda: kv.push("some", some + 1) if kv.rank % 2 else kv.push("none", none))
            assert len(set(said)) == 1 and "rank 0: push of key 'none'" in said[0], said
            for _ in range(3):
                kv.pushpull("none", none)
                kv.pushpull("some", np.ones(5), some)
                assert (some == kv.num_workers).all()

    run("mpi_sync", body, **options)


def test_keys_in_another_order_where_workers_are_independent():
    need(2, servers=1)

    def body(kv):
        keys = ["a", "b", "c"]
        kv.init(keys, [np.zeros(200_000, np.float32)] * 3)
        gradient = mpips.empty(200_000)
        for key in keys if kv.rank % 2 else keys[::-1]:
            gradient[...] = 1
            kv.push(key, gradient)
        for key in keys:
            kv.pull(key, gradient)
            assert (gradient == kv.num_workers).all()

    run("dist_sync", body, servers=1)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_what_failed_is_forgotten_with_its_key(shared_memory):
    options = {"servers": 1, "shared_memory": shared_memory}
    need(2, **options)

    def body(kv):
        kv.init(["a", "b"], [np.zeros(5, np.float32), np.full(5, 7, np.float32)])
        workers, value, out = kv.layout.workers, np.ones(5, np.float32), np.zeros(5, np.float32)
        if kv.rank:
            kv.push("a", value)
        else:
            failure(lambda: kv.push("a", np.ones(3, np.float32)))
            kv.pull("a", out)  # the round has ended: all have been told
        workers.Barrier()
        kv.forget(["a"])
        kv.pull("b", out)
        assert (out == 7).all()
        assert goes_on(kv, "b", (5,))

    run("dist_sync", body, **options)


def test_options_that_make_no_sense():
    size = WORLD.size
    last = size - 1
    for options, word in [
        ({"servers": size}, "at least one worker need"),
        ({"servers": 0, "clients": size + 1}, f"more than the {size} workers"),
        ({"servers": 0, "stall_seconds": math.nan}, "must be finite"),
        ({"servers": 0, "workers": size + 1}, f"but the job has {size}"),
        ({"servers": 0, "masters": "none"}, "one, all"),
        ({"servers": 0, "staleness": 1}, "no worker runs ahead: ask for dist_async or mpi_async"),
        ({"servers": 0, "clients": 1 + (WORLD.rank == last)}, "option clients" if last else ""),
    ]:
        if word:
            said = WORLD.allgather(failure(lambda options=options: mpips.create("mpi_sync", **options)))
            assert len(set(said)) == 1 and word in said[0], said
    said = WORLD.allgather(failure(lambda: mpips.create("dist_async")))
    assert len(set(said)) == 1 and "needs a server" in said[0]
    assert "dist_sync" in failure(lambda: mpips.create("synchronous"))
    with pytest.raises(TypeError):
        mpips.create(3)


@only_on(3, 5)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_long_wait_names_key_and_ranks(shared_memory):
    need(2, servers=1)

    def body(kv):
        started(kv)
        kv.barrier()
        texts = []

        def heard(message, *_):
            texts.append(str(message))
            if sum("for ranks [" in text for text in texts) == 1 and "for ranks [" in texts[-1]:
                kv.layout.workers.Send(b"1", 1, TAG)

        if kv.rank == 1:
            tells(kv, [0])
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            if kv.rank == 0:
                warnings.showwarning = heard
            assert goes_on(kv)
        if kv.rank == 0:
            assert any(re.search(r"key 'w'.*for ranks \[1\b", text) for text in texts), texts

    run("dist_sync", body, servers=1, stall_seconds=0.2, shared_memory=shared_memory)


@only_on(3, 5)
def test_a_wait_that_is_too_long_fails_for_all():
    need(2, servers=1)

    def body(kv):
        started(kv)
        kv.barrier()
        if kv.rank == 1:
            tells(kv, [rank for rank in range(kv.num_workers) if rank != 1])
        said = failure(lambda: goes_on(kv))
        assert re.search(r"key 'w'.*for ranks \[.*\b1\b.*\]", said), said
        if kv.rank != 1:
            kv.layout.workers.Send(b"1", 1, TAG)
        kv.layout.workers.Barrier()
        assert goes_on(kv)

    run("dist_sync", body, servers=1, stall_seconds=0.5, timeout_seconds=1)


def test_a_worker_that_leaves_is_told_to_the_others():
    need(2, servers=1)

    def body(kv):
        started(kv)
        if kv.rank == 1:
            return
        said = failure(lambda: goes_on(kv))
        assert "rank 1, which has left" in said, said

    run("dist_sync", body, servers=1)


@pytest.mark.skipif(WORLD.size != 1, reason="starts a job of its own; once is enough")
@pytest.mark.parametrize("where", ["worker", "server"])
def test_an_uncaught_exception_ends_the_job(tmp_path, where):
    script = tmp_path / "job.py"
    script.write_text(f"""
import numpy as np, mpips
from mpi4py import MPI
from mpips import server
if {where == "server"}:
    server.ServerState.work = lambda self, ahead: 1 / 0
kv = mpips.create("dist_sync", servers=1)
kv.init("w", np.zeros(3, np.float32))
if kv.rank == 1:
    1 / 0
kv.pushpull("w", np.zeros(3, np.float32))
""")
    clean = {k: v for k, v in os.environ.items() if not re.match(r"OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|MPI_|MPIPS_", k)}
    clean["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "launch.run", "--workers", "2", "--servers", "1", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=JOB_LIMIT, env=clean, cwd=tmp_path, check=False
    )
    assert done.returncode != 0
    assert "ZeroDivisionError on rank " + ("2" if where == "server" else "1") in done.stderr
    assert "1 / 0" in done.stderr


@pytest.mark.skipif(WORLD.size != 1, reason="starts a job of its own; once is enough")
def test_an_exception_before_create_ends_a_bare_job(tmp_path):
    script = tmp_path / "job.py"
    script.write_text("""
import mpips
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    1 / 0
mpips.create("dist_sync", servers=1)
""")
    clean = {k: v for k, v in os.environ.items() if not re.match(r"OMPI_|PMIX_|PRTE_|PMI_|HYDRA_|MPI_|MPIPS_", k)}
    clean["PYTHONPATH"] = str(ROOT)
    options = {"capture_output": True, "text": True, "timeout": JOB_LIMIT, "env": clean, "cwd": tmp_path}
    asked = [sys.executable, "-m", "launch.run", "--workers", "2", "--servers", "1", "--dry-run", str(script)]
    words = shlex.split(subprocess.run(asked, **options).stdout)
    at = words.index("mpips")  # python -m mpips job.py, which has means of its own
    done = subprocess.run(words[: at - 1] + words[at + 1 :], **options)
    assert done.returncode != 0
    assert "1 / 0" in done.stderr and "ZeroDivisionError on rank 1 of 3" in done.stderr, done.stderr


def test_create_keeps_its_limits():
    """A rank comes late to `create` itself."""
    if WORLD.size < 2:
        pytest.skip("needs 2 ranks")
    late, said, until = WORLD.size - 1, [], time.monotonic() + 30

    def heard(message, category, filename, *_):
        said.append(f"{filename}: {message}")
        if len(said) == 1 and WORLD.rank == 0:
            WORLD.Send(b"1", late, TAG)

    while WORLD.rank == late and not WORLD.Iprobe(0, TAG) and time.monotonic() < until:
        time.sleep(0.01)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = heard
        kv = mpips.create("dist_sync", stall_seconds=0.2)
    kv.close()
    if WORLD.rank == late and WORLD.Iprobe(0, TAG):
        WORLD.Recv(bytearray(1), 0, TAG)
    words = f"{__file__}: mpips.create, to which not all {WORLD.size} ranks have come (all must call it, servers too)"
    assert WORLD.rank or said[0].startswith(words), said


@pytest.mark.parametrize("servers", [0, 1])
def test_a_closed_store_says_so(servers):
    need(1, servers=servers)

    def body(kv):
        kv.init("w", np.zeros(5000, np.float32))
        value = np.ones(5000, np.float32)
        kv.pushpull("w", value)
        handle = kv.ipush("w", value)
        handle.wait()
        kv.close()
        for call in (
            lambda: kv.push("w", value), lambda: kv.pull("w", value), lambda: kv.ipushpull("w", value), kv.barrier,
            lambda: kv.init("v", value), lambda: kv.set_optimizer("sgd"),
            lambda: kv.row_sparse_pull("w", value[:1], row_ids=[0]), lambda: kv.taken("w", handle),
        ):  # fmt: skip
            assert "the store is closed" in failure(call)

    run("dist_sync", body, servers=servers)
