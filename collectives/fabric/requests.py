"""MPI requests, tags of messages, and communicators that are freed only once all their messages have arrived.

**Tags.** The tags of a plan's messages are the same on all ranks, and differ from those of plans that may be in flight
at the same time.

**Requests.** Vectors are sent and received by persistent requests. If an error ends an operation while requests are in
flight, the requests and their memory are kept until MPI has finished with them. Receives are cancelled. Sends complete
when their communicator is closed, because every rank then receives and discards all messages that were sent on it.

**The MPI library's own collectives** cannot be cancelled (`NativeCollectives`). As long as one rank has not completed
such a collective, MPI may also access the arrays of the other ranks. So before a rank abandons a collective, the rank
tries to complete it. If that is impossible, the communicator is never freed.

**Communicators** are freed only after every message that was sent on them has arrived, for this reason:

1. Communicator A is freed while a message on it is still in flight.
2. MPI gives A's number to a new communicator B.
3. MPI mistakes the late message for a message on B. With Open MPI the real message of that sender then waits for ever.
   MPICH makes this mistake even with messages that arrived before A was freed and that nobody received.

The messages of a sender on a communicator arrive in the order in which they were sent. So each rank sends a last
message to every other rank, and a rank that has received all last messages has received everything. The last message
also says how many of MPI's own collectives the sender has begun on the communicator. This module cannot receive the
messages of MPI's collectives, so if these counts differ, the communicator is never freed. In all other cases it must be
freed, because numbers of communicators are scarce: MPICH has 2,048 in a process. If a communicator cannot be freed at
once, a later `collect_closed` frees it.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.arrays import Vector
from mpips.collectives.clock import Clock
from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric.failure import dead_ranks, is_death
from mpips.collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, wait_until
from mpips.collectives.recorder import own as recorder

FIRST_TAG = 16
# the highest tag that every MPI must support
LEAST_TAG = 32767
# the number of tags for plans, which use the lowest tags; one-shot calls use all higher tags
TAGS = 8000


def last_tag() -> int:
    """Return the highest tag of this MPI. Only the last messages on a communicator use it."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG)


class Lanes(NamedTuple):
    """The MPI communicators that carry messages."""

    comm: MPI.Intracomm
    # A communicator of one rank from each node: the ranks with the same node-local rank as this one. None if nodes have
    # different numbers of ranks.
    across: MPI.Comm | None


class Tags:
    """The tags of one plan.

    `first` is the number of tags that earlier plans have taken on these lanes. It is the same on all ranks.

    For a one-shot call `first` is None. Only one one-shot call is in flight at a time, so one-shot calls need no
    distinct tags. Their tags are made from a hash of the call's text. So ranks whose calls differ do not take each
    other's messages for their own: they wait, and `network.control` finds out why. Open MPI has 2^31 tags and MPICH
    2^29, so such hashes seldom collide.
    """

    def __init__(self, lanes: Lanes, first: int | None = None):
        self.lanes = lanes
        self._first = first
        # the number of tags that this plan has taken
        self.count = 0

    def take(self, count: int, text: str) -> list[int]:
        """Return a tag for each of the `count` lanes of a schedule. Called once. Raises ValueError if `count` > TAGS.

        Each lane of a schedule handles a part of the vector.
        """
        if count > TAGS:
            raise ValueError(f"{text} has {count} lanes, and there are tags for {TAGS}: choose fewer rings")
        self.count = count
        if self._first is not None:
            return [FIRST_TAG + (self._first + lane) % TAGS for lane in range(count)]
        begin, first = FIRST_TAG + TAGS, zlib.crc32(text.encode())
        return [begin + (first + lane) % (last_tag() - begin) for lane in range(count)]


MESSAGE_BYTES = 4 << 20
CARRY_SECONDS = 1e-4
# How long a rank that abandons a collective waits for the other ranks to enter it. The time is long enough for every
# rank that does not know of the failure yet to enter the collective, even if cores are busy.
COMING_SECONDS = 0.5
# When `_kept_requests` has this many requests, check which of them are complete.
TEST_AT = 64
_test_at = TEST_AT
# id -> a request for which no operation waits any more. Several threads add and remove requests.
_kept_requests: dict[int, MPI.Request] = {}
_test_lock = Lock()
# collectives of MPI that were abandoned and are not finished, each with its communicator
_collectives: list[tuple[MPI.Request, MPI.Comm]] = []


