"""The program of each rank for `examples.reproduce.mlp.grids`: trains on all meshes of the job, and serially.

python -m examples.reproduce.mlp.grids_ranks DIRECTORY ANSWER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from mpips.mlp import MLP, Mesh, TrainingError, load, open_source, train
from mpips.mlp.data.base import DataSource
from mpips.mlp.mesh import factorings
from mpips.mlp.network import MODES
from mpips.optimizers import SGD

WIDTHS = {"8 divides": (32, 16), "odd": (13, 11, 7), "narrow": (2, 3, 1, 5)}
# with 97 samples, the last minibatch is smaller
EPOCHS, BATCH = 3, 97


def curve(opened: Callable[[], DataSource], mesh: Mesh, hidden: tuple[int, ...], dtype: str, mode: str) -> np.ndarray:
    """Train, and return the losses on training and test rows, (epochs, 2)."""
    data = load(opened, mesh, BATCH, dtype, seed=1)
    loss = "softmax" if data.classes else "l2"
    model = MLP([data.x.shape[1], *hidden, data.outputs], loss=loss, dtype=dtype, seed=3)
    epochs = train(model, data, mesh, EPOCHS, SGD(learning_rate=0.1, momentum=0.5), mode).epochs
    return np.array([[epoch.train_loss, epoch.test_loss] for epoch in epochs])


def sources(directory: str) -> Iterator[tuple[str, Callable[[], DataSource]]]:
    """Yield (name, function that opens it) for each data set that is available."""
    for name in ("airfoil", "digits"):
        opened = partial(open_source, name, directory=directory)
        try:
            opened()
        except TrainingError as error:
            if MPI.COMM_WORLD.rank == 0:
                print(f"left out: {error}", file=sys.stderr)
            continue
        yield name, opened


def rows(comm: MPI.Comm, directory: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each mesh, data set, dtype, split mode and choice of widths. Collective."""
    for name, opened in sources(directory):
        for dtype in ("float64", "float32"):
            for widths, hidden in WIDTHS.items():
                serial = curve(opened, Mesh(1, 1, MPI.COMM_SELF), hidden, dtype, MODES[0])
                for mode in MODES:
                    for shape in factorings(comm.size):
                        mesh = Mesh(*shape, comm)
                        found = np.array([np.abs(curve(opened, mesh, hidden, dtype, mode) - serial).max()])
                        mesh.free()
                        comm.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
                        yield {
                            "processes": comm.size,
                            "grid": f"{shape[0]}x{shape[1]}",
                            "data": name,
                            "dtype": dtype,
                            "widths": widths,
                            "split": mode,
                            "difference": float(found[0]),
                        }


def main(directory: str, answer: Path) -> None:
    found = list(rows(MPI.COMM_WORLD, directory))
    if MPI.COMM_WORLD.rank == 0:
        answer.write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
