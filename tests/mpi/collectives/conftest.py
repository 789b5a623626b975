"""What tests of several collectives are given."""

from __future__ import annotations

import signal

import pytest
from collectives.session import session

from tests.mpi.collectives.support import PATIENCE, WORLD


@pytest.fixture
def comm():
    """A communicator on which no wait is endless."""
    made = WORLD.Dup()
    session(made).patient(PATIENCE, PATIENCE)
    yield made
    made.Free()


@pytest.fixture
def alarm():
    """alarm(seconds): interrupts this rank, as Ctrl-C does."""

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
