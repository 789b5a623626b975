"""A checkpoint of one mesh is read on another, and training goes on as if it had never stopped."""

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, SyntheticSource, TrainingError, collect, load, load_checkpoint, save_checkpoint, train
from mpips.mlp.mesh import factorings
from mpips.optimizers import Adam
from tests.mpi.sizes import either_mpi

from .support import COMM, MESHES, alone, curve, same_everywhere

pytestmark = MESHES

SIZES = [5, 11, 7, 9, 2]


def fresh(mesh, epochs, worker=None, mode="pairs"):
    data = load(lambda: SyntheticSource(150, 5, 2), mesh, 30, "float64", seed=1)
    return train(MLP(SIZES, dtype="float64", seed=3), data, mesh, epochs, Adam(learning_rate=0.01), mode, worker=worker)


@either_mpi
@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_training_goes_on_on_another_mesh(tmp_path_factory, mode):
    folder = COMM.bcast(str(tmp_path_factory.mktemp("checkpoint")) if COMM.rank == 0 else "")
    expected = curve(fresh(alone(), 4))
    meshes = factorings(COMM.size)
    ok = []
    for index, shape in enumerate(meshes):
        path = f"{folder}/{index}.safetensors"
        written = Mesh(*shape)
        first = fresh(written, 2, mode=mode)
        save_checkpoint(path, first.worker)
        written.free()
        read = Mesh(*meshes[-1 - index])
        second = fresh(read, 2, load_checkpoint(path, read, mode), mode)
        read.free()
        got = np.concatenate([curve(first), curve(second)])
        ok.append(np.abs(got - expected).max() <= 1e-10 and [e.epoch for e in second.epochs] == [3, 4])
    assert same_everywhere(all(ok)), ok


@pytest.mark.parametrize("dealt, words", [((2, 0.2), "seed 2 and test share 0.2"), ((1, 0.4), "test share 0.4")])
def test_rows_that_were_dealt_otherwise_are_refused(tmp_path_factory, dealt, words):
    path = COMM.bcast(str(tmp_path_factory.mktemp("dealt")) if COMM.rank == 0 else "") + "/x.safetensors"
    mesh = Mesh(COMM.size, 1)
    model = MLP([5, 4, 2], dtype="float64", seed=3)
    rows = [load(lambda: SyntheticSource(150, 5, 2), mesh, 30, "float64", *each) for each in ((1, 0.2), dealt)]
    first = train(model, rows[0], mesh, 1)
    save_checkpoint(path, first.worker, rows[0])
    again = load_checkpoint(path, mesh)
    with pytest.raises(TrainingError, match=f"{words}, but those of the checkpoint by seed 1 and test share 0.2"):
        train(model, rows[1], mesh, 1, worker=again)
    assert [epoch.epoch for epoch in train(model, rows[0], mesh, 1, worker=again).epochs] == [2]
    mesh.free()


def test_collect_gives_every_rank_the_whole_network():
    expected = fresh(alone(), 1)
    whole = collect(expected.worker)
    ok = []
    for shape in factorings(COMM.size):
        mesh = Mesh(*shape)
        got = collect(fresh(mesh, 1).worker)
        mesh.free()
        ok.append(np.allclose(got.flat_parameters, whole.flat_parameters, rtol=0, atol=1e-12))
    assert same_everywhere(all(ok)), ok


def test_a_broken_checkpoint_is_refused_on_every_rank(tmp_path_factory):
    path = COMM.bcast(str(tmp_path_factory.mktemp("broken")) if COMM.rank == 0 else "") + "/x.safetensors"
    mesh = Mesh(COMM.size, 1)
    with pytest.raises(TrainingError, match="cannot be read"):
        load_checkpoint(path, mesh)
    if COMM.rank == 0:
        with open(path, "w") as file:
            file.write("not a checkpoint")
    COMM.Barrier()
    with pytest.raises(TrainingError, match="cannot be read"):
        load_checkpoint(path, mesh)
    mesh.free()
