"""Seven workers with 1, 2, 3 servers, dist_sync and mpi_sync with 1, 2, 3 clients, both masters; ten ranks."""

from __future__ import annotations

import itertools
import os

from mpi4py import MPI

from tests.mpi.mpips.exact import exact
from tests.mpi.mpips.support import run

STORES = [("dist_sync", {})] + [
    ("mpi_sync", {"clients": clients, "masters": masters})
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
        for kind, options in STORES:
            run(kind, exact, comm=comm, servers=servers, **options)
            if world.rank == 0:
                print("exact", servers, kind, options, flush=True)
        comm.Free()
