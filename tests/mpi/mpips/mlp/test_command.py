"""`mpips train` under a launcher: what it writes, and how it refuses."""

import json
import os

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, TrainingError, checkpoint, load, open_source, train
from mpips.mlp.__main__ import command
from mpips.mlp.mesh import factorings
from tests.mpi.sizes import either_mpi, only_on

from .support import COMM, MESHES, same_everywhere, shared_folder

pytestmark = MESHES


MESH = ["--grid", f"{COMM.size}x1"]


def call(*words):
    """The exit code, which is that of all ranks."""
    code = 0
    try:
        command.main(list(words))
    except SystemExit as end:
        code = end.code
    assert len(set(COMM.allgather(code))) == 1
    return code


def see_on_rank_0(sentence, printed):
    """A sentence that rank 0 alone has printed."""
    assert (sentence in printed) == (COMM.rank == 0), printed


def written(path):
    """What rank 0 has written as JSON."""
    COMM.Barrier()
    with open(path) as file:
        return json.load(file)


@either_mpi
@only_on(1, 2, 3, 4)
def test_auto_trains_and_writes_json_picture_and_a_checkpoint_to_go_on_from(tmp_path_factory, capfd):
    pytest.importorskip("matplotlib")
    out = shared_folder(tmp_path_factory)
    words = ["--data", "synthetic:300,6,2", "--hidden", "12,8", "--batch", "32", "--epochs", "2", "--explain"]
    files = ["--json", f"{out}/a.json", "--plot", f"{out}/a.png", "--save", f"{out}/a.safetensors"]
    assert call(*words, *files, "--learning-rate", "0.05", "--momentum", "0.5") == 0
    again = [*words[:2], "--batch", "32", "--epochs", "2", "--explain", "--split", "columns", "--no-overlap"]
    assert call(*again, "--load", f"{out}/a.safetensors", "--json", f"{out}/b.json") == 0
    printed = capfd.readouterr().out
    first, second = written(f"{out}/a.json"), written(f"{out}/b.json")
    assert [epoch["epoch"] for epoch in first["epochs"] + second["epochs"]] == [1, 2, 3, 4]
    losses = [epoch["train_loss"] for epoch in first["epochs"] + second["epochs"]]
    assert losses == sorted(losses, reverse=True)
    assert {"epoch", "train_loss", "test_loss", "seconds"} <= set(first["epochs"][0])
    assert first["grid"]["batch"] * first["grid"]["model"] == COMM.size == len(first["memory_bytes"])
    assert set(first["phases"]) == {"compute", "forward", "backward", "data", "evaluate"}
    assert {"name": "sgd", "learning_rate": 0.05, "momentum": 0.5}.items() <= second["optimizer"].items()
    assert (second["split"], second["overlap"], second["servers"], second["averaging"]) == ("columns", False, 0, None)
    assert first["hidden"] is None if COMM.size == 1 else 0 <= first["hidden"] < 1
    with open(f"{out}/a.png", "rb") as picture:
        assert picture.read(4) == b"\x89PNG"
    see_on_rank_0("epoch 1/2", printed)
    see_on_rank_0("epoch 3/4", printed)


@only_on(1, 2)
@pytest.mark.parametrize("names", [("no", "yes"), ("10", "20")])
def test_labels_are_told_and_kept_in_a_checkpoint(tmp_path_factory, capfd, names):
    """Words, and numbers that do not begin at 0: as many outputs as labels, and the same classes after --load."""
    out, other = shared_folder(tmp_path_factory), "30" if names[0].isdecimal() else "maybe"
    path, saved = f"{out}/labels.csv", f"{out}/a.safetensors"
    if COMM.rank == 0:
        for name, labels in ((path, names), (f"{out}/one.csv", names[1:]), (f"{out}/other.csv", (other, names[0]))):
            with open(name, "w") as file:
                file.write("a;kind\n" + "".join(f"{row / 9};{labels[row % len(labels)]}\n" for row in range(40)))
    COMM.Barrier()
    grid = ["--classify", *MESH, "--epochs", "1", "--json", f"{out}/a.json"]
    assert call("--data", path, "--hidden", "4", *grid, "--save", saved) == 0
    first = written(f"{out}/a.json")
    assert first["network"]["sizes"] == [1, 4, 2] and first["labels"] == list(names)
    see_on_rank_0(f"2 classes: {names[0]} is 0, {names[1]} is 1", capfd.readouterr().out)
    assert call("--data", f"{out}/one.csv", "--load", saved, *grid) == 0
    assert call("--data", f"{out}/other.csv", "--load", saved, *grid) == 2
    refusal = f"label '{other}' is none of the checkpoint's, which are {names[0]}, {names[1]}"
    see_on_rank_0(refusal, capfd.readouterr().err)
    mesh = Mesh(COMM.size, 1)  # and in Python
    data = load(lambda: open_source(f"{out}/other.csv", classify=True), mesh, 10)
    worker = checkpoint.load_checkpoint(saved, mesh)
    with pytest.raises(TrainingError, match=r"labels of these rows are .*load the data with labels=worker\.labels"):
        train(MLP(*worker.network.specification), data, mesh, 1, worker=worker)
    mesh.free()


