"""Calls and what they refuse: bad options, bad arguments of all, a late rank, a closed store, a program that fails."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import warnings

import ml_dtypes
import numpy as np
import pytest

import mpips
from mpips import optimizers
from tests.child import outside
from tests.mpi.jobs import job
from tests.mpi.mpips import faults
from tests.mpi.mpips.support import TAG, WORLD, failure, need, run
from tests.mpi.sizes import JOB_LIMIT, core_on, only_on

SHAPE = (40, 3)
KINDS = [
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 1, "shared_memory": False}),
    ("dist_sync", {"servers": 0}),
    ("mpi_sync", {"servers": 1, "clients": 1}),
    ("mpi_sync", {"servers": 1, "clients": 2, "masters": "all"}),
]
kinds = pytest.mark.parametrize("kind, options", KINDS)


def goes_on(kv, key="w", shape=(4, 3)):
    """The store still sums."""
    out = np.zeros(shape, np.float32)
    kv.pushpull(key, np.full(shape, kv.rank + 1, np.float32), out)
    return bool((out == kv.num_workers * (kv.num_workers + 1) / 2).all())


def started(kv, shape=(4, 3)):
    kv.init("w", np.full(shape, 5, np.float32))
    return kv.num_workers - 1


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
        for bad, kind in ((None, "NoneType"), ([1.0, 2.0], "float")):
            said = failure(lambda: kv.pull("w", bad))  # noqa: B023
            assert said == f"pull: key 'w' needs an array, not {kind}: pass one, which the value is written into"
        said = failure(lambda: kv.read_by_servers("w", None))
        assert said == "read_by_servers: push=None is no handle: pass what ipush of these keys has returned"
        for size in (3.7, "three", None, True):
            said = failure(lambda: kv.recut(["w"], {"v": size}))  # noqa: B023
            assert said == f"recut: key 'v' is to have {size!r} elements: pass an int"
        said = failure(lambda: kv.recut(["w"], {"a": -1, "b": 13}))
        assert said == "recut: key 'a' is to have -1 elements: pass 0 or more"
        said = failure(lambda: kv.set_gradient_compression({"type": ["2bit"]}))
        assert said.startswith("unknown compression type ['2bit']: the known ones are")
        said = failure(lambda: kv.set_gradient_compression({"type": "2bit", 1: 2, "x": 3}))
        assert said.startswith("2bit compression has no option 1, x")
        assert "read-only" in failure(lambda: kv.pull("w", locked))
        assert "not contiguous" in failure(lambda: kv.pull("w", np.zeros((8, 3), np.float32)[::2]))
        assert "float32(4, 3)" in failure(lambda: kv.pull("w", np.zeros(3, np.float32)))
        assert "mixed" in failure(lambda: kv.push(["w", 1], [good, good]))
        assert "2 keys needs a list of 2 as out, not a list of 1" in failure(lambda: kv.pull(["w", "v"], [good]))
        for dtype in (np.dtype("f4").newbyteorder(), "S5", bool, np.longdouble, ml_dtypes.float8_e5m2):
            assert "pass float16" in failure(lambda: kv.init("v", np.zeros(3, dtype)))  # noqa: B023
        for call in (kv.push, kv.pull, kv.pushpull, lambda *words, **named: kv.ipushpull(*words, **named).wait()):
            for bad in (1.5, True):
                said = failure(lambda: call("w", good, priority=bad))  # noqa: B023
                assert f"priority={bad} is no int: pass one" in said
            said = failure(lambda: call("w", good, priority=-(1 << 31)))  # noqa: B023
            assert "priority=-2147483648 is out of range: pass an int from -2147483647 to 2147483647" in said
        said = failure(lambda: kv.ipush("w", good, turns=[[1]]))
        assert said.startswith("push: turns=[[1]] holds [1]: pass hashable names"), said
        assert "unknown optimizer" in failure(lambda: kv.set_optimizer("sdg"))
        assert kv.is_capable("optimizer") and "unknown capability" in failure(lambda: kv.is_capable("magic"))
        assert goes_on(kv)

    run(kind, body, **options)


@core_on(3)
@pytest.mark.mpi(min_size=3)
def test_arrays_that_are_read_in_place_are_pushed_in_one_order():
    """A push of them waits until all push the key; who waits for one another in a circle hears of it."""
    need(2, servers=1)

    def body(kv):
        kv.init(["a", "b"], [np.zeros(200_000, np.float32)] * 2)
        gradient = mpips.empty(200_000)
        gradient[...] = 1
        first, second = "ab" if kv.rank % 2 else "ba"
        kv.layout.workers.Barrier()  # who is still in `init` would hear of it there
        said = failure(lambda: (kv.push(first, gradient), kv.push(second, gradient)))
        assert "use keys in the same order on all ranks" in said, said
        assert kv.recover() == {"a": 0, "b": 0}
        kv.pushpull(["a", "b"], [gradient, mpips.empty(200_000)])
        assert (gradient == kv.num_workers).all()

    run("dist_sync", body, servers=1)


@pytest.mark.parametrize("servers", [0, 1])
def test_keys_are_what_messages_can_hold(servers):
    need(1, servers=servers)

    def body(kv):
        ones, out = np.ones(3, np.float32), np.empty(3, np.float32)
        kv.init(list(np.array(["w", "b"])), [ones, ones])
        kv.pushpull(np.str_("w"), ones, out)
        assert (out == kv.num_workers).all()
        said = failure(lambda: kv.init("\ud800" if kv.rank == 0 else "v", ones))
        assert r"init: key '\ud800' holds '\ud800', which UTF-8 has no bytes for: pass another key" in said
        assert r"key '\ud800' holds" in failure(lambda: kv.recut(["w"], {"\ud800": 3}))
        kv.forget(["w", np.str_("b")])
        said = failure(lambda: kv.init(1 << 70 if kv.rank == 0 else 1, ones))
        assert f"init: key {1 << 70} is out of range: pass an int from -2**63 to 2**63 - 1" in said
        kv.init([-(1 << 63), (1 << 63) - 1], [ones, ones])
        kv.pushpull(-(1 << 63), ones, out)

    run("dist_sync", body, servers=servers)


@pytest.mark.parametrize("servers", [0, 1])
def test_a_broadcast_into_an_array_that_does_not_fit_makes_no_key(servers):
    need(1, servers=servers)

    def body(kv):
        ones, out = np.ones(3), np.zeros(3)
        said = failure(lambda: kv.broadcast("w", ones, np.zeros(4) if kv.rank == 0 else out))
        assert "'w' was initialised as float64(3,), but this array is float64(4,)" in said, said
        assert "priority=1.5 is no int" in failure(lambda: kv.broadcast("w", ones, out, priority=1.5))
        assert "needs a list of 1 as out" in failure(lambda: kv.broadcast(["w"], [ones], out))
        kv.broadcast("w", ones + kv.rank, out)
        assert (out == 1).all()

    run("dist_sync", body, servers=servers)


@pytest.mark.parametrize("servers", [0, 1])
def test_first_values_of_several_arrays_are_summed(servers):
    need(1, servers=servers)

    def body(kv):
        ones = np.ones(3, np.float32)
        said = failure(lambda: kv.init("v", [ones, "nonsense"]))
        assert "key 'v' needs an array, not str" in said, said
        said = failure(lambda: kv.init("v", [ones, np.ones((2, 7))]))
        assert said == "init: the arrays of key 'v' are float32(3,), float64(2, 7): pass arrays of one shape and dtype"
        kv.init(["v", "w", "s"], [[ones, ones], ones, [ones[:1].reshape(())] * 2])
        outs = [np.empty(3, np.float32), np.empty(3, np.float32), np.empty((), np.float32)]
        kv.pull(["v", "w", "s"], outs)
        assert [out.reshape(-1)[0] for out in outs] == [2, 1, 2] and (ones == 1).all()

    run("dist_sync", body, servers=servers)


@pytest.mark.parametrize("servers", [0, 1])
def test_numbers_that_are_too_big_are_refused(servers):
    need(1, servers=servers)

    def body(kv):
        started(kv)
        kv.set_optimizer("sgd", learning_rate=0.1)
        assert "give a finite number" in failure(lambda: optimizers.Constant(10**400))
        for big in (10**400, 10**5000):  # of the second Python makes no text
            big = big if kv.rank == 0 else 0.5
            for call in (
                lambda: kv.set_optimizer("sgd", learning_rate=big),  # noqa: B023
                lambda: kv.set_gradient_compression({"type": "2bit", "threshold": big}),  # noqa: B023
                lambda: kv.update_optimizer(learning_rate=big),  # noqa: B023
            ):
                with pytest.raises(ValueError):
                    call()
        said = failure(lambda: kv.update_optimizer(learning_rate=1 << 70))
        assert f"={1 << 70} does not fit into 64 bits" in said, said
        kv.update_optimizer(learning_rate=0.5)

    run("dist_sync", body, servers=servers)


def test_options_that_make_no_sense():
    size = WORLD.size
    last = size - 1
    for options, word in [
        ({"servers": size}, "at least one worker need"),
        ({"servers": 0, "clients": size + 1}, f"more than the {size} workers"),
        ({"servers": 0, "workers": size + 1}, f"but the job has {size}"),
        ({"servers": 0, "clients": 1 + (WORLD.rank == last)}, "option 'clients'" if last else ""),
    ]:
        if word:
            said = WORLD.allgather(failure(lambda options=options: mpips.create("mpi_sync", **options)))
            assert len(set(said)) == 1 and word in said[0], said
    said = WORLD.allgather(failure(lambda: mpips.create("dist_async")))
    assert len(set(said)) == 1 and "needs a server" in said[0]
    assert "dist_sync" in failure(lambda: mpips.create("synchronous"))
    with pytest.raises(TypeError):
        mpips.create(3)


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
    who = "all must call it, servers too, which leave when their last store is closed"
    words = f"{__file__}: mpips.create, to which not all {WORLD.size} ranks have come ({who})"
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
            lambda: kv.push("w", value),
            lambda: kv.pull("w", value),
            lambda: kv.ipushpull("w", value),
            kv.barrier,
            lambda: kv.init("v", value),
            lambda: kv.set_optimizer("sgd"),
            lambda: kv.row_sparse_pull("w", value[:1], row_ids=[0]),
            lambda: kv.read_by_servers("w", handle),
            kv.recover,
        ):
            assert "the store is closed" in failure(call)

    run("dist_sync", body, servers=servers)


@pytest.mark.core(1)
@only_on(1)
@pytest.mark.parametrize("where", ["worker", "server"])
def test_an_uncaught_exception_ends_the_job(tmp_path, where):
    script = f"""
