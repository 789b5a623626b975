"""The board of a node: ranks on one node meet by words in shared memory, and see there that one has failed.

An operation starts when all ranks have *entered* it. A rank enters by one 8-byte store: the number of the operation
<< 32 | a token for what it brings. It has met the others when all words of the row bear that number; a token that it
does not know stands for a descriptor, which it reads and compares. In the operation, ranks meet again after *phases*.

    publish   what others are to see (a vector in a slot, a descriptor) is written first
    meet      one store to `entries`, then looks at the row until it is complete
    take      what the others have put is read
    poison    the flag is set; this rank's entry becomes OUT, which completes no row; whoever waits looks at the flag

One flag and one sentence tell all ranks that one has failed (`Poison`; between nodes: `network.control`). The first to
fail writes them, and every wait looks at the flag. A file lock makes sure that the first sentence stays; a process that
dies with the lock gives it back. A rank that has ended without a word is seen by its process (`Peers`).

A rank can enter operation i + 2 only after all have entered i + 1, hence two rows and two slots suffice. There is no
MPI here: the tests run this code with words that hand over to another rank at each access, in every order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from os import sched_yield
from typing import TYPE_CHECKING

import numpy as np

from mpips.collectives.clock import Clock
from mpips.collectives.errors import KINDS, CollectiveError, kind_of
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region
from mpips.collectives.fabric.layout import (
    DEPARTURES,
    DESCRIPTORS,
    FINISHED,
    LEFT,
    POISON_BYTES,
    PROGRAM_ENDED,
    ArrayPlace,
    Descriptor,
    Descriptors,
    NodeMemory,
)
from mpips.collectives.fabric.process_memory import OutOfReach
from mpips.collectives.fabric.wait import NAP_AFTER_ON_NODE, Limits, drive, until
from mpips.collectives.recorder.own import Marks
from mpips.collectives.recorder.ring import WORD

if TYPE_CHECKING:
    from numpy.typing import NDArray

ORDER = sys.byteorder
NUMBERS = (1 << 32) - 1  # operations are counted modulo 2^32
OUT = (1 << 64) - 1  # the entry of a rank that has left the generation
OUT_TOKEN = OUT & NUMBERS
SPINS_ALONE, SPINS_SHARED = 64, 1  # looks before giving way: ranks have cores of their own, or share them
MOST_LOOKS = 256  # looks after that, before the wait loop takes over
LOOK_AT_PEERS_SECONDS = 0.05
LEAVING_SECONDS = 5.0
SETTLE_SECONDS = 1e-3  # a processor may hold a store back behind a later load, but not for so long


TEXT_AT = 16  # of a sentence in the poison


class Poison:
    """The flag of one generation. `memory`: POISON_BYTES that all ranks of the node map; `fd`: the file that holds
    them."""

    def __init__(self, memory: NDArray[np.uint8], fd: int) -> None:
        self._memory, self._fd = memory, fd
        self.flag = memory[:TEXT_AT].data.cast("B").cast(WORD)
        """One word: 0 while the generation lives, then 1 + the place of the error in `KINDS`."""

    def spread(self, error: BaseException, sentence: str) -> CollectiveError:
        """End the generation with this sentence, unless another has ended it. The error that all ranks raise."""
        with self._locked():
            if not self.flag[0]:
                text = sentence.encode(errors="replace")[: POISON_BYTES - TEXT_AT]
                self._memory[TEXT_AT : TEXT_AT + len(text)] = np.frombuffer(text, np.uint8)
                self.flag[1] = len(text)
                self.flag[0] = 1 + kind_of(error)
            return self._error()

    def error(self) -> CollectiveError:
        """Return what all ranks raise once the flag is set. The lock orders memory, on any processor."""
        with self._locked():
            return self._error()

    def _error(self) -> CollectiveError:
        text = bytes(self._memory[TEXT_AT : TEXT_AT + self.flag[1]]).decode(errors="replace")
        return KINDS[self.flag[0] - 1](text)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


class Ending:
    """End a generation for all ranks: once, with the sentence that all take, which `tell` returns."""

    def __init__(self, tell: Callable[[CollectiveError], CollectiveError]) -> None:
        self._tell = tell
        self.over: CollectiveError | None = None
        """What every call raises since the generation has ended here."""

    def end(self, told: CollectiveError) -> CollectiveError:
        """End it, unless it has ended, and return what all raise. An interrupt meanwhile is raised after that."""
        if self.over is None:
            self.over = told
            try:
                self.over = self._tell(told)
            except KeyboardInterrupt:  # once more: the others must hear
                self.over = self._tell(told)
                raise
        return self.over


class Peers:
    """Tell whether processes of this node are still there. One file descriptor a process, for all generations."""

    _known: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def ended(self, rank: int) -> bool:
        """Return whether the rank's process has ended; False where this system cannot tell."""
        pid = self._pids[rank]
        fd = self._known.get(pid)
        if fd is None:
            try:
                fd = self._known[pid] = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            except (OSError, AttributeError):
                return False
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))


