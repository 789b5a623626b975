"""Meetings that some ranks give up: those who come late raise the same sentence, and all go on together."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from collectives.errors import StallError
from mpips import meetings
from tests.mpi.mpips.support import TAG, failure, need, run, tells
from tests.mpi.sizes import only_on

STORES = [
    ("dist_sync", {"servers": 1}),
    ("dist_async", {"servers": 1, "shared_memory": False}),
    ("dist_sync", {"servers": 0}),
    ("mpi_sync", {"servers": 1, "clients": 1}),
    ("mpi_sync", {"servers": 1, "clients": 1, "shared_memory": False}),
]
LIMITS = {"stall_seconds": 60, "timeout_seconds": 1}


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Who has waited too long asks rank 0, which does not answer where it is the late one."""
    monkeypatch.setattr(meetings, "ANSWER_SECONDS", 0.2)


def late(kv, rank, call):
    """What `call` raises everywhere, where `rank` comes to it when all others have given up."""
    if kv.rank == rank:
        tells(kv, [other for other in range(kv.num_workers) if other != rank])
        return failure(call)
    with pytest.raises(StallError) as caught:
        call()
    kv.layout.workers.Send(b"1", rank, TAG)
    return str(caught.value)


@only_on(3)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind, options", STORES[2:])
def test_a_store_is_closed_after_a_barrier_that_was_given_up(kind, options, last):
    need(2, **options)
    said = run(kind, lambda kv: late(kv, (kv.num_workers - 1) * last, kv.barrier), **options, **LIMITS)
    assert said != "nothing was raised"


@only_on(3)
@pytest.mark.parametrize("kind, options", [STORES[0], *STORES[2:]])
def test_a_store_is_closed_by_who_comes_when_others_have_given_up_a_barrier(kind, options):
    need(2, **options)

    def body(kv):
        if kv.rank:
            with pytest.raises(StallError):
                kv.barrier()
            kv.layout.workers.Send(b"1", 0, TAG)
        else:
            tells(kv, range(1, kv.num_workers))

    run(kind, body, **options, **LIMITS)


@only_on(3)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind, options", STORES[:2])
def test_a_store_goes_on_after_a_barrier_that_was_given_up(kind, options, last):
    need(2, **options)

    def body(kv):
        kv.init("w", np.zeros(5, np.float32))
        said = kv.layout.workers.allgather(late(kv, (kv.num_workers - 1) * last, kv.barrier))
        assert all("in barrier" in text for text in said), said
        assert last is False or len(set(said)) == 1, said
        out = np.zeros(3, np.float32)
        kv.init("v", np.full(3, 7, np.float32))
        kv.barrier()
        kv.pull("v", out)
        assert (out == 7).all()

    run(kind, body, **options, **LIMITS)


@only_on(3)
def test_a_meeting_that_is_interrupted_is_told_to_the_others():
    """Ctrl-C on the last rank while it waits: the others learn of it without any time limit."""
    need(2, servers=1)

    def body(kv):
        last = kv.num_workers - 1

        def interrupt(*_):
            raise KeyboardInterrupt

        if kv.rank == last:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = interrupt
                with pytest.raises(KeyboardInterrupt):
                    kv.barrier()
            kv.layout.workers.Send(b"1", 0, TAG)
        else:
            if kv.rank == 0:
                tells(kv, [last])
            assert f"rank {last} has given up barrier" in failure(kv.barrier)
        kv.barrier()

    run("dist_sync", body, servers=1, stall_seconds=0.2)


@only_on(4)
def test_a_store_is_closed_after_a_push_that_was_given_up_inside_a_client():
    """One member of a client on several nodes does not come: the other and the other client give up, all close."""
    options = {"servers": 1, "clients": 2, "shared_memory": False}
    need(3, **options)

    def body(kv):
        kv.init("w", np.zeros(40_000, np.float32))
        value = np.ones(40_000, np.float32)
        kv.pushpull("w", value)
        client = next(members for members in kv.layout.clients if members.stop - members.start == 2)
        absent = client.stop - 1
        if kv.rank == absent:
            tells(kv, [other for other in range(kv.num_workers) if other != absent])
            return
        with pytest.raises(StallError):
            kv.pushpull("w", value)
        kv.layout.workers.Send(b"1", absent, TAG)

    run("mpi_sync", body, **options, **LIMITS)
