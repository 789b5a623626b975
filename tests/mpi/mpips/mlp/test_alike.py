"""Ranks that give different arguments or data are refused, all in the same words, before anything is trained."""

import numpy as np
import pytest

from mpips.mlp import (
    MLP,
    ArraySource,
    Mesh,
    Servers,
    SyntheticSource,
    TrainingError,
    choose_mesh,
    load,
    open_source,
    train,
)
from mpips.optimizers import SGD, Adam

from .support import COMM, MESHES, curve, same_everywhere

ODD = COMM.rank == COMM.size - 1
pytestmark = [MESHES, pytest.mark.mpi(min_size=2)]


def synthetic():
    return SyntheticSource(103, 5, 3)


def sentences(call):
    """What every rank raised, in rank order; an empty text where it did not."""
    said = ""
    try:
        call()
    except TrainingError as error:
        said = str(error)
    return COMM.allgather(said)


def refused(call, *words):
    """Whether all ranks raised one sentence with these words, and the rank that differs."""
    said = sentences(call)
    return len(set(said)) == 1 and all(word in said[0] for word in (*words, f"rank {COMM.size - 1}")), said


NETWORK = {"sizes": [5, 8, 3], "dtype": "float64", "seed": 3}


@pytest.mark.parametrize(
    "other, words",
    [
        ({"sizes": [5, 9, 3]}, ("5-8-3", "5-9-3")),
        ({"seed": 4}, ("seed of the network is 3", "4 on")),
        ({"activation": "tanh"}, ("relu", "tanh")),
        ({"dtype": "float32"}, ("float64", "float32")),
        ({"loss": "softmax"}, ("l2", "softmax")),
    ],
)
def test_networks_that_differ(other, words):
    mesh = Mesh(COMM.size, 1)
    data = load(synthetic, mesh, 20, "float64", seed=1)
    mlp = MLP(**{**NETWORK, **(other if ODD else {})})
    ok, said = refused(lambda: train(mlp, data, mesh, 1), *words)
    assert same_everywhere(ok), said
    assert same_everywhere(train(MLP(**NETWORK), data, mesh, 1).epochs), "the communicators are usable afterwards"
    mesh.free()


@pytest.mark.parametrize(
    "other, words",
    [
        ({"epochs": 2}, ("epochs is 1", "2 on")),
        ({"optimizer": SGD(learning_rate=0.2)}, ("learning_rate", "0.01", "0.2")),
        ({"optimizer": Adam()}, ("the optimizer is SGD", "Adam")),
        ({"mode": "columns"}, ("mode is pairs", "columns")),
        ({"overlap": True}, ("overlap is None", "True")),
        ({"half": False}, ("half is None", "False")),
        ({"batch": 30}, ("batch is 20", "30")),
        ({"seed": 2}, ("seed is 1", "2 on")),
        ({"test_share": 0.4}, ("test_share is not given", "0.4")),
        ({"way": "scatter"}, ("way is not given", "scatter")),
        ({"mesh": f"1x{COMM.size}"}, ("the grid is", f"1x{COMM.size}")),
    ],
)
def test_ways_of_training_that_differ(other, words):
    arguments = {"mesh": f"{COMM.size}x1", "epochs": 1, "batch": 20, "seed": 1, **(other if ODD else {})}
    ok, said = refused(lambda: train(MLP(**NETWORK), synthetic, **arguments), *words)
    assert same_everywhere(ok), said


def test_rows_on_one_rank_and_how_to_open_them_on_another():
    mesh = Mesh(COMM.size, 1)
    data = load(synthetic, mesh, 20, "float64", seed=1)
    given, batch = (synthetic, {"batch": 20}) if ODD else (data, {})
    ok, said = refused(lambda: train(MLP(**NETWORK), given, mesh, 1, **batch))
    mesh.free()
    assert same_everywhere(ok), said


def test_first_weights_that_differ_are_refused_and_those_that_one_rank_only_looked_at_are_not():
    mesh = Mesh(COMM.size, 1)
    data = load(synthetic, mesh, 20, "float64", seed=1)
    expected = curve(train(MLP(**NETWORK), data, mesh, 1))
    looked = MLP(**NETWORK)
    if ODD:
        looked.predict(data.x)
    assert same_everywhere(np.abs(curve(train(looked, data, mesh, 1)) - expected).max() <= 1e-10)
    if ODD:
        looked.flat_parameters[0] += 1
    ok, said = refused(lambda: train(looked, data, mesh, 1), "checksum of the network's weights")
    mesh.free()
    assert same_everywhere(ok), said


