"""The MXNET-MPI reproduction without a lab: what the links allow each way and each mode, and what the paper says."""

from __future__ import annotations

from typing import Any

import pytest

from examples.reproduce.mxnet_mpi import __main__ as mxnet_mpi
from examples.reproduce.mxnet_mpi import training
from examples.reproduce.mxnet_mpi.predicted import exchange
from mpips.optimizers import elastic


def test_the_interval_predicted_is_the_trainers() -> None:
    assert training.INTERVAL == elastic.INTERVAL


RATE, HIDDEN, EPOCHS = 12.5e6, 2000, 20
FULLEST = 4 * (64 // 2 + 10) * HIDDEN  # bytes of the server that has half of the first weights and all of the second
MODES = {mode.name: mode for mode in (*training.MODES, training.ALL_MASTERS)}


def predicted(name: str, compute: float = 0.0) -> float:
    return training.predicted(MODES[name], EPOCHS, HIDDEN, RATE, compute).overlapped


@pytest.mark.slow
def test_clients_need_less_of_the_servers_links_and_all_masters_least() -> None:
    found = [mxnet_mpi.predicted(way, 12.5e6) for way in mxnet_mpi.WAYS]
    seconds = [one["predicted"] for one in found]
    assert seconds == sorted(seconds, reverse=True)
    assert all(one["predicted"] >= 0.999 * one["bound"] for one in found)


def test_every_mode_of_the_paper_has_its_example() -> None:
    assert [mode.name for mode in training.MODES] == [
        f"{group}-{kind}" for group in ("dist", "mpi") for kind in ("SGD", "ASGD", "ESGD")
    ]
    assert all((mxnet_mpi.lab.ROOT / mode.script).is_file() for mode in training.MODES)


@pytest.mark.slow
def test_an_epoch_is_its_compute_and_its_exchanges() -> None:
    for name in MODES:
        assert predicted(name, 3.0) == pytest.approx(predicted(name) + 3.0)
    assert predicted("dist-ASGD") == pytest.approx(7 * 12 * FULLEST / RATE)  # twelve workers share its link
    assert predicted("dist-ESGD") == pytest.approx(3 / EPOCHS * 12 * FULLEST / RATE)  # 140 iterations: 0, 64 and 128
    ring = 2 * 5 / 6 * sum(training.sizes(HIDDEN)) / RATE
    assert predicted("mpi-ESGD") == pytest.approx(7 * ring, rel=0.1)
    assert predicted("dist-SGD") > predicted("dist-ASGD")


@pytest.mark.slow
def test_push_and_pull_in_turn_take_longer() -> None:
    for mode in MODES.values():
        found = training.predicted(mode, EPOCHS, HIDDEN, RATE, 1.0)
        assert found.in_turn > found.overlapped
    found = training.predicted(MODES["dist-SGD"], EPOCHS, HIDDEN, RATE, 0.0)
    assert found.in_turn == pytest.approx(7 * 2 * 12 * FULLEST / RATE, rel=0.01)  # in, then out


def test_masters_relieve_the_servers() -> None:
    assert predicted("mpi-SGD, all masters") < predicted("mpi-SGD") < predicted("dist-SGD") / 2


def row(name: str, epoch: float, accuracies: tuple[float, ...]) -> dict[str, Any]:
    curve = [(epoch * number, accuracy) for number, accuracy in enumerate(accuracies, 1)]
    found = training.Epoch(0.3, epoch / 2)
    return {"mode": name, "curve": curve, "epoch_seconds": epoch, "predicted": found, "idle": 0.5}


@pytest.fixture
def trained() -> list[dict[str, Any]]:
    """Each mode with epochs of its own length; all but dist-ESGD reach 0.9 in their second."""
    names = [*MODES, f"dist-ESGD{training.COMPUTING}", f"mpi-ESGD{training.COMPUTING}"]
    last = {name: 0.8 if name == "dist-ESGD" else 0.9 for name in names}
    return [row(name, float(number), (0.5, last[name])) for number, name in enumerate(names, 1)]


def test_claims_hold_one_mode_against_another(trained: list[dict[str, Any]]) -> None:
    of = {r["mode"]: r["epoch_seconds"] for r in trained}
    found = {(r["what"], r["of"], r["over"]): r for r in training.claims(trained, 0.9)}
    epoch = found["epoch", "dist-SGD", "mpi-SGD"]
    assert epoch["paper"].startswith("6")
    assert epoch["predicted"] == epoch["measured"] == of["dist-SGD"] / of["mpi-SGD"]
    assert found["accuracy", "mpi-ASGD", "mpi-SGD"]["measured"] == of["mpi-ASGD"] / of["mpi-SGD"]
    assert found["accuracy", "dist-ESGD", "mpi-ESGD"]["measured"] is None


M = 4 * 2**20
RATE = 12.5e6  # 100 Mbit/s
TIME = M / RATE


def test_twelve_workers_of_their_own_fill_the_servers_links_in_and_out():
    """MXNet's dist_sync took 4.05 s here: each of 2 servers takes 12 x M/2 in, then gives 12 x M/2 out."""
    found = exchange(M, workers=12, servers=2, clients=12, rate=RATE)
    assert found.seconds == pytest.approx(12 * TIME)
    assert found.bound == pytest.approx(6 * TIME)


def test_sharded_masters_reach_the_bound_of_the_workers_links_when_pipelined():
    """11/6 M in and out of every worker; a prototype with 8 chunks, three in flight, took 0.72 s."""
    plain = exchange(M, 12, 2, 2, masters="all", rate=RATE)
    piped = exchange(M, 12, 2, 2, masters="all", rate=RATE, chunks=8, in_flight=3)
    assert (plain.bound, piped.bound) == pytest.approx((11 / 6 * TIME, 11 / 6 * TIME))
    assert plain.seconds == pytest.approx(22 / 6 * TIME)
    assert piped.bound <= piped.seconds <= 0.72


def test_one_master_a_client():
    """Reduce-scatter and gather 10/6 M, push M, answer M, scatter and allgather 10/6 M, one after the other."""
    found = exchange(M, 12, 2, 2, masters="one", rate=RATE)
    assert found.seconds == pytest.approx((10 / 6 + 2 + 10 / 6) * TIME)
    assert exchange(M, 12, 2, 2, masters="one", rate=RATE, chunks=8).seconds < 0.75 * found.seconds


def test_without_servers_it_is_the_collectives():
    found = exchange(M, 6, 0, 1, masters="all", rate=RATE)
    assert found.seconds == pytest.approx(10 / 6 * TIME)


@pytest.mark.parametrize("wrong", [{"clients": 5}, {"clients": 2, "masters": "some"}])
def test_what_it_cannot_do_it_says(wrong):
    with pytest.raises(ValueError, match=r"must divide|must be one or all"):
        exchange(M, 12, 2, **wrong)
