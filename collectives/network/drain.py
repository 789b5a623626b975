"""How ranks give a communicator back: not before every message that was sent on it has come.

MPI gives the number of a freed communicator to a later one, and what comes after that is the later one's: Open MPI
counts it as a message of that communicator, and a real one of the same sender then waits for ever; MPICH keeps even
those that came before and that nobody received. Messages of one sender on one communicator are received in the order in
which they were sent, so who has received a last one from every rank has received all.
"""

from __future__ import annotations

import time

from mpi4py import MPI

LEAST_TAG = 32767  # the highest tag on the poorest MPI
LOOK_SECONDS = 2e-4


def last_tag() -> int:
    """The highest tag of this MPI, which nothing else is sent with."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG)


def part(comm: MPI.Comm, unfinished: bool = False) -> None:
    """Free `comm`, and drop what was sent on it and not received. Collective, blocking until all ranks have come: not
    for where MPI itself frees something. All receives that were posted on it must be over, or given up; where this
    rank's MPI has an `unfinished` collective on it, which it would go on with, this rank keeps it."""
    tag = last_tag()
    others = [rank for rank in range(comm.Get_size()) if rank != comm.Get_rank()]
    sends = [comm.Isend(bytearray(0), rank, tag) for rank in others]
    status, missing = MPI.Status(), len(others)
    while missing:
        message = comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        if message is None:
            time.sleep(LOOK_SECONDS)
            continue
        message.Recv(bytearray(status.Get_count(MPI.BYTE)))
        missing -= status.Get_tag() == tag
    MPI.Request.Waitall(sends)
    if not unfinished:
        comm.Free()
