"""Lay out a model's layers so that groups of layers travel as messages of a store, and push and pull these messages.

The gradients of all layers are in one flat array, and the parameters in another. So a group is an interval of an array,
and nothing has to be packed. A key is an interval that neither the push groups nor the pull groups divide. If pushes
and pulls have the same groups, each group is one key. Otherwise a group may be several keys, which travel together.
Without servers a push is an allreduce that brings the parameters back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpips.overlap.problem import Group, JointPlan, Link, from_ends

if TYPE_CHECKING:
    from mpips.store.api import KVStore
    from mpips.store.runtime.engine import Handle

# A function that a model calls when it reaches a layer. The argument is the number of the layer, from 0.
Hook = Callable[[int], Any]
ARRAYS = ("flat_parameters", "flat_gradients", "layer_elements")
HOOKS = ("before", "ready")


class LayeredModel(Protocol):
    """A model whose layers follow each other in flat arrays, and which calls hooks when it reaches each layer.

    The arrays are 1-D, C-contiguous, of one dtype, and stay where they are. `lay_out` makes such arrays, with views in
    the shapes of the layers. Layers are in forward order, and hooks count them from 0.
    """

    @property
    def flat_parameters(self) -> np.ndarray: ...

    @property
    def flat_gradients(self) -> np.ndarray: ...

    @property
    def layer_elements(self) -> Sequence[int]:
        """Number of parameters of each layer. A layer has at least one."""
        ...

    def loss_and_gradients(
        self, x: np.ndarray, y: np.ndarray, before: Hook | None = None, ready: Hook | None = None
    ) -> float:
        """Run forward and backward, and return the loss.

        Without hooks this is the method that every model of a Trainer has.

        Args:
            before: Call before(layer) in ascending order, when the layer's parameters are needed next.
            ready: Call ready(layer) in descending order, when the layer's gradients are complete. After this call the
                layer's parameters may be overwritten.
        """
        ...


def lay_out(
    layers: Sequence[Sequence[Sequence[int]]],
    dtype: str = "float32",
    empty: Callable[[int, str], np.ndarray] = np.empty,
) -> tuple[np.ndarray, list[list[np.ndarray]], list[int]]:
    """Allocate one flat array for the parameters (or gradients) of all layers. Local. The contents are undefined.

    Args:
        layers: For every layer the shapes of its arrays.
        dtype: The dtype of all arrays.
        empty: Allocates the flat array. Give `mpips.empty` for memory that the ranks of a node share.

    Returns:
        The flat array; for every layer its views of the array, in the given shapes; and the elements of each layer.

    >>> flat, views, elements = mpips.overlap.lay_out([[(20, 64), (20,)], [(10, 20), (10,)]])
    >>> flat.size, views[1][0].shape, elements
    (1510, (10, 20), [1300, 210])
    """
    elements = [sum(int(np.prod(shape)) for shape in shapes) for shapes in layers]
    flat = empty(sum(elements), dtype)
    views: list[list[np.ndarray]] = []
    at = 0
    for shapes in layers:
        views.append([])
        for shape in shapes:
            size = int(np.prod(shape))
            views[-1].append(flat[at : at + size].reshape(shape))
            at += size
    return flat, views, elements


def check_model(model: object, what: str) -> None:
    """Raise ValueError if an object is not a `LayeredModel`. The error message says what the object lacks.

    Args:
        model: The object.
        what: The feature that needs such a model, for the error message, such as "overlap='auto'".

    >>> mpips.overlap.check_model(mpips.mlp.MLP([8, 4, 2]), "overlap='auto'")
    """
    lacks = [name for name in (*ARRAYS, "loss_and_gradients") if not hasattr(model, name)]
    faults = [f"has no {', '.join(lacks)}"] if lacks else []
    step = getattr(model, "loss_and_gradients", None)
    known = [] if step is None else inspect.signature(step).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in known)
    hooks = [name for name in HOOKS if step is not None and not takes_all and name not in {each.name for each in known}]
    faults += [f"calls no {' and no '.join(hooks)} in loss_and_gradients"] if hooks else []
    faults += _misfits(model) if not lacks else []
    if faults:
        raise ValueError(
            f"{what} needs a model in layers, but {type(model).__name__} {'; it '.join(faults)} "
            '(the page "Plan overlap from a profile" shows how to write one)'
        )


def _misfits(model: Any) -> list[str]:
    """Describe the faults of the model's arrays."""
    sizes = {name: np.size(getattr(model, name)) for name in ARRAYS[:2]}
    wanted, shown = sum(model.layer_elements), ", ".join(f"{name} {size}" for name, size in sizes.items())
    wrong = [f"has {wanted} elements in layer_elements, but {shown}"] if set(sizes.values()) != {wanted} else []
    if not len(model.layer_elements) or min(model.layer_elements) < 1:
        wrong.append("has a layer without parameters in layer_elements: count it with the layer before")
    for name in ARRAYS[:2]:
        array = getattr(model, name)
        if array.ndim != 1 or not array.flags.c_contiguous:
            wrong.append(f"has a {name} that is not 1-D and contiguous")
    dtypes = {name: getattr(model, name).dtype for name in ARRAYS[:2]}
    if len(set(dtypes.values())) > 1:
        wrong.append(f"has {' but '.join(f'{dtype} in {name}' for name, dtype in dtypes.items())}: give both one dtype")
    return wrong


