"""Add workers' gradients for a unit, block by block, on the server's threads; `unit` adds and updates one block.

A contributor is a worker that pushes to the unit. Gradients are always added in the order of the contributors. So the
results are bit-identical, however many threads share a sum. One thread's share of a long sum takes some 50 us, so
starting the threads must take much less time (`Team`).
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

# number of blocks that each thread sums before the server reads messages again
BURST = 4
# Sums of fewer bytes than this use a single thread, because waking other threads would cost more time than it saves.
SHARED_BYTES = 1 << 21
# number of bytes that a thread sums at a time when several threads share a sum
PART_BYTES = 1 << 20


class Reduce:
    """Sums the pushes to one server.

    A method that sums never waits for a contribution. It uses the data that has arrived, and counts finished blocks in
    `unit.block`. The server calls the method again until `unit.block` is `unit.blocks`, that is, until the round is
    over. Methods that return a bool return True if they have done anything.

    Args:
        threads: Number of threads for a long sum, including the caller's.
        begin_thread: Function that each thread other than the caller's calls first.
        cores_shared: True if the node has more processes than cores.
    """

    def __init__(
        self, threads: int = 1, begin_thread: Callable[[], None] | None = None, cores_shared: bool = False
    ) -> None:
        self._cores_shared = cores_shared
        self._team = Team(threads, begin_thread)

    # ---- sums of payloads in memory of this node

    def sum_whole(self, unit: Unit, arrays: Sequence[Array]) -> None:
        """Sum and write a unit of one block, whose contributions are all complete."""
        size = unit.stored.size
        unit.open_write()
        unit.keep_old(0, size)
        unit.write(0, size, arrays)
        unit.block = 1

    def sum_blocks(self, unit: Unit, sources: Sequence[Contribution]) -> bool:
        """Sum and write the next blocks that all contributors have filled, on all threads if `worth_sharing`.

        Return False if some contributor has not filled the next block.
        """
        first = stop = unit.block
        limit = min(stop + BURST * self._team.threads, unit.blocks)
        while stop < limit and all(source.ready(stop) for source in sources):
            stop += 1
        if stop == first:
            return False
        if first == 0:
            unit.open_write()
        unit.keep_old(unit.bounds(first)[0], unit.bounds(stop - 1)[1])
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
        """True if blocks should be summed on all threads.

        Workers that wait leave their cores to the threads. Workers that still copy need their cores, unless this server
        is far behind. If processes share cores, waiting workers yield their cores, so all threads are used.
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
        """Sum and write blocks on all threads.

        Thread 0, which takes parts from the front, announces finished blocks to readers.
        """
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

    # ---- sums in which some payloads come as messages

    def sum_arriving(self, unit: Unit, sources: Sequence[Contribution]) -> bool:
        """Add the contributors' parts of one block, as far as they have arrived, in the order of contributors.

        Once the parts of all contributors have been added, write the sum as the next block. Return False if nothing was
        added, because the part that must be added next has not arrived.
        """
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
            # `ready` may start to fetch the block. Call it for every contributor: if each server fetched only the next
            # contributor's block, all servers would wait for the link of the same worker.
            source.ready(number)
        return unit.part > first

    def _write_next(self, unit: Unit, parts: Sequence[Array]) -> None:
        """Write the sum of these parts as the next block."""
        start, stop = unit.bounds(unit.block)
        if unit.block == 0:
            unit.open_write()
        unit.keep_old(start, stop)
        unit.write(start, stop, parts)
        unit.block += 1
        _tell(unit, unit.block)

    # ---- sums in which some payloads are coded, which means compressed or row-sparse

    def sum_coded(self, unit: Unit, sources: Sequence[Contribution]) -> bool:
        """Do one step of a round in which at least one contribution is coded. Called again until the round is over.

        The first steps add the contributions, in order. A step adds a whole coded contribution, or one block of a plain
        one. Once all have been added, each further step writes one block of the sum. If all contributions are
        row-sparse, a single step writes the sum, and only to the rows that the contributions name.

        Return True if a step was done, and False if the contribution that must be added next has not arrived.
        """
        if unit.part < len(sources):
            return _add_next(unit, sources[unit.part])
        if unit.total is None:
            _write_rows(unit, all(source.empty for source in sources))
            return True
        start, stop = unit.bounds(unit.block)
        self._write_next(unit, [unit.total[start:stop]])
        return True

    # ---- asynchronous stores: one contribution by itself

    def apply_single(self, unit: Unit, source: Contribution) -> bool:
        """Apply the next block of one push as an update of its own. A coded (compressed) push is applied as a whole.

        Return False if this block, or the whole coded push, has not arrived.
        """
        if not source.ready(unit.block):
            return False
        if source.sparse:
            # Read the payload even if it is empty, because this frees its buffer.
            unit.rows = [source.rows()]
            _write_rows(unit, source.empty)
            return True
        if unit.block == 0:
            unit.open_write()
        start, stop = (0, unit.stored.size) if source.coded else unit.bounds(unit.block)
        if source.coded:
            part = np.zeros_like(unit.stored)
            source.add_to(part)
        else:
            part = source.part(unit.block, start, stop)
        unit.keep_old(start, stop)
        unit.write(start, stop, [part])
        unit.block = unit.blocks if source.coded else unit.block + 1
        return True


