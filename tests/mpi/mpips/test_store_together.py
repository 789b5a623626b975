"""One worker does wrong, or something else than the others: all hear the same, nobody hangs, the store goes on."""

from __future__ import annotations

import re
import time
import warnings

import numpy as np
import pytest

from mpips import talk
from mpips.server import Server
from tests.mpi.mpips.support import TAG, failure, need, run, tells
from tests.mpi.sizes import only_on

STORES = [
    ("dist_sync", {"servers": 1}),
    ("dist_sync", {"servers": 2, "big_array": 10}),
    ("dist_sync", {"servers": 1, "shared_memory": False}),
    ("dist_sync", {"servers": 0}),
    ("mpi_sync", {"servers": 1, "clients": 1}),
    ("mpi_sync", {"servers": 1, "clients": 2}),
    ("mpi_sync", {"servers": 1, "clients": 2, "masters": "all"}),
    ("mpi_sync", {"servers": 1, "clients": 1, "shared_memory": False}),
    ("mpi_sync", {"servers": 2, "clients": 2, "masters": "all", "shared_memory": False}),
]
ASYNCHRONOUS = [("dist_async", {"servers": 1}), ("mpi_async", {"servers": 1, "clients": 2})]
SERVED = [(kind, options) for kind, options in STORES if options["servers"]]
stores = pytest.mark.parametrize("kind, options", STORES)
SHAPE = (40, 3)


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Workers say early what they wait for."""
    monkeypatch.setattr(talk, "SPEAK_SECONDS", 0.02)


def ones():
    return np.ones(SHAPE, np.float32)


def started(kv):
    """Two keys; the rank that will do wrong."""
    kv.init(["v", "w"], [np.full(SHAPE, 5, np.float32)] * 2)
    return kv.num_workers - 1


def told(kv, call):
    """What each worker's error or, if there is none, warning says."""
    said = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            said = str(error)
        for _ in range(5):
            kv.barrier()
            said = said or " ".join({str(warning.message) for warning in caught})
            everybody = kv.layout.workers.allgather(said)
            if all(everybody):
                break
            time.sleep(0.01)
    return everybody


def intact(kv):
    """Both keys hold what they held, and sum again."""
    out = ones()
    for key in ("v", "w"):
        kv.pull(key, out)
        assert (out == 5).all(), (key, out[0])
    kv.pushpull(["v", "w"], [np.full(SHAPE, kv.rank + 1, np.float32)] * 2, [out, other := ones()])
    total = kv.num_workers * (kv.num_workers + 1) / 2
    assert (out == total).all() and (other == total).all(), (out[0], other[0])


BAD = {
    "unknown": (lambda call: call("x", ones()), "key 'x' was not initialised"),
    "no keys": (lambda call: call([], []), "an empty list of keys"),
    "mixed": (lambda call: call(["w", 1], [ones(), ones()]), "not mixed, as 'w' and 1 are"),
    "unequal": (lambda call: call(["v", "w"], [ones()]), "2 keys needs a list of 2 as value, not a list of 1"),
    "second": (lambda call: call(["v", "w"], [ones(), np.ones(7, np.float32)]), "key 'w' was initialised as float32"),
    "no array": (lambda call: call("w", None), "key 'w' needs an array, not NoneType"),
}


@stores
@pytest.mark.parametrize("fault", BAD)
@pytest.mark.parametrize("what", [
    pytest.param("push", marks=only_on(2, 3, 5)), pytest.param("pushpull", marks=only_on(3, 5)),
    pytest.param("ipushpull", marks=only_on(2, 4, 7)),
])  # fmt: skip
def test_a_bad_push_of_one_worker(kind, options, fault, what):
    need(2, **options)
    if what == "ipushpull" and fault not in ("unknown", "second"):
        pytest.skip("the others are refused before anything starts, as in pushpull")
    wrong, words = BAD[fault]

    def body(kv):
        bad = started(kv)

        def call(key, value):
            if what == "push":
                kv.push(key, value)
                kv.pull(key, [ones() for _ in key] if isinstance(key, list) else ones())
            elif what == "pushpull":
                kv.pushpull(key, value)
            else:
                kv.ipushpull(key, value).wait()

        keys = "w" if fault in ("unknown", "no array") else ["v", "w"]
        good = ones() if keys == "w" else [ones(), ones()]
        said = told(kv, lambda: wrong(call) if kv.rank == bad else call(keys, good))
        assert len(set(said)) == 1 and words in said[0] and f"rank {bad}" in said[0], said
        intact(kv)

    run(kind, body, **options)


