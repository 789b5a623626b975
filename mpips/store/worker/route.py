"""Route every push, pull and pushpull of a worker: the fast way for plain arrays, else the general way.

`Route.try_fast` has one straight function for each key. Where it cannot serve a call it has done nothing. The general
way (`Route.call`, `Operations`) then checks the arguments, orders the call among those under way and runs it as a task.
A bad argument is raised before anything was sent; nothing has changed. Any other error ends the generation.

Small keys of one list travel as one vector (`Vectors`), since a collective of a small key costs its latency only (as
MG-WFBP merges gradients, section 4). Servers and optimizers still see every key by itself.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy import ndarray
from numpy.typing import NDArray

from collectives.errors import CollectiveError, of_caller
from collectives.fabric import arena
from collectives.fabric.tasks import Task, in_turn, together
from collectives.recorder import own as recorder
from collectives.recorder.own import Marks
from collectives.recorder.ring import Ring, form
from mpips.store.keys import arguments
from mpips.store.keys.arguments import PRIORITY_BITS, Call
from mpips.store.keys.key import NO_MARKS, FastList, Key, Name
from mpips.store.keys.rows import RowSparse
from mpips.store.runtime.engine import Ending, Engine, Handle
from mpips.store.worker.interface import Backend, Saves, Written

Array = NDArray[Any]
T = TypeVar("T")
LISTS = (list, tuple)
MOST_TOKENS = 4096
"""Calls, by what they do with which keys, of which this worker has the texts at hand."""
Begun: TypeAlias = tuple[Ring, int, Key]
"""A record that has begun: its ring, its sequence number there, and its key."""


class Route:
    """Make the calls of a store on a worker: `try_fast` first, and where that has done nothing, `call`.

    `known`: the initialised keys. `under_way`: empty where no operation is. `lane`: the store's. Of a list all keys are
    pushed before one is waited for, as other workers may have another order. Then they are pulled in turn, from the
    first that has to be waited for together.
    """

    def __init__(
        self, known: Mapping[Name, Key], under_way: Sized, operations: Operations, backend: Backend, lane: int
    ) -> None:
        self._known, self._under_way, self._operations, self._backend = known, under_way, operations, backend
        self._saves: Saves | None = None
        self._written: Written | None = None
        self._first_push: Callable[[], None] | None = None
        self._checks = operations.checks_finite
        self._extra = self._checks  # one of these four is there, and calls take the general way
        self._marks, self._tokens = Marks(lane), dict[Any, int]()
        self._word = self._marks.word
        self._forms = dict[Any, bytes]()
        self._every = self._records = False
        """Whether calls of every key are timed, or of long ones only; whether this is one, made by `call`."""
        recorder.add_timeable(self)

    def set_timed(self, every: bool) -> None:
        """Time the calls of every key from now on, or of long ones; see `recorder.own.trace`."""
        self._every = every
        self._forget_marks()

    def try_fast(self, what: str, key: Any, value: Any, out: Any, priority: int) -> bool:
        """Make a call (push, pull or pushpull), blocking. Return False, with nothing done, where `call` has to."""
        if self._extra:
            return False
        if what == "push":
            record = self._one(key, value, priority)
        elif what == "pull":
            record = self._one(key, out, priority, writes=True)
        else:
            record = self._one(key, value, priority, writes=out is None)
        if record is not None:
            mark = record.marks[what] or self._mark_first(what, record)
            if not mark:
                return False
            self._word[0] = mark
        elif "torch" in sys.modules:
            views = arguments.viewed(value), arguments.viewed(out)
            if views[0] is not value or views[1] is not out:
                return self.try_fast(what, key, *views, priority)
        try:
            if record is None:
                return type(key) in LISTS and self._several(what, key, value, out, priority)
            fast = record.fast
            if what == "push":
                left = fast.push(value, priority)  # type: ignore[union-attr]
            elif what == "pull":
                left = fast.pull(out)  # type: ignore[union-attr]
            else:
                target = value if out is None else out
                if out is not None and self._one(key, out, 0, writes=True) is not record:
                    return False
                left = fast.pushpull(value, target, priority)  # type: ignore[union-attr]
        except BaseException as error:
            raise self._operations.ended(what, [] if record is None else [record.name], error) from None
        if left is not None:
            self._operations.run([record.name], left, priority, what)
        return True

    def call(self, what: str, key: object, value: object, out: object, priority: int) -> None:
        """Make a call, blocking, with what is due before and after it: a save, the next piece of a checkpoint."""
        self._mark(what, key)
        begun = self._begin_records(what, key)
        self._records = True
        try:
            if begun or self._extra:
                self._call(what, key, value, out, priority)
            else:
                self._operations.do(what, key, value, out, priority)
        finally:
            self._records = False
        for ring, sequence, _ in begun:
            ring.end(sequence)

    def _call(self, what: str, key: object, value: object, out: object, priority: int) -> None:
        if not self._extra:
            if not self.try_fast(what, key, value, out, priority):
                self._operations.do(what, key, value, out, priority)
            return
        saves = self._prepare(what, key)
        self._extra = False
        if saves is not None:
            saves.pushing = key
        try:
            if self._checks or not self.try_fast(what, key, value, out, priority):
                self._operations.do(what, key, value, out, priority)
        finally:
            if saves is not None:
                saves.pushing = ()
            self._extra = True
        self._follow(saves, key)

    def start(
        self, what: str, key: object, value: object, out: object, priority: int, turns: Sequence[Hashable]
    ) -> Handle:
        """Start a call and return its handle, not blocking; it takes turns on its keys and on `turns`."""
        self._mark(what, key)
        saves = self._prepare(what, key) if self._extra else None
        begun = self._begin_records(what, key, starts=False)
        handle = self._operations.start(what, key, value, out, priority, turns, begun)
        if self._extra:
            self._follow(saves, key)
        return handle

    @contextmanager
    def marked(self, what: str) -> Iterator[None]:
        """Let others see that this worker is in a call that is about no key, or about many: it is in the block."""
        self.mark(what)
        if what == "barrier" and not recorder.is_traced:
            yield
            return
        ring, sequence = recorder.begin_rare(what)
        yield
        ring.end(sequence)

    def mark(self, what: str) -> None:
        """Let others see that this worker has begun a call that is about no key."""
        self._mark(what, [])

    def _mark_first(self, what: str, record: Key) -> int:
        """Return the mark of a call of one key, which the key keeps unless the call is timed; 0 where `call` times it.
        """
        timed = self._every or record.is_long
        if timed and not self._records:
            return 0
        token = self._mark(what, record.name)
        if not timed:
            record.marks[what] = token
        return token

    def _forget_marks(self) -> None:
        for one in list(self._known.values()):
            one.marks.update(NO_MARKS)

    def _mark(self, what: str, key: Any) -> int:
        """Let others see which call this worker has begun last; return its mark, 0 where there is none."""
        name = key if type(key) is not list else (*key[:1], len(key))
        try:
            token = self._tokens.get((what, name), 0)
        except TypeError:  # it is no key, as the call will say
            return 0
        if not token:
            token = self._marks.new_token(text(what, key if type(key) is list else [key]))
            if len(self._tokens) >= MOST_TOKENS:
                self._tokens.clear()
                self._forget_marks()
            self._tokens[what, name] = token
        self._word[0] = token
        return token

    def _begin_records(self, what: str, key: Any, starts: bool = True) -> list[Begun]:
        """Begin a record for each key of a call that is timed."""
        begun = []
        for name in key if type(key) in LISTS else (key,):
            known = self._known.get(name) if isinstance(name, (str, int)) else None
            if known is None or not (self._every or known.is_long):
                continue
            made = self._forms.get((what, name))
            if made is None:
                line = recorder.user_line(sys._getframe(2))
                lane, nbytes = self._marks.identity, known.nbytes
                made = form(lane, what, repr(name), nbytes, known.size, known.dtype.name, line=line)
                if len(self._forms) >= MOST_TOKENS:
                    self._forms.clear()
                self._forms[what, name] = made
            ring = recorder.ring
            round_ = known.round + (what != "pull")
            begun.append((ring, ring.begin(made, 0, round_, starts), known))
        return begun

    # ---- what is due before and after a call

    def save_regularly(self, saves: Saves) -> None:
        """Let `saves` have its turn before each step."""
        self._saves, self._extra = saves, True

    def write(self, saving: Written | None) -> None:
        """Go on with a checkpoint after each call, until it is there or another one begins."""
        if saving is not None:
            self._written, self._extra = saving, True

    def before_a_push(self, do: Callable[[], None]) -> None:
        """Before the next push `do`, once."""
        self._first_push, self._extra = do, True

    @contextmanager
    def pushing_table(self, name: str) -> Iterator[None]:
        """Do what is due before and after a push of a table, which is made in the block."""
        saves = self._prepare("push", name) if self._extra else None
        yield
        if self._extra:
            self._follow(saves, name)

    def _prepare(self, what: str, key: object) -> Saves | None:
        """Do what is due before a call; return the saves in which this push counts."""
        if what == "pull":
            return None
        if self._first_push is not None:
            do, self._first_push = self._first_push, None
            do()
        if self._saves is not None and self._saves.is_due(key):
            self.write(self._saves.save())
        return self._saves

    def _follow(self, saves: Saves | None, key: object) -> None:
        """Do what is due after a call."""
        if saves is not None:
            saves.count(key)
        if self._written is not None and self._written.go_on():
            self._written = None
        due = self._saves is not None or self._written is not None or self._first_push is not None
        self._extra = due or self._checks

    # ---- lists

    def _several(self, what: str, keys: Sequence[Any], values: Any, outs: Any, priority: int) -> bool:
        targets = (values if outs is None else outs) if what == "pushpull" else outs
        records = self._all(keys, targets if what == "pull" else values, priority)
        if records is None or (what == "pushpull" and outs is not None and self._all(keys, outs, priority) is None):
            return False
        self._mark(what, keys)
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

    def _one(self, key: Any, array: Any, priority: int, writes: bool = False) -> Key | None:
        """The key, where a call for one plain array can be made, or (`writes`) one that writes into it."""
        if type(array) is not ndarray or type(key) not in (str, int) or self._under_way:
            return None
        record = self._known.get(key)
        if record is None or record.fast is None or array.shape != record.shape or array.dtype != record.dtype:
            return None
        if type(priority) is not int or (priority and priority.bit_length() > PRIORITY_BITS):
            return None
        flags = array.flags
        return record if (flags.carray if writes else flags.c_contiguous) else None

    def _all(self, keys: Sequence[Any], arrays: Any, priority: int) -> list[Key] | None:
        """The keys, where a call for one plain array each can be made."""
        if not keys or type(arrays) not in LISTS or len(arrays) != len(keys):
            return None
        records, as_one, any_length = [], self._backend.quick_list is not None, self._records
        if self._every and not any_length:
            return None
        for key, array in zip(keys, arrays):
            record = self._one(key, array, priority)
            if record is None or (record.is_long and not any_length):
                return None
            if not (as_one or record.fast.lists):  # type: ignore[union-attr]
                return None
            records.append(record)
        return records if len(set(keys)) == len(keys) else None


def _writeable(arrays: Sequence[Array]) -> bool:
    return all(array.flags.writeable for array in arrays)


LONG_SECONDS = 1.0
"""Of a wait, after which peers hear what this worker waits for."""
CLOSED = "the store is closed: make this call before close()"


class Guard:
    """A context in which whatever is raised ends the generation, but for what `refused` tells."""

    def __init__(self, generation: Ending, what: str, names: Sequence[Name]) -> None:
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
    """Check calls, put them in order, and run them as tasks. `known`: the keys that are initialised."""

    def __init__(self, rank: int, backend: Backend, engine: Engine, known: Mapping[Name, Key]) -> None:
        self._rank, self._backend, self._engine, self._known = rank, backend, engine, known
        self.closed = False
        self.checks_finite = False
        """Whether a push of NaN or infinity is refused."""

    def do(self, what: str, key: object, value: object, out: object, priority: int) -> None:
        """Push, pull or pushpull, blocking."""
        names, task = self._prepare(what, key, value, out, priority)
        self.run(names, task, priority, what)

    def start(
        self, what: str, key: object, value: object, out: object, priority: int, turns: Sequence[Hashable],
        begun: Sequence[Begun] = (),
    ) -> Handle:
        """Start a push, pull or pushpull, not blocking; it takes turns with others on its keys and on `turns`.

        `begun`: its records, which start and end with it."""
        with GIVEN:
            others = arguments.turns(turns, what)
        names, task = self._prepare(what, key, value, out, priority)
        order = [*self._order(names), *(("turns", name) for name in others)]
        task = _recorded(what, task, begun) if begun else task
        with self.guard(what, names):
            return self._engine.submit(order, self.hearing(task), priority, text(what, names))

    def see_pull(self, keys: Sequence[Key], key: object, out: object, priority: int) -> None:
        """ValueError or TypeError where a pull of these keys, which are yet to be made, could not be made so."""
        arguments.see_priority(priority, "pull")
        arguments.check({record.name: record for record in keys}, "pull", key, out=out)

    def taken(self, key: object, push: Handle, told: bool) -> Handle:
        """A handle that ends when the servers have read what `push`, of these keys, sends; `push` where nobody is
        `told` of that."""
        self.check_open()
        with GIVEN:
            if not isinstance(push, Handle):
                raise TypeError(f"taken: push={push!r} is no handle: pass what ipush of these keys has returned")
            keys = [arguments.find_key(self._known, name, "taken") for name in arguments.names(key)]
        if not told:
            return push
        what = f"{push.what}, read by the servers"
        with self.guard(what):
            return self._engine.submit([("taken", push)], self.hearing(self._read(keys, push)), 0, what)

    def pull_rows(self, key: object, out: object, row_ids: object, priority: int) -> None:
        """`KVStore.row_sparse_pull`."""
        what = "row_sparse_pull"
        self.check_open()
        with GIVEN:
            arguments.see_priority(priority, what)
            rows = arguments.rows(self._known, key, out, row_ids)
        for record, target, ids in rows:
            self.run([record.name], self._backend.transfers.pull_rows(record, target, ids), priority, what)

    def pull_newer(self, key: object, out: object, newer_than: object, priority: int, base: int) -> list[int]:
        """`KVStore.pull` of keys that do not stand at the versions in `newer_than`; the versions that `out` then holds.
        `base`: rounds of a job that went before."""
        self.check_open()
        with GIVEN:
            arguments.see_priority(priority, "pull")
            made = arguments.check(self._known, "pull", key, out=out)
            held = arguments.versions(key, newer_than)
        found = [version - base for version in held]
        self.run([call.key.name for call in made], self._newer(made, found), priority, "pull")
        return [version + base for version in found]

    def run(self, names: Sequence[Name], task: Task[Any], priority: int, what: str) -> None:
        """Do it, blocking; a failure ends the generation."""
        with self.guard(what, names):
            self._backend.direct = not self._engine.under_way
            try:
                self._engine.run(self._order(names), self.hearing(task, names), priority, lambda: text(what, names))
            finally:
                self._backend.direct = False

    def guard(self, what: str, names: Sequence[Name] = ()) -> Guard:
        """Whatever is raised within ends the generation, but for what all workers raise as they asked for what cannot
        be."""
        return Guard(self._engine.generation, what, names)

    def pull(self, key: Key, out: Array) -> Task[None]:
        """Pull one key."""
        return self._backend.transfers.pull([key], [out.reshape(-1)])

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

    def hearing(self, task: Task[T], names: Sequence[Name] | None = None) -> Task[T]:
        """Run a task, and hear the servers before each step. `names`: keys of a call that the program waits for: where
        that does not go on for long, peers hear of it, once."""
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
                        self._backend.waits([self._known[name] for name in names if name in self._known])
                yield moved
        finally:
            task.close()

    def _prepare(self, what: str, key: Any, value: Any, out: Any, priority: int) -> tuple[list[Name], Task[None]]:
        """The keys, and what is to be done. ValueError or TypeError where an argument is bad."""
        self.check_open()
        with GIVEN:
            arguments.see_priority(priority, what)
            made = arguments.check(self._known, what, key, value, out)
            if what != "pull":
                self._backend.check_updated([call.key for call in made], what)
        names = [call.key.name for call in made]
        if self.checks_finite and what != "pull":
            with self.guard(what, names):
                for call in made:
                    see_finite(self._rank, what, call)
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

    def _one(self, call: Call, priority: int) -> Task[None]:
        if call.gathered is None and call.spread is None and len(call.targets) < 2:
            return self._transfer(call, priority)
        return self._with_gpus(call, priority)

    def _with_gpus(self, call: Call, priority: int) -> Task[None]:
        """Transfer one key between arrays that GPUs sum, or results that go to several."""
        if call.gathered is not None:
            yield from call.gathered
        yield from self._transfer(call, priority)
        yield from _finish(call)

    def _transfer(self, call: Call, priority: int) -> Task[None]:
        """Push, pull or both, of one key: the first target gets the result."""
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
        return in_turn(push, transfers.pull([key], outs)) if outs else push

    def _newer(self, made: Sequence[Call], found: list[int]) -> Task[None]:
        """Pull the keys that do not stand at the versions in `found`, and put there those that they are read at."""
        versions = yield from self._backend.versions([call.key for call in made])
        chosen = [at for at, version in enumerate(versions) if made[at].key.replaced or version != found[at]]
        if not chosen:
            return
        outs = [made[at].targets[0].reshape(-1) for at in chosen]
        versions = yield from self._backend.pull_versions([made[at].key for at in chosen], outs)
        for at, version in zip(chosen, versions):
            found[at], made[at].key.replaced = version, False
            yield from _finish(made[at])

    def _read(self, keys: Sequence[Key], push: Handle) -> Task[None]:
        while not push.done:
            yield False
        if push.error is None:
            yield from self._backend.settle(keys)

    def _order(self, names: Sequence[Name]) -> list[Hashable]:
        """Return what an operation takes turns on: its keys, and communicators, used in one order everywhere."""
        return [*names, *self._backend.communicators]


def _recorded(what: str, task: Task[None], begun: Sequence[Begun]) -> Task[None]:
    """Say when a task starts, and ends."""
    for ring, sequence, key in begun:
        ring.start(sequence, 0, key.round + (what != "pull"))
    yield from task
    for ring, sequence, _ in begun:
        ring.end(sequence)


def text(what: str, names: Sequence[Name]) -> str:
    """An operation, as errors name it."""
    word = f" of key{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:4]))}" if names else ""
    return f"{what}{word}{', ...' if len(names) > 4 else ''}"


def step_of_push() -> str:
    """Return, for a sentence, the step of this rank's training; "" where the program has noted none."""
    return f" (the step noted last is {recorder.place.step})" if recorder.place.step >= 0 else ""


