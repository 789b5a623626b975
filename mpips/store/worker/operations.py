"""Pushes and pulls of one worker: checked, put in order, done now or started. Here a failure ends the generation.

A bad argument is raised before anything was sent; nothing has changed. Whatever else a task raises ends the generation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError, of_caller
from mpips.store.keys import arguments, calls
from mpips.store.keys.calls import Call
from mpips.store.keys.key import Key, Name
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.runtime.engine import Engine, Handle
from mpips.store.runtime.generation import Generation
from mpips.store.runtime.tasks import Task, together
from mpips.store.worker.backend import Backend

Array = NDArray[Any]
LONG_SECONDS = 1.0
"""Of a wait, after which peers hear what this worker waits for."""
CLOSED = "the store is closed: make this call before close()"


class Guard:
    """A context in which whatever is raised ends the generation, but for what `refused` tells."""

    def __init__(self, generation: Generation, what: str, names: Sequence[Name]) -> None:
        self._generation, self._what, self._names = generation, what, names

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not refused(error):
            raise self._generation.end(text(self._what, self._names), error) from None


class Given:
    """A context in which arguments are looked at: its errors are the caller's, and shown with the caller's lines."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, TypeError)):
            of_caller(error)


GIVEN = Given()


class Operations:
    """What a store does with keys. `known`: the keys that are initialised."""

    def __init__(self, rank: int, backend: Backend, engine: Engine, known: Mapping[Name, Key]) -> None:
        self._rank, self._backend, self._engine, self._known = rank, backend, engine, known
        self.closed = False

    def do(self, what: str, key: Any, value: Any, out: Any, priority: int) -> None:
        """Push, pull or pushpull, blocking."""
        names, task = self._prepare(what, key, value, out, priority)
        self.run(names, task, priority, what)

    def start(self, what: str, key: Any, value: Any, out: Any, priority: int, turns: Sequence[Hashable]) -> Handle:
        """The same, not blocking; it takes turns with others on its keys and on `turns`."""
        with GIVEN:
            others = arguments.turns(turns, what)
        names, task = self._prepare(what, key, value, out, priority)
        order = [*self._order(names), *(("turns", name) for name in others)]
        with self.guard(what, names):
            return self._engine.submit(order, task, priority, text(what, names))

    def see_pull(self, keys: Sequence[Key], key: Any, out: Any, priority: int) -> None:
        """ValueError or TypeError where a pull of these keys, which are yet to be made, could not be made so."""
        arguments.see_priority(priority, "pull")
        calls.check({record.name: record for record in keys}, "pull", key, out=out)

    def taken(self, key: Any, push: Handle, told: bool) -> Handle:
        """A handle that ends when the servers have read what `push`, of these keys, sends; `push` where nobody is
        `told` of that."""
        self.check_open()
        with GIVEN:
            if not isinstance(push, Handle):
                raise TypeError(f"taken: push={push!r} is no handle: pass what ipush of these keys has returned")
            keys = [arguments.known(self._known, name, "taken") for name in arguments.names(key)]
        if not told:
            return push
        what = f"{push.what}, read by the servers"
        with self.guard(what):
            return self._engine.submit([("taken", push)], self._read(keys, push), 0, what)

    def pull_rows(self, key: Any, out: Any, row_ids: Any, priority: int) -> None:
        """`KVStore.row_sparse_pull`."""
        what = "row_sparse_pull"
        self.check_open()
        with GIVEN:
            arguments.see_priority(priority, what)
            rows = calls.rows(self._known, key, out, row_ids)
        for record, target, ids in rows:
            self.run([record.name], self._backend.pull_rows(record, target, ids), priority, what)

    def run(self, names: Sequence[Name], task: Task[Any], priority: int, what: str) -> None:
        """Do it, blocking; a failure ends the generation."""
        with self.guard(what, names):
            self._backend.direct = not self._engine.under_way
            try:
                self._engine.run(self._order(names), self._told(names, task), priority, lambda: text(what, names))
            finally:
                self._backend.direct = False

    def guard(self, what: str, names: Sequence[Name] = ()) -> Guard:
        """Whatever is raised within ends the generation, but for what all workers raise as they asked for what cannot
        be."""
        return Guard(self._engine.generation, what, names)

    def pull(self, key: Key, out: Array) -> Task[None]:
        """What pulls one key, when it is run."""
        return self._backend.pull(key, out.reshape(-1))

    def ended(self, what: str, names: Sequence[Name], error: BaseException) -> BaseException:
        """A fast route has failed: end the generation; what to raise."""
        return self._engine.generation.end(text(what, names), error)

    def check_not_closed(self) -> None:
        """RuntimeError where the store is closed."""
        if self.closed:
            raise of_caller(RuntimeError(CLOSED))

    def check_open(self) -> None:
        """RuntimeError where the store is closed, StoreError where the generation has ended."""
        self.check_not_closed()
        try:
            self._engine.generation.check()
        except CollectiveError as error:
            raise self._engine.generation.end("a call of the store", error) from None

    # ---- inside

    def _told(self, names: Sequence[Name], task: Task[Any]) -> Task[Any]:
        """The task of a call that the program waits for: where it does not go on for long, peers hear of it, once."""
        since = 0.0
        try:
            for moved in task:
                now = time.monotonic()
                if moved or not since:
                    since = now
                elif now - since > LONG_SECONDS:
                    since = math.inf
                    self._backend.waits([self._known[name] for name in names if name in self._known])
                yield moved
        finally:
            task.close()

    def _prepare(self, what: str, key: Any, value: Any, out: Any, priority: int) -> tuple[list[Name], Task[None]]:
        """The keys, and what is to be done. ValueError or TypeError where an argument is bad."""
        self.check_open()
        with GIVEN:
            arguments.see_priority(priority, what)
            made = calls.check(self._known, what, key, value, out)
            if what != "pull":
                self._backend.check_updated([call.key for call in made], what)
        names = [call.key.name for call in made]
        if len(made) == 1:
            return names, self._one(made[0], priority)
        mixed = out is not None or len(set(map(id, value or ()))) < len(made)
        return names, self._several(made, priority, mixed)

    def _several(self, made: Sequence[Call], priority: int, mixed: bool) -> Task[None]:
        """Several keys: dense ones as one list, then those with some rows. `mixed`: what is written for one key may be
        what is pushed of another."""
        yield from together([call.gathered for call in made if call.gathered is not None])
        dense = [call for call in made if not isinstance(call.payload, RowSparse)]
        if dense:
            yield from self._listed(dense, priority, mixed)
            for call in dense:
                yield from _finish(call)
        for call in made:
            if isinstance(call.payload, RowSparse):
                yield from self._one(call, priority)

    def _listed(self, dense: Sequence[Call], priority: int, mixed: bool) -> Task[None]:
        backend, keys = self._backend, [call.key for call in dense]
        flats = [call.payload.reshape(-1) for call in dense if isinstance(call.payload, np.ndarray)]
        outs = [call.targets[0].reshape(-1) for call in dense if call.targets]
        if flats and outs and not mixed:
            yield from backend.pushpull_list(keys, flats, outs, priority)
            return
        if flats:
            yield from backend.push_list(keys, flats, priority)
        if outs:
            yield from backend.pull_list(keys, outs)

    def _one(self, call: Call, priority: int) -> Task[None]:
        if call.gathered is not None:
            yield from call.gathered
        key, payload, out = call.key, call.payload, call.targets[0].reshape(-1) if call.targets else None
        if isinstance(payload, RowSparse):
            yield from self._backend.push_rows(key, payload, priority)
        elif payload is not None and out is None:
            yield from self._backend.push(key, payload.reshape(-1), priority)
        elif payload is not None and out is not None:
            yield from self._backend.pushpull(key, payload.reshape(-1), out, priority)
        if out is not None and not isinstance(payload, np.ndarray):
            yield from self._backend.pull(key, out)
        yield from _finish(call)

    def _read(self, keys: Sequence[Key], push: Handle) -> Task[None]:
        while not push.done:
            yield False
        if push.error is None:
            yield from self._backend.settle(keys)

    def _order(self, names: Sequence[Name]) -> list[Hashable]:
        """What an operation takes turns on: its keys, and communicators, used in one order everywhere."""
        return [*names, *self._backend.communicators]


def text(what: str, names: Sequence[Name]) -> str:
    """An operation, as errors name it."""
    word = f" of key{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:4]))}" if names else ""
    return f"{what}{word}{', ...' if len(names) > 4 else ''}"


def _finish(call: Call) -> Generator[bool | None, None, None]:
    """The result is in the first target: it goes to the others, and to GPUs."""
    for other in call.targets[1:]:
        np.copyto(other, call.targets[0])
    if call.spread is not None:
        yield from call.spread.spread()


def refused(error: BaseException) -> bool:
    """Whether it is an error that all workers raise, with which nothing has changed (`rendezvous.agree`)."""
    callers = isinstance(error, (ValueError, TypeError)) and not isinstance(error, CollectiveError)
    return callers and getattr(error, "of_caller", False)
