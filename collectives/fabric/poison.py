"""How all ranks of a node learn that one has failed: one flag, one sentence (between nodes: `network.control`).

The first to fail writes it. Every wait looks at the flag. A file lock makes sure that the first sentence stays, and a
process that dies with the lock gives it back. Who has ended without a word is seen by its process (`Peers`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from collectives.errors import KINDS, CollectiveError, kind_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

POISON_BYTES = 4096
TEXT_AT = 16
PROGRAM_ENDED, CLOSED = 1, 2
DEPARTURES = {0: "its process has ended", PROGRAM_ENDED: "its program has ended", CLOSED: "it has closed its store"}
"""How a rank has left, by the word that it has written before."""


class Poison:
    """The flag of one generation. `memory`: POISON_BYTES that all ranks of the node map; `fd`: the file that holds
    them."""

    def __init__(self, memory: NDArray[np.uint8], fd: int) -> None:
        self._memory, self._fd = memory, fd
        self.flag = memory[:TEXT_AT].data.cast("B").cast("Q")
        """One word: 0 while the generation lives, then 1 + the place of the error in `KINDS`."""

    def spread(self, error: BaseException, sentence: str) -> CollectiveError:
        """End the generation with this sentence, unless another has ended it. The error that all ranks raise."""
        with self._locked():
            if not self.flag[0]:
                text = sentence.encode(errors="replace")[: POISON_BYTES - TEXT_AT]
                self._memory[TEXT_AT : TEXT_AT + len(text)] = np.frombuffer(text, np.uint8)
                self.flag[1] = len(text)
                self.flag[0] = 1 + kind_of(error)
            return self._error()

    def error(self) -> CollectiveError:
        """What all ranks raise once the flag is set. The lock orders memory, on any processor."""
        with self._locked():
            return self._error()

    def _error(self) -> CollectiveError:
        text = bytes(self._memory[TEXT_AT : TEXT_AT + self.flag[1]]).decode(errors="replace")
        return KINDS[self.flag[0] - 1](text)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class Peers:
    """Whether processes of this node are still there. One file descriptor a process, for all generations together."""

    _known: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def ended(self, rank: int) -> bool:
        """Whether the rank's process has ended; False where this system cannot tell."""
        pid = self._pids[rank]
        fd = self._known.get(pid)
        if fd is None:
            try:
                fd = self._known[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            except (OSError, AttributeError):
                return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))
