"""Nodes that hold a number of ranks that the mesh does not divide: some groups of ranks span nodes, others do not."""

import numpy as np
import pytest
from mpi4py import MPI

from mpips.mlp import MLP, Mesh, load_checkpoint, save_checkpoint
from mpips.mlp.mesh import nodes
from mpips.mlp.prediction import predict
from mpips.mlp.training import Worker
from mpips.optimizers import SGD
from tests.mpi.sizes import only_on

from .support import COMM

pytestmark = only_on(4)


def with_rank_0_between_nodes(comm):
    """As if the groups of rank 0 alone spanned nodes: on a mesh 2x2, both of rank 0's, one of ranks 1's and 2's."""
    nodes(comm)
    return 2 if 0 in comm.group.Translate_ranks(range(comm.size), MPI.COMM_WORLD.group) else 1


@pytest.fixture
def uneven(monkeypatch):
    monkeypatch.setenv("MPIPS_TIMEOUT_SECONDS", "30")
    monkeypatch.setattr("mpips.mlp.mesh.nodes", with_rank_0_between_nodes)


def test_a_checkpoint_is_read_where_only_some_groups_span_nodes(uneven, tmp_path_factory):
    path = COMM.bcast(str(tmp_path_factory.mktemp("uneven")) if COMM.rank == 0 else "") + "/x.safetensors"
    mlp = MLP([4, 9, 2], seed=1)
    if COMM.rank == 0:
        save_checkpoint(path, Worker(mlp, Mesh(1, 1, MPI.COMM_SELF), SGD(learning_rate=0.1)))
    COMM.Barrier()
    mesh = Mesh(2, 2)
    assert load_checkpoint(path, mesh).updates == 0
    mesh.free()


@pytest.mark.parametrize("dtype", ["float32", "mixed"])
def test_a_prediction_is_the_same_on_ranks_whose_groups_span_nodes_and_on_others(uneven, dtype):
    mesh = Mesh(2, 2)
    found = predict(MLP([4, 200, 300, 2], dtype=dtype).specification, 64, mesh, SGD(learning_rate=0.1))
    mesh.free()
    assert len({str(each) for each in COMM.allgather(found)}) == 1


def test_what_all_ranks_of_a_model_hold_stays_equal_though_gradients_travel_as_float16(uneven):
    mesh = Mesh(2, 2)
    worker = Worker(MLP([4, 8, 6, 3], dtype="mixed", seed=1), mesh, SGD(learning_rate=0.1))
    rng = np.random.default_rng(mesh.batch_index)
    for _ in range(5):
        worker.step(rng.standard_normal((9, 4)).astype("f4"), rng.standard_normal((9, 3)).astype("f4"), 18)
    last = np.concatenate([array.ravel() for array in worker.network.parameters[4:6]])
    everybody = COMM.allgather(last)
    mesh.free()
    assert worker.network.splits[2].kind == "whole"
    assert all(np.array_equal(each, last) for each in everybody)
