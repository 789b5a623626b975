"""A line is the connection between one worker and one server. It carries frames in both directions, in order.

A *frame* is a message of 64 bytes (see `frames`). Some frames are followed by a *body*, an array of bytes. `connect`
makes the lines: a `SharedLine` of two rings if both ends can map each other's memory, else a `MessageLine`, which uses
MPI messages.

A *ring* is a queue of slots in memory that both ends map, with one writer and one reader. The writer fills a slot, then
raises the tail. The reader reads up to the tail, then raises the head. This needs a processor that does not reorder
writes to memory (total store order, as on x86). On other processors frames travel as MPI messages. The tails of all
workers' rings are side by side in memory, so that a server can check by one comparison whether any worker has written.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError, warn
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.board import Peers
from mpips.collectives.fabric.layout import ORDERED_STORES
from mpips.collectives.fabric.requests import keep_until_complete, send
from mpips.store.roles import Layout
from mpips.store.runtime.rendezvous import MeetingPlace
from mpips.store.transport.frames import FRAME, FRAME_BYTES, NOWHERE, ROUND, ROUND_AT, WITH_BODY, Frame
from mpips.store.transport.pending import TAG_BODY, TAG_FRAME

WHAT = "mpips.create"
# number of sends that a line collects before it checks which of them MPI has completed
SENT = 32
SLOTS = 256
# number of words for the two rings of a worker: request tail, request head, reply tail, reply head
WORDS = 4
# a function like `Generation.wait`: it waits until the condition is true; the text says what it waits for
Wait = Callable[[Callable[[], object], str], object]


class Connection(NamedTuple):
    """A rank's connections to other ranks of the store."""

    # On a worker: one line to every server. On a server: one line to every worker. Empty on a spare.
    lines: list[Line]
    # on a server, its own rings; otherwise None
    rings: Rings | None
    # rank of each other server on this node -> its ledger, the memory in which it records where its units are
    ledgers: dict[int, Region]


class _Offer(msgspec.Struct, array_like=True):
    """Memory that a rank offers to the other ranks on its node, which try to map it.

    A server offers its rings, and also its ledger if it has one. A worker offers a few bytes, only so that servers can
    test whether they can map its memory.
    """

    region: tuple[int, ...]
    ledger: tuple[int, ...] = ()


def connect(layout: Layout, place: MeetingPlace, wait: Wait, ledger: Region | None = None) -> Connection:
    """Connect workers and servers. Collective over all ranks of the store, blocking. Called once in each generation.

    A worker and a server use rings if MPI says that they share a node, and if each could map the other's memory. In a
    store with a quorum all use messages, so that a stalled worker holds no memory that others need. If this processor
    may reorder writes to memory, all use messages as well, and rank 0 warns (RuntimeWarning).

    Args:
        place: The rendezvous through which the ranks exchange data.
        wait: The function by which a worker waits for room in a ring.
        ledger: This server's ledger, or None if it has none.
    """
    own = Rings.create(layout.num_workers) if layout.is_server else None
    region = arena.region_of(own.memory if own else arena.empty(64, np.uint8))
    offer = msgspec.msgpack.encode(_Offer(tuple(region), tuple(ledger or ())))
    offers = [msgspec.msgpack.decode(data, type=_Offer) for data in place.meet(offer, WHAT, True)]
    servers = range(layout.num_workers, layout.num_workers + layout.num_servers)
    peers = range(layout.num_workers) if layout.is_server else servers if layout.is_worker else range(0)
    mapped: dict[int, NDArray[Any]] = {}
    for peer in peers:
        if layout.same_node(layout.rank, peer) and ORDERED_STORES and layout.options.quorum < 0:
            try:
                mapped[peer] = arena.attach(Region(*offers[peer].region))
            # The peer is in another container. MPI can share memory with such a process, but we cannot map its memory.
            except CollectiveError:
                continue
    verdicts = place.meet(bytes(peer in mapped for peer in range(len(offers))), WHAT, True)
    if layout.rank == 0 and not ORDERED_STORES and len(set(layout.nodes)) < len(layout.nodes):
        warn(
            f"this processor ({platform.machine()}) may reorder stores to memory, so workers and servers of one node "
            "talk by messages, which is slower"
        )
    processes = Peers([Region(*one.region).pid for one in offers])
    lines: list[Line] = []
    for peer in peers:
        if peer not in mapped or not verdicts[peer][layout.rank]:
            lines.append(MessageLine(layout.world, peer))
        elif own:
            lines.append(SharedLine(own.reply_ring(peer), own.request_ring(peer)))
        else:
            rings, gone = Rings(layout.num_workers, mapped[peer]), partial(processes.has_ended, peer)
            both = rings.request_ring(layout.rank), rings.reply_ring(layout.rank)
            lines.append(SharedLine(*both, wait, gone))
    ledgers = {
        rank: Region(*one.ledger)
        for rank, one in enumerate(offers)
        if one.ledger and rank != layout.rank and layout.same_node(rank, layout.rank)
    }
    return Connection(lines, own, ledgers)


