"""What ranks say to the command that started them, and what it makes of their ends."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from launch.running.presence import SPARE_FILES, Presence
from mpips import world

RANK = """
import os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect("\\0" + sys.argv[1])
line.send(sys.argv[2].encode())
print(flush=True)
sys.stdin.read()
os._exit(int(sys.argv[3]))
"""


@pytest.fixture
def presence() -> Iterator[Presence]:
    presence = Presence(here=2)
    yield presence
    presence.close()


def rank(presence: Presence, words: str, code: int = 0) -> subprocess.Popen[bytes]:
    """A process that has said these words, and ends once its standard input does."""
    name = presence.environment()[world.PRESENCE]
    command = [sys.executable, "-c", RANK, name, words, str(code)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    presence.look()
    return process


def ended(presence: Presence, process: subprocess.Popen[bytes], number: int = 0) -> None:
    if number:
        process.send_signal(number)
    process.communicate()
    presence.look()


def test_all_who_said_goodbye_have_ended_well(presence: Presence) -> None:
    first, second = (rank(presence, f"present {i}\ngoodbye\n", code=7) for i in range(2))
    assert sorted(presence.pids()) == sorted([first.pid, second.pid])
    ended(presence, first)
    assert presence.pids() == [second.pid]
    assert not presence.everyone_left_well()
    ended(presence, second)
    assert presence.everyone_left_well()
    assert not presence.deaths


def test_the_first_death_is_told(presence: Presence) -> None:
    first, second = (rank(presence, f"present {i}\n") for i in range(2))
    second.kill()
    os.waitid(os.P_PID, second.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its parent has not heard
    first.kill()
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    presence.look()
    assert presence.deaths[0] == (1, signal.SIGKILL, "")
    for process in (first, second):
        process.communicate()


def test_a_death_knows_a_signal_from_an_exit_code(presence: Presence) -> None:
    first, second, third = (rank(presence, f"present {i}\n", code=9) for i in range(3))
    second.kill()
    assert first.stdin is not None
    first.stdin.close()
    first.stdin = None  # so that `communicate` leaves it alone
    for process in (first, second):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    third.communicate()  # its parent has heard first
    presence.look()
    found = {death.rank: (death.code, death.signal) for death in presence.deaths}
    assert found.pop(2) in ((9, 0), (None, 0))  # a younger kernel knows
    assert found == {0: (9, 0), 1: (None, signal.SIGKILL)}
    for process in (first, second):
        process.communicate()


def test_a_rank_that_fails_has_said_its_code_before_others_are_killed_for_it(presence: Presence) -> None:
    first, second = rank(presence, "present 0\n"), rank(presence, "present 1\nfailing 3\n")
    ended(presence, first, signal.SIGKILL)
    ended(presence, second)
    assert presence.code == 3
    assert not presence.everyone_left_well()


def test_what_fails_because_another_died_has_no_code(presence: Presence) -> None:
    ended(presence, rank(presence, "present 0\n"), signal.SIGKILL)
    ended(presence, rank(presence, "present 1\nfailing 3\n"))
    assert (presence.deaths[0].rank, presence.code) == (0, None)


def test_files_are_left_for_other_work(presence: Presence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (SPARE_FILES + 1, 0))
    lines = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for line in lines:
        line.connect(f"\0{presence.environment()[world.PRESENCE]}")
    began = time.monotonic()
    presence.look()
    assert time.monotonic() - began < 5
    assert not presence.everyone_left_well()
    for line in lines:
        line.close()
