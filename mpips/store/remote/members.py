"""Collectives among the members of a client (a group of workers that sum before they push), for one call at a time.

On one node the members use `collectives`, which raises MismatchError on all of them if their calls differ. Between
nodes each member sends the name of its call, together with its data, to all other members. A member pushes to the
servers only after it has received the same name from all of them.
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

# time between two checks whether the other members are still alive
LOOK_SECONDS = 0.02
# Size of the message in which a member sends the name of its call. A longer name is cut, and compared by its checksum.
TEXT_BYTES = 192


def label(what: str, keys: Sequence[Key]) -> str:
    """Return the name of a call: its operation and its keys.

    The members of a client (the workers that act as one) compare these names to check that they make the same call.
    """
    return key_label(what, [key.name for key in keys])


class Members:
    """One member's view of its client.

    Args:
        home: The client's communicator, as an object of `collectives`.
        comm: The client's communicator, as an object of MPI.
        first: The rank of the first member in the store.
        one_node: True if all workers and servers of the store are on one node.
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
        """Begin the client's next call. All members make the same calls in the same order."""
        self.calls += 1
        return ClientCall(self, text) if self.sums is None else CallBetweenNodes(self, self.sums, text)

    def stop(self) -> None:
        """At the end of a generation, make sure that nothing reads or writes the caller's memory any more."""
        if self.sums is None:
            self.under_way.stop()
        else:
            self.sums.stop(self.under_way)


class ClientCall:
    """One call of the members of a client on one node. Vectors are 1-D. All members run the task of each method."""

    def __init__(self, members: Members, text: str) -> None:
        self._members = members
        self._text = text

    def run(self, task: Task[None]) -> Task[None]:
        return task

    def agreed(self) -> Task[None]:
        """Wait until it is known that all members make this call. On one node the collective itself checks this."""
        yield from ()

    def met(self) -> Task[None]:
        """Wait until all members have come to this call."""
        self._members.home.agree(self._text)
        yield from ()

    def reduce(self, piece: Piece, flat: Array, total: Array | None) -> Task[None]:
        """Sum `flat` over the members into `total` on rank 0. `total` is None on other ranks."""
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
        """Copy the part of a piece that each member owns to all members, in place."""
        collectives.allgather(out, self._members.comm, label=self._text)
        yield from ()


class CallBetweenNodes(ClientCall):
    """One call of the members of a client on several nodes.

    The message tags of each piece differ, so that messages of several pieces can overlap.
    """

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
        """Run the task of the call. Raise MismatchError if another member makes a different call."""
        comm = self._members.comm
        self._receives = [comm.Irecv(self._theirs[rank], rank, COMPARE_TAG) for rank in self._others]
        sends = [send(comm, self._mine, rank, COMPARE_TAG) for rank in self._others]
        self._exchange = self._members.under_way.begin(self._receives, sends)
        for moved in task:
            self._look()
            yield moved
        yield from self.agreed()

    def agreed(self) -> Task[None]:
        """Wait until all members have sent the name of this call."""
        while not self._look():
            yield False

    def met(self) -> Task[None]:
        """Wait until all members have begun this call. At the beginning of `run` each member sends the call's name."""
        return self.agreed()

    def _look(self) -> bool:
        """True if all members have sent the name of this call. Raise MismatchError if one has sent another name."""
        exchange = self._exchange
        if exchange is None:
            return True
        left = exchange.pending()
        for rank, request in zip(self._others, self._receives, strict=True):
            # mpi4py sets a completed request to null. So the name of this member's call has arrived.
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
        """Raise CollectiveError if a member has left before it sent the name of this call."""
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
    """Encode the name of a call for other members: the name cut or padded to a fixed length, then its checksum."""
    data = text.encode()
    encoded = np.zeros(TEXT_BYTES, np.uint8)
    beginning = np.frombuffer(data[: TEXT_BYTES - 4], np.uint8)
    encoded[: beginning.size] = beginning
    encoded[-4:] = np.frombuffer(crc32(data).to_bytes(4, "little"), np.uint8)
    return encoded


def _decoded(encoded: Array) -> str:
    """Decode the name of a call that another member has sent."""
    return encoded[:-4].tobytes().rstrip(b"\0").decode(errors="replace")
