"""The layout of a node's shared memory: an area for each rank, which the other ranks read, with descriptors of calls.

The area of a rank holds

  words        `FINISHED`: the last operation that the rank has carried out over messages. `LEFT`: how the rank has left
               (`DEPARTURES`), 0 until then. From `CLOSED_AT` on: a byte for each rank, which is 1 once that rank has
               stopped reading this area;
  poison       used in the first rank's area only: how the generation has ended (`board.Poison`);
  descriptors  what the rank's tokens stand for (`Descriptors`);
  slots        two buffers, used alternately, for the vectors of small calls;
  stages       buffers through which arrays in private memory pass, block by block.

The first rank's area also holds the words that all ranks read again and again: `entries` and `progress`, two rows of
each, used alternately (`board`). The words of a row are adjacent, so that a single read gets all of them.

A descriptor holds the text of a call, a digest of the text, and the places of the rank's arrays. A rank that sees an
unknown token reads the descriptor. So ranks learn about each other's arrays without messages.

Order of memory: x86 keeps stores in order and loads in order, so a rank that sees a signal also sees all data written
before it. On other processors `MPI_Win_sync` is called as a fence before and after each signal.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.agreement import describe_calls
from mpips.collectives.errors import CollectiveError, MismatchError
from mpips.collectives.recorder.ring import WORD

POISON_BYTES = 4096
PROGRAM_ENDED, CLOSED = 1, 2
# value of the word `LEFT` -> how the rank has left, in words for error messages
DEPARTURES = {0: "its process has ended", PROGRAM_ENDED: "its program has ended", CLOSED: "it has closed its store"}
# the number of descriptors for which an area has room
DESCRIPTORS = 512
DESCRIPTOR_BYTES = 1024
HEAD_WORDS = 16
HEAD_BYTES = HEAD_WORDS * 8
TEXT_BYTES = DESCRIPTOR_BYTES - HEAD_BYTES
# After this token, tokens start again at 1. It is a multiple of DESCRIPTORS, so each token keeps its place in the area.
# Higher numbers are never tokens.
LAST_TOKEN = (1 << 32) - DESCRIPTORS
# the number of words that hold two places: that of a call's input `x` and that of its output `out`
PLACE_WORDS = 12


class ArrayPlace(NamedTuple):
    """The place of a rank's array. Other ranks reach the array as shared memory, by its address, or not at all."""

    # The fields pid to nbytes have the same meaning as in `arena.Region`. All five are 0 if the array is not in shared
    # memory.
    pid: int = 0
    fd: int = 0
    inode: int = 0
    offset: int = 0
    nbytes: int = 0
    # the address in the rank's own memory, or 0 if other processes cannot read or write there
    address: int = 0

    @property
    def shared(self) -> bool:
        return self.pid != 0


class Descriptor(NamedTuple):
    """The call that a rank makes, and the places of its arrays."""

    # The call in words, for error messages. When it is written to the area, it is cut to TEXT_BYTES.
    text: str
    # For each array of the call a pair: the place of its input `x`, from which the call reads, and the place of its
    # output `out`, to which the call writes. Most calls have one array.
    places: tuple[tuple[ArrayPlace, ArrayPlace], ...] = ()
    # a hash of the whole text; if it differs between ranks, the ranks make different calls
    digest: int = 0


