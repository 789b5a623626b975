"""Sums of a server: order, blocks, threads, messages, rows and compressed payloads change no bit."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives import CollectiveError
from collectives.kernels import sums
from mpips import RowSparse, compression
from mpips.optimizers import SGD, Adam, Add
from mpips.store.keys.row_sparse import EmptyPush, unpacked
from mpips.store.server.reduce import Team
from mpips.store.server.sources import Compressed, Elements, PushedRows
from tests.unit.mpips.server.machine import WORKERS, Arriving, Growing, Machine, long_from


def test_a_round_is_complete_when_all_have_pushed():
    machine = Machine()
    machine.push(0, 1)
    machine.push(2, 3)
    assert machine.work() == [0] * 10
    machine.push(1, 2)
    assert machine.work() == [6] * 10
    assert machine.unit.words == [3, 1, 1, 1]  # three blocks of one round; each contributor's first push was read


@given(st.permutations(range(WORKERS)), st.integers(1, 12))
def test_sums_do_not_depend_on_the_order_of_arrival(order, block):
    values = [np.random.default_rng(worker).normal(size=10).astype(np.float32) for worker in range(WORKERS)]
    machine = Machine(block=block)
    for worker in order:
        machine.push(worker, Elements(values[worker]))
        machine.work()
    assert machine.work() == list((values[0] + values[1]) + values[2])


@pytest.mark.parametrize("block", [4, 10])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_sum_is_the_same_piece_by_piece(monkeypatch, workers, block):
    monkeypatch.setattr(sums, "PIECE_BYTES", 12)
    values = [np.random.default_rng(worker).normal(size=10).astype(np.float32) for worker in range(workers)]
    machine = Machine(workers=workers, block=block)
    for worker in range(workers):
        machine.push(worker, Elements(values[worker]))
    total = values[0] + values[1]
    for value in values[2:]:
        total = total + value
    assert machine.work() == list(total)


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


def test_blocks_are_published_one_by_one():
    machine = Machine()
    filled = [0]
    for worker in range(WORKERS):
        machine.push(worker, Growing(np.ones(10, np.float32), filled) if worker == 1 else 1)
    seen = []
    for _ in range(3):
        filled[0] += 1
        machine.work()
        seen.append((machine.unit.words[0], list(machine.unit.stored).count(3)))
    assert seen == [(1, 4), (2, 8), (3, 10)]


@pytest.mark.slow
@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 4), st.sampled_from([None, Adam(0.1)]))
def test_several_threads_change_no_bit(size, block, threads, optimizer):
    see_the_same_bits(size, block, threads, optimizer)


def test_two_threads_share_a_sum():
    see_the_same_bits(60, 7, 2, Adam(0.1))


def see_the_same_bits(size, block, threads, optimizer):
    values = np.random.default_rng(size).normal(size=(3, WORKERS, size)).astype(np.float32)
    ends = []
    for number in (1, threads):
        machine = Machine(size, block, threads=number, cores_shared=bool(block % 2))
        if optimizer:
            machine.state.set_optimizer(optimizer)
        for round_ in values:
            for worker, value in enumerate(round_):
                machine.push(worker, Growing(value, [1000]) if worker and size % 2 else Elements(value))
            with long_from(bytes_=8):
                machine.work()
        assert machine.unit.words == [3 * machine.unit.blocks, 3, 3, 3]
        ends.append(machine.unit.stored)
    assert (ends[0] == ends[1]).all()


class Watched(list):
    """Words of a unit that look, whenever progress is told, whether all that it tells of has been summed."""

    def __init__(self, words, unit, total):
        super().__init__(words)
        self.unit, self.total, self.early = unit, total, []

    def __setitem__(self, index, value):
        super().__setitem__(index, value)
        told = min((value - self.unit.round * self.unit.blocks) * self.unit.block_elements, self.unit.stored.size)
        if index == 0 and told > 0 and not (self.unit.stored[:told] == self.total).all():
            self.early.append(value)


class Slow(Growing):
    """All there; read slowly, by thread 0 more so."""

    def __init__(self, array):
        super().__init__(array, [array.size])

    def part(self, block, start, stop):
        time.sleep(2e-3 if threading.current_thread() is threading.main_thread() else 2e-4)
        return super().part(block, start, stop)


def test_readers_hear_of_summed_blocks_only():
    machine = Machine(size=96, block=8, threads=3)
    machine.unit.words = Watched(machine.unit.words, machine.unit, WORKERS)
    for worker in range(WORKERS):
        machine.push(worker, Slow(np.ones(96, np.float32)))
    with long_from(bytes_=16):
        machine.work()
    assert machine.unit.words == [12, 1, 1, 1] and not machine.unit.words.early


def test_what_fails_on_any_thread_ends_the_generation():
    machine = Machine(size=64, block=4, threads=3, optimizer=Broken())
    for worker in range(WORKERS):
        machine.push(worker, 1)
    with long_from(bytes_=8), pytest.raises(CollectiveError, match=r"key 'w': .* pushed: no such element"):
        machine.work()


class Broken(SGD):
    """Fails where a thread other than the first one works, for which the first one waits."""

    begun = threading.Event()

    def update(self, weights, gradient, state, step):
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            raise ValueError("no such element")
        self.begun.wait(10)


def test_rows_and_compressed_payloads_add_up_with_plain_ones():
    machine = Machine(size=12)
    machine.unit.row_elements = 3
    rows = RowSparse(np.array([1, 3, 1]), np.ones((3, 3), np.float32), (4, 3))
    compressor = compression.create({"type": "2bit", "threshold": 0.5})
    residual = np.zeros(12, np.float32)
    machine.push(0, PushedRows(rows))
    machine.push(1, Compressed(compressor.encode(np.full(12, 0.5, np.float32), residual), compressor))
    machine.push(2, 10)
    assert machine.work() == list((rows.to_dense() + 10.5).reshape(-1))


def test_blocks_of_messages_are_taken_once():
    machine, values = Machine(), [np.random.default_rng(worker).normal(size=10).astype("f4") for worker in range(3)]
    there = [[0] for _ in range(WORKERS)]
    for worker in range(WORKERS):
        machine.push(worker, Arriving(values[worker], there[worker]))
    for _ in range(3):
        for worker in reversed(range(WORKERS)):
            there[worker][0] += 1
            machine.work()
    assert machine.work() == list((values[0] + values[1]) + values[2])


def nothing(unit):
    """A push that only counts as a round."""
    return PushedRows(EmptyPush((unit.stored.size, 1), unit.stored.dtype))


def packed_rows(rows):
    """Rows of a (4, 3) table of ones, as a worker sends them."""
    values = np.ones((len(rows), 3), np.float32)
    return np.concatenate([np.array(rows, np.int64).view(np.uint8), values.reshape(-1).view(np.uint8)])


@given(st.lists(st.tuples(st.permutations(range(WORKERS)), st.booleans(), st.booleans(), st.booleans()), max_size=4))
def test_rows_that_nobody_names_keep_their_momentum(rounds):
    """And what a worker writes to its payload once it hears that its push was read changes nothing."""
    machine, serial = Machine(size=12, block=4), np.zeros(12, np.float32)
    machine.unit.row_elements = 3
    optimizer = SGD(learning_rate=1.0, momentum=0.5)
    machine.state.set_optimizer(optimizer)
    state = list(optimizer.init(serial))
    for number, (order, *dense) in enumerate(rounds):
        payloads = [packed_rows([worker, 3] if number % 2 else [0]) for worker in range(WORKERS)]
        for worker in order:
            mine = payloads[worker]
            machine.push(worker, 2 if dense[worker] else PushedRows(unpacked(mine, (4, 3), np.dtype("f4"))))
        machine.work()
        assert machine.unit.words[1:] == [number + 1] * WORKERS
        for mine in payloads:
            mine[mine.size // 20 * 8 :] = 0xFF
        rows = [0, 1, 2, 3] if any(dense) else [0, 1, 2, 3] if number % 2 else [0]
        gradient = np.zeros((4, 3), np.float32)
        for worker in range(WORKERS):
            if dense[worker]:
                gradient += 2
            else:
                gradient[[worker, 3] if number % 2 else [0]] += 1
        chosen = np.repeat(np.isin(np.arange(4), rows), 3)
        weights, kept = serial[chosen].copy(), [array[chosen].copy() for array in state]
        optimizer.update(weights, gradient.reshape(-1)[chosen].copy(), kept, number + 1)
        serial[chosen] = weights
        for array, part in zip(state, kept):
            array[chosen] = part
        assert list(machine.unit.stored) == list(serial)


def test_rows_that_are_asked_for_are_named_in_the_grant():
    machine = Machine(workers=1, remote=[0])
    numbers = np.array([1])
    machine.pull(0, 1, numbers)
    assert machine.said == []
    machine.push(0, 1)
    machine.work()
    (grant,) = [reply for reply in machine.said if reply.what == "GRANT"]
    assert grant.rows is numbers


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("size, block", [(10, 4), (10, 10), (0, 4)])
def test_empty_pushes_alone_change_nothing_but_the_round(asynchronous, size, block):
    machine = Machine(size, block, optimizer=Adam(0.1, weight_decay=0.5), asynchronous=asynchronous)
    machine.unit.stored[...] = 1
    for worker in range(WORKERS):
        machine.push(worker, 1)
    before, state, step = machine.work(), [array.copy() for array in machine.unit.state], machine.unit.step
    for worker in range(WORKERS):
        machine.push(worker, nothing(machine.unit))
    assert machine.work() == before and machine.unit.step == step
    assert all((old == new).all() for old, new in zip(state, machine.unit.state))
    assert list(machine.unit.words[1:]) == [2] * WORKERS
    for worker in range(WORKERS):
        machine.push(worker, 1)
    assert size == 0 or machine.work() != before


@pytest.mark.parametrize("empty", [[0], [2], [0, 1]])
def test_an_empty_push_beside_others_counts_as_zeros(empty):
    machine = Machine(optimizer=Add())
    for worker in range(WORKERS):
        machine.push(worker, nothing(machine.unit) if worker in empty else worker + 1)
    assert machine.work() == [sum(worker + 1 for worker in range(WORKERS) if worker not in empty)] * 10


@pytest.mark.slow
@given(st.integers(1, 4), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_every_block_is_done_once_and_before_it_returns(threads, counts):
    team = Team(threads)
    for count in counts:
        done = []
        team.share(lambda block, thread, done=done: done.append(block), range(count))
        assert Counter(done) == Counter(range(count))


@pytest.mark.parametrize("raises", [0, 1])
def test_a_thread_s_error_is_raised_after_all_ended(raises):
    team, running = Team(2), []

    def work(block, thread):
        running.append(block)
        time.sleep(1e-3)
        running.remove(block)
        if thread == raises:
            raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            team.share(work, range(40))
        assert not running
    done = []
    team.share(lambda block, thread: done.append(block), range(5))
    assert sorted(done) == list(range(5))


class Memory:
    """What a task works on."""


@pytest.mark.slow
def test_threads_end_with_the_team():
    before, memory = set(threading.enumerate()), Memory()
    team, gone = Team(3), weakref.ref(memory)
    team.share(partial(lambda memory, block, thread: time.sleep(1e-3), memory), range(10))
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    del memory
    gc.collect()
    assert gone() is None
    del team
    gc.collect()
    until = time.monotonic() + 10
    for thread in mine:
        thread.join(until - time.monotonic())
    assert not any(thread.is_alive() for thread in mine)
