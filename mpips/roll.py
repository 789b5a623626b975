"""What each worker of a client is calling: compared after every collective, so that keys in another order are noticed.

A collective of two keys of equal size and dtype would succeed and sum what does not belong together. So every member
notes a checksum of its call, under the number of the call, before the collective, and compares all notes after it: by
then all have written theirs. For clients whose workers share a node.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from collectives.node import arena
from collectives.node.arena import Region
from mpips import meet

if TYPE_CHECKING:
    from mpi4py import MPI

CALLS = 64  # notes kept: nobody can be so many calls ahead of another
MOST_CALLS = 1 << 32  # then their numbers begin anew


class Roll:
    """The notes of one client. Making it is collective over the client's communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        mine = arena.empty(CALLS * self._size, np.uint64)
        mine[...] = 0
        region = arena.locate(mine)
        assert region is not None
        told = meet.exchange(comm, msgspec.msgpack.encode(tuple(region)), "mpips.create")[0]
        memory = mine if self._rank == 0 else arena.attach(Region(*msgspec.msgpack.decode(told))).view(np.uint64)
        meet.exchange(comm, b"", "mpips.create")  # rank 0's memory stays until all have mapped it
        self._notes = memoryview(memory)  # type: ignore[arg-type]
        self._calls = 0

    def note(self, text: str) -> None:
        """Write down this worker's next call."""
        self._calls = (self._calls + 1) % MOST_CALLS
        self._notes[self._calls % CALLS * self._size + self._rank] = self._calls << 32 | zlib.crc32(text.encode())

    def agrees(self) -> bool:
        """Whether all wrote the same; to be asked when all have written."""
        first = self._calls % CALLS * self._size
        row = self._notes[first : first + self._size].tobytes()
        return row == row[: self._notes.itemsize] * self._size
