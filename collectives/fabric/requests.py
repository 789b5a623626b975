"""MPI requests and tags of messages; communicators that are given back once all their messages have come.

**Tags** of a plan's messages are the same on all ranks, and others than those of plans in flight beside it.

**Requests.** Persistent ones serve the buffers that a vector is cut into. Requests under way when an error ended their
operation are kept, with their memory, until MPI is through with them. Receives are cancelled. Sends end when the owner
of their communicator gives it back and drops what was sent on it.

**MPI's own collectives** cannot be cancelled (`Collectives`). A rank that gives one up carries it through: MPI touches
the arrays of others, too, for as long as one rank has not made it. Where that cannot be, its communicator is not freed.

**Communicators** are freed only after every message that was sent on them has come. MPI gives the number of a freed
communicator to a later one, and a late message then counts as the later one's. With Open MPI a real message of the same
sender then waits for ever; MPICH keeps even those that came before and that nobody received. Messages of one sender on
one communicator are received in the order in which they were sent. So a rank that has received a last one from every
rank has received all. With it each says how many of MPI's own collectives it has begun there: messages of those cannot
be received, so that one which not all have begun keeps its communicator for good. Numbers are scarce: MPICH has 2,048
in a process. A later `sweep` frees what cannot go at once.
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

from mpips.collectives.arrays import Vector
from mpips.collectives.clock import Clock
from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric.failure import failed, is_death
from mpips.collectives.fabric.wait import NAP_AFTER_BETWEEN_NODES, Limits, drive, until
from mpips.collectives.recorder import own as recorder

FIRST_TAG = 16
LEAST_TAG = 32767  # the highest tag on the poorest MPI
TAGS = 8000  # of plans; MPI promises 32,767 at least


def last_tag() -> int:
    """The highest tag of this MPI, which nothing else is sent with."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or LEAST_TAG)


class Lanes(NamedTuple):
    """The communicators of messages: that of all ranks, and that of the ranks with this one's place in their nodes. The
    second is None where nodes differ in size."""

    comm: MPI.Intracomm
    across: MPI.Comm | None


class Tags:
    """The tags of one plan. `first` counts the tags that were dealt on these lanes before, on all ranks alike.

    None is a one-shot call: nothing of its sort is ever in flight beside it, so what a text of it makes is enough.
    Ranks whose calls differ then do not take each other's messages, and `control` finds out why they wait. All tags
    that plans leave serve for that: Open MPI has 2^31, and MPICH 2^29.
    """

    def __init__(self, lanes: Lanes, first: int | None = None):
        self.lanes, self._first = lanes, first
        self.count = 0
        """How many were taken."""

    def take(self, count: int, text: str) -> list[int]:
        """All tags of the plan, one for each lane. ValueError where there are not so many."""
        if count > TAGS:
            raise ValueError(f"{text} has {count} lanes, and there are tags for {TAGS}: choose fewer rings")
        self.count = count
        if self._first is not None:
            return [FIRST_TAG + (self._first + lane) % TAGS for lane in range(count)]
        begin, first = FIRST_TAG + TAGS, zlib.crc32(text.encode())
        return [begin + (first + lane) % (last_tag() - begin) for lane in range(count)]


MESSAGE_BYTES = 4 << 20
CARRY_SECONDS = 1e-4
COMING_SECONDS = 0.5  # in which a rank that came before it could hear of the end is seen, on busy cores too
LOOK_AT = 64
_look_at = LOOK_AT
"""At so many requests in `_left` those that are over are dropped."""
_left: dict[int, MPI.Request] = {}
"""By identity; threads add to it and take from it."""
_looking = Lock()
_collectives: list[tuple[MPI.Request, MPI.Comm]] = []
"""MPI's own, which it goes on with on their communicators."""


class Roll:
    """All ranks' coming to a communicator, nobody waiting for it here. Each sends each other one byte, so that it is
    known who is late; a barrier would say nothing of that. Making it is collective, and does not block.

    `what` the ranks come to, as sentences name it.
    """

    limits = Limits()
    nap_after = NAP_AFTER_BETWEEN_NODES

    def __init__(self, comm: MPI.Intracomm, what: str) -> None:
        size = comm.Get_size()
        self._comm, self._what = comm, what
        self._looked, self._gone = 0.0, set[int]()
        self._come, counts, places = np.zeros(size, np.uint8), [1] * size, list(range(size))
        self._mine = np.ones(size, np.uint8)
        self.request: MPI.Request = comm.Ialltoallv(
            [self._mine, counts, places, MPI.BYTE], [self._come, counts, places, MPI.BYTE]
        )

    def wait(self, limits: Limits) -> None:
        """Wait until all have come. StallError after the limit, CollectiveError where one cannot come any more; this
        rank has come all the same, and MPI still writes here."""
        self.limits = limits
        _rolls.append(self)
        drive(until(self.request.Test), self, self._what)
        _rolls.remove(self)

    def late(self) -> list[int]:
        """Return the ranks that have not come, as far as is known. Local."""
        return np.flatnonzero(self._come == 0).tolist()

    def look(self, waited: float) -> None:
        """CollectiveError where the program of a rank that has not come has ended, as the folder of the job says on
        this host."""
        if self._looked < waited < self._looked + recorder.LASTING_SECONDS:
            return
        self._looked = waited
        late = self.late()
        in_job = dict(zip(ranks_of_job(self._comm, late), late))
        gone = {in_job[rank] for rank in recorder.find_ended(list(in_job))}
        for rank in sorted(gone & self._gone):  # one that had come, and gave up, is heard between two looks
            raise CollectiveError(f"{self._what}: rank {rank} is needed, and its program has ended")
        self._gone = gone


