"""Several slices of a network behind one rank, which speaks to the servers for them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from mpi4py import MPI

from .network import Network
from .slices import interval


class Funnel:
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

    def up(self, flat: np.ndarray, whole: np.ndarray) -> None:
        """whole = all members' `flat`."""
        if not self.alone:
            kind = MPI._typedict[flat.dtype.char]
            self._comm.Gatherv(flat, [whole, self._counts, None, kind] if self.leads else None, root=0)

    def down(self, whole: np.ndarray, flat: np.ndarray) -> None:
        """Every member's `flat` from `whole`."""
        if not self.alone:
            kind = MPI._typedict[flat.dtype.char]
            self._comm.Scatterv([whole, self._counts, None, kind] if self.leads else None, flat, root=0)

    def keyed(self, whole: np.ndarray) -> dict[str, np.ndarray]:
        """Views of `whole`, one for each slice's layer that is not empty, by the name of its key."""
        cuts = np.cumsum([0, *self._layers.ravel()]).tolist()
        names = [f"slice{self.first + member}.layer{layer}" for member, layer in np.ndindex(*self._layers.shape)]
        return {name: whole[start:stop] for name, (start, stop) in zip(names, pairwise(cuts)) if stop > start}
