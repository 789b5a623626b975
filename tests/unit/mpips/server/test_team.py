"""Threads that share blocks: each is done once, and what one of them raises is raised."""

import gc
import threading
import time
import weakref
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpips.store.server.reduce import Team


@given(st.integers(1, 4), st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_every_block_is_done_once_and_before_it_returns(threads, counts):
    team = Team(threads)
    for count in counts:
        done = []
        team.share(lambda block, thread, done=done: done.append(block), range(count))
        assert Counter(done) == Counter(range(count))


def test_the_first_thread_has_the_first_blocks_in_order():
    done = []

    def work(block, thread):
        time.sleep(1e-3)
        done.append((thread, block))

    Team(2).share(work, range(40))
    first = [block for thread, block in done if thread == 0]
    assert 0 < len(first) < 40 and first == list(range(len(first)))


@pytest.mark.parametrize("raises", [0, 1])
def test_what_a_thread_raises_is_raised_when_all_have_ended_and_the_team_goes_on(raises):
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


def test_other_threads_begin_by_what_they_are_told():
    began = []
    team = Team(3, lambda: began.append(threading.current_thread() is threading.main_thread()))
    for _ in range(2):
        team.share(lambda block, thread: time.sleep(1e-3), range(20))
    assert began == [False, False]


class Memory:
    """What a task works on."""


def test_who_wakes_up_too_late_is_not_waited_for_and_keeps_nothing():
    awake, done = threading.Event(), []
    team = Team(2, awake.wait)
    for count in (5, 7):
        memory = Memory()
        gone = weakref.ref(memory)
        team.share(partial(lambda memory, block, thread: done.append((block, thread)), memory), range(count))
        del memory
        gc.collect()
        assert gone() is None
    assert done == [(block, 0) for count in (5, 7) for block in range(count)]
    awake.set()
    team.share(lambda block, thread: time.sleep(1e-3), range(20))


def test_threads_and_what_they_worked_on_end_with_the_team():
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
