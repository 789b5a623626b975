"""Route every push, pull and pushpull of a worker: plain arrays by a short-cut, all other calls by the general path.

`Route.call` is the general path. It does the work that is due before and after a call, such as saves, and leaves the
call itself to `operations`. `Route.try_fast` is the short-cut: one straight-line function that makes only the checks
that a plain array needs, and then calls the fast path of the key. If the short-cut cannot serve a call, it changes
nothing. The short-cut saves time: an 8-byte `pushpull` through a server of the node takes 25 microseconds by the
short-cut, and 200 microseconds by the general path (two busy cores, 2026-11-29).

`CallMarks` shows other processes which call this worker is in. Each rank has a *page*, a file in the host's memory that
other processes read. The store has one *lane* (slot) of the page. The *mark* is a number in that lane which stands for
the text of the call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from numpy import dtype as dtype_of
from numpy import ndarray

from mpips.collectives.communicator import thread_name
from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric.tasks import Task, run_together
from mpips.collectives.recorder import own as recorder
from mpips.collectives.recorder.own import Marks
from mpips.collectives.recorder.ring import form
from mpips.store.keys import arguments
from mpips.store.keys.arguments import PRIORITY_BITS
from mpips.store.keys.key import NO_MARKS, FastList, Key, Name, Pushed
from mpips.store.runtime.engine import Handle
from mpips.store.worker.interface import Backend, BackgroundSave, SaveSchedule
from mpips.store.worker.operations import Array, Begun, Operations, text

LISTS = (list, tuple)
# maximum number of call texts that a worker keeps; each pair of operation and keys has one text
MOST_TOKENS = 4096


class CallMarks:
    """Shows other processes which call this worker has begun last, and records how long calls take.

    By default only calls of long keys are recorded. With `set_timed(True)` all calls are recorded.
    """

    def __init__(self, known: Mapping[Name, Key], lane: int) -> None:
        self._known = known
        self._marks = Marks(lane)
        self._tokens = dict[Any, int]()
        self.word = self._marks.word
        self._forms = dict[Any, bytes]()
        # True to record the calls of every key, not only those of long keys
        self.every = False
        # True inside a call whose timing records have already begun
        self.records = False
        recorder.add_timeable(self)

    def set_timed(self, every: bool) -> None:
        """From now on time the calls of every key if `every`, otherwise only the calls of long keys.

        See `recorder.own.trace`.
        """
        self.every = every
        self._forget_marks()

    def mark_first(self, what: str, record: Key) -> int:
        """Return the mark of a call of one key. For a call that is never timed, also store the mark in the key.

        Return 0 if the call has to be timed. Then `Route.call` makes the mark and the records.
        """
        timed = self.every or record.is_long
        if timed and not self.records:
            return 0
        token = self.mark(what, record.name)
        if not timed:
            record.marks[what] = token
        return token

    def _forget_marks(self) -> None:
        for one in list(self._known.values()):
            one.marks.update(NO_MARKS)

    def mark(self, what: str, key: Any) -> int:
        """Show other processes which call this worker begins. Return the call's mark, or 0 if the key is not valid."""
        name = key if type(key) is not list else (*key[:1], len(key))
        try:
            token = self._tokens.get((what, name), 0)
        # The key is unhashable. The call itself will raise the error.
        except TypeError:
            return 0
        if not token:
            token = self._marks.new_token(text(what, key if type(key) is list else [key]))
            if len(self._tokens) >= MOST_TOKENS:
                self._tokens.clear()
                self._forget_marks()
            self._tokens[what, name] = token
        self.word[0] = token
        return token

    def begin_records(self, what: str, key: Any, starts: bool = True) -> list[Begun]:
        """Begin a timing record for each key of a call, except for keys whose calls are not timed."""
        begun: list[Begun] = []
        for name in key if type(key) in LISTS else (key,):
            known = self._known.get(name) if isinstance(name, (str, int)) else None
            if known is not None and (self.every or known.is_long):
                begun.append(self.begin_record(what, known, repr(name), known.size, known.dtype, starts))
        return begun

    def begin_record(
        self, what: str, pushed: Pushed, label: str, elements: int, dtype: dtype_of, starts: bool = True
    ) -> Begun:
        """Begin the timing record of a call that transfers `elements` elements of a key or collection.

        Args:
            label: The key or collection, as `mpips why` and traces show it.
            starts: True if the call starts now, False if it starts later.
        """
        encoded = self._forms.get((what, label, elements))
        if encoded is None:
            line = recorder.user_line(sys._getframe(2))
            nbytes = elements * dtype.itemsize
            encoded = form(self._marks.identity, what, label, nbytes, elements, dtype.name, line=line)
            if len(self._forms) >= MOST_TOKENS:
                self._forms.clear()
            self._forms[what, label, elements] = encoded
        ring = recorder.ring
        return ring, ring.begin(encoded, 0, pushed.round + (what != "pull"), starts), pushed


