"""The server's state machine, event by event, without MPI."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips import compression
from mpips.optimizers import SGD, Adam, Add
from mpips.row_sparse import RowSparse
from mpips.server_state import ServerState
from mpips.sources import Compressed, Elements, Rows
from mpips.unit import Unit

WORKERS = 3


class Machine:
    """A server with one unit "w" of `size` elements, and what it has said."""

    def __init__(self, size=10, block=4, workers=WORKERS, asynchronous=False, **options):
        self.state = ServerState(range(workers), asynchronous, **options)
        self.unit = Unit(0, "w", np.zeros(size, np.float32), [0] * (1 + workers), range(workers), block, 1)
        self.state.create(self.unit)
        self.said = []

    def push(self, worker, value, clock=0.0):
        source = value if hasattr(value, "coded") else Elements(np.full(self.unit.stored.size, value, np.float32))
        self.said += self.state.pushed(0, worker, source, 0, clock) or []

    def refuse(self, worker, sentence, round_=None):
        self.said += self.state.refused(0, worker, sentence, round_ or self.unit.round + 1, 0.0)

    def work(self, ahead=False):
        while True:
            worked, replies = self.state.work(ahead)
            self.said += replies
            if not worked:
                return list(self.unit.stored)

    def heard(self, what):
        return [(reply.worker, reply.text) for reply in self.said if reply.what == what]


def test_a_round_is_complete_when_all_have_pushed():
    machine = Machine()
    machine.push(0, 1)
    machine.push(2, 3)
    assert machine.work() == [0] * 10
    machine.push(1, 2)
    assert machine.work() == [6] * 10
    assert machine.unit.words == [3, 1, 1, 1]  # three blocks of one round; each contributor's first push was read


@given(st.permutations(range(WORKERS)), st.booleans(), st.integers(1, 12))
def test_sums_do_not_depend_on_the_order_of_arrival(order, ahead, block):
    values = [np.random.default_rng(worker).normal(size=10).astype(np.float32) for worker in range(WORKERS)]
    machine = Machine(block=block)
    for worker in order:
        machine.push(worker, Elements(values[worker]))
        machine.work(ahead)
    assert machine.work() == list((values[0] + values[1]) + values[2])


def test_a_worker_may_be_rounds_ahead():
    machine = Machine()
    for value in (1, 10, 100):
        machine.push(0, value)
    for value in (2, 20):
        machine.push(1, value)
    machine.push(2, 3)
    assert machine.work() == [6] * 10
    machine.push(2, 30)
    assert machine.work() == [60] * 10
    assert machine.unit.words[1:] == [2, 2, 2]


def test_who_waits_is_read_ahead_in_order():
    machine = Machine()
    machine.push(0, 1)
    machine.push(2, 3)
    machine.work(ahead=True)
    assert machine.unit.words == [0, 1, 0, 0]  # worker 0 may go on; worker 2's turn is after worker 1
    machine.push(1, 2)
    assert machine.work() == [6] * 10


def test_blocks_are_published_one_by_one():
    machine = Machine()
    filled = [0]
    for worker in range(WORKERS):
        machine.push(worker, Elements(np.ones(10, np.float32), filled if worker == 1 else None))
    seen = []
    for _ in range(3):
        filled[0] += 1
        machine.work()
        seen.append((machine.unit.words[0], list(machine.unit.stored).count(3)))
    assert seen == [(1, 4), (2, 8), (3, 10)]


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 4), st.sampled_from([None, Adam(0.1)]))
def test_several_threads_change_no_bit(size, block, threads, optimizer):
    values = np.random.default_rng(size).normal(size=(3, WORKERS, size)).astype(np.float32)
    ends = []
    for number in (1, threads):
        machine = Machine(size, block, threads=number)
        if optimizer:
            machine.state.set_optimizer(optimizer)
        for round_ in values:
            for worker, value in enumerate(round_):
                machine.push(worker, Elements(value, [1000] if worker and size % 2 else None))
            machine.work()
        assert machine.unit.words == [3 * machine.unit.blocks, 3, 3, 3]
        ends.append(machine.unit.stored)
    assert (ends[0] == ends[1]).all()


def test_what_fails_on_any_thread_fails_the_round():
    machine = Machine(size=64, block=4, threads=3)
    machine.state.set_optimizer(Broken())
    for worker in range(WORKERS):
        machine.push(worker, 1)
    machine.work()
    said = {text for _, text in machine.heard("FAILED")}
    assert said == {"key 'w': the update on the server failed: no such element"}


class Broken(SGD):
    """Fails where a thread other than the first one works."""

    def update(self, weights, gradient, state, step):
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("no such element")


def test_an_optimizer_updates_once_a_round():
    machine = Machine()
    machine.state.set_optimizer(SGD(0.5, momentum=0.5))
    for _ in range(2):
        for worker in range(WORKERS):
            machine.push(worker, 1)
        machine.work()
    expected, state = np.zeros(10, np.float32), SGD(0.5, momentum=0.5).init(np.zeros(10, np.float32))
    for step in (1, 2):
        SGD(0.5, momentum=0.5).update(expected, np.full(10, 3, np.float32), state, step)
    assert list(machine.unit.stored) == list(expected)


@pytest.mark.parametrize("refused_first", [True, False])
def test_a_refusal_fails_the_round_for_all_and_keeps_what_is_stored(refused_first):
    machine = Machine()
    for worker in range(WORKERS):
        machine.push(worker, 1)
    machine.work()
    machine.push(0, 5)
    if refused_first:
        machine.refuse(1, "rank 1: no")
    machine.push(2, 5)
    if not refused_first:
        machine.refuse(1, "rank 1: no")
    assert machine.work() == [3] * 10
    assert sorted(machine.heard("FAILED")) == [(worker, "rank 1: no") for worker in range(WORKERS)]
    for worker in range(WORKERS):
        machine.push(worker, 2)
    assert machine.work() == [6] * 10


def test_a_refusal_after_reading_ahead_drops_the_partial_sum():
    machine = Machine()
    machine.push(0, 5)
    machine.work(ahead=True)
    machine.refuse(1, "no")
    machine.push(2, 5)
    machine.work(ahead=True)
    for worker in range(WORKERS):
        machine.push(worker, 1)
    assert machine.work(ahead=True) == [3] * 10


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_contribution_that_is_withdrawn_is_never_read(asynchronous):
    machine = Machine(workers=2, asynchronous=asynchronous, staleness=0)
    machine.state.set_optimizer(Add())
    held = Arriving(np.full(10, 100, "f4"), [0])
    machine.push(0, 1)
    machine.push(0, held)
    machine.refuse(0, "rank 0: no", 2)
    assert held.dropped
    held.there[0] = 3
    machine.refuse(0, "too late", 2)
    machine.push(1, 10)
    assert machine.work() == [11] * 10
    machine.push(1, 20)
    assert machine.work() == [31 if asynchronous else 11] * 10
    machine.refuse(0, "it has ended", 1)
    for worker in range(2):
        machine.push(worker, 1)
    assert machine.work() == [33 if asynchronous else 13] * 10
    assert machine.heard("FAILED") == ([] if asynchronous else [(worker, "rank 0: no") for worker in (1, 0)])


@pytest.mark.parametrize("forgotten", [False, True])
def test_nothing_is_received_for_what_is_given_up(forgotten):
    machine = Machine(workers=2, asynchronous=not forgotten)
    sources = [Arriving(np.ones(10, "f4"), [0]) for _ in range(2)]
    for source in sources:
        machine.push(0, source)
    if forgotten:
        machine.state.forget([0])
    else:
        machine.work()  # without an optimizer
        assert len(machine.heard("FAILED")) == 2
    assert all(source.dropped for source in sources)


def test_an_update_that_raises_fails_the_round():
    machine = Machine(workers=1)
    machine.unit.stored = np.zeros(10, np.int64)
    machine.state.set_optimizer(Add())
    machine.push(0, Elements(np.ones(10, np.int64)))
    machine.work()
    assert "float weights" in machine.heard("FAILED")[0][1]


def test_a_worker_that_left_fails_what_waits_for_it():
    machine = Machine()
    machine.push(0, 1)
    machine.said += machine.state.left(1)
    assert [worker for worker, text in machine.heard("FAILED") if "rank 1, which has left" in text] == [2, 0]


def test_a_long_wait_warns_once_and_then_fails():
    machine = Machine(stall_seconds=1, timeout_seconds=3)
    machine.push(0, 1, clock=10)
    for clock in (10.5, 11.5, 12):
        machine.said += machine.state.tick(clock)
    assert [worker for worker, _ in machine.heard("WARNING")] == [0]
    assert "key 'w'" in machine.heard("WARNING")[0][1] and "ranks [1, 2]" in machine.heard("WARNING")[0][1]
    machine.said += machine.state.tick(13.5)
    assert all(reply.timed_out for reply in machine.said if reply.what == "FAILED")
    assert len(machine.heard("FAILED")) == WORKERS


def test_a_round_that_has_begun_to_count_is_not_given_up():
    machine = Machine(stall_seconds=1, timeout_seconds=3)
    there = [2]
    for worker in range(WORKERS):
        machine.push(worker, Elements(np.ones(10, np.float32), there))
    assert machine.work() == [3] * 8 + [0] * 2
    assert machine.state.tick(100.0) == []
    there[0] = 3
    assert machine.work() == [3] * 10


def test_a_round_waits_from_the_end_of_the_one_before():
    machine = Machine(workers=2, stall_seconds=1, timeout_seconds=3)
    machine.push(0, 1, clock=10.0)
    machine.push(0, 1, clock=10.1)
    machine.said += machine.state.tick(12.5)
    machine.push(1, 1, clock=12.9)
    machine.work()
    machine.said += machine.state.tick(13.2)
    assert len(machine.heard("WARNING")) == 1 and not machine.heard("FAILED")
    machine.said += machine.state.tick(14.5)
    assert len(machine.heard("WARNING")) == 2 and not machine.heard("FAILED")
    machine.said += machine.state.tick(16.5)
    assert len(machine.heard("FAILED")) == 2


def test_readers_hold_updates_back():
    machine = Machine(workers=1)
    machine.push(0, 1)
    machine.work()
    machine.said += machine.state.pulled(0, 0, 1)
    assert machine.heard("GRANT") == [(0, "")]
    machine.push(0, 2)
    assert machine.work() == [1] * 10
    machine.state.released(0, 0)
    assert machine.work() == [2] * 10


def abandoned_pull(abandon):
    """A machine where worker 0 was too far ahead to read, and gave that up."""
    machine = Machine(workers=2, asynchronous=True, staleness=0)
    machine.state.set_optimizer(Add())
    machine.push(0, 1)
    machine.work()
    machine.said += machine.state.pulled(0, 0, 1)
    assert not machine.heard("GRANT")
    machine.said += abandon(machine.state)
    return machine


@pytest.mark.parametrize("granted_first", [False, True])
def test_a_pull_that_is_given_up_holds_nobody_back(granted_first):
    machine = abandoned_pull(lambda state: [] if granted_first else state.released(0, 0))
    machine.push(1, 10)
    assert machine.work() == [11] * 10
    if granted_first:
        machine.said += machine.state.released(0, 0)
    assert machine.heard("GRANT") == [(0, "")]  # each question has one answer
    for worker in range(2):
        machine.push(worker, 1)
    assert machine.work() == [13] * 10


def test_a_worker_that_leaves_reads_no_more():
    machine = abandoned_pull(lambda state: state.left(0))
    machine.push(1, 10)
    assert machine.work() == [11] * 10
    machine.push(1, 10)
    assert machine.work() == [21] * 10
    assert not machine.heard("GRANT")


def test_a_reader_that_leaves_lets_the_others_go_on():
    machine = Machine(workers=2, asynchronous=True)
    machine.state.set_optimizer(Add())
    machine.said += machine.state.pulled(0, 0, 0)
    machine.push(1, 10)
    assert machine.work() == [0] * 10
    machine.said += machine.state.left(0)
    assert machine.work() == [10] * 10


def test_rows_and_compressed_payloads_add_up_with_plain_ones():
    machine = Machine(size=12)
    machine.unit.row_elements = 3
    rows = RowSparse(np.array([1, 3, 1]), np.ones((3, 3), np.float32), (4, 3))
    payload = np.concatenate([rows.rows.view(np.uint8), rows.values.reshape(-1).view(np.uint8)])
    compressor = compression.create({"type": "2bit", "threshold": 0.5})
    residual = np.zeros(12, np.float32)
    machine.push(0, Rows(payload, 3, (4, 3), np.dtype(np.float32)))
    machine.push(1, Compressed(compressor.encode(np.full(12, 0.5, np.float32), residual), compressor))
    machine.push(2, 10)
    assert machine.work() == list((rows.to_dense() + 10.5).reshape(-1))


def test_asynchronous_pushes_count_at_once_within_the_staleness():
    machine = Machine(workers=2, asynchronous=True, staleness=1)
    machine.state.set_optimizer(Add())
    for _ in range(4):
        machine.push(0, 1)
    assert machine.work() == [2] * 10  # worker 1 has done nothing: the third push would be two ahead
    machine.push(1, 10)
    assert machine.work() == [13] * 10
    machine.said += machine.state.left(1)
    assert machine.work() == [14] * 10


def test_a_pull_waits_for_the_workers_own_pushes():
    machine = Machine(workers=2, asynchronous=True)
    machine.state.set_optimizer(Add())
    machine.push(0, 1)
    machine.said += machine.state.pulled(0, 0, 1)
    assert not machine.heard("GRANT")
    machine.work()
    assert machine.heard("GRANT") == [(0, "")]


class Arriving(Elements):
    """Blocks that come as messages: each is there once, in order, as far as `there` says."""

    local = False

    def __init__(self, array, there):
        super().__init__(array)
        self.steady, self.there, self.taken, self.dropped = None, there, 0, False

    def ready(self, block):
        return block < self.there[0]

    def part(self, block, start, stop):
        assert block == self.taken, (block, self.taken)
        self.taken += 1
        return self.array[start:stop]

    def drop(self):
        self.dropped = True


def test_blocks_of_messages_are_taken_once_however_long_they_take():
    machine, values = Machine(), [np.random.default_rng(worker).normal(size=10).astype("f4") for worker in range(3)]
    there = [[0] for _ in range(WORKERS)]
    for worker in range(WORKERS):
        machine.push(worker, Arriving(values[worker], there[worker]))
    for _ in range(3):
        for worker in reversed(range(WORKERS)):
            there[worker][0] += 1
            machine.work(ahead=True)
    assert machine.work(ahead=True) == list((values[0] + values[1]) + values[2])


def test_rows_and_dense_contributions_add_up_in_one_round():
    machine = Machine(size=12, block=4)
    rows = RowSparse(np.array([0, 3]), np.ones((2, 3), np.float32), (4, 3))
    packed = np.concatenate([rows.rows.view(np.uint8), rows.values.reshape(-1).view(np.uint8)])
    machine.push(0, Rows(packed, 2, (4, 3), np.dtype("f4")))
    machine.push(1, 2)
    machine.push(2, Rows(packed, 2, (4, 3), np.dtype("f4")))
    assert machine.work() == [4] * 3 + [2] * 6 + [4] * 3
    assert machine.unit.words == [3, 1, 1, 1]  # every contributor hears that its push was read


def packed_rows(rows):
    """Rows of a (4, 3) table of ones, as a worker sends them."""
    values = np.ones((len(rows), 3), np.float32)
    return np.concatenate([np.array(rows, np.int64).view(np.uint8), values.reshape(-1).view(np.uint8)])


@given(st.lists(st.tuples(st.permutations(range(WORKERS)), st.booleans(), st.booleans(), st.booleans()), max_size=4))
def test_reading_rows_ahead_changes_nothing(rounds):
    """A row that nobody names keeps its momentum, whenever the server reads and whatever a worker does afterwards."""
    early, late = Machine(size=12, block=4), Machine(size=12, block=4)
    for machine in early, late:
        machine.unit.row_elements = 3
        machine.state.set_optimizer(SGD(learning_rate=1.0, momentum=0.5))
    for number, (order, *dense) in enumerate(rounds):
        payloads = [packed_rows([worker, 3] if number % 2 else [0]) for worker in range(WORKERS)]
        for worker in order:
            for machine in early, late:
                mine = payloads[worker].copy()
                machine.push(worker, 2 if dense[worker] else Rows(mine, mine.size // 20, (4, 3), np.dtype("f4")))
                if machine is early:
                    machine.work(ahead=True)
                    if machine.unit.words[1 + worker] > number:
                        mine[mine.size // 20 * 8 :] = 0xFF  # the worker has heard that its push was read
        assert early.work(ahead=True) == late.work()
    assert early.unit.words == late.unit.words


def test_rows_that_are_asked_for_are_named_in_the_grant():
    machine = Machine(workers=1, remote=[0])
    numbers = np.array([1])
    assert machine.state.pulled(0, 0, 1, numbers) == []
    machine.push(0, 1)
    machine.work()
    (grant,) = [reply for reply in machine.said if reply.what == "GRANT"]
    assert grant.rows is numbers