_rolls: list[Roll] = []
"""Those that are waited for, and those that were given up."""


def ranks_of_job(comm: MPI.Intracomm, ranks: Sequence[int]) -> list[int]:
    """Return these ranks of a communicator as COMM_WORLD counts them."""
    mine, all_ = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return MPI.Group.Translate_ranks(mine, ranks, all_)
    finally:
        mine.Free()
        all_.Free()


Begin: TypeAlias = "tuple[Callable[..., MPI.Request], tuple[Any, ...]]"
"""A call of MPI's own that does not block, and its arguments."""


class Collectives:
    """MPI's own collectives on one communicator, a row of them at a time."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.number = comm, -1
        self._row: tuple[int, Sequence[Begin], Callable[[], None] | None, list[MPI.Request]] = (0, (), None, [])
        """How many were begun before this row; the row; what sees, after its first, that all may go on; requests."""

    @property
    def begun(self) -> int:
        """Return the number of operations that this rank has begun, over all rows."""
        return self._row[0] + len(self._row[3])

    def enter(self, row: Sequence[Begin], see: Callable[[], None] | None = None, number: int = -1) -> None:
        """From here on the row is this one, of which nothing is begun yet. `see` raises, after the first, where ranks
        have come to unlike rows; without it they have met, in the operation of this number."""
        self.number = -1
        self._row = self.begun, row, see, []
        self.number = number

    def step(self) -> bool:
        """Go on with the row as far as possible without waiting, from wherever an interrupt has left it; True when all
        is done."""
        _, row, see, requests = self._row
        while not requests or requests[-1].Test():
            if len(requests) == len(row):
                return True
            if see is not None and len(requests) == 1:
                see()
            call, arguments = row[len(requests)]
            requests.extend(starmap(call, [arguments]))  # no interrupt comes between the call and its request
        return False

    def carry_through(self, hopeless: Callable[[], object], seconds: float) -> None:
        """Go on with a row that this rank gives up, if all have come to it, until MPI touches its arrays no more, or it
        is `hopeless`, or so much time has passed. Blocking."""
        _, _, see, requests = self._row
        clock = Clock()
        while see is None or requests:
            try:
                if self.step() or hopeless() or clock.seconds() > seconds:
                    break
            except (MPI.Exception, CollectiveError):
                break
            if see is not None and len(requests) == 1 and clock.seconds() > COMING_SECONDS:
                break  # not all have come, and who comes later hears that it is over
            time.sleep(CARRY_SECONDS)
        self.keep()

    def keep(self) -> None:
        """Hold on to what is under way until MPI is through with it."""
        _collectives.extend((request, self.comm) for request in self._row[3] if not over(request))


class Receive(MPI.Prequest):
    """A persistent request that receives, which can be cancelled."""


def receives(comm: MPI.Comm, vector: Vector, source: int, tag: int) -> list[MPI.Prequest]:
    """Requests that receive a vector."""
    return [Receive(comm.Recv_init(piece, source, tag)) for piece in pieces(vector)]


def sends(comm: MPI.Comm, vector: Vector, target: int, tag: int) -> list[MPI.Prequest]:
    """Requests that send a vector."""
    return [comm.Send_init(piece, target, tag) for piece in pieces(vector)]


def release(requests: Sequence[MPI.Prequest]) -> None:
    """Give persistent requests back to MPI, but for those under way, whose memory MPI may still write to."""
    for request in requests:
        if over(request):
            request.Free()
            continue
        if isinstance(request, Receive):
            request.Cancel()
        _left[id(request)] = request


def keep(requests: Iterable[MPI.Request]) -> None:
    """Hold on to requests that nobody waits for, and so to their memory, until MPI is through with them.

    MPICH keeps a communicator for as long as one was not seen to be over."""
    global _look_at
    _left.update((id(request), request) for request in requests)
    if len(_left) >= _look_at:
        outstanding()
        _look_at = max(LOOK_AT, 2 * len(_left))


def unfinished(comm: MPI.Comm) -> bool:
    """Return whether MPI still goes on with a collective on `comm`."""
    _collectives[:] = [kept for kept in _collectives if not over(kept[0])]
    return any(comm == other for _, other in _collectives)


def outstanding() -> bool:
    """Return whether MPI may still touch memory of what nobody waits for."""
    if not _looking.locked():  # else another thread looks: two must not test one request
        with _looking:
            _collectives[:] = [kept for kept in _collectives if not over(kept[0])]
            for request in list(_left.values()):
                if _given_back(request):
                    _left.pop(id(request), None)
    return bool(_left or _collectives)


def over(request: MPI.Request) -> bool:
    """Return whether MPI is through with a request that nobody waits for, as it is where the other process has died."""
    try:
        return bool(request.Test())
    except MPI.Exception:
        return True


def _given_back(request: MPI.Request) -> bool:
    ended = over(request)
    if ended and isinstance(request, MPI.Prequest):
        request.Free()
    return ended


def pieces(vector: Vector) -> list[list[Any]]:
    """Buffers of MESSAGE_BYTES at most, as bytes, which every element type is."""
    raw = vector.view(np.uint8)
    return [[raw[at : at + MESSAGE_BYTES], MPI.BYTE] for at in range(0, raw.size, MESSAGE_BYTES)]


def received(comm: MPI.Comm, tag: int) -> tuple[int, bytes] | None:
    """The next message with this tag: of whom, and its bytes; None where none has come. What the dead have sent may be
    lost. Does not block."""
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
    """Isend to a rank that lives; what the dead were to get is over at once. Does not block.

    Open MPI 5.0's own MPI_Isend crashes on the third message to a rank of another node that has died.
    """
    return MPI.REQUEST_NULL if to in failed(comm) else comm.Isend(data, to, tag)


def tell(comm: MPI.Comm, data: bytes | bytearray, ranks: Sequence[int], tag: int) -> None:
    """Send bytes to ranks, but to the dead. Does not block, and nobody waits for it."""
    sent = []
    for rank in ranks:
        try:
            sent.append(send(comm, [data, MPI.BYTE], rank, tag))
        except MPI.Exception as error:
            if not is_death(error):
                raise
    keep(sent)


DRAIN_SECONDS = 2e-4


class Parting:
    """A communicator that this rank has said its last on, as every other does. All receives that were posted on it must
    be over, or given up. `kept` stays until all have done so; `begun` of MPI's own collectives were begun here."""

    def __init__(self, comm: MPI.Comm, kept: object = None, begun: int = 0) -> None:
        self._comm, self._tag, self.kept = comm, last_tag(), kept
        self._last, self._unlike = begun.to_bytes(8, "little"), False
        others = (rank for rank in range(comm.Get_size()) if rank != comm.Get_rank())
        self._freed = bool(failed(comm))
        """Or it is never freed: what the dead have sent cannot be told from what they have not."""
        self._missing = 0 if self._freed else comm.Get_size() - 1
        self._sends = [] if self._freed else [comm.Isend(self._last, rank, self._tag) for rank in others]

    def heard(self) -> bool:
        """Drop what has come. Whether all that was sent to this rank has; does not block."""
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
        """Give it back, if all has come, and MPI itself does not go on with an operation on it. Whether it is gone, or
        stays for good."""
        try:
            if not self._freed and self.heard() and (self._unlike or not unfinished(self._comm)):
                self._freed = True
                if not self._unlike:
                    self._comm.Free()
        except MPI.Exception as error:
            if not is_death(error):
                raise
            self._freed = True
        return self._freed