class ListTransfers:
    """Pushes and pulls a list of keys, each with one plain array, by fast paths.

    If the backend has a fast path for whole lists, it is used. Otherwise the fast path of each key is used.
    """

    def __init__(self, operations: Operations, backend: Backend) -> None:
        self._operations = operations
        self._backend = backend

    def run(self, what: str, records: Sequence[Key], values: Any, outs: Any, priority: int) -> None:
        targets = (values if outs is None else outs) if what == "pushpull" else outs
        if self._backend.quick_list is not None:
            self._as_one(self._backend.quick_list, what, records, values, targets, priority)
            return
        # If arrays overlap, the pull of one key may overwrite an array that a server still reads for another key. In
        # this case wait for all pushes before pulling.
        mixed = what == "pushpull" and (outs is not None or len(set(map(id, values))) < len(values))
        if what != "pull":
            self._push_all(records, values, priority, what == "push" or mixed, what)
        if what != "push":
            self._pull_all(records, targets, priority, what)

    def _as_one(
        self, route: FastList, what: str, records: Sequence[Key], values: Any, targets: Any, priority: int
    ) -> None:
        if what == "push":
            left = route.push(records, values, priority)
        elif what == "pull":
            left = route.pull(records, targets)
        else:
            left = route.pushpull(records, values, targets, priority)
        if left is not None:
            self._operations.run([record.name for record in records], left, priority, what)

    def _push_all(self, records: Sequence[Key], values: Sequence[Array], priority: int, wait: bool, what: str) -> None:
        """Push all keys. With `wait`, return only when all arrays may be overwritten."""
        left: list[tuple[Key, Task[None]]] = []
        posted = []
        for record, value in zip(records, values):
            task = record.fast.post(value, priority)  # type: ignore[union-attr]
            if task is None:
                posted.append(record)
            else:
                left.append((record, task))
        for record in posted if wait else ():
            task = record.fast.wait_until_read()  # type: ignore[union-attr]
            if task is not None:
                left.append((record, task))
        if left:
            self._run(left, priority, what)

    def _pull_all(self, records: Sequence[Key], outs: Sequence[Array], priority: int, what: str) -> None:
        """Pull the keys one by one until a pull would have to wait. Run that key and all later keys as one task."""
        left: list[tuple[Key, Task[None]]] = []
        for record, out in zip(records, outs):
            task = self._operations.pull(record, out) if left else record.fast.pull(out)  # type: ignore[union-attr]
            if task is not None:
                left.append((record, task))
        if left:
            self._run(left, priority, what)

    def _run(self, left: Sequence[tuple[Key, Task[None]]], priority: int, what: str) -> None:
        names = [record.name for record, _ in left]
        self._operations.run(names, run_together([task for _, task in left]), priority, what)


