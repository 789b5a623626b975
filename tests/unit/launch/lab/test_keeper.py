"""The process that owns a lab, before it is one: whoever gives up waiting for a lab leaves nothing behind."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

BUSY = """
import socket, sys, time
from launch.lab.keeper import ending_with
with ending_with(socket.socket(fileno=int(sys.argv[1]))):
    print("busy", flush=True)
    while True:
        time.sleep(1000)
"""


@pytest.mark.parametrize("before", [False, True])
def test_a_lab_that_is_being_made_ends_when_its_maker_does(before: bool) -> None:
    pytest.importorskip("pyroute2")
    ours, theirs = socket.socketpair()
    words = [sys.executable, "-c", BUSY, str(theirs.fileno())]
    with theirs, ours, subprocess.Popen(words, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, text=True) as keeper:
        theirs.close()
        assert keeper.stdout is not None
        if not before:
            assert keeper.stdout.readline() == "busy\n"
        ours.close()
        try:
            assert keeper.wait(60) == 1
        finally:
            keeper.kill()