class SharedLine:
    """A line of two rings. A body stays in the sender's memory until the receiver has finished with the frame.

    Args:
        wait: The function that waits while the ring is full, or None. A worker can wait, because servers always read
            their rings. A server must never wait for a worker, so it passes None. Then the line keeps frames that find
            no room in a list, and sends them in the next call of `flush`, `waiting` or `post`.
        gone: Returns True if the process at the other end has ended.
    """

    # True if both ends share memory
    local = True

    def __init__(
        self, outgoing: FrameRing, incoming: FrameRing, wait: Wait | None = None, gone: Callable[[], bool] = bool
    ) -> None:
        self._out = outgoing
        self._in = incoming
        self._wait = wait
        self._gone = gone
        # (frame, body) of frames that have not been written yet, because the ring was full
        self._backlog: deque[tuple[tuple[int, ...], NDArray[Any] | None]] = deque()
        # (number of the frame, body) of each body that the other end may still read
        self._bodies: deque[tuple[int, NDArray[Any]]] = deque()

    def post(
        self,
        op: int,
        unit: int = 0,
        round_: int = 0,
        region: tuple[int, ...] = NOWHERE,
        coding: int = 0,
        priority: int = 0,
        aux: int = 0,
        token: int = 0,
        flags: int = 0,
    ) -> None:
        if self._backlog or not self._out.post(op, flags, coding, priority, unit, aux, *region, token, round_):
            self._queue((op, flags, coding, priority, unit, aux, *region, token, round_), None)

    def repost(self, frame: bytes, round_: int) -> None:
        """Send a packed frame with its round replaced."""
        if self._backlog or not self._out.repost(frame, round_):
            self._queue(Frame.of(frame)._replace(round=round_), None)

    def post_body(
        self,
        body: bytes | NDArray[np.uint8],
        op: int,
        unit: int = 0,
        round_: int = 0,
        token: int = 0,
        flags: int = 0,
        aux: int = 0,
    ) -> None:
        """Send a frame with a body. The body is copied, unless it is an array in memory that the node shares."""
        memory = body if isinstance(body, np.ndarray) else _shared(body)
        self._queue((op, flags, 0, 0, unit, aux, *arena.region_of(memory), token, round_), memory)

    def _queue(self, fields: tuple[int, ...], body: NDArray[Any] | None) -> None:
        self._backlog.append((fields, body))
        if not self.flush() and self._wait is not None:
            self._wait(self.flush, "a server's ring has no room")

    def flush(self) -> bool:
        """Send frames that are waiting for room, and free bodies that were read. Return True if no frame is waiting."""
        while self._bodies and self._bodies[0][0] <= self._out.passed:
            self._bodies.popleft()
        while self._backlog:
            fields, body = self._backlog[0]
            if not self._out.post(*fields):
                return False
            self._backlog.popleft()
            if body is not None:
                self._bodies.append((self._out.written, body))
        return True

    def waiting(self) -> bool:
        """True if a frame has arrived."""
        if self._backlog:
            self.flush()
        return self._in.waiting()

    def read(self) -> Iterator[bytes]:
        """Yield the frames that have arrived, packed, in order."""
        return self._in.read()

    def body(self, frame: Frame) -> NDArray[np.uint8]:
        """Return the body of a frame that has been read. The array is in the sender's memory.

        The array is valid until the next frame is read, or longer if the sender keeps its memory.
        """
        region = Region(*frame.region)
        return arena.segment(region)[region.offset : region.offset + region.nbytes]

    def stopped(self) -> bool:
        """True if the server at the other end no longer reads this worker's memory.

        This is the case once the server has noticed the end of the generation, or its process has ended.
        """
        return self._in.rings.stopped() or self._gone()


