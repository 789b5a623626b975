"""Groups of layers as messages of a store: their keys, and the calls that push and pull them.

Gradients and parameters of all layers lie in one flat array each, so a group is one interval and nothing is packed. A
key is what pushes and pulls have in common: where both are cut alike, a group is one key; elsewhere it is several,
which travel together. Without servers a push is an allreduce that brings the parameters back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from .problem import Group, JointPlan, Link, from_ends


class Message(Protocol):
    """A message under way: what a store's calls in steps return."""

    @property
    def started(self) -> float:
        """time.perf_counter() when its operation began."""
        ...

    @property
    def ended(self) -> float:
        """And when it ended."""
        ...

    @property
    def done(self) -> bool: ...

    def wait(self) -> Any:
        """Until it has ended. Blocking; raises what made it fail."""
        ...


class Carrier(Protocol):
    """Who starts messages of layers first..last and returns at once."""

    @property
    def one_way(self) -> bool:
        """Whether a push brings the parameters back."""
        ...

    def push(self, first: int, last: int) -> Message: ...

    def taken(self, first: int, last: int, push: Any) -> Message:
        """Ends when what `push` sends is where it is to be."""
        ...

    def pull(self, first: int, last: int, early: bool = False) -> Message:
        """`early`: right behind its push, while others are to be pushed."""
        ...


class Store(Protocol):
    """The calls of `mpips.KVStore` that overlap needs."""

    @property
    def type(self) -> str: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def layout(self) -> Any:
        """`num_servers`; `workers`, the workers' communicator."""
        ...

    @property
    def settings(self) -> Any:
        """`agree(what, items, refusal, noun, data)`: all workers ask for the same, and learn everybody's data."""
        ...

    def set_optimizer(self, optimizer: Any) -> None: ...

    def init(self, key: Any, value: Any) -> None: ...

    def recut(self, keys: Sequence[Any], new: Mapping[Any, int]) -> None: ...

    def forget(self, keys: Sequence[Any]) -> None: ...

    def ipush(self, key: Any, value: Any, *, turns: Sequence[str]) -> Message: ...

    def taken(self, key: Any, push: Any) -> Message: ...

    def ipull(self, key: Any, out: Any, *, turns: Sequence[str]) -> Message: ...

    def ipushpull(self, key: Any, value: Any, out: Any) -> Message: ...


class StoreMessages:
    """The messages of layers `elements` (parameters of each) between flat arrays and a store: a `Carrier`.

    gradients, parameters: 1-D, C-contiguous, of one dtype and sum(elements) elements. Groups are (first, last) from 1.
    `plan` or `sample` makes their keys, collectively over the workers.
    """

    def __init__(
        self, kv: Store, gradients: np.ndarray, parameters: np.ndarray, elements: Sequence[int], name: str = "layers"
    ) -> None:
        self._kv, self._gradients, self._parameters, self._name = kv, gradients, parameters, name
        self.elements = elements
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
            self._init(keys)
        elif set(before) != set(keys):
            sizes = [int(self._offsets[last] - self._offsets[first - 1]) for first, last in keys]
            self._kv.recut(self._names(sorted(before)), dict(zip(self._names(keys), sizes)))

    def sample(self, groups: Iterable[Group]) -> None:
        """Make a key for every group, though they share layers: to measure messages, not to train."""
        self._keys = {group: (group,) for group in groups}
        self._init(self._keys)

    def forget(self) -> None:
        """Give the keys up; collective."""
        self._kv.forget(self._names(key for found in self._keys.values() for key in found))
        self._keys = {}

    def push(self, first: int, last: int) -> Message:
        """Start to push the gradients of layers first..last, after the pushes before."""
        keys = self._keys[first, last]
        gradients = self._parts(self._gradients, keys)
        if self.one_way:
            return self._kv.ipushpull(self._names(keys), gradients, out=self._parts(self._parameters, keys))
        return self._kv.ipush(self._names(keys), gradients, turns=["push"])

    def taken(self, first: int, last: int, push: Message) -> Message:
        """When what `push` sends has come to the servers."""
        return self._kv.taken(self._names(self._keys[first, last]), push)

    def pull(self, first: int, last: int, early: bool = False) -> Message:
        """Start to pull the parameters of layers first..last, after the pulls before and after the layers' pushes.

        One after the other, as in the model: at once, the first would share the servers' links with those behind it.
        But `early` ones are asked for right behind their push, and the servers answer when it has come from all, which
        keeps the order too: a question that waits for the pull before would then wait in the link behind later pushes.
        """
        keys = self._keys[first, last]
        parameters = self._parts(self._parameters, keys)
        return self._kv.ipull(self._names(keys), parameters, turns=() if early else ["pull"])

    def _init(self, keys: Iterable[Group]) -> None:
        keys = list(keys)
        self._kv.init(self._names(keys), self._parts(self._parameters, keys))

    def _parts(self, flat: np.ndarray, keys: Iterable[Group]) -> list[np.ndarray]:
        """The interval of each key."""
        return [flat[int(self._offsets[first - 1]) : int(self._offsets[last])] for first, last in keys]

    def _names(self, keys: Iterable[Group]) -> list[str]:
        return [f"overlap {self._name} {first}-{last}" for first, last in keys]
