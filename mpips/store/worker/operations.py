"""The general path of pushes and pulls: check the arguments, put calls in order, and run them as tasks.

A bad argument raises an error before anything is sent, and changes nothing. Any other error ends the *generation*: the
store is then unusable until it recovers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from mpips.collectives.errors import CollectiveError, of_caller
from mpips.collectives.fabric.tasks import Task, run_in_turn, run_together
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder.ring import RecordRing
from mpips.store.keys import arguments
from mpips.store.keys.arguments import KeyCall
from mpips.store.keys.key import Array, Key, Name, Pushed
from mpips.store.keys.row_sparse import RowSparse
from mpips.store.runtime.engine import Ending, Engine, Handle
from mpips.store.runtime.errors import refused
from mpips.store.worker.interface import Backend

T = TypeVar("T")
# a timing record that has begun: its ring, its sequence number in the ring, and the key or collection of the call
Begun: TypeAlias = tuple[RecordRing, int, Pushed]
# If a call takes longer than this, the worker tells the servers what it waits for.
LONG_SECONDS = 1.0
CLOSED = "the store is closed: make this call before close()"


class Guard:
    """A context in which any exception ends the generation, except those that `refused` accepts."""

    def __init__(self, generation: Ending, what: str, names: Sequence[Name]) -> None:
        self._generation = generation
        self._what = what
        self._names = names

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not refused(error):
            raise self._generation.end(text(self._what, self._names), error) from None


class CallerErrors:
    """A context that checks arguments. Its ValueErrors and TypeErrors point at the line of the user's call."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (ValueError, TypeError)):
            of_caller(error)


CALLER_ERRORS = CallerErrors()