class Board:
    """The words of one generation as one rank sees them. `names`: the node's ranks as the user counts them."""

    nap_after = NAP_AFTER_ON_NODE

    def __init__(self, memory: NodeMemory, names: Sequence[int], limits: Limits) -> None:
        self.memory, self.rank, self.size = memory, memory.rank, memory.size
        self.names, self.limits = tuple(names), limits
        self.descriptors = Descriptors(memory.descriptors, memory.rank, names)
        self.poison = Poison(memory.poison, memory.poison_fd)
        self.entries, self.progress = memory.rows
        self.marks = Marks(memory.identity)
        """Where another process sees in which operation this rank is."""
        self.fence = memory.fence
        self.ones = sum(1 << 64 * rank for rank in range(self.size))
        """Times a number: that number once for each rank, as in a row read at once."""
        self.numbers = self.ones * NUMBERS << 32
        self.number = 0
        """The operation that this rank has entered last."""
        self.phase = 0
        """Phases that this rank has finished, over all operations."""
        self.last_phase = 0
        """The phase with which others touch the arrays no more that this rank has lent them,"""
        self.lent = 0
        """in this operation."""
        self.spent = -DESCRIPTORS
        """Only a descriptor that was put after this one may be brought by a fast path."""
        self.spins = SPINS_SHARED if memory.crowded else SPINS_ALONE
        self.looks = range(self.spins + MOST_LOOKS)
        """A fast path looks so many times, and gives way after `spins` of them, before the wait loop takes over."""
        self._held = self._carrying = False
        self._due = 0.0
        self._peers = Peers(memory.pids)
        self.beyond: Callable[[float], None] | None = None
        """Raises where the generation has ended within which this one lies; every look at this one looks there, too."""

    def publish(
        self, descriptor: Descriptor, many: NDArray[np.int64] | None = None, place: ArrayPlace | None = None
    ) -> int:
        """Put a descriptor into this rank's area; its token. See `Descriptors.publish`."""
        token = self.descriptors.publish(descriptor, many, place)
        self.marks.name(token, descriptor.text)
        self.hold(self._held)
        return token

    def hold(self, held: bool) -> None:
        """From here on no operation may begin by a fast path, or each may again."""
        self._held = held
        self.spent = sys.maxsize if held else self.descriptors.put - DESCRIPTORS

    def enter(self, token: int, lends: bool = False) -> None:
        """Say: I am in the next operation, with this token. All I wrote before is visible to who sees it. `lends`:
        others may touch this rank's arrays from here on, until each has finished one phase."""
        self.number = number = self.number + 1 & NUMBERS
        if lends:
            self.last_phase, self.lent = self.phase + 1, number
        if self.fence is not None:
            self.fence()
        self.entries[number & 1][self.rank] = self.marks.word[0] = number << 32 | token

    def met(self) -> Iterator[None]:
        """Until all have entered this operation; with what, `tokens` says."""
        while not self._complete():
            yield
        if self.fence is not None:
            self.fence()

    def meet(self, row: memoryview, wanted: int, what: str) -> bool:
        """Until all have entered this operation, after `looks` have not seen it. Blocking. Whether they bring the
        tokens of `wanted`."""
        drive(until(self._complete), self, what)
        return int.from_bytes(row, ORDER) == wanted

    def tokens(self) -> tuple[int, ...]:
        """With what each rank has entered; valid after a meeting, until this rank enters again."""
        return tuple(word & NUMBERS for word in self.entries[self.number & 1])

    def read(self, tokens: Sequence[int]) -> list[Descriptor]:
        """The descriptors of all ranks, or MismatchError, the same on all, where the calls do not fit together."""
        if OUT_TOKEN in tokens:
            raise self.poison.error()
        found = [self.descriptors.read(rank, token, _attach) for rank, token in enumerate(tokens)]
        self.descriptors.compare(found)
        return found

    def agreed(self, text: str) -> Iterator[None]:
        """MismatchError on every rank unless all bring the same text."""
        self.enter(self.publish(Descriptor(text)))
        yield from self.met()
        self.read(self.tokens())

    def signal(self) -> None:
        """Say: I have finished one more phase."""
        self.phase += 1
        if self.fence is not None:
            self.fence()
        self.progress[self.phase & 1][self.rank] = self.phase

    def followed(self) -> Iterator[None]:
        """Until all others have finished as many phases as this rank."""
        row, finished = self.progress[self.phase & 1], self.phase * self.ones
        while int.from_bytes(row, ORDER) != finished:
            yield
        if self.fence is not None:
            self.fence()

    def follow(self, row: memoryview, finished: int, what: str) -> None:
        """As `followed`, after `looks` have not seen it. Blocking."""
        drive(self.followed(), self, what)

    def carried_out(self, steps: Iterator[None]) -> Iterator[None]:
        """Do what ranks do over messages once they have met here. It is seen who has not ended it."""
        self._carrying = True
        yield from steps
        self._carrying = False
        self.memory.words[self.rank][FINISHED] = self.number

    def late(self) -> list[int]:
        """Ranks of the user's communicator that have not come as far as this one."""
        return [self.names[rank] for rank in self._late()]

    def look(self, waited: float) -> None:
        """Raise where the generation has ended, or a rank that is waited for has."""
        if self.poison.flag[0] and self._late():
            raise self.poison.error()
        if self.beyond is not None and self._late():
            self.beyond(waited)
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + LOOK_AT_PEERS_SECONDS
        ended = [rank for rank in self._late() if self.memory.words[rank][LEFT] or self._peers.ended(rank)]
        if ended and ended[0] in self._late():  # looked at again: its last word may have come just now
            how = DEPARTURES[self.memory.words[ended[0]][LEFT]]
            raise CollectiveError(f"rank {self.names[ended[0]]} is needed, and {how}")

    def hear(self, waited: float = 0.0) -> None:
        """Raise where the generation has ended, or a process of the node has. For a rank that waits for no word
        here."""
        if self.poison.flag[0]:
            raise self.poison.error()
        if self.beyond is not None:
            self.beyond(waited)
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + LOOK_AT_PEERS_SECONDS
        for rank in range(self.size):
            if not self.memory.words[rank][LEFT] and self._peers.ended(rank):
                raise CollectiveError(f"rank {self.names[rank]} is needed, and {DEPARTURES[0]}")

    def end(self, error: BaseException, sentence: str) -> CollectiveError:
        """End the generation for all ranks of the node; what they raise. Blocks, for LEAVING_SECONDS at most, until
        nobody touches this rank's arrays any more."""
        told = self.poison.spread(error, sentence)
        self.hold(True)
        said = max(row[self.rank] for row in self.progress)
        lending = self.lent == self.number and said < self.last_phase
        if lending or not self._complete():  # else all have what they need for this operation
            self.entries[self.number & 1][self.rank] = OUT
        self.progress[self.phase + 1 & 1][self.rank] = OUT  # more than any phase: this rank touches nobody's arrays
        if self.fence is not None:
            self.fence()
        time.sleep(SETTLE_SECONDS)
        clock = Clock()
        while self._touching() and clock.seconds() < LEAVING_SECONDS:
            sched_yield()
        return told

    def shared(self, number: int) -> bool:
        """Return whether all ranks are in that operation, the last one here, with the same call, and none has left it
        before all had come."""
        try:
            return number == self.number and self._complete() and bool(self.read(self.tokens()))
        except CollectiveError:
            return False

    def ended(self) -> dict[int, str]:
        """Ranks of the user's communicator on this node that have left, or whose process has ended; and how."""
        words = self.memory.words
        gone = [rank for rank in range(self.size) if words[rank][LEFT] or self._peers.ended(rank)]
        return {self.names[rank]: DEPARTURES[words[rank][LEFT]] for rank in gone}

    def leave(self, how: int = PROGRAM_ENDED) -> None:
        """Say that this rank comes no more."""
        self.memory.words[self.rank][LEFT] = how

    def _complete(self) -> bool:
        row = int.from_bytes(self.entries[self.number & 1], ORDER)
        return row & self.numbers == self.number * self.ones << 32

    def _late(self) -> list[int]:
        entries, progress = self.entries[self.number & 1], self.progress[self.phase & 1]
        others = [rank for rank in range(self.size) if rank != self.rank]
        if self._carrying:
            return [rank for rank in others if self.memory.words[rank][FINISHED] != self.number]
        return [rank for rank in others if entries[rank] >> 32 != self.number or progress[rank] != self.phase]

    def _touching(self) -> bool:
        """Return whether another may still touch this rank's arrays: all have come to the same operation, and it is not
        through with it. Who has not come by now will not find this rank there."""
        if self.lent != self.number:
            return False
        others = [rank for rank in range(self.size) if rank != self.rank]
        words = {rank: self.entries[self.number & 1][rank] for rank in others}
        if any(word != OUT and word >> 32 != self.number for word in words.values()):
            return False
        return any(
            word != OUT and max(row[rank] for row in self.progress) < self.last_phase and not self._peers.ended(rank)
            for rank, word in words.items()
        )


def unreachable(board: Board, error: OutOfReach) -> str:
    """The sentence for all ranks where this one could not reach a process."""
    other = board.names[board.memory.pids.index(error.pid)]
    why = os.strerror(error.errno)
    return f"rank {board.names[board.rank]} cannot reach the memory of rank {other} any more: {why}"


def _attach(place: ArrayPlace) -> NDArray[np.uint8]:
    return arena.attach(Region(*place[:5]))