class ArrivalBarrier:
    """A non-blocking barrier that knows which ranks have not arrived yet.

    Each rank sends a byte to each other rank, because MPI's own barrier would not show which ranks have arrived. The
    constructor is collective and does not block. `what` is the name that errors give to the operation that waits.
    """

    limits = Limits()
    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, comm: MPI.Intracomm, what: str) -> None:
        size = comm.Get_size()
        self._comm = comm
        self._what = what
        # how long this rank had waited when `look` last searched for ranks that have ended
        self._looked = 0.0
        # the ranks that this search found to have ended
        self._gone = set[int]()
        # for each rank, the byte received from it: 1 once the rank has arrived, 0 before
        self._arrived = np.zeros(size, np.uint8)
        self._sent = np.ones(size, np.uint8)
        counts, places = [1] * size, list(range(size))
        call = comm.Ialltoallv([self._sent, counts, places, MPI.BYTE], [self._arrived, counts, places, MPI.BYTE])
        self._requests: list[MPI.Request] = [call]

    def is_over(self) -> bool:
        """True once all ranks have arrived. Does not block."""
        return MPI.Request.Testall(self._requests)

    def wait(self, limits: Limits) -> None:
        """Wait until all ranks have arrived. Blocking.

        Raises StallError after the time limit, and CollectiveError if a rank can no longer arrive. Even after such an
        error this rank counts as arrived, and MPI may still write to this object. So `_waited_barriers` keeps it alive.
        """
        self.limits = limits
        _waited_barriers.append(self)
        drive(wait_until(self.is_over), self, self._what)
        _waited_barriers.remove(self)

    def late(self) -> list[int]:
        """Return the ranks from which this rank has received no byte yet. Local."""
        return np.flatnonzero(self._arrived == 0).tolist()

    def look(self, waited: float) -> None:
        """Raise CollectiveError if the program of a late rank has ended, according to the job's folder on this host."""
        if self._looked < waited < self._looked + recorder.LASTING_SECONDS:
            return
        self._looked = waited
        late = self.late()
        in_job = dict(zip(ranks_of_job(self._comm, late), late))
        gone = {in_job[rank] for rank in recorder.find_ended(list(in_job))}
        # Raise only for a rank that had already ended at the previous check. A rank may arrive, stop waiting and end.
        # Its byte is then received between two checks, and at the second check the rank is not late any more.
        for rank in sorted(gone & self._gone):
            raise CollectiveError(f"{self._what}: rank {rank} is needed, and its program has ended")
        self._gone = gone