def _shared(data: bytes) -> NDArray[np.uint8]:
    """Copy data into memory that the node shares."""
    memory = arena.empty(max(len(data), 1), np.uint8)[: len(data)]
    memory[...] = np.frombuffer(data, np.uint8)
    return memory


class MessageLine:
    """A line that sends frames and bodies as MPI messages. No method blocks.

    The line keeps sent data until MPI has completed the send. A frame with a body counts as arrived once the whole body
    has arrived.
    """

    local = False

    def __init__(self, comm: MPI.Comm, peer: int) -> None:
        self.comm = comm
        self.peer = peer
        self._sends: list[MPI.Request] = []
        self._body = bytearray()
        # a received frame whose body has not arrived yet, or b""
        self._frame = b""
        self._request = MPI.REQUEST_NULL

    def post(
        self,
        op: int,
        unit: int = 0,
        round_: int = 0,
        region: tuple[int, ...] = NOWHERE,
        coding: int = 0,
        priority: int = 0,
        aux: int = 0,
        token: int = 0,
        flags: int = 0,
    ) -> None:
        self._send(FRAME.pack(op, flags, coding, priority, unit, aux, *region, token, round_), TAG_FRAME)

    def repost(self, frame: bytes, round_: int) -> None:
        """Send a packed frame with its round replaced."""
        self._send(frame[:ROUND_AT] + ROUND.pack(round_), TAG_FRAME)

    def post_body(
        self,
        body: bytes | NDArray[np.uint8],
        op: int,
        unit: int = 0,
        round_: int = 0,
        token: int = 0,
        flags: int = 0,
        aux: int = 0,
    ) -> None:
        """Send a frame, then its body. The caller must not change the body before the answer has arrived."""
        self.post(op, unit, round_, (0, 0, 0, 0, len(body)), aux=aux, token=token, flags=flags)
        self._send(body, TAG_BODY)

    def _send(self, data: bytes | NDArray[np.uint8], tag: int) -> None:
        if len(self._sends) > SENT:
            self._sends = [request for request in self._sends if not request.Test()]
        self._sends.append(send(self.comm, data, self.peer, tag))

    def flush(self) -> bool:
        """Do nothing, and return True, because all frames have already been passed to MPI."""
        return True

    @property
    def coming(self) -> bool:
        """True if a frame has been received and its body has not arrived yet."""
        return bool(self._frame)

    def waiting(self) -> bool:
        """True if a frame has arrived, with or without its body."""
        return self.coming or self.comm.Iprobe(self.peer, TAG_FRAME)

    def read(self) -> Iterator[bytes]:
        """Yield the frames that have arrived, packed, in order."""
        while self.coming or self.comm.Iprobe(self.peer, TAG_FRAME):
            frame = self._frame or self._next()
            if frame[0] in WITH_BODY and not self._request.Test():
                self._frame = frame
                return
            self._frame = b""
            yield frame

    def _next(self) -> bytes:
        data = bytearray(FRAME_BYTES)
        self.comm.Recv(data, self.peer, TAG_FRAME)
        if data[0] in WITH_BODY:
            self._body = bytearray(Frame.of(bytes(data)).nbytes)
            self._request = self.comm.Irecv(self._body, self.peer, TAG_BODY)
        return bytes(data)

    def body(self, frame: Frame) -> NDArray[np.uint8]:
        """Return the body of the frame that was read last."""
        return np.frombuffer(self._body, np.uint8)

    def stopped(self) -> bool:
        """Return True, because a server of another node never reads this worker's memory."""
        return True

    def done(self) -> bool:
        """True if MPI has completed all sends."""
        self._sends = [request for request in self._sends if not request.Test()]
        return not self._sends

    def leave(self) -> None:
        """End the line. MPI finishes unfinished sends in the background."""
        keep_until_complete(self._sends)
        self._sends = []


# One end of a line. No method blocks, with one exception: a worker that posts to a full ring waits. That wait ends,
# because servers always read their rings.
Line = SharedLine | MessageLine


def any_waiting(lines: Sequence[MessageLine]) -> bool:
    """True if any of these lines may have a frame. Asks MPI only once, because all lines share a communicator."""
    return bool(lines) and (lines[0].comm.Iprobe(MPI.ANY_SOURCE, TAG_FRAME) or any(line.coming for line in lines))


