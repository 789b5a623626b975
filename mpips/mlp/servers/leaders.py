"""Groups of slices, where servers are fewer than slices: one rank of each, the leader, speaks to the servers for it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from mpi4py import MPI

from mpips.optimizers.base import Optimizer
from mpips.store.checkpoint.source import Handle, Store

from mpips.mlp.intervals import interval
from mpips.mlp.network.network import Network


class WeightStore(Protocol):
    """What is used of a `KVStore` that keeps weights. Arrays are 1-D views, one a key; see there."""

    @property
    def settings(self) -> Store:
        """What a checkpoint needs of it."""

    def init(self, key: Any, value: Any) -> None: ...

    def set_optimizer(self, optimizer: str | Optimizer) -> None: ...

    def push(self, key: Any, value: Any) -> None: ...

    def pull(self, key: Any, out: Any) -> None: ...

    def pushpull(self, key: Any, value: Any, out: Any = None) -> None: ...

    def ipush(self, key: Any, value: Any, priority: int = 0) -> Handle: ...

    def ipull(self, key: Any, out: Any, priority: int = 0) -> Handle: ...


class SliceGroup:
    """The ranks of one model, in `groups` groups of neighbours; the first of each is its leader.

    Everything here is collective over a group. Arrays are laid out as the flat parameters: a member's its own slice's,
    the leader's `whole` all members' one behind the other. A group of one copies nothing.
    """

    def __init__(self, network: Network, model_comm: MPI.Comm, groups: int) -> None:
        mine = [interval(model_comm.size, groups, g) for g in range(groups)]
        group = next(g for g, (_, stop) in enumerate(mine) if model_comm.rank < stop)
        self.first = mine[group][0]
        self._comm = model_comm.Split(group, model_comm.rank)
        self.alone = self._comm.size == 1
        self.leads = self._comm.rank == 0
        elements = np.array(network.layer_elements, np.int64)
        everyone = np.empty((self._comm.size, len(elements)), np.int64)
        self._comm.Allgather(elements, everyone)
        self._layers = everyone
        self._counts = everyone.sum(axis=1).tolist()

    def whole(self, flat: np.ndarray) -> np.ndarray:
        """Memory on the leader for all members' arrays like `flat`: `flat` itself if there is one member; else empty
        on the others."""
        return flat if self.alone else np.empty(sum(self._counts) if self.leads else 0, flat.dtype)

    def gather(self, flat: np.ndarray, whole: np.ndarray) -> None:
        """whole = all members' `flat`."""
        if not self.alone:
            kind = MPI._typedict[flat.dtype.char]
            self._comm.Gatherv(flat, [whole, self._counts, None, kind] if self.leads else None, root=0)

    def scatter(self, whole: np.ndarray, flat: np.ndarray) -> None:
        """Every member's `flat` from `whole`."""
        if not self.alone:
            kind = MPI._typedict[flat.dtype.char]
            self._comm.Scatterv([whole, self._counts, None, kind] if self.leads else None, flat, root=0)

    def keyed(self, whole: np.ndarray) -> dict[str, np.ndarray]:
        """Views of `whole`, one for each slice's layer that is not empty, by the name of its key."""
        cuts = np.cumsum([0, *self._layers.ravel()]).tolist()
        names = [f"slice{self.first + member}.layer{layer}" for member, layer in np.ndindex(*self._layers.shape)]
        return {name: whole[start:stop] for name, (start, stop) in zip(names, pairwise(cuts)) if stop > start}

    def keep(self, store: WeightStore | None, whole: np.ndarray, optimizer: Optimizer) -> dict[str, np.ndarray]:
        """Let the servers behind `store` keep `whole`, updated by `optimizer`; the array of each of its keys.

        Empty where this rank does not speak to servers (`store` is None), and where there is nothing to keep: slices
        may be empty. Collective over the workers of the store.
        """
        if store is None:
            return {}
        named = self.keyed(whole)
        if named:
            store.init(list(named), list(named.values()))
            store.set_optimizer(optimizer)
        return named
