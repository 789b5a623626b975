"""The same elements under other keys: training goes on as if nothing had happened, and memory can be given back."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import mpips
from tests.choice import once
from tests.mpi.mpips.support import failure, need, run
from tests.mpi.sizes import either_mpi

SIZE, STEPS = 90, 3
STORES = [
    ("mpi_sync", {}),
    ("dist_sync", {"servers": 1}),
    ("mpi_sync", {"servers": 1, "masters": "all"}),
    ("dist_sync", {"servers": 2, "big_array": 1, "shared_memory": False}),
]


def steps(kv: mpips.KVStore, keys: dict[str, int], values: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng([seed, kv.rank])
    gradients = rng.normal(size=(STEPS, SIZE))
    cuts = np.cumsum(list(keys.values()))[:-1]
    for gradient in gradients:
        kv.pushpull(list(keys), np.split(gradient, cuts), out=np.split(values, cuts))


def trained(kv: mpips.KVStore, plans: list[dict[str, int]], compressed: bool) -> np.ndarray:
    """Values after some steps on each of the plans, one after the other."""
    values = np.linspace(0, 1, SIZE)
    kv.init(list(plans[0]), np.split(values, np.cumsum(list(plans[0].values()))[:-1]))
    kv.set_optimizer("adam", learning_rate=0.1)
    if compressed:
        kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})  # by element: cuts change nothing
    for seed, plan in enumerate(plans):
        if seed and plan != plans[seed - 1]:
            kv.recut(list(plans[seed - 1]), plan)
        steps(kv, plan, values, seed)
    return values


@either_mpi
@once(**{"kind, options": STORES}, compressed=[False, True])
def test_training_goes_on_bit_for_bit(kind: str, options: dict[str, Any], compressed: bool) -> None:
    need(**options)
    one = {"all": SIZE}
    found = [
        run(kind, partial(trained, plans=plans, compressed=compressed), **options)
        for plans in ([one, one, one], [one, {"a": 50, "b": 1, "c": 39}, {"a": 20, "d": 70}])
    ]
    assert found[0] is None or np.allclose(*found, rtol=0, atol=0 if options else 1e-12)


@pytest.mark.parametrize("kind, options", STORES)
def test_a_forgotten_key_is_unknown_and_may_come_again(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        kv.init(["a", "b"], [np.zeros(5), np.zeros(5)])
        kv.push("a", np.ones(5))
        kv.forget(["a"])
        assert "'a' was not initialised" in failure(lambda: kv.pull("a", np.empty(5)))
        kv.init("a", np.full(7, 3.0))
        kv.pushpull("a", np.ones(7), out := np.empty(7))
        assert (out == kv.num_workers).all()

    run(kind, body, **options)


@pytest.mark.parametrize("kind, options", STORES)
def test_what_does_not_fit_is_told(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        kv.init(["a", "b"], [np.zeros(5), np.zeros(5, np.float32)])
        for keys, new, sentence in (
            (["a"], {"c": 4}, "as many"),
            (["a", "b"], {"c": 10}, "each dtype by"),
            (["a"], {"b": 5}, "; choose another"),
            (["x"], {"c": 5}, "not initialised"),
            (["a", "a"], {"c": 10}, "name each once"),
            ([], {"c": 0}, "at least one"),
        ):
            with pytest.raises(ValueError, match=sentence):
                kv.recut(keys, new)
        for keys, sentence in ((["a", "x"], "not initialised"), (["a", "a"], "comes twice")):
            with pytest.raises(ValueError, match=sentence):
                kv.forget(keys)
        kv.recut(["a"], {"a": 2, "c": 3})
        kv.forget(["c", "b"])

    run(kind, body, **options)


def test_pushes_that_staleness_holds_back_count_before_a_recut() -> None:
    need(2, servers=1)

    def body(kv: mpips.KVStore) -> None:
        kv.init("b", np.zeros(5))
        kv.set_optimizer("add")
        for _ in range(0 if kv.rank else 3):
            kv.push("b", np.ones(5))
        kv.recut(["b"], {"c": 5})
        kv.pull("c", out := np.empty(5))
        assert (out == 3.0).all()

    run("dist_async", body, servers=1, staleness=1)


@pytest.mark.parametrize("kind, options", STORES)
def test_keys_that_were_not_updated_equally_often_stay(kind: str, options: dict[str, Any]) -> None:
    need(**options)

    def body(kv: mpips.KVStore) -> None:
        kv.init(["a", "b"], [np.zeros(5), np.zeros(4)])
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        kv.pushpull("a", np.ones(5), a := np.empty(5))
        said = failure(lambda: kv.recut(["a", "b"], {"c": 9}))
        assert "keys ['a', 'b'] were updated [0, 1] times" in said
        kv.pushpull(["a", "b"], [np.ones(5), np.ones(4)], [a, b := np.empty(4)])
        assert (a == -2.5 * kv.num_workers).all() and (b == -kv.num_workers).all()
        kv.recut(["b"], {"c": 4})

    run(kind, body, **options)