def _add_next(unit: Unit, source: Contribution) -> bool:
    """Add `source`, which is the next contribution, to the sum of the round. If it is plain, add only its next block.

    The sum is kept as rows as long as all contributions are row-sparse. Return False if the contribution, or its next
    block, has not arrived.
    """
    if not source.ready(unit.part_block):
        return False
    if source.sparse and unit.total is None:
        unit.rows.append(source.rows())
        # These rows are a copy of a message. Add them at once, so that at most one such copy is kept.
        if not source.local:
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


def _write_rows(unit: Unit, empty: bool) -> None:
    """Write the sum of a round whose contributions are all row-sparse, which completes the round.

    If all contributions are `empty`, nothing is written.
    """
    if empty:
        unit.pass_round()
    else:
        unit.open_write()
        unit.write_rows(sum_of(unit.rows))
    unit.block = unit.blocks


def _tell(unit: Unit, blocks: int) -> None:
    """Tell readers that `blocks` blocks of the round are written.

    The last block is announced only when the round ends.
    """
    if blocks < unit.blocks:
        unit.words[0] = unit.round * unit.blocks + blocks


Work = Callable[[int, int], None]


class _Task:
    """Work for all threads: a call of `work(item, thread)` for each item that no thread has taken yet."""

    def __init__(self, work: Work, items: Iterable[int]) -> None:
        self._work = work
        self._left = deque(items)
        self.errors: list[Exception] = []

    def front(self) -> None:
        """Work on items from the front, as thread 0."""
        try:
            self._take(0, self._left.popleft)
        finally:
            # If an item has raised an error, the other threads must stop too.
            self._left.clear()

    def back(self, thread: int) -> None:
        """Work on items from the back."""
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
    """A team of threads: the calling thread, which is number 0, and `threads - 1` others.

    The other threads call `begin` first, and end when this object is deleted.
    """

    def __init__(self, threads: int, begin: Callable[[], None] | None = None) -> None:
        self.threads = threads
        self._others = [_Other(number, begin) for number in range(1, threads)]
        for other in self._others:
            weakref.finalize(self, other.give_task, None)

    def share(self, work: Work, items: Iterable[int]) -> None:
        """Call `work(item, thread)` for every item. Blocking.

        Thread 0 takes items from the front, and the other threads take items from the back. If a thread raises, the
        exception is raised here after all threads have ended. The call does not wait for threads that wake up after the
        last item was taken.
        """
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
    """One of a team's other threads. The thread starts when it is first needed.

    The thread sleeps on a lock while it waits. If it polled, it would take the GIL from the main thread.
    """

    def __init__(self, number: int, begin: Callable[[], None] | None) -> None:
        self._number = number
        self._begin = begin
        # released to wake the thread
        self._gate = threading.Lock()
        # held while the thread works
        self._busy = threading.Lock()
        self._gate.acquire()
        self._tasks: deque[_Task | None] = deque(maxlen=1)
        self._begun = False

    def give_task(self, task: _Task | None) -> None:
        """Give the thread a task to work on. None ends the thread."""
        if not self._begun:
            if task is None:
                return
            self._begun = True
            threading.Thread(target=self._run, daemon=True).start()
        self._tasks.append(task)
        if self._gate.locked():
            self._gate.release()

    def settle(self) -> None:
        """Withdraw the task if the thread has not begun it. Otherwise wait until the thread has finished its part."""
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
                # Keep no reference while waiting, because the task keeps memory of a server alive.
                del task
