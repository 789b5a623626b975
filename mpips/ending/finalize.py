"""The end of MPI in a process whose job goes on without ranks that die: MPI_Finalize is not waited for in vain.

After a death MPI_Finalize of Open MPI hangs in one run of five, and mpi4py calls it when the interpreter has ended. So
it is called before, in a thread that is left behind when it takes too long; mpi4py then sees that MPI has ended. The C
library hands the exit code of the program to the last step, which leaves without a look back.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
from functools import cache
from typing import Any

SURVIVES = "OMPI_MCA_mpi_ft_enable"
"""What `mpirun --with-ft ulfm` tells each rank."""
AFTER_A_DEATH = 1.0  # seconds for MPI_Finalize, which takes some milliseconds
OTHERWISE = 20.0  # the same where no death is known: other ranks may be busy yet


def survives() -> bool:
    """Whether this process was started so that it outlives other ranks of its job."""
    return os.environ.get(SURVIVES, "").lower() in ("1", "true")


@cache
def install() -> None:
    """See to it that this process ends, once all else that is to be done at exit has been done. Called when mpips is
    imported; does not need MPI."""
    if survives():
        atexit.register(_end_mpi)


def _end_mpi() -> None:
    module = sys.modules.get("mpi4py.MPI")
    if module is None or not module.Is_initialized() or module.Is_finalized():
        return
    if not finalized(ctypes.CDLL(module.__file__).MPI_Finalize, AFTER_A_DEATH if _somebody_died(module) else OTHERWISE):
        leave_at_once()


def finalized(finalize: Any, seconds: float) -> bool:
    """Call it; whether it came back in time."""
    caller = threading.Thread(target=finalize, daemon=True)
    caller.start()
    caller.join(seconds)
    return not caller.is_alive()


def leave_at_once() -> None:
    """The process ends with the exit code that it is about to have, whatever threads and libraries would yet do."""
    libc = ctypes.CDLL(None)
    libc.fflush(None)
    libc.on_exit(libc["_exit"], None)


def _somebody_died(module: Any) -> bool:
    try:
        failed = module.COMM_WORLD.Get_failed()
        size = failed.Get_size()
        failed.Free()
    except module.Exception:
        return True
    return bool(size)
