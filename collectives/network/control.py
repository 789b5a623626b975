"""Notes between nodes: short messages by which all ranks learn that a rank has failed, or that calls differ.

Within a node the board does this work (`fabric.board`). No rank sends a note while all goes well. Every rank numbers
its operations. A note carries the number of an operation and its name, which is the text of the call.

A rank that has waited for `SPEAK_SECONDS` sends the number and name of its operation to all other ranks. Each rank
answers once, with the name of its own operation that has this number. So every rank gets all names, and if they differ,
all ranks raise the same MismatchError.

A *generation* is the time from the making of a communicator until it fails or is freed. A rank that ends the generation
tells all other ranks why. Several ranks may do so at the same time. So each rank listens for another `SETTLE_SECONDS`
before it raises. Then all ranks raise the same error: the one that belongs to the earliest operation. If several errors
belong to this operation, all ranks raise the error of the lowest rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import msgspec
from mpi4py import MPI

from mpips.collectives.agreement import describe_calls
from mpips.collectives.errors import KINDS, CollectiveError, MismatchError, kind_index
from mpips.collectives.fabric.failure import dead_ranks
from mpips.collectives.fabric.layout import DEPARTURES, PROGRAM_ENDED
from mpips.collectives.fabric.requests import receive_next, send_to_all
from mpips.collectives.fabric.wait import Limits

SPEAK_SECONDS = 0.05
SETTLE_SECONDS = 0.15
# how long to wait for the names of all ranks once two of the names are known to differ
NAMES_SECONDS = 0.5
# how many past operations a rank remembers by name
HISTORY = 64
LOOK_FOR_DEATHS_SECONDS = 0.02
IN_OPERATION, OVER, LEFT = 0, 1, 2
_TAG = 1


class ControlNote(msgspec.Struct, array_like=True, order=True):
    """A message of `Control`. Notes are ordered by their fields: among several notes of sort OVER, the first counts."""

    # the number of the operation
    number: int
    # the sender
    rank: int
    # The sort of note. IN_OPERATION: the sender is in this operation. OVER: the sender has ended the generation. LEFT:
    # the sender has left after this operation.
    sort: int
    # IN_OPERATION: the name of the operation. OVER: the error message.
    text: str = ""
    # OVER: the index of the error in `KINDS`. LEFT: a key of `DEPARTURES`.
    kind: int = 0


class Control:
    """Sends and receives the notes of one generation.

    Args:
        comm: A communicator that is used for nothing else.
        limits: The time limits of the generation.
        names: For each rank of `comm`, the number that error messages show.
    """

    def __init__(self, comm: MPI.Intracomm, limits: Limits, names: Sequence[int]) -> None:
        self.comm = comm
        self._rank = comm.rank
        self._size = comm.size
        self._names = names
        self.limits = limits
        # the number of this rank's newest operation
        self.number = 0
        # number of an operation -> its name on this rank
        self._own_names: dict[int, str] = {}
        # number of an operation -> another rank -> the operation's name on that rank, from notes
        self._names_of: dict[int, dict[int, str]] = {}
        # numbers of operations whose name this rank has sent to the other ranks
        self._announced: set[int] = set()
        # the numbers of the operations that this rank has begun but not ended
        self._under_way: set[int] = set()
        # rank -> the note by which this rank has told that it has left
        self._left: dict[int, ControlNote] = {}
        # all received notes that end the generation
        self._end_notes: list[ControlNote] = []
        # until when this rank listens for further notes of sort OVER; 0 before the first such note
        self._settled = 0.0
        # the time since which this rank knows that names differ; 0 if it knows of no difference
        self._differs = 0.0
        # the time of the next check for ranks that have died
        self._due = 0.0

    def operation(self, text: str, steps: Iterator[None]) -> Iterator[None]:
        """Give an operation the next number, and run its steps.

        Every rank begins the same operations in the same order. `text` names the operation.
        """
        number = self._begin(text)
        try:
            yield from steps
        except (MPI.Exception, MismatchError):
            yield from self._compare_after_error(number)
            raise
        self._end(number)

    def _compare_after_error(self, number: int) -> Iterator[None]:
        """After an operation has failed, find out whether the ranks made different calls. If so, raise MismatchError.

        MismatchError names the calls of all ranks. The error of the operation, which may be an error of MPI, does not.
        """
        self._send_name(number)
        until = time.monotonic() + NAMES_SECONDS
        while len(self._names_of.get(number, ())) < self._size - 1 and time.monotonic() < until:
            self.look(0.0)
            yield
        if number in self._names_of:
            self._compare(number)

    def agreed(self, text: str) -> Iterator[None]:
        """Raise MismatchError on every rank unless all ranks pass the same text. Yields whenever it has to wait."""
        number = self._begin(text)
        self._send_name(number)
        while len(self._names_of.get(number, ())) < self._size - 1:
            self.look(0.0)
            yield
        self._end(number)
        self._compare(number)

    def look(self, waited: float) -> None:
        """Read the notes that have arrived, and send a note if this rank has `waited` for some seconds.

        Raises if the generation has ended, if calls differ, or if a rank that has left or died is needed.
        """
        self._read_notes()
        if waited > SPEAK_SECONDS:
            for number in sorted(self._under_way - self._announced):
                self._send_name(number)
        if self._end_notes:
            raise self._settle()
        for number in sorted(self._names_of):
            self._compare(number)
        self._check_deaths()
        # A rank that left after a later operation has done its part in this rank's unfinished operations.
        gone = [rank for rank, note in self._left.items() if self._under_way and note.number < min(self._under_way)]
        if gone:
            first = min(gone)
            raise CollectiveError(f"rank {self._names[first]} is needed, and {DEPARTURES[self._left[first].kind]}")

    def late(self) -> Sequence[int]:
        """Return the ranks that have not yet told by a note that they are in this rank's last operation."""
        heard = self._names_of.get(self.number, {})
        return [self._names[rank] for rank in range(self._size) if rank != self._rank and rank not in heard]

    @property
    def has_ended(self) -> bool:
        """True if this rank knows that the generation has ended."""
        return bool(self._end_notes)

    def gone_ranks(self) -> dict[int, str]:
        """Return the ranks that are known to have left or died: name -> how, in words."""
        self._read_notes()
        dead = {self._names[rank]: DEPARTURES[0] for rank in dead_ranks(self.comm)}
        return dead | {self._names[rank]: DEPARTURES[note.kind] for rank, note in self._left.items()}

    def end(self, error: BaseException, sentence: str) -> CollectiveError:
        """End the generation for all ranks. Return the error that all ranks raise. Blocks for SETTLE_SECONDS."""
        if not self._end_notes:
            note = ControlNote(
                min(self._under_way, default=self.number + 1), self._rank, OVER, sentence, kind_index(error)
            )
            self._end_notes.append(note)
            self._send(note)
        return self._settle()

    def leave(self, how: int = PROGRAM_ENDED) -> None:
        """Tell the other ranks that this rank begins no more operations. Does not block."""
        self._send(ControlNote(min(self._under_way, default=self.number + 1) - 1, self._rank, LEFT, kind=how))

    def _begin(self, text: str) -> int:
        self.number += 1
        self._own_names[self.number] = text
        self._under_way.add(self.number)
        self._forget(self.number - HISTORY)
        return self.number

    def _end(self, number: int) -> None:
        self._under_way.discard(number)
        if number <= self.number - HISTORY:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if number not in self._under_way:
            self._own_names.pop(number, None)
            self._names_of.pop(number, None)
            self._announced.discard(number)

    def _read_notes(self) -> None:
        """Read all notes that have arrived. Answer notes about operations that this rank has begun."""
        while (message := receive_next(self.comm, _TAG)) is not None:
            note = msgspec.msgpack.decode(message[1], type=ControlNote)
            if note.sort == OVER:
                self._end_notes.append(note)
            elif note.sort == LEFT:
                self._left[note.rank] = note
            else:
                self._names_of.setdefault(note.number, {})[note.rank] = note.text
                if note.number in self._own_names and note.number not in self._announced:
                    self._send_name(note.number)

    def _send_name(self, number: int) -> None:
        self._announced.add(number)
        self._send(ControlNote(number, self._rank, IN_OPERATION, self._own_names[number]))

    def _send(self, note: ControlNote) -> None:
        others = [other for other in range(self._size) if other != self._rank]
        send_to_all(self.comm, msgspec.msgpack.encode(note), others, _TAG)

    def _check_deaths(self) -> None:
        """Raise CollectiveError if MPI knows that a rank has died without leaving."""
        if (now := time.monotonic()) >= self._due:
            self._due = now + LOOK_FOR_DEATHS_SECONDS
            for rank in dead_ranks(self.comm):
                if rank not in self._left:
                    raise CollectiveError(f"rank {self._names[rank]} is needed, and {DEPARTURES[0]}")

    def _compare(self, number: int) -> None:
        """Raise MismatchError if other ranks have another name for this operation.

        The error is raised only once all ranks have sent their names, or after NAMES_SECONDS, so that its message can
        show the names of all ranks.
        """
        own_text = self._own_names.get(number)
        if own_text is None or all(text == own_text for text in self._names_of[number].values()):
            return
        texts = {**self._names_of[number], self._rank: own_text}
        self._differs = self._differs or time.monotonic()
        if len(texts) == self._size or time.monotonic() > self._differs + NAMES_SECONDS:
            raise MismatchError(describe_calls({self._names[rank]: text for rank, text in texts.items()}))

    def _settle(self) -> CollectiveError:
        """Wait for notes by which other ranks ended the generation at the same time. Return the error to raise."""
        self._settled = self._settled or time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < self._settled:
            self._read_notes()
            time.sleep(1e-3)
        first = min(self._end_notes)
        return KINDS[first.kind](first.text)
