"""`mpips train` under a launcher: what it writes, and how it refuses."""

import json

import pytest

from mpips.parallel.__main__ import command

from .support import COMM, same_everywhere


def folder(tmp_path_factory):
    return COMM.bcast(str(tmp_path_factory.mktemp("train")) if COMM.rank == 0 else "")


def call(*words):
    """The exit code on this rank."""
    try:
        command.main(list(words), standalone_mode=False)
    except SystemExit as end:
        return end.code
    return 0


def test_auto_trains_and_writes_json_picture_and_a_checkpoint_to_go_on_from(tmp_path_factory, capfd):
    pytest.importorskip("matplotlib")
    out = folder(tmp_path_factory)
    words = ["--data", "synthetic:300,6,2", "--hidden", "12,8", "--batch", "32", "--epochs", "2", "--explain"]
    written = ["--json", f"{out}/a.json", "--plot", f"{out}/a.png", "--save", f"{out}/a.safetensors"]
    assert same_everywhere(call(*words, *written) == 0)
    assert same_everywhere(call(*words, "--load", f"{out}/a.safetensors", "--json", f"{out}/b.json") == 0)
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
    with open(f"{out}/a.png", "rb") as picture:
        assert picture.read(4) == b"\x89PNG"
    assert ("epoch 1/2" in printed) == (COMM.rank == 0)


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["--grid", f"{COMM.size + 1}x1"], f"the job has {COMM.size}"),
        (["--grid", "two"], "BATCHxMODEL"),
        (["--hidden", "12,x"], "--hidden '12,x'"),
        (["--data", "nowhere.csv"], "nowhere.csv does not exist"),
        (["--target", "3"], "columns can be chosen"),
        (["--learning-rate", "-1"], "learning_rate"),
        (["--optimizer", "adam", "--momentum", "0.9"], "--momentum is for sgd"),
        (["--json", "/nowhere/x.json", "--epochs", "1"], "cannot be written"),
    ],
)
def test_what_cannot_be_trained_ends_every_rank_with_one_sentence(words, sentence, capfd):
    code = call("--data", "synthetic:100,3,1", "--hidden", "4", "--grid", f"{COMM.size}x1", *words)
    error = capfd.readouterr().err
    assert same_everywhere(code == 1), code
    assert (sentence in error) == (COMM.rank == 0), error