@stores
def test_a_bad_call_of_one_worker_that_the_others_did_not_make(kind, options):
    if not options["servers"] or options.get("clients") == 1:
        pytest.skip("there the other workers take part in every push")
    need(2, **options)

    def body(kv):
        bad = started(kv)
        if kv.layout.client.Get_size() == 1 and kv.rank == bad:
            assert "'x' was not initialised" in failure(lambda: kv.push("x", ones()))
        kv.barrier()
        intact(kv)

    run(kind, body, **options)


@stores
def test_a_bad_target_of_one_worker(kind, options):
    need(2, **options)

    def body(kv):
        bad = started(kv)
        locked = ones()
        locked.flags.writeable = False
        for target, words in ((np.ones(3, np.float32), "float32(3,)"), (locked, "read-only")):
            mine = target if kv.rank == bad else ones()
            for call in (lambda mine=mine: kv.pushpull("w", ones(), mine), lambda mine=mine: kv.pull("w", mine)):
                said = told(kv, call)
                assert len(set(said)) == 1 and words in said[0] and f"rank {bad}" in said[0], said
        said = told(kv, lambda: kv.row_sparse_pull("w", ones()[:1], row_ids=[99 if kv.rank == bad else 0]))
        assert len(set(said)) == 1 and "rows 0..39, not [99]" in said[0] and f"rank {bad}" in said[0], said
        intact(kv)

    run(kind, body, **options)


@pytest.mark.parametrize("kind, options", ASYNCHRONOUS)
def test_asynchronous_workers_hear_of_anothers_mistake_and_go_on(kind, options):
    need(2, **options)

    def body(kv):
        bad = started(kv)
        kv.set_optimizer("add")
        for call in (kv.push, kv.pushpull):
            for key, value in (("w", np.ones(3, np.float32)), ("x", ones())):
                mine = (key, value) if kv.rank == bad else ("w", ones())
                said = told(kv, lambda call=call, mine=mine: call(*mine))
                assert all(f"rank {bad}: {call.__name__}: key {key!r}" in text for text in said), said
        kv.barrier()
        kv.pushpull("w", ones(), ones())

    run(kind, body, **options)


@stores
@pytest.mark.parametrize("call", ["pushpull", "push and pull", "list"])
def test_keys_in_another_order(kind, options, call):
    """Either the order does not matter, and sums are right, or all raise the same sentence."""
    need(2, **options)
    if options.get("clients") == 2:
        pytest.skip("several clients may find it out apart; docs/kvstore.md says so")

    def body(kv):
        started(kv)
        keys = ["v", "w"] if kv.rank else ["w", "v"]
        grads = {"v": np.full(SHAPE, 1, np.float32), "w": np.full(SHAPE, 2, np.float32)}
        outs = {"v": ones(), "w": ones()}

        def body():
            if call == "list":
                kv.pushpull(keys, [grads[key] for key in keys], [outs[key] for key in keys])
            for key in keys if call != "list" else ():
                if call == "pushpull":
                    kv.pushpull(key, grads[key], outs[key])
                else:
                    kv.push(key, grads[key])
                    kv.pull(key, outs[key])

        said = kv.layout.workers.allgather(failure(body))
        assert len(set(said)) == 1, said
        if said[0] == "nothing was raised":
            assert (outs["v"] == kv.num_workers).all() and (outs["w"] == 2 * kv.num_workers).all()
            return
        assert "same order" in said[0] and "rank 0" in said[0] and "'w'" in said[0], said
        assert "rank 1" in said[0] and "'v'" in said[0], said
        intact(kv)

    run(kind, body, **options)


