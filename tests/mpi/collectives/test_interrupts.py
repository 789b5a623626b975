"""Ctrl-C at any moment, in rows of calls: nobody hangs, no value is wrong, and nobody writes into an array after the
interrupted rank has it back."""

from __future__ import annotations

import time
from itertools import count

import numpy as np
import pytest

import collectives
from tests.choice import once
from tests.mpi.collectives.faults import Cell
from tests.mpi.collectives.support import KINDS, ODD, RANK, WORLD, P, fresh, interrupted, patient, still_works
from tests.mpi.sizes import only_on

ROUNDS = 6
MOST_SECONDS = 20.0  # of calls until the interrupt comes
AFTER = (0.0005, 0.02)  # seconds until it comes


def row(cell, call):
    """Calls until one of them raises; (the error's name and sentence, whether all values before it were right)."""
    x, right, end = cell.arrays[-1], True, time.monotonic() + MOST_SECONDS
    try:
        for turn in count():
            x[:] = RANK + turn
            call()
            right &= bool((x == P * (P - 1) // 2 + P * turn).all())
            assert time.monotonic() < end, "no interrupt has come"
    except (KeyboardInterrupt, collectives.CollectiveError) as error:
        return type(error).__name__, str(error), right


def written_later(x):
    """Whether anybody writes into an array that this rank has back."""
    x[:] = -7
    time.sleep(0.05)
    return bool((x != -7).any())


def one_round(comm, way, route, rng):
    """What is wrong after one interrupt; "" for nothing."""
    cell = Cell(comm, way, route)
    call = cell.call()
    WORLD.Barrier()  # who still makes its plan would hear of the interrupt there
    if RANK == ODD:
        with interrupted(rng.uniform(*AFTER), again=2e-5):
            name, sentence, right = row(cell, call)
    else:
        name, sentence, right = row(cell, call)
    everybody = WORLD.allgather((name, sentence, right, written_later(cell.arrays[-1])))
    names = [one[0] for one in everybody]
    if not all(one[2] for one in everybody) or any(one[3] for one in everybody):
        return f"wrong values: {everybody}"
    if names != ["CollectiveError" if rank != ODD else "KeyboardInterrupt" for rank in range(P)]:
        return f"raised {everybody}"
    told = {one[1] for rank, one in enumerate(everybody) if rank != ODD}
    if len(told) > 1 or f"rank {ODD} has given up" not in told.pop():
        return f"unlike sentences: {everybody}"
    collectives.renew(comm)
    patient(comm, 30.0, 30.0)
    return "" if WORLD.allreduce(cell.sums()) == P else "wrong sums after renew"


@pytest.mark.core(3)
@only_on(2, 3)
@once(
    **{
        "way, route": [
            ("blocking", "small"),
            ("blocking", "large"),
            ("blocking", "empty"),
            ("blocking", "grouped"),
            ("plan", "small"),
            ("plan", "ring"),
            ("plan", "native"),
            ("plan", "large"),
            ("tested", "large"),
            ("tested", "ring"),
            ("waited", "native"),
            ("waited", "empty"),
        ]
    },
    nodes=["one node", "a node for each rank"],
)
def test_interrupts_at_any_moment(nodes, way, route):
    rng, wrong = np.random.default_rng(7), []
    rounds = ROUNDS if nodes == "one node" else ROUNDS // 2
    for number in range(rounds):
        with fresh(nodes) as comm:
            if words := one_round(comm, way, route, rng):
                wrong.append((number, words))
    assert not wrong


def native_row(comm, kind, x):
    """Native calls until one raises, on arrays that hold one number on all ranks; whether all results were right."""
    words = {"op": "min"} if kind in ("allreduce", "reduce_scatter", "reduce") else {}
    words |= {"root": {"broadcast": ODD, "reduce": 0}[kind]} if kind in ("broadcast", "reduce") else {}
    right, end = True, time.monotonic() + MOST_SECONDS
    try:
        for turn in count():
            x[:] = turn
            result = getattr(collectives, kind)(x, comm, algorithm="native", **words)
            right &= bool((result == turn).all()) or (kind == "reduce" and RANK != 0)
            assert time.monotonic() < end, "no interrupt has come"
    except (KeyboardInterrupt, collectives.CollectiveError):
        x[:] = -7
        return right


@pytest.mark.core(2)
@only_on(2, 3)
@once(nodes=["one node", "a node for each rank"], kind=KINDS)
def test_an_interrupted_call_of_mpis_own_spoils_no_other_ranks_result(nodes, kind):
    """MPI cannot cancel it, and goes on to read the array of the rank that has it back, or to write there."""
    rng, x = np.random.default_rng(3), np.empty(200_000 * P)
    for _ in range(ROUNDS):
        with fresh(nodes) as comm:
            native_sum(comm)
            WORLD.Barrier()
            with interrupted(rng.uniform(*AFTER) if RANK == ODD else 1e3, again=2e-5):
                right = native_row(comm, kind, x)
            time.sleep(0.01)
            assert all(WORLD.allgather(right and bool((x == -7).all())))
            collectives.renew(comm)
            assert native_sum(comm) == WORLD.allreduce(RANK)


def native_sum(comm):
    return collectives.allreduce(np.full(100, RANK), comm, algorithm="native")[-1]


@pytest.mark.slow
@only_on(2, 3)
def test_a_call_of_mpis_own_that_not_all_have_begun_meets_no_later_one():
    """Its messages can be received by nobody: a later communicator must not take them for its own."""
    for turn in range(10):
        with fresh("a node for each rank") as comm:
            native_sum(comm)
            WORLD.Barrier()
            if turn % P == RANK:
                patient(comm, 30.0, 0.05)
                with pytest.raises(collectives.StallError):
                    native_sum(comm)
            WORLD.Barrier()
            if turn % P != RANK:
                with pytest.raises(collectives.StallError):
                    native_sum(comm)
            collectives.renew(comm)
            assert native_sum(comm) == WORLD.allreduce(RANK)


@pytest.mark.core(2)
@only_on(2, 3)
@once(
    nodes=["one node", "a node for each rank"],
    route=["large", "empty", "native", "ring"],
    how=["timeout", "interrupt"],
)
def test_the_array_of_a_call_that_was_given_up_is_not_written_later(nodes, route, how):
    """The other ranks come when the array has other use, or when other arrays lie where it lay."""
    with fresh(nodes) as comm:
        cell = Cell(comm, "blocking", route)
        call = cell.call()
        call()
        x = cell.arrays[-1]
        WORLD.Barrier()
        written = False
        if RANK == 0:
            patient(comm, 30.0, 0.1 if how == "timeout" else 30.0)
            with pytest.raises((KeyboardInterrupt, collectives.CollectiveError)), interrupted(0.1):
                call()
            x[:] = -7
        WORLD.Barrier()
        if RANK:
            with pytest.raises(collectives.CollectiveError):
                call()
        WORLD.Barrier()
        if RANK == 0:
            n = x.size
            cell.arrays.clear()
            del x, call
            others = [np.full(n, -7.0) for _ in range(4)]  # one of them may lie where it lay
            time.sleep(0.3)
            written = any((one != -7).any() for one in others)
        assert not WORLD.allreduce(written)
        collectives.renew(comm)
        still_works(comm)
