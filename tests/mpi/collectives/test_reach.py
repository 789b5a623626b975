"""Ordinary arrays by stages, by reach and by the MPI: the same bits, and nobody's memory touched after he has left."""

from __future__ import annotations

import errno
import importlib
import os
import signal
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from collectives.choice import TRIALS
from collectives.session import session
from collectives.transport import reach
from collectives.transport.program import same
from mpi4py import MPI

import collectives
from collectives import arrays, errors
from collectives.network import native
from collectives.schedule.model import KINDS, cut
from collectives.tuner.table import Slots, Table
from tests.mpi.sizes import either_mpi, only_on

COMM = MPI.COMM_WORLD
RANK, P = COMM.rank, COMM.size
ROOT = P // 2
TURNS = 3 * TRIALS + 4  # by stages, by reach and by the MPI in turn, then by what is kept
REDUCING = ("allreduce", "reduce_scatter", "reduce")
BLOCK = 1 << 10


@pytest.fixture
def comm(monkeypatch):
    """A communicator on which vectors of any length try all ways, in blocks of 1 KiB."""
    monkeypatch.setattr(importlib.import_module("collectives.plan"), "TRY_BYTES", 0)
    monkeypatch.setattr(Table, "slot_limits", lambda table, ranks, crowded: Slots(-1, -1))
    monkeypatch.setattr(reach, "BLOCK_BYTES", BLOCK)
    comm = COMM.Dup()
    yield comm
    comm.Free()


def values(rank, turn, n, dtype):
    return (np.random.default_rng([rank, turn]).standard_normal(n) * 50).astype(dtype)


def expected(kind, turn, n, dtype, ufunc):
    """What this rank gets: sums in the order of the ranks."""
    mine = slice(int(cut(n, P, RANK)), int(cut(n, P, RANK + 1)))
    every = [values(rank, turn, n, dtype) for rank in range(P)]
    if kind in REDUCING:
        total = every[0]
        for other in every[1:]:
            total = ufunc(total, other)
        return total[mine] if kind == "reduce_scatter" else total
    if kind == "broadcast":
        return every[ROOT]
    if kind == "allgather":
        return np.concatenate([every[r][int(cut(n, P, r)) : int(cut(n, P, r + 1))] for r in range(P)])
    return np.concatenate([vector[mine] for vector in every])


def make(array, n, dtype):
    shared = array == "shared" or (array == "mixed" and RANK % 2)
    return collectives.empty(n, dtype) if shared else np.empty(n, dtype)


def wrong_turns(comm, kind, n, in_place, array="ordinary", dtype="float32", op="sum"):
    """Turns of one plan in which this rank got anything but the expected bits."""
    mine = slice(int(cut(n, P, RANK)), int(cut(n, P, RANK + 1)))
    own = mine.stop - mine.start
    wide = n if in_place or kind != "allgather" else own
    narrow = {"reduce_scatter": own, "alltoall": own * P}.get(kind, n)
    x, out = make(array, wide, dtype), None if in_place else make(array, narrow, dtype)
    words = {"root": ROOT} if kind in ("broadcast", "reduce") else {"op": op} if kind in REDUCING else {}
    plan = collectives.plan(kind, x, comm, out=out, **words)
    ufunc, wrong = {"sum": np.add, "max": np.maximum}[op], []
    for turn in range(TURNS):
        given = values(RANK, turn, n, dtype)
        x[:] = given if wide == n else given[mine]
        result = plan()
        if kind == "reduce" and RANK != ROOT:
            continue
        if result.tobytes() != expected(kind, turn, n, dtype, ufunc).tobytes():
            wrong.append(turn)
    plan.free()
    return wrong


def need_reach(comm):
    if not session(comm).room.pids:
        pytest.skip("the kernel does not copy between the memories of several ranks here")


def others_copy_slowly(monkeypatch):
    """All ranks but the first, as soon as something is in the list that this gives back."""
    move, armed = reach._Move.__call__, []

    def slow(self):
        if armed and RANK:
            time.sleep(0.1)
        move(self)

    monkeypatch.setattr(reach._Move, "__call__", slow)
    return armed


def by_reach_next(comm):
    """An array of which the next sum goes by reach."""
    need_reach(comm)
    x = np.ones(BLOCK * P, np.float32)
    for _ in range(3):
        collectives.allreduce(x, comm)
        x[:] = 1
    return x