import numpy as np, mpips
from mpi4py import MPI
from mpips.store.server import loop
if {where == "server"}:
    loop.Server.turn = lambda self: 1 / 0
kv = mpips.create("dist_sync", servers=1)
kv.init("w", np.zeros(3, np.float32))
if kv.rank == 1:
    1 / 0
kv.pushpull("w", np.zeros(3, np.float32))
"""
    done = job(tmp_path, script, "-w 2 -s 1")
    assert done.returncode != 0
    assert "ZeroDivisionError on rank " + ("2" if where == "server" else "1") in done.stderr
    assert "1 / 0" in done.stderr


@pytest.mark.slow
@only_on(1)
def test_an_exception_before_create_ends_a_bare_job(tmp_path):
    script = tmp_path / "job.py"
    script.write_text("""
import mpips
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    1 / 0
mpips.create("dist_sync", servers=1)
""")
    options = {"capture_output": True, "text": True, "timeout": JOB_LIMIT, "env": outside(), "cwd": tmp_path}
    asked = [sys.executable, "-m", "launch.run", "--workers", "2", "--servers", "1", "--dry-run", str(script)]
    words = shlex.split(subprocess.run(asked, **options).stdout)
    at = words.index("mpips")  # python -m mpips job.py, which has means of its own
    done = subprocess.run(words[: at - 1] + words[at + 1 :], **options)
    assert done.returncode != 0
    assert "1 / 0" in done.stderr and "ZeroDivisionError on rank 1 of 3" in done.stderr, done.stderr


@only_on(3)
def test_a_setting_while_a_worker_is_a_round_ahead_is_refused_everywhere():
    need(2, servers=1)

    def body(kv):
        one, out = np.ones(3, np.float32), np.empty(3, np.float32)
        kv.init("w", one)
        kv.set_optimizer("sgd", learning_rate=1.0)
        if kv.rank == 0:
            kv.push("w", one)
        for call in (
            lambda: kv.set_optimizer("sgd", learning_rate=0.5),
            lambda: kv.update_optimizer(learning_rate=0.5),
            lambda: kv.set_gradient_compression({"type": "fp16"}),
            lambda: kv.save_optimizer_states("unused"),
            lambda: kv.forget("w"),
            lambda: kv.recut(["w"], {"x": 3}),
        ):
            assert "pushes of key 'w' is 1 on rank 0 and 0 on rank 1: call it after" in failure(call)
        kv.init("v", one)
        if kv.rank:
            kv.push("w", one)
        kv.pull("w", out)
        assert (out == 1 - kv.num_workers).all() and kv.generation == 0

    run("dist_sync", body, servers=1, timeout_seconds=20)


@pytest.mark.core(1)
@only_on(3, 5)
@pytest.mark.parametrize("servers, clients", [(0, 1), (1, 1)])
def test_limits_of_create_hold_inside_collectives(servers, clients):
    """A worker that comes late to an allreduce of the workers, or to its client's reduction."""
    need(2, servers=servers)

    def body(kv):
        comm, late = faults.workers(servers), kv.num_workers - 1
        kv.init("w", np.ones(200_000, np.float32))
        kv.barrier()
        gradient = np.ones(200_000, np.float32)
        if kv.rank == late:
            for other in range(late):
                comm.recv(source=other)
        said = faults.hear(lambda: kv.pushpull("w", gradient))
        if kv.rank != late:
            comm.send(None, late)
        every = comm.allgather(said)
        assert len({one.sentence for one in every}) == 1 and said.error.startswith("Store"), every
        assert {one.error for one in every[:late]} == {"StoreStallError"}, every
        assert re.search(rf"ranks? (\d+, )*{late}\b", said.sentence) and "'w'" in said.sentence, said.sentence
        kv.recover()
        kv.pushpull("w", gradient := np.ones(200_000, np.float32))
        assert (gradient == kv.num_workers).all()

    run("mpi_sync", body, servers=servers, clients=clients, stall_seconds=0.3, timeout_seconds=1.5)


@only_on(3, 5)
@pytest.mark.parametrize("kind, options", [*KINDS, ("mpi_sync", {"servers": 1, "clients": 1, "shared_memory": False})])
def test_a_worker_that_leaves_is_told_to_the_others(kind, options):
    """It has closed the store, and they still use it: one sentence, and they can close it, too."""
    need(2, **options)

    comm = faults.workers(options["servers"])

    def body(kv):
        late = kv.num_workers - 1
        started(kv)
        goes_on(kv)
        comm.Barrier()  # whoever is still in the first call when another's second one fails hears of it there
        if kv.rank == late:
            return late, None  # and the store is closed
        return late, faults.hear(lambda: goes_on(kv))

    found = run(kind, body, **options)
    if found is not None:  # all have closed it: who closes waits a while for the others
        late, said = found
        every = [one for one in comm.allgather(said) if one is not None]
        assert len({one.sentence for one in every}) == 1 and every[0].error.startswith("Store"), every
        assert f"rank {late}" in every[0].sentence, every[0].sentence
