"""The same elements under other keys: training goes on as if nothing had happened, and memory can be given back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpips
from tests.choice import once
from tests.mpi.sizes import either_mpi

COMM = MPI.COMM_WORLD
SIZE, STEPS = 90, 3
STORES = [
    ("mpi_sync", {}),
    ("dist_sync", {"servers": 1}),
    ("mpi_sync", {"servers": 1, "masters": "all"}),
    ("dist_sync", {"servers": 2, "big_array": 1, "shared_memory": False}),
]


def all_ranks(ok: bool) -> bool:
    return bool(COMM.allreduce(int(ok), op=MPI.MIN))


def worker(kind: str, options: dict[str, Any]) -> mpips.KVStore | None:
    """A store; None on a server, whose work is done by then."""
    if COMM.size <= options.get("servers", 0):
        pytest.skip("needs a worker beside the servers")
    try:
        return mpips.create(kind, **options)
    except SystemExit:
        return None


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
    one = {"all": SIZE}
    found = []
    for plans in ([one, one, one], [one, {"a": 50, "b": 1, "c": 39}, {"a": 20, "d": 70}]):
        kv = worker(kind, options)
        if kv is not None:
            found.append(trained(kv, plans, compressed))
            kv.close()
    assert all_ranks(len(found) == 0 or np.allclose(*found, rtol=0, atol=0 if options else 1e-12))


@pytest.mark.parametrize("kind, options", STORES)
def test_a_forgotten_key_is_unknown_and_may_come_again(kind: str, options: dict[str, Any]) -> None:
    kv, ok = worker(kind, options), True
    if kv is not None:
        kv.init(["a", "b"], [np.zeros(5), np.zeros(5)])
        kv.push("a", np.ones(5))
        kv.forget(["a"])
        try:
            kv.pull("a", np.empty(5))
            ok = False
        except ValueError as error:
            ok = "'a' was not initialised" in str(error)
        kv.init("a", np.full(7, 3.0))
        out = np.empty(7)
        kv.pushpull("a", np.ones(7), out=out)
        ok &= np.array_equal(out, np.full(7, kv.num_workers))
        kv.close()
    assert all_ranks(ok)


@pytest.mark.parametrize("kind, options", STORES)
def test_what_does_not_fit_is_told(kind: str, options: dict[str, Any]) -> None:
    kv = worker(kind, options)
    if kv is not None:
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
        kv.close()


def test_pushes_that_staleness_holds_back_count_before_a_recut() -> None:
    options = {"servers": 1, "staleness": 1}
    if COMM.size < 3:
        pytest.skip("needs 2 workers beside the server")
    kv = worker("dist_async", options)
    if kv is not None:
        kv.init("b", np.zeros(5))
        kv.set_optimizer("add")
        for _ in range(0 if kv.rank else 3):
            kv.push("b", np.ones(5))
        kv.recut(["b"], {"c": 5})
        kv.pull("c", out := np.empty(5))
        assert (out == 3.0).all()
        kv.close()


@pytest.mark.parametrize("kind, options", STORES)
def test_keys_that_were_not_updated_equally_often_stay(kind: str, options: dict[str, Any]) -> None:
    kv, ok = worker(kind, options), True
    if kv is not None:
        kv.init(["a", "b"], [np.zeros(5), np.zeros(4)])
        kv.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        a, b = np.empty(5), np.empty(4)
        kv.pushpull("a", np.ones(5), out=a)
        try:
            kv.recut(["a", "b"], {"c": 9})
            said = "nothing was raised"
        except ValueError as error:
            said = str(error)
        ok = all("keys ['a', 'b'] were updated [0, 1] times" in each for each in kv.layout.workers.allgather(said))
        kv.pushpull(["a", "b"], [np.ones(5), np.ones(4)], out=[a, b])
        ok &= np.array_equal(a, np.full(5, -2.5 * kv.num_workers)) and np.array_equal(b, np.full(4, -kv.num_workers))
        kv.recut(["b"], {"c": 4})
        kv.close()
    assert all_ranks(ok)