def test_going_on_tests_the_rows_that_were_tested_before_and_scales_as_before(tmp_path_factory, capfd):
    out = shared_folder(tmp_path_factory)
    path = f"{out}/x.safetensors"
    dealt = ["--seed", "7", "--test-share", "0.25", "--batch", "40"]
    data = ["--data", "synthetic:300,6,2", *MESH]
    more = ["--data", "synthetic:200,6,2", *MESH, "--load", path, "--save", f"{out}/y.safetensors"]
    new = [*data, "--learning-rate", "0", "--hidden", "12", *dealt, "--save", path]
    assert call(*new, "--epochs", "1", "--json", f"{out}/a.json") == 0
    assert call(*data, "--load", path, "--epochs", "1", "--json", f"{out}/b.json") == 0
    assert call(*data, "--load", path, *dealt[:4], "--epochs", "1", "--batch", "20") == 0
    assert call(*more, "--epochs", "1") == 0
    first, second = written(f"{out}/a.json"), written(f"{out}/b.json")
    assert (second["rows"], second["batch"]) == ({"train": 225, "test": 75}, 40)
    assert second["epochs"][0]["epoch"] == 2
    assert second["epochs"][0]["test_loss"] == pytest.approx(first["epochs"][0]["test_loss"], rel=1e-5)
    old, new = (checkpoint.read_scaling(f"{out}/{name}.safetensors", COMM) for name in "xy")
    assert same_everywhere(all(np.array_equal(a, b) for a, b in zip(old, new, strict=True)))
    capfd.readouterr()
    for option, value, before in (("--seed", "1", "7"), ("--test-share", "0.2", "0.25")):
        assert call(*data, "--load", path, option, value) == 2
        refusal = f"{option} {value} would mix rows for training and rows for testing: the checkpoint's is {before};"
        see_on_rank_0(refusal, capfd.readouterr().err)
    assert call("--data", "synthetic:50,3,1", *MESH, "--load", path) == 2
    see_on_rank_0("a network of 6 inputs and 2 outputs cannot learn 3 features -> 1", capfd.readouterr().err)


def test_explain_shows_every_mesh_on_one_rank_without_colours(capfd):
    words = ["--data", "synthetic:300,6,2", "--hidden", "12", "--epochs", "1", "--explain", "--way", "scatter"]
    assert call(*words, "--grid", f"1x{COMM.size}", "--dtype", "mixed", "--overlap") == 0
    printed = capfd.readouterr().out
    assert "\x1b" not in printed
    assert bool(printed) == (COMM.rank == 0)
    for sentence in ("rank 0 sends them by scatter", *(f"{b}x{m} " for b, m in factorings(COMM.size))):
        see_on_rank_0(sentence, printed)


def test_servers_and_their_clients_train(tmp_path_factory):
    if COMM.size < 2:
        pytest.skip("a worker and a server")
    servers = 2 if COMM.size > 3 else 1
    model = 2 if (COMM.size - servers) % 2 == 0 and servers > 1 else 1
    clients = (COMM.size - servers) // model
    out = shared_folder(tmp_path_factory)
    words = ["--data", "synthetic:300,6,2", "--hidden", "12,8", "--batch", "32", "--epochs", "2"]
    served = ["--grid", f"1x{model}", "--servers", str(servers), "--clients", str(clients)]
    elastic = ["--every", "2", "--alpha", "0.25"]
    for averaging, more, told in (("sync", [], (None, None)), ("elastic", elastic, (2, 0.25))):
        path = f"{out}/{averaging}.json"
        assert call(*words, *served, "--averaging", averaging, *more, "--json", path) == 0
        found = written(path)
        assert found["epochs"][1]["train_loss"] < found["epochs"][0]["train_loss"]
        assert (found["servers"], found["clients"], found["averaging"]) == (servers, clients, averaging)
        assert (found["every"], found["alpha"]) == told