def see_finite(rank: int, what: str, call: Call) -> None:
    """FloatingPointError where a push holds NaN or infinity: which rank, key and push, and where the first one is."""
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
        raise of_caller(FloatingPointError(
            f"{what} of key {call.key.name!r}: push {call.key.round + 1} of rank {rank} holds {nans} NaN and "
            f"{wrong - nans} infinities among {values.size} elements, the first at {where}{step_of_push()}: look at "
            "the loss, the learning rate and the data of that step on that rank"
        ))  # fmt: skip


def _finish(call: Call) -> Generator[bool | None, None, None]:
    """The result is in the first target: it goes to the others, and to GPUs."""
    for other in call.targets[1:]:
        np.copyto(other, call.targets[0])
    if call.spread is not None:
        yield from call.spread.spread()


def refused(error: BaseException) -> bool:
    """Return whether it is an error that all workers raise, with which nothing has changed (`rendezvous.agree`)."""
    callers = isinstance(error, (ValueError, TypeError)) and not isinstance(error, CollectiveError)
    return callers and getattr(error, "of_caller", False)


SMALL_BYTES = {True: 1 << 14, False: 1 << 16}
"""Of a key with a fast route, and of one without: longer ones go alone, as to copy them takes as long as they save."""
MOST_BYTES = 1 << 20
"""Of one vector."""


