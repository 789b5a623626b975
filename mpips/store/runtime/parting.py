"""How ranks go on after a generation: all begin the next one together, or each leaves.

What makes new communicators blocks in MPI until all ranks have come, so no rank may begin with it before it knows that
all will. So each says that it would go on, then, when it has heard all say so, that it goes. Where a store survives
deaths, "all" are those who live.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mpi4py import MPI

from collectives.fabric.poison import CLOSED, DEPARTURES
from collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, until
from mpips.store.runtime.rendezvous import Room

TAG = 4
WOULD, GOES, LEAVES = b"would go on", b"goes on", b"leaves"
NEVER = Limits(math.inf, 0.0)


class _Wait:
    """How a rank waits for what the others say."""

    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, limits: Limits, late: Callable[[], list[int]], look: Callable[[float], None]) -> None:
        self.limits, self.late, self.look = limits, late, look


class Parting:
    """What the ranks of one generation say of what comes after it. `gone()`: ranks that have left, and how. `survives`:
    whether others go on where one has died."""

    def __init__(self, comm: MPI.Comm, gone: Callable[[], dict[int, str]], survives: bool) -> None:
        self._room, self._gone, self._survives, self._said = Room(comm, TAG), gone, survives, b""
        self._attempt = 0

    def asked(self) -> bool:
        """Whether another rank goes on, or has left. Does not block."""
        self._room.missing()
        return any(self._room.last()) or bool(self._gone())

    def closing(self) -> bool:
        """Whether another rank leaves. Does not block."""
        self._room.missing()
        return LEAVES in self._room.last() or DEPARTURES[CLOSED] in self._gone().values()

    def would(self, limits: Limits) -> str:
        """Wait until all would go on; "", or why they cannot. StallError after the limits; a later call waits on."""
        return self._all(limits, WOULD, WOULD, GOES)

    def goes(self, limits: Limits) -> str:
        """The same until all go on: who has said that it goes must not stay away. Then another attempt may follow."""
        why = self._why_not() or self._all(limits, GOES, GOES)
        self._attempt += not why
        return why

    def leave(self) -> None:
        """Say that this rank leaves. Does not block."""
        self._say(LEAVES)

    def left(self, seconds: float, look: Callable[[float], None] = lambda waited: None) -> bool:
        """Wait until all have left, for so many seconds at most; whether all have, and none by its end. `look` as in an
        generation."""
        deadline = time.monotonic() + seconds

        def over() -> bool:
            return time.monotonic() > deadline or not set(self._others(LEAVES)) - self._gone().keys()

        drive(until(over), _Wait(NEVER, lambda: self._others(LEAVES), look), "close")
        gone = self._gone()
        return all(gone.get(rank) == DEPARTURES[CLOSED] for rank in self._others(LEAVES))

    def _all(self, limits: Limits, mine: bytes, *words: bytes) -> str:
        """Say a word of this attempt, and wait until all have said one of `words`; why they cannot go on."""
        present = [word + b" %d" % self._attempt for word in words]
        wait = _Wait(limits, lambda: self._awaited(present), lambda waited: None)
        self._say(mine + b" %d" % self._attempt)
        drive(until(lambda: self._why_not() or not self._awaited(present)), wait, "recover")
        return self._why_not()

    def _say(self, word: bytes) -> None:
        if self._said != word:
            self._said = word
            self._room.bring(word)

    def _awaited(self, words: list[bytes]) -> list[int]:
        """Ranks that live, as far as is known, and have said none of `words` last."""
        late = self._others(*words)
        return [rank for rank in late if rank not in self._dead()] if late and self._survives else late

    def _others(self, *words: bytes) -> list[int]:
        """Ranks that have said something else last, or nothing. Does not block."""
        self._room.missing()
        return [rank for rank, said in enumerate(self._room.last()) if said not in words]

    def _dead(self) -> set[int]:
        """Ranks that have died, where that ends nothing."""
        return {rank for rank, how in self._gone().items() if self._survives and how == DEPARTURES[0]}

    def _why_not(self) -> str:
        """Why the ranks cannot go on together; "" where they may."""
        for rank in sorted(set(range(self._room.size)) - set(self._others(LEAVES))):
            return f"rank {rank} has closed the store"
        needed = {rank: how for rank, how in self._gone().items() if rank not in self._dead()}
        return next((f"rank {rank} is needed, and {how}" for rank, how in needed.items()), "")
