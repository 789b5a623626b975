"""What ends a store's generation: every worker raises the same sentence soon, and after `recover` sums are exact.

An argument error is local and changes nothing. A few cells of the table (`cells`) are made here; the whole table is
`python -m tests.mpi.mpips.fault_table`.
"""

from __future__ import annotations

import re
import sys
import warnings
from itertools import product

import numpy as np
import pytest

import mpips
from tests.choice import first
from tests.mpi.mpips import faults
from tests.mpi.mpips.cells import KINDS, LIVING, WAYS
from tests.mpi.mpips.fault_table import RANKS, Place, deadly
from tests.mpi.mpips.support import WORLD, need, run
from tests.mpi.sizes import only_on

P = WORLD.size


def wrong(cells, nodes=False):
    """What is not as it should be in these cells, as worker 0 sees it."""
    found = {}
    for fault, way, kind in cells:
        seen = faults.run(fault, way, kind, nodes)
        if seen is not None and (words := seen.judged(fault)):
            found[fault, way, kind] = words
    return found


def way_of(fault, kind, more=0):
    """One way to call for each cell, another one on another number of ranks."""
    return WAYS[(LIVING.index(fault) + list(KINDS).index(kind) + P // 2 + more) % len(WAYS)]


def every_fault(*stopped, of=1):
    """Every fault in every kind of store; in `make test` one `of` so many of them, and a worker that stops, which costs
    seconds, in these kinds."""
    chosen = {(fault, kind) for i, fault in enumerate(LIVING) for j, kind in enumerate(KINDS) if (i + j) % of == 0}
    chosen = {cell for cell in chosen if cell[0] != "stop"} | {("stop", kind) for kind in stopped}
    return pytest.mark.parametrize(
        "fault, kind",
        [pytest.param(*cell, marks=[] if cell in chosen else [pytest.mark.full]) for cell in product(LIVING, KINDS)],
    )


@pytest.mark.core(6)
@only_on(3, 5)
@every_fault("dist_sync", "mpi_sync-0")
def test_a_fault_on_one_node(fault, kind):
    assert not wrong([(fault, way_of(fault, kind), kind)])


@pytest.mark.core(2)
@only_on(3, 5)
@every_fault("mpi_sync-2", "dist_async", of=2)
def test_a_fault_between_nodes(fault, kind):
    assert not wrong([(fault, way_of(fault, kind, 1), kind)], nodes=True)


@pytest.mark.core(1)
@only_on(1)
@first(
    2,
    **{
        "fault, way, kind": [
            ("exit", "push", "dist_sync"),
            ("exception", "list", "mpi_sync-2"),
            ("exit", "handle", "mpi_sync-0"),
            ("exception", "pushpull", "dist_async"),
            ("exit", "pushpull", "mpi_async"),
        ]
    },
)
def test_a_worker_that_dies(fault, way, kind):
    assert not deadly(Place(sys.executable, module="tests.mpi.mpips.faults", ranks=RANKS), fault, way, kind).wrong


def raised(kv, call):
    """What a call raises here: (error, sentence); ("", "") for nothing."""
    return faults.hear(call)[:2]


def everywhere(kv, call):
    """The same, having seen that all workers raise it. None makes it while another is still in the call before."""
    comm = faults.workers(kv.layout.options.servers)
    comm.Barrier()
    said = comm.allgather(raised(kv, call))
    assert len(set(said)) == 1, said
    return said[0]


@only_on(2, 3, 4)
@pytest.mark.parametrize("kind, servers", [("dist_sync", 1), ("mpi_sync", 0), ("mpi_sync", 1), ("dist_async", 1)])
def test_bad_arguments_are_local(kind, servers):
    """They raise on the worker that gives them, before anything is sent; the others hear nothing."""
    need(2 if servers == 0 else 1, servers=servers)

    def body(kv):
        comm = faults.workers(servers)
        x = np.ones(10, np.float32)
        kv.init(["w", "v"], [x, x])
        if not kv.type.endswith("_sync"):
            kv.set_optimizer("sgd", learning_rate=0.0)
        frozen = np.ones(10, np.float32)
        frozen.flags.writeable = False
        bad = [
            (lambda: kv.push("w", x[:5]), r"w.*\(10,\).*\(5,\)|w.*\(5,\).*\(10,\)"),
            (lambda: kv.push("w", x.astype(np.int64)), "float32"),
            (lambda: kv.push("u", x), "'u'"),
            (lambda: kv.pull("w", frozen), "read-only"),
            (lambda: kv.pull("w", x[::2]), "contiguous"),
            (lambda: kv.pushpull(["w", "w"], [x, x]), "w"),
            (lambda: kv.pushpull(["w", "v"], [x]), ""),
            (lambda: kv.pushpull("w", None), "None"),
            (lambda: kv.push("w", x, priority="high"), "priority"),
            (lambda: kv.ipush("w", "x"), "str"),
            (lambda: kv.row_sparse_pull("w", x, row_ids=[10]), ""),
            (lambda: kv.push(3, x), "3"),
        ]
        generation = kv.generation
        if kv.rank == kv.num_workers - 1:
            for call, words in bad:
                error, sentence = raised(kv, call)
                assert error in ("ValueError", "TypeError") and re.search(words, sentence), (error, sentence)
        comm.Barrier()
        for turn in range(1, 4):
            kv.pushpull(["w", "v"], [x * turn, x * turn], [out := np.empty_like(x), np.empty_like(x)])
            if kind.endswith("_sync"):
                assert (out == turn * kv.num_workers).all()
        assert kv.generation == generation

    run(kind, body, servers=servers)


@only_on(2, 3, 4)
@pytest.mark.parametrize("servers", [0, 1])
def test_bad_calls_that_all_make_together_change_nothing(servers):
    """One worker's bad or different argument: all raise the same sentence, and the next call works."""
    need(2, servers=servers)

    def body(kv):
        odd = kv.rank == kv.num_workers - 1
        last = kv.num_workers - 1
        for call, error, words in [
            (lambda: kv.init("w", np.zeros(3 + odd)), "ValueError", r"'w' is float64\(3,\) on rank 0 and .*\(4,\)"),
            (lambda: kv.init("wv"[odd], np.zeros(3)), "ValueError", "has key 'w' where rank .* has key 'v'"),
            (lambda: kv.init("w", "x" if odd else np.zeros(3)), "TypeError", f"rank {last}.*str"),
            (lambda: kv.init(["w", "v"][: 1 + odd], [np.zeros(3)] * (1 + odd)), "ValueError", "'v' is missing"),
            (lambda: kv.set_optimizer("sgd", learning_rate=0.1 + odd), "ValueError", "1.1"),
            (lambda: kv.set_optimizer("sgd" if not odd else "sdg"), "ValueError", f"rank {last}.*sdg"),
            (lambda: kv.set_gradient_compression({"type": "2bit" if odd else "1bit"}), "ValueError", "OneBit|1bit"),
        ]:
            found, sentence = everywhere(kv, call)
            assert found == error and re.search(words, sentence), (found, sentence)
        kv.init("w", np.zeros(3))
        for call, words in [
            (lambda: kv.init("w", np.zeros(3)), "'w' was already"),
            (lambda: kv.forget(None if odd else ["w"]), f"rank {last}"),
            (lambda: kv.forget(["nobody"] if odd else ["w"]), "nobody"),
            (lambda: kv.recut(["w"], {"a": 2 + odd}), "3 elements"),
            (lambda: kv.save("/nowhere/x"), "no folder /nowhere"),
            (lambda: kv.load("/nowhere/x"), "/nowhere/x cannot be read"),
        ]:
            found, sentence = everywhere(kv, call)
            assert found in ("ValueError", "TypeError") and re.search(words, sentence), (found, sentence)
        assert kv.generation == 0
        kv.pushpull("w", x := np.full(3, kv.rank + 1.0))
        assert (x == kv.num_workers * (kv.num_workers + 1) // 2).all()

    run("dist_sync" if servers else "mpi_sync", body, servers=servers)


@only_on(3)
def test_a_wait_warns_before_it_raises():
    def body(kv):
        comm = faults.workers(1)
        kv.init("w", np.zeros(3))
        texts = []
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *_: texts.append(str(message))
            if kv.rank == 1:
                comm.recv(source=0)
                kv.pushpull("w", np.ones(3))
            else:
                handle = kv.ipushpull("w", x := np.ones(3))
                until = faults.time.monotonic() + 20
                while not texts and faults.time.monotonic() < until:
                    handle.test()
                comm.send(None, 1)
                handle.wait()
                assert (x == 2).all() and re.search(r"'w'.*rank.*1", texts[0]), texts

    run("dist_sync", body, servers=1, stall_seconds=0.3, timeout_seconds=30)


@only_on(3)
@pytest.mark.parametrize("servers", [0, 1])
def test_recovering_again_and_again(servers):
    """Also a store that is well. Rounds and values stay."""

    def body(kv):
        kv.init("w", np.zeros(50_000))
        for turn in range(6):
            if turn % 2:
                error, _ = everywhere(kv, lambda: kv.barrier() if kv.rank else kv.init("u", np.zeros(2)))
                assert error in ("ValueError", "StoreMismatchError")
            rounds = kv.recover()
            assert rounds == {"w": turn} and kv.generation == turn + 1
            kv.pushpull("w", x := np.full(50_000, turn + 1.0))
            assert (x == (turn + 1) * kv.num_workers).all()
            kv.layout.workers.Barrier()  # who still waits for the sum would hear that another recovers

    run("dist_sync" if servers else "mpi_sync", body, servers=servers)


@only_on(3)
@pytest.mark.parametrize("size", [5, 70_001])
@pytest.mark.parametrize("kind, servers", [("dist_sync", 1), ("mpi_sync", 0), ("dist_async", 1), ("mpi_async", 1)])
def test_who_only_reads_hears_of_the_end(kind, servers, size):
    """Reading the memory of a server needs nobody who could tell of it."""

    def body(kv):
        kv.init("w", w := np.zeros(size))
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.pull("w", w)
        kv.layout.workers.Barrier()
        heard, until = kv.rank == 0, faults.time.monotonic() + 10
        while not heard and faults.time.monotonic() < until:
            try:
                kv.pull("w", w)
            except mpips.StoreError as error:
                heard = "rank 0 calls recover" in str(error)
        kv.recover()
        assert heard, "no pull has raised"

    run(kind, body, servers=servers, timeout_seconds=60)
