"""`mpips train` under a launcher: what it writes, and how it refuses."""

import json
import os

import numpy as np
import pytest

from mpips.mlp import MLP, Mesh, TrainingError, checkpoint, load, open_source, train
from mpips.mlp.__main__ import command
from mpips.mlp.mesh import factorings
from tests.mpi.sizes import either_mpi, only_on

from .support import COMM, MESHES, same_everywhere

pytestmark = MESHES


def folder(tmp_path_factory):
    return COMM.bcast(str(tmp_path_factory.mktemp("train")) if COMM.rank == 0 else "")


def call(*words):
    """The exit code on this rank."""
    try:
        command.main(list(words))
    except SystemExit as end:
        return end.code
    return 0


@either_mpi
@only_on(1, 2, 3, 4)
def test_auto_trains_and_writes_json_picture_and_a_checkpoint_to_go_on_from(tmp_path_factory, capfd):
    pytest.importorskip("matplotlib")
    out = folder(tmp_path_factory)
    words = ["--data", "synthetic:300,6,2", "--hidden", "12,8", "--batch", "32", "--epochs", "2", "--explain"]
    written = ["--json", f"{out}/a.json", "--plot", f"{out}/a.png", "--save", f"{out}/a.safetensors"]
    assert same_everywhere(call(*words, *written, "--learning-rate", "0.05", "--momentum", "0.5") == 0)
    again = [*words[:2], "--batch", "32", "--epochs", "2", "--explain", "--split", "columns", "--no-overlap"]
    assert same_everywhere(call(*again, "--load", f"{out}/a.safetensors", "--json", f"{out}/b.json") == 0)
    printed = capfd.readouterr().out
    COMM.Barrier()
    with open(f"{out}/a.json") as a, open(f"{out}/b.json") as b:
        first, second = json.load(a), json.load(b)
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
    assert ("epoch 1/2" in printed) == (COMM.rank == 0)
    assert ("epoch 3/4" in printed) == (COMM.rank == 0)


@only_on(1, 2)
@pytest.mark.parametrize("names", [("no", "yes"), ("10", "20")])
def test_labels_are_told_and_kept_in_a_checkpoint(tmp_path_factory, capfd, names):
    """Words, and numbers that do not begin at 0: as many outputs as labels, and the same classes after --load."""
    out, other = folder(tmp_path_factory), "30" if names[0].isdecimal() else "maybe"
    path, saved = f"{out}/labels.csv", f"{out}/a.safetensors"
    if COMM.rank == 0:
        for name, labels in ((path, names), (f"{out}/one.csv", names[1:]), (f"{out}/other.csv", (other, names[0]))):
            with open(name, "w") as file:
                file.write("a;kind\n" + "".join(f"{row / 9};{labels[row % len(labels)]}\n" for row in range(40)))
    COMM.Barrier()
    grid = ["--classify", "--grid", f"{COMM.size}x1", "--epochs", "1", "--json", f"{out}/a.json"]
    assert same_everywhere(call("--data", path, "--hidden", "4", *grid, "--save", saved) == 0)
    printed = capfd.readouterr().out
    COMM.Barrier()
    with open(f"{out}/a.json") as file:
        first = json.load(file)
    assert same_everywhere(first["network"]["sizes"] == [1, 4, 2] and first["labels"] == list(names))
    assert same_everywhere((f"2 classes: {names[0]} is 0, {names[1]} is 1" in printed) == (COMM.rank == 0))
    assert same_everywhere(call("--data", f"{out}/one.csv", "--load", saved, *grid) == 0)
    assert same_everywhere(call("--data", f"{out}/other.csv", "--load", saved, *grid) == 2)
    told = f"label '{other}' is none of the checkpoint's, which are {names[0]}, {names[1]}" in capfd.readouterr().err
    assert same_everywhere(told == (COMM.rank == 0))
    with pytest.raises(TrainingError, match=r"labels of these rows are .*load the data with labels=worker\.labels"):
        check_labels(f"{out}/other.csv", saved)


def check_labels(path, saved):
    """Go on in Python with rows of other labels."""
    mesh = Mesh(COMM.size, 1)
    data = load(lambda: open_source(path, classify=True), mesh, 10)
    worker = checkpoint.load_checkpoint(saved, mesh)
    train(MLP(*worker.network.specification), data, mesh, 1, worker=worker)


def test_going_on_tests_the_rows_that_were_tested_before_and_scales_as_before(tmp_path_factory, capfd):
    out = folder(tmp_path_factory)
    path = f"{out}/x.safetensors"
    mesh = ["--grid", f"{COMM.size}x1"]
    dealt = ["--seed", "7", "--test-share", "0.25", "--batch", "40"]
    data = ["--data", "synthetic:300,6,2", *mesh, "--learning-rate", "0", "--hidden", "12", *dealt]
    more = ["--data", "synthetic:200,6,2", *mesh]
    assert same_everywhere(call(*data, "--epochs", "1", "--save", path, "--json", f"{out}/a.json") == 0)
    assert same_everywhere(call(*data[:4], "--load", path, "--epochs", "1", "--json", f"{out}/b.json") == 0)
    assert same_everywhere(call(*data[:4], "--load", path, *dealt[:4], "--epochs", "1", "--batch", "20") == 0)
    assert same_everywhere(call(*more, "--load", path, "--save", f"{out}/y.safetensors", "--epochs", "1") == 0)
    COMM.Barrier()
    with open(f"{out}/a.json") as a, open(f"{out}/b.json") as b:
        first, second = json.load(a), json.load(b)
    assert second["rows"] == {"train": 225, "test": 75}
    assert second["batch"] == 40
    assert second["epochs"][0]["epoch"] == 2
    assert second["epochs"][0]["test_loss"] == pytest.approx(first["epochs"][0]["test_loss"], rel=1e-5)
    old, new = (checkpoint.read_scaling(f"{out}/{name}.safetensors", COMM) for name in "xy")
    assert same_everywhere(all(np.array_equal(a, b) for a, b in zip(old, new, strict=True)))
    capfd.readouterr()
    for option, value, before in (("--seed", "1", "7"), ("--test-share", "0.2", "0.25")):
        code = call(*data[:4], "--load", path, option, value)
        error = capfd.readouterr().err
        assert same_everywhere(code == 2)
        assert (f"{option} {value} would mix rows" in error) == (COMM.rank == 0)
        assert (f"is {before};" in error) == (COMM.rank == 0)


