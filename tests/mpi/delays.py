"""Delay a rank at random places of its calls, so that other ranks get ahead of it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_off(seconds: float, every: float) -> Iterator[None]:
    """Context manager in which this rank sleeps for `seconds`, once in every `every` seconds."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(seconds))
    signal.setitimer(signal.ITIMER_REAL, 0.001, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