_retired: list[tuple[MPI.Comm, object, int]] = []
"""What has been left, and nothing was said of it yet."""
_partings: list[Parting] = []
"""What has been left, and not all of it has come."""
_limbo: list[object] = []
"""What stays as long as MPI may touch memory of an operation that has failed."""


def leave(comm: MPI.Comm, kept: object = None, begun: int = 0) -> None:
    """Give `comm` back, as all its ranks do, each when it likes: in the next `sweep` that finds it drained. Sends
    nothing here: MPICH, which may call this when it frees something, holds a lock meanwhile. `begun`: see `Parting`."""
    _retired.append((comm, kept, begun))


def sweep(seconds: float = 0.0) -> bool:
    """Give back what has been left. Whether all is gone; blocks until then, for so many seconds at most."""
    clock = Clock()
    while True:
        while _retired:
            _partings.append(Parting(*_retired.pop(0)))
        for parting in list(_partings):
            if parting.free():  # which may leave others, which were kept for it
                _partings.remove(parting)
                _limbo.append(parting.kept)
        if not outstanding():  # MPICH frees what waited for the last of them, which may leave others, too
            _limbo.clear()
        if _retired:
            continue
        if not _partings or clock.seconds() >= seconds:
            return not _partings
        time.sleep(DRAIN_SECONDS)


def part(comm: MPI.Comm) -> None:
    """Free `comm`, and drop what was sent on it and not received. Collective, blocking until all ranks have come: not
    for where MPI itself frees something. Where MPI goes on with an operation on it, it is freed by a later `sweep`."""
    parting = Parting(comm)
    while not parting.heard():
        time.sleep(DRAIN_SECONDS)
    if not parting.free():
        _partings.append(parting)