class Rings:
    """The rings between one server and its workers, in a region of memory that the server makes and the workers map.

    The region holds the heads and tails of all rings, a word that is 1 once the server has stopped, and the slots.
    """

    def __init__(self, workers: int, memory: NDArray[np.uint8]) -> None:
        self.workers = workers
        self.memory = memory
        self._stopped = WORDS * workers
        self.words = memoryview(memory[: 8 * (self._stopped + 1)].view(np.uint64))  # type: ignore[arg-type]
        self.slots = memoryview(memory[self._header(workers) :])  # type: ignore[arg-type]
        self._seen = bytes(8 * workers)

    @staticmethod
    def _header(workers: int) -> int:
        """Return the number of bytes before the slots, rounded up to whole cache lines."""
        return -(-(WORDS * workers + 1) * 8 // 64) * 64

    @classmethod
    def create(cls, workers: int) -> Rings:
        """Make empty rings in new memory of this process."""
        memory = arena.empty(cls._header(workers) + 2 * workers * SLOTS * FRAME_BYTES, np.uint8)
        memory[...] = 0
        return cls(workers, memory)

    def any_written(self) -> bool:
        """True if any worker has written since the last call that returned True. Called by the server."""
        tails = self.words[: self.workers].tobytes()
        if tails == self._seen:
            return False
        self._seen = tails
        return True

    def stop(self) -> None:
        """Tell workers that the server no longer reads their memory, because the generation is over."""
        self.words[self._stopped] = 1

    def stopped(self) -> bool:
        """True if the server has called `stop`."""
        return bool(self.words[self._stopped])

    def request_ring(self, worker: int) -> FrameRing:
        """Return the ring from the worker to the server."""
        return FrameRing(self, 0, worker)

    def reply_ring(self, worker: int) -> FrameRing:
        """Return the ring from the server to the worker."""
        return FrameRing(self, 1, worker)


class FrameRing:
    """The ring of one direction between a worker and a server.

    The writer calls `post` and `repost`, the reader calls `waiting` and `read`.
    """

    __slots__ = ("_base", "_head", "_head_word", "_slots", "_tail", "_tail_word", "_words", "rings")

    def __init__(self, rings: Rings, direction: int, worker: int) -> None:
        self.rings = rings
        self._words = rings.words
        self._slots = rings.slots
        self._tail_word = 2 * direction * rings.workers + worker
        self._head_word = self._tail_word + rings.workers
        self._base = (direction * rings.workers + worker) * SLOTS * FRAME_BYTES
        self._tail = self._words[self._tail_word]
        self._head = self._words[self._head_word]

    def post(self, *fields: int) -> bool:
        """Write a frame. Return False, with nothing written, if the ring is full."""
        tail = self._tail
        if tail - self._words[self._head_word] >= SLOTS:
            return False
        FRAME.pack_into(self._slots, self._base + (tail % SLOTS) * FRAME_BYTES, *fields)
        self._tail = self._words[self._tail_word] = tail + 1
        return True

    def repost(self, frame: bytes, round_: int) -> bool:
        """Write a packed frame with its round replaced. Return False, with nothing written, if the ring is full."""
        tail = self._tail
        if tail - self._words[self._head_word] >= SLOTS:
            return False
        slot = self._base + (tail % SLOTS) * FRAME_BYTES
        self._slots[slot : slot + FRAME_BYTES] = frame
        ROUND.pack_into(self._slots, slot + ROUND_AT, round_)
        self._tail = self._words[self._tail_word] = tail + 1
        return True

    def waiting(self) -> bool:
        """True if the ring has a frame to read."""
        return self._words[self._tail_word] != self._head

    def read(self) -> Iterator[bytes]:
        """Yield the frames in the ring, packed, in order. Asking for the next frame frees the slot of the last one."""
        tail = self._words[self._tail_word]
        while self._head < tail:
            slot = self._base + (self._head % SLOTS) * FRAME_BYTES
            self._head += 1
            yield self._slots[slot : slot + FRAME_BYTES].tobytes()
            self._words[self._head_word] = self._head

    @property
    def written(self) -> int:
        """Number of frames written since the ring was made."""
        return self._tail

    @property
    def passed(self) -> int:
        """Number of frames that the reader has finished with."""
        return self._words[self._head_word]