def steps(keys: Sequence[Key]) -> list[list[int]]:
    """Return which keys of a list (by their places there) go together, in which order: the same on every worker."""
    result: list[list[int]] = []
    open_: dict[np.dtype, tuple[list[int], int]] = {}
    for place, key in enumerate(keys):
        if not 0 < key.nbytes <= SMALL_BYTES[key.fast is not None]:
            result.append([place])
            continue
        step, nbytes = open_.get(key.dtype, ([], 0))
        if not step or nbytes + key.nbytes > MOST_BYTES:
            step, nbytes = [], 0
            result.append(step)
        step.append(place)
        open_[key.dtype] = step, nbytes + key.nbytes
    return result


class Vectors:
    """Memory for one vector at a time, and for its sum; `shared`: the first lies where all processes of the node can
    read it."""

    def __init__(self, shared: bool) -> None:
        self._empty = arena.empty if shared else np.empty
        self._memory: dict[np.dtype, tuple[Array, Array]] = {}

    def room(self, like: Sequence[Array]) -> tuple[Array, Array, list[slice]]:
        """A vector as long as these 1-D arrays of one dtype, another for its sum, and where each one lies there."""
        dtype, cuts = like[0].dtype, [0, *accumulate(array.size for array in like)]
        if dtype not in self._memory or self._memory[dtype][0].size < cuts[-1]:
            size = max(cuts[-1], MOST_BYTES // dtype.itemsize)
            try:
                vector = self._empty(size, dtype)
            except MemoryError:  # of what the node shares: sums take any
                vector = np.empty(size, dtype)
            self._memory[dtype] = vector, np.empty(size, dtype)
        vector, total = (memory[: cuts[-1]] for memory in self._memory[dtype])
        return vector, total, [slice(*ends) for ends in pairwise(cuts)]

    def lay(self, values: Sequence[Array]) -> tuple[Array, Array, list[Array]]:
        """Arrays one behind the other, room for the sum of that vector, and the parts of the sum."""
        vector, total, slices = self.room(values)
        np.concatenate(values, out=vector)
        return vector, total, [total[each] for each in slices]