class Descriptors:
    """The descriptors of all ranks of the node. This rank writes its own descriptors and reads those of other ranks.

    `names` has for each rank of the node the number that error messages show.
    """

    def __init__(self, areas: Sequence[NDArray[np.uint8]], rank: int, names: Sequence[int]) -> None:
        self._areas = areas
        self._rank = rank
        self.names = tuple(names)
        # The number of descriptors that this rank has published so far. Each stays readable until DESCRIPTORS more are
        # published.
        self.put = 0
        # (rank, token) -> the descriptor of this token, once it was read
        self._known: dict[tuple[int, int], Descriptor] = {}
        # token -> where the arrays are, for a call with several arrays. Kept as long as the descriptor can be read.
        self._many: dict[int, NDArray[np.int64]] = {}

    def publish(
        self, descriptor: Descriptor, all_places: NDArray[np.int64] | None = None, place: ArrayPlace | None = None
    ) -> int:
        """Write a descriptor into this rank's area and return its token.

        Args:
            all_places: For a call of several arrays, an array in shared memory with the places of all its arrays, which
                do not fit into the descriptor. None for a call of one array.
            place: The place of `all_places` itself.
        """
        token = self.put % LAST_TOKEN + 1
        self.put += 1
        whole = descriptor.text.encode()
        raw = whole[:TEXT_BYTES]
        descriptor = descriptor._replace(text=raw.decode(errors="replace"), digest=digest(whole))
        head = np.zeros(HEAD_WORDS, np.uint64)
        head[:4] = token, descriptor.digest, len(raw), len(descriptor.places)
        if all_places is not None:
            head[4:10] = place or ArrayPlace()
        elif descriptor.places:
            head[4:16] = np.array(descriptor.places[0], np.uint64).ravel()
        area, at = self._areas[self._rank], token % DESCRIPTORS * DESCRIPTOR_BYTES
        area[at : at + HEAD_BYTES] = head.view(np.uint8)
        area[at + HEAD_BYTES : at + HEAD_BYTES + len(raw)] = np.frombuffer(raw, np.uint8)
        self._many.pop(self._before(token), None)
        if all_places is not None:
            self._many[token] = all_places
        self._keep(self._rank, token, descriptor)
        return token

    def readable(self, put: int) -> bool:
        """True if this rank's descriptor with this running number has not been overwritten."""
        return put > self.put - DESCRIPTORS

    def read(self, rank: int, token: int, attach: Callable[[ArrayPlace], NDArray[np.uint8]]) -> Descriptor:
        """Return the descriptor of a rank's token. Raise CollectiveError if it has been overwritten.

        `attach` maps the array that holds the places of a call of several arrays.
        """
        known = self._known.get((rank, token))
        if known is None:
            area, at = self._areas[rank], token % DESCRIPTORS * DESCRIPTOR_BYTES
            head = area[at : at + HEAD_BYTES].view(np.uint64).tolist()
            if head[0] != token:
                raise CollectiveError(f"the descriptor of rank {self.names[rank]} has been overwritten")
            text = bytes(area[at + HEAD_BYTES : at + HEAD_BYTES + head[2]]).decode(errors="replace")
            places = head[4:16] if head[3] == 1 else []
            if head[3] > 1:
                places = attach(ArrayPlace(*head[4:10])).view(np.int64).tolist()
            known = Descriptor(text, _pairs(places), head[1])
            self._keep(rank, token, known)
        return known

    def compare(self, descriptors: Sequence[Descriptor]) -> None:
        """Raise MismatchError, the same on all ranks, unless all descriptors describe the same call."""
        if any(descriptor.digest != descriptors[0].digest for descriptor in descriptors):
            texts = [descriptor.text for descriptor in descriptors]
            raise MismatchError(describe_calls(dict(zip(self.names, texts))))

    def _keep(self, rank: int, token: int, descriptor: Descriptor) -> None:
        self._known[rank, token] = descriptor
        self._known.pop((rank, self._before(token)), None)

    @staticmethod
    def _before(token: int) -> int:
        """Return the token whose descriptor the descriptor of `token` overwrites."""
        return (token - 1 - DESCRIPTORS) % LAST_TOKEN + 1


def _pairs(numbers: Sequence[int]) -> tuple[tuple[ArrayPlace, ArrayPlace], ...]:
    starts = range(0, len(numbers), PLACE_WORDS)
    return tuple((ArrayPlace(*numbers[at : at + 6]), ArrayPlace(*numbers[at + 6 : at + 12])) for at in starts)


