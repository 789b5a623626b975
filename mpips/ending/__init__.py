"""The life of a rank's process: its start, its end, and errors that end the job."""

from functools import cache

from mpips.ending.process import end_mpi_in_time, keep_children_from_being_ranks, open_page, when_started
from mpips.ending.uncaught import install_hooks


@cache
def watch_process() -> None:
    """Watch over this rank's process from now on: its children, the end of its program, and the end of MPI."""
    end_mpi_in_time()
    keep_children_from_being_ranks()
    when_started(open_page)


@cache
def end_job_on_error() -> None:
    """From now on, let an error that leaves this rank's program end the job.

    `import mpips` calls this. In a program that imports only `collectives`, this is not called until the program uses a
    name of mpips. Until then, if a rank fails, the other ranks get an error in their next call and may continue.
    """
    install_hooks()
