"""What ranks say to the command that started them, and what it makes of their ends.

An mpirun whose ranks are elsewhere: all that it says comes out as it is, and a host that it has lost is noticed.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.running.presence import LOST_SENTENCES, SPARE_FILES, Presence
from mpips.store import world
from mpips.store.world import WELL_WITHOUT
from tests.strangers import needs_root, stranger

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
    presence = Presence(ranks_here=2)
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
    assert not presence.have_all_ended_well()
    ended(presence, second)
    assert presence.have_all_ended_well()
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
    assert not presence.have_all_ended_well()


def test_what_fails_because_another_died_has_no_code(presence: Presence) -> None:
    ended(presence, rank(presence, "present 0\n"), signal.SIGKILL)
    ended(presence, rank(presence, "present 1\nfailing 3\n"))
    assert (presence.deaths[0].rank, presence.code) == (0, None)


def test_where_others_go_on_a_failure_after_a_death_has_a_code() -> None:
    presence = Presence(ranks_here=3, survives=True)
    ended(presence, rank(presence, "present 0\nstarted\n"), signal.SIGKILL)
    failing = rank(presence, "present 1\nstarted\nfailing 3\n")
    assert (presence.code, presence.failed, presence.started) == (3, False, True)
    ended(presence, failing)
    assert presence.failed
    presence.close()


def test_ranks_are_idle_when_all_that_work_have_ended_and_no_spare_has_a_role() -> None:
    presence = Presence(ranks_here=3, survives=True)
    first, spare = rank(presence, "present 0\n"), rank(presence, "present 2\n")
    assert not presence.is_idle(range(2))  # rank 1 is to come
    second = rank(presence, "present 1\ngoodbye\n")
    assert not presence.is_idle(range(2))
    ended(presence, first, signal.SIGKILL)
    assert presence.is_idle(range(2))
    assert len(presence.pids()) == 2
    other = rank(presence, "present 3\nrole worker of client 1\n")
    assert not presence.is_idle(range(2))
    ended(presence, other, signal.SIGKILL)
    assert presence.deaths[-1].role == "worker of client 1"
    assert presence.is_idle(range(2))
    for process in (second, spare):
        ended(presence, process)
    presence.close()


def test_files_are_left_for_other_work(presence: Presence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (SPARE_FILES + 1, 0))
    lines = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for line in lines:
        line.connect(f"\0{presence.environment()[world.PRESENCE]}")
    began = time.monotonic()
    presence.look()
    assert time.monotonic() - began < 20
    assert not presence.have_all_ended_well()
    for line in lines:
        line.close()


FORGER = """
with socket.socket(socket.AF_UNIX) as line:
    line.settimeout(5)
    line.connect("\\0" + sys.argv[1])
    try:
        line.send(sys.argv[2].encode())
        print(line.recv(1) == b"")
    except ConnectionError:
        print(True)
