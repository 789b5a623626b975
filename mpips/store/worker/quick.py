"""Calls with plain arrays or tensors, one or a list, without the checks and tasks of `operations`: fast routes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence, Sized
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpips.store.keys import arrays
from mpips.store.keys.arguments import PRIORITY_BITS
from mpips.store.keys.key import FastList, Key, Name
from mpips.store.runtime.tasks import Task, together
from mpips.store.worker.backend import Backend
from mpips.store.worker.operations import Operations

Array = NDArray[Any]
T = TypeVar("T")
LISTS = (list, tuple)


class Quick:
    """`push`, `pull` and `pushpull`, blocking. `known`: initialised keys; `under_way`: empty where nothing is.

    Of a list all keys are pushed before one is waited for, as other workers may have another order; then they are
    pulled in turn, from the first that has to be waited for together.
    """

    def __init__(self, known: Mapping[Name, Key], under_way: Sized, operations: Operations, backend: Backend) -> None:
        self._known, self._under_way, self._operations, self._backend = known, under_way, operations, backend

    def call(self, what: str, key: Any, value: Any, out: Any, priority: int) -> bool:
        """Make a call (`what`: push, pull or pushpull); whether it was made. Nothing has been done where it was not."""
        record = self._one(key, out if what == "pull" else value, priority)
        if record is None and "torch" in sys.modules:
            views = arrays.viewed(value), arrays.viewed(out)
            if views[0] is not value or views[1] is not out:
                return self.call(what, key, *views, priority)
        try:
            if record is None:
                return type(key) in LISTS and self._several(what, key, value, out, priority)
            fast = record.fast
            if what == "push":
                left = fast.push(value, priority)  # type: ignore[union-attr]
            elif what == "pull":
                if not out.flags.writeable:
                    return False
                left = fast.pull(out)  # type: ignore[union-attr]
            else:
                target = value if out is None else out
                if (out is not None and self._one(key, out, 0) is not record) or not target.flags.writeable:
                    return False
                left = fast.pushpull(value, target, priority)  # type: ignore[union-attr]
        except BaseException as error:
            raise self._operations.ended(what, [] if record is None else [record.name], error) from None
        if left is not None:
            self._operations.run([record.name], left, priority, what)
        return True

    # ---- lists

    def _several(self, what: str, keys: Sequence[Any], values: Any, outs: Any, priority: int) -> bool:
        targets = (values if outs is None else outs) if what == "pushpull" else outs
        records = self._all(keys, targets if what == "pull" else values, priority)
        if records is None or (what == "pushpull" and outs is not None and self._all(keys, outs, priority) is None):
            return False
        if what != "push" and not _writeable(targets):
            return False
        if outs is not None and len(set(map(id, outs))) < len(outs):
            return False  # one is out of two keys, which the checks of a call name
        if self._backend.quick_list is not None:
            self._as_one(self._backend.quick_list, what, records, values, targets, priority)
            return True
        # what is written for one key may be what a server still reads for another
        mixed = what == "pushpull" and (outs is not None or len(set(map(id, values))) < len(values))
        if what != "pull":
            self._contribute(records, values, priority, what == "push" or mixed, what)
        if what != "push":
            self._take(records, targets, priority, what)
        return True

    def _as_one(
        self, route: FastList, what: str, records: Sequence[Key], values: Any, targets: Any, priority: int
    ) -> None:
        """All keys in one step."""
        if what == "push":
            left = route.push(records, values, priority)
        elif what == "pull":
            left = route.pull(records, targets)
        else:
            left = route.pushpull(records, values, targets, priority)
        if left is not None:
            self._operations.run([record.name for record in records], left, priority, what)

    def _contribute(
        self, records: Sequence[Key], values: Sequence[Array], priority: int, wait: bool, what: str
    ) -> None:
        """Push; with `wait` until all arrays may be overwritten."""
        left: list[tuple[Key, Task[None]]] = []
        posted = []
        for record, value in zip(records, values):
            task = record.fast.post(value, priority)  # type: ignore[union-attr]
            if task is None:
                posted.append(record)
            else:
                left.append((record, task))
        for record in posted if wait else ():
            task = record.fast.read()  # type: ignore[union-attr]
            if task is not None:
                left.append((record, task))
        if left:
            self._run(left, priority, what)

    def _take(self, records: Sequence[Key], outs: Sequence[Array], priority: int, what: str) -> None:
        """Pull, in turn; from the first that has to be waited for, all together."""
        left: list[tuple[Key, Task[None]]] = []
        for record, out in zip(records, outs):
            task = self._operations.pull(record, out) if left else record.fast.pull(out)  # type: ignore[union-attr]
            if task is not None:
                left.append((record, task))
        if left:
            self._run(left, priority, what)

    def _run(self, left: Sequence[tuple[Key, Task[None]]], priority: int, what: str) -> None:
        names = [record.name for record, _ in left]
        self._operations.run(names, together([task for _, task in left]), priority, what)

    # ---- what can be made so

    def _one(self, key: Any, array: Any, priority: int) -> Key | None:
        """The key, where a call for one plain array can be made."""
        if type(array) is not np.ndarray or type(key) not in (str, int) or self._under_way:
            return None
        record = self._known.get(key)
        if record is None or record.fast is None or array.shape != record.shape or array.dtype != record.dtype:
            return None
        if type(priority) is not int or (priority and priority.bit_length() > PRIORITY_BITS):
            return None
        return record if array.flags.c_contiguous else None

    def _all(self, keys: Sequence[Any], arrays: Any, priority: int) -> list[Key] | None:
        """The keys, where a call for one plain array each can be made."""
        if not keys or type(arrays) not in LISTS or len(arrays) != len(keys):
            return None
        records, as_one = [], self._backend.quick_list is not None
        for key, array in zip(keys, arrays):
            record = self._one(key, array, priority)
            if record is None or not (as_one or record.fast.lists):  # type: ignore[union-attr]
                return None
            records.append(record)
        return records if len(set(keys)) == len(keys) else None


def _writeable(arrays: Sequence[Array]) -> bool:
    return all(array.flags.writeable for array in arrays)
