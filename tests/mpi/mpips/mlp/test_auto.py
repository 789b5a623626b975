"""A mesh that is chosen, from Python; data for another mesh are refused."""

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, SyntheticSource, TrainingError, choose_mesh, load, train
from mpips.mlp.mesh import factorings

from .support import COMM, MESHES, alone, curve, same_everywhere

pytestmark = MESHES


def synthetic():
    return SyntheticSource(103, 5, 3)


def mlp():
    return MLP([5, 8, 3], dtype="float64", seed=3)


@pytest.mark.parametrize("mesh", ["auto", f"{COMM.size}x1", f"1x{COMM.size}"])
def test_train_opens_the_data_for_the_mesh_that_is_chosen(mesh):
    serial = curve(train(mlp(), load(synthetic, alone(), 20, "float64", seed=1), alone(), 2))
    found = train(mlp(), synthetic, mesh, 2, batch=20, seed=1)
    chosen = found.worker.mesh
    assert same_everywhere(np.abs(curve(found) - serial).max() <= 1e-10)
    assert same_everywhere((chosen.batch, chosen.model) in factorings(COMM.size))


def test_a_chosen_mesh_is_the_same_on_every_rank():
    mesh = choose_mesh(mlp(), batch=20)
    shapes = COMM.allgather(str(mesh))
    mesh.free()
    assert len(set(shapes)) == 1


def test_what_cannot_be_chosen_says_what_to_call():
    with pytest.raises(TrainingError, match="choose_mesh"):
        Mesh("auto")
    data = load(synthetic, alone(), 20, "float64")
    with pytest.raises(TrainingError, match="loaded for a grid 1x1"):
        train(mlp(), data, "auto")
    with pytest.raises(TrainingError, match="batch="):
        train(mlp(), synthetic, "auto")
    with pytest.raises(TrainingError, match="here is bach"):
        train(mlp(), synthetic, "auto", bach=3)
    with pytest.raises(TrainingError, match="which are numbers: make the MLP with loss='l2'"):
        train(MLP([5, 8, 3], loss="softmax"), synthetic, "auto", batch=20)
    if COMM.size > 1:
        mesh = Mesh(COMM.size, 1)
        with pytest.raises(TrainingError, match=f"loaded for a grid 1x1, not for {COMM.size}x1"):
            train(mlp(), data, mesh)
        mesh.free()
