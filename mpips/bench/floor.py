"""The memory copies that a push and a pull cannot do without, timed bare: no keys, no signals, only NumPy and barriers.

Of n bytes, W workers and S servers on one node: ordinary arrays are copied into shared memory (each worker n); each
server sums its n/S of all W contributions into its own memory; each worker copies n out. Arrays of `mpips.empty` need
no copy in. Every phase is as long as its slowest rank takes, with all ranks at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from mpi4py import MPI

from collectives.fabric import arena
from collectives.fabric.arena import Region
from collectives.machine.cores import usable
from mpips.store.runtime.rendezvous import Gathering

BLOCK = 262_144  # elements summed at a time, so that a block is in cache for the next contribution


def measure(comm: MPI.Comm, servers: int, nbytes: int, repeats: int) -> dict[str, float]:
    """Seconds of the floor for "ordinary" and "empty" arrays: medians over `repeats`. Collective over all ranks."""
    rank, workers = comm.Get_rank(), comm.Get_size() - servers
    n = nbytes // 4
    shared, ordinary, out = arena.empty(n), np.ones(n, np.float32), np.zeros(n, np.float32)
    shared[...] = 1
    region = arena.locate(shared)
    told = Gathering(comm).meet(msgspec.msgpack.encode(region), "floor")
    regions = [msgspec.msgpack.decode(data) for data in told]
    everyone = [arena.attach(Region(*region)).view(np.float32) for region in regions]
    cuts = [n * server // servers for server in range(servers + 1)]

    def copy_in() -> None:
        if rank < workers:
            shared[...] = ordinary

    def add_up() -> None:
        if rank >= workers:
            for start in range(cuts[rank - workers], cuts[rank - workers + 1], BLOCK):
                part = slice(start, min(start + BLOCK, cuts[rank - workers + 1]))
                total = shared[part]
                np.copyto(total, everyone[0][part])
                for other in everyone[1:workers]:
                    np.add(total, other[part], out=total)

    def copy_out() -> None:
        if rank < workers:
            for server in range(servers):
                part = slice(cuts[server], cuts[server + 1])
                out[part] = everyone[workers + server][part]

    phases = _medians(comm, (copy_in, add_up, copy_out), repeats)
    return {"ordinary": sum(phases), "empty": sum(phases[1:])}


def _medians(comm: MPI.Comm, phases: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """How long each phase takes by the processor time of the ranks, medians over repeats of all phases in turn."""
    mine = np.empty((repeats, len(phases)))
    for repeat in range(repeats):
        for number, phase in enumerate(phases):
            comm.Barrier()
            start = time.thread_time()
            phase()
            mine[repeat, number] = time.thread_time() - start
    every = np.empty((comm.Get_size(), *mine.shape))
    comm.Allgather(mine, every)
    cores = usable()
    takes = np.maximum(every.max(0), every.sum(0) / cores)
    return [float(seconds) for seconds in np.median(takes, 0)]
