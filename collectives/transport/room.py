"""The ranks of one node in one communicator, and how they signal to each other through words on their desks.

An operation starts when all ranks have entered it. A rank that sees an unknown token looks at the card, maps the arrays
named there, and compares the calls: so bindings need no message, and ranks that call with different arguments all see
so and raise the same sentence before any data has moved. `refuse` enters with a card that only says why not.

A rank can enter operation i + 2 only after all have entered i + 1, hence two entry words and two slots suffice.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from os import sched_yield
from typing import TYPE_CHECKING

from collectives.errors import CollectiveError, MismatchError, Withdrawn
from collectives.transport import flat
from collectives.transport.cards import WITHDRAWN, Card
from collectives.transport.desks import FAILED_WORD, GONE_WORD, LANES, MARKS_WORD, OFF_WORD, SINCE_WORD, Desks
from collectives.transport.flat import MOST_OPERATIONS, NO_LINES, Lines, Usual
from collectives.watch import DIFFERENT, disagreement

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI
    from numpy.typing import NDArray

    from collectives.transport.ahead import Ahead

SPINS_ALONE, SPINS_SHARED = 64, 1  # looks before giving way: ranks have cores of their own, or share them
MOST_SPINS = 256  # looks after that, before `Session.run` waits for the others
ORDER = sys.byteorder
LEAVING_SECONDS = 5.0
SETTLE_SECONDS = 0.02  # until all see what this rank takes back, and who comes meanwhile has said so


class Room(Desks):
    """`rank` and `size` count within the node; `names` are the ranks in the user's communicator."""

    def __init__(
        self, node: MPI.Comm, names: Sequence[int], desks: Sequence[NDArray[np.uint8]], fence: MPI.Win | None,
        pids: Sequence[int] = (), cores: int = 1,
    ):  # fmt: skip
        super().__init__(node, names, desks, fence, pids, cores)
        self.whole = True
        """Whether the room holds all ranks of the communicator."""
        self.spins = SPINS_SHARED if self.crowded else SPINS_ALONE
        """Looks at the others before this rank gives way."""
        self._ones = sum(1 << 64 * rank for rank in range(self.size))
        """Times a number: that number once for each rank, as in a row read at once."""
        self._low = self._ones * 0xFFFFFFFF
        self.operation = 0
        self.withdrawn = 0
        """The last operation that this rank has taken back its entry into."""
        self.lost = False
        """Whether this rank cannot go on here: it has taken back an entry that another may have counted on already, or
        given up the next call too before all had come to that (`caught_up`; in case it does, True while it waits)."""
        self.taken_back = False
        """Whether this rank has just taken back an entry."""
        self._doubtful = False
        """Whether another may have counted on the entry that this rank has taken back last."""
        self.meets_always = False
        """Whether ranks never run ahead of each other."""
        self.ahead: Ahead | None = None
        """In what ranks run ahead of each other, instead of meeting."""
        self.running = ""
        """In what call, where nothing else comes first."""
        self.bound = [0]
        """The last operation that this rank can send in without looking at the takers."""
        self.patient_looks = self.spins + MOST_SPINS
        self._ran: Ahead | None = None
        self._ran_to = -1
        """In what ranks have run ahead last, and to which operation."""
        self._row = "", 0, 0
        """The call that has been counted last, in which operation, and how many of it came in a row."""
        self.awaited = 0
        """The operation for which this rank waits, where it waits in one that is run ahead in."""
        self.phase = 0
        self.waiting: int | None = None
        """The lane in which this rank waits for another's mark."""

    def close(self) -> None:
        """As `Desks.close`; and let go of what holds on to this room."""
        self.ahead = self._ran = None
        super().close()

    def enter(self, token: int) -> None:
        """Say: I am in the next operation, with this token. All I wrote before is visible to who sees it."""
        self.operation = operation = self.operation + 1
        if self.fence is not None:
            self.fence()
        self._entries[operation & 1][self.rank] = operation << 32 | token

    @property
    def held(self) -> bool:
        """Nothing may be brought at once, either, where `caught_up` has something to do."""
        last = 0 < self.withdrawn == self.operation or self.operation == MOST_OPERATIONS
        return self._held or last or self.ahead is not None

    def hold(self, held: bool) -> None:
        """From here on, or not, or see anew whether that is so."""
        super().hold(held)
        self.running = "" if held or self.ahead is None else self.ahead.text

    def count(self, text: str) -> int:
        """One more operation of that call, in which all have met, is done here; how many have come in a row."""
        before, last, count = self._row
        in_a_row = count + 1 if (before, last) == (text, self.operation - 1) else 1
        self._row = text, self.operation, in_a_row
        return in_a_row

    def run_ahead(self, ahead: Ahead) -> None:
        """From the next operation on, all of which are that call, ranks do not meet."""
        self.taken(self.rank)[0] = self.operation
        self.ahead = self._ran = ahead
        self._row, self.bound[0] = ("", 0, 0), 0
        self.hold(self._held)

    def caught_up(self) -> Iterator[None]:
        """Before this rank touches anything for the next operation. After it has taken back its entry: until all others
        have come to that one, and so are through with the one before, whose words and slots the next takes. After ranks
        have run ahead: until all have come as far as this one."""
        if self.ahead is not None:
            while self.ahead.behind(self.operation):
                yield
            self.ahead, self._ran_to = None, self.operation
            self.hold(self._held)
        row = self._entries[self.operation & 1]
        if self.withdrawn == self.operation and any(word >> 32 < self.operation for word in row):
            self.lost = True  # if it gives up here
            while any(word >> 32 < self.operation for word in row):
                yield
            self.lost = False
        if self.operation == MOST_OPERATIONS:
            yield from self._begin_anew()

    def _begin_anew(self) -> Iterator[None]:
        """Number operations from 1 on again."""
        for _ in range(2):  # until all are out of the last one; until all have wiped their words
            request = self._node.Ibarrier()
            while not request.Test():
                yield
            self._entries[0][self.rank] = self._entries[1][self.rank] = 0
            for word in (OFF_WORD, FAILED_WORD, *range(MARKS_WORD, MARKS_WORD + LANES)):
                self._mine[word] = 0
            signed, taken = self.signed(self.rank), self.taken(self.rank)
            signed[:], taken[:] = array("Q", bytes(signed.nbytes)), array("Q", [0])
        self.operation = self.withdrawn = 0
        self._ran_to, self._row = -1, ("", 0, 0)

    def skip_to(self, operation: int, phase: int) -> None:
        """Go on, as all ranks must, after this operation and this phase, wherever this rank is."""
        self.operation, self.phase = operation, phase
        self._progress[phase & 1][self.rank] = phase

    def meet(self) -> Iterator[None]:
        """Until all have entered this operation; with what, `tokens_now` says."""
        while not self.complete():
            yield
        if self.fence is not None:
            self.fence()

    def usual(
        self, token: int, tokens: Sequence[int], puts: Lines = NO_LINES, takes: Lines = NO_LINES
    ) -> Usual:
        """An operation in which the others bring these tokens and come soon: put, `enter`, `meet`, and take or go
        through a program, whose phases end with `signal` and `follow`."""
        return flat.usual(
            puts, takes, self.fence is not None, room=self, rank=self.rank, token=token,
            others=int.from_bytes(array("Q", tokens), ORDER), ones=self._ones << 32, numbers=self._low << 32,
            row_0=self._entries[0], row_1=self._entries[1], progress=self._progress, each=self._ones,
            fence=self.fence, order=ORDER,
            alone=self.spins, most=self.spins + MOST_SPINS, sched_yield=sched_yield,
        )  # fmt: skip

    def tokens_now(self) -> tuple[int, ...]:
        """With what each rank has entered; valid after `meet`, until this rank enters again."""
        parity = self.operation & 1
        return tuple(word & 0xFFFFFFFF for word in self._entries[parity])

    def cards(self, tokens: Sequence[int]) -> list[Card]:
        """The cards of all ranks, or MismatchError, the same on all of them, where the calls do not fit together."""
        found = [self.card(rank, token) for rank, token in enumerate(tokens)]
        withdrawals = [card.text for card in found if card.refused == WITHDRAWN]
        if withdrawals:
            self._mine[OFF_WORD] = self.operation
            raise Withdrawn(withdrawals[0])
        refusals = [card.text for card in found if card.refused]
        if refusals:
            raise MismatchError(refusals[0])
        if any(card.text != found[0].text for card in found):
            raise MismatchError(disagreement({name: card.text for name, card in zip(self.names, found)}))
        return found

    def signal(self) -> None:
        """Say: I have finished one more phase."""
        self.phase += 1
        if self.fence is not None:
            self.fence()
        self._progress[self.phase & 1][self.rank] = self.phase

    def follow(self) -> Iterator[None]:
        """Until all others have finished as many phases as this rank."""
        row, finished = self._progress[self.phase & 1], self.phase * self._ones
        while int.from_bytes(row, ORDER) != finished:
            yield
            for other, words in self._others:
                if words[FAILED_WORD] >> 32 == self.operation:
                    raise self._out_of_reach(other, words[FAILED_WORD])
        if self.fence is not None:
            self.fence()

    def fail(self, pid: int, errno: int) -> CollectiveError:
        """Tell all that this rank could not reach a process; the error to raise, as they do."""
        self._mine[FAILED_WORD] = self.operation << 32 | self.pids.index(pid) << 16 | errno
        return self._out_of_reach(self.rank, self._mine[FAILED_WORD])

    def _out_of_reach(self, rank: int, word: int) -> CollectiveError:
        """What a rank's failed word says."""
        other, why = self.names[word >> 16 & 0xFFFF], os.strerror(word & 0xFFFF)
        return CollectiveError(
            f"rank {self.names[rank]} cannot reach the memory of rank {other} any more: {why}; "
            "go on with a new communicator"
        )

    def given_up(self, what: str, error: BaseException) -> str:
        """The sentence for those who wait for this rank."""
        return f"rank {self.names[self.rank]} has given up {what}: {type(error).__name__}"

    def stands(self, token: int) -> bool:
        """Whether this rank is in the present operation with that token."""
        return bool(self._entries[self.operation & 1][self.rank] == self.operation << 32 | token)

    def leave_off(self, phase: int) -> None:
        """Say that this rank leaves the operation early and touches nobody's arrays any more, and wait until the others
        have finished the phase or left off too, as until then they may write into this rank's arrays; blocks for at
        most LEAVING_SECONDS."""
        self._mine[OFF_WORD] = self.operation
        deadline = time.monotonic() + LEAVING_SECONDS
        row = self._progress[phase & 1]
        while time.monotonic() < deadline:
            if all(row[other] >= phase or words[OFF_WORD] >= self.operation for other, words in self._others):
                return
            sched_yield()

    def mark(self, lane: int, value: int) -> None:
        """Say how far this rank is in a lane of the present operation. All it wrote is visible to who sees it."""
        if self.fence is not None:
            self.fence()
        self._mine[MARKS_WORD + lane] = self.operation << 32 | value

    def late(self) -> list[int]:
        """Ranks of the user's communicator that have not come as far as this one."""
        if self.ahead is not None:
            late = self.ahead.late(self.awaited) if self.awaited else self.ahead.behind(self.operation)
            return [self.names[rank] for rank in self.ahead.held_up_by(late, self.awaited)]
        entries, progress = self._entries[self.operation & 1], self._progress[self.phase & 1]
        late = [
            other for other in self.turn()
            if entries[other] >> 32 < self.operation or progress[other] < self.phase
        ]  # fmt: skip
        if not late and self.waiting is not None:  # who waits waits for a lower mark: the lowest waits for nobody
            marks = [words[MARKS_WORD + self.waiting] for words in self._words]
            late = [rank for rank, mark in enumerate(marks) if mark == min(marks) and rank != self.rank]
        return [self.names[rank] for rank in late]

    def go(self, sentence: str, why: int = WITHDRAWN) -> None:
        """Say why this rank does nothing more here, to those who wait for it in this operation, or in the next where it
        has taken back its entry into this one; REFUSED: as ranks have made different calls; STALLED: as it has waited
        too long where it cannot take back its entry."""
        self._mine[SINCE_WORD] = self.operation + (self.withdrawn == self.operation and not self._doubtful)
        token = self.publish(Card(sentence, refused=why))
        if self.fence is not None:
            self.fence()
        self._mine[GONE_WORD] = token

    def gone(self) -> Card | None:
        """What a rank has said that does nothing more here in the present operation."""
        gone = [(other, words) for other, words in self._others if words[GONE_WORD]]
        if gone and self.fence is not None:
            self.fence()
        for other, words in gone:
            if words[SINCE_WORD] <= self.operation:
                return self.card(other, words[GONE_WORD])
        return None

    def astray(self) -> str:
        """Why a wait comes to no end: ranks run ahead in an operation into which another has entered; "" if not so."""
        operation = self.awaited or self.operation
        entered = [word == operation for word in (word >> 32 for word in self._entries[operation & 1])]
        if self._ran is None or not any(entered) or not (self.awaited or self._ran.sent(operation)):
            return ""
        rank = entered.index(True)
        card = self.card(rank, self._entries[operation & 1][rank] & 0xFFFFFFFF)
        if card.refused:
            return card.text
        return f"{DIFFERENT}: rank {self.names[rank]}: {card.text}; others, as all did before: {self._ran.text}"

    def complete(self) -> bool:
        """Whether all have entered this operation, and count on each other."""
        if self.operation == self._ran_to:
            return True
        row = int.from_bytes(self._entries[self.operation & 1], ORDER)
        return row >> 32 & self._low == self.operation * self._ones

    def withdraw(self, sentence: str) -> bool:
        """Take back the entry into this operation, so that who comes late learns why. False if all have come; that is
        looked at once more when the card is written, as writing takes its time. See also `lost`."""
        if self.lost:
            return True
        if self.ahead is not None or self.withdrawn == self.operation or self.complete():  # not entered, or too late
            return False
        token = self.publish(Card(sentence, refused=WITHDRAWN))
        if self.complete():
            return False
        if self.fence is not None:
            self.fence()
        self.withdrawn = self.operation
        self.taken_back = self.lost = self._doubtful = True  # as if it is interrupted here once more
        self._entries[self.operation & 1][self.rank] = self.operation << 32 | token
        self.lost = self._doubtful = not self._settled()
        self.hold(self._held)
        return True

    def _settled(self) -> bool:
        """Whether all see that this rank has taken back its entry, which others may have read just before.

        The last to come writes his entry, then reads ours; we have written ours, then read his. Either he reads the new
        one, or, after a while, we read his: processors may hold a store back behind a later load, but not for so long.
        So if somebody is yet to come, he and all others, who read all entries in far less time, will see the new one.
        If all have come, those who have seen it have said so in their off word (`cards`); who has not may be at work
        with the old one."""
        self._mine[OFF_WORD] = self.operation
        time.sleep(SETTLE_SECONDS)
        return not self.complete() or all(words[OFF_WORD] >= self.operation for _, words in self._others)
