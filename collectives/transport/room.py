"""The ranks of one node in one communicator, and the shared memory through which they signal.

Every rank has a *desk* in node-shared memory (`collectives.arena`): it writes its own and reads the others'. On it lie
  entry     two words, used in turn: the number of the operation that the rank has entered, and a *token* for what
            it came with;
  progress  one word: how many phases the rank has finished, over all operations;
  off       one word: the last operation that the rank left early, since when it touches nobody's arrays;
  failed    one word: the last operation in which it could not reach another's memory, whose, and why;
  marks     one word for each lane of a schedule: how far the rank is in it;
  left      one byte for each rank of the node: that it reads this desk no more;
  cards     what a token stands for (`cards`);
  slots     two buffers, used in turn, for the vectors of small calls;
  stages    buffers through which ordinary arrays pass, block by block.

An operation starts when all ranks have entered it. A rank that sees an unknown token looks at the card, maps the arrays
named there, and compares the calls: so bindings need no message, and ranks that call with different arguments all see
so and raise the same sentence before any data has moved. `refuse` enters with a card that only says why not.

A rank can enter operation i + 2 only after all have entered i + 1, hence two entry words and two slots suffice.

Order of memory: x86 keeps stores in order and loads in order, so data written before a signal is there when the signal
is. On other processors `MPI_Win_sync` is the fence on both sides of each signal.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from os import sched_yield
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from mpi4py import MPI

from collectives import arena
from collectives.arena import Region
from collectives.errors import CollectiveError, MismatchError, Withdrawn
from collectives.transport import reach
from collectives.transport.cards import CARDS, CARDS_END, NOWHERE, WITHDRAWN, Card, Cards
from collectives.transport.program import Step
from collectives.watch import disagreement

if TYPE_CHECKING:
    from numpy.typing import NDArray

Turns: TypeAlias = "tuple[Sequence[Step], Sequence[Step]]"
"""Steps of an operation with an even number, and of one with an odd."""
NOTHING: Turns = ((), ())
SLOT_BYTES = 128 << 10
STAGE_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10
LANES = 256
_PHASE_WORD, _OFF_WORD, _FAILED_WORD, _MARKS_WORD = 8, 9, 10, 16  # entry: the words 0 and 1
_LEFT_AT = (_MARKS_WORD + LANES) * 8
_SLOTS_AT = CARDS_END
_STAGES_AT = _SLOTS_AT + 2 * SLOT_BYTES
DESK_BYTES = _STAGES_AT + 2 * STAGE_BYTES + 3 * BLOCK_BYTES
SPINS_ALONE, SPINS_SHARED = 64, 1  # looks before giving way: ranks have cores of their own, or share them
MOST_SPINS = 256
LEAVING_SECONDS = 5.0
ORDERED_STORES = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class Coming(Protocol):
    """A call as `Room.usual` needs it where it does not go as usual."""

    def afresh(self) -> Iterator[None]:
        """Enter with another card; the steps that are left."""

    def met(self) -> Iterator[None]:
        """The steps after this rank has entered."""

    def break_off(self, error: BaseException) -> None:
        """`error` was raised since this rank has entered."""


class Room(Cards):
    """`rank` and `size` count within the node; `names` are the ranks in the user's communicator."""

    def __init__(
        self, node: MPI.Comm, names: Sequence[int], desks: Sequence[NDArray[np.uint8]], fence: MPI.Win | None,
        pids: Sequence[int] = (),
    ):  # fmt: skip
        super().__init__(desks, node.rank, names)
        self.size = node.size
        self.pids = pids
        """The ranks' processes, where every one can reach the others' own memory (`reach`); else empty."""
        self.whole = True
        """Whether the room holds all ranks of the communicator."""
        self._buffers: list[NDArray[np.uint8]] = []
        words = [desk.data.cast("B").cast("Q") for desk in desks]
        self._words = words
        self._mine = words[self.rank]
        self._others = [(other, words[other]) for other in self.turn()]
        self.fence: Callable[[], None] | None = None if fence is None else fence.Sync
        self._window = fence
        self._spins = SPINS_ALONE if self.size <= len(os.sched_getaffinity(0)) else SPINS_SHARED
        self.operation = 0
        self.withdrawn = 0
        """The last operation that this rank has taken back its entry into."""
        self.ahead = False
        """Whether it has done so twice before another came once: what it enters next would take the place of the first
        of these entries, which the other is yet to read."""
        self.phase = 0
        self.waiting: int | None = None
        """The lane in which this rank waits for another's mark."""
        grain = 4096 if self.size <= STAGE_BYTES // 4096 else arena.ALIGNMENT
        self.block_bytes = min(BLOCK_BYTES, STAGE_BYTES // self.size // grain * grain)

    @classmethod
    def open(cls, node: MPI.Comm, names: Sequence[int], fenced: bool = not ORDERED_STORES) -> Room | None:
        """Collective over `node`: one desk each. None, on every rank, when some rank cannot map another's desk."""
        _clear()
        desk = arena.empty(DESK_BYTES, np.uint8)
        desk[:_SLOTS_AT] = 0
        where = arena.locate(desk)
        regions = np.empty((node.size, len(NOWHERE)), np.int64)
        node.Allgather(np.array(where, np.int64), regions)
        try:
            desks = [arena.attach(Region(*map(int, region))) for region in regions]
        except CollectiveError:
            desks = []
        everybody = np.array([len(desks)], np.int64)
        node.Allreduce(MPI.IN_PLACE, everybody, MPI.MIN)
        if everybody[0] < node.size:
            return None
        fence = None
        if fenced:
            assert isinstance(node, MPI.Intracomm)
            fence = MPI.Win.Create(np.zeros(8, np.uint8), comm=node)
            fence.Lock_all(MPI.MODE_NOCHECK)
        desks[node.rank] = desk  # keeps it alive
        pids = [int(region[0]) for region in regions] if reach.open_to_all(node) else []
        return cls(node, names, desks, fence, pids)

    def close(self) -> None:
        """Collective where a fence window exists. The desk stays until all others have closed: they may still read."""
        if self.fence is not None:
            self.fence()
        for desk in self.desks:
            desk[_LEFT_AT + self.rank] = 1
        _closed.append(self)
        _clear()
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()

    def buffers(self, nbytes: int) -> list[NDArray[np.uint8]]:
        """Two buffers for the operation under way, whichever it is; for all of them the same."""
        if not self._buffers:
            self._buffers = [np.empty(nbytes, np.uint8) for _ in range(2)]
        return self._buffers

    def turn(self) -> list[int]:
        """The other ranks, nearest right neighbour first, so that not all read the same memory at once."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    # What lies on the desks

    def slot(self, rank: int, parity: int) -> NDArray[np.uint8]:
        start = _SLOTS_AT + parity * SLOT_BYTES
        return self.desks[rank][start : start + SLOT_BYTES]

    def stage_in(self, rank: int, parity: int, owner: int) -> NDArray[np.uint8]:
        """Where `rank` puts its share of what `owner` is to reduce."""
        start = _STAGES_AT + (parity * self.size + owner) * self.block_bytes
        return self.desks[rank][start : start + self.block_bytes]

    def stage_out(self, rank: int, third: int) -> NDArray[np.uint8]:
        """Where `rank` puts what it has reduced."""
        start = _STAGES_AT + 2 * STAGE_BYTES + third * BLOCK_BYTES
        return self.desks[rank][start : start + self.block_bytes]

    # Signals

    def enter(self, token: int) -> None:
        """Say: I am in the next operation, with this token. All I wrote before is visible to who sees it."""
        self.operation = operation = self.operation + 1
        if self.fence is not None:
            self.fence()
        self._mine[operation & 1] = operation << 32 | token

    def skip_to(self, operation: int, phase: int) -> None:
        """Go on, as all ranks must, after this operation and this phase, wherever this rank is."""
        self.operation, self.phase = operation, phase
        self._mine[_PHASE_WORD] = phase

    def meet(self, tokens: Sequence[int] | None) -> Iterator[None]:
        """Until all have entered this operation; returns at the first unexpected token (see `tokens_now`)."""
        base, parity = self.operation << 32, self.operation & 1
        if tokens is None:
            for _, words in self._others:
                while words[parity] < base:
                    yield
        else:
            for other, words in self._others:
                expected = base | tokens[other]
                while words[parity] != expected:
                    if words[parity] >= base:
                        tokens = None
                        break
                    yield
                if tokens is None:
                    yield from self.meet(None)
                    break
        if self.fence is not None:
            self.fence()

    def usual(
        self, token: int, tokens: Sequence[int], puts: Turns = NOTHING, takes: Turns = NOTHING
    ) -> Callable[[Coming], Iterator[None] | None]:
        """An operation in which the others bring these tokens and come soon: put, `enter`, `meet` and take, in one flat
        function that has all it needs at hand, as where ranks share a core the caches have lost what it runs through.
        It gives back None, or the steps that are left where somebody brings another token or is late."""
        mine, fence, most = self._mine, self.fence, self._spins + MOST_SPINS
        alone, others = self._spins, [(words, tokens[other]) for other, words in self._others]

        def usual(call: Coming) -> Iterator[None] | None:
            if token <= self.last_token - CARDS:  # as in `readable`
                return call.afresh()
            operation = self.operation + 1
            parity, base, looks = operation & 1, operation << 32, 0
            for function, arguments in puts[parity]:
                function(*arguments)
            try:
                self.operation = operation
                if fence is not None:
                    fence()
                mine[parity] = base | token
                for words, expected in others:
                    while words[parity] != base | expected:
                        looks += 1
                        if looks > alone:
                            if looks > most or words[parity] >= base:
                                return call.met()
                            sched_yield()
                if fence is not None:
                    fence()
            except BaseException as error:
                call.break_off(error)
                raise
            for function, arguments in takes[parity]:
                function(*arguments)
            return None

        return usual

    def tokens_now(self) -> tuple[int, ...]:
        """With what each rank has entered; valid after `meet`, until this rank enters again."""
        parity = self.operation & 1
        return tuple(words[parity] & 0xFFFFFFFF for words in self._words)

    def cards(self, tokens: Sequence[int]) -> list[Card]:
        """The cards of all ranks, or MismatchError, the same on all of them, where the calls do not fit together."""
        found = [self.card(rank, token) for rank, token in enumerate(tokens)]
        withdrawals = [card.text for card in found if card.refused == WITHDRAWN]
        if withdrawals:
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
        self._mine[_PHASE_WORD] = self.phase

    def follow(self) -> Iterator[None]:
        """Until all others have finished as many phases as this rank."""
        phase = self.phase
        for other, words in self._others:
            while words[_PHASE_WORD] < phase:
                yield
                if words[_FAILED_WORD] >> 32 == self.operation:
                    raise self._out_of_reach(other, words[_FAILED_WORD])
        if self.fence is not None:
            self.fence()

    def fail(self, pid: int, errno: int) -> CollectiveError:
        """Tell all that this rank could not reach a process; the error to raise, as they do."""
        self._mine[_FAILED_WORD] = self.operation << 32 | self.pids.index(pid) << 16 | errno
        return self._out_of_reach(self.rank, self._mine[_FAILED_WORD])

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
        return bool(self._mine[self.operation & 1] == self.operation << 32 | token)

    def leave_off(self, phase: int) -> None:
        """Say that this rank leaves the operation early and touches nobody's arrays any more, and wait until the others
        have finished the phase or left off too, as until then they may write into this rank's arrays; blocks for at
        most LEAVING_SECONDS."""
        self._mine[_OFF_WORD] = self.operation
        deadline = time.monotonic() + LEAVING_SECONDS
        while time.monotonic() < deadline:
            if all(words[_PHASE_WORD] >= phase or words[_OFF_WORD] >= self.operation for _, words in self._others):
                return
            sched_yield()

    def marks(self, rank: int) -> memoryview:
        """The rank's marks, a word a lane: the number of the operation << 32 | how far the rank is in it."""
        return self._words[rank][_MARKS_WORD : _MARKS_WORD + LANES]

    def mark(self, lane: int, value: int) -> None:
        """Say how far this rank is in a lane of the present operation. All it wrote is visible to who sees it."""
        if self.fence is not None:
            self.fence()
        self._mine[_MARKS_WORD + lane] = self.operation << 32 | value

    def late(self) -> list[int]:
        """Ranks of the user's communicator that have not come as far as this one."""
        parity, base = self.operation & 1, self.operation << 32
        late = [other for other, words in self._others if words[parity] < base or words[_PHASE_WORD] < self.phase]
        if not late and self.waiting is not None:  # who waits waits for a lower mark: the lowest waits for nobody
            marks = [words[_MARKS_WORD + self.waiting] for words in self._words]
            late = [rank for rank, mark in enumerate(marks) if mark == min(marks) and rank != self.rank]
        return [self.names[rank] for rank in late]

    def complete(self) -> bool:
        """Whether all have entered this operation, and count on each other."""
        base, parity = self.operation << 32, self.operation & 1
        return all(words[parity] >= base for _, words in self._others)

    def withdraw(self, sentence: str) -> bool:
        """Take back the entry into this operation, so that who comes late learns why. False if all have come; that is
        looked at once more when the card is written, as writing takes its time."""
        if self.complete():
            return False
        token = self.publish(Card(sentence, refused=WITHDRAWN))
        if self.complete():
            return False
        self._mine[self.operation & 1] = self.operation << 32 | token
        if self.withdrawn == self.operation - 1:
            before, parity = self.withdrawn << 32, self.withdrawn & 1
            self.ahead = any(words[parity] < before for _, words in self._others)
        self.withdrawn = self.operation
        return True


_closed: list[Room] = []
"""Whose desks others may still read."""


def _clear() -> None:
    """Forget closed rooms that all ranks have left."""
    _closed[:] = [room for room in _closed if not room.desks[room.rank][_LEFT_AT : _LEFT_AT + room.size].all()]
