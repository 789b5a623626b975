"""How a server adds up contributions to a unit and applies them, block by block; in the order of the contributors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.optimizers import Optimizer
from mpips.row_sparse import RowSparse, merge, update_rows
from mpips.team import Team
from mpips.unit import Reply, Source, Unit

BURST = 4  # blocks done before the server listens again
SHARED_BYTES = 1 << 21  # least of a sum that is worth another thread
PART_BYTES = 1 << 20  # that a thread sums at a time where there are others
PIECE_BYTES = 1 << 18  # of a sum that is read again for every contribution: in a core's own cache beside one of these
Array = NDArray[Any]
Replies = list[Reply]


class Sums:
    """Arithmetic of one server; `remote`: workers of other nodes, who are told when a contribution has been read.

    `threads`: cores that it may use for long sums at once; `begin_thread` is called first on each of the others.
    `cores_shared`: processes of the node are more than its cores.
    """

    def __init__(
        self, remote: Iterable[int], threads: int = 1, begin_thread: Callable[[], None] | None = None,
        cores_shared: bool = False,
    ) -> None:  # fmt: skip
        self._cores_shared = cores_shared
        self.remote = frozenset(remote)
        self.optimizer: Optimizer | None = None
        self._team = Team(threads, begin_thread)
        self._scratch = [np.empty(0, np.uint8)] * threads

    def _finish(self, unit: Unit) -> Replies:
        """What follows the last block of a round."""
        raise NotImplementedError

    def _scratch_block(self, dtype: np.dtype, size: int, thread: int) -> Array:
        if self._scratch[thread].nbytes < size * dtype.itemsize:
            self._scratch[thread] = np.empty(size * dtype.itemsize, np.uint8)
        return self._scratch[thread][: size * dtype.itemsize].view(dtype)

    def _sum_whole(self, unit: Unit, arrays: Sequence[Array]) -> tuple[bool, Replies]:
        """Sum and apply the only block of contributions that are all there."""
        size = unit.stored.size
        return True, self._apply(unit, self._sum(unit, arrays, 0, size), 0, size)

    def _sum_blocks(self, unit: Unit, sources: Sequence[Source]) -> tuple[bool, Replies]:
        """Sum and apply those of the next blocks that are there."""
        if not all(source.local for source in sources):
            return self._sum_arriving(unit, sources)
        stop = unit.block
        limit = min(stop + BURST * self._team.threads, unit.blocks)
        while stop < limit and all(source.ready(stop) for source in sources):
            stop += 1
        if stop == unit.block:
            return False, []
        return True, self._sum_run(unit, sources, stop)

    def _sum_run(self, unit: Unit, sources: Sequence[Source], stop: int) -> Replies:
        """Sum and apply the blocks from the next to `stop`, on all threads at once where that is long enough."""
        first = unit.block
        if self.optimizer is not None and first == 0:
            self._next_step(unit)
        if self._worth_sharing(unit, sources, first, stop):
            self._share(unit, sources, first, stop)
        else:
            for block in range(first, stop):
                self._sum_part(unit, sources, block, *unit.bounds(block))
                self._tell(unit, block + 1)
        unit.block = stop
        return self._finish(unit) if stop == unit.blocks else []

    def _worth_sharing(self, unit: Unit, sources: Sequence[Source], first: int, stop: int) -> bool:
        """Whether blocks are summed on all threads. Workers that wait leave their cores to them; those that still copy
        need them, unless this server is far behind, or cores are shared, where who waits for it gives his away."""
        threads = self._team.threads
        if threads == 1 or unit.stored.nbytes < SHARED_BYTES:
            return False
        nbytes = (unit.bounds(stop - 1)[1] - unit.bounds(first)[0]) * unit.stored.itemsize
        if nbytes < SHARED_BYTES:
            return False
        if all(source.ready(unit.blocks - 1) for source in sources):
            return nbytes >= 2 * SHARED_BYTES
        return self._cores_shared or stop - first >= 2 * threads

    def _share(self, unit: Unit, sources: Sequence[Source], first: int, stop: int) -> None:
        """Sum and apply blocks on all threads; thread 0, which has the first parts, tells readers of each block."""
        step = max(1, PART_BYTES // unit.stored.itemsize)
        parts = []
        for block in range(first, stop):
            begin, end = unit.bounds(block)
            parts += [(block, start, min(start + step, end)) for start in range(begin, end, step)]
        done: set[int] = set()
        following = 0

        def work(index: int, thread: int) -> None:
            nonlocal following
            self._sum_part(unit, sources, *parts[index], thread)
            done.add(index)
            if thread == 0:
                while following in done:
                    following += 1
                if following < len(parts):
                    self._tell(unit, parts[following][0])

        self._team.share(work, range(len(parts)))
        self._tell(unit, stop)

    @staticmethod
    def _tell(unit: Unit, blocks: int) -> None:
        """Tell readers that so many blocks of the round are done; of the last one they hear when the round ends."""
        if blocks < unit.blocks:
            unit.words[0] = unit.round * unit.blocks + blocks

    def _sum_part(
        self, unit: Unit, sources: Sequence[Source], block: int, start: int, stop: int, thread: int = 0
    ) -> None:
        """Sum and apply elements of a block."""
        total = self._sum(unit, [source.part(block, start, stop) for source in sources], start, stop, thread)
        if total is not None:
            self._renew(unit, start, stop, total)

    def _sum_arriving(self, unit: Unit, sources: Sequence[Source]) -> tuple[bool, Replies]:
        """Sum one block whose contributions come as messages; goes on later where one is not there yet."""
        number, count, first = unit.block, len(sources), unit.part
        start, stop = unit.bounds(number)
        if unit.total is None:
            unit.total = np.empty(stop - start, unit.stored.dtype)
        while unit.part < count and sources[unit.part].ready(number):
            part = sources[unit.part].part(number, start, stop)
            if unit.part:
                np.add(unit.total, part, out=unit.total)
            else:
                unit.total[...] = part
            unit.part += 1
        if unit.part < count:
            for source in sources[unit.part + 1 :]:
                source.ready(number)  # it may start to come; or else all servers would wait for the same worker's link
            return unit.part > first, []
        total, unit.part, unit.total = unit.total, 0, None
        return True, self._apply(unit, total, start, stop)

    def _sum(self, unit: Unit, parts: Sequence[Array], start: int, stop: int, thread: int = 0) -> Array | None:
        """The parts added from first to last; None where the stored block was replaced by the sum."""
        if len(parts) == 1:
            return parts[0]
        if self.optimizer is None:
            total = unit.stored[start:stop]
        else:
            total = self._scratch_block(unit.stored.dtype, stop - start, thread)
        if len(parts) == 2 or total.nbytes <= PIECE_BYTES:
            _add(parts, total)
        else:
            step = max(1, PIECE_BYTES // total.itemsize)
            for at in range(0, total.size, step):
                _add([part[at : at + step] for part in parts], total[at : at + step])
        return None if self.optimizer is None else total

    def _apply(self, unit: Unit, total: Array | None, start: int, stop: int) -> Replies:
        """Update the stored block by the sum (None: it has replaced the block already); the last block ends a round."""
        if total is not None:
            self._update(unit, start, stop, total)
        unit.block += 1
        if unit.block == unit.blocks:
            return self._finish(unit)
        unit.words[0] = unit.round * unit.blocks + unit.block
        return []

    def _update(self, unit: Unit, start: int, stop: int, gradient: Array) -> None:
        if self.optimizer is not None and start == 0:
            self._next_step(unit)
        self._renew(unit, start, stop, gradient)

    def _next_step(self, unit: Unit) -> None:
        """Another update of the unit begins."""
        assert self.optimizer is not None
        if unit.state is None:
            unit.state, unit.step = self.optimizer.init(unit.stored), 0
        unit.step += 1

    def _renew(self, unit: Unit, start: int, stop: int, gradient: Array) -> None:
        """Update stored elements [start, stop) in the step that has begun."""
        if self.optimizer is None:
            unit.stored[start:stop] = gradient
            return
        assert unit.state is not None
        state = [array[start:stop] for array in unit.state]
        self.optimizer.update(unit.stored[start:stop], gradient, state, unit.step)

    def _sum_rows(self, unit: Unit) -> tuple[bool, Replies]:
        """Read the next contributor; a round to which all gave rows updates only those, any other is dense."""
        if unit.ahead < len(unit.queues):
            return self._read_next(unit)
        assert unit.rows is not None
        self._update_rows(unit, unit.rows)
        return True, self._finish(unit)

    def _update_rows(self, unit: Unit, gradient: RowSparse) -> None:
        table = unit.stored.reshape(gradient.shape)
        if self.optimizer is None:
            table[...] = 0
            table[gradient.rows] = gradient.values
            return
        self._next_step(unit)
        assert unit.state is not None
        update_rows(self.optimizer, table, gradient, unit.state, unit.step)

    def _read_next(self, unit: Unit) -> tuple[bool, Replies]:
        """Add the next contributor, or a block of it, to what was read of the round: rows as long as all gave rows."""
        source = unit.queues[unit.ahead][0]
        assert not isinstance(source, str)
        if not source.ready(unit.ahead_block):
            return False, []
        if not source.sparse or unit.accumulator is not None:
            return True, self._accumulate(unit, source)
        rows = source.rows().merged()
        if unit.rows is None:  # copied: the worker may write there again once it hears that its push was read
            unit.rows = RowSparse(rows.rows.copy(), rows.values.copy(), rows.shape)
        else:
            unit.rows = merge(unit.rows, rows)
        unit.ahead += 1
        return True, self._consumed(unit, unit.ahead - 1, unit.round + 1)

    def _accumulate(self, unit: Unit, source: Source) -> Replies:
        """Add a contribution, or the next block of it, to the accumulator."""
        if unit.accumulator is None:
            unit.accumulator = np.zeros_like(unit.stored) if unit.rows is None else unit.rows.to_dense().reshape(-1)
            unit.rows = None
        if source.coded:
            source.add_to(unit.accumulator)
            unit.ahead_block = unit.blocks
        else:
            start, stop = unit.bounds(unit.ahead_block)
            part = source.part(unit.ahead_block, start, stop)
            if unit.ahead:
                unit.accumulator[start:stop] += part
            else:
                unit.accumulator[start:stop] = part
            unit.ahead_block += 1
        if unit.ahead_block < unit.blocks:
            return []
        unit.ahead_block = 0
        unit.ahead += 1
        return self._consumed(unit, unit.ahead - 1, unit.round + 1)

    def _apply_accumulator(self, unit: Unit) -> tuple[bool, Replies]:
        assert unit.accumulator is not None
        start, stop = unit.bounds(unit.block)
        return True, self._apply(unit, unit.accumulator[start:stop], start, stop)

    def _consumed(self, unit: Unit, index: int, round_: int) -> Replies:
        unit.words[1 + index] = round_
        if unit.contributors[index] in self.remote:
            return [Reply("CONSUMED", unit.contributors[index], unit.number, round_)]
        return []

    def _async_block(self, unit: Unit, source: Source | str) -> tuple[bool, bool]:
        """Apply the next block of one contribution: (whether something was done, whether it was the last)."""
        if isinstance(source, str):
            return True, True
        if not source.ready(unit.block):
            return False, False
        if unit.blocks == 1:  # in a longer unit's word its outboxes look for blocks that have been summed: none here
            unit.words[0] |= 1
        if source.coded:
            if source.sparse:
                self._update_rows(unit, source.rows())
            else:
                total = np.zeros_like(unit.stored)
                source.add_to(total)
                self._update(unit, 0, total.size, total)
            return True, True
        start, stop = unit.bounds(unit.block)
        self._update(unit, start, stop, source.part(unit.block, start, stop))
        unit.block += 1
        return True, unit.block == unit.blocks


def _add(parts: Sequence[Array], total: Array) -> None:
    """The sum of two or more parts, added from first to last."""
    np.add(parts[0], parts[1], out=total)
    for part in parts[2:]:
        np.add(total, part, out=total)
