"""How ranks give a communicator back: not before every message that was sent on it has come.

MPI gives the number of a freed communicator to a later one, and what comes after that is the later one's: Open MPI
counts it as a message of that communicator, and a real one of the same sender then waits for ever; MPICH keeps even
those that came before and that nobody received. Messages of one sender on one communicator are received in the order in
which they were sent, so who has received a last one from every rank has received all.

Numbers are scarce: MPICH has 2,048 in a process. So what cannot be given back at once is, by a later `sweep`.
"""

from __future__ import annotations

import time

from mpi4py import MPI

from collectives.network.failures import failed, is_death
from collectives.network.requests import outstanding, unfinished
from collectives.network.tags import last_tag

LOOK_SECONDS = 2e-4


class Parting:
    """A communicator that this rank has said its last on, as every other does. All receives that were posted on it must
    be over, or given up. `kept` stays until all have done so."""

    def __init__(self, comm: MPI.Comm, kept: object = None) -> None:
        self._comm, self._tag, self.kept = comm, last_tag(), kept
        others = (rank for rank in range(comm.Get_size()) if rank != comm.Get_rank())
        self._freed = bool(failed(comm))
        """Or it is never freed: what the dead have sent cannot be told from what they have not."""
        self._missing = 0 if self._freed else comm.Get_size() - 1
        self._sends = [] if self._freed else [comm.Isend(bytearray(0), rank, self._tag) for rank in others]

    def heard(self) -> bool:
        """Drop what has come. Whether all that was sent to this rank has; does not block."""
        status = MPI.Status()
        while self._missing:
            message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is None:
                return False
            message.Recv(bytearray(status.Get_count(MPI.BYTE)))
            self._missing -= status.Get_tag() == self._tag
        return bool(MPI.Request.Testall(self._sends))

    def free(self) -> bool:
        """Give it back, if all has come, and MPI itself does not go on with an operation on it. Whether it is gone."""
        try:
            if not self._freed and self.heard() and not unfinished(self._comm):
                self._freed = True
                self._comm.Free()
        except MPI.Exception as error:
            if not is_death(error):
                raise
            self._freed = True
        return self._freed


_left: list[tuple[MPI.Comm, object]] = []
"""What has been left, and nothing was said of it yet."""
_partings: list[Parting] = []
"""What has been left, and not all of it has come."""
_limbo: list[object] = []
"""What stays as long as MPI may touch memory of an operation that has failed."""


def leave(comm: MPI.Comm, kept: object = None) -> None:
    """Give `comm` back, as all its ranks do, each when it likes: in the next `sweep` that finds it drained. Sends
    nothing here: MPICH, which may call this when it frees something, holds a lock meanwhile."""
    _left.append((comm, kept))


def sweep(seconds: float = 0.0) -> bool:
    """Give back what has been left. Whether all is gone; blocks until then, for so many seconds at most."""
    deadline = time.monotonic() + seconds
    while True:
        while _left:
            _partings.append(Parting(*_left.pop(0)))
        for parting in list(_partings):
            if parting.free():  # which may leave others, which were kept for it
                _partings.remove(parting)
                _limbo.append(parting.kept)
        if not outstanding():  # MPICH frees what waited for the last of them, which may leave others, too
            _limbo.clear()
        if _left:
            continue
        if not _partings or time.monotonic() >= deadline:
            return not _partings
        time.sleep(LOOK_SECONDS)


def part(comm: MPI.Comm) -> None:
    """Free `comm`, and drop what was sent on it and not received. Collective, blocking until all ranks have come: not
    for where MPI itself frees something. Where MPI goes on with an operation on it, it is freed by a later `sweep`."""
    parting = Parting(comm)
    while not parting.heard():
        time.sleep(LOOK_SECONDS)
    if not parting.free():
        _partings.append(parting)
