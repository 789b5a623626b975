"""A worker that goes on keeps its network, mesh, optimizer and ways of sending; other ones are refused, not ignored."""

import re

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, Servers, SyntheticSource, TrainingError, load, load_checkpoint, save_checkpoint, train
from mpips.optimizers import SGD, Adam
from tests.unit.mpips.mlp.device import module

from .support import COMM, MESHES, curve, same_everywhere

pytestmark = MESHES
NETWORK = {"sizes": (5, 8, 3), "dtype": "float64", "seed": 3}
OPTIMIZER = SGD(learning_rate=0.05, momentum=0.5)


def source():
    return SyntheticSource(103, 5, 3)


@pytest.fixture
def mesh():
    made = Mesh(COMM.size, 1)
    yield made
    made.free()


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
        ({"servers": Servers(1, kind="elastic")}, ("servers", "Servers(count=1, clients=1, kind=elastic, every=64, "
                                                   "alpha=0.5)", "None")),
    ],
)  # fmt: skip
def test_another_argument_than_the_workers_is_named_with_both_values(mesh, other, words):
    data = load(source, mesh, 20, "float64", seed=1)
    worker = train(MLP(**NETWORK), data, mesh, 1, OPTIMIZER, overlap=False).worker
    name, asked, has = words
    sentence = f"train: {name} is {asked}, but the worker that goes on has {has}; give the same"
    with pytest.raises(TrainingError, match=re.escape(sentence)):
        train(**{"model": MLP(**NETWORK), "data": data, "mesh": mesh, "epochs": 1, "worker": worker, **other})
    assert worker.updates == len(data.deal.samples)


def test_the_workers_own_arguments_or_none_go_on_as_if_there_had_been_no_stop(mesh):
    data = load(source, mesh, 20, "float64", seed=1)
    whole = curve(train(MLP(**NETWORK), data, mesh, 3, OPTIMIZER, "columns", overlap=True))
    first = train(MLP(**NETWORK), data, mesh, 1, OPTIMIZER, "columns", overlap=True)
    second = train(MLP(**NETWORK), data, epochs=1, worker=first.worker)
    third = train(MLP(**NETWORK), data, mesh, 1, OPTIMIZER, "columns", worker=first.worker, overlap=True)
    found = np.concatenate([curve(each) for each in (first, second, third)])
    assert same_everywhere(np.array_equal(found, whole)), (found, whole)


@pytest.mark.mpi(min_size=2)
def test_servers_that_the_worker_does_not_have_end_with_its_sentence(tmp_path_factory):
    path = COMM.bcast(str(tmp_path_factory.mktemp("going")) if COMM.rank == 0 else "") + "/x.safetensors"
    mesh = Mesh(COMM.size, 1)
    save_checkpoint(path, train(MLP(**NETWORK), load(source, mesh, 20, "float64", seed=1), mesh, 1).worker)
    mesh.free()
    servers, said = Servers(1), ""
    try:
        mesh = servers.join(COMM.size - 1, 1)
        worker = load_checkpoint(path, mesh)
        train(MLP(**NETWORK), source, mesh, 1, worker=worker, servers=servers, batch=20)
    except TrainingError as error:
        said = str(error)
    told = COMM.allgather(said)
    assert len(set(told)) == 1, told
    assert "train: servers is Servers(count=1" in said