class MemberArrival(ArrivalBarrier):
    """The same barrier for only some ranks of a communicator, by messages instead of MPI's collective.

    Args:
        ranks: The ranks that take part, this one included.
        tag: A tag that no other messages on the communicator have.
        look: A function of the seconds waited. It raises CollectiveError if a rank can no longer arrive. None: the
            wait ends if the program of a late rank has ended.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        what: str,
        ranks: Sequence[int],
        tag: int,
        look: Callable[[float], None] | None = None,
    ) -> None:
        self._comm = comm
        self._what = what
        self._looked = 0.0
        self._gone = set()
        self._look = look
        others = [rank for rank in ranks if rank != comm.rank]
        self._arrived = np.ones(comm.size, np.uint8)
        self._arrived[others] = 0
        self._sent = np.ones(1, np.uint8)
        self._receives = [comm.Irecv(self._arrived[rank : rank + 1], rank, tag) for rank in others]
        self._requests = self._receives + [send(comm, self._sent, rank, tag) for rank in others]

    def look(self, waited: float) -> None:
        if self._look is None:
            super().look(waited)
        else:
            self._look(waited)

    def wait(self, limits: Limits) -> None:
        """Like `ArrivalBarrier.wait`. After an error, a later barrier gets the messages that have not come yet."""
        try:
            super().wait(limits)
        except BaseException:
            for request in self._receives:
                if request != MPI.REQUEST_NULL:
                    request.Cancel()
            raise


# barriers for which this process waits, and barriers for which it has stopped waiting before all ranks arrived
_waited_barriers: list[ArrivalBarrier] = []


def ranks_of_job(comm: MPI.Intracomm, ranks: Sequence[int]) -> list[int]:
    """Translate ranks of `comm` into ranks of COMM_WORLD."""
    members, job = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return MPI.Group.Translate_ranks(members, ranks, job)
    finally:
        members.Free()
        job.Free()


# a non-blocking collective of MPI (a method of a communicator), and the arguments to call it with
NativeCall: TypeAlias = "tuple[Callable[..., MPI.Request], tuple[Any, ...]]"


class NativeCollectives:
    """Runs the MPI library's own collectives on one communicator.

    A call of this package runs a *row*: one or more of these collectives, one after another.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        # the number of the board's operation in which the ranks compare their calls for this row, or -1
        self.number = -1
        # (number of collectives begun before this row, the row, the argument `compare` of `enter`, requests of the
        # collectives of this row that have begun). A single attribute changes in one step, so Ctrl-C cannot leave it
        # half changed.
        self._row: tuple[int, Sequence[NativeCall], Callable[[], None] | None, list[MPI.Request]] = (0, (), None, [])

    @property
    def begun(self) -> int:
        """The number of collectives that this rank has begun, over all rows."""
        return self._row[0] + len(self._row[3])

    def enter(self, row: Sequence[NativeCall], compare: Callable[[], None] | None = None, number: int = -1) -> None:
        """Set the next row, without beginning any of its collectives.

        Args:
            compare: A function that is called after the first collective of the row. It raises if the ranks have
                entered different rows. None if the ranks compare their calls on the board.
            number: The number of the board's operation in which the ranks compare their calls. -1 if they do not use
                the board for this.
        """
        self.number = -1
        self._row = self.begun, row, compare, []
        self.number = number

    def step(self) -> bool:
        """Advance the row as far as possible without blocking. Return True when all of it is complete.

        This method can be called again after Ctrl-C has interrupted it at any point.
        """
        _, row, compare, requests = self._row
        while not requests or requests[-1].Test():
            if len(requests) == len(row):
                return True
            if compare is not None and len(requests) == 1:
                compare()
            call, arguments = row[len(requests)]
            # `extend` and `starmap` run in C, so Ctrl-C cannot come between the call and the storing of its request.
            requests.extend(starmap(call, [arguments]))
        return False

    def carry_through(self, hopeless: Callable[[], object], seconds: float) -> None:
        """Try to complete a row that this rank abandons, so that MPI stops accessing the ranks' arrays. Blocking.

        Stops early if not all ranks have entered the row, if `hopeless()` is true, or after `seconds`.
        """
        _, _, compare, requests = self._row
        clock = Clock()
        while compare is None or requests:
            try:
                if self.step() or hopeless() or clock.seconds() > seconds:
                    break
            except (MPI.Exception, CollectiveError):
                break
            # Stop if not all ranks have entered the row. The missing ranks learn that the communicator has ended, and
            # will not enter the row any more.
            if compare is not None and len(requests) == 1 and clock.seconds() > COMING_SECONDS:
                break
            time.sleep(CARRY_SECONDS)
        self.keep()

    def keep(self) -> None:
        """Keep the requests of unfinished collectives, and so their arrays, alive until MPI has finished them."""
        _collectives.extend((request, self.comm) for request in self._row[3] if not is_over(request))


class Receive(MPI.Prequest):
    """A persistent receive. Unlike sends, receives can be cancelled."""


def make_receives(comm: MPI.Comm, vector: Vector, source: int, tag: int) -> list[MPI.Prequest]:
    """Make the persistent requests that receive a vector."""
    pieces = cut_bytes(vector, MESSAGE_BYTES)
    return [Receive(comm.Recv_init(piece, source, tag)) for piece in pieces if piece.size]