def outcome(call):
    """Its error's sentence, or that there was none."""
    try:
        call()
    except (KeyboardInterrupt, errors.CollectiveError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def started(x, comm):
    plan = collectives.plan("allreduce", x, comm)
    plan.start()
    plan.wait()


called_or_started = pytest.mark.parametrize("run", [collectives.allreduce, started])


@either_mpi
@only_on(1, 2, 3, 5)
@pytest.mark.mpi
@pytest.mark.parametrize("array", ["ordinary", "mixed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_the_sum_in_order(comm, kind, array):
    wrong = {}
    for n in (0, 1, P - 1, P + 1, 5003, BLOCK // 4 * P, BLOCK // 2 * P + 7):
        for in_place in (False, True):
            if kind == "alltoall" and in_place and n % P:
                continue
            if turns := wrong_turns(comm, kind, n, in_place, array):
                wrong[n, in_place] = turns
    assert not wrong


@either_mpi
@only_on(1, 2, 3, 5)
@pytest.mark.mpi
@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16, "float64", "int8", "int64"])
def test_other_elements_and_operations(comm, dtype):
    wrong = {}
    for kind in ("allreduce", "reduce_scatter", "allgather"):
        for op in ("sum", "max"):
            if turns := wrong_turns(comm, kind, 3001, kind == "allreduce", dtype=dtype, op=op):
                wrong[kind, op] = turns
    assert not wrong


@pytest.mark.mpi
def test_where_the_kernel_forbids_it_stages_serve(monkeypatch, comm):
    monkeypatch.setattr(reach, "_FETCH", None)
    alone = COMM.Dup()
    wrong = {kind: turns for kind in KINDS if (turns := wrong_turns(alone, kind, 2003, False))}
    alone.Free()
    assert not wrong


@pytest.mark.mpi
def test_where_one_array_is_of_a_device_stages_serve(monkeypatch, comm):
    """The last rank has one that can be reached and one that cannot; calls of their size are at any trial by then."""
    n, place, wrong = BLOCK * P, reach.place, []
    near, device = np.empty(n, np.float32), np.empty(n, np.float32)
    if RANK == P - 1:
        monkeypatch.setattr(reach, "place", lambda x, written=False: place(x, written) * (not same(x, device)))
    for turn in range(TURNS):
        for x in (near, device):
            x[:] = values(RANK, turn, n, "float32")
            if collectives.allreduce(x, comm).tobytes() != expected("allreduce", turn, n, "float32", np.add).tobytes():
                wrong.append((turn, x is device))
    assert not wrong


@pytest.mark.mpi
def test_calls_of_as_many_bytes_need_not_have_the_same_ways(monkeypatch, comm):
    """The MPI serves the short elements' call no more, as they are too many."""
    monkeypatch.setattr(native, "MOST_ELEMENTS", 1500)
    wide, narrow, wrong = np.empty(1100, np.float32), np.empty(2200, np.float16), []
    for turn in range(TURNS):
        for x in (wide, wide, narrow):
            x[:] = values(RANK, turn, x.size, x.dtype)
            if collectives.allgather(x, comm).tobytes() != expected("allgather", turn, x.size, x.dtype, None).tobytes():
                wrong.append((turn, x.dtype.name))
    assert not wrong


def test_memory_of_the_kernel_cannot_be_reached():
    need_reach(COMM)
    lines = Path("/proc/self/maps").read_text().splitlines()
    start = next((int(line.split("-")[0], 16) for line in lines if "[vvar]" in line), None)
    if start is None:
        pytest.skip("this process shares no page with its kernel")
    assert reach.place(arrays.Flat(start, 64, np.dtype(np.uint8)).vector()) == 0
    own = np.zeros(64, np.uint8)
    assert reach.place(own, True) == own.ctypes.data


@pytest.mark.mpi
@only_on(2, 3)
@called_or_started
def test_who_breaks_off_waits_until_nobody_writes_into_his_array(monkeypatch, comm, run):
    """Rank 0 is interrupted in its part of a sum, while the others are slow to deliver theirs into its array."""
    move, armed, late = reach._Move.__call__, [], []

    def slow(self):
        if armed and self.pid != os.getpid():
            if RANK == 0:
                raise KeyboardInterrupt
            time.sleep(0.05)
        move(self)

    monkeypatch.setattr(reach._Move, "__call__", slow)
    x = by_reach_next(comm)
    session(comm).patient(60.0, 1.0)
    armed.append(True)
    heard = ""
    try:
        run(x, comm)
    except KeyboardInterrupt:
        left = x.copy()
        time.sleep(0.5)
        heard = f"interrupted; then {(x != left).sum()} elements were written"
        late = [int((left != 1).sum())]
    except errors.CollectiveError as error:
        heard = str(error)
    again = outcome(lambda: run(x, comm))
    everybody = COMM.allgather((heard, late, again))
    assert everybody[0][:2] == ("interrupted; then 0 elements were written", [BLOCK * (P - 1)])
    assert all("rank 0 has given up" in sentence for sentence, _, _ in everybody[1:])
    assert all("this communicator is unusable after" in sentence for _, _, sentence in everybody)


@pytest.mark.mpi
def test_some_ranks_exchange_in_place(comm):
    """Which nobody may reach into, while others call with out=."""
    n, wrong = 1001 * P, []
    x, out = np.empty(n, np.float32), np.empty(n, np.float32)
    for turn in range(TURNS):
        x[:] = values(RANK, turn, n, "float32")
        result = collectives.alltoall(x, comm, out=None if RANK == 0 else out)
        if result.tobytes() != expected("alltoall", turn, n, "float32", None).tobytes():
            wrong.append(turn)
    assert not wrong


@pytest.mark.mpi
@only_on(2, 3)
def test_who_is_interrupted_before_all_have_come_takes_back_his_entry(comm):
    x, changed = by_reach_next(comm), 0
    if RANK == 0:

        def interrupt(*_):
            raise KeyboardInterrupt

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
    else:
        time.sleep(0.7)
    heard = outcome(lambda: collectives.allreduce(x, comm))
    if RANK == 0:
        signal.signal(signal.SIGALRM, before)
        time.sleep(1)
        changed = int((x != 1).sum())
    later = np.ones_like(x)
    again = outcome(lambda: collectives.allreduce(later, comm))
    everybody = COMM.allgather((heard, changed, again, bool((later == P).all())))
    assert everybody[0] == ("KeyboardInterrupt: ", 0, "done", True)
    for sentence, _, after, right in everybody[1:]:
        assert "rank 0 has given up allreduce" in sentence
        assert (after, right) == ("done", True)


@pytest.mark.mpi
@only_on(2, 3)
def test_who_is_interrupted_before_his_first_step_waits_until_nobody_writes_into_his_array(monkeypatch, comm):
    """He has entered and not begun to wait when the others come."""
    armed, changed = others_copy_slowly(monkeypatch), 0

    def interrupted(*_):
        while not session(comm).room.complete():
            time.sleep(1e-3)
        raise KeyboardInterrupt

    x = by_reach_next(comm)
    session(comm).patient(60.0, 20.0)
    armed.append(True)
    if RANK == 0:
        monkeypatch.setattr(session(comm), "run", interrupted)
    else:
        time.sleep(0.3)
    heard = outcome(lambda: collectives.allreduce(x, comm))
    if RANK == 0:
        left = x.copy()
        time.sleep(0.5)
        changed = int((x != left).sum())
    again = outcome(lambda: collectives.allreduce(x, comm))
    everybody = COMM.allgather((heard, changed, again))
    assert everybody[0][:2] == ("KeyboardInterrupt: ", 0)
    assert all("rank 0 has given up" in sentence for sentence, _, _ in everybody[1:]), everybody
    assert all("unusable" in sentence for _, _, sentence in everybody), everybody


@pytest.mark.mpi
@only_on(2, 3)
def test_who_has_waited_too_long_leaves_nobody_in_his_array(monkeypatch, comm):
    """Also while the error is kept."""
    armed, written = others_copy_slowly(monkeypatch), 0
    x = by_reach_next(comm)
    armed.append(True)
    session(comm).patient(60.0, 0.3 if RANK == 0 else 20.0)
    try:
        collectives.allreduce(x, comm)
    except errors.CollectiveError:  # the others hear of it, if they wait for him
        left = x.copy()
        time.sleep(1.2)
        written = int((x != left).sum())
    assert written == 0


@pytest.mark.mpi
@only_on(3)
@called_or_started
def test_a_copy_that_fails_is_heard_of_by_all(monkeypatch, comm, run):
    move, armed = reach._Move.__call__, []

    def failing(self):
        if armed and RANK == 1 and self.pid != os.getpid():
            raise reach.OutOfReach(self.pid, errno.EPERM)
        move(self)

    monkeypatch.setattr(reach._Move, "__call__", failing)
    x = by_reach_next(comm)
    armed.append(True)
    heard = outcome(lambda: run(x, comm))
    again = outcome(lambda: run(x, comm))
    other = comm.Dup()
    x[:] = 1
    anew = outcome(lambda: run(x, other))
    other.Free()
    sentence = "rank 1 cannot reach the memory of rank 0 any more: Operation not permitted; "
    sentence += "go on with a new communicator"
    everybody = COMM.allgather((heard, again, anew, bool((x == P).all())))
    told = f"CollectiveError: this communicator is unusable after: {sentence}"
    assert everybody == [(f"CollectiveError: {sentence}", told, "done", True)] * P
