"""Ranks that give different arguments or data are refused, all in the same words, before anything is trained."""

import numpy as np
import pytest

from mpips.mlp import MLP, ArraySource, Mesh, Servers, TrainingError, choose_mesh, load, open_source, train
from mpips.optimizers import SGD, Adam

from .support import COMM, MESHES, curve, same_everywhere, shared_folder, synthetic

ODD = COMM.rank == COMM.size - 1
NETWORK = {"sizes": [5, 8, 3], "dtype": "float64", "seed": 3}
pytestmark = [MESHES, pytest.mark.mpi(min_size=2)]


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
    assert len(set(said)) == 1 and all(word in said[0] for word in (*words, f"rank {COMM.size - 1}")), said


@pytest.mark.parametrize(
    "other, words",
    [
        ({"sizes": [5, 9, 3]}, "'network' is 5-8-3 on rank 0 and 5-9-3"),
        ({"seed": 4}, "'seed of the network' is 3 on rank 0 and 4"),
        ({"activation": "tanh"}, "'activation' is relu on rank 0 and tanh"),
        ({"dtype": "float32"}, "'dtype of the network' is float64 on rank 0 and float32"),
        ({"loss": "softmax"}, "'loss' is l2 on rank 0 and softmax"),
    ],
)
def test_networks_that_differ_are_refused(mesh, other, words):
    data = load(synthetic, mesh, 20, "float64", seed=1)
    mlp = MLP(**{**NETWORK, **(other if ODD else {})})
    refused(lambda: train(mlp, data, mesh, 1), words)
    assert train(MLP(**NETWORK), data, mesh, 1).epochs, "the communicators are usable afterwards"


@pytest.mark.parametrize(
    "other, words",
    [
        ({"epochs": 2}, "'epochs' is 1 on rank 0 and 2"),
        ({"optimizer": SGD(learning_rate=0.2)}, "'learning_rate of the optimizer' is 0.01 on rank 0 and 0.2"),
        ({"optimizer": Adam()}, "'optimizer' is SGD on rank 0 and Adam"),
        ({"mode": "columns"}, "'mode' is pairs on rank 0 and columns"),
        ({"overlap": True}, "'overlap' is None on rank 0 and True"),
        ({"half": False}, "'half' is None on rank 0 and False"),
        ({"batch": 30}, "'batch' is 20 on rank 0 and 30"),
        ({"seed": 2}, "'seed' is 1 on rank 0 and 2"),
        ({"test_share": 0.4}, "'test_share' is not given on rank 0 and 0.4"),
        ({"way": "scatter"}, "'way' is not given on rank 0 and scatter"),
        ({"mesh": f"1x{COMM.size}"}, f"'mesh' is {COMM.size}x1 on rank 0 and 1x{COMM.size}"),
        ({"bach": 3}, "here is bach"),
    ],
)
def test_ways_of_training_that_differ_are_refused(other, words):
    arguments = {"mesh": f"{COMM.size}x1", "epochs": 1, "batch": 20, "seed": 1, **(other if ODD else {})}
    refused(lambda: train(MLP(**NETWORK), synthetic, **arguments), words)


def test_rows_on_one_rank_and_a_function_on_another_are_refused(mesh):
    data = load(synthetic, mesh, 20, "float64", seed=1)
    given, batch = (synthetic, {"batch": 20}) if ODD else (data, {})
    refused(lambda: train(MLP(**NETWORK), given, mesh, 1, **batch), "'data' is")


def test_first_weights_may_be_looked_at_and_may_not_differ(mesh):
    data = load(synthetic, mesh, 20, "float64", seed=1)
    expected = curve(train(MLP(**NETWORK), data, mesh, 1))
    looked = MLP(**NETWORK)
    if ODD:
        looked.predict(data.x)
    assert same_everywhere(np.abs(curve(train(looked, data, mesh, 1)) - expected).max() <= 1e-10)
    if ODD:
        looked.flat_parameters[0] += 1
    refused(lambda: train(looked, data, mesh, 1), "checksum of the network's weights")


