"""Seven workers with 1, 2, 3 servers, dist_sync and mpi_sync with 1, 2, 3 clients, both masters; ten ranks.

dist_sync has the shapes of MXNet's own test; the others take smaller ones, which servers share, too."""

from __future__ import annotations

import itertools
import os
from functools import partial

from mpi4py import MPI

from tests.mpi.mpips.exact import BIG, SHAPES, SMALLER, exact
from tests.mpi.mpips.support import run

STORES = [("dist_sync", {}, SHAPES)] + [
    ("mpi_sync", {"clients": clients, "masters": masters, "big_array": BIG}, SMALLER)
    for clients, masters in itertools.product((1, 2, 3), ("one", "all"))
]

if __name__ == "__main__":
    for name in [name for name in os.environ if name.startswith("MPIPS_")]:
        del os.environ[name]
    world = MPI.COMM_WORLD
    for servers in (1, 2, 3):
        comm = world.Split(0 if world.rank < 7 + servers else MPI.UNDEFINED, world.rank)
        if comm == MPI.COMM_NULL:
            continue
        for kind, options, shapes in STORES:
            run(kind, partial(exact, shapes=shapes), comm=comm, servers=servers, **options)
            if world.rank == 0:
                print("exact", servers, kind, options, flush=True)
        comm.Free()
