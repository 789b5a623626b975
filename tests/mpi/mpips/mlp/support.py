"""What the tests of this folder share."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpips.mlp import MLP, Mesh, SyntheticSource, load, open_source, train
from mpips.mlp.data.sources import digits
from tests.mpi.sizes import only_on

COMM = MPI.COMM_WORLD
MESHES = only_on(1, 2, 3, 4, 5)
"""For tests of meshes alone: 7 ranks make a row or a column, as 5 do."""
kept_digits = cache(digits)
"""Read once: parsing them takes longer than training on them."""


def directory_with_airfoil():
    """Where airfoil_self_noise.dat lies: data/ or shared/data/ of the repository or beside it."""
    root = Path(__file__).resolve().parents[4]
    for base in (root, root.parent):
        for folder in ("data", "shared/data"):
            if (base / folder / "airfoil_self_noise.dat").is_file():
                return str(base / folder)
    return pytest.skip("airfoil_self_noise.dat is not here: get it from the UCI repository")


def source(name):
    """A function that opens the data set, or a skip where it cannot be had."""
    if name == "digits":
        pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
        return kept_digits
    directory = directory_with_airfoil()
    return lambda: open_source(name, directory=directory)


def run(opened, mesh, hidden, dtype="float64", epochs=3, batch=97, mode="pairs", optimizer=None):
    """Train a network with these hidden widths on a mesh; batch 97 leaves a partial last minibatch."""
    data = load(opened, mesh, batch, dtype, seed=1)
    loss = "softmax" if data.classes else "l2"
    model = MLP([data.x.shape[1], *hidden, data.outputs], loss=loss, dtype=dtype, seed=3)
    return train(model, data, mesh, epochs, optimizer, mode), data


def curve(trained):
    """Losses of all epochs, (epochs, 2)."""
    return np.array([[epoch.train_loss, epoch.test_loss] for epoch in trained.epochs])


def same_everywhere(ok):
    """True on every rank if `ok` is true on every rank."""
    return bool(COMM.allreduce(int(bool(ok)), MPI.MIN))


def alone():
    return Mesh(1, 1, MPI.COMM_SELF)


def synthetic():
    """103 rows, 5 features, 3 targets."""
    return SyntheticSource(103, 5, 3)


def shared_folder(tmp_path_factory):
    """One folder for all ranks, rank 0's."""
    return COMM.bcast(str(tmp_path_factory.mktemp("shared")) if COMM.rank == 0 else "")