class Operations:
    """Checks calls, puts them in order, and runs them as tasks."""

    def __init__(self, rank: int, backend: Backend, engine: Engine, known: Mapping[Name, Key]) -> None:
        self.rank = rank
        self._backend = backend
        self._engine = engine
        # the initialised keys
        self._known = known
        self.closed = False
        # True if a push that holds NaN or infinity raises FloatingPointError
        self.checks_finite = False

    def do(self, what: str, key: object, value: Any, out: object, priority: int) -> None:
        names, task = self._prepare(what, key, value, out, priority)
        self.run(names, task, priority, what)

    def start(
        self,
        what: str,
        key: object,
        value: Any,
        out: object,
        priority: int,
        turns: Sequence[Hashable],
        begun: Sequence[Begun] = (),
    ) -> Handle:
        """Start a push, pull or pushpull, and return its handle. Does not block.

        Operations that share a key or a name in `turns` run in program order.

        Args:
            begun: Timing records, which start and end together with the operation.
        """
        with CALLER_ERRORS:
            others = arguments.turns(turns, what)
        names, task = self._prepare(what, key, value, out, priority)
        order = [*self._order(names), *(("turns", name) for name in others)]
        task = recorded(what, task, begun) if begun else task
        with self.guard(what, names):
            return self._engine.submit(order, self.hearing(task), priority, text(what, names))

    def check_pull(self, keys: Sequence[Key], key: object, out: object, priority: int) -> None:
        """Check the arguments of a pull of keys that do not exist yet. Raise ValueError or TypeError if one is bad."""
        arguments.check_priority(priority, "pull")
        arguments.check({record.name: record for record in keys}, "pull", key, out=out)

    def read_by_servers(self, key: object, push: Handle, reported: bool) -> Handle:
        """Return a handle that is done when the servers have read the push `push` of these keys.

        `reported` is False in stores whose servers do not report what they have read. The result is then `push` itself.
        """
        self.check_open()
        with CALLER_ERRORS:
            if not isinstance(push, Handle):
                raise TypeError(
                    f"read_by_servers: push={push!r} is no handle: pass what ipush of these keys has returned"
                )
            keys = [arguments.find_key(self._known, name, "read_by_servers") for name in arguments.names(key)]
        if not reported:
            return push
        what = f"{push.what}, read by the servers"
        with self.guard(what):
            return self._engine.submit([("read_by_servers", push)], self.hearing(self._read(keys, push)), 0, what)

    def pull_rows(self, key: object, out: object, row_ids: object, priority: int) -> None:
        """See `KVStore.row_sparse_pull`."""
        what = "row_sparse_pull"
        self.check_open()
        with CALLER_ERRORS:
            arguments.check_priority(priority, what)
            rows = arguments.rows(self._known, key, out, row_ids)
        for record, target, ids in rows:
            self.run([record.name], self._backend.transfers.pull_rows(record, target, ids), priority, what)

    def pull_newer(self, key: object, out: object, newer_than: object, priority: int, base: int) -> list[int]:
        """Pull only the keys whose version is not the one in `newer_than`. Return the versions that `out` now holds.

        Args:
            base: Number of rounds that the earlier job had completed, if this job continues one. It is added to every
                version.
        """
        self.check_open()
        with CALLER_ERRORS:
            arguments.check_priority(priority, "pull")
            made = arguments.check(self._known, "pull", key, out=out)
            given = arguments.versions(key, newer_than)
        versions = [version - base for version in given]
        self.run([call.key.name for call in made], self._newer(made, versions), priority, "pull")
        return [version + base for version in versions]

    def run(
        self, names: Sequence[Name], task: Task[Any], priority: int, what: str, collections: Sequence[str] = ()
    ) -> None:
        """Run a task, blocking. A failure ends the generation.

        Args:
            names: The keys of the call.
            collections: Collections of services whose rounds the task may wait for. The text `what` names them.
        """
        with self.guard(what, names):
            self._backend.direct = not self._engine.under_way
            order, heard = [*self._order(names), *collections], self.hearing(task, [*names, *collections])
            try:
                self._engine.run(order, heard, priority, lambda: text(what, names))
            finally:
                self._backend.direct = False

    def guard(self, what: str, names: Sequence[Name] = ()) -> Guard:
        """Return a context in which any exception ends the generation, unless `refused` is true for it."""
        return Guard(self._engine.generation, what, names)

    def pull(self, key: Key, out: Array) -> Task[None]:
        return self._backend.transfers.pull([key], [out.reshape(-1)])

    def end_by(self, what: str, names: Sequence[Name], error: BaseException) -> BaseException:
        """End the generation after a fast path has failed. Return the exception to raise."""
        return self._engine.generation.end(text(what, names), error)

    def check_not_closed(self) -> None:
        """Raise RuntimeError if the store is closed."""
        if self.closed:
            raise of_caller(RuntimeError(CLOSED))

    def check_open(self) -> None:
        """Raise RuntimeError if the store is closed, or StoreError if the generation has ended."""
        self.check_not_closed()
        try:
            self._engine.generation.check()
        except CollectiveError as error:
            raise self._engine.generation.end("a call of the store", error) from None

    # ---- inside

    def hearing(self, task: Task[T], names: Sequence[Name] | None = None) -> Task[T]:
        """Run a task, and handle messages from servers before each step.

        Args:
            names: Keys and collections of a call that the program waits for, or None if it does not wait. If the task
                makes no progress for LONG_SECONDS, this worker reports the wait to the servers, once.
        """
        since = 0.0
        try:
            while True:
                self._backend.listen()
                try:
                    moved = next(task)
                except StopIteration as end:
                    return end.value  # type: ignore[no-any-return]
                if names is not None:
                    now = time.monotonic()
                    if moved or not since:
                        since = now
                    elif now - since > LONG_SECONDS:
                        since = math.inf
                        self._backend.tell_wait(names)
                yield moved
        finally:
            task.close()

    def _prepare(self, what: str, key: object, value: Any, out: object, priority: int) -> tuple[list[Name], Task[None]]:
        """Check a call, and return its keys and its task. Raise ValueError or TypeError if an argument is bad."""
        self.check_open()
        with CALLER_ERRORS:
            arguments.check_priority(priority, what)
            made = arguments.check(self._known, what, key, value, out)
            if what != "pull":
                self._backend.check_updated([call.key for call in made], what)
        names = [call.key.name for call in made]
        if self.checks_finite and what != "pull":
            with self.guard(what, names):
                for call in made:
                    check_finite(self.rank, what, call)
        if len(made) == 1:
            return names, self._one(made[0], priority)
        mixed = out is not None or len(set(map(id, value or ()))) < len(made)
        return names, self._several(made, priority, mixed)

    def _several(self, made: Sequence[KeyCall], priority: int, mixed: bool) -> Task[None]:
        """Transfer several keys: the dense keys together as one list, then the row-sparse keys one by one.

        Args:
            mixed: True if the result of one key may overwrite the array that is pushed to another key.
        """
        yield from run_together([call.gathered for call in made if call.gathered is not None])
        dense = [call for call in made if not isinstance(call.payload, RowSparse)]
        if dense:
            yield from self._listed(dense, priority, mixed)
            for call in dense:
                yield from _finish(call)
        for call in made:
            if isinstance(call.payload, RowSparse):
                yield from self._one(call, priority)

    def _listed(self, dense: Sequence[KeyCall], priority: int, mixed: bool) -> Task[None]:
        transfers, keys = self._backend.transfers, [call.key for call in dense]
        flats = [call.payload.reshape(-1) for call in dense if isinstance(call.payload, np.ndarray)]
        outs = [call.targets[0].reshape(-1) for call in dense if call.targets]
        if flats and outs and not mixed:
            yield from transfers.pushpull(keys, flats, outs, priority)
            return
        if flats:
            yield from transfers.push(keys, flats, priority)
        if outs:
            yield from transfers.pull(keys, outs)

    def _one(self, call: KeyCall, priority: int) -> Task[None]:
        if call.gathered is None and call.spread is None and len(call.targets) < 2:
            return self._transfer(call, priority)
        return self._with_gpus(call, priority)

    def _with_gpus(self, call: KeyCall, priority: int) -> Task[None]:
        """Transfer one key whose arrays are summed on GPUs, or whose result goes to several arrays."""
        if call.gathered is not None:
            yield from call.gathered
        yield from self._transfer(call, priority)
        yield from _finish(call)

    def _transfer(self, call: KeyCall, priority: int) -> Task[None]:
        """Push one key, pull it, or both. The first target gets the result."""
        transfers, key, payload = self._backend.transfers, call.key, call.payload
        outs = [call.targets[0].reshape(-1)] if call.targets else []
        if isinstance(payload, np.ndarray):
            flats = [payload.reshape(-1)]
            if outs:
                return transfers.pushpull([key], flats, outs, priority)
            return transfers.push([key], flats, priority)
        if payload is None:
            return transfers.pull([key], outs)
        push = transfers.push_rows(key, payload, priority)
        return run_in_turn(push, transfers.pull([key], outs)) if outs else push

    def _newer(self, made: Sequence[KeyCall], held: list[int]) -> Task[None]:
        """Pull only the keys whose version is not the one in `held`, and write the new versions into `held`."""
        versions = yield from self._backend.versions([call.key for call in made])
        chosen = [at for at, version in enumerate(versions) if made[at].key.replaced or version != held[at]]
        if not chosen:
            return
        outs = [made[at].targets[0].reshape(-1) for at in chosen]
        versions = yield from self._backend.pull_versions([made[at].key for at in chosen], outs)
        for at, version in zip(chosen, versions):
            held[at], made[at].key.replaced = version, False
            yield from _finish(made[at])

    def _read(self, keys: Sequence[Key], push: Handle) -> Task[None]:
        while not push.done:
            yield False
        if push.error is None:
            yield from self._backend.settle(keys)

    def _order(self, names: Sequence[Name]) -> list[Hashable]:
        """Return the names that order an operation. Operations that share a name run in program order.

        The names are the operation's keys and the store's communicators. All workers must use a communicator in the
        same order.
        """
        return [*names, *self._backend.communicators]