def digest(text: bytes) -> int:
    """Return a hash of 8 bytes, which ranks compare instead of the whole text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


SLOT_BYTES = 128 << 10
STAGE_BYTES = 1 << 20
BLOCK_BYTES = 256 << 10
LINE_BYTES = 64
FINISHED, LEFT = 0, 1
CLOSED_AT = LINE_BYTES
POISON_AT = 4096
DESCRIPTORS_AT = POISON_AT + POISON_BYTES
SLOTS_AT = DESCRIPTORS_AT + DESCRIPTORS * DESCRIPTOR_BYTES
STAGES_AT = SLOTS_AT + 2 * SLOT_BYTES
ROWS_AT = STAGES_AT + 2 * STAGE_BYTES + 3 * BLOCK_BYTES
ORDERED_STORES = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


class BoardRows(NamedTuple):
    """The rows of words of a node, in pairs (even, odd): `entries` for operations, and `progress` for phases."""

    entries: tuple[memoryview, memoryview]
    progress: tuple[memoryview, memoryview]


class NodeAreas:
    """The areas of all ranks of a node, mapped by one of the ranks.

    Args:
        rank: The number on the node of the rank that has mapped the areas.
        areas: The area of each rank.
        pids: The process of each rank.
        cores: How many cores the ranks may use together.
        reachable: True if every rank can reach the private memory of all others (`process_memory`).
        fence: An MPI window for memory fences, or None if the processor keeps stores in order.
        poison_fd: The file of the first rank's area.
        identity: A number that identifies this memory, the same on all ranks of the node.
    """

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
        identity: int = 1,
    ) -> None:
        self.rank = rank
        self.size = len(areas)
        self.areas = areas
        self.pids = pids
        # True if ranks share cores. Then ranks that wait for each other cause context switches.
        self.crowded = self.size > cores
        # True if each rank has two cores, so that one core can communicate while the other computes
        self.roomy = 2 * self.size <= cores
        self.identity = identity
        self.reachable = reachable
        self.poison_fd = poison_fd
        self.words = [area[:LINE_BYTES].data.cast("B").cast(WORD) for area in areas]
        rows = areas[0][ROWS_AT : area_bytes(self.size)].reshape(4, -1)[:, : self.size * 8]
        even, odd, even_phase, odd_phase = (row.data.cast(WORD) for row in rows)
        self.rows = BoardRows((even, odd), (even_phase, odd_phase))
        self.fence: Callable[[], None] | None = None if fence is None else fence.Sync
        self._window = fence
        self._buffers: list[NDArray[np.uint8]] = []
        # The stages of a rank hold two blocks for each rank. Blocks are whole pages unless there are too many ranks.
        grain = 4096 if self.size <= STAGE_BYTES // 4096 else LINE_BYTES
        self.block_bytes = min(BLOCK_BYTES, STAGE_BYTES // self.size // grain * grain)

    def turn(self) -> list[int]:
        """Return the other ranks, starting after this one, so that not all ranks read the same memory at once."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

    @property
    def poison(self) -> NDArray[np.uint8]:
        return self.areas[0][POISON_AT:DESCRIPTORS_AT]

    @property
    def descriptors(self) -> list[NDArray[np.uint8]]:
        return [area[DESCRIPTORS_AT:SLOTS_AT] for area in self.areas]

    def slot(self, rank: int, parity: int) -> NDArray[np.uint8]:
        """Return the slot of a rank. `parity`: 0 for even operations, 1 for odd ones."""
        start = SLOTS_AT + parity * SLOT_BYTES
        return self.areas[rank][start : start + SLOT_BYTES]

    def stage_in(self, rank: int, parity: int, owner: int) -> NDArray[np.uint8]:
        """Return the stage (a buffer in shared memory) into which `rank` copies its input for `owner` to reduce."""
        start = STAGES_AT + (parity * self.size + owner) * self.block_bytes
        return self.areas[rank][start : start + self.block_bytes]

    def stage_out(self, rank: int, third: int) -> NDArray[np.uint8]:
        """Return the stage into which `rank` writes its results: number `third` of three that are used in turn."""
        start = STAGES_AT + 2 * STAGE_BYTES + third * BLOCK_BYTES
        return self.areas[rank][start : start + self.block_bytes]

    def buffers(self, nbytes: int) -> list[NDArray[np.uint8]]:
        """Return two private buffers for the current operation. All operations use the same two buffers."""
        if not self._buffers:
            self._buffers = [np.empty(nbytes, np.uint8) for _ in range(2)]
        return self._buffers

    def close(self, ended: Iterable[int]) -> None:
        """Stop using the areas. Collective if there is a fence.

        Other ranks may still read this rank's area, so it stays in memory until all of them have called this, except
        those whose processes have `ended`.
        """
        for area in self.areas:
            area[CLOSED_AT + self.rank] = 1
        for rank in ended:
            self.areas[self.rank][CLOSED_AT + rank] = 1
        os.close(self.poison_fd)
        _closed.append(self)
        free_closed()
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()

    def abandon(self) -> None:
        """Free the areas. Not collective. Called when no other rank uses this rank's area any more."""
        os.close(self.poison_fd)


def area_bytes(size: int) -> int:
    """Return the size of a rank's area on a node of `size` ranks."""
    return ROWS_AT + 4 * (-(-size * 8 // LINE_BYTES) * LINE_BYTES)


# objects that are closed, but whose memory other ranks may still read
_closed: list[NodeAreas] = []


def free_closed() -> None:
    """Free the closed areas that all ranks have stopped reading."""
    _closed[:] = [
        memory for memory in _closed if not memory.areas[memory.rank][CLOSED_AT : CLOSED_AT + memory.size].all()
    ]
