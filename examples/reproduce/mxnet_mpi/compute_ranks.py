"""The program of each worker for `examples.reproduce.mxnet_mpi.training`: times an epoch's compute, all at once.

python -m examples.reproduce.mxnet_mpi.compute_ranks REQUEST ANSWER
REQUEST holds {"hidden", "batch", "iterations", "repeats"}. The network is 64-hidden-10, and an iteration takes `batch`
samples.
"""

from __future__ import annotations

import time
from statistics import median

import numpy as np
from mpi4py import MPI

from examples.reproduce import rank
from mpips.mlp import MLP
from mpips.optimizers import SGD, Updater


def epoch(comm: MPI.Comm, hidden: int, batch: int, iterations: int) -> float:
    """Return the seconds of an epoch's gradients and updates on the slowest worker. Collective."""
    model = MLP((64, hidden, 10), loss="softmax", dtype="float32", seed=0)
    updater = Updater(SGD(learning_rate=0.05, momentum=0.9), model.parameters)
    rng = np.random.default_rng(comm.rank)
    x, y = rng.random((batch, 64), dtype=np.float32), rng.integers(0, 10, batch)
    start = rank.together(comm)
    for _ in range(iterations):
        model.loss_and_gradients(x, y)
        updater.update(model.gradients)
    seconds = time.perf_counter() - start
    rank.asleep(comm)
    return float(comm.allreduce(seconds, MPI.MAX))


def main() -> None:
    comm = MPI.COMM_WORLD
    asked = rank.request()
    seconds = [epoch(comm, asked["hidden"], asked["batch"], asked["iterations"]) for _ in range(asked["repeats"])]
    if comm.rank == 0:
        rank.answer({"seconds": median(seconds)})


if __name__ == "__main__":
    main()
