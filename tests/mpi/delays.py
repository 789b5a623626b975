"""A rank that is put off now and then, so that others are ahead of it anywhere in a call."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def put_off(seconds: float, every: float) -> Iterator[None]:
    """This rank sleeps so long again and again, after so many seconds each time."""
    before = signal.signal(signal.SIGALRM, lambda number, frame: time.sleep(seconds))
    signal.setitimer(signal.ITIMER_REAL, 0.001, every)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
