"""A line carries frames, and now and then a body, between one worker and one server, in order, both ways.

Two kinds: rings in shared memory between processes of one node (`ring`), MPI messages between nodes (`channel`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from collectives.fabric.arena import Region
from mpips.store.transport.frames import FRAME, NOWHERE, Frame, Op

PUSH = int(Op.PUSH)


class Line(Protocol):
    """One end of a line. Nothing blocks, but a worker's post where its ring is full: servers always read on."""

    local: bool
    """Whether both ends share memory."""

    def post(
        self, op: int, unit: int = 0, round_: int = 0, region: tuple[int, ...] = NOWHERE, coding: int = 0,
        priority: int = 0, aux: int = 0, token: int = 0, flags: int = 0,
    ) -> None:  # fmt: skip
        """Send a frame."""
        ...

    def again(self, frame: bytes, round_: int) -> None:
        """Send a packed frame with another round."""
        ...

    def post_body(self, body: bytes, op: int, unit: int = 0, round_: int = 0, token: int = 0, flags: int = 0) -> None:
        """Send a frame with a body."""
        ...

    def flush(self) -> bool:
        """Send what found no room before; whether nothing is left of it."""
        ...

    def waiting(self) -> bool:
        """Whether a frame has come."""
        ...

    def read(self) -> Iterator[bytes]:
        """The frames that have come, packed, in order."""
        ...

    def body(self, frame: Frame) -> bytes:
        """The body of a frame that has been read; to be asked for before the next frame is read."""
        ...

    def stopped(self) -> bool:
        """Whether the server at the other end reads no more of this worker's memory, as its generation is over."""
        ...


class Repeated:
    """The push of one region, round after round: its frame is packed once for a priority."""

    __slots__ = ("_again", "_coding", "_frame", "_priority", "_region", "_unit")

    def __init__(self, line: Line, unit: int, region: Region, coding: int = 0) -> None:
        self._again, self._unit, self._region, self._coding = line.again, unit, region, coding
        self._priority, self._frame = 0, b""

    def post(self, round_: int, priority: int) -> None:
        """Push the region to this round."""
        if priority != self._priority or not self._frame:
            frame = FRAME.pack(PUSH, 0, self._coding, priority, self._unit, 0, *self._region, 0, 0)
            self._frame, self._priority = frame, priority
        self._again(self._frame, round_)
