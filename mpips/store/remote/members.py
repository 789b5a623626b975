"""Let the members of a client meet, for one call at a time, and sum and spread vectors among them.

On one node members meet in `collectives`, which raises MismatchError on all of them if their calls differ. Between
nodes each member sends all others the name of its call along with the payload, and servers are told of the call only
when all members have sent the same name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from zlib import crc32

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives.agreement import describe_calls
from mpips.collectives.communicator import Communicator
from mpips.collectives.errors import MismatchError
from mpips.collectives.fabric.requests import send
from mpips.collectives.fabric.tasks import Task
from mpips.store.keys.key import Array, Key, Piece
from mpips.store.keys.key import label as key_label
from mpips.store.runtime.rendezvous import LeftRanks
from mpips.store.transport.client_sums import ClientSums
from mpips.store.transport.pending import COMPARE_TAG, MessageGroup, MessagesUnderWay, member_tag

# time between two looks whether the other members are still there
LOOK_SECONDS = 0.02
# How much of a call's text members tell each other. The rest of a longer text is compared by its checksum.
TEXT_BYTES = 192


def label(what: str, keys: Sequence[Key]) -> str:
    """Return the name of a call, as members of a client compare it.

    The same call of the same keys has the same name.
    """
    return key_label(what, [key.name for key in keys])


class Members:
    """The members of one client, as one of them sees them.

    Args:
        home: The communicator of `collectives` for them.
        first: The store's rank of the first member.
        one_node: All workers share a node with all servers.
    """

    def __init__(self, home: Communicator, comm: MPI.Intracomm, first: int, one_node: bool) -> None:
        self.home = home
        self.comm = comm
        self.first = first
        self.one_node = one_node
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.under_way = MessagesUnderWay()
        self.sums = None if one_node else ClientSums(comm)
        self.calls = 0

    def call(self, text: str) -> ClientCall:
        """Begin the next call, which all members make. Calls take turns on the client's communicator."""
        self.calls += 1
        return ClientCall(self, text) if self.sums is None else CallBetweenNodes(self, self.sums, text)

    def stop(self) -> None:
        """At the end of a generation, make sure that nothing reads or writes the caller's memory any more."""
        if self.sums is None:
            self.under_way.stop()
        else:
            self.sums.stop(self.under_way)


class ClientCall:
    """One call of members on one node. Vectors are 1-D. Each method returns a task that all members run."""

    def __init__(self, members: Members, text: str) -> None:
        self._members = members
        self._text = text

    def run(self, task: Task[None]) -> Task[None]:
        return task

    def agreed(self) -> Task[None]:
        """Wait until this member knows that all members make this call. On one node the collective checks that."""
        yield from ()

    def met(self) -> Task[None]:
        """Wait until all members have come to this call."""
        self._members.home.agree(self._text)
        yield from ()

    def reduce(self, piece: Piece, flat: Array, total: Array | None) -> Task[None]:
        """Sum `flat` over the members into `total` on rank 0. `total` is None on the others."""
        out = total if total is not None else flat if flat.flags.writeable else np.empty_like(flat)
        collectives.reduce(flat, self._members.comm, out=out, label=self._text)
        yield from ()

    def reduce_scatter(self, piece: Piece, flat: Array, total: Array) -> Task[None]:
        """Sum a piece over the members, and write the part that this member owns into `total`."""
        collectives.reduce_scatter(flat, self._members.comm, out=total, label=self._text)
        yield from ()

    def broadcast(self, piece: Piece, out: Array) -> Task[None]:
        """Copy rank 0's `out` to all members."""
        collectives.broadcast(out, self._members.comm, label=self._text)
        yield from ()

    def allgather(self, piece: Piece, out: Array) -> Task[None]:
        """Gather the parts of a piece that the members own, in place, on all members."""
        collectives.allgather(out, self._members.comm, label=self._text)
        yield from ()


