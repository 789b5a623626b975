"""Plans of one-shot calls, found again by the identity of the array, or by where the arrays lie.

A plan here holds no array of the user's: it knows addresses. An array, or a list of them, that is made anew for each
call and lies where an earlier one lay finds the plan of that one. What plans hold of their own is bounded.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from collectives import arrays

MOST_PLANS = 256
MOST_BYTES = 256 << 20  # of work vectors
MOST_IDENTITIES = 1024


class Entry(NamedTuple):
    """A plan, and the array for which it was found last."""

    plan: Any
    x: weakref.ref[Any]
    out: weakref.ref[Any]
    n: int
    dtype: Any


class Several(NamedTuple):
    """A plan of many arrays, and those for which it was found last."""

    plan: Any
    arrays: list[weakref.ref[Any]]
    sizes: list[int]
    dtypes: list[Any]

    def holds(self, arrays: Sequence[Any]) -> bool:
        """Whether it is the plan of these arrays, whose identities are the same."""
        return (
            all(map(is_, [ref() for ref in self.arrays], arrays))
            and [one.size for one in arrays] == self.sizes
            and [one.dtype for one in arrays] == self.dtypes
        )


def identity(call: tuple[Any, ...], every: Sequence[Any], arrays: int) -> tuple[Any, ...]:
    """Under what a plan of many arrays, of which so many are sources, is found."""
    return (call, arrays, tuple(map(id, every)))


class PlanCache:
    """The plans of one communicator. A plan says how many `held_bytes` its work vectors take, and can be freed."""

    def __init__(self, by_identity: dict[Any, Any]) -> None:
        """`by_identity` is kept up to date, for who looks there first."""
        self.by_identity = by_identity
        self._by_place: OrderedDict[Any, Any] = OrderedDict()
        self._held = 0

    def find(self, call: tuple[Any, ...], x: Any, out: Any, make: Callable[[], Any]) -> Any:
        """The plan of a call with these arrays: `call` says all else. One that is made is kept."""
        try:
            key = (*call, place(x), place(out))
        except TypeError:  # it is no array, of which `make` says which
            return make()
        made = self._by_place.get(key)
        if made is None:
            made = make()
            self._keep(key, made)
        else:
            self._by_place.move_to_end(key)
        if len(self.by_identity) >= MOST_IDENTITIES:
            self.by_identity.clear()
        if isinstance(x, np.ndarray) and (out is None or isinstance(out, np.ndarray)):
            entry = Entry(made, weakref.ref(x), weakref.ref(x if out is None else out), x.size, x.dtype)
            self.by_identity[(call[0], id(x), id(out), *call[1:])] = entry
        elif isinstance(x, list):
            self._know_again(call, made, x, out)
        return made

    def free(self) -> None:
        """Give back what all plans hold."""
        while self._by_place:
            self._drop()

    def _know_again(self, call: tuple[Any, ...], plan: Any, x: list[Any], out: Any) -> None:
        """Find the plan of these NumPy arrays by their identities from now on."""
        every = x if out is None else [*x, *out]
        if every and all(isinstance(one, np.ndarray) for one in every):
            refs, sizes, dtypes = zip(*((weakref.ref(one), one.size, one.dtype) for one in every))
            entry = Several(plan, list(refs), list(sizes), list(dtypes))
            self.by_identity[identity(call, every, len(x))] = entry

    def _keep(self, key: Any, plan: Any) -> None:
        self._by_place[key] = plan
        self._held += plan.held_bytes
        while len(self._by_place) > MOST_PLANS or (self._held > MOST_BYTES and len(self._by_place) > 1):
            self._drop()

    def _drop(self) -> None:
        _, plan = self._by_place.popitem(last=False)
        self._held -= plan.held_bytes
        self.by_identity.clear()  # which may hold it too
        plan.free()


def place(x: Any) -> Any:
    """Where an array, or each of a list, lies in memory, and what it is."""
    if isinstance(x, np.ndarray):
        return x.__array_interface__["data"], x.size, x.dtype, x.flags.c_contiguous
    if x is None:
        return ()
    if isinstance(x, (list, tuple)):
        return tuple([place(one) for one in x])
    if arrays.is_torch(x):
        return x.data_ptr(), x.numel(), x.dtype, x.is_contiguous(), x.device
    if arrays.is_device(x):
        return str(sorted(x.__cuda_array_interface__.items()))
    return place(arrays.host(x))
