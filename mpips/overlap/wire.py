"""Groups of layers as messages of a store: their keys, and the calls that push and pull them.

Gradients and parameters of all layers lie in one flat array each, so a group is one interval and nothing is packed. A
key is what pushes and pulls have in common: where both are cut alike, a group is one key; elsewhere it is several,
which travel together. Without servers a push is an allreduce that brings the parameters back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import measure
from .stage import Groups, from_ends
from .strategies.joint import JointPlan, Link

if TYPE_CHECKING:
    from mpips.runtime.engine import Handle
    from mpips.store import KVStore

Group = tuple[int, int]
SHORTEST = 1e-6
"""Seconds that a push takes at least, whatever the clocks say."""


class Wire:
    """The messages of layers `elements` (parameters of each) between flat arrays and a store.

    Groups are (first, last) from 1. `plan` or `sample` makes their keys, collectively over the workers.
    """

    def __init__(
        self, kv: KVStore, gradients: np.ndarray, parameters: np.ndarray, elements: Sequence[int], name: str = "layers"
    ) -> None:
        self._kv, self._gradients, self._parameters, self._name = kv, gradients, parameters, name
        self._elements = elements
        self._offsets = np.concatenate(([0], np.cumsum(elements)))
        self._keys: dict[Group, tuple[Group, ...]] = {}
        """The keys of every group, themselves groups."""

    @property
    def one_way(self) -> bool:
        """Whether a push brings the parameters back: there are no servers."""
        return not self._kv.layout.num_servers

    @property
    def link(self) -> Link:
        """Whether pushes and pulls go on beside each other. Those that hold a client's collectives take turns."""
        return "shared" if self._kv.type.startswith("mpi_") else "duplex"

    def plan(self, plan: JointPlan) -> None:
        """Make the keys of a plan: the first ones with rank 0's parameters, later ones from those before."""
        groups = {*plan.push, *plan.pull}
        keys = from_ends(sorted({last for _, last in groups}))
        before = dict.fromkeys(key for found in self._keys.values() for key in found)
        self._keys = {g: tuple(key for key in keys if g[0] <= key[0] and key[1] <= g[1]) for g in groups}
        if not before:
            self._kv.init([self._key(key) for key in keys], [self._parameters[self._interval(key)] for key in keys])
        elif set(before) != set(keys):
            sizes = [int(self._offsets[last] - self._offsets[first - 1]) for first, last in keys]
            self._kv.recut([self._key(key) for key in sorted(before)], dict(zip(map(self._key, keys), sizes)))

    def sample(self, groups: Iterable[Group]) -> None:
        """Make a key for every group, though they share layers: to measure messages, not to train."""
        self._keys = {group: (group,) for group in groups}
        self._kv.init([self._key(group) for group in self._keys],
                      [self._parameters[self._interval(group)] for group in self._keys])

    def forget(self) -> None:
        """Give the keys up; collective."""
        self._kv.forget([self._key(key) for found in self._keys.values() for key in found])
        self._keys = {}

    def push(self, first: int, last: int) -> Handle:
        """Start to push the gradients of layers first..last, after the pushes before."""
        keys = self._keys[first, last]
        names, gradients = [self._key(key) for key in keys], [self._gradients[self._interval(key)] for key in keys]
        if self.one_way:
            return self._kv.ipushpull(names, gradients, out=[self._parameters[self._interval(key)] for key in keys])
        return self._kv.ipush(names, gradients, turns=["push"])

    def taken(self, first: int, last: int, push: Handle) -> Handle:
        """When what `push` sends has come to the servers."""
        return self._kv.taken([self._key(key) for key in self._keys[first, last]], push)

    def pull(self, first: int, last: int, early: bool = False) -> Handle:
        """Start to pull the parameters of layers first..last, after the pulls before and after the layers' pushes.

        One after the other, as in the model: at once, the first would share the servers' links with those behind it.
        But `early` ones are asked for right behind their push, and the servers answer when it has come from all, which
        keeps the order too: a question that waits for the pull before would then wait in the link behind later pushes.
        """
        keys = self._keys[first, last]
        names = [self._key(key) for key in keys]
        parameters = [self._parameters[self._interval(key)] for key in keys]
        return self._kv.ipull(names, parameters, turns=() if early else ["pull"])

    def costs(
        self, slowest: Callable[[float], float], repeats: int = 5, modes: Sequence[bool] = (True, False)
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """(startup seconds, seconds a byte) of a push and of a pull, as this job's messages cost in a row (measure.py).

        What a push takes ends when the pull behind it can begin: when the servers have everybody's. Without servers
        both are the allreduce's. Collective, blocking; the keys for it are given up again.
        """
        wanted = measure.runs(self._elements)
        self.sample(dict.fromkeys(group for groups in wanted for group in groups))
        pull = 0.0, 0.0
        if not self.one_way:
            times = measure.seconds(self._pull_all, wanted, slowest, repeats, modes)
            pull = measure.costs(self._elements, wanted, times)
        times = measure.seconds(self._push_all, wanted, slowest, repeats, modes)
        if not self.one_way:
            behind = [pull[0] + pull[1] * measure.group_bytes(self._elements, *groups[0]) for groups in wanted]
            times = [max(both - back, SHORTEST) for both, back in zip(times, behind, strict=True)]
        push = measure.costs(self._elements, wanted, times)
        self.forget()
        return push, push if self.one_way else pull

    def _pull_all(self, groups: Groups) -> list[Handle]:
        return [self.pull(*group) for group in groups]

    def _push_all(self, groups: Groups) -> list[Handle]:
        """Push as backward does, and wait for the servers by pulling what was pushed last."""
        handles = [self.push(*group) for group in reversed(groups)]
        return handles if self.one_way else [*handles, self.pull(*groups[0])]

    def _interval(self, group: Group) -> slice:
        return slice(int(self._offsets[group[0] - 1]), int(self._offsets[group[1]]))

    def _key(self, group: Group) -> str:
        return f"overlap {self._name} {group[0]}-{group[1]}"
