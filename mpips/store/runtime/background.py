"""The communication thread: it advances operations that nobody waits for, and sleeps between two looks."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sized
from typing import Any

DUTY = 24
"""The thread sleeps this many times as long as a look took: 1 / (1 + 24) = 4 % of a core."""
WAKE = 2e-5
"""What a look costs beside itself: falling asleep and waking up, seconds."""
LONGEST_SLEEP = 1e-3
"""However long a look took. A collective of many rounds needs a look a round."""
QUIET, QUIET_SLEEP, QUIET_DUTY = 0.1, (4e-3, 8e-3), 32
"""After so many seconds in which nothing ended it sleeps longer: looks and wakes then take 1 / 33 of its time."""


class Background:
    """One thread, started when it is first needed. `progress()` looks at everything once and says whether something
    ended; `under_way` is empty where there is nothing to look at; `changed`, of `lock`, is notified when that may have
    changed."""

    def __init__(
        self, lock: contextlib.AbstractContextManager[Any], changed: threading.Condition, under_way: Sized,
        progress: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._lock, self._changed, self._under_way, self._progress = lock, changed, under_way, progress
        self._thread: threading.Thread | None = None
        self._waiting: set[int] = set()
        """Threads that look themselves."""
        self._closing = False

    def start(self) -> None:
        """Start it, if it does not run yet. It is a daemon: whoever owns it closes it before MPI is finalised."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpips communication", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop it, and wait until it has stopped."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """It begins no look inside, as somebody else looks."""
        with self._lock:
            self._waiting.add(threading.get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(threading.get_ident())
                self._changed.notify_all()

    def _run(self) -> None:
        last, used = 0.0, time.thread_time()  # when something was added or ended; CPU seconds
        while True:
            with self._lock:
                if not self._under_way:
                    last = 0.0
                self._changed.wait_for(lambda: self._closing or (self._under_way and not self._waiting))
                if self._closing:
                    return
            begin = time.perf_counter()
            last = last or begin
            if self._progress():
                last = begin
                continue
            before, used = used, time.thread_time()
            if begin - last < QUIET:
                time.sleep(min(DUTY * (WAKE + time.perf_counter() - begin), LONGEST_SLEEP))
            else:
                time.sleep(min(max(QUIET_DUTY * (used - before), QUIET_SLEEP[0]), QUIET_SLEEP[1]))
