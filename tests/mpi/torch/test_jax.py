"""JAX: sums and stores inside `jit`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: pip install 'mpips[jax]'")

import mpips.jax  # noqa: E402
from tests.mpi.torch.support import WORLD  # noqa: E402


def test_an_allreduce_inside_jit() -> None:
    @jax.jit
    def mean(tree: dict) -> dict:
        return mpips.jax.allreduce({name: value * 2 for name, value in tree.items()})

    found = mean({"a": jax.numpy.full((3, 2), float(WORLD.rank)), "b": jax.numpy.asarray(float(WORLD.rank))})
    off = max(float(np.abs(np.asarray(value) - (WORLD.size - 1)).max()) for value in found.values())
    everybody = WORLD.allgather(off)
    assert max(everybody) == 0


def test_a_store_inside_jit() -> None:
    tree = {"w": jax.numpy.zeros((4, 3)), "b": jax.numpy.ones(2)}
    kv = mpips.create("mpi_sync")
    mpips.jax.init(kv, "model", tree)
    step = jax.jit(lambda gradients: mpips.jax.pushpull(kv, "model", gradients))
    found = jax.block_until_ready(step({"w": jax.numpy.ones((4, 3)), "b": jax.numpy.ones(2)}))
    kv.close()
    everybody = WORLD.allgather([float(np.asarray(found[name]).mean()) for name in "wb"])
    assert all(each == [float(WORLD.size)] * 2 for each in everybody)


def test_an_optax_step() -> None:
    optax = pytest.importorskip("optax")
    optimizer = optax.adam(0.1)

    @jax.jit
    def step(weights, state, x):
        gradients = jax.grad(lambda w: ((w * x - 1) ** 2).mean())(weights)
        updates, state = optimizer.update(mpips.jax.allreduce(gradients), state)
        return optax.apply_updates(weights, updates), state

    weights = jax.numpy.zeros(3)
    state = optimizer.init(weights)
    for number in range(5):
        weights, state = step(weights, state, jax.numpy.full(3, 1.0 + WORLD.rank + number))
    everybody = WORLD.allgather(np.asarray(weights).tolist())
    assert all(each == everybody[0] for each in everybody)


@pytest.mark.parametrize(
    ("op", "dtype", "words"),
    [
        ("foo", "float32", "unknown operation 'foo': choose one of"),
        ("mean", "int32", "the mean of int32 elements is no int32: use op='sum'"),
        ("sum", "bool", "cannot reduce elements of type bool: use"),
        (3, "float32", "op 3 is of type int: pass one of"),
    ],
)
def test_an_operation_that_does_not_fit_is_refused_when_traced(op: str, dtype: str, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        jax.make_jaxpr(lambda x: mpips.jax.allreduce({"x": x}, op))(jax.numpy.ones(3, dtype))


@pytest.mark.parametrize("through", [jax.vmap, jax.grad])
def test_jax_refuses_what_is_not_supported(through: Any) -> None:
    with pytest.raises(ValueError, match=r"(?i)io.?callback"):
        through(lambda x: mpips.jax.allreduce(x).sum())(jax.numpy.ones((2, 3)))
