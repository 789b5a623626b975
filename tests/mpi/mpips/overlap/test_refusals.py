"""Words, jobs and data that cannot be, or differ between ranks: every rank raises one sentence."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import mpips
from mpips.mlp import MLP
from mpips.training import Trainer
from tests.mpi.mpips.overlap.support import SIZES, STORES, WORLD, all_ranks, exchange_of, worker


def test_bad_words_are_told() -> None:
    kv = mpips.create("mpi_sync")
    model = MLP(SIZES)
    with pytest.raises(ValueError, match="overlap='fast' is unknown"):
        Trainer(model, kv, "sgd", overlap="fast")
    with pytest.raises(TypeError, match="object has no parameters"):
        Trainer(object(), kv, "sgd")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"a store, as mpips\.create makes it, not object"):
        Trainer(model, object(), "sgd")
    with pytest.raises(ValueError, match="needs a model in layers"):
        Trainer(object(), kv, "sgd", overlap="auto")  # type: ignore[arg-type]
    kv.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind, options", STORES)
@pytest.mark.parametrize(
    "name, there, here",
    [
        ("overlap", {"overlap": "auto"}, {"overlap": "layerwise"}),
        ("overlap", {"overlap": "single"}, {}),
        ("optimizer", {"learning_rate": 0.2}, {"learning_rate": 0.1}),
    ],
)
def test_arguments_that_differ_are_told_to_all(
    kind: str, options: dict[str, Any], name: str, there: dict[str, Any], here: dict[str, Any]
) -> None:
    def make(kv: Any) -> Any:
        return Trainer(MLP(SIZES), kv, "sgd", **(here if kv.rank else there))

    assert all_ranks(refused(kind, options, make, f"Trainer: argument {name!r} is .* on rank 0 and .* on rank 1"))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["review_every", "layer_elements[1]", "number of layers", "dtype of flat_parameters"])
def test_jobs_that_differ_are_told_to_all(name: str) -> None:
    def make(kv: Any) -> Any:
        other = name if kv.rank else ""
        hidden = [9, 5 if "elements" in other else 6, *([3] if "number" in other else [])]
        model = MLP([6, *hidden, 4], dtype="float64" if "dtype" in other else "float32")
        return exchange_of(kv, model, review_every=3 if "review" in other else 2)

    sentence = f"overlap: argument {re.escape(repr(name))} is .* on rank 0 and .* on rank 1"
    assert all_ranks(refused("mpi_sync", {}, make, sentence))


@pytest.mark.mpi(min_size=2)
def test_data_that_differ_are_told_to_all() -> None:
    def fit(kv: Any) -> Any:
        rows = 40 + kv.rank
        data = np.zeros((rows, 6), np.float32), np.zeros((rows, 4), np.float32)
        return Trainer(MLP([6, 4]), kv, "sgd", overlap="auto").fit(*data, batch_size=2, epochs=1)

    assert all_ranks(refused("mpi_sync", {}, fit, r"fit: argument 'x' is \(40, 6\) on rank 0 and \(41, 6\) on rank 1"))


def test_a_batch_of_one_rank_that_cannot_be_is_told_to_all() -> None:
    """While the layers are measured, before anything is sent."""

    def step(kv: Any) -> Any:
        features = 6 if kv.rank < kv.num_workers - 1 else 5
        trainer = Trainer(MLP([6, 4]), kv, "sgd", overlap="auto")
        return trainer.step(np.zeros((2, features), np.float32), np.zeros((2, 4), np.float32))

    assert all_ranks(refused("mpi_sync", {}, step, f"(rank {WORLD.size - 1}: )?x is .2, 5."))


def refused(kind: str, options: dict[str, Any], make: Any, sentence: str) -> bool:
    """Whether `make(kv)` raises this sentence; True on a server, and where one worker has nobody to differ from."""
    kv = worker(kind, options)
    if kv is None or (kv.num_workers == 1 and "on rank 1" in sentence):
        if kv is not None:
            kv.close()
        return True
    try:
        make(kv)
    except (ValueError, TypeError) as error:
        return re.search(sentence, str(error)) is not None
    finally:
        kv.close()
    return False
