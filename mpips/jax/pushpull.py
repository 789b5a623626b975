"""Pushes and pulls of a store for JAX, inside and outside of `jit`. Every leaf of a pytree of arrays has a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import NDArray

from mpips.jax.primitive import JaxCall, Tree, bind

if TYPE_CHECKING:
    from mpips.store.api import KVStore


@dataclass(frozen=True)
class StoreCall(JaxCall):
    """A call on all keys of a tree: a pull, or a push followed by a pull. `kind` is "pull" or "pushpull"."""

    kind: str
    kv: KVStore
    name: str

    def __str__(self) -> str:
        return f"mpips.jax.{self.kind} of {self.name!r}"

    @property
    def order(self) -> int:
        return id(self.kv)

    def shapes(self, inputs: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]

    def run(self, inputs: list[NDArray[Any]], outputs: list[NDArray[Any]]) -> None:
        names = keys(self.name, len(outputs))
        if self.kind == "pull":
            self.kv.pull(names, outputs)
        else:
            self.kv.pushpull(names, inputs, outputs)


def init(kv: KVStore, name: str, tree: Tree) -> None:
    """Create a key of a store for every leaf of a pytree, with rank 0's values.

    Collective over the workers, blocking. Call it outside of `jit`.

    Args:
        kv: A store of `mpips.create`.
        name: The prefix of the keys. They are "name/0", "name/1" and so on, in the order of `jax.tree.leaves`.
        tree: Arrays with the first values.

    Raises:
        ValueError: A key exists already, or the trees differ between workers. All workers raise it.

    Example:
        >>> mpips.jax.init(kv, "layer", {"b": jnp.zeros(2), "w": jnp.ones((3, 2))})  # after kv = mpips.create(...)
    """
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(tree)]
    kv.init(keys(name, len(leaves)), leaves)


def pushpull(kv: KVStore, name: str, tree: Tree) -> Tree:
    """Push every leaf of a pytree to its key, and pull the values of the keys afterwards.

    Blocking: later calls of mpips wait until this call has ended.

    Args:
        kv: A store of `mpips.create`.
        name: The name that was passed to `mpips.jax.init`.
        tree: Gradients, with the shapes and dtypes of the keys.

    Returns:
        A tree of the same form with the values.

    Raises:
        jax.errors.JaxRuntimeError: `kv.pushpull` raised an error when the call ran. It has the same message.

    Example:
        >>> mpips.jax.init(kv, "weights", [jnp.zeros(2)])  # after kv = mpips.create(...)
        >>> kv.set_optimizer("sgd", learning_rate=0.5, rescale=1 / kv.num_workers)
        >>> mpips.jax.pushpull(kv, "weights", [jnp.ones(2)])
        [Array([-0.5, -0.5], dtype=float32)]
    """
    return _called(StoreCall("pushpull", kv, name), tree)


def pull(kv: KVStore, name: str, tree: Tree) -> Tree:
    """Pull the values of the keys of a pytree. Blocking: later calls of mpips wait until this call has ended.

    Args:
        kv: A store of `mpips.create`.
        name: The name that was passed to `mpips.jax.init`.
        tree: Arrays with the shapes and dtypes of the keys. Their values are ignored.

    Returns:
        A tree of the same form with the values.

    Raises:
        jax.errors.JaxRuntimeError: `kv.pull` raised an error when the call ran. It has the same message.

    Example:
        >>> mpips.jax.init(kv, "bias", [jnp.ones(2)])  # after kv = mpips.create(...)
        >>> mpips.jax.pull(kv, "bias", [jnp.zeros(2)])
        [Array([1., 1.], dtype=float32)]
    """
    return _called(StoreCall("pull", kv, name), tree)


def keys(name: str, leaves: int) -> list[str]:
    """Return the names of the keys for a tree that has `leaves` leaves."""
    return [f"{name}/{number}" for number in range(leaves)]


def _called(call: StoreCall, tree: Tree) -> Tree:
    leaves, shape = jax.tree.flatten(tree)
    return jax.tree.unflatten(shape, bind(call, leaves)) if leaves else tree