class StoreMessages:
    """The messages that carry flat arrays of layers to and from a store.

    A group is (first layer, last layer), counted from 1. `plan` or `sample` makes the keys of groups, collectively over
    the workers.

    Args:
        gradients, parameters: 1-D, C-contiguous, of one dtype, with sum(elements) elements.
        elements: Number of parameters of each layer.
        name: Part of the names of the keys.
    """

    def __init__(
        self, kv: KVStore, gradients: np.ndarray, parameters: np.ndarray, elements: Sequence[int], name: str = "layers"
    ) -> None:
        self._kv = kv
        self._gradients = gradients
        self._parameters = parameters
        self._name = name
        self.elements = elements
        self._offsets = np.concatenate(([0], np.cumsum(elements)))
        # group -> its keys; a key is the pair (first layer, last layer) of the layers that it covers
        self._keys: dict[Group, tuple[Group, ...]] = {}

    @property
    def one_way(self) -> bool:
        """True if a push brings the parameters back, because there are no servers."""
        return not self._kv.layout.num_servers

    @property
    def link(self) -> Link:
        """ "duplex" if pushes and pulls travel at the same time, or "shared" if they take turns.

        In stores of an mpi_ kind they take turns, because pushes and pulls contain collectives of a client.
        """
        return "shared" if self._kv.type.startswith("mpi_") else "duplex"

    def plan(self, plan: JointPlan) -> None:
        """Make the keys of a plan.

        The keys of the first plan get rank 0's parameters. The keys of a later plan take over the values of
        the previous plan's keys.
        """
        groups = {*plan.push, *plan.pull}
        keys = from_ends(sorted({last for _, last in groups}))
        before = dict.fromkeys(key for keys in self._keys.values() for key in keys)
        self._keys = {g: tuple(key for key in keys if g[0] <= key[0] and key[1] <= g[1]) for g in groups}
        if not before:
            self._kv.init(self._names(keys), self._parts(self._parameters, keys))
        elif set(before) != set(keys):
            sizes = [int(self._offsets[last] - self._offsets[first - 1]) for first, last in keys]
            self._kv.recut(self._names(sorted(before)), dict(zip(self._names(keys), sizes)))

    def sample(self, groups: Iterable[Group]) -> None:
        """Make a key for every group, even if groups share layers. This is for measuring messages, not for training."""
        self._keys = {group: (group,) for group in groups}
        self._kv.init(self._names(self._keys), self._parts(self._parameters, self._keys))

    def forget(self) -> None:
        """Remove the keys. Collective."""
        self._kv.forget(self._names(key for keys in self._keys.values() for key in keys))
        self._keys = {}

    def push(self, first: int, last: int) -> Handle:
        """Start to push the gradients of layers first..last. The push runs after all earlier pushes."""
        keys = self._keys[first, last]
        gradients = self._parts(self._gradients, keys)
        if self.one_way:
            return self._kv.ipushpull(self._names(keys), gradients, out=self._parts(self._parameters, keys))
        return self._kv.ipush(self._names(keys), gradients, turns=["push"])

    def taken(self, first: int, last: int, push: Handle) -> Handle:
        """Return a handle that is done when the servers have read the values that `push` sends."""
        return self._kv.read_by_servers(self._names(self._keys[first, last]), push)

    def pull(self, first: int, last: int, early: bool = False) -> Handle:
        """Start to pull the parameters of layers first..last.

        The pull runs after all earlier pulls and after the pushes of these layers.

        Pulls travel one after another, in the order of the model. If all travelled at once, the first pull would share
        the servers' links with later pulls. `early` pulls are different: they are requested right after their push, and
        servers answer when every worker's push has arrived, which also keeps the order. If the request of an early pull
        waited for the pull before it, the request would then have to wait in the link behind later pushes.
        """
        keys = self._keys[first, last]
        parameters = self._parts(self._parameters, keys)
        return self._kv.ipull(self._names(keys), parameters, turns=() if early else ["pull"])

    def _parts(self, flat: np.ndarray, keys: Iterable[Group]) -> list[np.ndarray]:
        """Return the interval of `flat` for each key."""
        return [flat[int(self._offsets[first - 1]) : int(self._offsets[last])] for first, last in keys]

    def _names(self, keys: Iterable[Group]) -> list[str]:
        return [f"overlap {self._name} {first}-{last}" for first, last in keys]
