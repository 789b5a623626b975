"""Every mesh of the job's ranks gives the loss curve of the serial run; meshes that are chosen, or do not fit."""

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, SyntheticSource, TrainingError, choose_mesh, load, train
from mpips.mlp.mesh import factorings
from mpips.optimizers import SGD, Adam
from tests.mpi.sizes import either_mpi, only_on

from .support import COMM, alone, curve, run, same_everywhere, source, synthetic

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
LAYERS = {
    "odd": [13, 11, 7],
    "pair": [24],
    "fewer neurons than ranks": [2, 3, 1, 5],
}


def see_serial(opened, hidden, dtype="float64", **how):
    """Whether all meshes give the serial curve, which is returned."""
    expected = curve(run(opened, alone(), hidden, dtype, **how)[0])
    wrong = []
    for batch, model in factorings(COMM.size):
        mesh = Mesh(batch, model)
        got = curve(run(opened, mesh, hidden, dtype, **how)[0])
        mesh.free()
        if not np.abs(got - expected).max() <= TOLERANCE[dtype]:
            wrong.append((batch, model, got.tolist()))
    assert same_everywhere(not wrong), wrong
    return expected


@pytest.mark.core(4)
@either_mpi
@only_on(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["pairs", "columns"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["airfoil", "digits"])
def test_every_mesh_gives_the_serial_loss_curve(name, dtype, mode):
    optimizer = SGD(learning_rate=0.1, momentum=0.5)
    losses = see_serial(source(name), LAYERS["odd"], dtype, mode=mode, optimizer=optimizer)
    assert losses[-1, 0] < losses[0, 0]


@either_mpi
@pytest.mark.parametrize("hidden", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_layers_of_any_width_train_on_any_mesh(hidden, mode):
    see_serial(lambda: SyntheticSource(203, 5, 3), hidden, epochs=2, batch=20, mode=mode, optimizer=Adam())


def test_a_minibatch_may_have_fewer_samples_than_batch_ranks():
    see_serial(lambda: SyntheticSource(23, 3, 1), [6], batch=2)


def test_all_ranks_return_one_history_and_phases_that_cover_the_time():
    mesh = Mesh(COMM.size, 1)
    trained, _ = run(lambda: SyntheticSource(300, 4, 2), mesh, [16], epochs=2, batch=50)
    mesh.free()
    losses = curve(trained)
    first = losses.copy()
    COMM.Bcast(first, root=0)
    spent = trained.epochs[0].phases
    assert same_everywhere(np.array_equal(losses, first))
    assert same_everywhere(set(spent) == {"compute", "forward", "backward", "data", "evaluate"})
    assert same_everywhere(all(seconds >= 0 for seconds in spent.values()) and spent["compute"] > 0)


def test_training_goes_on_from_weights_that_were_changed():
    mesh = Mesh(1, COMM.size)
    data = load(lambda: SyntheticSource(100, 4, 2), mesh, 50, "float64", seed=1)
    model = MLP([4, 9, 2], dtype="float64", seed=3)
    model.flat_parameters[...] = 0.0
    trained = train(model, data, mesh, 1, SGD(learning_rate=0.0))
    mesh.free()
    # Targets are standardised: a network that answers 0 loses half their variance, summed over both outputs.
    assert same_everywhere(abs(trained.epochs[0].train_loss - 1.0) < 1e-9), trained.epochs


@pytest.mark.parametrize("chosen", ["auto", f"{COMM.size}x1", f"1x{COMM.size}"])
def test_train_opens_the_data_for_the_mesh_that_is_chosen(chosen):
    model = MLP([5, 8, 3], dtype="float64", seed=3)
    serial = curve(train(model, load(synthetic, alone(), 20, "float64", seed=1), alone(), 2))
    found = train(model, synthetic, chosen, 2, batch=20, seed=1)
    assert same_everywhere(np.abs(curve(found) - serial).max() <= 1e-10)
    assert same_everywhere((found.worker.mesh.batch, found.worker.mesh.model) in factorings(COMM.size))
    mesh = choose_mesh(model, batch=20)
    assert len(set(COMM.allgather(str(mesh)))) == 1
    mesh.free()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_cannot_be_trained_is_refused_with_a_cure():
    mesh = Mesh(COMM.size, 1)
    data = load(synthetic, mesh, 50)
    elsewhere = load(synthetic, alone(), 50)
    for words, call in {
        f"{COMM.size}x2 needs .*the job has {COMM.size}; .*{COMM.size}x1": lambda: Mesh(COMM.size, 2),
        "choose_mesh": lambda: Mesh("auto"),
        f"loaded for a grid {COMM.size}x1": lambda: train(MLP([5, 8, 3]), data, "auto"),
        f"for a grid 1x1, not for {COMM.size}x1|cannot learn": lambda: train(MLP([5, 2]), elsewhere, mesh),
        "batch=": lambda: train(MLP([5, 8, 3]), synthetic, "auto"),
        "of 4 inputs and 3 outputs cannot learn 5 features -> 3": lambda: train(MLP([4, 8, 3]), data, mesh),
        "which are numbers: make the MLP with loss='l2'": lambda: train(MLP([5, 8, 3], loss="softmax"), data, mesh),
        "lower the learning rate": lambda: run(synthetic, mesh, [16], "float32", optimizer=SGD(learning_rate=1e6)),
    }.items():
        with pytest.raises(TrainingError, match=words) as refusal:
            call()
        assert len(set(COMM.allgather(str(refusal.value)))) == 1
    mesh.free()
