"""A server that is killed at any line of its own code leaves a whole round, bit for bit, and no push counts twice."""

from __future__ import annotations

import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from collectives.fabric import arena
from collectives.kernels import engine
from mpips.compression import TwoBit
from mpips.optimizers import SGD, Adam, Groups
from mpips.optimizers import equation as blocks
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.recovery import memory as ledger
from mpips.store.recovery.memory import Ledger, UnitMemory
from mpips.store.server import reduce
from mpips.store.server.quorum import Quorum, QuorumState
from mpips.store.server.reduce import Reduce
from mpips.store.server.sources import Compressed, Elements, PushedRows
from mpips.store.server.state import AsynchronousState, SynchronousState
from mpips.store.transport.frames import UnitCard
from tests.unit.mpips.server.machine import Arriving

WORKERS, ROUNDS, SIZE, ROW = 2, 3, 60, 5
KILLED_IN = ("mpips/store/server/", "mpips/store/recovery/undo", "mpips/optimizers/", "mpips/store/keys/rows")
SURVIVES = 1
"""The generation that is over."""


class Killed(BaseException):
    """What a server is stopped by where no process ends."""


def rows(value, count):
    """Some rows of a unit."""
    return RowSparse(np.arange(count) * 3 % (SIZE // ROW), np.full((count, ROW), value, np.float32), (SIZE // ROW, ROW))


class Gives(PushedRows):
    """Rows, as they are."""

    def __init__(self, given):
        self._rows = given


def source(way, worker, round_):
    """What a worker pushes."""
    values = np.random.default_rng([worker, round_]).normal(size=SIZE).astype(np.float32)
    if way == "rows":
        return Gives(rows(worker + round_ + 0.5, 4 + worker - round_))
    if way == "mixed" and worker:
        return Gives(rows(round_, 2))
    if way == "compressed":
        made = TwoBit(0.5)
        return Compressed(made.encode(values, made.init(values)), made)
    if way == "arriving" and worker:
        return Arriving(values, [1000])
    return Elements(values)


class Server:
    """One unit, which outlives this."""

    def __init__(self, optimizer, block, threads, asynchronous, way):
        self.asynchronous, self.way = asynchronous, way
        self.ledger = Ledger()
        memory = UnitMemory(self.ledger)
        groups = Groups(optimizer)
        card = UnitCard(0, "w", "float32", 0, SIZE, ROW, block, tuple(range(WORKERS)))
        kind = AsynchronousState if asynchronous else SynchronousState
        self.state = kind(reduce=Reduce(threads), optimizers=groups)
        (self.unit,) = memory.make([card], groups)[0]
        self.unit.stored[...] = np.arange(SIZE)
        self.state.create(self.unit)
        memory.publish([self.unit], b"", SURVIVES)

    def round(self, round_):
        """All workers push, and the server does all that it can."""
        for worker in range(WORKERS):
            self.state.pushed(self.unit, worker, source(self.way, worker, round_), 0, 0.0)
        while self.state.work()[0]:
            pass


def left(region):
    """What is there of a unit: what can be had by round, and pushes that count, with those that were told of."""
    segment = arena.segment(region)
    book = ledger.read_ledger(segment, region, SURVIVES + 1)
    (entry,) = book.units
    undo = ledger.undo_of(segment, entry)
    found = {}
    for before, (round_, step) in enumerate(undo.available_rounds()):
        arrays = undo.arrays_at(bool(before))
        assert (step is None) == (len(arrays) == 1 < len(undo.arrays)) or len(undo.arrays) == 1
        found[round_] = step, [array.copy() for array in arrays]
    told = ledger.announced_pushes(segment, entry)
    return SimpleNamespace(rounds=found, pushes=undo.pushes(told), told=told)


def undisturbed(server):
    """What is there after each round, or each push."""
    unit, seen = server.unit, {}

    def note():
        count = sum(unit.done) if server.asynchronous else unit.round
        step = None if unit.state is None else unit.step
        seen[count] = step, [array.copy() for array in (unit.stored, *(unit.state or ()))], list(unit.words)[1:]

    note()
    for round_ in range(ROUNDS):
        for worker in range(WORKERS):
            server.state.pushed(unit, worker, source(server.way, worker, round_), 0, 0.0)
        while server.state.work()[0]:
            if not unit.block:
                note()
    return seen


def equal(one, other):
    return one[0] == other[0] and all((a == b).all() for a, b in zip(one[1], other[1], strict=True))


def run(server, stop, at):
    """Run all rounds, but stop at that line of the code; whether it came so far.

    CPython 3.11 leaves an exception current in the thread where a tracer raises within `except`: run it in one of its
    own, or errors of later tests have that as their context.
    """
    lines = [0]

    def trace(frame, event, _):
        if event == "call" and not any(part in frame.f_code.co_filename for part in KILLED_IN):
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == at:
                stop()
        return trace

    sys.settrace(trace)
    try:
        for round_ in range(ROUNDS):
            server.round(round_)
    except Killed:
        return True
    finally:
        sys.settrace(None)
    return False


def killed():
    raise Killed


CASES = [
    (optimizer, block, threads, asynchronous, way)
    for way in ("plain", "rows", "mixed", "compressed", "arriving")
    for optimizer in (None, SGD(0.1), SGD(0.1, momentum=0.9), Adam(0.1))
    for block, threads in ((SIZE, 1), (16, 1), (16, 2))
    for asynchronous in (False, True)
    if (threads == 1 or way == "plain") and not (asynchronous and (optimizer is None or way == "arriving"))
]
PARAMS = [  # plain SGD keeps no state: it goes one way, momentum and Adam go all
    pytest.param(*case, marks=pytest.mark.full if case[0] == SGD(0.1) and case[-1] != "plain" else ()) for case in CASES
]


@pytest.fixture
def small(monkeypatch):
    """Everything happens in small steps: an update that stops half way has changed a part."""
    monkeypatch.setattr(blocks, "_local", threading.local())
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 32)
    monkeypatch.setattr(reduce, "SHARED_BYTES", 16)
    monkeypatch.setattr(reduce, "PART_BYTES", 16)
    with engine.numpy_only():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.full), 17])
