"""Deaths of ranks: how MPI reports them, and how ranks make communicators while any rank may die.

Only an MPI with the extension ULFM reports deaths: Open MPI under `mpirun --with-ft ulfm`. Then the death of a process
does not end the job. A message to or from a dead rank raises MPI.Exception, and so does a probe for messages of any
source until the death is acknowledged. A collective may raise on some ranks and wait for ever on others, until a rank
revokes the communicator (`CommCreationGuard`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TypeVar

from mpi4py import MPI

from mpips.collectives.clock import Clock

C = TypeVar("C", bound=MPI.Comm)
WATCH_SECONDS = 4e-3
# After the parent of a communicator was revoked, a rank that is still making the communicator stops doing so within
# this time.
MAKING_SECONDS = 0.02
# how long after an error to wait for MPI to report the death that may have caused it
DEATH_SECONDS = 1.0
# Open MPI's mpirun sets this variable if it was told to let the other processes live after a death.
ENABLED = "OMPI_MCA_mpi_ft_enable"
_DEATHS = (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING)


@cache
def survives_deaths() -> bool:
    """True if the MPI of this job reports deaths, and the other processes survive them."""
    return os.environ.get(ENABLED, "").lower() in ("1", "true") and "Open MPI" in MPI.Get_library_version()


def dead_ranks(comm: MPI.Comm) -> list[int]:
    """Return the ranks of a communicator that this process' MPI knows to be dead. Does not block."""
    if not survives_deaths():
        return []
    group = comm.Get_failed()
    if not group.Get_size():
        return []
    everybody = comm.Get_group()
    translated = group.Translate_ranks(None, everybody)
    group.Free()
    everybody.Free()
    return sorted(int(rank) for rank in translated)


def find_deaths(comm: MPI.Comm) -> list[int]:
    """Return the dead ranks after an error that a death may have caused, or an empty list.

    MPI may report the death a little later than the error. So this function waits for the report, for at most
    DEATH_SECONDS.
    """
    clock = Clock()
    while not (dead := dead_ranks(comm)) and clock.seconds() < DEATH_SECONDS:
        # MPI makes progress only within calls.
        MPI.COMM_SELF.Iprobe()
        time.sleep(1e-3)
    return dead


def is_death(error: BaseException) -> bool:
    """True if MPI raised this error because a process has ended."""
    return isinstance(error, MPI.Exception) and survives_deaths() and error.Get_error_class() in _DEATHS


class CommCreationGuard:
    """A context in which ranks make communicators from `comm` while any rank may die.

    As soon as a rank has died, or `revoke_all` is called, `comm` and all communicators made in the context are revoked.
    Ranks that wait on one of these communicators then raise MPI.Exception. A thread watches for deaths, so the context
    needs MPI_THREAD_MULTIPLE. A process can be in only one such context at a time.

    Args:
        is_hopeless: A function that the thread calls again and again. When it returns True, all communicators are
            revoked. None: they are revoked when a rank of `comm` has died.
    """

    # the context in which this process currently is, or None
    present: CommCreationGuard | None = None

    def __init__(self, comm: MPI.Comm, is_hopeless: Callable[[], bool] | None = None) -> None:
        self._is_hopeless = is_hopeless or (lambda: bool(dead_ranks(comm)))
        # `comm`, and all communicators that were made from it
        self._made = [comm]
        # True once all communicators of `_made` are revoked
        self.broken = False
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpips deaths", daemon=True)

    def __enter__(self) -> CommCreationGuard:
        CommCreationGuard.present = self
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.revoke_all()
        self._over.set()
        self._thread.join()
        if CommCreationGuard.present is self:
            CommCreationGuard.present = None

    def add(self, comm: MPI.Comm) -> None:
        """Let `revoke_all` revoke this new communicator as well. After `revoke_all`, revoke it at once."""
        with self._lock:
            self._made.append(comm)
            if self.broken:
                _revoke(comm)

    def revoke_all(self) -> None:
        """Revoke all communicators, so that no rank waits on one of them any more."""
        with self._lock:
            if not self.broken:
                self.broken = True
                *earlier, last = self._made
                for comm in reversed(earlier):
                    _revoke(comm)
                # Open MPI crashes if this rank revokes the last communicator while another rank is still making it. So
                # its parents are revoked first: then that other rank stops making it within MAKING_SECONDS.
                if earlier:
                    time.sleep(MAKING_SECONDS)
                _revoke(last)

    def _watch(self) -> None:
        while not self._over.wait(WATCH_SECONDS):
            if self._is_hopeless():
                self.revoke_all()
                return


def guard_comm(comm: C) -> C:
    """Add a new communicator to the current `CommCreationGuard`, if there is one. Return the communicator.

    Code that may run in such a context passes every new communicator through this function.
    """
    if CommCreationGuard.present is not None:
        CommCreationGuard.present.add(comm)
    return comm


def _revoke(comm: MPI.Comm) -> None:
    # MPI raises if the communicator has been freed.
    with suppress(MPI.Exception):
        comm.Revoke()
