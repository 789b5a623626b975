"""Calls with plain arrays, one or a list, that need none of the checks and tasks of `operations`: the short way of each
key (`mpips.short`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips import arguments
from mpips.arguments import Name
from mpips.engine import Engine
from mpips.keys import Key
from mpips.operations import Operations
from mpips.session import FAILURES, Task, together

Array = NDArray[Any]
LISTS = (list, tuple)


class Quick:
    """`push`, `pull` and `pushpull` of a store, blocking, with its arguments, shapes, dtypes and errors. Each returns
    whether it has been made; nothing has been done where it has not. `known`: initialised keys.

    Of a list all keys are pushed before one is waited for, as other workers may have another order; then they are
    pulled in turn, from the first that has to be waited for together. What fails is raised when the others are done.
    """

    def __init__(self, known: Mapping[Name, Key], engine: Engine, operations: Operations) -> None:
        self._known, self._engine, self._operations, self._talk = known, engine, operations, operations.talk

    def push(self, key: Any, value: Any, priority: int) -> bool:
        record = self._one(key, value, priority)
        if record is None:
            return type(key) in LISTS and self._push_all(key, value, priority)
        self._operations.count(key)
        left = record.short.push(value, priority)  # type: ignore[union-attr]
        if left is not None:
            self._operations.run([record.name], left, priority, "push")
        return True

    def pull(self, key: Any, out: Any, priority: int) -> bool:
        record = self._one(key, out, priority)
        if record is None or not out.flags.writeable:
            return type(key) in LISTS and self._pull_all(key, out, priority)
        left = record.short.pull(out)  # type: ignore[union-attr]
        if left is not None:
            self._operations.run([record.name], left, priority, "pull", "pull")
        return True

    def pushpull(self, key: Any, value: Any, out: Any, priority: int) -> bool:
        record = self._one(key, value, priority)
        if record is None:
            return type(key) in LISTS and self._pushpull_all(key, value, out, priority)
        if not (value.flags.writeable if out is None else self._one(key, out) is record and out.flags.writeable):
            return False
        self._operations.count(key)
        left = record.short.pushpull(value, value if out is None else out, priority)  # type: ignore[union-attr]
        if left is not None:
            self._operations.run([record.name], left, priority, "pushpull", "pushpull")
        return True

    # ---- lists

    def _push_all(self, keys: Sequence[Any], values: Any, priority: int) -> bool:
        records = self._all(keys, values, priority)
        if records is None:
            return False
        self._operations.count(keys)
        _raise_first(records, self._contribute(records, values, priority, True))
        return True

    def _pull_all(self, keys: Sequence[Any], outs: Any, priority: int) -> bool:
        records = self._all(keys, outs, priority)
        if records is None or not _writeable(outs):
            return False
        _raise_first(records, self._take([*zip(records, outs)], priority, "pull"))
        return True

    def _pushpull_all(self, keys: Sequence[Any], values: Any, outs: Any, priority: int) -> bool:
        records = self._all(keys, values, priority)
        if outs is not None and self._all(keys, outs, priority) is None:
            return False
        targets = values if outs is None else outs
        if records is None or not _writeable(targets):
            return False
        self._operations.count(keys)
        # what is written for one key may be what a server still reads for another
        mixed = outs is not None or len(set(map(id, values))) < len(values)
        failures = self._contribute(records, values, priority, mixed)
        pairs = [pair for pair in zip(records, targets) if pair[0].name not in failures]
        failures.update(self._take(pairs, priority, "pushpull"))
        _raise_first(records, failures)
        return True

    def _contribute(
        self, records: Sequence[Key], values: Sequence[Array], priority: int, wait: bool
    ) -> dict[Name, Exception]:
        """Push; with `wait` until all arrays may be overwritten. What has failed, when the others have been done."""
        left: list[tuple[Name, Task]] = []
        posted = []
        for record, value in zip(records, values):
            task = record.short.post(value, priority)  # type: ignore[union-attr]
            if task is None:
                posted.append(record)
            else:
                left.append((record.name, task))
        for record in posted if wait else ():
            task = record.short.read()  # type: ignore[union-attr]
            if task is not None:
                left.append((record.name, task))
        return self._run(left, priority, "push", "") if left else {}

    def _take(self, pairs: Sequence[tuple[Key, Array]], priority: int, what: str) -> dict[Name, Exception]:
        """Pull, in turn; from the first that has to be waited for, all together. What has failed, when all are done."""
        for index, (record, out) in enumerate(pairs):
            left = record.short.pull(out)  # type: ignore[union-attr]
            if left is not None:
                rest = [(later.name, self._operations.pull(later, target)) for later, target in pairs[index + 1 :]]
                return self._run([(record.name, left), *rest], priority, what, what)
        return {}

    def _run(
        self, tasks: Sequence[tuple[Name, Task]], priority: int, what: str, needs: str
    ) -> dict[Name, Exception]:
        failures: dict[Name, Exception] = {}
        noted = [_noted(name, task, failures) for name, task in tasks]
        try:
            self._operations.run([name for name, _ in tasks], together(noted), priority, what, needs)
        except FAILURES:
            if not failures:
                raise
        return failures

    # ---- what can be made so

    def _one(self, key: Any, array: Any, priority: int = 0) -> Key | None:
        """The key, where a call for one plain array can be made."""
        if type(array) is not np.ndarray or type(key) not in (str, int) or not self._engine.idle:
            return None
        record = self._known.get(key)
        if record is None or record.short is None or array.shape != record.shape or array.dtype != record.dtype:
            return None
        if type(priority) is not int or (priority and priority.bit_length() > arguments.PRIORITY_BITS):
            return None
        return record if array.flags.c_contiguous and self._talk.debt is None else None

    def _all(self, keys: Sequence[Any], arrays: Any, priority: int) -> list[Key] | None:
        """The keys, where a call for one plain array each can be made."""
        if not keys or type(arrays) not in LISTS or len(arrays) != len(keys):
            return None
        records = []
        for key, array in zip(keys, arrays):
            record = self._one(key, array, priority)
            if record is None or not record.short.lists:  # type: ignore[union-attr]
                return None
            records.append(record)
        return records if len(set(keys)) == len(keys) else None


def _noted(name: Name, task: Task, failures: dict[Name, Exception]) -> Task:
    """Run it; what it raises is also kept under the key's name."""
    try:
        yield from task
    except FAILURES as error:
        failures[name] = error
        raise


def _raise_first(records: Sequence[Key], failures: Mapping[Name, Exception]) -> None:
    """Of several failures that of the first key, whichever came first, as other ranks raise the same."""
    for record in records:
        if record.name in failures:
            raise failures[record.name]


def _writeable(arrays: Sequence[Array]) -> bool:
    return all(array.flags.writeable for array in arrays)