@stores
@pytest.mark.parametrize("what", ["barrier", "pushpull", "set_optimizer", "init"])
def test_a_worker_that_closes_while_the_others_go_on(kind, options, what):
    need(2, **options)

    def body(kv):
        last = started(kv)
        calls = {
            "barrier": kv.barrier, "pushpull": lambda: kv.pushpull("w", ones()),
            "set_optimizer": lambda: kv.set_optimizer("add"), "init": lambda: kv.init("z", ones()),
        }  # fmt: skip
        if kv.rank != last:
            for _ in range(2):
                said = failure(calls[what])
                assert "close" in said or f"rank {last}, which has left" in said, said

    run(kind, body, **options)


@pytest.mark.parametrize("kind, options", SERVED)
def test_a_worker_closes_for_good_though_servers_hear_late_that_it_left(monkeypatch, kind, options):
    """The workers notice first that those who wait for it wait in vain."""
    need(2, **options)
    heard = Server._bye

    def late(server, worker, frame):
        time.sleep(0.15)
        return heard(server, worker, frame)

    monkeypatch.setattr(Server, "_bye", late)

    def body(kv):
        if kv.rank != started(kv):
            assert failure(lambda: kv.pushpull("w", ones())) != "nothing was raised"

    run(kind, body, **options)


@only_on(3, 4)
@stores
@pytest.mark.parametrize("count", [1, 2])
def test_bad_calls_may_be_the_last_before_the_store_is_closed(kind, options, count, monkeypatch):
    """The others close it too, and never come to calls of theirs that could have been these."""
    need(2, **options)
    monkeypatch.setattr(talk, "ANSWER_SECONDS", 0.1)

    def body(kv):
        if kv.rank == started(kv):
            for _ in range(count):
                assert "'zz'" in failure(lambda: kv.push("zz", ones()))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run(kind, body, **options)


@stores
def test_a_barrier_that_others_do_not_come_to_because_they_wait(kind, options):
    need(2, **options)

    def body(kv):
        started(kv)

        def call():
            if kv.rank == 0:
                kv.barrier()
            kv.pushpull("w", ones())
            if kv.rank:
                kv.barrier()

        said = failure(call)
        if kv.rank == 0:
            failure(lambda: kv.pushpull("w", ones()))
        else:
            failure(kv.barrier)
            assert said != "nothing was raised"
            assert "barrier" in said, said

    run(kind, body, **options)


@pytest.mark.parametrize("kind, options", [
    ("dist_async", {"servers": 1}), ("dist_async", {"servers": 1, "shared_memory": False}),
    ("dist_async", {"servers": 1, "staleness": 2}), ("mpi_async", {"servers": 1, "clients": 2}),
    ("mpi_async", {"servers": 1, "clients": 2, "masters": "all"}),
])  # fmt: skip
def test_after_a_barrier_all_pushes_count(kind, options):
    need(**options)

    def body(kv):
        kv.set_optimizer("sgd", learning_rate=1.0)
        kv.init("w", np.zeros(SHAPE, np.float32))
        each = kv.num_workers * (kv.num_workers + 1) / 2
        out = ones()
        for step in range(1, 21):
            for _ in range(2):
                kv.push("w", np.full(SHAPE, kv.rank + 1, np.float32))
            kv.barrier()
            kv.pull("w", out)
            assert (out == -2 * step * each).all(), (step, out[0], -2 * step * each)
            kv.barrier()

    run(kind, body, **options)


def test_a_barrier_does_not_wait_for_pushes_that_staleness_holds_back():
    need(2, servers=1)

    def body(kv):
        kv.init("w", np.zeros(SHAPE, np.float32))
        kv.set_optimizer("add")
        for _ in range(1 if kv.rank else 4):
            kv.push("w", ones())
        kv.barrier()
        for _ in range(3 if kv.rank else 0):
            kv.push("w", ones())
        kv.barrier()
        out = ones()
        kv.pull("w", out)
        assert (out == 4 * kv.num_workers).all()

    run("dist_async", body, servers=1, staleness=1)


