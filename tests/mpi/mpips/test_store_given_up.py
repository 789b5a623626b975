"""A worker that gives up in the middle of a call: the others hear of it, and the store goes on."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

import collectives
import mpips
from collectives.errors import CollectiveError, StallError
from tests.mpi.mpips.support import failure, need, run
from tests.mpi.sizes import only_on

LONG = 30.0  # seconds after which a test says that it hangs


def steps(task, until):
    """Go on with a task until something is there."""
    end = time.monotonic() + LONG
    while not until() and time.monotonic() < end:
        next(task)
        time.sleep(1e-3)
    assert until()


def sums(kv, key="w", size=4000, rounds=2):
    """The store still sums."""
    out = np.zeros(size, np.float32)
    for round_ in range(1, rounds + 1):
        kv.pushpull(key, np.full(size, round_ * (kv.rank + 1), np.float32), out)
        assert (out == round_ * kv.num_workers * (kv.num_workers + 1) / 2).all()


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("abandoned", [True, False])
def test_a_push_that_raises_halfway_withdraws_the_rest(servers, abandoned):
    """Rank 0 has yet to wait for a server when it hears that rank 1's push is bad, or is given up itself."""
    need(2, servers=servers)
    size = 4000

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        value = np.ones(size, np.float32)
        kv.pushpull("w", value)
        if kv.rank == 0:
            key = kv._keys["w"]
            part = key.parts[-1]
            words, part.words = part.words, [0] * len(part.words)
            push = kv._session.push_long(key, value, 0)
            next(push)
            kv.layout.workers.Barrier()
            if abandoned:
                push.close()
            else:
                with pytest.raises(CollectiveError, match=f"rank {kv.num_workers - 1}: "):
                    steps(push, lambda: False)
            part.words = words
        else:
            kv.layout.workers.Barrier()
            bad = ["ones"] if kv.rank == kv.num_workers - 1 and not abandoned else value
            said = failure(lambda: kv.pushpull("w", bad, np.zeros(size, np.float32)))
            assert ("rank 0 has given up its push of round 2" if abandoned else f"rank {kv.num_workers - 1}: ") in said
        sums(kv)

    run("dist_sync", body, servers=servers, big_array=1000, block_bytes=4096, timeout_seconds=20)


@pytest.mark.parametrize("servers", [1, 2])
def test_an_interrupt_between_the_frames_of_a_short_push_is_told_to_the_others(servers):
    need(2, servers=servers)
    size = 4000

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        value = mpips.empty(size)
        value[...] = 1
        if kv.rank == 0:
            line = kv._keys["w"].parts[-1].line
            again = line.again

            def interrupted(frame, round_):
                if round_ == 2:
                    raise KeyboardInterrupt
                again(frame, round_)

            line.again = interrupted
        kv.push("w", value)
        if kv.rank == 0:
            with pytest.raises(KeyboardInterrupt):
                kv.push("w", value)
        else:
            said = failure(lambda: kv.pushpull("w", value, np.zeros(size, np.float32)))
            assert "rank 0 has given up its push of round 2" in said, said
        sums(kv)

    run("dist_sync", body, servers=servers, big_array=1000, small_bytes=0, timeout_seconds=5)


def left_before(push, key):
    """Break a push off where it waits for a server that has not read the one before."""
    words = [(part, part.words) for part in key.pushes]
    for part in key.pushes:
        part.words = [0] * len(part.words)
    task = push()
    next(task)
    task.close()
    for part, there in words:
        part.words = there


@pytest.mark.parametrize("what", ["compressed", "rows"])
def test_a_coded_push_that_is_given_up_is_told_to_the_others(what):
    need(2, servers=1)
    shape = (40, 3)

    def body(kv):
        value = out = np.ones(shape, np.float32)
        if what == "rows":
            value = mpips.RowSparse(np.arange(0, 40, 2), np.ones((20, 3), np.float32), shape)
        kv.init("w", np.zeros(shape, np.float32))
        if what == "compressed":
            kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        kv.push("w", value)
        kv.pull("w", out)
        expected = out.copy()
        if kv.rank == 0:
            push = kv._backend.push_rows if what == "rows" else kv._backend.push
            flat = value if what == "rows" else value.reshape(-1)
            left_before(lambda: push(kv._keys["w"], flat, 0), kv._keys["w"])
        else:
            said = failure(lambda: (kv.push("w", value), kv.pull("w", out)))
            assert "rank 0 has given up its push of round 2" in said, said
        kv.barrier()
        kv.pull("w", out)
        assert (out == expected).all()
        kv.push("w", value)
        kv.pull("w", out)
        assert (out[::2] > 0).all()

    run("dist_sync", body, servers=1, timeout_seconds=20)