@pytest.mark.parametrize(
    "name, one, other",
    [
        ("batch", 20, 30),
        ("seed", 1, 2),
        ("test_share", 0.2, 0.4),
        ("dtype", "float64", "float32"),
        ("way", "auto", "scatter"),
        ("way", "scatter", "carry"),
    ],
)
def test_ways_of_loading_that_differ(name, one, other):
    mesh = Mesh(COMM.size, 1)
    ok, said = refused(
        lambda: load(synthetic, mesh, **{"batch": 20, name: other if ODD else one}), f"{name} is {one}", f"{other} on"
    )
    mesh.free()
    assert same_everywhere(ok), said


def test_meshes_that_differ():
    ok, said = refused(lambda: Mesh(*((1, COMM.size) if ODD else (COMM.size, 1))), f"{COMM.size}x1", f"1x{COMM.size}")
    assert same_everywhere(ok), said
    ok, said = refused(lambda: choose_mesh(MLP([5, 9 if ODD else 8, 3]), 20), "5-8-3", "5-9-3")
    assert same_everywhere(ok), said


def test_servers_that_differ():
    ok, said = refused(lambda: Servers(1, every=3 if ODD else 4).join(COMM.size - 1, 1), "every is 4", "3 on")
    assert same_everywhere(ok), said


@pytest.mark.mpi(min_size=3)
def test_the_servers_hear_of_workers_that_differ():
    servers = Servers(1)
    said = ""
    try:
        mesh = servers.join(COMM.size - 1, 1)
        data = load(synthetic, mesh, 20, "float64", seed=1)
        train(MLP(**NETWORK), data, mesh, 2 if mesh.comm.rank else 1, servers=servers)
    except TrainingError as error:
        said = str(error)
    said = COMM.allgather(said)
    assert len(set(said)) == 1, said
    assert "epochs is 1 on rank 0 but 2" in said[0]


@pytest.mark.parametrize("way", ["auto", "read"])
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x, y: (x + 1, y), "checksum"),
        (lambda x, y: (x[:, :3], y), "features is 5"),
        (lambda x, y: (x[:90], y[:90]), "(90, 5)"),
        (lambda x, y: (x.astype(np.float32), y), "float32"),
        (lambda x, y: (x, np.where(np.arange(len(y))[:, None] == 57, 0, y)), "checksum"),
    ],
)
def test_data_that_differ_between_the_ranks_that_read_them(way, change, words):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((100, 5)), rng.standard_normal((100, 2))
    mesh = Mesh(1, COMM.size)
    ok, said = refused(
        lambda: load(lambda: ArraySource("memory", *(change(x, y) if ODD else (x, y))), mesh, 20, way=way),
        "the data differ between the ranks", words, "choose scatter",
    )  # fmt: skip
    sent = load(lambda: ArraySource("memory", *(change(x, y) if ODD else (x, y))), mesh, 20, way="scatter")
    mesh.free()
    assert same_everywhere(ok), said
    assert same_everywhere(sent.train_rows == 80 and sent.x.shape[1] == 5), "rank 0's rows"


@pytest.mark.parametrize("lines", [60, 60_000])
def test_texts_that_differ_between_the_ranks_that_read_them(tmp_path, lines):
    path = tmp_path / "table.csv"
    path.write_text("".join(f"{row},{7 if ODD and row >= lines // 2 else 5},123456789012\n" for row in range(lines)))
    mesh = Mesh(COMM.size, 1)
    ok, said = refused(lambda: load(lambda: open_source(str(path)), mesh, 20), "the data differ", "checksum")
    same = sentences(lambda: load(lambda: open_source(str(path), target=["2" if ODD else "1"]), mesh, 20))
    mesh.free()
    assert same_everywhere(ok), said
    assert len(set(same)) == 1, same
    assert "columns is" in same[0]


def test_a_text_without_rows_is_named(tmp_path_factory):
    path = COMM.bcast(str(tmp_path_factory.mktemp("rows") / "names.csv") if COMM.rank == 0 else "")
    if COMM.rank == 0:
        with open(path, "w") as file:
            file.write("a,b\n")
    COMM.Barrier()
    mesh = Mesh(COMM.size, 1)
    said = sentences(lambda: load(lambda: open_source(path), mesh, 20, way="read"))
    said += sentences(lambda: load(lambda: open_source(path), mesh, 20, way="scatter"))
    mesh.free()
    assert set(said) == {f"{path} has no row of numbers"}
