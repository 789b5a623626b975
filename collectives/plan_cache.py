"""Plans of one-shot calls, found again by the identity of the array, or by where the arrays lie.

A plan here holds no array of the user's: it knows addresses. An array, or a list of them, that is made anew for each
call and lies where an earlier one lay finds the plan of that one. What plans hold of their own is bounded.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from collectives.plan import Plan
from collectives.shared_memory.executor import Executor

MOST_PLANS = 256
MOST_BYTES = 256 << 20  # of work vectors
MOST_IDENTITIES = 1024


class Entry(NamedTuple):
    """A plan, and the array for which it was found last."""

    plan: Plan
    x: weakref.ref[Any]
    out: weakref.ref[Any]
    n: int
    dtype: Any


class PlanCache:
    """The plans of one communicator."""

    def __init__(self) -> None:
        self.by_identity: dict[Any, Entry] = {}
        self._by_place: OrderedDict[Any, tuple[Plan, int]] = OrderedDict()
        self._held = 0

    def find(self, key: tuple[Any, ...], x: Any, out: Any, make: Callable[[], Plan]) -> Plan:
        """The plan for `key`, which says all of the call but its arrays. One that is made is kept."""
        places = place(x), place(out)
        if None in places:
            return make()
        key = (*key, *places)
        found = self._by_place.get(key)
        if found is None:
            made = make()
            self._keep(key, made)
        else:
            made = found[0]
            self._by_place.move_to_end(key)
        if isinstance(x, np.ndarray) and (out is None or isinstance(out, np.ndarray)):
            if len(self.by_identity) >= MOST_IDENTITIES:
                self.by_identity.clear()
            out_then = weakref.ref(x if out is None else out)
            self.by_identity[(key[0], id(x), id(out), *key[1:-2])] = Entry(
                made, weakref.ref(x), out_then, x.size, x.dtype
            )
        return made

    def free(self) -> None:
        """Give back what all plans hold."""
        while self._by_place:
            self._drop()

    def _keep(self, key: Any, plan: Plan) -> None:
        nbytes = 0 if isinstance(plan.runner, Executor) else plan.call.nbytes
        self._by_place[key] = plan, nbytes
        self._held += nbytes
        while len(self._by_place) > MOST_PLANS or (self._held > MOST_BYTES and len(self._by_place) > 1):
            self._drop()

    def _drop(self) -> None:
        _, (plan, nbytes) = self._by_place.popitem(last=False)
        self._held -= nbytes
        self.by_identity.clear()  # which may hold it too
        plan.free()


def place(x: Any) -> Any:
    """Where an array, or each of a list, lies in memory, and what it is; None where that is not known."""
    if isinstance(x, np.ndarray):
        return x.__array_interface__["data"], x.size, x.dtype, x.flags.c_contiguous
    if x is None:
        return ()
    if isinstance(x, (list, tuple)):
        places = tuple(place(one) for one in x)
        return None if None in places else places
    if hasattr(x, "data_ptr") and x.device.type == "cpu":  # a tensor of PyTorch's
        return x.data_ptr(), x.numel(), x.dtype, x.is_contiguous()
    return None
