"""A worker's connections to all servers (`ServerLink`), and the messages of its pushes to other nodes (`Sender`).

A *line* is the connection to one server. It carries *frames*, small messages of fixed layout. A *shard* is the part of
a key on one server, and a *unit* is the server's name for it. A push to another node is a frame and a *payload*, which
is the data. To limit the memory that servers need, a worker may send only a limited number of bytes unasked. It sends
other payloads when the server asks for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.clock import Clock
from mpips.collectives.errors import warn
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.requests import cut_bytes, send
from mpips.collectives.fabric.tasks import Task, advance
from mpips.store.keys.key import Array, Key, Name, Shard
from mpips.store.roles import Layout
from mpips.store.runtime.errors import ServerMemoryError
from mpips.store.transport import frames
from mpips.store.transport.frames import ALONG, Coding, Frame, Op
from mpips.store.transport.lines import Line, MessageLine, any_waiting
from mpips.store.transport.outbox import Grows, Outbox, RepeatedPush, fill
from mpips.store.transport.pending import QUIET_SECONDS, MessageGroup, MessagesUnderWay, pull_tag, push_tag

LOOK_SECONDS = 1e-4


class ServerLink:
    """The lines to all servers of one store, and the keys that these servers store. Used by one thread at a time.

    Tasks of the store do not read the servers' messages themselves. The code that runs a task calls `listen` before
    each step.
    """

    def __init__(self, layout: Layout, lines: list[Line]) -> None:
        self._layout = layout
        self._keys: dict[Name, Key] = {}
        self._shards: dict[int, Shard] = {}
        self._tokens = 0
        # Outboxes (shared memory for pushes) that this worker is filling, with their values. An outbox is added before
        # its server is told of it, and removed once it is full.
        self.filling: Grows = []
        self._connect(lines)

    def _connect(self, lines: list[Line]) -> None:
        self.lines = lines
        self._distant = [line for line in lines if isinstance(line, MessageLine)]
        self.all_local = not self._distant
        self.sender = Sender(self._layout)
        self._answers: dict[int, tuple[bytes, int]] = {}
        self.filling.clear()

    def renew(self, lines: list[Line]) -> None:
        """Begin the next generation over these lines, without keys and unfinished messages."""
        self._keys.clear()
        self._shards.clear()
        self._connect(lines)

    # ---- keys

    def add(self, key: Key) -> None:
        """Register a key, so that `listen` handles messages about it. Called before its first value is sent."""
        self._keys[key.name] = key
        for shard in key.shards:
            self._shards[shard.number] = shard
            self._count(key, shard, 1)

    def remove(self, key: Key) -> None:
        """Remove a key that nobody uses any more. Messages about it are ignored from now on."""
        del self._keys[key.name]
        for shard in key.shards:
            del self._shards[shard.number]
            self._count(key, shard, -1)

    def from_own_server(self, shards: Iterable[Shard]) -> list[Shard]:
        """Sort shards so that the workers begin with different servers, and do not all use one server's link first.

        The shards of one server keep their order, because the server can answer the first shard once all workers have
        sent that shard.
        """
        first = self._layout.rank * self._layout.num_servers // self._layout.num_workers
        return sorted(shards, key=lambda shard: (shard.server - first) % self._layout.num_servers)

    def outbox(self, key: Key, shard: Shard) -> Outbox:
        """Return a shard's outbox.

        The first call makes the outbox and the push of its content (`shard.outbox_push`).
        """
        if shard.outbox is None:
            size = shard.stop - shard.start
            outbox = Outbox(shard.words, size, shard.blocks, shard.block_elements, key.dtype)
            region, coding = (outbox.plain, Coding.PLAIN) if shard.blocks == 1 else (outbox.growing, Coding.GROWING)
            shard.outbox_push = RepeatedPush(shard.line.repost, shard.number, region, coding)
            shard.outbox = outbox
        made: Outbox = shard.outbox
        return made

    def _count(self, key: Key, shard: Shard, sign: int) -> None:
        self.sender.stored(shard.server, sign * (shard.stop - shard.start) * key.dtype.itemsize)

    # ---- messages from servers

    def listen(self) -> None:
        """Read and handle messages from servers. Does not block."""
        # Ask MPI only once for the servers of all other nodes, because this question takes as long as the rest of the
        # function.
        heard = not self.all_local and any_waiting(self._distant)
        for line in self.lines:
            if (heard or line.local) and line.waiting():
                for data in line.read():
                    self._hear(line, Frame.of(data))

    def _hear(self, line: Line, frame: Frame) -> None:
        if frame.op == Op.ANSWER:
            self._answers[frame.token] = line.body(frame).tobytes(), frame.flags
        elif frame.op == Op.WARNING:
            warn(line.body(frame).tobytes().decode())
        elif (shard := self._shards.get(frame.unit)) is None:
            # The key was forgotten.
            return
        elif frame.op == Op.CONSUMED:
            shard.told = max(shard.told, frame.round)
            # Round 0 means that the server has received the first values.
            shard.granted = shard.granted or not frame.round
        elif frame.op == Op.GRANT:
            shard.granted = True
        elif frame.op == Op.HELD:
            shard.held = frame.round
        elif frame.op == Op.CREDIT:
            shard.credits.append(frame.aux)

    # ---- requests to servers

    def post_request(self, server: int, request: msgspec.Struct) -> int:
        """Send a request to a server. Return the token of its answer."""
        return self.post_request_with(server, frames.encode(request), 0)

    def post_request_with(self, server: int, body: bytes | NDArray[np.uint8], data_bytes: int) -> int:
        """Send a request to a server. Return the token of its answer.

        Args:
            body: The encoded request, with data in front of it. If it is an array in memory that the node shares, it is
                not copied.
            data_bytes: The size of the data in front of the request.
        """
        self._tokens += 1
        self.lines[server].post_body(body, Op.CONTROL, token=self._tokens, aux=data_bytes)
        return self._tokens

    def wait_for_answer(self, token: int, decode: Callable[[bytes], Any] = frames.decode_answer) -> Task[Any]:
        """Wait for the answer to a request, and return it. A service passes its own `decode`.

        Raise ValueError with the server's message if the server refuses the request, and ServerMemoryError if the
        server lacks the memory for it.
        """
        self.listen()
        while token not in self._answers:
            yield False
            self.listen()
        data, failed = self._answers.pop(token)
        if failed:
            raise (ServerMemoryError if failed == frames.NO_MEMORY else ValueError)(data.decode())
        return decode(data)

    def request(
        self, server: int, request: msgspec.Struct, decode: Callable[[bytes], Any] = frames.decode_answer
    ) -> Task[Any]:
        """Send a request to a server and return its answer. Raises the errors of `wait_for_answer`."""
        return (yield from self.wait_for_answer(self.post_request(server, request), decode))

    def set_first_values(self, pairs: Iterable[tuple[Key, Array]]) -> Task[None]:
        """Send the first values (1-D) of keys to the servers.

        Only one worker calls this, before any worker uses the keys. The task ends when all values have arrived.
        """
        shards = ((shard, flat[shard.start : shard.stop]) for key, flat in pairs for shard in key.shards)
        return self.in_window((self._set(*part), part[1].nbytes) for part in shards)

    def _set(self, shard: Shard, values: Array) -> Task[None]:
        if not shard.local:
            yield from self.sender.send_first(shard, values)
            return
        assert shard.stored is not None
        shard.stored[...] = values

    def in_window(self, tasks: Iterable[tuple[Task[Any], int]]) -> Task[None]:
        """Run `tasks`, pairs of a task and its bytes.

        Several run at once if their bytes together stay below the limit.
        """
        waiting = iter(tasks)
        room = self._layout.options.chunks_in_flight * self._layout.options.chunk_bytes
        running: deque[tuple[Task[Any], int]] = deque()
        following = next(waiting, None)
        while following is not None or running:
            while following is not None and (not running or following[1] + FRAME_COST <= room):
                running.append((following[0], following[1] + FRAME_COST))
                room -= running[-1][1]
                following = next(waiting, None)
            self.listen()
            before = len(running)
            for _ in range(before):
                task, cost = running.popleft()
                if advance(task):
                    running.append((task, cost))
                else:
                    room += cost
            if running:
                yield len(running) < before

    def goodbye(self) -> None:
        """Tell all servers that this worker has finished. Does not wait for answers."""
        for line in self.lines:
            line.post(Op.BYE)
        for distant in self._distant:
            distant.leave()

    # ---- the end of the generation

    def quiesce(self) -> None:
        """At the end of a generation, make sure that nothing reads or writes the caller's arrays any more.

        1. Fill the outboxes that servers already know of, so that an interrupt does not leave a round half applied.
        2. Wait until the servers of this node have read the caller's arrays or have stopped reading.
        3. Wait until all messages have ended.

        Blocks for a few seconds at most. If Ctrl-C interrupts this call, make it again.
        """
        if self.filling:
            fill(self.filling)
            self.filling.clear()
        clock = Clock()
        while _lent(self._keys.values()) and clock.seconds() < QUIET_SECONDS:
            time.sleep(LOOK_SECONDS)
        self.sender.stop()
        for line in self._distant:
            line.leave()


def _lent(keys: Iterable[Key]) -> bool:
    """True if a server of this node may still read arrays that this worker has pushed."""
    pushes: Sequence[tuple[Key, Shard]] = [(key, shard) for key in keys for shard in key.pushes]
    return any(shard.local and shard.consumed() < key.round and not shard.line.stopped() for key, shard in pushes)


# the round of a payload, and its first element in the key
Place = tuple[int, int]
# Bytes that are added to the size of each payload, for the server's cost of handling one more payload.
FRAME_COST = 2048


class Sender:
    """One worker's payloads to and from the servers of other nodes, as MPI messages, in one generation."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._world = layout.world
        self._under_way = MessagesUnderWay()
        self._windows = [UnreadPayloads() for _ in range(layout.num_servers)]
        # (server, key) -> places of payloads that wait until the server has room
        self._waiting: dict[tuple[int, Name], list[Place]] = {}
        self._stored = [0] * layout.num_servers
        self._senders = sum(map(len, layout.groups()))
        self._ranks = [layout.num_workers + server for server in range(layout.num_servers)]

    def stored(self, server: int, nbytes: int) -> None:
        """Note that a server stores `nbytes` more bytes of keys than before."""
        self._stored[server] += nbytes

    def stop(self) -> bool:
        """Stop at the end of a generation. See `MessagesUnderWay.stop`."""
        return self._under_way.stop()

    # ---- out

    def send(
        self,
        key: Key,
        shard: Shard,
        data: Array,
        round_: int,
        priority: int,
        coding: Coding = Coding.PLAIN,
    ) -> Task[None]:
        """Send a payload (uint8) of a round to a server of another node.

        The task is over when the payload may be overwritten.
        """
        blocks = shard.blocks if coding == Coding.PLAIN else 1
        region = Region(0, 0, 0, 0, data.size)
        if blocks > 1:
            shard.line.post(Op.PUSH, shard.number, round_, region, coding, priority, token=key.quorum_weight)
            yield from self._as_asked(shard, data, shard.block_elements * key.dtype.itemsize, blocks)
            return
        yield from self._turn(key, shard, data, round_)
        if self._admits(shard, data):
            self._windows[shard.server].add(key.name, (round_, shard.start), shard.consumed, data.size)
            shard.line.post(
                Op.PUSH, shard.number, round_, region, coding, priority, token=key.quorum_weight, flags=ALONG
            )
            yield from self._under_way.begin(sends=[self._isend(shard, data)]).wait()
        else:
            shard.line.post(Op.PUSH, shard.number, round_, region, coding, priority, token=key.quorum_weight)
            yield from self._as_asked(shard, data, data.size, 1)

    def send_first(self, shard: Shard, values: Array) -> Task[None]:
        """Send the first value of a unit to a server of another node. The task is over when the value has arrived."""
        shard.granted = False
        slices = cut_bytes(values, shard.block_elements * values.itemsize)
        shard.line.post(Op.SET, shard.number, 0, Region(0, 0, 0, 0, slices[0].size), aux=len(slices))
        yield from self._under_way.begin(sends=[self._isend(shard, data) for data in slices]).wait()
        while not shard.granted:
            yield False

    def _as_asked(self, shard: Shard, data: Array, size: int, blocks: int) -> Task[None]:
        """Send `blocks` blocks of `size` bytes, each when the server asks for it."""
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
        """Wait until the server has room, or until it has read all earlier payloads of the key (see `UnreadPayloads`).

        So the server finishes the shards of a key one after another, and answers a shard while later ones arrive.
        """
        window, where, place = self._windows[shard.server], (shard.server, key.name), (round_, shard.start)
        waiting = self._waiting.setdefault(where, [])
        waiting.append(place)
        while min(waiting) < place or (not self._admits(shard, data) and window.holds(key.name, place)):
            yield False
        waiting.remove(place)
        if not waiting:
            del self._waiting[where]

    def _admits(self, shard: Shard, data: Array) -> bool:
        """True if the worker may send the payload without waiting until the server asks for it.

        The limit on a worker's unread bytes is its share of the data that the server stores, but at least two messages.
        So one message can travel while the server reports that it has read the other.
        """
        options = self._layout.options
        share = max(self._stored[shard.server] // self._senders, 2 * (options.chunk_bytes + FRAME_COST))
        most = min(options.chunks_in_flight * options.chunk_bytes, share)
        return self._windows[shard.server].admits(data.size, most)

    def _isend(self, shard: Shard, data: Array) -> MPI.Request:
        return send(self._world, data, self._ranks[shard.server], push_tag(shard.number))

    # ---- in

    def receive(self, shard: Shard, slices: Sequence[Array]) -> MessageGroup:
        """Begin to receive a shard's answer as one message for each slice.

        The answer has arrived when `pending()` of the result is 0. `stop` cancels messages that have not arrived.
        """
        server, tag = self._ranks[shard.server], pull_tag(shard.number)
        return self._under_way.begin([self._world.Irecv(data, server, tag) for data in slices])


class _Sent(NamedTuple):
    """A payload that was sent. The server has read it when `consumed()` reaches the round of the payload."""

    key: Hashable
    place: Place
    consumed: Callable[[], int]
    nbytes: int


class UnreadPayloads:
    """Payloads that a worker has sent before the server asked for them, and that the server has not read yet.

    A payload has a place in its key: its round and its first element. A server reads a part of a round once that part
    has arrived from all workers. So before a worker sends a payload, it may wait only for payloads at earlier places of
    the same key, because the server can read those without the new payload. If a worker waited for later places, or for
    another key, workers that push in different orders would deadlock.
    """

    def __init__(self) -> None:
        self._open: list[_Sent] = []
        self._bytes = 0

    def admits(self, nbytes: int, limit: int) -> bool:
        """True if `nbytes` may be sent now. At most `limit` bytes may be unread, or a single payload of any size."""
        if self._open and self._bytes + nbytes + FRAME_COST > limit:
            self._open = [sent for sent in self._open if sent.consumed() < sent.place[0]]
            self._bytes = sum(sent.nbytes for sent in self._open)
        return not self._open or self._bytes + nbytes + FRAME_COST <= limit

    def holds(self, key: Hashable, before: Place) -> bool:
        """True if the server has not yet read a payload of the key at an earlier place than `before`."""
        return any(sent.key == key and sent.consumed() < sent.place[0] and sent.place < before for sent in self._open)

    def add(self, key: Hashable, place: Place, consumed: Callable[[], int], nbytes: int) -> None:
        """Note a payload that was sent. The server has read it when `consumed()` reaches the round in `place`."""
        self._open.append(_Sent(key, place, consumed, nbytes + FRAME_COST))
        self._bytes += nbytes + FRAME_COST
