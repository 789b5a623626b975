"""How ranks go on after an epoch: all begin the next one together, or each leaves.

What makes new communicators blocks in MPI until all ranks have come, so no rank may begin with it before it knows that
all will. So each says that it would go on, then, when it has heard all say so, that it goes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mpi4py import MPI

from collectives.node.poison import CLOSED, DEPARTURES
from collectives.node.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, until
from mpips.runtime.breaking import uninterrupted
from mpips.runtime.rendezvous import Room

TAG = 4
WOULD, GOES, LEAVES = b"would go on", b"goes on", b"leaves"
NEVER = Limits(math.inf, 0.0)


class _Wait:
    """How a rank waits for what the others say."""

    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, limits: Limits, late: Callable[[], list[int]], look: Callable[[float], None]) -> None:
        self.limits, self.late, self.look = limits, late, look


class Parting:
    """What the ranks of one epoch say of what comes after it. `gone()`: ranks that have left, and how."""

    def __init__(self, comm: MPI.Comm, gone: Callable[[], dict[int, str]]) -> None:
        self._room, self._gone, self._said = Room(comm, TAG), gone, b""

    def asked(self) -> bool:
        """Whether another rank goes on, or has left. Does not block."""
        self._room.missing()
        return any(self._room.last()) or bool(self._gone())

    def go_on(self, limits: Limits) -> str:
        """Wait until all ranks go on; "", or why they cannot. StallError after the limits; a later call waits on."""
        wait = _Wait(limits, lambda: self._others(WOULD, GOES), lambda waited: None)
        self._say(WOULD)
        drive(until(lambda: self._why_not() or not self._others(WOULD, GOES)), wait, "recover")
        with uninterrupted():  # who has said that it goes must not stay away
            if not self._why_not():
                self._say(GOES)
                drive(until(lambda: self._why_not() or not self._others(GOES)), wait, "recover")
        return self._why_not()

    def leave(self) -> None:
        """Say that this rank leaves. Does not block."""
        self._say(LEAVES)

    def left(self, seconds: float, look: Callable[[float], None] = lambda waited: None) -> bool:
        """Wait until all have left, for so many seconds at most; whether all have, and none by its end. `look` as in an
        epoch."""
        deadline = time.monotonic() + seconds

        def over() -> bool:
            return time.monotonic() > deadline or not set(self._others(LEAVES)) - self._gone().keys()

        drive(until(over), _Wait(NEVER, lambda: self._others(LEAVES), look), "close")
        gone = self._gone()
        return all(gone.get(rank) == DEPARTURES[CLOSED] for rank in self._others(LEAVES))

    def _say(self, word: bytes) -> None:
        if self._said != word:
            self._said = word
            self._room.bring(word)

    def _others(self, *words: bytes) -> list[int]:
        """Ranks that have said something else last, or nothing. Does not block."""
        self._room.missing()
        return [rank for rank, said in enumerate(self._room.last()) if said not in words]

    def _why_not(self) -> str:
        """Why the ranks cannot go on together; "" where they may."""
        for rank in sorted(set(range(self._room.size)) - set(self._others(LEAVES))):
            return f"rank {rank} has closed the store"
        return next((f"rank {rank} is needed, and {how}" for rank, how in self._gone().items()), "")