@only_on(4)
@pytest.mark.parametrize("masters, key", [("one", "w"), ("all", "w"), ("one", ["v", "w"])])
@pytest.mark.parametrize("error", [KeyboardInterrupt, StallError])
def test_a_push_that_is_given_up_inside_a_client_is_told_to_the_others(monkeypatch, masters, key, error):
    """The members of the client with two workers are interrupted, or wait too long for one another."""
    need(3, servers=1)

    def raises(*what, **named):
        raise error("interrupted")

    def body(kv):
        value = [np.ones(4000, np.float32) for _ in key] if isinstance(key, list) else np.ones(4000, np.float32)
        kv.init(key, value)
        kv.pushpull(key, value)
        if kv.layout.client.Get_size() == 2:
            with monkeypatch.context() as patch:
                for name in ("reduce", "reduce_scatter"):
                    patch.setattr(collectives, name, raises)
                with pytest.raises(error):
                    kv.push(key, value)
        else:
            said = failure(lambda: kv.pushpull(key, value))
            assert ("interrupted" if error is StallError else "has given up its push of round 2") in said, said
        kv.layout.workers.Barrier()

    run("mpi_sync", body, servers=1, clients=2, masters=masters, big_array=1000, timeout_seconds=20)


@only_on(3, 4)
@pytest.mark.parametrize("masters", ["one", "all"])
def test_an_interrupt_in_a_client_on_several_nodes_is_told_to_its_other_members(masters):
    """They come to the call when rank 0 has left it, and get messages that it had sent."""

    def interrupt(*what):
        raise KeyboardInterrupt

    def body(kv):
        value = np.ones(4000, np.float32)
        kv.init("w", np.zeros(4000, np.float32))
        kv.pushpull("w", value)
        if kv.rank == 0:
            before = signal.signal(signal.SIGALRM, interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                kv.pushpull("w", value)
            signal.signal(signal.SIGALRM, before)
        kv.layout.workers.Barrier()
        if kv.rank:
            said = failure(lambda: kv.pushpull("w", value))
            assert "rank 0 has given up its push" in said, said
        sums(kv)

    run("mpi_sync", body, servers=1, clients=1, masters=masters, shared_memory=False, timeout_seconds=20)


TOGETHER = [
    {"servers": 0},
    {"servers": 0, "stepwise": True},
    {"servers": 1, "clients": 1},
    {"servers": 1, "clients": 1, "masters": "all"},
]


@only_on(3, 4)
@pytest.mark.parametrize("call", ["pushpull", "list", "barrier", "close"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, StallError])
@pytest.mark.parametrize("options", TOGETHER)
def test_all_begin_anew_after_a_call_that_one_of_them_has_given_up(options, error, call):
    """Rank 0 is interrupted, or waits too long, in a collective of all workers; the others come to it later."""
    options = dict(options)
    stepwise = options.pop("stepwise", False)  # as beside operations that have been started
    need(2, **options)
    names = ["v", "w"]

    def interrupt(*what):
        raise KeyboardInterrupt

    def body(kv):
        kv.init(names, [np.full(4000, 7, np.float32)] * 2)
        values = [np.ones(4000, np.float32)] * 2
        kv._backend.stepwise = stepwise
        calls = {
            "pushpull": lambda: kv.pushpull("w", values[0], np.zeros(4000, np.float32)),
            "list": lambda: kv.push(names, values), "barrier": kv.barrier, "close": kv.barrier,
        }  # fmt: skip
        if kv.rank == 0:
            before = signal.signal(signal.SIGALRM, interrupt)
            if error is KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(error):
                calls[call]()
            signal.signal(signal.SIGALRM, before)
        kv.layout.workers.Barrier()
        if kv.rank:
            said = failure(calls[call])
            assert "rank 0" in said or "not come" in said, said
        if call != "close":
            out = np.zeros(4000, np.float32)
            for name in names:
                failure(lambda: kv.pull(name, out))  # noqa: B023 - servers may tell once more of the round
                kv.pull(name, out)
                assert (out == 7).all(), name
            sums(kv)

    limit = 1 if error is StallError else 20
    run("mpi_sync", body, big_array=1000, timeout_seconds=limit, **options)


FAR = {"servers": 1, "shared_memory": False, "chunk_bytes": 4096, "block_bytes": 4096}


def test_blocks_that_a_worker_keeps_back_fail_the_round():
    need(2, **FAR)
    size = 4000

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        value = np.ones(size, np.float32)
        if kv.rank == kv.num_workers - 1:
            push = kv._session.push_long(kv._keys["w"], value, 0)
            next(push)
            push.close()
        kv.layout.workers.Barrier()
        if kv.rank < kv.num_workers - 1:
            said = failure(lambda: kv.pushpull("w", value))
            assert f"rank {kv.num_workers - 1} has given up its push of round 1" in said
        sums(kv)

    run("dist_sync", body, **FAR)


def test_parts_that_wait_for_their_turn_do_not_make_workers_wait_for_each_other():
    """Two keys of many messages, begun in the opposite order by every other worker."""
    need(2, **FAR)
    size = 40_000

    def body(kv):
        names = ["a", "b"] if kv.rank % 2 else ["b", "a"]
        for name in "ab":
            kv.init(name, np.zeros(size, np.float32))
        outs = {name: np.zeros(size, np.float32) for name in names}
        for round_ in range(1, 4):
            value = np.full(size, round_ * (kv.rank + 1), np.float32)
            for handle in [kv.ipushpull(name, value, outs[name]) for name in names]:
                handle.wait()
            for out in outs.values():
                assert (out == round_ * kv.num_workers * (kv.num_workers + 1) / 2).all()

    run("dist_sync", body, **FAR, timeout_seconds=LONG)


def test_parts_that_wait_for_their_turn_are_withdrawn_with_those_that_went():
    need(2, **FAR)
    size = 40_000

    def body(kv):
        kv.init("w", np.zeros(size, np.float32))
        value, out = np.ones(size, np.float32), np.zeros(size, np.float32)
        last = kv.num_workers - 1
        bad = ["ones"] if kv.rank == last else value
        assert f"rank {last}: " in failure(lambda: kv.pushpull("w", bad, out))
        sums(kv, size=size)

    run("dist_sync", body, **FAR, timeout_seconds=LONG)


@only_on(3, 4)
def test_a_push_that_raises_what_failed_before_fails_its_own_round():
    """Rank 1 comes to both rounds of rank 0 when the first, for which rank 0 has waited too long, has failed."""
    need(2, **FAR)
    size = 4000

    def body(kv):
        kv.init("w", np.full(size, 7, np.float32))
        value, out = np.ones(size, np.float32), np.zeros(size, np.float32)
        if kv.rank == 0:
            kv.push("w", value)
            with pytest.raises(StallError):
                kv.push("w", value)
        kv.layout.workers.Barrier()
        if kv.rank:
            assert "for ranks" in failure(lambda: kv.push("w", value))
            assert "for ranks" in failure(lambda: kv.pushpull("w", value, out))
        kv.pull("w", out)
        assert (out == 7).all()
        sums(kv)

    run("dist_sync", body, **FAR, timeout_seconds=1)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_pull_that_is_given_up_holds_nobody_back(shared_memory, rows):
    """Rank 0 is too far ahead to read, gives up, and reads when the others have come."""
    need(2, servers=1)

    def body(kv):
        kv.init("w", np.zeros((4, 3), np.float32))
        kv.set_optimizer("add")
        value, out = np.full((4, 3), kv.rank + 1, np.float32), np.zeros((4, 3), np.float32)
        if kv.rank == 0:
            kv.push("w", value)
            key = kv._keys["w"]
            if rows:
                pull = kv._session.pull_rows(key, 3, [(key.parts[0], np.arange(4), np.zeros((4, 3), np.float32))])
            else:
                pull = kv._session.pull(key, np.zeros(12, np.float32), key.parts)
            next(pull)
            pull.close()
        kv.layout.workers.Barrier()
        if kv.rank:
            kv.push("w", value)
        for round_ in (1, 2):
            kv.pull("w", out)
            assert (out == round_ * kv.num_workers * (kv.num_workers + 1) / 2).all()
            kv.barrier()
            if round_ == 1:
                kv.push("w", value)
        kv.barrier()

    run("dist_async", body, servers=1, staleness=0, shared_memory=shared_memory, timeout_seconds=20)


def test_more_failures_than_a_ring_holds_are_heard_before_the_answer():
    """Rank 0 hears nothing while it pushes, then asks the server for something."""
    need(2, servers=1)
    names = [f"k{number}" for number in range(300)]

    def body(kv):
        kv.init(names, [np.zeros(1, np.float32)] * len(names))
        last, value = kv.num_workers - 1, np.ones(1, np.float32)
        if kv.rank < last:
            for name in names:
                kv.push(name, value)
        else:
            values = [value] * (len(names) - 1) + [np.ones(2, np.float32)]
            assert f"rank {last}" in failure(lambda: kv.push(names, values))
        end = time.monotonic() + LONG
        while any(not key.parts[0].words[0] for key in kv._keys.values()) and time.monotonic() < end:
            time.sleep(1e-3)
        kv.set_optimizer("add")
        out = np.zeros(1, np.float32)
        if kv.rank < last:
            assert f"rank {last}" in failure(lambda: kv.pull(names[0], out))
        for name in names:
            kv.pushpull(name, value, out)
            assert out[0] == kv.num_workers

    run("dist_sync", body, servers=1, timeout_seconds=20)
