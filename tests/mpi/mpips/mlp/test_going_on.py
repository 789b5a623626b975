"""Training goes on from a worker or a checkpoint as if it had never stopped; what contradicts it is refused."""

import re

import numpy as np
import pytest

from mpips.mlp import (
    MLP,
    Mesh,
    Servers,
    SyntheticSource,
    TrainingError,
    collect,
    load,
    load_checkpoint,
    save_checkpoint,
    train,
)
from mpips.mlp.mesh import factorings
from mpips.optimizers import SGD, Adam
from tests.mpi.sizes import either_mpi
from tests.unit.mpips.mlp.device import module

from .support import COMM, MESHES, alone, curve, same_everywhere, shared_folder, synthetic

pytestmark = MESHES
SIZES = [5, 11, 7, 9, 2]
NETWORK = {"sizes": (5, 8, 3), "dtype": "float64", "seed": 3}
OPTIMIZER = SGD(learning_rate=0.05, momentum=0.5)


def fresh(mesh, epochs, worker=None, mode="pairs"):
    data = load(lambda: SyntheticSource(150, 5, 2), mesh, 30, "float64", seed=1)
    return train(MLP(SIZES, dtype="float64", seed=3), data, mesh, epochs, Adam(learning_rate=0.01), mode, worker=worker)


@either_mpi
@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_training_goes_on_on_another_mesh(tmp_path_factory, mode):
    folder, expected, ok = shared_folder(tmp_path_factory), fresh(alone(), 4), []
    whole, meshes = collect(expected.worker).flat_parameters, factorings(COMM.size)
    for index, shape in enumerate(meshes):
        path = f"{folder}/{index}.safetensors"
        written = Mesh(*shape)
        first = fresh(written, 2, mode=mode)
        save_checkpoint(path, first.worker)
        written.free()
        read = Mesh(*meshes[-1 - index])
        second = fresh(read, 2, load_checkpoint(path, read, mode), mode)
        ok.append(np.allclose(collect(second.worker).flat_parameters, whole, rtol=0, atol=1e-10))
        read.free()
        got = np.concatenate([curve(first), curve(second)])
        ok.append(np.abs(got - curve(expected)).max() <= 1e-10 and [e.epoch for e in second.epochs] == [3, 4])
    assert same_everywhere(all(ok)), ok


@pytest.mark.parametrize("dealt, words", [((2, 0.2), "seed 2 and test share 0.2"), ((1, 0.4), "test share 0.4")])
def test_rows_that_were_dealt_otherwise_are_refused(tmp_path_factory, mesh, dealt, words):
    path = shared_folder(tmp_path_factory) + "/x.safetensors"
    model = MLP(**NETWORK)
    rows = [load(synthetic, mesh, 30, "float64", *each) for each in ((1, 0.2), dealt)]
    save_checkpoint(path, train(model, rows[0], mesh, 1).worker, rows[0])
    again = load_checkpoint(path, mesh)
    with pytest.raises(TrainingError, match=f"{words}, but those of the checkpoint by seed 1 and test share 0.2"):
        train(model, rows[1], mesh, 1, worker=again)
    assert [epoch.epoch for epoch in train(model, rows[0], mesh, 1, worker=again).epochs] == [2]


def test_a_broken_checkpoint_is_refused_on_every_rank(tmp_path_factory, mesh):
    path = shared_folder(tmp_path_factory) + "/x.safetensors"
    with pytest.raises(TrainingError, match="cannot be read"):
        load_checkpoint(path, mesh)
    if COMM.rank == 0:
        with open(path, "w") as file:
            file.write("not a checkpoint")
    COMM.Barrier()
    with pytest.raises(TrainingError, match="cannot be read"):
        load_checkpoint(path, mesh)


@pytest.mark.parametrize(
    "other, words",
    [
        ({"model": MLP(**{**NETWORK, "sizes": (5, 9, 3)})}, ("network", "5-9-3", "5-8-3")),
        ({"model": MLP(**NETWORK, activation="tanh")}, ("activation", "tanh", "relu")),
        ({"model": MLP(**{**NETWORK, "dtype": "float32"})}, ("dtype of the network", "float32", "float64")),
        ({"model": MLP(**NETWORK, xp=module)}, ("array module", "module", "numpy")),
        ({"mesh": "7x77"}, ("mesh", "7x77", f"{COMM.size}x1")),
        ({"optimizer": Adam()}, ("optimizer", "Adam", "SGD")),
        ({"optimizer": SGD(learning_rate=0.2)}, ("learning_rate of the optimizer", "0.2", "0.05")),
        ({"mode": "columns"}, ("mode", "columns", "pairs")),
        ({"overlap": True}, ("overlap", "True", "False")),
        ({"half": True}, ("half", "True", "None")),
        (
            {"servers": Servers(1, kind="elastic")},
            ("servers", "Servers(count=1, clients=1, kind=elastic, every=64, alpha=0.5)", "None"),
        ),
    ],
)
def test_another_argument_than_the_workers_is_named_with_both_values(mesh, other, words):
    data = load(synthetic, mesh, 20, "float64", seed=1)
    worker = train(MLP(**NETWORK), data, mesh, 1, OPTIMIZER, overlap=False).worker
    name, asked, has = words
    sentence = f"train: {name} is {asked}, but the worker that goes on has {has}; give the same"
    with pytest.raises(TrainingError, match=re.escape(sentence)):
        train(**{"model": MLP(**NETWORK), "data": data, "mesh": mesh, "epochs": 1, "worker": worker, **other})
    assert worker.updates == len(data.deal.samples)


def test_the_workers_own_arguments_or_none_change_nothing(mesh):
    data = load(synthetic, mesh, 20, "float64", seed=1)
    whole = curve(train(MLP(**NETWORK), data, mesh, 3, OPTIMIZER, "columns", overlap=True))
    first = train(MLP(**NETWORK), data, mesh, 1, OPTIMIZER, "columns", overlap=True)
    second = train(MLP(**NETWORK), data, epochs=1, worker=first.worker)
    third = train(MLP(**NETWORK), data, mesh, 1, OPTIMIZER, "columns", worker=first.worker, overlap=True)
    found = np.concatenate([curve(each) for each in (first, second, third)])
    assert same_everywhere(np.array_equal(found, whole)), (found, whole)


@pytest.mark.mpi(min_size=2)
def test_servers_that_the_worker_does_not_have_end_with_its_sentence(tmp_path_factory, mesh):
    path = shared_folder(tmp_path_factory) + "/x.safetensors"
    save_checkpoint(path, train(MLP(**NETWORK), load(synthetic, mesh, 20, "float64", seed=1), mesh, 1).worker)
    servers, said = Servers(1), ""
    try:
        joined = servers.join(COMM.size - 1, 1)
        worker = load_checkpoint(path, joined)
        train(MLP(**NETWORK), synthetic, joined, 1, worker=worker, servers=servers, batch=20)
    except TrainingError as error:
        said = str(error)
    told = COMM.allgather(said)
    assert len(set(told)) == 1, told
    assert "train: servers is Servers(count=1" in said
