"""What users bring: arrays of other libraries, lists, arrays made anew at each call. None is kept, and memory stays."""

from __future__ import annotations

import gc
import resource
import weakref
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import collectives
from collectives import arrays
from collectives.communicator import communicator
from tests.choice import once
from tests.mpi.collectives.support import ODD, RANK, TOTAL, WORLD, P, fresh, make, polled, sentence, started
from tests.mpi.sizes import core_on, only_on

CALLS = 5000


class Wrapped:
    """An array that tells where it lies."""

    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


class Capsule:
    """An array that DLPack knows."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **wanted):
        return self.array.__dlpack__(**wanted)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("wrap", [Wrapped, Capsule])
def test_arrays_of_other_libraries(comm, wrap):
    wrong = []
    for turn in range(20):
        array, out = np.full((3, 5), RANK + 1.0), np.zeros((3, 5))
        one, there = wrap(array), wrap(out)
        if collectives.allreduce(one, comm, out=there) is not there or (out != TOTAL).any():
            wrong.append((turn, "out"))
        if collectives.allreduce(one, comm) is not one or (array != TOTAL).any():
            wrong.append((turn, "in place"))
        plan = collectives.plan("allreduce", one, comm)
        array[:] = 1
        if polled(plan) is not one or (array != P).any():
            wrong.append((turn, "plan"))
        collectives.grouped_allreduce([one, there], comm, op="max")
    assert not wrong


@only_on(2, 3)
@pytest.mark.parametrize(
    "nodes, kinds",
    [
        ("one node", ("broadcast", "allgather", "alltoall")),
        ("a node for each rank", ("allgather", "alltoall")),
    ],
)
def test_types_that_differ_in_byte_order_or_fields_alone(nodes, kinds):
    """Bytes would be moved as they are, and be other numbers where they arrive: all ranks hear of both types."""
    pairs = [("float64", ">f8"), ("uint16", ">u2"), ([("x", "<f4"), ("n", "<i4")], [("x", "<f4"), ("n", ">i4")])]
    wrong = []
    for kind, (usual, other) in product(kinds, pairs):
        with fresh(nodes) as comm:
            x = np.zeros(2 * P, other if RANK == ODD else usual)
            said = sentence(partial(getattr(collectives, kind), x, comm))
        told = [text.partition("; ")[0] for text in said.split(f"{kind} of ")[1:]]
        types = [arrays.type_name(np.dtype(one)) for one in (usual, other)]
        if len(told) != 2 or not all(name in text for name, text in zip(types, told)) or f"rank {ODD} call" not in said:
            wrong.append(said)
    assert not wrong


def test_tensors_of_pytorch(comm):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    wrong = []
    for turn in range(20):
        for n in (3, 70_000):
            x = torch.full((n,), RANK + 1.0)
            if collectives.allreduce(x, comm) is not x or not bool((x == TOTAL).all()):
                wrong.append((turn, n))
            y, out = torch.ones(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
            collectives.allreduce(y, comm, out=out)
            group = [torch.ones(n), torch.ones((2, 3), dtype=torch.float64)]
            collectives.grouped_allreduce(group, comm)
            if not bool((out == P).all() and (y == 1).all() and all((one == P).all() for one in group)):
                wrong.append((turn, n, "out"))
    assert not wrong


def test_one_tensor_after_another(comm):
    """A plan knows an address: who frees an array and makes another there gets the sum of that one."""
    wrong = []
    for turn in range(50):
        x = np.full(1000, RANK + turn, np.float64 if turn % 3 else np.int64)
        collectives.allreduce(x, comm)
        wrong += [turn] * bool((x != P * turn + P * (P - 1) // 2).any())
        del x
    assert not wrong


def test_lists_of_vectors(comm):
    """The vectors of a worker are added together, and each gets the sum."""
    for turn in range(10):
        x = [np.full(501, RANK + 1.0), np.full(501, 1.0 * turn)]
        collectives.allreduce(x, comm)
        assert all((one == TOTAL + P * turn).all() for one in x)


@once(
    **{"array, n": [("ordinary", 10), ("ordinary", 300_000), ("shared", 300_000)]},
    way=["one-shot", "plan", "started", "list", "grouped"],
)
def test_an_array_that_nobody_keeps_is_gone_at_once(comm, way, array, n):
    """What a call or a freed plan has had is not held."""
    x = make(array, n)
    x[:] = 1
    kept = weakref.ref(x)
    if way in ("plan", "started"):
        plan = collectives.plan("allreduce", x, comm)
        plan() if way == "plan" else started(plan)
        plan.free()
    elif way == "one-shot":
        collectives.allreduce(x, comm)
    else:
        (collectives.allreduce if way == "list" else collectives.grouped_allreduce)([x], comm)
    gc.disable()
    try:
        del x
        gone = kept() is None
    finally:
        gc.enable()
    assert gone


@pytest.mark.parametrize("algorithm", ["auto", "native", "ring"])
def test_a_plan_that_nobody_keeps_is_gone_at_once(comm, algorithm):
    plan = collectives.plan("allreduce", np.ones(100_000), comm, algorithm=algorithm)
    for _ in range(3):
        plan()
    kept = weakref.ref(plan), weakref.ref(plan.runner)
    plan.free()
    gc.disable()
    try:
        del plan
        gone = [one() is None for one in kept]
    finally:
        gc.enable()
    assert gone == [True, True]


def resident():
    """MiB of this process, and of these the shared ones."""
    pages = [int(word) for word in Path("/proc/self/statm").read_text().split()[1:3]]
    return [count * resource.getpagesize() >> 20 for count in pages]


def run_fresh(what, comm, turn):
    """One call with arrays that nobody has seen before."""
    n = 3000 + turn % 7
    if what == "lists":
        collectives.allreduce([np.ones(n), np.ones(n)], comm)
    elif what == "groups":
        collectives.grouped_allreduce([np.ones(n), np.ones(10, np.float32)], comm)
    elif what == "wrapped":
        collectives.allreduce(Wrapped(np.ones(n)), comm, algorithm="ring")
    elif what == "kept":  # other addresses at each call
        return np.ones(n), collectives.allreduce(np.ones(n), comm, algorithm="ring" if turn % 2 else "auto")
    else:
        collectives.allreduce(collectives.empty(n, np.float64), comm)
    return None


@pytest.mark.core(1)
@only_on(2)
@pytest.mark.parametrize("what", ["lists", "groups", "wrapped", "kept", "shared"])
def test_memory_stays_as_it_is_over_many_calls(what):
    with fresh() as comm:
        held = []
        for turn in range(CALLS):
            held = [*held[-20:], run_fresh(what, comm, turn)]
            if turn == CALLS // 3:
                before = resident()
        grown = [now - then for now, then in zip(resident(), before)]
    assert max(grown) < 32, f"MiB: {grown}"


@core_on(2)
@only_on(2, 3)
def test_more_plans_than_there_are_tags():
    """9,000 lanes are dealt while an early plan lives: no message of a new plan reaches the old one."""
    with fresh("a node for each rank") as comm:
        x, y = np.empty(600), np.empty(600)
        old = collectives.plan("allreduce", x, comm, algorithm="ring")
        for turn in range(30):
            new = collectives.plan("allreduce", y, comm, algorithm="multi_ring(rings=600)" if turn % 2 else "ring")
            x[:], y[:] = RANK + 1, 2 * RANK + 2 + turn
            for plan in (old, new):
                plan.start()
            while not (old.test() and new.test()):
                pass
            old.wait()
            new.wait()
            assert (x == TOTAL).all() and (y == 2 * TOTAL + turn * P).all()
            new.free()
        lanes = communicator(comm).tags_dealt
    assert WORLD.allreduce(lanes) < 8000 * P


@only_on(2, 3)
def test_more_plans_than_are_kept():
    """The plans of one-shot calls come and go: none is mixed up with another."""
    with fresh() as comm:
        xs, wrong = [np.empty(10 + i) for i in range(300)], []
        for turn in range(2):
            for x in xs:
                x[:] = RANK + 1
                collectives.allreduce(x, comm, algorithm="ring" if x.size % 2 else "auto")
                wrong += [(turn, x.size)] * bool((x != TOTAL).any())
    assert not wrong
