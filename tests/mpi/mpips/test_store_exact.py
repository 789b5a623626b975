"""Synchronous stores give exact sums: all kinds, both masters, any clients and servers, shared memory and messages."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import mpips
from collectives.machine import THRESHOLD, TUNABLES
from tests.child import ROOT, outside
from tests.choice import pairwise
from tests.mpi.delays import put_off
from tests.mpi.mpips.exact import BIG, SMALLER, exact
from tests.mpi.mpips.support import WORLD, need, run
from tests.mpi.sizes import JOB_LIMIT, either_mpi, only_on


@either_mpi
@pytest.mark.parametrize("shared_memory", [True, False])
@pytest.mark.parametrize("servers", [0, 1, 2])
def test_every_worker_a_client(servers, shared_memory):
    need(servers=servers)
    options = {"servers": servers, "shared_memory": shared_memory, "big_array": BIG}
    run("dist_sync", lambda kv: exact(kv, shapes=SMALLER), **options)


@either_mpi
@pairwise(shared_memory=[True, False], masters=["one", "all"], clients=[1, 2, 3], servers=[1, 2])
def test_clients(servers, clients, masters, shared_memory):
    options = {"servers": servers, "clients": clients, "masters": masters, "shared_memory": shared_memory}
    need(2, **options)
    options["big_array"] = BIG
    run("mpi_sync", lambda kv: exact(kv, ("float32",), shapes=SMALLER), **options)


@pytest.mark.full
@pytest.mark.skipif(WORLD.size != 1, reason="starts a job of its own; once is enough")
def test_seven_workers_with_one_to_three_servers():
    command = [sys.executable, "-m", "launch.run", "--workers", "10", str(Path(__file__).with_name("seven.py"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOB_LIMIT, env=outside(), cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("exact") == 21, done.stdout


def test_compressed_pushes_keep_what_they_leave_out():
    n = need(servers=1)

    def body(kv):
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        for shape in ((3, 5), (1300, 900)):
            kv.init(str(shape), np.zeros(shape, np.float32))
            out = np.ones(shape, np.float32)
            kv.pull(str(shape), out)
            assert (out == 0).all()  # init is not compressed, and nothing was pushed
            for gradient, expected in ((0.0, 0.0), (0.3, 0.0), (0.3, 0.5), (0.1, 0.0), (0.4, 0.5), (-0.7, -0.5)):
                kv.push(str(shape), np.full(shape, gradient, np.float32))
                kv.pull(str(shape), out)
                assert np.allclose(out, expected * n), (shape, gradient, out[0])

    run("dist_sync", body, servers=1)


@pytest.mark.parametrize("servers", [0, 1])
def test_bfloat16_is_compressed_as_float16_is(servers):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    n = need(servers=servers)

    def body(kv):
        for options in ({"type": "2bit"}, {"type": "1bit"}, {"type": "fp16"}, {"type": "topk", "ratio": 0.5}):
            kv.set_gradient_compression(options)
            results = []
            for dtype in (np.float16, ml_dtypes.bfloat16):
                kv.init("w", np.zeros(4, dtype))
                out = np.array([0.75, -0.75, 0.25, 0.5], dtype)
                kv.pushpull("w", out)
                results.append(out.astype(float).tolist())
                kv.forget("w")
            assert results[0] == results[1], (options, results)
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.init("w", np.zeros(4, ml_dtypes.bfloat16))
        out = np.full(4, 0.75, ml_dtypes.bfloat16)
        kv.pushpull("w", out)
        assert (out.astype(float) == 0.5 * n).all(), out

    run("dist_sync", body, servers=servers)


@either_mpi
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"type": "1bit"},
        {"type": "fp16"},
        {"type": "int", "bits": 4},
        {"type": "topk", "ratio": 0.5},
    ],
)
def test_all_compressions_sum_up_in_the_long_run(options):
    need(servers=2)
    size = 1001

    def body(kv):
        if options:
            kv.set_gradient_compression(options)
        kv.init("w", np.zeros(size, np.float32))
        kv.set_optimizer("add")
        gradient = np.linspace(-1, 1, size, dtype=np.float32) * (kv.rank + 1)
        out = np.zeros(size, np.float32)
        for _ in range(20):
            kv.pushpull("w", gradient, out)
        total = 20 * np.linspace(-1, 1, size) * kv.num_workers * (kv.num_workers + 1) / 2
        assert np.abs(out - total).max() < 6 * kv.num_workers * (kv.num_workers + 1)

    run("dist_sync", body, servers=2, big_array=100)


def places(size):
    """(value, out) pairs: in place, apart, and overlapping both ways, in node-shared and in ordinary memory."""
    for make in (mpips.empty, lambda n: np.empty(n, np.float32)):
        both = make(size + 3)
        yield make(size), None
        yield make(size), make(size)
        yield both[:size], both[3:]
        yield both[3:], both[:size]


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("size", "past_caches"), [(100, 0), (40_001, 0), (40_001, 24_576)])
def test_the_sum_is_exact_wherever_value_and_result_lie(monkeypatch, servers, size, past_caches):
    need(servers=servers)
    if past_caches:
        monkeypatch.setenv(TUNABLES, f"{THRESHOLD}={past_caches}")

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        ramp = np.arange(size, dtype=np.float32) % 1000
        for turn in range(3):
            for value, out in places(size):
                value[...] = ramp + kv.rank + turn
                kv.pushpull("w", value, out, priority=turn)
                expected = kv.num_workers * (ramp + turn) + sum(range(kv.num_workers))
                assert ((value if out is None else out) == expected).all()

    run("dist_sync", body, servers=servers, block_bytes=4096, big_array=1000, small_bytes=1024)


ROUNDS = 60
STORES = [{"servers": 0}, {"servers": 1, "clients": 1}, {"servers": 1, "clients": 1, "masters": "all"}]


@pytest.mark.mpi
@only_on(2, 3, 4)
@pytest.mark.parametrize("options", STORES)
@pytest.mark.parametrize("calls", ["pushes", "pulls"])
def test_every_call_is_the_same_on_all_workers(options, calls):
    """One small key, again and again, by workers of which one is put off now and then."""
    workers = need(2, **options)

    def body(kv):
        kv.init("bias", np.zeros(10, np.float32))
        value, wrong, kept = np.zeros(10, np.float32), 0, []
        with put_off(0.002, 0.0046) if kv.rank == 1 else nullcontext():
            for number in range(ROUNDS):
                gradient = np.full(10, kv.rank + number, np.float32)
                kept.append(gradient)  # so that the next one lies elsewhere
                if calls != "pulls" or not number:
                    kv.push("bias", gradient)
                    expected = workers * number + workers * (workers - 1) // 2
                if calls != "pushes" or number == ROUNDS - 1:
                    kv.pull("bias", value)
                    wrong += int((value != expected).sum())
        return wrong

    assert run("mpi_sync", body, **options) in (0, None)
