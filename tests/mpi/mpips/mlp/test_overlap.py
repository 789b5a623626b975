"""Sending beside computation changes no bit; so do arrays of another module; mixed precision stays close."""

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, SyntheticSource, collect, load, load_checkpoint, save_checkpoint, train
from mpips.mlp.mesh import factorings
from mpips.mlp.training import Worker, hidden_of
from mpips.optimizers import SGD, Adam
from tests.mpi.sizes import either_mpi, only_on

from .support import COMM, MESHES, alone, curve, same_everywhere, source

pytestmark = MESHES

WIDE = [300, 310, 290]  # several buckets of gradients, several blocks of rows


def trained(shape, dtype="float32", mode="pairs", hidden=WIDE, optimizer=None, **how):
    mesh = Mesh(*shape) if shape else alone()
    data = load(lambda: SyntheticSource(150, 5, 3), mesh, 40, dtype, seed=1)
    model = MLP([5, *hidden, 3], dtype=dtype, seed=3)
    found = train(model, data, mesh, 2, optimizer or SGD(learning_rate=0.002, momentum=0.5), mode, **how)
    whole = collect(found.worker).flat_parameters.copy()
    if shape:
        mesh.free()
    return curve(found), whole


@either_mpi
@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_overlap_changes_no_bit(mode):
    ok = []
    for shape in factorings(COMM.size):
        beside, behind = (trained(shape, mode=mode, overlap=overlap) for overlap in (True, False))
        ok.append(np.array_equal(beside[0], behind[0]) and np.array_equal(beside[1], behind[1]))
    assert same_everywhere(all(ok)), ok


def test_sends_that_are_not_beside_computation_hide_nothing():
    mesh = Mesh(COMM.size, 1)
    data = load(lambda: SyntheticSource(150, 5, 3), mesh, 40, seed=1)
    share = hidden_of(train(MLP([5, *WIDE, 3], seed=3), data, mesh, 2, overlap=False).epochs)
    mesh.free()
    assert same_everywhere(share == (None if COMM.size == 1 else 0.0)), share


@either_mpi
@only_on(1, 2, 3, 4)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_mixed_precision_stays_close_on_every_mesh(mode, overlap):
    expected, _ = trained(None)
    wrong = []
    for shape in factorings(COMM.size):
        got, weights = trained(shape, "mixed", mode, half=True, overlap=overlap)
        same = weights.copy()
        COMM.Bcast(same)
        if not (np.abs(got - expected).max() <= 5e-3 and np.array_equal(weights, same)):
            wrong.append((shape, (got - expected).tolist()))
    assert same_everywhere(not wrong), wrong


def test_mixed_precision_learns_as_float32_does_on_real_data():
    opened = source("digits")
    curves = []
    for dtype, half in (("float32", None), ("mixed", True)):
        mesh = Mesh(COMM.size, 1)
        data = load(opened, mesh, 97, dtype, seed=1)
        model = MLP([64, 24, 10], loss="softmax", dtype=dtype, seed=3)
        found = train(model, data, mesh, 3, SGD(learning_rate=0.1), half=half)
        curves.append([(e.train_loss, e.test_loss, e.test_accuracy) for e in found.epochs])
        mesh.free()
    assert same_everywhere(np.abs(np.subtract(*curves)).max() < 0.02), curves


def test_an_overflow_of_float16_skips_the_update_on_all_ranks_and_halves_the_scale():
    if COMM.size == 1:
        pytest.skip("one rank sends nothing, so nothing overflows")
    ok = []
    for shape in factorings(COMM.size):
        if shape[0] == 1:
            continue
        mesh = Mesh(*shape)
        worker = Worker(MLP([4, 9, 2], dtype="mixed", seed=1), mesh, SGD(learning_rate=0.1), half=True)
        scale = worker.update.loss_scale
        scale.scale = 2.0**40
        before = worker.network.flat_parameters.copy()
        x, y = np.full((3, 4), 10, "float32"), np.full((3, 2), 10, "float32")
        worker.step(x, y, 3 * shape[0])
        ok.append(scale.scale == 2.0**39 and np.array_equal(before, worker.network.flat_parameters))
        for _ in range(40):
            worker.step(x, y, 3 * shape[0])
        ok.append(scale.scale < 2.0**30 and not np.array_equal(before, worker.network.flat_parameters))
        ok.append(np.isfinite(worker.network.flat_parameters).all())
        mesh.free()
    assert same_everywhere(all(ok)), ok


def test_the_loss_scale_is_in_the_checkpoint(tmp_path_factory):
    path = COMM.bcast(str(tmp_path_factory.mktemp("mixed")) if COMM.rank == 0 else "") + "/x.safetensors"
    mesh = Mesh(1, COMM.size)
    worker = Worker(MLP([4, 9, 2], dtype="mixed", seed=1), mesh, Adam(), half=True)
    worker.update.loss_scale.scale, worker.update.loss_scale.good = 64.0, 5
    save_checkpoint(path, worker)
    scale = load_checkpoint(path, mesh).update.loss_scale
    mesh.free()
    assert same_everywhere((scale.scale, scale.good) == (64.0, 5))
