"""Servers with clients that are model parallel inside."""

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
from mpips.mlp.data.loading import epoch_order
from mpips.mlp.training import hidden_of
from mpips.optimizers import SGD, Adam
from tests.mpi.sizes import either_mpi, only_on

from .support import COMM, alone, curve, same_everywhere

HIDDEN = [7, 2, 5]


def jobs():
    """Some (clients, batch, model, servers) for the ranks there are, those with model parallel clients first."""
    found = [
        (clients, batch, model, COMM.size - clients * batch * model)
        for model in (2, 3, 1)
        for clients in (2, 1, 3)
        for batch in (1, 2)
        if COMM.size - clients * batch * model >= 1
    ]
    return found[:5]


def run(servers, batch, model, epochs=2, optimizer=None, broken=False, overlap=None, saved=None, kept=None):
    """The trained network on a worker, None on a server; from and to a checkpoint where these are given."""
    try:
        mesh = servers.join(batch, model)
    except SystemExit:
        return None
    data = load(lambda: SyntheticSource(103, 5, 3), mesh, 20, "float64", seed=1)
    mlp = MLP([5, *HIDDEN, 2 if broken else 3], dtype="float64", seed=3)
    try:
        worker = load_checkpoint(saved, mesh, servers=servers, overlap=overlap) if saved else None
        done = train(mlp, data, mesh, epochs, optimizer, worker=worker, overlap=overlap, servers=servers)
        if kept:
            save_checkpoint(kept, done.worker)
        return done
    finally:
        servers.close()


@either_mpi
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("optimizer", [SGD(learning_rate=0.05, momentum=0.5), Adam()])
def test_synchronous_servers_give_the_serial_loss_curve(optimizer):
    data = load(lambda: SyntheticSource(103, 5, 3), alone(), 20, "float64", seed=1)
    serial = train(MLP([5, *HIDDEN, 3], dtype="float64", seed=3), data, alone(), 2, optimizer)
    wrong = []
    for clients, batch, model, count in jobs():
        found = run(Servers(count, clients), batch, model, optimizer=optimizer)
        if found is not None and not np.abs(curve(found) - curve(serial)).max() <= 1e-10:
            wrong.append((clients, batch, model, count, curve(found).tolist()))
        whole = collect(found.worker).flat_parameters if found is not None else None
        if whole is not None and not np.allclose(
            whole, collect(serial.worker).flat_parameters, rtol=0, atol=1e-10
        ):
            wrong.append((clients, batch, model, count, "weights"))
    assert same_everywhere(not wrong), wrong


@either_mpi
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["sync", "elastic"])
def test_gradients_that_leave_during_the_backward_pass_give_the_same_curve(kind):
    wrong = []
    for clients, batch, model, count in jobs():
        if count < model or (kind == "elastic" and clients > 1):
            continue  # one client: an asynchronous store does not fix who comes first
        found = [run(Servers(count, clients, kind, 2), batch, model, overlap=overlap) for overlap in (False, True)]
        if found[0] is not None and not np.abs(curve(found[0]) - curve(found[1])).max() <= 1e-12:
            wrong.append((clients, batch, model, count))
        shares = [hidden_of(each.epochs) for each in found if each is not None]
        if not all(0 <= share < 1 for share in shares) or shares[:1] not in ([], [0.0]):
            wrong.append((clients, batch, model, count, shares))
    assert same_everywhere(not wrong), wrong


@either_mpi
@pytest.mark.mpi(min_size=2)
def test_training_goes_on_from_a_checkpoint_with_the_servers_optimizer_state(tmp_path_factory):
    folder = COMM.bcast(str(tmp_path_factory.mktemp("served")) if COMM.rank == 0 else "")
    data = load(lambda: SyntheticSource(103, 5, 3), alone(), 20, "float64", seed=1)
    serial = curve(train(MLP([5, *HIDDEN, 3], dtype="float64", seed=3), data, alone(), 4, Adam()))
    wrong = []
    for index, (clients, batch, model, count) in enumerate(jobs()):
        path = f"{folder}/{index}.safetensors"
        first = run(Servers(count, clients), batch, model, 2, Adam(), kept=path)
        COMM.Barrier()
        second = run(Servers(count, clients), batch, model, 2, saved=path)
        if second is None:
            continue
        got = np.concatenate([curve(first), curve(second)])
        if not np.abs(got - serial).max() <= 1e-10:
            wrong.append((clients, batch, model, count, got.tolist()))
    assert same_everywhere(not wrong), wrong
    here = Mesh(COMM.size, 1)  # and without servers
    data = load(lambda: SyntheticSource(103, 5, 3), here, 20, "float64", seed=1)
    worker = load_checkpoint(f"{folder}/0.safetensors", here)
    went_on = curve(train(MLP([5, *HIDDEN, 3], dtype="float64", seed=3), data, here, 2, worker=worker))
    here.free()
    assert same_everywhere(np.abs(went_on - serial[2:]).max() <= 1e-10)