"""


@needs_root
def test_another_user_is_not_heard(presence: Presence) -> None:
    name = presence.environment()[world.PRESENCE]
    for words in ("present 0\nfailing 3\n", "present 1\ngoodbye\n"):
        process = stranger(FORGER, name, words)
        while process.poll() is None:
            presence.look()
            time.sleep(0.01)
        said, errors = process.communicate()
        assert said == "True\n", errors  # its line is closed
    assert (presence.code, presence.deaths, presence.ended_well, presence.pids()) == (None, [], 0, [])
    for i in range(2):
        ended(presence, rank(presence, f"present {i}\ngoodbye\n"))
    assert presence.have_all_ended_well()


@pytest.mark.parametrize(
    "words",
    [
        "present abc\n",
        "present\n",
        "present -1\n",
        "present 1_0\n",
        f"present {'9' * 5000}\n",
        "\n",
        "\xff\n",
        "present 0\nfailing x\n",
        "present 0\nfailing 0\n",
        "present 0\nfailing 256\n",
        "failing 3\n",
        "goodbye\n",
    ],
)
def test_a_word_that_is_none_is_nothing(presence: Presence, words: str) -> None:
    process = rank(presence, words)
    ended(presence, process)
    assert presence.code is None
    assert not presence.deaths
    for i in range(2):
        ended(presence, rank(presence, f"present {i + 1}\ngoodbye\n"))
    assert presence.have_all_ended_well()


def test_each_rank_is_accepted_once(presence: Presence) -> None:
    first, second = (rank(presence, f"present {i}\n") for i in range(2))
    other = rank(presence, "present 1\nfailing 9\ngoodbye\n")
    again = rank(presence, "present 2\npresent 3\n")
    assert (presence.code, len(presence.pids())) == (None, 0)  # more ranks than there should be
    ended(presence, other)
    assert not presence.deaths
    ended(presence, again, signal.SIGKILL)
    assert [death.rank for death in presence.deaths] == [2]
    for process in (first, second):
        ended(presence, process)


ROOT = Path(__file__).parents[3]
RUN = """
import sys
from launch.running import process
program, here = sys.argv[1:]
ended = process.run([sys.executable, "-c", program], roles=["worker"] * 3, ranks_here=int(here), spares={spares})
process.print_error(f"{{ended.code}} {{ended.death}}")
"""
SAYS = "import os, sys, time\nfor part in {parts!r}: os.write({file}, part); time.sleep(0.05)\nsys.exit({code})"


def run(parts: list[bytes], file: int, ranks_here: int = 0, spares: int = -1, code: int = 0) -> tuple[bytes, str]:
    """What comes out of an mpirun that says this, and, below it, its code and who has died."""
    program = [sys.executable, "-c", RUN.format(spares=spares), SAYS.format(parts=parts, file=file, code=code)]
    done = subprocess.run([*program, str(ranks_here)], cwd=ROOT, capture_output=True, timeout=60)
    *said, last = done.stderr.splitlines(keepends=True)
    return (done.stdout if file == 1 else b"".join(said)), last.decode().strip()


@pytest.mark.slow
@pytest.mark.parametrize("file", [1, 2])
@pytest.mark.parametrize("spares", [-1, 0])
@pytest.mark.parametrize("sentence", LOST_SENTENCES)
def test_a_lost_host_is_a_failure_though_mpirun_says_0(sentence: bytes, spares: int, file: int) -> None:
    parts = [b"PRTE " + sentence[:10], sentence[10:], b"\0 more\n"]
    assert run(parts, file, spares=spares) == (b"".join(parts), "1 mpirun has lost a host")
    assert run(parts, file, spares=spares, code=7) == (b"".join(parts), "7 mpirun has lost a host")


@pytest.mark.slow
def test_what_ssh_says_of_a_lost_host_is_the_reason() -> None:
    parts = [b"ssh: Could not resolve hostname n7: Name or service not known\r\n", LOST_SENTENCES[1] + b"\n"]
    assert run(parts, 2)[1] == f"1 mpirun has lost a host ({parts[0].decode().strip()})"


@pytest.mark.slow
def test_a_job_that_had_ended_well_without_a_host_has() -> None:
    parts = [WELL_WITHOUT + b" 1\n", LOST_SENTENCES[0] + b"\n"]
    for code in (0, 1):
        assert run(parts, 2, spares=0, code=code) == (b"".join(parts), "0")


def test_who_has_all_ranks_here_is_not_listened_to() -> None:
    assert run([LOST_SENTENCES[0], b"\n"], 2, ranks_here=3) == (LOST_SENTENCES[0] + b"\n", "0")


@pytest.mark.slow
def test_much_is_passed_on_whole() -> None:
    program = [sys.executable, "-c", RUN.format(spares=-1), "import os\nprint('x' * 3_000_001); os.write(2, b'y')", "0"]
    job = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(0.5)  # nobody reads: what it has written waits
    out, said = job.communicate(timeout=60)
    assert (len(out), said) == (3_000_002, "y0 \n")


def test_a_signal_does_not_wait_for_who_reads() -> None:
    program = [sys.executable, "-c", RUN.format(spares=-1), "print('x' * 300_000)", "0"]
    job = subprocess.Popen(program, cwd=ROOT, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while job.poll() is None and time.monotonic() < deadline:
        os.kill(job.pid, signal.SIGTERM)
        time.sleep(0.1)
    assert job.wait(1) in (0, -signal.SIGTERM)
    assert job.stdout is not None
    job.stdout.close()
