"""A word that is nearly right, or another library's, is answered with the one that was meant."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import collectives
import mpips
from mpips.mlp import MLP

CASES: list[tuple[Callable[[mpips.KVStore], object], str]] = [
    (lambda kv: mpips.create("mpi-synch"), "mpi_sync"),
    (lambda kv: kv.push("weight", np.zeros(3)), "weights"),
    (lambda kv: kv.set_optimizer("adm"), "adam"),
    (lambda kv: kv.set_optimizer("adam", lr=0.1), "learning_rate"),
    (lambda kv: kv.set_optimizer("sgd", momentm=0.1), "momentum"),
    (lambda kv: kv.set_gradient_compression({"type": "2bt"}), "2bit"),
    (lambda kv: collectives.allreduce(np.ones(3), op="avg"), "mean"),
    (lambda kv: collectives.allreduce(np.ones(3), algorithm="rings"), "ring"),
    (lambda kv: collectives.plan("allreduc", np.ones(3)), "allreduce"),
    (lambda kv: MLP((3, 2), loss="sofmax"), "softmax"),
]


@pytest.fixture(scope="module")
def kv() -> mpips.KVStore:
    store = mpips.create("local")
    store.init("weights", np.zeros(3))
    return store


@pytest.mark.parametrize("call, meant", CASES, ids=[meant for _, meant in CASES])
def test_what_was_meant_is_named(kv: mpips.KVStore, call: Callable[[mpips.KVStore], object], meant: str) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"\(did you mean '{meant}'\?\)"):
        call(kv)


@pytest.mark.parametrize(
    "call, cure",
    [
        (lambda kv: mpips.KVStore("mpi_sync"), "mpips.create"),
        (lambda kv: kv.push("weights", 1.0), r"push\('weights', numpy.asarray\(value\)\)"),
        (lambda kv: kv.push("weights", [1.0, 2.0, 3.0]), "not a list of float: make an array of it"),
        (lambda kv: kv.init("names", np.array(["1.5"])), r"astype\(float\)"),
        (lambda kv: kv.set_optimizer("adam", learning_rate="0.1"), "give a number, not a str"),
        (lambda kv: collectives.allreduce([1.0, 2.0]), r"numpy.asarray\(x\)"),
    ],
)
def test_what_is_no_array_or_number_is_answered_with_the_call(
    kv: mpips.KVStore, call: Callable[[mpips.KVStore], object], cure: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=cure):
        call(kv)
