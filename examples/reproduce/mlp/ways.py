"""Predicts and times the paper's two ways to distribute rows (section 7), on every mesh of the job.

    mpips run -w 4 -s 0 -m examples.reproduce.mlp.ways

Rank 0 has all rows. In the first way it scatters them to all ranks. In the second way it scatters them to one rank of
each model, which broadcasts them to the others. Alpha and beta come from two scatters timed in the job. (`mpips train`
itself lets every rank read a part of the rows.)
"""

from __future__ import annotations

from functools import partial

import numpy as np
from mpi4py import MPI

from collectives.benchmark.harness import measure, measure_costs
from collectives.simulator.cost import LinkCost
from mpips.mlp.mesh import Mesh, factorings

# bytes of the rows of one batch index
SIZES = (1 << 10, 1 << 16, 1 << 22)


def scatter_seconds(batch: int, model: int, data: float, link: LinkCost) -> float:
    """Return the seconds of a scatter to all ranks: ``alpha + nb nm data beta``, `data` bytes for each batch index."""
    return link.alpha + batch * model * data * link.beta


def broadcast_seconds(batch: int, model: int, data: float, link: LinkCost) -> float:
    """Return the seconds of a scatter to one rank of each model and broadcasts: ``2 alpha + max(nb, nm) data beta``."""
    return 2 * link.alpha + max(batch, model) * data * link.beta


def scatter(mesh: Mesh, mine: np.ndarray) -> None:
    """Send every rank its rows from rank 0. All ranks of a model get the same rows. Collective."""
    everything = np.zeros(mesh.comm.size * mine.size) if mesh.comm.rank == 0 else None
    mesh.comm.Scatter(everything, mine, root=0)


def scatter_and_broadcast(mesh: Mesh, mine: np.ndarray) -> None:
    """Send rows from rank 0 to one rank of each model, which broadcasts them to the others. Collective."""
    if mesh.model_index == 0:
        everything = np.zeros(mesh.batch * mine.size) if mesh.comm.rank == 0 else None
        mesh.batch_comm.Scatter(everything, mine, root=0)
    mesh.model_comm.Bcast(mine, root=0)


def main() -> None:
    comm = MPI.COMM_WORLD
    whole = Mesh(comm.size, 1)
    link = measure_costs(comm, {comm.size * n: partial(scatter, whole, np.empty(n // 8)) for n in (8, 1 << 18)})
    for batch, model in factorings(comm.size):
        mesh = Mesh(batch, model)
        for size in SIZES:
            mine = np.empty(size // 8)
            calls = [partial(way, mesh, mine) for way in (scatter, scatter_and_broadcast)]
            one, two = (timing.median for timing in measure(comm, calls, 0.0))
            if comm.rank == 0:
                predicted = [seconds(batch, model, size, link) for seconds in (scatter_seconds, broadcast_seconds)]
                print(
                    f"{mesh}, {size:>9,} bytes: scatter {1e6 * predicted[0]:9.1f} us predicted, {1e6 * one:9.1f} "
                    f"measured; broadcast {1e6 * predicted[1]:9.1f} predicted, {1e6 * two:9.1f} measured"
                )
        mesh.free()


if __name__ == "__main__":
    main()
