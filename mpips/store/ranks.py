"""`mpips.rank` and `mpips.size`: a program splits its data by these numbers, with servers or without."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from mpi4py import MPI

from mpips.store.options import read

if TYPE_CHECKING:
    from mpips.store.roles import Layout

# the layout of the newest store that spans the whole job; a recovery changes it in place
_layouts: list[Layout] = []
# the number that `size` has returned before a store was created; empty if it was not called
_given: list[int] = []


def rank() -> int:
    """Return the number of this rank among the ranks that train, from 0 to `mpips.size()` - 1.

    Split data by `mpips.rank()` and `mpips.size()`, never by COMM_WORLD, which also counts servers and spares. In a job
    without servers and spares both numbers are those of COMM_WORLD. Local; the first call may start MPI, which waits
    for all ranks.

    Before the job has created a store, the roles are those that `mpips run` or the `MPIPS_*` variables announce. A
    server or a spare, which runs the program up to `mpips.create` without training anything, gets the number of the
    last worker. After a death that the store survives, ranks are renumbered.

    Raises:
        OptionError: The variables ask for more servers and spares than the job has ranks.

    Example:
        >>> samples = list(range(10))
        >>> samples[mpips.rank() :: mpips.size()]  # alone, or with servers only: all of them
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    if _layouts:
        return _layouts[-1].rank
    return min(MPI.COMM_WORLD.rank, size() - 1)


def size() -> int:
    """Return the number of ranks that train: all ranks except servers and spares. See `mpips.rank`.

    If the program later creates a store with servers that neither `mpips run -s` nor MPIPS_SERVERS announced, this
    number was wrong, and `mpips.create` warns.

    Raises:
        OptionError: The variables ask for more servers and spares than the job has ranks.
    """
    if _layouts:
        return _layouts[-1].num_workers
    workers = read().workers_of(MPI.COMM_WORLD.size)
    _given[:] = [workers]
    return workers


def keep_layout(layout: Layout) -> None:
    """Use a new store's layout for `rank` and `size` from now on, if it spans the whole job.

    Warn if `size` has returned another number before.
    """
    if len(layout.nodes) != MPI.COMM_WORLD.size:
        return
    if _given and not _layouts and _given[0] != layout.num_workers and layout.rank == 0:
        warnings.warn(
            f"mpips.size() was {_given[0]} before the store was made, and is {layout.num_workers} now: a split by it "
            f"leaves data out; make the store first, or start with `mpips run -s {layout.num_servers}` or "
            f"MPIPS_SERVERS={layout.num_servers}",
            stacklevel=3,
        )
    _layouts[:] = [layout]
