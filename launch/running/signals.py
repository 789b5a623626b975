"""Signals that are held back and read one by one, so that who waits for a job can pass each on to it once."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterator
from typing import NamedTuple

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
RECORD = struct.Struct("Iii116x")  # of signalfd: number, errno, code
MASK_BYTES = 128
_libc = ctypes.CDLL(None, use_errno=True)


class Heard(NamedTuple):
    """One signal; a terminal's go to all processes of a job, those of another process to this one alone."""

    number: int
    by_terminal: bool

    @property
    def ends(self) -> bool:
        return self.number in ENDING

    @property
    def is_for_ranks(self) -> bool:
        return self.number in PASSED_ON


class HeldSignals:
    """Holds back what ends a process, what is passed on to a job, and news of children; not what is ignored here.

    `fileno` is readable when one has come. `close` gives the process its signals back.
    """

    def __init__(self) -> None:
        numbers = [number for number in (*ENDING, *PASSED_ON) if signal.getsignal(number) != signal.SIG_IGN]
        self._held = {*numbers, signal.SIGCHLD}
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self._held)
        bits = sum(1 << (number - 1) for number in self._held)
        self._fd = _libc.signalfd(-1, bits.to_bytes(MASK_BYTES, "little"), os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
            raise OSError(ctypes.get_errno(), "signalfd")

    def fileno(self) -> int:
        return self._fd

    def read(self) -> Iterator[Heard]:
        """Those that have come, but for news of children."""
        while True:
            try:
                number, _, code = RECORD.unpack(os.read(self._fd, RECORD.size))
            except BlockingIOError:
                return
            if number != signal.SIGCHLD:
                yield Heard(number, by_terminal=code > 0)

    def close(self) -> None:
        os.close(self._fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)