def test_a_checkpoint_of_another_network_is_a_refusal(tmp_path_factory, capfd):
    path, mesh = f"{folder(tmp_path_factory)}/x.safetensors", ["--grid", f"{COMM.size}x1", "--epochs", "1"]
    assert same_everywhere(call("--data", "synthetic:50,6,2", *mesh, "--hidden", "4", "--save", path) == 0)
    COMM.Barrier()
    capfd.readouterr()
    code = call("--data", "synthetic:50,3,1", *mesh, "--load", path)
    error = capfd.readouterr().err
    assert same_everywhere(code == 2), code
    sentence = "a network of 6 inputs and 2 outputs cannot learn 3 features -> 1"
    assert (sentence in error) == (COMM.rank == 0), error


def test_explain_shows_every_mesh_on_one_rank_without_colours(capfd):
    words = ["--data", "synthetic:300,6,2", "--hidden", "12", "--epochs", "1", "--explain", "--way", "scatter"]
    code = call(*words, "--grid", f"1x{COMM.size}", "--dtype", "mixed", "--overlap")
    printed = capfd.readouterr().out
    assert same_everywhere(code == 0)
    if COMM.rank:
        assert printed == ""
        return
    assert "\x1b" not in printed
    assert "rank 0 sends them by scatter" in printed
    assert all(f"{batch}x{model} " in printed for batch, model in factorings(COMM.size))


def test_servers_and_their_clients_train(tmp_path_factory):
    if COMM.size < 2:
        pytest.skip("a worker and a server")
    servers = 2 if COMM.size > 3 else 1
    model = 2 if (COMM.size - servers) % 2 == 0 and servers > 1 else 1
    clients = (COMM.size - servers) // model
    out = folder(tmp_path_factory)
    words = ["--data", "synthetic:300,6,2", "--hidden", "12,8", "--batch", "32", "--epochs", "2"]
    served = ["--grid", f"1x{model}", "--servers", str(servers), "--clients", str(clients)]
    elastic = ["--every", "2", "--alpha", "0.25"]
    for averaging, more, told in (("sync", [], (None, None)), ("elastic", elastic, (2, 0.25))):
        path = f"{out}/{averaging}.json"
        assert same_everywhere(call(*words, *served, "--averaging", averaging, *more, "--json", path) == 0)
        COMM.Barrier()
        with open(path) as file:
            written = json.load(file)
        assert written["epochs"][1]["train_loss"] < written["epochs"][0]["train_loss"]
        assert (written["servers"], written["clients"], written["averaging"]) == (servers, clients, averaging)
        assert (written["every"], written["alpha"]) == told


def test_a_bad_row_ends_every_rank_before_training_starts(tmp_path_factory, capfd):
    path = folder(tmp_path_factory) + "/table.csv"
    if COMM.rank == 0:
        with open(path, "w") as file:
            file.write("a,b,c\n" + "1,2,3\n" * 20 + "1,nan,3\n" + "1,2,3\n" * 20)
    COMM.Barrier()
    code = call("--data", path, "--hidden", "4", "--grid", f"{COMM.size}x1")
    printed = capfd.readouterr()
    assert same_everywhere(code == 2)
    assert ("line 22: column 2 (b) is 'nan'" in printed.err) == (COMM.rank == 0), printed.err
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
    mesh = ["--grid", f"{COMM.size}x1"]
    if words[:2] == ["--servers", "1"]:
        mesh = ["--grid", "1x1", "--clients", str(max(1, COMM.size - 1))]
        if COMM.size == 1:
            pytest.skip("a worker and a server")
    code = call("--data", "synthetic:100,3,1", *hidden, *mesh, *words)
    error = capfd.readouterr().err
    assert same_everywhere(code == 2), code
    assert (sentence in error) == (COMM.rank == 0), error
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
    code = call("--data", "synthetic:100,3,1", *hidden, "--grid", f"{COMM.size}x1", *words)
    error = capfd.readouterr().err
    assert same_everywhere(code == expected), code
    assert (sentence in error) == (COMM.rank == 0), error
    assert not [each for each in recwarn if issubclass(each.category, RuntimeWarning)]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_results_that_can_be_kept_are_where_others_cannot(tmp_path_factory, capfd):
    out = folder(tmp_path_factory)
    words = ["--data", "synthetic:100,3,1", "--hidden", "4", "--grid", f"{COMM.size}x1", "--epochs", "1"]
    assert same_everywhere(call(*words, "--json", "/dev/full", "--save", f"{out}/a.safetensors") == 1)
    COMM.Barrier()
    assert os.path.isfile(f"{out}/a.safetensors")
    capfd.readouterr()
    assert same_everywhere(call(*words, "--save", "/dev/full") == 1)
    assert ("Time budget" in capfd.readouterr().out) == (COMM.rank == 0)


def test_no_option_is_a_variable_that_a_store_would_refuse_as_unknown():
    variables = [str(option.envvar) for option in command.params if option.envvar]
    assert not [name for name in variables if name.startswith("MPIPS_")]