def recorded(what: str, task: Task[T], begun: Sequence[Begun]) -> Task[T]:
    """Run a task, and note its start and its end in the timing records `begun`."""
    for ring, sequence, key in begun:
        ring.start(sequence, 0, key.round + (what != "pull"))
    result = yield from task
    for ring, sequence, _ in begun:
        ring.end(sequence)
    return result


def text(what: str, names: Sequence[Name]) -> str:
    """Return the name of an operation, as errors show it."""
    word = f" of key{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:4]))}" if names else ""
    return f"{what}{word}{', ...' if len(names) > 4 else ''}"


def step_of_push() -> str:
    """Return a text about the last training step of this rank, for error messages. It is "" if no step was noted."""
    return f" (the step noted last is {recorder.rank_state.step})" if recorder.rank_state.step >= 0 else ""


def check_finite(rank: int, what: str, call: KeyCall) -> None:
    """Raise FloatingPointError if a push holds NaN or infinity.

    The error names the rank, the key, the push and the first such element.
    """
    rows = call.payload if isinstance(call.payload, RowSparse) else None
    values = call.payload if rows is None else rows.values
    if not isinstance(values, np.ndarray) or values.dtype.kind in "iub":
        return
    fine = np.isfinite(values)
    if not fine.all():
        wrong, nans = int(np.count_nonzero(~fine)), int(np.count_nonzero(np.isnan(values)))
        where = [int(place) for place in np.unravel_index(int(np.argmin(fine)), fine.shape)]
        if rows is not None:
            where[0] = int(rows.rows[where[0]])
        raise of_caller(
            FloatingPointError(
                f"{what} of key {call.key.name!r}: push {call.key.round + 1} of rank {rank} holds {nans} NaN and "
                f"{wrong - nans} infinities among {values.size} elements, the first at {where}{step_of_push()}: look "
                "at the loss, the learning rate and the data of that step on that rank"
            )
        )


def _finish(call: KeyCall) -> Generator[bool | None, None, None]:
    """Copy the result from the first target to the other targets and to GPUs."""
    for other in call.targets[1:]:
        np.copyto(other, call.targets[0])
    if call.spread is not None:
        yield from call.spread.spread()
