"""Pushes and pulls of a store for JAX, inside `jit` and outside: pytrees of arrays, with a key for every leaf."""

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
    """A pull, or a push and a pull, of the keys of a tree."""

    kind: str
    kv: KVStore
    name: str

    def __str__(self) -> str:
        return f"mpips.jax.{self.kind} of {self.name!r}"

    @property
    def order(self) -> int:
        return id(self.kv)

    def shapes(self, inputs: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in inputs]

    def run(self, inputs: list[NDArray[Any]], outputs: list[NDArray[Any]]) -> None:
        names = keys(self.name, len(outputs))
        if self.kind == "pull":
            self.kv.pull(names, outputs)
        else:
            self.kv.pushpull(names, inputs, outputs)


def init(kv: KVStore, name: str, tree: Tree) -> None:
    """Make a key of a store for every leaf of a pytree, with rank 0's values. Outside `jit`; collective, blocking."""
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(tree)]
    kv.init(keys(name, len(leaves)), leaves)


def pushpull(kv: KVStore, name: str, tree: Tree) -> Tree:
    """Push every leaf to its key, and return what the keys then hold, as a tree.

    `kv` is a store of `mpips.create`, whose keys `init(kv, name, ...)` has made. Blocking; errors as of `kv.pushpull`.
    """
    return _called(StoreCall("pushpull", kv, name), tree)


def pull(kv: KVStore, name: str, tree: Tree) -> Tree:
    """Return what the keys hold, as a tree like `tree`, whose values do not count. Blocking."""
    return _called(StoreCall("pull", kv, name), tree)


def keys(name: str, leaves: int) -> list[str]:
    """Return the keys of a tree's leaves."""
    return [f"{name}/{number}" for number in range(leaves)]


def _called(call: StoreCall, tree: Tree) -> Tree:
    leaves, shape = jax.tree.flatten(tree)
    return jax.tree.unflatten(shape, bind(call, leaves)) if leaves else tree