def make_sends(comm: MPI.Comm, vector: Vector, target: int, tag: int) -> list[MPI.Prequest]:
    """Make the persistent requests that send a vector."""
    return [comm.Send_init(piece, target, tag) for piece in cut_bytes(vector, MESSAGE_BYTES) if piece.size]


def release(requests: Sequence[MPI.Prequest]) -> None:
    """Free persistent requests. Cancel receives in flight. Keep all requests in flight until they are complete."""
    for request in requests:
        if is_over(request):
            request.Free()
            continue
        if isinstance(request, Receive):
            request.Cancel()
        _kept_requests[id(request)] = request


def keep_until_complete(requests: Iterable[MPI.Request]) -> None:
    """Keep requests for which no operation waits any more, together with their memory, until they are complete.

    The requests are tested now and then, because MPICH frees a communicator only after all its requests were tested.
    """
    global _test_at
    _kept_requests.update((id(request), request) for request in requests)
    if len(_kept_requests) >= _test_at:
        any_outstanding()
        _test_at = max(TEST_AT, 2 * len(_kept_requests))


def unfinished(comm: MPI.Comm) -> bool:
    """True if a collective of MPI that this rank has abandoned is still running on `comm`."""
    _collectives[:] = [entry for entry in _collectives if not is_over(entry[0])]
    return any(comm == other for _, other in _collectives)


def any_outstanding() -> bool:
    """Forget kept requests that are complete. Return True if any are left: MPI may still touch their memory."""
    # Two threads must not test the same request. If another thread is testing them now, do not repeat its work.
    if not _test_lock.locked():
        with _test_lock:
            _collectives[:] = [entry for entry in _collectives if not is_over(entry[0])]
            for request in list(_kept_requests.values()):
                if _free_if_complete(request):
                    _kept_requests.pop(id(request), None)
    return bool(_kept_requests or _collectives)


