"""Messages between nodes: lines of them, and those under way whose memory is the caller's.

A call that ends early must leave nothing under way in memory that the caller has back. So whoever sends or receives
there notes it in `UnderWay` until it is over, and `UnderWay.stop` sees to what is left when the generation has ended.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from mpi4py import MPI

from collectives.network.failures import send
from collectives.network.requests import keep, over
from mpips.store.runtime.tasks import Task
from mpips.store.transport.frames import FRAME, FRAME_BYTES, NOWHERE, ROUND, ROUND_AT, WITH_BODY, Frame
from mpips.store.transport.tags import TAG_BODY, TAG_FRAME

SENT = 32
"""Sends of a line after which it looks which of them MPI has taken."""
QUIET_SECONDS = 5.0
"""How long the end of a generation waits for messages whose memory is the caller's. Who answers at all does so
sooner."""
LOOK_SECONDS = 1e-4


class MessageLine:
    """Frames and bodies as messages; the sender's copies live until MPI has taken them. Nothing here blocks: a frame
    that has a body is there when all of the body is."""

    local = False

    def __init__(self, comm: MPI.Comm, peer: int) -> None:
        self.comm, self.peer = comm, peer
        self._sends: list[MPI.Request] = []
        self._body = bytearray()
        self._frame = b""
        """One whose body is on its way."""
        self._request = MPI.REQUEST_NULL

    @property
    def coming(self) -> bool:
        """Whether the body of a frame is on its way."""
        return bool(self._frame)

    def _send(self, data: bytes, tag: int) -> None:
        if len(self._sends) > SENT:
            self._sends = [request for request in self._sends if not request.Test()]
        self._sends.append(send(self.comm, data, self.peer, tag))

    def post(
        self, op: int, unit: int = 0, round_: int = 0, region: tuple[int, ...] = NOWHERE, coding: int = 0,
        priority: int = 0, aux: int = 0, token: int = 0, flags: int = 0,
    ) -> None:  # fmt: skip
        """Send a frame."""
        self._send(FRAME.pack(op, flags, coding, priority, unit, aux, *region, token, round_), TAG_FRAME)

    def again(self, frame: bytes, round_: int) -> None:
        """Send a packed frame with another round."""
        self._send(frame[:ROUND_AT] + ROUND.pack(round_), TAG_FRAME)

    def post_body(self, body: bytes, op: int, unit: int = 0, round_: int = 0, token: int = 0, flags: int = 0) -> None:
        """Send a frame, then its body."""
        self.post(op, unit, round_, (0, 0, 0, 0, len(body)), token=token, flags=flags)
        self._send(body, TAG_BODY)

    def flush(self) -> bool:
        """MPI has everything."""
        return True

    def waiting(self) -> bool:
        """Whether a frame has come, or is coming with its body."""
        return self.coming or self.comm.Iprobe(self.peer, TAG_FRAME)

    def read(self) -> Iterator[bytes]:
        """The frames that have come, packed, in order."""
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

    def body(self, frame: Frame) -> bytes:
        """The body of the frame that was read last."""
        return bytes(self._body)

    def stopped(self) -> bool:
        """A server of another node reads no memory of this one."""
        return True

    def done(self) -> bool:
        """Whether MPI has taken everything sent."""
        self._sends = [request for request in self._sends if not request.Test()]
        return not self._sends

    def leave(self) -> None:
        """Nothing more will be sent: what MPI has not taken it takes when it likes."""
        keep(self._sends)
        self._sends = []


def knocked(lines: Sequence[MessageLine]) -> bool:
    """Whether any of these lines of one communicator may have a frame: one look at MPI for all of them."""
    return bool(lines) and (lines[0].comm.Iprobe(MPI.ANY_SOURCE, TAG_FRAME) or any(line.coming for line in lines))


class Exchange:
    """Messages that belong together, noted in `UnderWay` until they are over."""

    def __init__(
        self, known: dict[int, Exchange], receives: Sequence[MPI.Request], sends: Sequence[MPI.Request]
    ) -> None:
        self.receives, self.sends = list(receives), list(sends)
        self._known = known
        known[id(self)] = self

    def pending(self) -> int:
        """How many are under way; one look at MPI for all that come, one for all that go."""
        self.receives, self.sends = _not_ended(self.receives), _not_ended(self.sends)
        left = len(self.receives) + len(self.sends)
        if not left:
            self._known.pop(id(self), None)
        return left

    def left(self) -> int:
        """The same when the generation is over: messages to and from the dead are, too."""
        self.receives = [request for request in self.receives if not over(request)]
        self.sends = [request for request in self.sends if not over(request)]
        return len(self.receives) + len(self.sends)

    def wait(self) -> Task[None]:
        """Wait until it is over."""
        before = len(self.receives) + len(self.sends)
        while left := self.pending():
            yield left < before
            before = left

    def cancel(self) -> None:
        """Receive nothing more, but for what is coming in already."""
        for request in reversed(self.receives):  # what comes meanwhile belongs to an earlier one
            if request:
                request.Cancel()


class UnderWay:
    """The exchanges of one rank that are not over."""

    def __init__(self) -> None:
        self._open: dict[int, Exchange] = {}

    def begin(self, receives: Sequence[MPI.Request] = (), sends: Sequence[MPI.Request] = ()) -> Exchange:
        """Note requests whose memory may be the caller's, until `pending` says that none is left."""
        return Exchange(self._open, receives, sends)

    def stop(self, seconds: float = QUIET_SECONDS) -> bool:
        """The generation is over: cancel receives, wait for sends, so that nothing touches memory of the caller;
        blocking,
        so long at most. Whether nothing is under way any more: what is left, as its peer does not answer, is kept with
        its memory until MPI is through with it. Not to be begun or waited for again before the next generation."""
        self.cancel()
        until = time.monotonic() + seconds
        while self.left() and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        return self.leave()

    def cancel(self) -> None:
        """Receive nothing more, but for what is coming in already."""
        for exchange in list(self._open.values()):
            exchange.cancel()

    def pending(self) -> int:
        """How many messages are under way."""
        return sum(exchange.pending() for exchange in list(self._open.values()))

    def left(self) -> int:
        """The same when the generation is over: messages to and from the dead are, too."""
        return sum(exchange.left() for exchange in list(self._open.values()))

    def leave(self) -> bool:
        """Forget all; what is under way is kept with its memory until MPI is through with it. Whether nothing was."""
        left = [exchange for exchange in list(self._open.values()) if exchange.left()]
        for exchange in left:
            keep(exchange.receives + exchange.sends)
        self._open.clear()
        return not left


def _not_ended(requests: list[Any]) -> list[Any]:
    """Those that have not ended; one look at MPI for all of them. Some may have been seen to end before, and an
    interrupt have come then."""
    if not requests or MPI.Request.Testsome(requests) == []:
        return requests
    return [request for request in requests if request]
