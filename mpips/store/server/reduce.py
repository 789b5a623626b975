"""Add workers' gradients for a unit, block by block, on the server's threads; `unit` adds and updates one block.

Parts are added in the order of the contributors, so results are the same bit for bit, however many threads share a sum.
A share of a long sum takes some 50 us, so little may go by around it (`Team`).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mpips.collectives.kernels.sums import add_parts
from mpips.store.keys.key import Array
from mpips.store.keys.row_sparse import sum_of
from mpips.store.server.unit import Contribution, Unit

BURST = 4
"""Blocks that are done before the server listens again, for each thread."""
SHARED_BYTES = 1 << 21
"""Least of a sum that is worth another thread."""
PART_BYTES = 1 << 20
"""What a thread sums at a time where there are others."""


class Reduce:
    """Arithmetic of one server. Each call does what can be done now, counts blocks in `unit.block`, and says whether it
    has done anything; the round is over when `unit.block` is `unit.blocks`.

    `threads`: cores that it may use for long sums at once; `begin_thread` is called first on each of the others.
    `cores_shared`: processes of the node are more than its cores.
    """

    def __init__(
        self, threads: int = 1, begin_thread: Callable[[], None] | None = None, cores_shared: bool = False
    ) -> None:
        self._cores_shared = cores_shared
        self._team = Team(threads, begin_thread)

    # ---- payloads that lie in memory of this node

    def sum_whole(self, unit: Unit, arrays: Sequence[Array]) -> None:
        """Sum and write the only block of contributions that are all there."""
        size = unit.stored.size
        unit.open_write(0, size)
        unit.write(0, size, arrays)
        unit.block = 1

    def sum_blocks(self, unit: Unit, sources: Sequence[Contribution]) -> bool:
        """Sum and write those of the next blocks that are there, on all threads at once where that is long enough."""
        first = stop = unit.block
        limit = min(stop + BURST * self._team.threads, unit.blocks)
        while stop < limit and all(source.ready(stop) for source in sources):
            stop += 1
        if stop == first:
            return False
        if first == 0:
            unit.open_write()
        if unit.undo is not None:
            unit.undo.keep_old(unit.bounds(first)[0], unit.bounds(stop - 1)[1])
        if self.worth_sharing(unit, sources, first, stop):
            self._share(unit, sources, first, stop)
        else:
            for block in range(first, stop):
                start, end = unit.bounds(block)
                unit.write(start, end, [source.part(block, start, end) for source in sources])
                _tell(unit, block + 1)
        unit.block = stop
        return True

    def worth_sharing(self, unit: Unit, sources: Sequence[Contribution], first: int, stop: int) -> bool:
        """Return whether blocks are summed on all threads.

        Workers that wait leave their cores to them; those that still copy need them, unless this server is far behind,
        or cores are shared, where who waits for it gives his away.
        """
        threads = self._team.threads
        if threads == 1 or unit.stored.nbytes < SHARED_BYTES:
            return False
        nbytes = (unit.bounds(stop - 1)[1] - unit.bounds(first)[0]) * unit.stored.itemsize
        if nbytes < SHARED_BYTES:
            return False
        if all(source.ready(unit.blocks - 1) for source in sources):
            return nbytes >= 2 * SHARED_BYTES
        return self._cores_shared or stop - first >= 2 * threads

    def _share(self, unit: Unit, sources: Sequence[Contribution], first: int, stop: int) -> None:
        """Sum and write blocks on all threads; thread 0, which has the first parts, tells readers of each block."""
        step = max(1, PART_BYTES // unit.stored.itemsize)
        parts = []
        for block in range(first, stop):
            begin, end = unit.bounds(block)
            parts += [(block, start, min(start + step, end)) for start in range(begin, end, step)]
        done: set[int] = set()
        following = 0

        def work(index: int, thread: int) -> None:
            nonlocal following
            block, start, stop = parts[index]
            unit.write(start, stop, [source.part(block, start, stop) for source in sources])
            done.add(index)
            if thread == 0:
                while following in done:
                    following += 1
                if following < len(parts):
                    _tell(unit, parts[following][0])

        self._team.share(work, range(len(parts)))
        _tell(unit, stop)

    # ---- payloads of which some come as messages

    def sum_arriving(self, unit: Unit, sources: Sequence[Contribution]) -> bool:
        """Add what is there of the next block, contributor by contributor; write it when all have been added."""
        number, first, last = unit.block, unit.part, len(sources) - 1
        start, stop = unit.bounds(number)
        while sources[unit.part].ready(number):
            part = sources[unit.part].part(number, start, stop)
            if unit.part == last:
                parts = [part] if unit.total is None else [unit.total, part]
                unit.part, unit.total = 0, None
                self._write_next(unit, parts)
                return True
            if unit.total is None:
                unit.total = part.copy()
            else:
                add_parts([unit.total, part], unit.total)
            unit.part += 1
        for source in sources[unit.part + 1 :]:
            source.ready(number)  # it may start to come; or else all servers would wait for the same worker's link
        return unit.part > first

    def _write_next(self, unit: Unit, parts: Sequence[Array]) -> None:
        """Write the next block, by the sum of these."""
        start, stop = unit.bounds(unit.block)
        if unit.block == 0:
            unit.open_write()
        unit.keep_old(start, stop)
        unit.write(start, stop, parts)
        unit.block += 1
        _tell(unit, unit.block)

    # ---- payloads of which some are compressed or row-sparse

    def sum_coded(self, unit: Unit, sources: Sequence[Contribution]) -> bool:
        """Add the next contributor; when all have been added, write the sum: only rows that somebody named, where all
        gave rows."""
        if unit.part < len(sources):
            return _add_next(unit, sources[unit.part])
        if unit.total is None:
            if all(source.empty for source in sources):
                unit.pass_round()
            else:
                unit.open_write()
                unit.write_rows(unit.rows)
            unit.block = unit.blocks
            return True
        start, stop = unit.bounds(unit.block)
        self._write_next(unit, [unit.total[start:stop]])
        return True

    # ---- one contribution by itself

    def apply_single(self, unit: Unit, source: Contribution) -> bool:
        """Write the next block of one contribution."""
        if not source.ready(unit.block):
            return False
        if source.empty:
            source.rows()  # takes it
            unit.pass_round()
            unit.block = unit.blocks
            return True
        if unit.block == 0:
            unit.open_write()
        if not source.coded:
            start, stop = unit.bounds(unit.block)
            part = source.part(unit.block, start, stop)
            unit.keep_old(start, stop)
            unit.write(start, stop, [part])
            unit.block += 1
            return True
        if source.sparse:
            unit.write_rows([source.rows()])
        else:
            total = np.zeros_like(unit.stored)
            source.add_to(total)
            unit.keep_old(0, total.size)
            unit.write(0, total.size, [total])
        unit.block = unit.blocks
        return True


def _add_next(unit: Unit, source: Contribution) -> bool:
    """Add a contributor, or a block of it, to what was read of the round: rows as long as all gave rows."""
    if not source.ready(unit.part_block):
        return False
    if source.sparse and unit.total is None:
        unit.rows.append(source.rows())
        if not source.local:  # a copy of what came
            unit.rows = [sum_of(unit.rows)]
        unit.part += 1
        return True
    if unit.total is None:
        unit.total = np.zeros_like(unit.stored)
        for rows in unit.rows:
            rows.add_to(unit.total.reshape(rows.shape))
        unit.rows = []
    if source.coded:
        source.add_to(unit.total)
        unit.part_block = unit.blocks
    else:
        start, stop = unit.bounds(unit.part_block)
        part = source.part(unit.part_block, start, stop)
        total = unit.total[start:stop]
        add_parts([total, part] if unit.part else [part], total)
        unit.part_block += 1
    if unit.part_block == unit.blocks:
        unit.part, unit.part_block = unit.part + 1, 0
    return True


def _tell(unit: Unit, blocks: int) -> None:
    """Tell readers that so many blocks of the round are written; of the last they hear when the round ends."""
    if blocks < unit.blocks:
        unit.words[0] = unit.round * unit.blocks + blocks


Work = Callable[[int, int], None]


class _Task:
    """A task for all threads: `work(item, thread)` for every item that is left."""

    def __init__(self, work: Work, items: Iterable[int]) -> None:
        self._work, self._left = work, deque(items)
        self.errors: list[Exception] = []

    def front(self) -> None:
        """Do item after item from the front, as thread 0."""
        try:
            self._take(0, self._left.popleft)
        finally:
            self._left.clear()  # where it has raised, the others are to end

    def back(self, thread: int) -> None:
        """Do item after item from the back."""
        try:
            self._take(thread, self._left.pop)
        except Exception as error:
            self.errors.append(error)
            self._left.clear()

    def _take(self, thread: int, take: Callable[[], int]) -> None:
        while True:
            try:
                item = take()
            except IndexError:
                return
            self._work(item, thread)


class Team:
    """The calling thread, number 0, and `threads - 1` more, of which each calls `begin` first; they end with it."""

    def __init__(self, threads: int, begin: Callable[[], None] | None = None) -> None:
        self.threads = threads
        self._others = [_Other(number, begin) for number in range(1, threads)]
        for other in self._others:
            weakref.finalize(self, other.give_task, None)

    def share(self, work: Work, items: Iterable[int]) -> None:
        """Do `work(item, thread)` for every item. Thread 0 takes them from the front, the others from the back.
        Blocking; raises what one of them raises, after all have ended. A thread that wakes up when nothing is
        left is not waited for."""
        task = _Task(work, items)
        for other in self._others:
            other.give_task(task)
        try:
            task.front()
        finally:
            for other in self._others:
                other.settle()
        for error in task.errors:
            raise error


class _Other:
    """One of the others; its thread begins when it is first needed. Who waits for it sleeps: who looked again and again
    would keep the interpreter from it."""

    def __init__(self, number: int, begin: Callable[[], None] | None) -> None:
        self._number, self._begin = number, begin
        self._gate, self._busy = threading.Lock(), threading.Lock()
        self._gate.acquire()
        self._tasks: deque[_Task | None] = deque(maxlen=1)
        self._begun = False

    def give_task(self, task: _Task | None) -> None:
        """Take part in a task; None: no more follow."""
        if not self._begun:
            if task is None:
                return
            self._begun = True
            threading.Thread(target=self._run, daemon=True).start()
        self._tasks.append(task)
        if self._gate.locked():
            self._gate.release()

    def settle(self) -> None:
        """Take back a task that it has not begun, or wait until it has ended its part."""
        self._tasks.clear()
        with self._busy:
            pass

    def _run(self) -> None:
        if self._begin is not None:
            self._begin()
        while True:
            self._gate.acquire()
            with self._busy:
                try:
                    task = self._tasks.popleft()
                except IndexError:
                    continue
                if task is None:
                    return
                task.back(self._number)
                del task  # nothing of it stays here: it holds a server's memory
