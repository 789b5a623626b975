"""Where what lies in the shared memory of a node's ranks: each rank writes an area that the others read.

In the area of a rank lie
  words     `FINISHED`: the last operation that the rank has carried out over messages; `LEFT`: how it has left
            (`poison.DEPARTURES`), 0 while it is there; `CLOSED`: one byte for each rank, that it reads this area no
            more;
  poison    in the first rank's area: the end of the generation (`poison`);
  descriptors  what a token stands for (`descriptors`);
  slots     two buffers, used in turn, for the vectors of small calls;
  stages    buffers through which ordinary arrays pass, block by block.

In the first rank's area lie the words that all ranks look at again and again, side by side, so that one look takes in
all of them: `entries` and `progress`, two rows of each, used in turn (`board`).

Order of memory: x86 keeps stores in order and loads in order, so data written before a signal is there when the signal
is. On other processors `MPI_Win_sync` is the fence on both sides of each signal.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import CollectiveError
from collectives.fabric import arena, process_memory
from collectives.fabric.arena import Region
from collectives.fabric.descriptors import DESCRIPTOR_BYTES, DESCRIPTORS
from collectives.fabric.poison import POISON_BYTES
from collectives.machine import Quota, bound_cores, find_quota

SLOT_BYTES = 128 << 10
STAGE_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10
LINE_BYTES = 64
MOST_CORES = 4096
NO_QUOTA = (0, 0)
FINISHED, LEFT = 0, 1
CLOSED_AT = LINE_BYTES
POISON_AT = 4096
DESCRIPTORS_AT = POISON_AT + POISON_BYTES
SLOTS_AT = DESCRIPTORS_AT + DESCRIPTORS * DESCRIPTOR_BYTES
STAGES_AT = SLOTS_AT + 2 * SLOT_BYTES
ROWS_AT = STAGES_AT + 2 * STAGE_BYTES + 3 * BLOCK_BYTES
ORDERED_STORES = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class Rows(NamedTuple):
    """Words of all ranks side by side, a word each: those of even and of odd operations, of even and of odd phases."""

    entries: tuple[memoryview, memoryview]
    progress: tuple[memoryview, memoryview]


class NodeMemory:
    """The areas of a node's ranks, as rank `rank` of them sees them. `pids`: their processes."""

    def __init__(
        self,
        rank: int,
        areas: Sequence[NDArray[np.uint8]],
        pids: Sequence[int],
        *,
        cores: int,
        reachable: bool,
        fence: MPI.Win | None,
        poison_fd: int,
    ) -> None:
        self.rank, self.size, self.areas, self.pids = rank, len(areas), areas, pids
        self.crowded = self.size > cores
        """Whether ranks share cores: each meeting then costs as many switches."""
        self.roomy = 2 * self.size <= cores
        """Whether each rank has a core for communication beside the one on which it computes."""
        self.reachable = reachable
        """Whether every rank can reach the others' own memory (`process_memory`)."""
        self.poison_fd = poison_fd
        self.words = [area[:LINE_BYTES].data.cast("B").cast("Q") for area in areas]
        even, odd, even_phase, odd_phase = (row.data.cast("Q") for row in self._rows())
        self.rows = Rows((even, odd), (even_phase, odd_phase))
        self.fence: Callable[[], None] | None = None if fence is None else fence.Sync
        self._window = fence
        self._buffers: list[NDArray[np.uint8]] = []
        grain = 4096 if self.size <= STAGE_BYTES // 4096 else arena.ALIGNMENT
        self.block_bytes = min(BLOCK_BYTES, STAGE_BYTES // self.size // grain * grain)

    def _rows(self) -> NDArray[np.uint64]:
        end = ROWS_AT + 4 * _row_bytes(self.size)
        return self.areas[0][ROWS_AT:end].reshape(4, -1)[:, : self.size * 8]  # type: ignore[return-value]

    def turn(self) -> list[int]:
        """The other ranks, nearest right neighbour first, so that not all read the same memory at once."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    @property
    def poison(self) -> NDArray[np.uint8]:
        return self.areas[0][POISON_AT:DESCRIPTORS_AT]

    @property
    def descriptors(self) -> list[NDArray[np.uint8]]:
        return [area[DESCRIPTORS_AT:SLOTS_AT] for area in self.areas]

    def slot(self, rank: int, parity: int) -> NDArray[np.uint8]:
        """Where `rank` puts its vector of an even, or odd, operation."""
        start = SLOTS_AT + parity * SLOT_BYTES
        return self.areas[rank][start : start + SLOT_BYTES]

    def stage_in(self, rank: int, parity: int, owner: int) -> NDArray[np.uint8]:
        """Where `rank` puts its share of what `owner` is to reduce."""
        start = STAGES_AT + (parity * self.size + owner) * self.block_bytes
        return self.areas[rank][start : start + self.block_bytes]

    def stage_out(self, rank: int, third: int) -> NDArray[np.uint8]:
        """Where `rank` puts what it has reduced."""
        start = STAGES_AT + 2 * STAGE_BYTES + third * BLOCK_BYTES
        return self.areas[rank][start : start + self.block_bytes]

    def buffers(self, nbytes: int) -> list[NDArray[np.uint8]]:
        """Two buffers of this rank for the operation under way, whichever it is; for all of them the same."""
        if not self._buffers:
            self._buffers = [np.empty(nbytes, np.uint8) for _ in range(2)]
        return self._buffers

    def close(self) -> None:
        """Collective where a fence window exists. The area stays until all others have closed: they may still read."""
        for area in self.areas:
            area[CLOSED_AT + self.rank] = 1
        os.close(self.poison_fd)
        _closed.append(self)
        _clear()
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()

    def abandon(self) -> None:
        """The same where nobody reads this rank's area any more."""
        os.close(self.poison_fd)


def open_memory(node: MPI.Comm, fenced: bool = not ORDERED_STORES) -> NodeMemory | None:
    """Collective over `node`: one area each. None, on every rank, when some rank cannot map another's area."""
    _clear()
    mine = arena.empty(ROWS_AT + 4 * _row_bytes(node.size), np.uint8)
    mine[:SLOTS_AT] = mine[ROWS_AT:] = 0
    regions = np.empty((node.size, len(Region._fields)), np.int64)
    node.Allgather(np.array(arena.locate(mine), np.int64), regions)
    places = [Region(*map(int, region)) for region in regions]
    areas, poison_fd = _attach(places)
    opened = np.array([len(areas)], np.int64)
    node.Allreduce(MPI.IN_PLACE, opened, MPI.MIN)
    if opened[0] < node.size:
        if poison_fd is not None:
            os.close(poison_fd)
        return None
    assert poison_fd is not None
    fence = None
    if fenced:
        assert isinstance(node, MPI.Intracomm)
        fence = MPI.Win.Create(np.zeros(8, np.uint8), comm=node)
        fence.Lock_all(MPI.MODE_NOCHECK)
    areas[node.rank] = mine  # keeps it alive
    return NodeMemory(
        node.rank,
        areas,
        [place.pid for place in places],
        cores=_cores(node),
        reachable=process_memory.open_to_all(node),
        fence=fence,
        poison_fd=poison_fd,
    )


def _attach(places: Sequence[Region]) -> tuple[list[NDArray[np.uint8]], int | None]:
    """All areas, and the file of the first; fewer where one cannot be mapped."""
    try:
        first = os.open(f"/proc/{places[0].pid}/fd/{places[0].fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return [], None
    try:
        return [arena.attach(place) for place in places], first
    except CollectiveError:
        return [], first


def _row_bytes(size: int) -> int:
    return -(-size * 8 // LINE_BYTES) * LINE_BYTES


def _cores(node: MPI.Comm) -> int:
    """On how many the ranks of a node may run, all together; collective over it."""
    cores = np.zeros(MOST_CORES, np.uint8)
    cores[[core for core in os.sched_getaffinity(0) if core < MOST_CORES]] = 1
    node.Allreduce(MPI.IN_PLACE, cores, MPI.MAX)
    quotas = np.empty((node.size, len(Quota._fields)), np.int64)
    node.Allgather(np.array(find_quota() or NO_QUOTA, np.int64), quotas)
    known = [None if tuple(one) == NO_QUOTA else Quota(*map(int, one)) for one in quotas]
    return bound_cores(int(np.count_nonzero(cores)), known)


_closed: list[NodeMemory] = []
"""Whose areas others may still read."""


def _clear() -> None:
    """Forget closed areas that all ranks have left."""
    _closed[:] = [
        memory for memory in _closed if not memory.areas[memory.rank][CLOSED_AT : CLOSED_AT + memory.size].all()
    ]
