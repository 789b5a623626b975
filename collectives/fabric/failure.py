"""Deaths and failures of ranks: how MPI, and the ranks of a node, learn that one has failed.

**Deaths.** MPI tells of them where it has ULFM: Open MPI under `mpirun --with-ft ulfm`. Then a death ends no job. A
message to or from the dead raises MPI.Exception, and so does a probe of any source until the death is acknowledged. A
collective may raise on some ranks and wait for ever on others, until one of them revokes its communicator (`Making`).

**Failures on a node.** One flag and one sentence tell all ranks (`Poison`; between nodes: `network.control`). The first
to fail writes them, and every wait looks at the flag. A file lock makes sure that the first sentence stays. A process
that dies with the lock gives it back. A rank that has ended without a word is seen by its process (`Peers`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from mpi4py import MPI

from collectives.errors import KINDS, CollectiveError, kind_of

if TYPE_CHECKING:
    from numpy.typing import NDArray


C = TypeVar("C", bound=MPI.Comm)
WATCH_SECONDS = 4e-3
MAKING_SECONDS = 0.02
"""So soon a rank has left the making of a communicator whose parent was revoked."""
DEATH_SECONDS = 1.0
"""So long after an error the death that may have caused it is waited for."""
ENABLED = "OMPI_MCA_mpi_ft_enable"
"""What mpirun of Open MPI sets where it is asked to let others live."""
_DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


@cache
def able() -> bool:
    """Whether the MPI of this job tells of deaths, and other processes outlive them."""
    return os.environ.get(ENABLED, "").lower() in ("1", "true") and "Open MPI" in MPI.Get_library_version()


def failed(comm: MPI.Comm) -> list[int]:
    """Ranks of a communicator whose processes have ended, as far as MPI knows here. Does not block."""
    if not able():
        return []
    group = comm.Get_failed()
    if not group.Get_size():
        return []
    everybody = comm.Get_group()
    found = group.Translate_ranks(None, everybody)
    group.Free()
    everybody.Free()
    return sorted(int(rank) for rank in found)


def deaths(comm: MPI.Comm) -> list[int]:
    """The same after an error that a death may have caused: MPI hears of it a little later. Blocks for DEATH_SECONDS at
    most."""
    deadline = time.monotonic() + DEATH_SECONDS
    while not (found := failed(comm)) and time.monotonic() < deadline:
        MPI.COMM_SELF.Iprobe()  # it hears of nothing but within calls
        time.sleep(1e-3)
    return found


def is_death(error: BaseException) -> bool:
    """Whether MPI says by this error that a process has ended."""
    return isinstance(error, MPI.Exception) and able() and error.Get_error_class() in _DEATHS


class Making:
    """A context in which ranks make communicators of `comm` and meet on them, though any of them may die meanwhile.

    As soon as somebody has died, or `break_off` is called, every communicator made within is revoked: whoever waits on
    one raises MPI.Exception. One at a time in a process; MPI_THREAD_MULTIPLE is needed.
    """

    present: Making | None = None

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm, self._made, self.broken = comm, [comm], False
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpips deaths", daemon=True)

    def __enter__(self) -> Making:
        Making.present = self
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.break_off()
        self._over.set()
        self._thread.join()
        Making.present = None

    def add(self, comm: MPI.Comm) -> None:
        """One more has been made."""
        with self._lock:
            self._made.append(comm)
            if self.broken:
                _revoke(comm)

    def break_off(self) -> None:
        """Nobody is to wait on any of them any more."""
        with self._lock:
            if not self.broken:
                self.broken = True
                *earlier, last = self._made
                for comm in reversed(earlier):
                    _revoke(comm)
                if earlier:  # others may be making it yet: Open MPI crashes where it is revoked meanwhile
                    time.sleep(MAKING_SECONDS)
                _revoke(last)

    def _watch(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            if failed(self._comm):
                self.break_off()
                return


def made(comm: C) -> C:
    """A communicator that has just been made: where ranks may die meanwhile it is broken off with the others."""
    if Making.present is not None:
        Making.present.add(comm)
    return comm


def _revoke(comm: MPI.Comm) -> None:
    with suppress(MPI.Exception):  # it may have been freed, or be freed just now
        comm.Revoke()


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
