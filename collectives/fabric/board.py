"""The board of a node: shared memory in which its ranks wait for each other, and learn when one of them has failed.

An operation, such as an allreduce, starts when all ranks have *entered* it. A row in shared memory has one 8-byte word
for each rank. A rank enters by storing its word: the number of the operation << 32 | a token that stands for its call
and its arrays. The ranks have *met* when all words of the row have that number. If a rank sees a token that it does not
know, it reads the token's descriptor (the text of the call and the places of its arrays) and compares the calls. An
operation may have several *phases*; the ranks meet again after each. The steps of an operation:

    publish   write everything that other ranks will read: a vector in a slot (a buffer of this rank), a descriptor
    meet      store one word to `entries`, then read the row until it is complete
    take      read what the other ranks have written
    poison    after a failure: set the flag, and replace this rank's word with OUT. A row with OUT is never complete, so
              ranks that wait for the row keep waiting, and see the flag

A flag and a message tell all ranks of the node that one has failed, which ends their *generation* (`Poison`; between
nodes: `network.control`). The first rank to fail writes both, and every wait checks the flag. A file lock makes sure
that later failures do not overwrite the first message; the kernel releases the lock if its holder dies. If a rank dies
without writing anything, the other ranks notice that its process has ended (`Peers`).

A rank can enter operation i + 2 only after all ranks have entered i + 1. So two rows and two slots, used alternately,
are enough. Methods named by a participle (`met`, `followed`, `agreed`, `carried_out`) are generators that yield
whenever they have to wait. `meet` and `follow` do the same work as `met` and `followed`, but block. This module does
not use MPI. So the tests can run it with simulated words that switch to another rank at each access, and try every
order of accesses.
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
from mpips.collectives.errors import KINDS, CollectiveError, kind_index
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
    NodeAreas,
)
from mpips.collectives.fabric.process_memory import OutOfReach
from mpips.collectives.fabric.wait import NAP_AFTER_ON_NODE, Limits, drive, wait_until
from mpips.collectives.recorder.own import Marks
from mpips.collectives.recorder.ring import WORD

if TYPE_CHECKING:
    from numpy.typing import NDArray

ORDER = sys.byteorder
# operations are counted modulo 2^32
NUMBERS = (1 << 32) - 1
# the word of a rank that has left the generation
OUT = (1 << 64) - 1
OUT_TOKEN = OUT & NUMBERS
# How often a rank reads the row before it yields its core: if each rank has a core of its own, and if ranks share
# cores.
SPINS_ALONE, SPINS_SHARED = 64, 1
LOOK_AT_PEERS_SECONDS = 0.05
# the longest time that a failing rank waits for the other ranks to stop using its arrays
LEAVING_SECONDS = 5.0
# A processor may delay a store behind a later load, but never for this long.
SETTLE_SECONDS = 1e-3


# offset of the message in the poison's memory
TEXT_AT = 16


class Poison:
    """The flag and the message that tell the ranks of a node that their generation has ended.

    Args:
        memory: POISON_BYTES of memory, mapped by every rank on the node.
        fd: The file that this memory belongs to. A lock on the file protects the message.
    """

    def __init__(self, memory: NDArray[np.uint8], fd: int) -> None:
        self._memory = memory
        self._fd = fd
        # Word 0: 0 while the generation lives, then 1 + the index of the error in `KINDS`. Word 1: length of the text.
        self.flag = memory[:TEXT_AT].data.cast("B").cast(WORD)

    def spread(self, error: BaseException, sentence: str) -> CollectiveError:
        """End the generation with this message, unless it has ended already. Return the error that all ranks raise."""
        with self._locked():
            if not self.flag[0]:
                text = sentence.encode(errors="replace")[: POISON_BYTES - TEXT_AT]
                self._memory[TEXT_AT : TEXT_AT + len(text)] = np.frombuffer(text, np.uint8)
                self.flag[1] = len(text)
                self.flag[0] = 1 + kind_index(error)
            return self._error()

    def error(self) -> CollectiveError:
        """Return the error that all ranks raise. Call this only when the flag is set."""
        # Taking the lock orders memory accesses on any processor, so that this rank sees the whole message.
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


class GenerationEnd:
    """The end of a generation, which happens only once.

    Args:
        tell: Sends an error to the other ranks. Returns the error that all ranks raise, which is the error of the rank
            that failed first.
    """

    def __init__(self, tell: Callable[[CollectiveError], CollectiveError]) -> None:
        self._tell = tell
        # the error that every call raises once the generation has ended, or None
        self.error: CollectiveError | None = None

    def end(self, error: CollectiveError) -> CollectiveError:
        """End the generation unless it has ended already. Return the error that all ranks raise.

        If Ctrl-C interrupts this, `tell` is called again, so that the other ranks learn of the error before
        KeyboardInterrupt is raised.
        """
        if self.error is None:
            self.error = error
            try:
                self.error = self._tell(error)
            except KeyboardInterrupt:
                self.error = self._tell(error)
                raise
        return self.error


class Peers:
    """The processes of a node's ranks, and which of them have ended."""

    # process -> its pidfd. All generations share this dict, so that each process takes up a single file descriptor.
    _known: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    def has_ended(self, rank: int) -> bool:
        """True if the rank's process has ended. False if this system cannot tell."""
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
    """One rank's view of the words through which the ranks of a node wait for each other, during one generation.

    `names` has for each rank of the node the number that error messages show.
    """

    nap_after = NAP_AFTER_ON_NODE

    def __init__(self, memory: NodeAreas, names: Sequence[int], limits: Limits) -> None:
        self.memory = memory
        self.rank = memory.rank
        self.size = memory.size
        self.names = tuple(names)
        self.limits = limits
        self.descriptors = Descriptors(memory.descriptors, memory.rank, names)
        self.poison = Poison(memory.poison, memory.poison_fd)
        self.entries, self.progress = memory.rows
        # the marks on this rank's page, by which other processes, such as `mpips top`, see in which operation this rank
        # is
        self.marks = Marks(memory.identity)
        self.fence = memory.fence
        # A row is read as one large integer. `ones` times a number is the row in which every word is that number.
        # `numbers` is a mask for the operations' numbers in a row.
        self.ones = sum(1 << 64 * rank for rank in range(self.size))
        self.numbers = self.ones * NUMBERS << 32
        # the number of the operation that this rank has entered last
        self.number = 0
        # the number of phases that this rank has finished in all operations together
        self.phase = 0
        # `lent` is the last operation for which this rank has lent its arrays to other ranks. A rank has finished with
        # the lent arrays once it has signalled phase `last_phase`.
        self.last_phase = 0
        self.lent = 0
        # A fast path may begin only if the running number of its descriptor is above this; see `hold_fast_paths`.
        self.spent = -DESCRIPTORS
        self.spins = SPINS_SHARED if memory.crowded else SPINS_ALONE
        self._held = False
        # True while `carried_out` runs an operation over messages
        self._carrying = False
        # the time of the next check whether other processes have ended
        self._due = 0.0
        self._peers = Peers(memory.pids)
        # a function that raises if the generation of the enclosing store has ended; see
        # `Communicator.set_enclosing_look`
        self.enclosing_look: Callable[[float], None] | None = None

    def publish(
        self, descriptor: Descriptor, all_places: NDArray[np.int64] | None = None, place: ArrayPlace | None = None
    ) -> int:
        """Write a descriptor into this rank's area and return its token, a number. See `Descriptors.publish`."""
        token = self.descriptors.publish(descriptor, all_places, place)
        self.marks.name(token, descriptor.text)
        self.hold_fast_paths(self._held)
        return token

    def hold_fast_paths(self, held: bool) -> None:
        """Forbid fast paths to begin operations, or permit them again.

        While fast paths are forbidden, `spent` is sys.maxsize, which is above the number of every descriptor, so all
        fast paths return NOT_BEGUN. Otherwise only fast paths whose descriptor has been overwritten return NOT_BEGUN.
        """
        self._held = held
        self.spent = sys.maxsize if held else self.descriptors.put - DESCRIPTORS

    def enter(self, token: int, lends: bool = False) -> None:
        """Enter the next operation: store `token`. A rank that sees the token also sees everything written before it.

        If `lends`, this rank lends its arrays: each other rank may access them until it has finished one phase.
        """
        self.number = number = self.number + 1 & NUMBERS
        if lends:
            self.last_phase, self.lent = self.phase + 1, number
        if self.fence is not None:
            self.fence()
        self.entries[number & 1][self.rank] = self.marks.word[0] = number << 32 | token

    def met(self) -> Iterator[None]:
        """Yield until all ranks have entered the current operation. `tokens` then returns their tokens."""
        while not self._complete():
            yield
        if self.fence is not None:
            self.fence()

    def meet(self, what: str) -> None:
        """Wait until all ranks have entered the current operation. Blocking. `what` names the call in errors."""
        drive(wait_until(self._complete), self, what)

    def tokens(self) -> tuple[int, ...]:
        """Return the token of each rank in the current operation. Call this after all ranks have entered it."""
        return tuple(word & NUMBERS for word in self.entries[self.number & 1])

    def read(self, tokens: Sequence[int]) -> list[Descriptor]:
        """Return the descriptors of all ranks. Raise MismatchError, the same on all ranks, if their calls differ."""
        if OUT_TOKEN in tokens:
            raise self.poison.error()
        descriptors = [self.descriptors.read(rank, token, _attach) for rank, token in enumerate(tokens)]
        self.descriptors.compare(descriptors)
        return descriptors

    def agreed(self, text: str) -> Iterator[None]:
        """Raise MismatchError on every rank unless all ranks pass the same text. Yields whenever it has to wait."""
        self.enter(self.publish(Descriptor(text)))
        yield from self.met()
        self.read(self.tokens())

    def signal(self) -> None:
        """Tell the other ranks that this rank has finished a phase."""
        self.phase += 1
        if self.fence is not None:
            self.fence()
        self.progress[self.phase & 1][self.rank] = self.phase

    def followed(self) -> Iterator[None]:
        """Yield until every other rank has finished as many phases as this rank has."""
        row, finished = self.progress[self.phase & 1], self.phase * self.ones
        while int.from_bytes(row, ORDER) != finished:
            yield
        if self.fence is not None:
            self.fence()

    def follow(self, what: str) -> None:
        """Wait until every other rank has finished as many phases. Blocking. `what` names the call in errors."""
        drive(self.followed(), self, what)

    def carried_out(self, steps: Iterator[None]) -> Iterator[None]:
        """Run the steps of an operation over messages, after all ranks have entered it on this board.

        At the end, write to the board that this rank is done, so that other ranks can tell which ranks are late.
        """
        self._carrying = True
        yield from steps
        self._carrying = False
        self.memory.words[self.rank][FINISHED] = self.number

    def late(self) -> list[int]:
        """Return the names of the ranks for which this rank waits."""
        return [self.names[rank] for rank in self._late()]

    def look(self, waited: float) -> None:
        """Raise if the generation has ended, or if a rank for which this one waits has died or left.

        `waited`: seconds since the wait began. `look` is cheap, so a wait may call it often.
        """
        if self.poison.flag[0] and self._late():
            raise self.poison.error()
        if self.enclosing_look is not None and self._late():
            self.enclosing_look(waited)
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + LOOK_AT_PEERS_SECONDS
        ended = [rank for rank in self._late() if self.memory.words[rank][LEFT] or self._peers.has_ended(rank)]
        # Check again that the rank is late, because of this race:
        # 1. This rank computes the list of late ranks. Rank 1 is in it.
        # 2. Rank 1 writes its word, leaves, and ends.
        # 3. This rank sees that rank 1 has ended, although rank 1 has done its part.
        if ended and ended[0] in self._late():
            how = DEPARTURES[self.memory.words[ended[0]][LEFT]]
            raise CollectiveError(f"rank {self.names[ended[0]]} is needed, and {how}")

    def look_at_all(self, waited: float = 0.0) -> None:
        """Raise if the generation has ended, or if any process of the node has died without leaving.

        Called while this rank does not wait for other ranks on this board. `look` checks only the ranks for which this
        rank waits.
        """
        if self.poison.flag[0]:
            raise self.poison.error()
        if self.enclosing_look is not None:
            self.enclosing_look(waited)
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + LOOK_AT_PEERS_SECONDS
        for rank in range(self.size):
            if not self.memory.words[rank][LEFT] and self._peers.has_ended(rank):
                raise CollectiveError(f"rank {self.names[rank]} is needed, and {DEPARTURES[0]}")

    def end(self, error: BaseException, sentence: str) -> CollectiveError:
        """End the generation for all ranks of the node. Return the error that all ranks raise.

        Blocks until no other rank accesses this rank's arrays, but at most for LEAVING_SECONDS.
        """
        shared_error = self.poison.spread(error, sentence)
        self.hold_fast_paths(True)
        last_signal = max(row[self.rank] for row in self.progress)
        lending = self.lent == self.number and last_signal < self.last_phase
        # The other ranks can complete this operation if the row is complete, and if this rank has lent no arrays or has
        # finished the phase for which it lent them. Otherwise make sure that the row never becomes complete.
        if lending or not self._complete():
            self.entries[self.number & 1][self.rank] = OUT
        # Write OUT into the row for the next signal. OUT is greater than any phase, so other ranks see that this rank
        # does not touch their arrays any more. The row of the last signal stays as it is, because slower ranks may
        # still wait for that signal. (`phase` does not tell which row this is, because a fast path sets `phase` before
        # its phases begin.)
        self.progress[last_signal + 1 & 1][self.rank] = OUT
        if self.fence is not None:
            self.fence()
        time.sleep(SETTLE_SECONDS)
        clock = Clock()
        while self._touching() and clock.seconds() < LEAVING_SECONDS:
            sched_yield()
        return shared_error

    def all_entered(self, number: int) -> bool:
        """True if all ranks have entered operation `number` with the same call, and none left before all had entered.

        Only the operation that this rank entered last is known. For any other number the result is False.
        """
        try:
            return number == self.number and self._complete() and bool(self.read(self.tokens()))
        except CollectiveError:
            return False

    def gone_ranks(self) -> dict[int, str]:
        """Return the ranks of this node that have left or died: name -> how, in words."""
        words = self.memory.words
        gone = [rank for rank in range(self.size) if words[rank][LEFT] or self._peers.has_ended(rank)]
        return {self.names[rank]: DEPARTURES[words[rank][LEFT]] for rank in gone}

    def leave(self, how: int = PROGRAM_ENDED) -> None:
        """Tell the other ranks that this rank will enter no more operations. `how` is a key of `DEPARTURES`."""
        self.memory.words[self.rank][LEFT] = how

    def close(self) -> None:
        """Stop using the board. Other ranks may still use it."""
        self.marks.close()
        self.memory.close([rank for rank in range(self.size) if self._peers.has_ended(rank)])

    def _complete(self) -> bool:
        """True if all ranks have entered the current operation."""
        row = int.from_bytes(self.entries[self.number & 1], ORDER)
        return row & self.numbers == self.number * self.ones << 32

    def _late(self) -> list[int]:
        entries, progress = self.entries[self.number & 1], self.progress[self.phase & 1]
        others = [rank for rank in range(self.size) if rank != self.rank]
        if self._carrying:
            return [rank for rank in others if self.memory.words[rank][FINISHED] != self.number]
        return [rank for rank in others if entries[rank] >> 32 != self.number or progress[rank] != self.phase]

    def _touching(self) -> bool:
        """True if another rank may still touch this rank's arrays.

        Ranks touch lent arrays only once they have seen that all ranks have entered. This rank's word is already OUT.
        So if another rank has not entered yet, no rank will ever see a complete row.
        """
        if self.lent != self.number:
            return False
        others = [rank for rank in range(self.size) if rank != self.rank]
        words = {rank: self.entries[self.number & 1][rank] for rank in others}
        if any(word != OUT and word >> 32 != self.number for word in words.values()):
            return False
        ended = self._peers.has_ended
        return any(
            word != OUT and max(row[rank] for row in self.progress) < self.last_phase and not ended(rank)
            for rank, word in words.items()
        )


def describe_unreachable(board: Board, error: OutOfReach) -> str:
    """Return the error message for a rank that could not reach the memory of another process."""
    other = board.names[board.memory.pids.index(error.pid)]
    why = os.strerror(error.errno)
    return f"rank {board.names[board.rank]} cannot reach the memory of rank {other} any more: {why}"


def _attach(place: ArrayPlace) -> NDArray[np.uint8]:
    return arena.attach(Region(*place[:5]))
