"""Servers with clients that are model parallel inside."""

import numpy as np
import pytest

from mpips.optimizers import SGD, Adam
from mpips.parallel import MLP, TrainingError, collect, load, train
from mpips.parallel.minibatches import order
from mpips.parallel.served import Servers
from mpips.parallel.sources import SyntheticSource

from .support import COMM, alone, curve, same_everywhere

HIDDEN = [7, 2, 5]


def jobs():
    """Some (clients, batch, model, servers) for the ranks there are, those with model parallel clients first."""
    found = [
        (clients, batch, model, COMM.size - clients * batch * model)
        for model in (2, 3, 1)
        for clients in (2, 1, 3)
        for batch in (1, 2)
        if COMM.size - clients * batch * model >= model
    ]
    return found[:4]


def run(servers, batch, model, epochs=2, optimizer=None, broken=False):
    """The trained network on a worker, None on a server."""
    try:
        grid = servers.join(batch, model)
    except SystemExit:
        return None
    data = load(lambda: SyntheticSource(103, 5, 3), grid, 20, "float64", seed=1)
    sizes = [5, *HIDDEN, 2 if broken else 3]
    try:
        return train(MLP(sizes, dtype="float64", seed=3), data, grid, epochs, optimizer, servers=servers)
    finally:
        servers.close()


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
        whole = collect(found.hybrid).flat_parameters if found is not None else None
        if whole is not None and not np.allclose(
            whole, collect(serial.hybrid).flat_parameters, rtol=0, atol=1e-10
        ):
            wrong.append((clients, batch, model, count, "weights"))
    assert same_everywhere(not wrong), wrong


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


@pytest.mark.mpi(min_size=2)
def test_one_elastic_client_follows_the_equations():
    every, alpha, rate = 3, 0.25, 0.05
    data = load(lambda: SyntheticSource(103, 5, 3), alone(), 20, "float64", seed=1)
    steps = []
    for epoch in range(2):
        for index in order(len(data.deal.samples), epoch, 1):
            part = slice(data.deal.bounds[index], data.deal.bounds[index + 1])
            steps.append((data.x[part], data.y[part]))
    expected = elastic_by_hand(steps, every, alpha, rate)
    wrong = []
    for clients, batch, model, count in jobs():
        if clients == 1:
            found = run(Servers(count, 1, "elastic", every, alpha), batch, model, optimizer=SGD(learning_rate=rate))
            if found is not None and not np.allclose(
                collect(found.hybrid).flat_parameters, expected, rtol=0, atol=1e-12
            ):
                wrong.append((batch, model, count))
    assert same_everywhere(not wrong), wrong


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
    [((1, COMM.size), (1, 1), "the job has"), ((COMM.size - 2, 1), (1, 2), None), ((1, 1, "best"), (1, 1), "elastic")],
)
def test_servers_that_do_not_fit_are_refused(arguments, shape, words):
    if words is None:
        if COMM.size != 3:
            pytest.skip("three ranks: a client of two slices and one server")
        words = "every slice needs a server of its own"
    with pytest.raises(TrainingError, match=words):
        Servers(*arguments).join(*shape)
