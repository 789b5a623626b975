"""Payloads between a worker and servers of other nodes, on the worker's side: messages out of arrays and into them.

What is one message goes unasked where its server has room for it; all else as the server asks for it, block by block.
`UnreadPayloads` limits for each server what a worker has under way unasked: its share of a copy of what lies there, or
two messages. What servers ask for they limit themselves (`server.sources`). Tasks here do not hear the server: who runs
them listens meanwhile (`remote.link`). A task that is given up leaves its messages to `stop`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI
from numpy.typing import NDArray

from collectives.fabric.arena import Region
from collectives.fabric.requests import send
from collectives.fabric.tasks import Task
from mpips.store.keys.key import Key, Name, Shard
from mpips.store.roles import Layout
from mpips.store.transport.frames import ALONG, Coding, Op
from mpips.store.transport.pending import MessageGroup, MessagesUnderWay, cut_bytes, pull_tag, push_tag

Array = NDArray[Any]
Place = tuple[int, int]
"""Round, and first element in the key."""
FRAME_COST = 2048
"""Bytes that a small payload costs in addition."""


class Sender:
    """One worker's messages with payloads, to and from all servers of other nodes, in one generation."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self._world = layout, layout.world
        self._under_way = MessagesUnderWay()
        self._windows = [UnreadPayloads() for _ in range(layout.num_servers)]
        self._waiting: dict[tuple[int, Name], list[Place]] = {}
        """The places of shards of a key that wait for room at a server."""
        self._stored = [0] * layout.num_servers
        self._senders = sum(map(len, layout.groups()))

    def stored(self, server: int, nbytes: int) -> None:
        """Note that a server keeps so many bytes of keys more."""
        self._stored[server] += nbytes

    def stop(self) -> bool:
        """Stop, as the generation is over: see `MessagesUnderWay.stop`."""
        return self._under_way.stop()

    # ---- out

    def send(
        self, key: Key, shard: Shard, data: Array, round_: int, priority: int, coding: Coding = Coding.PLAIN,
        count: int = 0,
    ) -> Task[None]:  # fmt: skip
        """Send a payload (uint8) of a round to a server of another node; over when it may be overwritten."""
        blocks = shard.blocks if coding == Coding.PLAIN else 1
        region = Region(0, 0, 0, 0, data.size)
        if blocks > 1:
            shard.line.post(Op.PUSH, shard.number, round_, region, coding, priority, count)
            yield from self._as_asked(shard, data, shard.block_elements * key.dtype.itemsize, blocks)
            return
        yield from self._turn(key, shard, data, round_)
        if self._admits(shard, data):
            self._windows[shard.server].add(key.name, (round_, shard.start), shard.consumed, data.size)
            shard.line.post(Op.PUSH, shard.number, round_, region, coding, priority, count, flags=ALONG)
            yield from self._under_way.begin(sends=[self._isend(shard, data)]).wait()
        else:
            shard.line.post(Op.PUSH, shard.number, round_, region, coding, priority, count)
            yield from self._as_asked(shard, data, data.size, 1)

    def send_first(self, shard: Shard, values: Array) -> Task[None]:
        """Send the first value of a unit to a server of another node; over when it is there."""
        shard.granted = False
        slices = cut_bytes(values, shard.block_elements * values.itemsize)
        shard.line.post(Op.SET, shard.number, 0, Region(0, 0, 0, 0, slices[0].size), aux=len(slices))
        yield from self._under_way.begin(sends=[self._isend(shard, data) for data in slices]).wait()
        while not shard.granted:
            yield False

    def _as_asked(self, shard: Shard, data: Array, size: int, blocks: int) -> Task[None]:
        """Send blocks of `size` bytes as the server asks for them."""
        exchange, sent = self._under_way.begin(), 0
        while sent < blocks:
            for block in shard.credits:
                exchange.sends.append(self._isend(shard, data[block * size : (block + 1) * size]))
            sent += len(shard.credits)
            moved = bool(shard.credits)
            shard.credits.clear()
            if sent < blocks:
                yield moved
        yield from exchange.wait()

    def _turn(self, key: Key, shard: Shard, data: Array, round_: int) -> Task[None]:
        """Wait until the server has room, or for nothing that comes before in the key: so shards of a key end in turn,
        and are answered while later ones come (see `UnreadPayloads`)."""
        window, where, place = self._windows[shard.server], (shard.server, key.name), (round_, shard.start)
        waiting = self._waiting.setdefault(where, [])
        waiting.append(place)
        while min(waiting) < place or (not self._admits(shard, data) and window.holds(key.name, place)):
            yield False
        waiting.remove(place)
        if not waiting:
            del self._waiting[where]

    def _admits(self, shard: Shard, data: Array) -> bool:
        """Return whether the payload may go to its server unasked.

        This worker may have its share of what lies there under way, or two messages: one is on the link while the word
        that the other has been read is on its way.
        """
        options = self._layout.options
        share = max(self._stored[shard.server] // self._senders, 2 * (options.chunk_bytes + FRAME_COST))
        most = min(options.chunks_in_flight * options.chunk_bytes, share)
        return self._windows[shard.server].admits(data.size, most)

    def _isend(self, shard: Shard, data: Array) -> MPI.Request:
        return send(self._world, data, self._layout.server_rank(shard.server), push_tag(shard.number))

    # ---- in

    def receive(self, shard: Shard, slices: Sequence[Array]) -> MessageGroup:
        """Start to receive an answer of a shard's server, message by message. It is there when none is `pending`; what
        is given up, `stop` cancels."""
        server, tag = self._layout.server_rank(shard.server), pull_tag(shard.number)
        return self._under_way.begin([self._world.Irecv(data, server, tag) for data in slices])


class _Sent(NamedTuple):
    """A payload on its way; the server has read it when `consumed()` reaches its round."""

    key: Hashable
    place: Place
    consumed: Callable[[], int]
    nbytes: int


class UnreadPayloads:
    """Payloads that a worker has sent to one server without being asked, and the server has not read yet.

    A payload has a place in its key: its round, and where in the key it begins. All workers send what a round of a key
    consists of, and a server reads what has come from everybody. So a worker may wait only for what comes before in
    the key: that can be read without what it holds back. Behind a later part, or another key, workers that go through
    them in different orders would wait for each other.
    """

    def __init__(self) -> None:
        self._open: list[_Sent] = []
        self._bytes = 0

    def admits(self, nbytes: int, limit: int) -> bool:
        """Return whether so many bytes more may be sent now: `limit` bytes in all at most, or one payload."""
        if self._open and self._bytes + nbytes + FRAME_COST > limit:
            self._open = [sent for sent in self._open if sent.consumed() < sent.place[0]]
            self._bytes = sum(sent.nbytes for sent in self._open)
        return not self._open or self._bytes + nbytes + FRAME_COST <= limit

    def holds(self, key: Hashable, before: Place) -> bool:
        """Return whether a payload of the key is under way that comes before that place."""
        return any(sent.key == key and sent.consumed() < sent.place[0] and sent.place < before for sent in self._open)

    def add(self, key: Hashable, place: Place, consumed: Callable[[], int], nbytes: int) -> None:
        """A payload is sent; it has been read when `consumed()` reaches its round."""
        self._open.append(_Sent(key, place, consumed, nbytes + FRAME_COST))
        self._bytes += nbytes + FRAME_COST
