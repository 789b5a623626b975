"""The examples: their network and batches, what they refuse of the command line, and the momentum of their loops."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import mpips
from collectives.terminal import RANK_VARIABLES

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import task


class Kv:
    def __init__(self, rank=0, num_workers=1):
        self.rank, self.num_workers = rank, num_workers

    def barrier(self):
        pass


def loss(network, x, y):
    network.forward(x)
    network.backward(y)
    return network.loss


def test_gradients_are_the_slopes_of_the_loss():
    rng = np.random.default_rng(0)
    network = task.Network(5, 7, 3, "float64", seed=1)
    x, y = rng.normal(size=(11, 5)), rng.integers(0, 3, 11)
    loss(network, x, y)
    gradients = [gradient.copy() for gradient in network.gradients]
    for parameter, gradient in zip(network.parameters, gradients):
        for place in np.ndindex(parameter.shape):
            kept = parameter[place]
            parameter[place] = kept + 1e-6
            above = loss(network, x, y)
            parameter[place] = kept - 1e-6
            below = loss(network, x, y)
            parameter[place] = kept
            assert gradient[place] == pytest.approx((above - below) / 2e-6, abs=1e-8)


def test_gradients_of_workers_have_the_mean_of_the_whole_batch():
    rng = np.random.default_rng(0)
    network = task.Network(5, 7, 3, "float64", seed=1)
    x, y = rng.normal(size=(12, 5)), rng.integers(0, 3, 12)
    loss(network, x, y)
    whole = [gradient.copy() for gradient in network.gradients]
    parts = [np.zeros_like(gradient) for gradient in whole]
    for start in range(0, 12, 4):
        loss(network, x[start : start + 4], y[start : start + 4])
        for part, gradient in zip(parts, network.gradients):
            part += gradient / 3
    for part, gradient in zip(parts, whole):
        np.testing.assert_allclose(part, gradient)


@pytest.fixture
def tasks():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    options = task.Settings(batch_size=100, hidden=2)
    return [task.Task("x", Kv(rank, 3), options) for rank in range(3)]


def test_batches_of_workers_are_equally_many_and_share_no_image(tasks):
    for each in tasks:
        each.x = np.arange(len(each.x))
    batches = [[rows.tolist() for rows, _ in each.batches(1)] for each in tasks]
    assert [len(each) for each in batches] == [4, 4, 4]
    assert len(set(np.ravel(batches).tolist())) == 1200
    assert [rows.tolist() for rows, _ in tasks[0].batches(1)] == batches[0]
    assert [rows.tolist() for rows, _ in tasks[0].batches(2)] != batches[0]


def test_batches_that_are_too_large_are_a_sentence():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    with pytest.raises(ValueError, match="--batch-size 1000 of 2 workers is more than 1437 images"):
        next(task.Task("x", Kv(0, 2), task.Settings(batch_size=1000, hidden=2)).batches(1))


def test_seconds_are_of_training_alone(monkeypatch, capsys):
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    job = task.Task("x", Kv(), task.Settings(epochs=3, hidden=2, batch_size=256))
    clock = [0.0]
    monkeypatch.setattr(task.time, "perf_counter", lambda: clock[0])

    def evaluated(x, y):
        clock[0] += 100
        return 0.5

    job.model.accuracy = evaluated
    for epoch in job.epochs():
        for x, y in job.batches(epoch):
            job.model.forward(x)
            job.model.backward(y)
        clock[0] += 2
    assert [line.split()[-2] for line in capsys.readouterr().out.splitlines()] == ["2.00", "4.00", "6.00"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("--epochs -1", "argument --epochs: '-1' is not a whole number of at least 1"),
        ("--batch-size 0", "at least 1"),
        ("--hidden 1.5", "'1.5' is not a whole number"),
        ("--interval 0", "at least 1"),
        ("--seed -1", "at least 0"),
        ("--learning-rate nan", "'nan' is not a number"),
        ("--sample-seconds -1", "at least 0"),
        ("--dtype int8", "float32"),
    ],
)
def test_numbers_that_cannot_be_are_refused_with_a_sentence(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example", *words.split()])
    with pytest.raises(SystemExit) as end:
        task.parse_settings()
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("word, code", [("--epochs=-1", 2), ("--help", 0)])
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_speaks(word, code, rank, monkeypatch, capsys):
    for name in RANK_VARIABLES:
        monkeypatch.setenv(name, str(rank))
    monkeypatch.setattr(sys, "argv", ["example", word])
    with pytest.raises(SystemExit) as end:
        task.parse_settings()
    assert end.value.code == code
    assert any(capsys.readouterr()) == (rank == 0)


def test_settings_come_from_the_command_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["example", "--batch-size", "32", "--alpha", "0.25", "--dtype", "float64"])
    assert task.parse_settings() == task.Settings(batch_size=32, alpha=0.25, dtype="float64")


def test_an_example_takes_the_kinds_that_it_is_for(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["example"])
    assert task.parse_settings("mpi_sync", "dist_sync").kind == "mpi_sync"
    monkeypatch.setattr(sys, "argv", ["example", "--kind", "dist_sync"])
    assert task.parse_settings("mpi_sync", "dist_sync").kind == "dist_sync"
    with pytest.raises(SystemExit):
        task.parse_settings("mpi_async", "dist_async")
    assert "'dist_sync'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        task.parse_settings()
    assert "--kind" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, file, said",
    [
        ("--trace", "none/x.json", "cannot be written: there is no folder"),
        ("--profile", "x/", "cannot be written: that names a folder"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_training(option, file, said, tmp_path):
    example = [sys.executable, str(Path(task.__file__).with_name("overlap.py")), "--kind", "local"]
    command = [*example, option, f"{tmp_path}/{file}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2, done.stderr
    assert f"error: {option} {tmp_path}/{file} {said}" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


class Seen(Exception):
    """The optimizer that a loop made."""


def seen(*args: Any, **options: Any) -> None:
    raise Seen(options)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize(
    "example, kind",
    [("sgd", "dist_sync"), ("asgd", "dist_async"), ("asgd", "mpi_async"), ("esgd", "mpi_async"), ("pure_mpi", "")],
)
def test_a_loop_takes_the_momentum_of_the_command_line(
    example: str, kind: str, momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    store = MagicMock(num_workers=4, rank=0)
    store.layout.clients, store.layout.client.Get_size.return_value = [0, 1], 2
    module = importlib.import_module(example)
    monkeypatch.setattr(mpips, "create", lambda *words, **options: store, raising=False)
    monkeypatch.setattr(module, "SGD", seen)
    with pytest.raises(Seen) as caught:
        module.main(task.Settings(kind=kind, momentum=momentum, hidden=2))
    assert caught.value.args[0]["momentum"] == momentum