@only_on(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["sync", "elastic"])
def test_servers_of_a_slice_without_elements_keep_nothing_and_training_goes_on(kind, overlap, tmp_path_factory):
    path = COMM.bcast(str(tmp_path_factory.mktemp("empty")) if COMM.rank == 0 else "") + "/x.safetensors"
    found = []
    for saved, kept in ((None, path), (path, None)):
        servers = Servers(2, 1, kind)  # the first step is the only one that averages, and centre and weights are equal
        try:
            mesh = servers.join(1, 2)
        except SystemExit:
            COMM.Barrier()
            continue
        data = load(lambda: SyntheticSource(103, 4, 1), mesh, 20, "float64", seed=1)
        mlp = MLP([4, 1, 1], dtype="float64", seed=3)
        worker = load_checkpoint(saved, mesh, "columns", servers=servers, overlap=overlap) if saved else None
        done = train(mlp, data, mesh, 2, Adam(), "columns", worker=worker, overlap=overlap, servers=servers)
        if kept:
            save_checkpoint(kept, done.worker)
        servers.close()
        found.append(curve(done))
        assert (mesh.model_index == 0) == bool(done.worker.network.flat_parameters.size)
        COMM.Barrier()
    data = load(lambda: SyntheticSource(103, 4, 1), alone(), 20, "float64", seed=1)
    serial = curve(train(MLP([4, 1, 1], dtype="float64", seed=3), data, alone(), 4, Adam()))
    assert same_everywhere(not found or np.abs(np.concatenate(found) - serial).max() <= 1e-10), found


@pytest.mark.mpi(min_size=3)
def test_fewer_servers_than_slices_have_nothing_to_overlap():
    message = ""
    try:
        run(Servers(1, 1), 1, COMM.size - 1, overlap=True)
    except TrainingError as error:
        message = str(error)
    assert same_everywhere("give a server for each slice" in message), message


def elastic_by_hand(steps_of, every, alpha, rate):
    """One client and a centre, as equations 2 and 3 of MXNET-MPI have it; the client's weights after all steps."""
    mlp = MLP([5, *HIDDEN, 3], dtype="float64", seed=3)
    w = mlp.flat_parameters
    centre = w.copy()
    for step, (x, y) in enumerate(steps_of):
        mlp.loss_and_gradients(x, y)
        if step % every == 0:
            centre += alpha * (w - centre)
            w -= alpha * (w - centre)
        w -= rate * mlp.flat_gradients
    return w.copy()


@either_mpi
@pytest.mark.mpi(min_size=2)
def test_one_elastic_client_follows_the_equations():
    every, alpha, rate = 3, 0.25, 0.05
    data = load(lambda: SyntheticSource(103, 5, 3), alone(), 20, "float64", seed=1)
    steps = []
    for epoch in range(2):
        for index in epoch_order(len(data.deal.samples), epoch, 1):
            part = slice(data.deal.bounds[index], data.deal.bounds[index + 1])
            steps.append((data.x[part], data.y[part]))
    expected = elastic_by_hand(steps, every, alpha, rate)
    wrong = []
    for clients, batch, model, count in jobs():
        if clients == 1:
            found = run(Servers(count, 1, "elastic", every, alpha), batch, model, optimizer=SGD(learning_rate=rate))
            if found is not None and not np.allclose(
                collect(found.worker).flat_parameters, expected, rtol=0, atol=1e-12
            ):
                wrong.append((batch, model, count))
    assert same_everywhere(not wrong), wrong


@either_mpi
@pytest.mark.mpi(min_size=3)
def test_elastic_clients_learn():
    wrong = []
    for clients, batch, model, count in jobs():
        found = run(Servers(count, clients, "elastic", 2), batch, model, 6, SGD(learning_rate=0.1))
        if found is not None and not curve(found)[-1, 0] < 0.97 * curve(found)[0, 0]:
            wrong.append((clients, batch, model, count, curve(found).tolist()))
    assert same_everywhere(not wrong), wrong


@pytest.mark.mpi(min_size=2)
def test_what_cannot_be_trained_ends_workers_and_servers_with_one_sentence():
    clients, batch, model, count = jobs()[0]
    message = ""
    try:
        run(Servers(count, clients), batch, model, broken=True)
    except TrainingError as error:
        message = str(error)
    assert same_everywhere("cannot learn 5 features -> 3" in message), message


@pytest.mark.parametrize(
    "arguments, shape, words",
    [
        ((1, COMM.size), (1, 1), "the job has"),
        ((1, 1, "best"), (1, 1), "elastic"),
        ((1, 1, "elastic", 1, 2.0), (1, 1), "alpha"),
    ],
)
def test_servers_that_do_not_fit_are_refused(arguments, shape, words):
    with pytest.raises(TrainingError, match=words):
        Servers(*arguments).join(*shape)
