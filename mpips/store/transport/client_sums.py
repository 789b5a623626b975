"""Collectives among the members of a client on several nodes: reduce, broadcast, reduce-scatter, allgather, as tasks.

A client is a group of workers that sum before they push. All sums add in the order of the ranks. So the bits of a sum
do not depend on how keys are cut. Several collectives with different tags may overlap, and ranks may start them in
different orders. MPI's own non-blocking collectives would have to start in the same order on all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from mpi4py import MPI

from mpips.collectives.clock import Clock
from mpips.collectives.fabric.failure import dead_ranks
from mpips.collectives.fabric.requests import keep_until_complete, send, send_to_all
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.kernels.sums import add_parts
from mpips.collectives.schedule.model import cut
from mpips.store.keys.key import Array
from mpips.store.transport.pending import LOOK_SECONDS, QUIET_SECONDS, QUIET_TAG, MessagesUnderWay

# For vectors of at most this size, one round of messages with whole vectors is used instead of two rounds with slices.
SHORT_BYTES = 8 << 10
# At the end of a generation, a member without sends of its own receives messages of other members for this many
# seconds.
ALONE_SECONDS = 1.0


class ClientSums:
    """The collectives of one member of a client. `comm` is the client's communicator.

    Each method returns a task that all members of the client run. The task is over when this member has its result and
    may overwrite its input. Vectors are 1-D, of any dtype. Tags come from `pending.member_tag`.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._rank = comm.Get_rank()
        self._size = comm.Get_size()
        self._under_way = MessagesUnderWay()

    def stop(self, other: MessagesUnderWay) -> None:
        """At the end of a generation, end the messages of this object and of `other`, so that MPI leaves their memory.

        MPI cannot cancel a send. So each member receives the messages of other members until all have announced that
        they send nothing more. This takes at most QUIET_SECONDS while this member has unfinished sends of its own, and
        otherwise at most ALONE_SECONDS.
        """
        ways, quiet = (self._under_way, other), _Quiet(self._comm)
        for way in ways:
            way.cancel()
        clock = Clock()
        while not quiet.all_quiet():
            sending = sum(way.left() for way in ways)
            waited = clock.seconds()
            if not sending or waited > QUIET_SECONDS:
                quiet.say()
            if waited > (QUIET_SECONDS if sending else ALONE_SECONDS):
                break
            time.sleep(LOOK_SECONDS)
        for way in ways:
            way.leave()

    def broadcast(self, x: Array, tag: int) -> Task[None]:
        """Copy rank 0's x to every rank."""
        if x.nbytes > SHORT_BYTES:
            yield from self.spread(x, tag)
        elif self._rank:
            yield from self._all([self._receive(x, 0, tag)])
        else:
            yield from self._all([], [self._send(x, to, tag) for to in range(1, self._size)])

    def reduce_scatter(self, x: Array, out: Array, cuts: Sequence[int], tag: int) -> Task[None]:
        """Sum x over the ranks, and write elements [cuts[i], cuts[i+1]) of the sum into out on rank i.

        Every rank sends one slice to every other rank.
        """
        rank, others = self._rank, [(self._rank + i) % self._size for i in range(1, self._size)]
        parts = dict(zip(others, np.empty((self._size - 1, out.size), x.dtype)))
        receives = [self._receive(parts[source], source, tag) for source in reversed(others) if out.size]
        slices = [(to, x[cuts[to] : cuts[to + 1]]) for to in others]
        yield from self._all(receives, [self._send(part, to, tag) for to, part in slices if part.size])
        parts[rank] = x[cuts[rank] : cuts[rank + 1]]
        add_parts([parts[member] for member in range(self._size)], out)

    def reduce_to_first(self, x: Array, out: Array | None, tag: int) -> Task[None]:
        """Sum x over the ranks into out on rank 0. out is None on other ranks.

        For a long vector, each rank first sums one slice (a reduce-scatter), and then sends it to rank 0. A short
        vector is sent to rank 0 as a whole.
        """
        owners = self._size if x.nbytes > SHORT_BYTES else 1
        cuts = [int(cut(x.size, owners, min(i, owners))) for i in range(self._size + 1)]
        mine = np.empty(cuts[self._rank + 1] - cuts[self._rank], x.dtype)
        yield from self.reduce_scatter(x, mine, cuts, tag)
        if out is None:
            if mine.size:
                yield from self._all([], [self._send(mine, 0, tag)])
            return
        out[: cuts[1]] = mine
        slices = [out[a:b] for a, b in pairwise(cuts)]
        yield from self._all([self._receive(slices[i], i, tag) for i in range(1, self._size) if slices[i].size])

    def spread(self, x: Array, tag: int) -> Task[None]:
        """Copy rank 0's x to every rank in two rounds.

        First rank 0 sends a different slice to each rank. Then every rank sends its slice to all others.
        """
        rank, size = self._rank, self._size
        cuts = [int(cut(x.size, size, i)) for i in range(size + 1)]
        slices = [x[a:b] for a, b in pairwise(cuts)]
        if rank == 0:
            sends = [self._send(slices[i], i, tag) for i in range(1, size)]
            yield from self._all([], sends + [self._send(slices[0], i, tag) for i in range(1, size)])
            return
        own = self._under_way.begin([self._receive(slices[rank], 0, tag)])
        others = self._under_way.begin([self._receive(slices[i], i, tag) for i in range(size) if i != rank])
        yield from own.wait()
        others.sends = [self._send(slices[rank], i, tag) for i in range(1, size) if i != rank]
        yield from others.wait()

    def allgather(self, x: Array, cuts: Sequence[int], tag: int) -> Task[None]:
        """Copy elements [cuts[i], cuts[i+1]) of x from each rank i to all ranks, in place."""
        rank, size = self._rank, self._size
        slices = [x[a:b] for a, b in pairwise(cuts)]
        sources = [(rank - i) % size for i in range(1, size)]
        receives = [self._receive(slices[source], source, tag) for source in sources]
        yield from self._all(receives, [self._send(slices[rank], (rank + i) % size, tag) for i in range(1, size)])

    def _all(self, receives: Sequence[MPI.Request], sends: Sequence[MPI.Request] = ()) -> Task[None]:
        return self._under_way.begin(receives, sends).wait()

    def _send(self, x: Array, to: int, tag: int) -> MPI.Request:
        return send(self._comm, x.view(np.uint8), to, tag)

    def _receive(self, x: Array, source: int, tag: int) -> MPI.Request:
        return self._comm.Irecv(x.view(np.uint8), source, tag)


class _Quiet:
    """Keeps track of the members that may still send messages. Each member announces when it will send no more."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._said = False
        self._others = set(range(comm.Get_size())) - {comm.Get_rank()}

    def say(self) -> None:
        """Announce to the other members that this member sends nothing more. Only the first call sends a message."""
        if not self._said:
            self._said = True
            others = set(range(self._comm.Get_size())) - {self._comm.Get_rank()}
            send_to_all(self._comm, b"", sorted(others), QUIET_TAG)

    def all_quiet(self) -> bool:
        """Receive and drop messages that have arrived. Return True if no member sends any more."""
        status = MPI.Status()
        try:
            while (message := self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status)) is not None:
                keep_until_complete([message.Irecv([bytearray(status.Get_count(MPI.BYTE)), MPI.BYTE])])
                if status.Get_tag() == QUIET_TAG:
                    self._others.discard(status.Get_source())
        # A member has died.
        except MPI.Exception:
            self._comm.Ack_failed()
        self._others.difference_update(dead_ranks(self._comm))
        return self._said and not self._others
