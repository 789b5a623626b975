"""Let the members of a client meet, for one call at a time, and sum and spread vectors among them.

On one node members meet in `collectives`, which raises MismatchError on all where their calls differ. Between nodes
each tells all others its call beside the payload, and no server hears of the call before all have said the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from zlib import crc32

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives.communicator import Communicator
from mpips.collectives.errors import MismatchError
from mpips.collectives.fabric.requests import send
from mpips.collectives.fabric.tasks import Task
from mpips.store.keys.key import Array, Key, Piece
from mpips.store.keys.key import label as key_label
from mpips.store.runtime.rendezvous import LeftRanks
from mpips.store.transport.client_sums import ClientSums
from mpips.store.transport.pending import COMPARE_TAG, MessageGroup, MessagesUnderWay, member_tag

LOOK_SECONDS = 0.02
"""Between two looks at whether the others are still there."""
TEXT_BYTES = 192
"""Of what members tell each other of a call; the rest of a longer one is compared by its checksum."""


def label(what: str, keys: Sequence[Key]) -> str:
    """Return what a call of these keys is called where members of a client meet: the same if they do the same."""
    return key_label(what, [key.name for key in keys])


class Members:
    """The members of one client, as one of them sees them.

    `home` is what `collectives` keeps for them; `first` is the first one's rank in the store. `one_node`: all workers
    share a node with all servers.
    """

    def __init__(self, home: Communicator, comm: MPI.Intracomm, first: int, one_node: bool) -> None:
        self.home, self.comm, self.first, self.one_node = home, comm, first, one_node
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.under_way = MessagesUnderWay()
        self.sums = None if one_node else ClientSums(comm)
        self.calls = 0

    def call(self, text: str) -> ClientCall:
        """The next call, which all members make; they take turns on the client's communicator."""
        self.calls += 1
        return ClientCall(self, text) if self.sums is None else CallBetweenNodes(self, self.sums, text)

    def stop(self) -> None:
        """The generation is over: let nothing touch the caller's memory any more."""
        if self.sums is None:
            self.under_way.stop()
        else:
            self.sums.stop(self.under_way)


class ClientCall:
    """One call of members of one node. Vectors are 1-D; each method is a task for all members."""

    def __init__(self, members: Members, text: str) -> None:
        self._members, self._text = members, text

    def run(self, task: Task[None]) -> Task[None]:
        """Run what the call does."""
        return task

    def agreed(self) -> Task[None]:
        """Wait until it is known that all members make this call."""
        yield from ()

    def met(self) -> Task[None]:
        """Wait until all members have come to it."""
        self._members.home.agree(self._text)
        yield from ()

    def reduce(self, piece: Piece, flat: Array, total: Array | None) -> Task[None]:
        """`total` on rank 0 = the members' sum; None elsewhere."""
        out = total if total is not None else flat if flat.flags.writeable else np.empty_like(flat)
        collectives.reduce(flat, self._members.comm, out=out, label=self._text)
        yield from ()

    def reduce_scatter(self, piece: Piece, flat: Array, total: Array) -> Task[None]:
        """`total` = what this member owns of the members' sum of a piece."""
        collectives.reduce_scatter(flat, self._members.comm, out=total, label=self._text)
        yield from ()

    def broadcast(self, piece: Piece, out: Array) -> Task[None]:
        """`out` of rank 0, on all members."""
        collectives.broadcast(out, self._members.comm, label=self._text)
        yield from ()

    def allgather(self, piece: Piece, out: Array) -> Task[None]:
        """Gather what each member owns of a piece on all members, in place."""
        collectives.allgather(out, self._members.comm, label=self._text)
        yield from ()


class CallBetweenNodes(ClientCall):
    """Make a call of members between nodes. A piece's number tells its messages apart from those of other pieces under
    way."""

    def __init__(self, members: Members, sums: ClientSums, text: str) -> None:
        super().__init__(members, text)
        self._sums, self._number, self._data = sums, members.calls, text.encode()
        self._others = [rank for rank in range(members.size) if rank != members.rank]
        self._mine = _told(text)
        self._theirs = np.zeros((members.size, TEXT_BYTES), np.uint8)
        self._receives: list[MPI.Request] = []
        self._exchange: MessageGroup | None = None
        self._presence, self._due = LeftRanks(text), time.monotonic() + LOOK_SECONDS

    def run(self, task: Task[None]) -> Task[None]:
        """Run what the call does; MismatchError where another member makes another call."""
        comm = self._members.comm
        self._receives = [comm.Irecv(self._theirs[rank], rank, COMPARE_TAG) for rank in self._others]
        sends = [send(comm, self._mine, rank, COMPARE_TAG) for rank in self._others]
        self._exchange = self._members.under_way.begin(self._receives, sends)
        for moved in task:
            self._look()
            yield moved
        yield from self.agreed()

    def agreed(self) -> Task[None]:
        """Wait until all have said that they make this call."""
        while not self._look():
            yield False

    def met(self) -> Task[None]:
        """They say so in `run`."""
        return self.agreed()

    def _look(self) -> bool:
        """Return whether all have said so; MismatchError where another has told of another call."""
        exchange = self._exchange
        if exchange is None:
            return True
        left = exchange.pending()
        for rank, request in zip(self._others, self._receives, strict=True):
            if not request and not np.array_equal(self._theirs[rank], self._mine):  # it has come
                raise MismatchError(self._differ(rank, self._theirs[rank]))
        if left:
            self._look_around()
            return False
        self._exchange = None
        return True

    def _look_around(self) -> None:
        """CollectiveError where a member has left that has not said that it makes this call."""
        if time.monotonic() > self._due:
            missing = [rank for rank, request in zip(self._others, self._receives, strict=True) if request]
            self._presence.see([self._members.first + rank for rank in missing], self._members.home.ended())
            self._due = time.monotonic() + LOOK_SECONDS

    def _differ(self, rank: int, theirs: Array) -> str:
        (low, one), (high, other) = sorted([(self._members.rank, self._mine), (rank, theirs)], key=lambda pair: pair[0])
        first = self._members.first
        return f"rank {first + low} calls {_said(one)}, rank {first + high} calls {_said(other)}: call the same"

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


def _told(text: str) -> Array:
    """A text as members tell it: its beginning, filled with zeros, then its checksum."""
    data = text.encode()
    told = np.zeros(TEXT_BYTES, np.uint8)
    beginning = np.frombuffer(data[: TEXT_BYTES - 4], np.uint8)
    told[: beginning.size] = beginning
    told[-4:] = np.frombuffer(crc32(data).to_bytes(4, "little"), np.uint8)
    return told


def _said(told: Array) -> str:
    """The text of what was told."""
    return told[:-4].tobytes().rstrip(b"\0").decode(errors="replace")
