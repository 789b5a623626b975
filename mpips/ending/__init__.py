"""The life of a rank's process: its start, its end, and an error that ends the job."""

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
    """Let an error that leaves this rank's program end the job, from now on.

    `import mpips` does it. A program that imports `collectives` alone is left as it is, until it uses a name of mpips:
    where one of its ranks fails, the others hear of it in their next call and may go on.
    """
    install_hooks()
