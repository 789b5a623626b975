"""The end of a generation, between real processes: `collectives.fabric.board`."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import time
import weakref

import numpy as np
import pytest

from collectives import CollectiveError, MismatchError, StallError
from collectives.fabric.board import Peers, Poison
from collectives.fabric.layout import POISON_BYTES


@pytest.fixture
def file():
    fd = os.memfd_create("poison")
    os.ftruncate(fd, POISON_BYTES)
    yield fd
    os.close(fd)


def opened(file: int) -> Poison:
    """As each rank has it: its own file descriptor, its own map."""
    fd = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    poison = Poison(np.frombuffer(mmap.mmap(fd, POISON_BYTES), np.uint8), fd)
    weakref.finalize(poison, os.close, fd)
    return poison


def in_a_child(work) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def test_the_first_sentence_stays(file):
    first, second = opened(file), opened(file)
    assert not second.flag[0]
    assert str(first.spread(MismatchError(), "äpfel")) == "äpfel"
    told = second.spread(StallError(), "pears")
    assert type(told) is MismatchError and str(told) == "äpfel"
    assert type(first.error()) is MismatchError and str(first.error()) == "äpfel"


@pytest.mark.parametrize("error", [CollectiveError, MismatchError, StallError, KeyboardInterrupt, ValueError])
def test_the_others_raise_an_error_of_that_sort(file, error):
    opened(file).spread(error(), "why")
    expected = error if issubclass(error, CollectiveError) else CollectiveError
    assert type(opened(file).error()) is expected


def test_a_long_sentence_is_cut(file):
    told = opened(file).spread(CollectiveError(), "ä" * POISON_BYTES)
    assert 1000 < len(str(told)) < POISON_BYTES and str(told) == str(opened(file).error())


def test_what_is_no_text_ends_it_too(file):
    assert str(opened(file).spread(CollectiveError(), "no file b\udce4r")) == "no file b?r"


def test_of_processes_that_fail_at_once_one_is_heard(file):
    readers, writers = os.pipe()

    def fail(number):
        mine = opened(file)
        told = mine.spread(CollectiveError(), f"rank {number} " + "x" * 100 * number)
        os.write(writers, f"{str(told)[:6]}\n".encode())

    children = [in_a_child(lambda number=number: fail(number)) for number in range(8)]
    for child in children:
        os.waitpid(child, 0)
    heard = os.read(readers, 4096).decode().split("\n")[:-1]
    os.close(readers)
    os.close(writers)
    assert len(heard) == 8 and len(set(heard)) == 1
    assert str(opened(file).error()).startswith(heard[0])


def test_a_process_that_is_killed_with_the_lock_gives_it_back(file):
    held, taken = os.pipe()

    def hold():
        mine = opened(file)
        fcntl.flock(mine._fd, fcntl.LOCK_EX)
        mine._memory[16:20] = np.frombuffer(b"half", np.uint8)
        os.write(taken, b"x")
        time.sleep(60)

    child = in_a_child(hold)
    assert os.read(held, 1) == b"x"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(held)
    os.close(taken)
    assert str(opened(file).spread(CollectiveError(), "rank 1 has ended")) == "rank 1 has ended"


def test_a_process_that_has_ended_is_seen_before_anybody_reaps_it():
    ready, tell = os.pipe()
    child = in_a_child(lambda: os.read(ready, 1))
    peers = Peers([os.getpid(), child])
    assert not peers.has_ended(0) and not peers.has_ended(1)
    os.write(tell, b"x")
    deadline = time.monotonic() + 20
    while not peers.has_ended(1) and time.monotonic() < deadline:
        time.sleep(1e-3)
    assert peers.has_ended(1) and not peers.has_ended(0)
    os.waitpid(child, 0)
    os.close(ready)
    os.close(tell)
    assert peers.has_ended(1)


def test_a_process_that_nobody_knew_has_ended():
    child = in_a_child(lambda: None)
    os.waitpid(child, 0)
    assert Peers([child]).has_ended(0)


def test_where_the_system_cannot_tell_nobody_has_ended(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.setattr(Peers, "_known", {})
    assert not Peers([os.getpid()]).has_ended(0)
