"""A line carries frames, and now and then a body, between one worker and one server, in order, both ways.

Two kinds: rings in shared memory between processes of one node, MPI messages between nodes. Where a ring is full, a
worker waits, as servers always read on. A server must not wait for a worker: it keeps a backlog, which it flushes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np

from collectives.node import arena
from collectives.node.arena import Region
from mpips.messages import FRAME, FRAME_BYTES, Frame, Op
from mpips.rings import SLOTS, Ring

if TYPE_CHECKING:
    from mpi4py import MPI

NOWHERE = Region(0, 0, 0, 0, 0)
ROOM_SECONDS = 1e-4  # between two looks whether there is room
PUSH = int(Op.PUSH)
TAG_FRAME, TAG_BODY, TAG_DATA = 1, 2, 16


class Line(Protocol):
    """One end of a line."""

    local: bool

    def post(
        self, op: int, unit: int = 0, round_: int = 0, region: tuple[int, ...] = NOWHERE, coding: int = 0,
        priority: int = 0, aux: int = 0, token: int = 0, flags: int = 0,
    ) -> None: ...  # fmt: skip

    def post_body(
        self, body: bytes, op: int, unit: int = 0, round_: int = 0, token: int = 0, flags: int = 0
    ) -> None: ...

    def flush(self) -> bool:
        """Send what found no room before; whether nothing is left of it."""
        ...

    def waiting(self) -> bool:
        """Whether a frame has come."""
        ...

    def read(self) -> Iterator[bytes]:
        """The frames that have come, packed, in order."""
        ...

    def body(self, frame: Frame) -> bytes: ...


class SharedLine:
    """Frames in rings; a body lies in node-shared memory until as many frames have followed as two rings have slots.
    `patient`: it waits for room, and reads all that the other end keeps for want of room."""

    local = True

    def __init__(self, outgoing: Ring, incoming: Ring, patient: bool) -> None:
        self._out, self._in, self._patient = outgoing, incoming, patient
        self._backlog: deque[tuple[tuple[int, ...], np.ndarray | None]] = deque()
        self._bodies: deque[np.ndarray] = deque(maxlen=2 * SLOTS)

    def post(
        self, op: int, unit: int = 0, round_: int = 0, region: tuple[int, ...] = NOWHERE, coding: int = 0,
        priority: int = 0, aux: int = 0, token: int = 0, flags: int = 0,
    ) -> None:  # fmt: skip
        if self._backlog or not self._out.post(op, flags, coding, priority, unit, aux, *region, token, round_):
            self._late((op, flags, coding, priority, unit, aux, *region, token, round_), None)

    def again(self, frame: bytes, round_: int) -> None:
        """Post a packed frame with another round."""
        if self._backlog or not self._out.again(frame, round_):
            self._late(Frame.of(frame)._replace(round=round_), None)

    def post_body(self, body: bytes, op: int, unit: int = 0, round_: int = 0, token: int = 0, flags: int = 0) -> None:
        memory = arena.empty(max(len(body), 1), np.uint8)
        memory[: len(body)] = np.frombuffer(body, np.uint8)
        region = arena.locate(memory[: len(body)])
        assert region is not None
        self._late((op, flags, 0, 0, unit, 0, *region, token, round_), memory)

    def _late(self, fields: tuple[int, ...], body: np.ndarray | None) -> None:
        self._backlog.append((fields, body))
        while not self.flush() and self._patient:
            time.sleep(ROOM_SECONDS)

    def flush(self) -> bool:
        post = self._out.post if self._patient else self._out.post_kept
        while self._backlog:
            fields, body = self._backlog[0]
            if not post(*fields):
                return False
            self._backlog.popleft()
            if body is not None:
                self._bodies.append(body)
            if not self._backlog and not self._patient:
                self._out.none_kept()
        return True

    def waiting(self) -> bool:
        if self._backlog:
            self.flush()
        return self._in.waiting()

    def read(self) -> Iterator[bytes]:
        return self._in.read()

    def body(self, frame: Frame) -> bytes:
        return arena.attach(Region(*frame.region)).tobytes()


class Repeated:
    """The push of one region, round after round: its frame is packed once for a priority."""

    __slots__ = ("_again", "_coding", "_frame", "_priority", "_region", "_unit")

    def __init__(self, line: Line, unit: int, region: Region, coding: int = 0) -> None:
        assert isinstance(line, SharedLine)
        self._again, self._unit, self._region, self._coding = line.again, unit, region, coding
        self._priority, self._frame = 0, b""

    def post(self, round_: int, priority: int) -> None:
        if priority != self._priority or not self._frame:
            frame = FRAME.pack(PUSH, 0, self._coding, priority, self._unit, 0, *self._region, 0, 0)
            self._frame, self._priority = frame, priority
        self._again(self._frame, round_)


class MessageLine:
    """Frames and bodies as messages; the sender's copies live until MPI has taken them."""

    local = False

    def __init__(self, comm: MPI.Comm, peer: int) -> None:
        from mpi4py import MPI

        self._comm, self._peer = comm, peer
        self._status = MPI.Status()
        self._sends: list[tuple[MPI.Request, bytes]] = []

    def _send(self, data: bytes, tag: int) -> None:
        if len(self._sends) > 32:
            self._sends = [(request, data) for request, data in self._sends if not request.Test()]
        self._sends.append((self._comm.Isend(data, self._peer, tag), data))

    def post(
        self, op: int, unit: int = 0, round_: int = 0, region: tuple[int, ...] = NOWHERE, coding: int = 0,
        priority: int = 0, aux: int = 0, token: int = 0, flags: int = 0,
    ) -> None:  # fmt: skip
        self._send(FRAME.pack(op, flags, coding, priority, unit, aux, *region, token, round_), TAG_FRAME)

    def post_body(self, body: bytes, op: int, unit: int = 0, round_: int = 0, token: int = 0, flags: int = 0) -> None:
        self.post(op, unit, round_, (0, 0, 0, 0, len(body)), token=token, flags=flags)
        self._send(body, TAG_BODY)

    def flush(self) -> bool:
        return True  # MPI has it

    def waiting(self) -> bool:
        return self._comm.Iprobe(self._peer, TAG_FRAME)

    def read(self) -> Iterator[bytes]:
        while self._comm.Iprobe(self._peer, TAG_FRAME):
            data = bytearray(FRAME_BYTES)
            self._comm.Recv(data, self._peer, TAG_FRAME)
            yield bytes(data)

    def body(self, frame: Frame) -> bytes:
        data = bytearray(frame.nbytes)
        self._comm.Recv(data, self._peer, TAG_BODY)
        return bytes(data)

    def finish(self) -> None:
        """Wait until everything sent has been taken."""
        for request, _ in self._sends:
            request.Wait()
        self._sends.clear()
