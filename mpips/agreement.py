"""Workers whose collectives belong together see that they make the same call, in the same order.

A collective of two keys of equal size and dtype would succeed and sum what does not belong together. Where workers
share a node, each notes its call beforehand and all compare the notes afterwards (`Roll`), which costs no message;
between nodes they compare a checksum while the messages of the call are under way, whose tags tell calls apart.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Generator

import msgspec
import numpy as np
from mpi4py import MPI

from collectives.errors import CollectiveError, MismatchError
from collectives.network.drain import last_tag
from collectives.started import agree
from mpips.arguments import Name
from mpips.bridge import living
from mpips.meetings import Meetings, fresh_number
from mpips.options import Options
from mpips.roll import Roll

LOOK_SECONDS = 0.01
SHOWN = 4  # keys of a call in a sentence
GIVEN_UP = "workers that sum together make other calls than one of them that has waited too long and given up"


class Card(msgspec.Struct, array_like=True):
    """What a worker calls, or why it cannot."""

    what: str
    keys: list[Name]
    """The keys that it is yet to use in this call, the present one first."""
    pushes: bool
    refusal: str = ""
    together: int = 1
    """How many of the keys go together now."""

    @property
    def text(self) -> str:
        """The present call, as the others compare it."""
        return f"{self.what} of {', '.join(map(repr, self.keys[: self.together]))}"

    @property
    def shown(self) -> str:
        """The present call, as people read it."""
        names = self.keys[: min(self.together, SHOWN)]
        if not names:
            return self.what
        more = ", ..." * (self.together > SHOWN)
        return f"{self.what} of key{'s' * (len(names) > 1)} {', '.join(map(repr, names))}{more}"


class Agreement:
    """The calls of the workers of `comm`, from worker `first` on, in program order. Making it is collective."""

    def __init__(self, comm: MPI.Comm, first: int, one_node: bool, options: Options) -> None:
        self._comm, self._first = comm, first
        self._meetings = Meetings(comm, options.stall_seconds, options.timeout_seconds, first)
        self._number = fresh_number(comm)
        self._roll = Roll(comm) if one_node else None
        self.calls = 0
        """Calls that this worker has said, the same as all have."""
        self._extremes = np.zeros(2, np.int64)
        self._request = MPI.REQUEST_NULL
        self._given_up: list[MPI.Request] = []
        """Comparisons that others may yet come to; they hold their memory."""
        self._call = 0
        self._left = 0
        """The last call that this worker has given up, or heard that another has."""
        self._due = 0.0
        self._tags = last_tag()

    @property
    def one_node(self) -> bool:
        """Whether calls are noted before and compared after; else they are compared before."""
        return self._roll is not None

    def guarded(self, card: Card, text: str, call: Callable[[], object]) -> Generator[bool | None, None, str | None]:
        """See that all make the same call, `text`: None, or else what to say where `explain` finds no difference.

        On one node the call is made within; it is a function, or a generator. Between nodes it is yet to be made.
        """
        if self._roll is None:
            self.compare(text)
            while (same := self.compared()) is None:
                yield False
            return None if same else ""
        self.note(text)
        try:
            if card.refusal:
                agree(living(self._comm), card.refusal)
            left = call()
            if isinstance(left, Generator):
                yield from left
        except MismatchError as error:
            return str(error)
        return self.differs()

    def note(self, text: str) -> None:
        """On one node: say what this worker is about to call."""
        assert self._roll is not None
        living(self._comm)
        self.calls += 1
        self._roll.note(text)

    def differs(self) -> str | None:
        """After that call: as `guarded`."""
        assert self._roll is not None
        return None if self._roll.agrees() else ""

    def compare(self, text: str) -> None:
        """Between nodes: start to compare what all call next."""
        if self._request:
            self._given_up.append(self._request)
            self.give_up("a call", CollectiveError(GIVEN_UP))
            self._extremes = np.zeros_like(self._extremes)
        self.calls += 1
        self._due = 0.0
        living(self._comm)
        digest = zlib.crc32(text.encode())
        self._call = zlib.crc32(f"{self._number} {self.calls} {text}".encode())
        self._extremes[:] = digest, -digest
        self._request = self._comm.Iallreduce(MPI.IN_PLACE, self._extremes, MPI.MAX)

    def compared(self) -> bool | None:
        """Whether all call the same; None where that is not known yet."""
        if not self._request.Test():
            return None
        return bool(self._extremes[0] == -self._extremes[1])

    def give_up(self, what: str, error: BaseException) -> None:
        """Tell the others, who may wait for this worker in the present call, that it does no more for it."""
        if self._left < self.calls:
            self._left = self.calls
            self._meetings.refuse(what, error, self.calls)

    def look(self) -> None:
        """Called in every step of what all do together: CollectiveError where another has given up the present call."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + LOOK_SECONDS
        if sentence := self._meetings.failure(self.calls):
            self._left = self.calls
            raise CollectiveError(sentence)

    @property
    def unfinished(self) -> bool:
        """Whether MPI still waits for workers in a comparison that this one has given up."""
        return any(not request.Test() for request in (*self._given_up, self._request) if request)

    def tag(self, number: int) -> int:
        """The tag of message `number` of the present call: messages of calls, or stores, that differ do not meet."""
        return (self._call + number) % self._tags

    def explain(self, card: Card, fallback: str) -> tuple[str, list[Card]]:
        """The sentence about a call that cannot be made, or that differs, and what each worker called.

        Collective, blocking; `fallback` where all called the same.
        """
        told = self._meetings.exchange(msgspec.msgpack.encode(card), card.what, number=self.calls)
        cards = [msgspec.msgpack.decode(data, type=Card) for data in told]
        refusals = [other.refusal for other in cards if other.refusal]
        if refusals:
            return refusals[0], cards
        if len({other.text for other in cards}) == 1:
            return fallback, cards
        calls = [other.shown for other in cards]
        texts = "; ".join(f"rank {self._first + index}: {call}" for index, call in enumerate(calls))
        return f"workers that sum together must make the same calls in the same order, but {texts}", cards