class CallBetweenNodes(ClientCall):
    """One call of members on several nodes. Message tags contain the piece's number, to tell pieces apart."""

    def __init__(self, members: Members, sums: ClientSums, text: str) -> None:
        super().__init__(members, text)
        self._sums = sums
        self._number = members.calls
        self._data = text.encode()
        self._others = [rank for rank in range(members.size) if rank != members.rank]
        self._mine = _encoded(text)
        self._theirs = np.zeros((members.size, TEXT_BYTES), np.uint8)
        self._receives: list[MPI.Request] = []
        self._exchange: MessageGroup | None = None
        self._presence = LeftRanks(text)
        self._due = time.monotonic() + LOOK_SECONDS

    def run(self, task: Task[None]) -> Task[None]:
        """Run the task of the call. MismatchError if another member makes another call."""
        comm = self._members.comm
        self._receives = [comm.Irecv(self._theirs[rank], rank, COMPARE_TAG) for rank in self._others]
        sends = [send(comm, self._mine, rank, COMPARE_TAG) for rank in self._others]
        self._exchange = self._members.under_way.begin(self._receives, sends)
        for moved in task:
            self._look()
            yield moved
        yield from self.agreed()

    def agreed(self) -> Task[None]:
        """Wait until all members have said that they make this call."""
        while not self._look():
            yield False

    def met(self) -> Task[None]:
        """Wait until all members have come to this call, which they tell in `run`."""
        return self.agreed()

    def _look(self) -> bool:
        """True if all members have said that they make this call. Raise MismatchError if one makes another call."""
        exchange = self._exchange
        if exchange is None:
            return True
        left = exchange.pending()
        for rank, request in zip(self._others, self._receives, strict=True):
            # A null request has completed: the member's text has arrived.
            if not request and not np.array_equal(self._theirs[rank], self._mine):
                first = self._members.first
                calls = {self._members.rank: self._mine, rank: self._theirs[rank]}
                raise MismatchError(describe_calls({first + member: _decoded(call) for member, call in calls.items()}))
        if left:
            self._look_around()
            return False
        self._exchange = None
        return True

    def _look_around(self) -> None:
        """Raise CollectiveError if a member has left before it told that it makes this call."""
        if time.monotonic() > self._due:
            missing = [rank for rank, request in zip(self._others, self._receives, strict=True) if request]
            self._presence.see([self._members.first + rank for rank in missing], self._members.home.gone_ranks())
            self._due = time.monotonic() + LOOK_SECONDS

    def reduce(self, piece: Piece, flat: Array, total: Array | None) -> Task[None]:
        return self._sums.reduce_to_first(flat, total, self._tag(piece))

    def reduce_scatter(self, piece: Piece, flat: Array, total: Array) -> Task[None]:
        return self._sums.reduce_scatter(flat, total, self._cuts(piece), self._tag(piece))

    def broadcast(self, piece: Piece, out: Array) -> Task[None]:
        return self._sums.broadcast(out, self._tag(piece))

    def allgather(self, piece: Piece, out: Array) -> Task[None]:
        return self._sums.allgather(out, self._cuts(piece), self._tag(piece))

    def _tag(self, piece: Piece) -> int:
        return member_tag(piece.number, self._number, self._data)

    @staticmethod
    def _cuts(piece: Piece) -> list[int]:
        return [cut - piece.cuts[0] for cut in piece.cuts]


def _encoded(text: str) -> Array:
    """Encode a text for other members: its beginning, filled up with zeros, then its checksum."""
    data = text.encode()
    encoded = np.zeros(TEXT_BYTES, np.uint8)
    beginning = np.frombuffer(data[: TEXT_BYTES - 4], np.uint8)
    encoded[: beginning.size] = beginning
    encoded[-4:] = np.frombuffer(crc32(data).to_bytes(4, "little"), np.uint8)
    return encoded


def _decoded(encoded: Array) -> str:
    """Decode a text that another member has sent."""
    return encoded[:-4].tobytes().rstrip(b"\0").decode(errors="replace")