def is_over(request: MPI.Request) -> bool:
    """True if a request is complete. A request that failed, because the other process has died, counts as complete."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True


def _free_if_complete(request: MPI.Request) -> bool:
    """Return True if a request is complete. Free a complete request if it is persistent."""
    ended = is_over(request)
    if ended and isinstance(request, MPI.Prequest):
        request.Free()
    return ended


def cut_bytes(array: NDArray[Any], nbytes: int) -> list[NDArray[np.uint8]]:
    """Cut a 1-D array into views of `nbytes` each; the last may be shorter. An empty array gives one empty view."""
    data = array.view(np.uint8)
    return [data[start : start + nbytes] for start in range(0, max(data.size, 1), max(nbytes, 1))]


def receive_next(comm: MPI.Comm, tag: int) -> tuple[int, bytes] | None:
    """Receive the next message with this tag. Return its sender and its bytes, or None if no message has arrived.

    Does not block. Messages from ranks that have died may be lost.
    """
    status = MPI.Status()
    while True:
        try:
            message = comm.Improbe(MPI.ANY_SOURCE, tag, status)
            if message is None:
                return None
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([data, MPI.BYTE])
            return status.Get_source(), bytes(data)
        except MPI.Exception as error:
            if not is_death(error):
                raise
            comm.Ack_failed()


def send(comm: MPI.Comm, data: Any, to: int, tag: int) -> MPI.Request:
    """Start a send. If the rank is known to be dead, send nothing and return a completed request. Does not block.

    Open MPI 5.0 would crash in the third MPI_Isend to a dead rank of another node.
    """
    return MPI.REQUEST_NULL if to in dead_ranks(comm) else comm.Isend(data, to, tag)


def send_to_all(comm: MPI.Comm, data: bytes | bytearray, ranks: Sequence[int], tag: int) -> None:
    """Send bytes to each of these ranks that is alive. Does not block, even if a rank never receives."""
    sent = []
    for rank in ranks:
        try:
            sent.append(send(comm, [data, MPI.BYTE], rank, tag))
        except MPI.Exception as error:
            if not is_death(error):
                raise
    keep_until_complete(sent)


DRAIN_SECONDS = 2e-4


class ClosingComm:
    """A communicator that is being closed: each rank sends a last message to every other. See the module's docstring.

    All receives that were posted on the communicator must be complete or cancelled.

    Args:
        kept: An object that is kept alive until the communicator is freed.
        begun: The number of MPI's own collectives that this rank has begun on the communicator.
    """

    def __init__(self, comm: MPI.Comm, kept: object = None, begun: int = 0) -> None:
        self._comm = comm
        self._tag = last_tag()
        self.kept = kept
        # the last message
        self._last = begun.to_bytes(8, "little")
        # True if ranks have begun different numbers of collectives
        self._unlike = False
        others = (rank for rank in range(comm.Get_size()) if rank != comm.Get_rank())
        # True once the communicator is freed, or if it never will be. It is never freed if a rank has died, because no
        # rank knows whether a message from the dead rank is still in flight.
        self._freed = bool(dead_ranks(comm))
        # the number of last messages that this rank has not received yet
        self._missing = 0 if self._freed else comm.Get_size() - 1
        self._sends = [] if self._freed else [comm.Isend(self._last, rank, self._tag) for rank in others]

    def drained(self) -> bool:
        """Receive and discard messages, without blocking. Return True once everything sent to this rank has arrived."""
        status = MPI.Status()
        while self._missing:
            message = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)
            if message is None:
                return False
            data = bytearray(status.Get_count(MPI.BYTE))
            message.Recv(data)
            if status.Get_tag() == self._tag:
                self._missing -= 1
                self._unlike |= data != self._last
        return bool(MPI.Request.Testall(self._sends))

    def free(self) -> bool:
        """Free the communicator if all messages have arrived and MPI runs no collective on it. Does not block.

        Returns True if the communicator is freed, or if it must never be freed.
        """
        try:
            if not self._freed and self.drained() and (self._unlike or not unfinished(self._comm)):
                self._freed = True
                if not self._unlike:
                    self._comm.Free()
        except MPI.Exception as error:
            if not is_death(error):
                raise
            self._freed = True
        return self._freed


# (communicator, kept, begun), the arguments of a `ClosingComm` that is not made yet
_to_close: list[tuple[MPI.Comm, object, int]] = []
# communicators on which messages may still arrive
_closing: list[ClosingComm] = []
# objects that are kept alive as long as MPI may touch memory of a failed operation
_kept_objects: list[object] = []


def close_later(comm: MPI.Comm, kept: object = None, begun: int = 0) -> None:
    """Queue a communicator for `collect_closed`, which frees it. Every rank calls this, at any time.

    Does not block. `kept` and `begun` are the arguments of `ClosingComm`. The last messages are sent only by
    `collect_closed`: MPICH may call this function while it frees another object, and then MPICH holds a lock.
    """
    _to_close.append((comm, kept, begun))


def collect_closed(seconds: float = 0.0) -> bool:
    """Free the closed communicators whose messages have all arrived. Return True if no closed communicator is left.

    Blocks until none is left, but for at most `seconds`.
    """
    clock = Clock()
    while True:
        while _to_close:
            _closing.append(ClosingComm(*_to_close.pop(0)))
        for closing in list(_closing):
            # Freeing a communicator may add to `_to_close`: MPI deletes the attributes of the communicator, and one of
            # these may be a `Communicator`, which then calls `close_later` for its own communicators.
            if closing.free():
                _closing.remove(closing)
                _kept_objects.append(closing.kept)
        # `any_outstanding` tests requests. MPICH really frees a communicator only when its last request is tested, so
        # this call may add to `_to_close` as well.
        if not any_outstanding():
            _kept_objects.clear()
        if _to_close:
            continue
        if not _closing or clock.seconds() >= seconds:
            return not _closing
        time.sleep(DRAIN_SECONDS)


def close_collectively(comm: MPI.Comm) -> None:
    """Free a communicator, and discard messages that were sent on it and not received.

    Collective, and blocks until all ranks have called it. So MPI itself must not call it, for example while it frees
    another communicator. If MPI still runs a collective on `comm`, a later `collect_closed` frees `comm`.
    """
    closing = ClosingComm(comm)
    while not closing.drained():
        time.sleep(DRAIN_SECONDS)
    if not closing.free():
        _closing.append(closing)
