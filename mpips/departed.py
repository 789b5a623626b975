"""A rank that ends before it comes to `create`: the others, who wait for it there, hear of it instead of waiting on.

Without this a bare `mpirun python script.py` in which one rank raises, or exits, before `create` would hang: that rank
waits for the others in MPI's finalisation. It tells all, who raise, which ends the job.
"""

from __future__ import annotations

import atexit
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

TAG = 32103  # on COMM_WORLD
_came = False


def come(comm: MPI.Comm, stall_seconds: float, timeout_seconds: float) -> None:
    """Wait until all ranks of `comm` have come; collective. RuntimeError where a rank hears that another has ended;
    a warning and StallError after the limits, as in every wait."""
    from mpi4py import MPI

    from mpips.meet import Pause

    global _came
    _came = True
    world, status = MPI.COMM_WORLD, MPI.Status()

    def look(waited: float) -> None:
        if world.Iprobe(MPI.ANY_SOURCE, TAG, status):
            rank = status.Get_source()
            if world.group.Translate_ranks([rank], comm.group)[0] != MPI.UNDEFINED:
                raise RuntimeError(f"rank {rank} has ended before it came to mpips.create; what it printed says why")

    request = comm.Ibarrier()
    what = f"mpips.create, to which not all {comm.Get_size()} ranks have come,"
    pause = Pause(lambda: what, stall_seconds, timeout_seconds, look)
    while not request.Test():
        pause()


@atexit.register
def _leave() -> None:
    """This process ends; if it has never come, somebody may wait for it."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None or _came or not module.Is_initialized() or module.Is_finalized():
        return
    world = module.COMM_WORLD
    for other in range(world.size):
        if other != world.rank:
            world.Isend(b"", other, TAG).Test()
