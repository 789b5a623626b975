"""Every mesh of the job's ranks gives the loss curve of the serial run."""

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, SyntheticSource, TrainingError, load, train
from mpips.mlp.mesh import factorings
from mpips.optimizers import SGD, Adam
from tests.mpi.sizes import either_mpi, only_on

from .support import COMM, alone, curve, run, same_everywhere, source

TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
LAYERS = {
    "odd": [13, 11, 7],
    "pair": [24],
    "fewer neurons than ranks": [2, 3, 1, 5],
}


@either_mpi
@only_on(1, 2, 3, 4)
@pytest.mark.parametrize("mode", ["pairs", "columns"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["airfoil", "digits"])
def test_every_mesh_gives_the_serial_loss_curve(name, dtype, mode):
    opened = source(name)
    optimizer = SGD(learning_rate=0.1, momentum=0.5)
    expected = curve(run(opened, alone(), LAYERS["odd"], dtype, mode=mode, optimizer=optimizer)[0])
    wrong = []
    for batch, model in factorings(COMM.size):
        mesh = Mesh(batch, model)
        got = curve(run(opened, mesh, LAYERS["odd"], dtype, mode=mode, optimizer=optimizer)[0])
        mesh.free()
        if not np.abs(got - expected).max() <= TOLERANCE[dtype]:
            wrong.append((batch, model, got.tolist()))
    assert expected[-1, 0] < expected[0, 0]
    assert same_everywhere(not wrong), wrong


@either_mpi
@pytest.mark.parametrize("hidden", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("mode", ["pairs", "columns"])
def test_layers_of_any_width_on_any_mesh(hidden, mode):
    opened = lambda: SyntheticSource(203, 5, 3)  # noqa: E731
    expected = curve(run(opened, alone(), hidden, epochs=2, batch=20, mode=mode, optimizer=Adam())[0])
    wrong = []
    for batch, model in factorings(COMM.size):
        mesh = Mesh(batch, model)
        got = curve(run(opened, mesh, hidden, epochs=2, batch=20, mode=mode, optimizer=Adam())[0])
        mesh.free()
        if not np.abs(got - expected).max() <= 1e-10:
            wrong.append((batch, model, got.tolist()))
    assert same_everywhere(not wrong), wrong


def test_fewer_samples_than_batch_ranks_in_a_minibatch():
    opened = lambda: SyntheticSource(23, 3, 1)  # noqa: E731
    expected = curve(run(opened, alone(), [6], batch=2, mode="pairs")[0])
    mesh = Mesh(COMM.size, 1)
    got = curve(run(opened, mesh, [6], batch=2, mode="pairs")[0])
    mesh.free()
    assert same_everywhere(np.abs(got - expected).max() <= 1e-10), got


def test_all_ranks_return_the_same_history_and_phases_that_cover_the_time():
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


def test_a_mesh_that_does_not_fit_is_refused_on_every_rank_in_the_same_words():
    message = ""
    try:
        Mesh(COMM.size, 2)
    except ValueError as error:
        message = str(error)
    words = COMM.allgather(message)
    assert set(words) == {message}
    assert f"{COMM.size}x2" in message
    assert f"the job has {COMM.size}" in message
    assert f"{COMM.size}x1" in message


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_loss_that_overflows_ends_training_on_every_rank():
    mesh = Mesh(COMM.size, 1)
    with pytest.raises(TrainingError, match="lower the learning rate"):
        run(lambda: SyntheticSource(100, 4, 2), mesh, [16], "float32", optimizer=SGD(learning_rate=1e6))
    mesh.free()


def test_a_network_that_does_not_fit_the_data_is_refused_on_every_rank():
    mesh = Mesh(COMM.size, 1)
    data = load(lambda: SyntheticSource(100, 4, 2), mesh, 50)
    messages = []
    for model in (MLP([5, 3, 2]), MLP([4, 3, 2], loss="softmax")):
        try:
            train(model, data, mesh, 1)
        except ValueError as error:
            messages.append(str(error))
    mesh.free()
    assert same_everywhere(len(messages) == 2 and "4 features" in messages[0] and "softmax" in messages[1]), messages
