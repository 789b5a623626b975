"""JAX on mpips: sums over all ranks, and pushes and pulls of a store, inside `jit` and outside; pytrees of arrays.

    gradients = mpips.jax.allreduce(gradients)              # the mean over all ranks, leaf by leaf
    weights = mpips.jax.pushpull(kv, "w", gradients)        # kv.init("w", leaves) before

Calls are ordered callbacks: they run in the order in which the program makes them, on every rank alike. All leaves of a
tree go in one call. `jax.vmap` and `jax.grad` through a call are not supported, and JAX refuses them: take gradients
first, then call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from mpi4py import MPI

import collectives
from collectives.call import operation


def allreduce(tree: Any, op: str = "mean", comm: MPI.Comm | None = None, algorithm: str = "auto") -> Any:
    """Every leaf of a pytree reduced over all ranks of `comm` (None: COMM_WORLD): a tree of the same shapes and types.

    Collective; `op` and `algorithm` as in `collectives.allreduce`, errors too. An `op` that does not fit the leaves is
    refused when the call is traced.

    >>> mpips.jax.allreduce({"w": jnp.ones(3), "b": jnp.zeros(())})
    """
    for leaf in jax.tree.leaves(tree):
        operation(op, jax.numpy.result_type(leaf))

    def run(*leaves: Any) -> list[Any]:
        arrays = [np.array(leaf) for leaf in leaves]  # JAX's are not to be written to
        collectives.grouped_allreduce(arrays, comm, op, algorithm)
        return arrays

    return _called(run, tree)


def broadcast(tree: Any, root: int = 0, comm: MPI.Comm | None = None) -> Any:
    """The root's leaves for all ranks, of the same shapes and types everywhere. Collective."""

    def run(*leaves: Any) -> list[Any]:
        arrays = [np.array(leaf) for leaf in leaves]
        for array in arrays:
            collectives.broadcast(array, comm, root)
        return arrays

    return _called(run, tree)


def init(kv: Any, name: str, tree: Any) -> None:
    """Make a key of a store for every leaf of a pytree, with rank 0's values. Outside `jit`; collective, blocking."""
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(tree)]
    kv.init(keys(name, len(leaves)), leaves)


def pushpull(kv: Any, name: str, tree: Any) -> Any:
    """Push every leaf to its key, and what the keys then hold, as a tree. `kv` is a store of `mpips.create`, whose keys
    `init(kv, name, ...)` has made. Blocking; errors as of `kv.pushpull`."""

    def run(*leaves: Any) -> list[Any]:
        arrays = [np.array(leaf) for leaf in leaves]
        kv.pushpull(keys(name, len(arrays)), arrays)
        return arrays

    return _called(run, tree)


def pull(kv: Any, name: str, tree: Any) -> Any:
    """Return what the keys hold, as a tree like `tree`, whose values do not count. Blocking."""

    def run(*leaves: Any) -> list[Any]:
        arrays = [np.empty_like(leaf) for leaf in leaves]
        kv.pull(keys(name, len(arrays)), arrays)
        return arrays

    return _called(run, tree)


def keys(name: str, leaves: int) -> list[str]:
    """The keys of a tree's leaves."""
    return [f"{name}/{number}" for number in range(leaves)]


def _called(run: Any, tree: Any) -> Any:
    """`run` on the leaves, when the computation comes to it."""
    leaves, shape = jax.tree.flatten(tree)
    if not leaves:
        return tree
    results: Sequence[Any] = io_callback(
        run, [jax.ShapeDtypeStruct(np.shape(leaf), jax.numpy.result_type(leaf)) for leaf in leaves], *leaves,
        ordered=True,
    )  # fmt: skip
    return jax.tree.unflatten(shape, results)
