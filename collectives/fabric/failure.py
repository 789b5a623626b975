"""Deaths of ranks: how MPI tells of them, and how ranks make communicators though any of them may die meanwhile.

MPI tells of deaths where it has ULFM: Open MPI under `mpirun --with-ft ulfm`. Then a death ends no job. A
message to or from the dead raises MPI.Exception, and so does a probe of any source until the death is acknowledged. A
collective may raise on some ranks and wait for ever on others, until one of them revokes its communicator (`Making`).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from functools import cache
from typing import TypeVar

from mpi4py import MPI

from mpips.collectives.clock import Clock

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
    """Return whether the MPI of this job tells of deaths, and other processes outlive them."""
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
    """Return the dead after an error that a death may have caused: MPI hears of it a little later. Blocks for
    DEATH_SECONDS at most."""
    clock = Clock()
    while not (found := failed(comm)) and clock.seconds() < DEATH_SECONDS:
        MPI.COMM_SELF.Iprobe()  # it hears of nothing but within calls
        time.sleep(1e-3)
    return found


def is_death(error: BaseException) -> bool:
    """Return whether MPI says by this error that a process has ended."""
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