@pytest.mark.parametrize(
    "name, other, words",
    [
        ("batch", 30, "'batch' is 20 on rank 0 and 30"),
        ("seed", 2, "'seed' is 0 on rank 0 and 2"),
        ("test_share", 0.4, "'test_share' is 0.2 on rank 0 and 0.4"),
        ("dtype", "float64", "'dtype' is float32 on rank 0 and float64"),
        ("way", "scatter", "'way' is auto on rank 0 and scatter"),
        ("way", "carry", "way 'carry' is unknown; choose auto, read, scatter"),
    ],
)
def test_ways_of_loading_that_differ_are_refused(mesh, name, other, words):
    refused(lambda: load(synthetic, mesh, **{"batch": 20, **({name: other} if ODD else {})}), words)


def test_meshes_that_differ_are_refused():
    refused(lambda: Mesh(*((1, COMM.size) if ODD else (COMM.size, 1))), f"is {COMM.size}x1 on rank 0 and 1x{COMM.size}")
    refused(lambda: choose_mesh(MLP([5, 9 if ODD else 8, 3]), 20), "5-8-3", "5-9-3")
    refused(lambda: Servers(1, every=3 if ODD else 4).join(COMM.size - 1, 1), "every=4", "every=3")


@pytest.mark.mpi(min_size=3)
def test_servers_hear_of_workers_that_differ():
    servers = Servers(1)

    def job():
        mesh = servers.join(COMM.size - 1, 1)
        data = load(synthetic, mesh, 20, "float64", seed=1)
        train(MLP(**NETWORK), data, mesh, 2 if mesh.comm.rank else 1, servers=servers)

    said = sentences(job)
    assert len(set(said)) == 1 and "'epochs' is 1 on rank 0 and 2 on rank 1" in said[0], said


@pytest.mark.parametrize("way", ["auto", "read"])
@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x, y: (x + 1, y), "checksum"),
        (lambda x, y: (x[:, :3], y), "'features' is 5"),
        (lambda x, y: (x[:90], y[:90]), "(90, 5)"),
        (lambda x, y: (x.astype(np.float32), y), "float32"),
        (lambda x, y: (x, np.where(np.arange(len(y))[:, None] == 57, 0, y)), "checksum"),
    ],
)
def test_data_that_differ_are_refused_by_ranks_that_read_them(mesh, way, change, words):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((100, 5)), rng.standard_normal((100, 2))

    def memory():
        return ArraySource("memory", *(change(x, y) if ODD else (x, y)))

    refused(lambda: load(memory, mesh, 20, way=way), "the data differ between the ranks", words, "choose scatter")
    sent = load(memory, mesh, 20, way="scatter")
    assert same_everywhere(sent.train_rows == 80 and sent.x.shape[1] == 5), "rank 0's rows"


@pytest.mark.parametrize("lines", [60, 60_000])
def test_texts_that_differ_are_refused(mesh, tmp_path, lines):
    path = tmp_path / "table.csv"
    path.write_text("".join(f"{row},{7 if ODD and row >= lines // 2 else 5},123456789012\n" for row in range(lines)))
    refused(lambda: load(lambda: open_source(str(path)), mesh, 20), "the data differ", "checksum")
    refused(lambda: load(lambda: open_source(str(path), target=["2" if ODD else "1"]), mesh, 20), "'columns' is")


@pytest.mark.parametrize("way", ["read", "scatter"])
def test_a_text_without_rows_is_named(mesh, tmp_path_factory, way):
    path = shared_folder(tmp_path_factory) + "/names.csv"
    if COMM.rank == 0:
        with open(path, "w") as file:
            file.write("a,b\n")
    COMM.Barrier()
    assert set(sentences(lambda: load(lambda: open_source(path), mesh, 20, way=way))) == {
        f"{path} has no row of numbers"
    }