@pytest.mark.parametrize("optimizer, block, threads, asynchronous, way", PARAMS)
def test_wherever_it_stops_a_whole_round_is_there(optimizer, block, threads, asynchronous, way, step):
    settings = optimizer, block, threads, asynchronous, way
    expected = undisturbed(Server(*settings))
    at, most = 1 + CASES.index(settings) % step, 0
    while True:
        server = Server(*settings)
        with ThreadPoolExecutor(1) as thread:
            came = thread.submit(run, server, killed, at).result()
        if not came:
            break
        found = left(server.ledger.region)
        newest = max(found.rounds)
        for round_, there in found.rounds.items():
            assert equal(there, expected[round_]), (at, round_)
        told = sum(found.told) if asynchronous else min(found.told)
        assert told <= newest <= told + 1, at
        if asynchronous:
            assert found.pushes == expected[newest][2], at
        assert newest >= most or threads > 1  # what was there once is never lost
        most = newest
        server.state.abandon()  # a server that lives goes back by itself
        assert equal(
            (None if server.unit.state is None else server.unit.step, [server.unit.stored, *(server.unit.state or ())]),
            expected[newest],
        ), at
        assert not server.unit.torn
        at += step
    assert threads > 1 or most >= (WORKERS * ROUNDS - 1 if asynchronous else ROUNDS - 1)


class OfQuorum(Server):
    """One unit whose rounds close when all have given, and some come late."""

    def __init__(self):
        super().__init__(SGD(0.1, momentum=0.9), 16, 1, True, "plain")
        self.state = QuorumState(Quorum(1), reduce=Reduce(), optimizers=Groups(SGD(0.1, momentum=0.9)))
        self.state.create(self.unit)

    def round(self, round_):
        """The first is in time, the others are late but once."""
        for worker in range(WORKERS):
            self.state.pushed(self.unit, worker, Whole(source("plain", worker, round_).array), 0, 0.0)
            while self.state.work()[0]:
                pass
        self.state.pulled(0, 0, round_ + 1)


class Whole(Elements):
    """All elements, there at once."""

    def whole(self):
        return self.array.copy()


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_a_round_of_a_quorum_is_whole_wherever_it_stops():
    calm, expected = OfQuorum(), {0: (None, [np.arange(SIZE, dtype=np.float32)], [0] * WORKERS)}
    for round_ in range(ROUNDS):
        calm.round(round_)
        arrays = [one.copy() for one in (calm.unit.stored, *calm.unit.state)]
        expected[round_ + 1] = calm.unit.step, arrays, calm.unit.done
    assert [counts for _, _, counts in expected.values()] == [[0, 0], [1, 0], [2, 1], [3, 2]]
    at, seen = 1, set()
    while True:
        server = OfQuorum()
        with ThreadPoolExecutor(1) as thread:
            if not thread.submit(run, server, killed, at).result():
                break
        found = left(server.ledger.region)
        newest = max(found.rounds)
        assert all(equal(there, expected[round_]) for round_, there in found.rounds.items()), at
        assert found.pushes == expected[newest][2], at
        seen.add(newest)
        at += 3
    assert seen == set(range(ROUNDS + 1))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("at", [200, 333, 471])
def test_a_process_that_is_killed_leaves_it_to_who_has_mapped_it(asynchronous, at):
    settings = SGD(0.1, momentum=0.9), 16, 1, asynchronous, "plain"
    expected = undisturbed(Server(*settings))
    (told, tells), (mapped, maps) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        server = Server(*settings)
        os.write(tells, " ".join(map(str, server.ledger.region)).encode())
        os.read(mapped, 1)
        run(server, lambda: os.kill(os.getpid(), signal.SIGKILL), at)
        os._exit(1)
    region = arena.Region(*map(int, os.read(told, 200).split()))
    segment = arena.segment(region)
    os.write(maps, b"x")
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it ended before"
    assert segment is arena.segment(region)
    found = left(region)
    assert all(equal(there, expected[round_]) for round_, there in found.rounds.items())
    for one in (told, tells, mapped, maps):
        os.close(one)
