"""The pushes of a store with servers, on a worker: alone, or of the sum over its client (see `served`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import collectives
from collectives.errors import CollectiveError, MismatchError
from collectives.node import arena
from mpips import inside
from mpips.fused import Vectors
from mpips.keys import Key, Part, Piece
from mpips.layout import Layout
from mpips.lines import Line
from mpips.members import Failing
from mpips.messages import Coding
from mpips.row_sparse import RowSparse
from mpips.rows import Rows, whole
from mpips.session import Task, together
from mpips.settings import Settings
from mpips.sharding import Interval
from mpips.short import Lent

Array = NDArray[Any]


class Pushing(Settings):
    """Pushes as generators for the engine."""

    def __init__(self, layout: Layout, lines: list[Line], cores_shared: bool) -> None:
        super().__init__(layout, lines, cores_shared)
        self._all = layout.options.masters == "all"
        self._rows = Rows(layout, self.session, self._agreed_rows)
        self._vectors = Vectors(self.one_node)

    def push(self, key: Key, flat: Array, priority: int, wait: bool = True) -> Task:
        """Contribute `flat` (1-D) to the key's next round."""
        round_ = self.session.begin(key, not self._grouped)
        push = self._push(key, round_, flat, priority, wait)
        return self.session.withdrawing(key, round_, key.pushes, push)

    def _push(self, key: Key, round_: int, flat: Array, priority: int, wait: bool) -> Task:
        if not self._grouped:
            return self._contribute(key, round_, flat, priority, wait)
        if self._all:
            tasks = [self._push_piece(key, round_, piece, flat, priority) for piece in key.pieces]
            return self._pipeline(key, "push", True, [self._raising(task) for task in tasks])
        if self._in_pieces(key):
            tasks = [self._push_piece_by_master(key, round_, piece, flat, priority) for piece in key.pieces]
            return self._pipeline(key, "push", True, [self._raising(task) for task in tasks])
        return self._push_master(key, round_, flat, priority)

    def _in_pieces(self, key: Key) -> bool:
        """Whether a client on several nodes handles the key as a pipeline."""
        return not self.one_node and len(key.pieces) > 1 and self._members > 1

    def _contribute(
        self, key: Key, round_: int, flat: Array, priority: int, wait: bool, own: bool = False,
        parts: Sequence[Part] | None = None, base: int = 0,
    ) -> Task:  # fmt: skip
        """Push `flat`, which holds the key's elements from `base` on."""
        session = self.session
        parts = key.pushes if parts is None else parts
        payloads = [(part, flat[part.start - base : part.stop - base]) for part in parts]
        if self._compressor is None or key.dtype.kind != "f":
            yield from session.push(key, round_, payloads, priority, wait, own)
            return
        yield from together([self._compress(key, round_, *payload, priority, own) for payload in payloads])

    def _compress(self, key: Key, round_: int, part: Part, values: Array, priority: int, own: bool) -> Task:
        """Push what the compressor makes of a part's elements."""
        assert self._compressor is not None
        yield from self.session.drained(key, round_ - 1, [part], alone=False)
        residual = self._residuals.get(part.number)
        if residual is None:
            residual = self._residuals[part.number] = self._compressor.init(values)
        payload = self._compressor.encode(values, residual)
        yield from self.session.push_coded(key, round_, part, payload, Coding.COMPRESSED, priority, alone=not own)

    def _push_master(self, key: Key, round_: int, flat: Array, priority: int) -> Task:
        """The client's sum goes to its rank 0, and from there to the servers."""
        comm = self.layout.client
        assert comm is not None
        if comm.Get_size() == 1:
            yield from self._contribute(key, round_, flat, priority, True)
            return
        total = None
        if key.pushes:
            total = self._reduced(key)
            yield from self.session.drained(key, round_ - 1, key.pushes, alone=False)
        if self.one_node:
            out = total if total is not None else flat if flat.flags.writeable else np.empty_like(flat)
            yield from self._agreed([key], "push", True, lambda: collectives.reduce(flat, comm, out=out))
        else:
            yield from self._compared([key], "push", True, self._reduce(key.pieces[0], flat, total))
        if total is not None:
            yield from self._contribute(key, round_, total, priority, False, own=True)

    def push_now(self, key: Key, flat: Array, priority: int, sums: Lent) -> None:
        """`push` of a client on one node, blocking, where nothing else is under way and the servers have read what was
        pushed before. `sums`: rank 0's pushes of the client's sum. Raises what the members do not agree on."""
        comm, agreement = self.layout.client, self._agreement
        assert comm is not None
        assert agreement is not None
        round_, master = key.round + 1, bool(key.pushes)
        try:
            self.session.begin(key, False)
            card = self._card([key], "push", True)
            out = self._reduced(key) if master else flat if flat.flags.writeable else np.empty_like(flat)
            self._joined = True
            try:
                agreement.note(card.text)
                collectives.reduce(flat, comm, out=out)
                fallback = agreement.differs()
            except MismatchError as error:
                fallback = str(error)
            finally:
                self._joined = False
            if fallback is not None:
                self._disagree(agreement, card, fallback)
            for push in sums.of(out) if master else ():
                push.post(round_, priority)
        except BaseException as error:
            self._break_off([key], [round_], error)
            raise

    def _break_off(self, keys: Sequence[Key], rounds: Sequence[int], error: BaseException) -> None:
        """Withdraw from these rounds, so far as they have been counted."""
        for key, round_ in zip(keys, rounds):
            if key.round >= round_:
                self.session.break_off(key, round_, key.pushes, error)

    def _reduced(self, key: Key) -> Array:
        """Where the client's sum goes, which the servers read in place."""
        piece = key.pieces[0]
        if piece.reduced is None:
            piece.reduced = arena.empty(key.size, key.dtype)
        return piece.reduced

    def _reduce(self, piece: Piece, flat: Array, total: Array | None) -> Task:
        assert self.layout.client is not None
        yield from inside.reduce_to_first(self.layout.client, flat, total, self._tag(piece))

    @property
    def fuses(self) -> bool:
        """Whether small keys of one call are better pushed by `push_together`."""
        return self._grouped and self._members > 1 and not self._all

    def push_together(self, keys: Sequence[Key], flats: Sequence[Array], priority: int) -> Task:
        """Contribute to the next rounds of keys of one dtype, which the client sums as one vector. `flats`: 1-D."""
        comm = self.layout.client
        assert comm is not None
        vector, total, parts = self._vectors.lay(flats)
        rounds, master = [key.round + 1 for key in keys], comm.Get_rank() == 0
        try:
            for key in keys:
                self.session.begin(key, False)
            if self.one_node:
                out = total if master else vector
                yield from self._agreed(keys, "push", True, lambda: collectives.reduce(vector, comm, out=out))
            else:
                reduced = self._reduce(keys[0].pieces[0], vector, total if master else None)
                yield from self._compared(keys, "push", True, reduced)
            if master:  # what failed before is raised by all members together, in a pull
                for key, round_ in zip(keys, rounds):
                    yield from self.session.drained(key, round_ - 1, key.pushes, alone=False)
                each = zip(keys, rounds, parts)
                yield from together([self._contribute(*one, priority, True, own=True) for one in each])
        except BaseException as error:
            self._vectors.leave()
            self._break_off(keys, rounds, error)
            raise

    def _push_piece(self, key: Key, round_: int, piece: Piece, flat: Array, priority: int) -> Failing:
        """The client's sum of a piece, scattered: every member pushes its slice. Returns what has failed."""
        comm = self.layout.client
        assert comm is not None
        start, stop = piece.cuts[0], piece.cuts[-1]
        rank = comm.Get_rank()
        mine = Interval(piece.cuts[rank], piece.cuts[rank + 1])
        if piece.reduced is None:
            piece.reduced = arena.empty(mine.size, key.dtype)
        reduced = piece.reduced
        yield from self.session.drained(key, round_ - 1, piece.pushes, alone=False)
        if self.one_node:
            yield from self._agreed(
                [key], "push", True, lambda: collectives.reduce_scatter(flat[start:stop], comm, out=reduced)
            )
        else:
            cuts = [cut - start for cut in piece.cuts]
            yield from inside.reduce_scatter(comm, flat[start:stop], reduced, cuts, self._tag(piece))
        push = self._contribute(key, round_, reduced, priority, False, own=True, parts=piece.pushes, base=mine.start)
        return (yield from self._caught(push))

    def _push_piece_by_master(self, key: Key, round_: int, piece: Piece, flat: Array, priority: int) -> Failing:
        """The same by rank 0 of the client."""
        comm = self.layout.client
        assert comm is not None
        start, stop = piece.cuts[0], piece.cuts[-1]
        total = None
        if piece.pushes:
            if piece.reduced is None:
                piece.reduced = arena.empty(stop - start, key.dtype)
            total = piece.reduced
            yield from self.session.drained(key, round_ - 1, piece.pushes, alone=False)
        yield from inside.reduce_to_first(comm, flat[start:stop], total, self._tag(piece))
        if total is None:
            return None
        push = self._contribute(key, round_, total, priority, False, own=True, parts=piece.pushes, base=start)
        return (yield from self._caught(push))

    def push_rows(self, key: Key, rows: RowSparse, priority: int) -> Task:
        """Contribute rows to the key's next round."""
        if self._compressor is not None or not whole(key):
            return self.push(key, rows.to_dense().reshape(-1), priority)
        round_ = self.session.begin(key, not self._grouped)
        return self.session.withdrawing(key, round_, key.pushes, self._rows.push(key, round_, rows, priority))

    def _pipeline(self, key: Key, what: str, pushes: bool, tasks: list[Task]) -> Task:
        """The pieces of a key in a client; between nodes the members compare their calls once."""
        task = self._together(tasks)
        return task if self.one_node else self._compared([key], what, pushes, task)

    def _together(self, tasks: list[Task]) -> Task:
        """Run tasks with a few under way; each has tags of its own. If servers fail some, all run to their end, and
        the first task's failure is raised."""
        if len(tasks) == 1:
            yield from tasks[0]
            return
        waiting = list(enumerate(tasks))[::-1]
        running: list[tuple[int, Task]] = []
        failures: dict[int, CollectiveError] = {}
        try:
            while waiting or running:
                while waiting and len(running) < (1 if self.one_node else self.layout.options.chunks_in_flight):
                    running.append(waiting.pop())
                still, moved = [], False
                for index, task in running:
                    try:
                        moved |= bool(next(task))
                        still.append((index, task))
                    except StopIteration:
                        pass
                    except MismatchError:  # on all members, at the same piece
                        raise
                    except CollectiveError as error:
                        failures[index] = error
                moved |= len(still) < len(running)
                running = still
                if running:
                    yield moved
        finally:
            for _, task in running:
                task.close()
        if failures:
            raise failures[min(failures)]
