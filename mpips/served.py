"""A store with servers, on a worker: how a key's value travels between the training loop and the servers.

dist_*: every worker pushes and pulls by itself. mpi_*: a client first reduces inside. With masters="one" rank 0 of the
client pushes and pulls the whole and broadcasts it (the paper, section 4.2); with masters="all" the client
reduce-scatters, every worker pushes and pulls its own slices, and an allgather puts them together, in pieces of which
several are under way, so that the phases overlap on a network. A client that shares its node with all servers reads
their memory instead of a broadcast, where the store is synchronous: nobody can overwrite it before everybody has read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import collectives
from collectives.errors import CollectiveError
from mpips import inside
from mpips.agreement import Card
from mpips.keys import Key, Piece
from mpips.pushing import Pushing
from mpips.rows import whole
from mpips.session import Task, together
from mpips.summed import InClient

Array = NDArray[Any]


class Served(Pushing):
    """The operations of a store with servers; pushes and pulls are generators for the engine."""

    def _shorten(self, key: Key) -> None:
        super()._shorten(key)
        reads = self._near and self.one_node and not self.layout.asynchronous
        if self.fuses and reads and self._compressor is None and key.size:
            key.short = InClient(self, key)

    def pull(self, key: Key, flat: Array) -> Task:
        """Read the key into `flat` (1-D) on every worker that calls."""
        if not self._grouped or (self._near and not self.layout.asynchronous):
            return self.session.pull(key, flat, key.parts)
        if self._all or self._in_pieces(key):
            return self._pipeline(key, "pull", False, [self._pull_piece(key, piece, flat) for piece in key.pieces])
        return self._pull_master([key], flat, [flat])

    def pull_rows(self, key: Key, out: Array, ids: Array) -> Task:
        """Write rows of the key into `out`, (len(ids), ...)."""
        if whole(key):
            yield from self._rows.pull(key, out, ids, self._near and not self.layout.asynchronous)
            return
        table = np.empty(key.shape, key.dtype)
        yield from self.pull(key, table.reshape(-1))
        out[...] = table[ids]

    def pull_together(self, keys: Sequence[Key], flats: Sequence[Array]) -> Task:
        """Read keys of one dtype into 1-D arrays, one a key, by one broadcast in the client."""
        vector, _, slices = self._vectors.room(flats)
        try:
            yield from self._pull_master(keys, vector, [vector[each] for each in slices])
        except BaseException:
            self._vectors.leave()
            raise
        for flat, each in zip(flats, slices):
            flat[...] = vector[each]

    def _pull_master(self, keys: Sequence[Key], vector: Array, parts: Sequence[Array]) -> Task:
        """Rank 0 of the client reads the keys into parts of the vector, of which all get the whole."""
        task = self._pull_and_broadcast(keys, vector, parts)
        return task if self.one_node else self._compared(keys, "pull", False, task)

    def _pull_and_broadcast(self, keys: Sequence[Key], vector: Array, parts: Sequence[Array]) -> Task:
        comm = self.layout.client
        assert comm is not None
        failures: list[CollectiveError | None] = [None] * len(keys)
        if comm.Get_rank() == 0:
            pulls = [self.session.pull(key, part, key.parts) for key, part in zip(keys, parts)]
            yield from together([self._noted(pull, failures, index) for index, pull in enumerate(pulls)])
        failure = next(filter(None, failures), None)
        if self.layout.asynchronous:
            yield from self._tell_members(keys, failure)
        if self.one_node:
            yield from self._agreed(keys, "pull", False, lambda: collectives.broadcast(vector, comm))
        elif comm.Get_size() > 1:
            yield from inside.broadcast(comm, vector, self._tag(keys[0].pieces[0]))
        self._raise(keys, failure)

    def _tell_members(self, keys: Sequence[Key], failure: CollectiveError | None) -> Task:
        """Let all raise what made rank 0's pull fail: of an asynchronous store's failures only who has pushed hears."""
        comm = self.layout.client
        assert comm is not None
        if self.one_node:
            if failure is not None and self._members > 1:
                card = Card("pull", [key.name for key in keys], False, str(failure))
                yield from self._collective(card, card.refusal, lambda: None)
            return
        text, tag = np.frombuffer(str(failure or "").encode(), np.uint8).copy(), self._tag(keys[0].pieces[0])
        size = np.array([text.size])
        yield from inside.broadcast(comm, size, tag)
        if size[0]:
            text = text if comm.Get_rank() == 0 else np.empty(size[0], np.uint8)
            yield from inside.broadcast(comm, text, tag)
            raise failure or CollectiveError(text.tobytes().decode())

    def _noted(self, task: Task, failures: list[CollectiveError | None], index: int) -> Task:
        failures[index] = yield from self._caught(task)

    def _pull_piece(self, key: Key, piece: Piece, flat: Array, failure: CollectiveError | None = None) -> Task:
        """`failure`: of the push before; all members take part in the client's collective whatever has failed."""
        comm = self.layout.client
        assert comm is not None
        if failure is None:
            failure = yield from self._caught(self.session.pull(key, flat, piece.pushes))
        start, stop = piece.cuts[0], piece.cuts[-1]
        if self.one_node:
            yield from self._agreed([key], "pull", False, lambda: collectives.allgather(flat[start:stop], comm))
        elif not self._all:
            yield from inside.spread(comm, flat[start:stop], self._tag(piece))
        elif comm.Get_size() > 1:
            cuts = [cut - start for cut in piece.cuts]
            yield from inside.allgather(comm, flat[start:stop], cuts, self._tag(piece))
        self._raise([key], failure)

    def pushpull(self, key: Key, flat: Array, out: Array, priority: int) -> Task:
        """Push, then pull, in one: nothing waits between the two, and pieces go through both by themselves."""
        if self._grouped and (self._all or self._in_pieces(key)) and not self._near:
            round_ = self.session.begin(key, False)
            tasks = [self._through(key, round_, piece, flat, out, priority) for piece in key.pieces]
            return self.session.withdrawing(key, round_, key.pushes, self._pipeline(key, "pushpull", True, tasks))
        if not self._grouped and not self.one_node and not self.layout.asynchronous and len(key.pieces) > 1:
            round_ = self.session.begin(key)
            tasks = [self._through_alone(key, round_, piece, flat, out, priority) for piece in key.pieces]
            return self.session.withdrawing(key, round_, key.pushes, self._together(tasks))
        return self._push_then_pull(key, flat, out, priority)

    def _through(self, key: Key, round_: int, piece: Piece, flat: Array, out: Array, priority: int) -> Task:
        push = self._push_piece if self._all else self._push_piece_by_master
        failure = yield from push(key, round_, piece, flat, priority)
        yield from self._pull_piece(key, piece, out, failure)

    def _through_alone(self, key: Key, round_: int, piece: Piece, flat: Array, out: Array, priority: int) -> Task:
        """One piece of a worker without a client: later pieces go to the server while this one's answer comes."""
        push = self._contribute(key, round_, flat, priority, False, parts=piece.pushes)
        yield from self.session.exchange(key, push, out, piece.pushes)

    def _push_then_pull(self, key: Key, flat: Array, out: Array, priority: int) -> Task:
        yield from self.push(key, flat, priority, wait=self.layout.asynchronous)
        yield from self.pull(key, out)

    def finish(self) -> None:
        self.session.goodbye()