@only_on(3, 5)
@pytest.mark.parametrize("servers, clients", [(0, 1), (1, 1)])
def test_limits_of_create_hold_inside_collectives(servers, clients):
    """A worker that comes late to an allreduce of the workers, or to its client's reduction."""
    need(2, servers=servers)

    def body(kv):
        kv.init("w", np.ones(200_000, np.float32))
        gradient = np.ones(200_000, np.float32)
        late, texts = kv.num_workers - 1, []
        named = re.compile(rf"ranks? (\d+, )*{late} (has|have) not come")  # others may be slow too

        def heard(message, *_):
            texts.append(str(message))
            if named.search(texts[-1]) and sum(bool(named.search(text)) for text in texts) == 1:
                kv.layout.workers.Send(b"1", late, TAG)

        kv.barrier()
        if kv.rank == late:
            tells(kv, range(late))
            kv.pushpull("w", gradient, gradient)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = heard
                kv.pushpull("w", gradient, gradient)
            assert any(named.search(text) for text in texts), texts
        kv.barrier()
        if kv.rank == late:
            tells(kv, range(late))
        else:
            said = failure(lambda: kv.pushpull("w", gradient, gradient))
            kv.layout.workers.Send(b"1", late, TAG)
            assert named.search(said), said

    run("mpi_sync", body, servers=servers, clients=clients, stall_seconds=0.3, timeout_seconds=1.5)


@only_on(4)
@pytest.mark.parametrize("kind, options", [
    ("dist_sync", {"servers": 1}), ("dist_sync", {"servers": 2}), ("mpi_sync", {"servers": 1, "clients": 2}),
    ("mpi_sync", {"servers": 2, "clients": 2, "masters": "all"}), ("mpi_sync", {"servers": 1, "clients": 1}),
])  # fmt: skip
@pytest.mark.parametrize("what", ["push", "pushpull", "stuck"])
def test_no_message_of_a_failed_round_comes_later(kind, options, what):
    """Between nodes, keys of many blocks: what is under way when a round fails is not taken for the next one's."""
    need(2, **options)
    size = 100_000

    def body(kv):
        bad = kv.num_workers - 1
        kv.init(["v", "w"], [np.zeros(size, np.float32)] * 2)
        out = np.empty(size, np.float32)
        for round_ in range(1, 3):
            value = np.full(size, kv.rank + round_, np.float32)
            key = "v" if what == "stuck" and kv.rank == bad else "w"
            wrong = value[1:] if what != "stuck" and kv.rank == bad else value
            if what == "push":
                said = failure(lambda: (kv.push("w", wrong), kv.pull("w", out)))  # noqa: B023
            else:
                said = failure(lambda: kv.pushpull(key, wrong, out))  # noqa: B023
            words = kv.layout.workers.allgather(said)
            assert len(set(words)) == 1 and words[0] != "nothing was raised", words
            for name in ("w", "v"):
                kv.pushpull(name, value, out)
                assert (out == sum(rank + round_ for rank in range(kv.num_workers))).all(), (round_, out)

    run(kind, body, shared_memory=False, chunk_bytes=16384, big_array=1000, **options)


@pytest.mark.parametrize("masters", ["one", "all"])
def test_a_store_after_one_that_a_worker_left_early(masters):
    """What the others said to servers of a store that was ending does not reach the next one."""
    need(2, servers=2)
    for turn in range(6):
        def body(kv):
            kv.init("a", np.zeros(200, np.float32))
            if kv.rank != kv.num_workers - 1:
                for _ in range(2):
                    failure(kv.barrier if turn % 2 else lambda: kv.pushpull("a", np.ones(200, np.float32)))  # noqa: B023

        run("mpi_sync", body, servers=2, clients=1, masters=masters, shared_memory=False)