class Route:
    """Makes a worker's pushes and pulls by the short-cut `try_fast` if possible, otherwise by `call`.

    All keys of a list are pushed before the call waits for any of them, because other workers may list the keys in
    another order. Then the keys are pulled one by one until a pull would have to wait. That key and all later keys run
    as one task.

    Args:
        known: The initialised keys.
        under_way: The unfinished operations. Fast paths are used only while it is empty.
        lane: The number of the store's slot in this rank's page (see the module's docstring).
    """

    def __init__(
        self, known: Mapping[Name, Key], under_way: Sized, operations: Operations, backend: Backend, lane: int
    ) -> None:
        self._known = known
        self._under_way = under_way
        self._operations = operations
        self._backend = backend
        self._saves: SaveSchedule | None = None
        self._written: BackgroundSave | None = None
        self._first_push: Callable[[], None] | None = None
        self._checks = operations.checks_finite
        # True while _saves, _written, _first_push or _checks is set. Calls then take the general path.
        self._slow_path_due = self._checks
        self._lists = ListTransfers(operations, backend)
        self.marks = CallMarks(known, lane)
        self._word = self.marks.word
        # identifier of the thread that is inside a call of the store, or 0
        self._inside = 0

    def make(self, what: str, key: Any, value: Any, out: Any, priority: int) -> None:
        """Make a push, pull or pushpull. Blocking."""
        if self._inside:
            self._check_thread(what)
        self._inside = get_ident()
        try:
            if not self.try_fast(what, key, value, out, priority):
                self.call(what, key, value, out, priority)
        finally:
            self._inside = 0

    def _check_thread(self, what: str) -> None:
        """Check that no other thread is inside a call of the store. Otherwise end the generation with an error."""
        if self._inside not in (0, get_ident()):
            one, other = thread_name(get_ident()), thread_name(self._inside)
            error = CollectiveError(
                f"rank {self._operations.rank}: thread {one!r} calls {what} while thread {other!r} "
                "is in a call of the store: let one thread make all calls of a store"
            )
            raise self._operations.end_by(what, [], error)

    def call(self, what: str, key: object, value: object, out: object, priority: int) -> None:
        """Make a push, pull or pushpull by the general path, with all saves and records that are due. Blocking."""
        due = self._slow_path_due
        self.marks.mark(what, key)
        begun = self.marks.begin_records(what, key)
        saves = self._prepare(what, key) if due else None
        if saves is not None:
            saves.pushing = key
        self.marks.records, self._slow_path_due = True, False
        try:
            # If only a timing record or a save has made this call take the general path, the transfer itself can still
            # be fast.
            if self._checks or not (begun or due) or not self.try_fast(what, key, value, out, priority):
                self._operations.do(what, key, value, out, priority)
        finally:
            self.marks.records, self._slow_path_due = False, due
            if saves is not None:
                saves.pushing = ()
        if due:
            self._follow(saves, key)
        for ring, sequence, _ in begun:
            ring.end(sequence)

    def try_fast(self, what: str, key: Any, value: Any, out: Any, priority: int) -> bool:
        """Make a push, pull or pushpull by a fast path. Return False, with nothing done, if `call` has to make it."""
        if self._slow_path_due:
            return False
        if what == "push":
            record = self._one(key, value, priority)
        elif what == "pull":
            record = self._one(key, out, priority, writes=True)
        else:
            record = self._one(key, value, priority, writes=out is None)
        if record is not None:
            # A mark of 0 means that the call has to be timed. `call` begins the timing and then calls `try_fast` again.
            mark = record.marks[what] or self.marks.mark_first(what, record)
            if not mark:
                return False
            self._word[0] = mark
        # PyTorch's CPU tensors can take the fast path as NumPy views of their memory.
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
                if out is not None and not _is_plain(out, record, True):
                    return False
                left = fast.pushpull(value, target, priority)  # type: ignore[union-attr]
        except BaseException as error:
            raise self._operations.end_by(what, [] if record is None else [record.name], error) from None
        if left is not None:
            self._operations.run([record.name], left, priority, what)
        return True

    def start(
        self, what: str, key: object, value: object, out: object, priority: int, turns: Sequence[Hashable]
    ) -> Handle:
        """Start a call and return its handle. Does not block.

        Calls that share a key or a name in `turns` run in program order.
        """
        self._check_thread(f"i{what}")
        self.marks.mark(what, key)
        saves = self._prepare(what, key) if self._slow_path_due else None
        begun = self.marks.begin_records(what, key, starts=False)
        handle = self._operations.start(what, key, value, out, priority, turns, begun)
        if self._slow_path_due:
            self._follow(saves, key)
        return handle

    @contextmanager
    def marked(self, what: str) -> Iterator[None]:
        """Until the block ends, show other processes that this worker is in the call `what`, without naming keys."""
        self.mark(what)
        outer, self._inside = self._inside, get_ident()
        try:
            if what == "barrier" and not recorder.is_traced:
                yield
                return
            ring, sequence = recorder.begin_rare(what)
            yield
            ring.end(sequence)
        finally:
            self._inside = outer

    def mark(self, what: str) -> None:
        """Show other processes that this worker has begun a call without a key."""
        self._check_thread(what)
        self.marks.mark(what, [])

    # ---- what is due before and after a call

    def save_regularly(self, saves: SaveSchedule) -> None:
        """From now on, let `saves` begin a save before each step for which one is due."""
        self._saves, self._slow_path_due = saves, True

    def write(self, saving: BackgroundSave | None) -> None:
        """After each call, write some pieces of the checkpoint `saving`, until it is complete or another one begins."""
        if saving is not None:
            self._written, self._slow_path_due = saving, True

    def before_a_push(self, do: Callable[[], None]) -> None:
        """Call `do` once, before the next push."""
        self._first_push, self._slow_path_due = do, True

    @contextmanager
    def pushing(self, names: list[str]) -> Iterator[None]:
        """Do the saves that are due before and after a push to these collections. The caller pushes in the block."""
        saves = self._prepare("push", names) if self._slow_path_due else None
        yield
        if self._slow_path_due:
            self._follow(saves, names)

    def _prepare(self, what: str, key: object) -> SaveSchedule | None:
        """Before a push, run the callback of `before_a_push`, and begin a save if one is due. Do nothing for a pull.

        Return the save schedule that must count the push, or None if nothing has to count it.
        """
        if what == "pull":
            return None
        if self._first_push is not None:
            do, self._first_push = self._first_push, None
            do()
        if self._saves is not None and self._saves.is_due(key):
            self.write(self._saves.save())
        return self._saves

    def _follow(self, saves: SaveSchedule | None, key: object) -> None:
        """After a call, let `saves` count it, and begin to write the next pieces of an unfinished checkpoint."""
        if saves is not None:
            saves.count(key)
        if self._written is not None and self._written.go_on():
            self._written = None
        due = self._saves is not None or self._written is not None or self._first_push is not None
        self._slow_path_due = due or self._checks

    # ---- lists

    def _several(self, what: str, keys: Sequence[Any], values: Any, outs: Any, priority: int) -> bool:
        targets = (values if outs is None else outs) if what == "pushpull" else outs
        records = self._all(keys, targets if what == "pull" else values, priority)
        if records is None or (what == "pushpull" and outs is not None and self._all(keys, outs, priority) is None):
            return False
        self.marks.mark(what, keys)
        if what != "push" and not all(array.flags.writeable for array in targets):
            return False
        if outs is not None and len(set(map(id, outs))) < len(outs):
            # Two keys have the same output array. The general path raises an error that names the keys.
            return False
        self._lists.run(what, records, values, outs, priority)
        return True

    # ---- which calls can take a fast path

    def _one(self, key: Any, array: Any, priority: int, writes: bool = False) -> Key | None:
        """Return the key's record if a call of one plain array can take a fast path, else None.

        Args:
            writes: True if the call writes into the array.
        """
        if type(key) not in (str, int) or self._under_way:
            return None
        record = self._known.get(key)
        if record is None or record.fast is None or not _is_plain(array, record, writes):
            return None
        if type(priority) is not int or (priority and priority.bit_length() > PRIORITY_BITS):
            return None
        return record

    def _all(self, keys: Sequence[Any], arrays: Any, priority: int) -> list[Key] | None:
        """Return the keys' records if a call with one plain array for each key can take fast paths, else None."""
        if not keys or type(arrays) not in LISTS or len(arrays) != len(keys):
            return None
        records, as_one, any_length = [], self._backend.quick_list is not None, self.marks.records
        if self.marks.every and not any_length:
            return None
        for key, array in zip(keys, arrays):
            record = self._one(key, array, priority)
            if record is None or (record.is_long and not any_length):
                return None
            if not (as_one or record.fast.lists):  # type: ignore[union-attr]
                return None
            records.append(record)
        return records if len(set(keys)) == len(keys) else None


def _is_plain(array: Any, record: Key, writes: bool) -> bool:
    """True if an array is a NumPy array that fits the key, and if `writes`, can also be written to."""
    if type(array) is not ndarray or array.shape != record.shape or array.dtype != record.dtype:
        return False
    flags = array.flags
    return flags.carray if writes else flags.c_contiguous
