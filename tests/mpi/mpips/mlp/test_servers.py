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

from .support import COMM, alone, curve, same_everywhere, shared_folder, synthetic

SIZES = [5, 7, 2, 5, 3]


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


def serial(epochs, optimizer=None, source=synthetic, sizes=SIZES):
    """The trained network of one process."""
    data = load(source, alone(), 20, "float64", seed=1)
    return train(MLP(sizes, dtype="float64", seed=3), data, alone(), epochs, optimizer)


def run(
    servers,
    batch,
    model,
    epochs=2,
    optimizer=None,
    overlap=None,
    saved=None,
    kept=None,
    source=synthetic,
    sizes=SIZES,
    mode="pairs",
):
    """The trained network on a worker, None on a server; from and to a checkpoint where these are given."""
    try:
        mesh = servers.join(batch, model)
    except SystemExit:
        return None
    data = load(source, mesh, 20, "float64", seed=1)
    try:
        worker = load_checkpoint(saved, mesh, mode, servers=servers, overlap=overlap) if saved else None
        done = train(
            MLP(sizes, dtype="float64", seed=3),
            data,
            mesh,
            epochs,
            optimizer,
            mode,
            worker=worker,
            overlap=overlap,
            servers=servers,
        )
        if kept:
            save_checkpoint(kept, done.worker)
        return done
    finally:
        servers.close()


@either_mpi
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("optimizer", [SGD(learning_rate=0.05, momentum=0.5), Adam()])
def test_synchronous_servers_give_the_serial_loss_curve(optimizer):
    expected, wrong = serial(2, optimizer), []
    weights = collect(expected.worker).flat_parameters
    for job in jobs():
        clients, batch, model, count = job
        found = run(Servers(count, clients), batch, model, optimizer=optimizer)
        if found is None:
            continue
        whole = collect(found.worker).flat_parameters
        if not np.abs(curve(found) - curve(expected)).max() <= 1e-10 or np.abs(whole - weights).max() > 1e-10:
            wrong.append((job, curve(found).tolist()))
    assert same_everywhere(not wrong), wrong


@either_mpi
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["sync", "elastic"])
def test_gradients_that_leave_during_the_backward_pass_give_the_same_curve(kind):
    wrong = []
    for job in jobs():
        clients, batch, model, count = job
        if count < model or (kind == "elastic" and clients > 1):
            continue  # one client: an asynchronous store does not fix who comes first
        found = [run(Servers(count, clients, kind, 2), batch, model, overlap=overlap) for overlap in (False, True)]
        if found[0] is not None and not np.abs(curve(found[0]) - curve(found[1])).max() <= 1e-12:
            wrong.append(job)
        shares = [hidden_of(each.epochs) for each in found if each is not None]
        if not all(0 <= share < 1 for share in shares) or shares[:1] not in ([], [0.0]):
            wrong.append((job, shares))
    assert same_everywhere(not wrong), wrong


@either_mpi
@pytest.mark.mpi(min_size=2)
def test_training_goes_on_from_a_checkpoint_with_the_servers_optimizer_state(tmp_path_factory):
    folder, expected, wrong = shared_folder(tmp_path_factory), curve(serial(4, Adam())), []
    for index, job in enumerate(jobs()):
        clients, batch, model, count = job
        path = f"{folder}/{index}.safetensors"
        first = run(Servers(count, clients), batch, model, 2, Adam(), kept=path)
        COMM.Barrier()
        second = run(Servers(count, clients), batch, model, 2, saved=path)
        if second is None:
            continue
        got = np.concatenate([curve(first), curve(second)])
        if not np.abs(got - expected).max() <= 1e-10:
            wrong.append((job, got.tolist()))
    assert same_everywhere(not wrong), wrong
    here = Mesh(COMM.size, 1)  # and without servers
    data = load(synthetic, here, 20, "float64", seed=1)
    worker = load_checkpoint(f"{folder}/0.safetensors", here)
    went_on = curve(train(MLP(SIZES, dtype="float64", seed=3), data, here, 2, worker=worker))
    here.free()
    assert same_everywhere(np.abs(went_on - expected[2:]).max() <= 1e-10)


@only_on(4)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("kind", ["sync", "elastic"])
def test_servers_of_an_empty_slice_keep_nothing_and_training_goes_on(kind, overlap, tmp_path_factory):
    path, found = shared_folder(tmp_path_factory) + "/x.safetensors", []
    small = {"source": lambda: SyntheticSource(103, 4, 1), "sizes": [4, 1, 1]}
    for saved, kept in ((None, path), (path, None)):
        servers = Servers(2, 1, kind)  # the first step is the only one that averages, and centre and weights are equal
        done = run(servers, 1, 2, 2, None if saved else Adam(), overlap, saved, kept, mode="columns", **small)
        COMM.Barrier()
        if done is not None:
            found.append(curve(done))
            assert (done.worker.mesh.model_index == 0) == bool(done.worker.network.flat_parameters.size)
    expected = curve(serial(4, Adam(), **small))
    assert same_everywhere(not found or np.abs(np.concatenate(found) - expected).max() <= 1e-10), found


def elastic_by_hand(steps_of, every, alpha, rate):
    """One client and a centre, as equations 2 and 3 of MXNET-MPI have it; the client's weights after all steps."""
    mlp = MLP(SIZES, dtype="float64", seed=3)
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
    every, alpha, rate, wrong = 3, 0.25, 0.05, []
    data = load(synthetic, alone(), 20, "float64", seed=1)
    visits = [index for epoch in range(2) for index in epoch_order(len(data.deal.samples), epoch, 1)]
    parts = [slice(data.deal.bounds[index], data.deal.bounds[index + 1]) for index in visits]
    expected = elastic_by_hand([(data.x[part], data.y[part]) for part in parts], every, alpha, rate)
    for clients, batch, model, count in jobs():
        if clients > 1:
            continue
        found = run(Servers(count, 1, "elastic", every, alpha), batch, model, optimizer=SGD(learning_rate=rate))
        if found is not None and np.abs(collect(found.worker).flat_parameters - expected).max() > 1e-12:
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


@pytest.mark.parametrize(
    "job, words",
    [
        (lambda: run(Servers(1, COMM.size), 1, 1), "the job has"),
        (lambda: run(Servers(1, 1, "best"), 1, 1), "elastic"),
        (lambda: run(Servers(1, 1, "elastic", 1, 2.0), 1, 1), "alpha"),
        (lambda: run(Servers(1), COMM.size - 1, 1, sizes=[5, 2]), "cannot learn 5 features -> 3"),
        (lambda: run(Servers(1), 1, COMM.size - 1, overlap=True), "give a server for each slice"),
    ],
)
def test_what_cannot_be_trained_ends_workers_and_servers_with_one_sentence(job, words):
    if COMM.size < 2 or (COMM.size == 2 and "each slice" in words):
        pytest.skip("more ranks")
    with pytest.raises(TrainingError, match=words) as refusal:
        job()
    assert len(set(COMM.allgather(str(refusal.value)))) == 1
