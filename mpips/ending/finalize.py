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
    if (module := _running()) is None:
        return
    seconds = OTHERWISE if dead() == [] else AFTER_A_DEATH
    if not finalized(ctypes.CDLL(module.__file__).MPI_Finalize, seconds):
        leave_at_once()


def dead() -> list[int] | None:
    """Ranks of the job that are known to have died, while MPI runs; None where it cannot tell."""
    if (module := _running()) is None:
        return None
    from collectives.network.failures import failed

    try:
        return failed(module.COMM_WORLD)
    except module.Exception:
        return None


def _running() -> Any:
    """mpi4py's module of MPI, None where MPI has not started or has ended."""
    module = sys.modules.get("mpi4py.MPI")
    return module if module is not None and module.Is_initialized() and not module.Is_finalized() else None


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
