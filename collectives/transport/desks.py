"""The desks of the ranks of one node: shared memory that each rank writes for the others to read.

On the desk of a rank lie
  off       one word: the last operation that the rank left early, or in which it saw that another had taken back its
            entry: since then it touches nobody's arrays;
  failed    one word: the last operation in which it could not reach another's memory, whose, and why;
  gone      two words: the token of a card that says why the rank does nothing more on this communicator, and from
            which operation on;
  marks     one word for each lane of a schedule: how far the rank is in it;
  left      one byte for each rank of the node: that it reads this desk no more;
  cards     what a token stands for (`cards`);
  slots     two buffers, used in turn, for the vectors of small calls;
  stages    buffers through which ordinary arrays pass, block by block;
  places    for small calls in which ranks do not meet (`ahead`): vectors, a word for each with the operation whose it
            is, and one word with the last operation whose vectors the rank has taken.

On the first rank's desk lie the words that all ranks look at again and again, side by side, so that one look takes in
all of them. Each is used in turn with another, so that nobody writes over what others have yet to see:
  entries   the number of the operation that the rank has entered << 32 | a *token* for what it came with;
  progress  how many phases the rank has finished, over all operations.

Order of memory: x86 keeps stores in order and loads in order, so data written before a signal is there when the signal
is. On other processors `MPI_Win_sync` is the fence on both sides of each signal.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from collectives.errors import CollectiveError
from collectives.node import arena
from collectives.node.arena import Region
from collectives.transport import reach
from collectives.transport.cards import CARDS_END, NOWHERE, Cards

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Self

SLOT_BYTES = 128 << 10
STAGE_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10
LANES = 256
LINE_BYTES = 64
MOST_CORES = 4096
OFF_WORD, FAILED_WORD, GONE_WORD, SINCE_WORD, MARKS_WORD = 0, 1, 2, 3, 8
LEFT_AT = (MARKS_WORD + LANES) * 8
SLOTS_AT = CARDS_END
STAGES_AT = SLOTS_AT + 2 * SLOT_BYTES
AHEAD_DEPTH = 64
AHEAD_BYTES = 1 << 10
AHEAD_AT = STAGES_AT + 2 * STAGE_BYTES + 3 * BLOCK_BYTES
PLACES_AT = AHEAD_AT + AHEAD_DEPTH * 8 + LINE_BYTES
ROWS_AT = PLACES_AT + AHEAD_DEPTH * AHEAD_BYTES
ORDERED_STORES = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


def desk_bytes(size: int) -> int:
    """Of one desk, where a node has `size` ranks."""
    return ROWS_AT + 4 * (-(-size * 8 // LINE_BYTES) * LINE_BYTES)


class Desks(Cards):
    """`rank` and `size` count within the node; `names` are the ranks in the user's communicator."""

    def __init__(
        self, node: MPI.Comm, names: Sequence[int], desks: Sequence[NDArray[np.uint8]], fence: MPI.Win | None,
        pids: Sequence[int], cores: int,
    ):  # fmt: skip
        super().__init__(desks, node.rank, names)
        self.size = node.size
        self._node = node
        self.crowded = node.size > cores
        """Whether ranks of this communicator share cores: each meeting then costs as many switches."""
        self.pids = pids
        """The ranks' processes, where every one can reach the others' own memory (`reach`); else empty."""
        self._buffers: list[NDArray[np.uint8]] = []
        self._places: dict[tuple[int, int, np.dtype[Any]], list[NDArray[Any]]] = {}
        words = [desk.data.cast("B").cast("Q") for desk in desks]
        self._words = words
        self._mine = words[self.rank]
        self._others = [(other, words[other]) for other in self.turn()]
        rows = desks[0][ROWS_AT : desk_bytes(self.size)].reshape(4, -1)[:, : self.size * 8]
        even, odd, even_phase, odd_phase = (row.data.cast("Q") for row in rows)
        self._entries, self._progress = (even, odd), (even_phase, odd_phase)
        """A word for each rank; those of even and of odd operations, of even and of odd phases."""
        self.fence: Callable[[], None] | None = None if fence is None else fence.Sync
        self._window = fence
        grain = 4096 if self.size <= STAGE_BYTES // 4096 else arena.ALIGNMENT
        self.block_bytes = min(BLOCK_BYTES, STAGE_BYTES // self.size // grain * grain)

    @classmethod
    def open(cls, node: MPI.Comm, names: Sequence[int], fenced: bool = not ORDERED_STORES) -> Self | None:
        """Collective over `node`: one desk each. None, on every rank, when some rank cannot map another's desk."""
        _clear()
        desk = arena.empty(desk_bytes(node.size), np.uint8)
        desk[:SLOTS_AT] = desk[AHEAD_AT:] = 0
        where = arena.locate(desk)
        regions = np.empty((node.size, len(NOWHERE)), np.int64)
        node.Allgather(np.array(where, np.int64), regions)
        try:
            desks = [arena.attach(Region(*map(int, region))) for region in regions]
        except CollectiveError:
            desks = []
        everybody = np.array([len(desks)], np.int64)
        node.Allreduce(MPI.IN_PLACE, everybody, MPI.MIN)
        if everybody[0] < node.size:
            return None
        fence = None
        if fenced:
            assert isinstance(node, MPI.Intracomm)
            fence = MPI.Win.Create(np.zeros(8, np.uint8), comm=node)
            fence.Lock_all(MPI.MODE_NOCHECK)
        desks[node.rank] = desk  # keeps it alive
        pids = [int(region[0]) for region in regions] if reach.open_to_all(node) else []
        return cls(node, names, desks, fence, pids, _cores(node))

    def close(self) -> None:
        """Collective where a fence window exists. The desk stays until all others have closed: they may still read."""
        if self.fence is not None:
            self.fence()
        for desk in self.desks:
            desk[LEFT_AT + self.rank] = 1
        _closed.append(self)
        _clear()
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()

    def buffers(self, nbytes: int) -> list[NDArray[np.uint8]]:
        """Two buffers for the operation under way, whichever it is; for all of them the same."""
        if not self._buffers:
            self._buffers = [np.empty(nbytes, np.uint8) for _ in range(2)]
        return self._buffers

    def turn(self) -> list[int]:
        """The other ranks, nearest right neighbour first, so that not all read the same memory at once."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    def slot(self, rank: int, parity: int) -> NDArray[np.uint8]:
        start = SLOTS_AT + parity * SLOT_BYTES
        return self.desks[rank][start : start + SLOT_BYTES]

    def stage_in(self, rank: int, parity: int, owner: int) -> NDArray[np.uint8]:
        """Where `rank` puts its share of what `owner` is to reduce."""
        start = STAGES_AT + (parity * self.size + owner) * self.block_bytes
        return self.desks[rank][start : start + self.block_bytes]

    def stage_out(self, rank: int, third: int) -> NDArray[np.uint8]:
        """Where `rank` puts what it has reduced."""
        start = STAGES_AT + 2 * STAGE_BYTES + third * BLOCK_BYTES
        return self.desks[rank][start : start + self.block_bytes]

    def places(self, rank: int, nbytes: int, dtype: np.dtype[Any]) -> list[NDArray[Any]]:
        """Where `rank` puts vectors of so many bytes that it sends ahead of the others; the same for all calls."""
        found = self._places.get((rank, nbytes, dtype))
        if found is None:
            starts = range(PLACES_AT, PLACES_AT + AHEAD_DEPTH * AHEAD_BYTES, AHEAD_BYTES)
            found = [self.desks[rank][start : start + nbytes].view(dtype) for start in starts]
            self._places[rank, nbytes, dtype] = found
        return found

    def signed(self, rank: int) -> memoryview:
        """For each of the rank's places the number of the operation whose vector lies there."""
        return self._words[rank][AHEAD_AT // 8 : AHEAD_AT // 8 + AHEAD_DEPTH]

    def taken(self, rank: int) -> memoryview:
        """One word: the last operation whose vectors the rank has taken from others' places."""
        return self._words[rank][AHEAD_AT // 8 + AHEAD_DEPTH : AHEAD_AT // 8 + AHEAD_DEPTH + 1]

    def marks(self, rank: int) -> memoryview:
        """The rank's marks, a word a lane: the number of the operation << 32 | how far the rank is in it."""
        return self._words[rank][MARKS_WORD : MARKS_WORD + LANES]


def _cores(node: MPI.Comm) -> int:
    """On how many the ranks of a node may run, all together; collective over it."""
    cores = np.zeros(MOST_CORES, np.uint8)
    cores[[core for core in os.sched_getaffinity(0) if core < MOST_CORES]] = 1
    node.Allreduce(MPI.IN_PLACE, cores, MPI.MAX)
    return int(np.count_nonzero(cores))


_closed: list[Desks] = []
"""Whose desks others may still read."""


def _clear() -> None:
    """Forget closed rooms that all ranks have left."""
    _closed[:] = [room for room in _closed if not room.desks[room.rank][LEFT_AT : LEFT_AT + room.size].all()]