def test_a_bad_row_ends_every_rank_before_training_starts(tmp_path_factory, capfd):
    path = shared_folder(tmp_path_factory) + "/table.csv"
    if COMM.rank == 0:
        with open(path, "w") as file:
            file.write("a,b,c\n" + "1,2,3\n" * 20 + "1,nan,3\n" + "1,2,3\n" * 20)
    COMM.Barrier()
    assert call("--data", path, "--hidden", "4", *MESH) == 2
    printed = capfd.readouterr()
    see_on_rank_0("line 22: column 2 (b) is 'nan'", printed.err)
    assert "epoch" not in printed.out


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--test-share", "nan"], "nan"),
        (["--test-share", "1"], "test-share"),
        (["--learning-rate", "inf"], "inf"),
        (["--learning-rate", "-1"], "learning-rate"),
        (["--momentum", "1"], "momentum"),
        (["--epochs", "0"], "epochs"),
        (["--batch", "x"], "batch"),
        (["--alpha", "0.2"], "--alpha says what --servers do"),
        (["--every", "3"], "--every says what --servers do"),
        (["--averaging", "elastic"], "--averaging says what --servers do"),
        (["--servers", "1", "--alpha", "0.2"], "--alpha is for --averaging elastic"),
        (["--servers", "1", "--explain"], "--explain predicts"),
        (["--servers", "1", "--dtype", "mixed"], "choose --dtype float32"),
        (["--load", "x.safetensors", "--dtype", "float64"], "--dtype is the checkpoint's"),
        (["--classify"], "--classify is for a file"),
        (["--header"], "--header is for a file"),
        (["--device", "gpu", "--explain"], "--device cpu"),
        (["--data", "synthetic:0"], "each must be at least 1"),
        (["--clients", "2"], "--clients are clients of --servers"),
        (["--servers", "1", "--grid", "auto"], "give the --grid of a client"),
        (["--servers", str(COMM.size)], "servers need"),
        (["--grid", f"{COMM.size + 1}x1"], f"the job has {COMM.size}"),
        (["--grid", "two"], "BATCHxMODEL"),
        (["--hidden", "12,x"], "--hidden '12,x'"),
        (["--target", "3"], "--target is for a file"),
        (["--optimizer", "adam", "--momentum", "0.9"], "--momentum is for sgd"),
    ],
)
def test_words_that_make_no_job_end_every_rank_with_one_sentence_and_code_2(words, sentence, capfd):
    hidden = [] if "--load" in words else ["--hidden", "4"]
    mesh = MESH
    if words[:2] == ["--servers", "1"]:
        mesh = ["--grid", "1x1", "--clients", str(max(1, COMM.size - 1))]
        if COMM.size == 1:
            pytest.skip("a worker and a server")
    assert call("--data", "synthetic:100,3,1", *hidden, *mesh, *words) == 2
    error = capfd.readouterr().err
    see_on_rank_0(sentence, error)
    assert COMM.rank == 0 or not error


@pytest.mark.parametrize(
    "words, expected, sentence",
    [
        (["--data", "nowhere.csv"], 2, "nowhere.csv does not exist"),
        (["--hidden", "100000000,100000000"], 2, "a network of 3-100000000-100000000-1 takes at least 2 arrays of"),
        (["--data", "synthetic:1000000000000,100,1"], 2, "a set of 1,000,000,000,000 rows of 101 columns takes at"),
        (["--data", "synthetic:10,10000000,10000000"], 2, "synthetic data of 10 x 10000000 -> 10000000 takes at"),
        (["--load", "nowhere.safetensors"], 2, "nowhere.safetensors cannot be read"),
        (["--json", "/nowhere/x.json", "--epochs", "1000000"], 2, "--json /nowhere/x.json cannot be written"),
        (["--json", "/dev/full", "--epochs", "1"], 1, "--json /dev/full cannot be written: No space left on device"),
        (["--learning-rate", "1e30", "--epochs", "3"], 1, "lower the learning rate"),
    ],
)
def test_what_cannot_be_trained_ends_every_rank_with_one_sentence(words, expected, sentence, capfd, recwarn):
    hidden = [] if "--load" in words else ["--hidden", "4"]
    assert call("--data", "synthetic:100,3,1", *hidden, *MESH, *words) == expected
    see_on_rank_0(sentence, capfd.readouterr().err)
    assert not [each for each in recwarn if issubclass(each.category, RuntimeWarning)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_results_that_can_be_kept_are_where_others_cannot(tmp_path_factory, capfd):
    out = shared_folder(tmp_path_factory)
    words = ["--data", "synthetic:100,3,1", "--hidden", "4", *MESH, "--epochs", "1"]
    assert call(*words, "--json", "/dev/full", "--save", f"{out}/a.safetensors") == 1
    COMM.Barrier()
    assert os.path.isfile(f"{out}/a.safetensors")
    capfd.readouterr()
    assert call(*words, "--save", "/dev/full") == 1
    see_on_rank_0("Time budget", capfd.readouterr().out)


def test_no_option_is_a_variable_that_a_store_would_refuse_as_unknown():
    assert not [option for option in command.params if str(option.envvar).startswith("MPIPS_")]
