"""Layout of a node's shared memory: each rank writes an area that the others read; descriptors of what ranks bring.

In the area of a rank lie
  words     `FINISHED`: the last operation that the rank has carried out over messages; `LEFT`: how it has left
            (`DEPARTURES`), 0 while it is there; `CLOSED`: one byte for each rank, that it reads this area no
            more;
  poison    in the first rank's area: the end of the generation (`board.Poison`);
  descriptors  what a token stands for (`Descriptors`);
  slots     two buffers, used in turn, for the vectors of small calls;
  stages    buffers through which ordinary arrays pass, block by block.

In the first rank's area lie the words that all ranks look at again and again, side by side, so that one look takes in
all of them: `entries` and `progress`, two rows of each, used in turn (`board`).

A descriptor holds the text of the call, a digest of it, and where the rank's arrays are. A rank that sees a token which
it does not know reads the descriptor; so bindings need no message.

Order of memory: x86 keeps stores in order and loads in order, so data written before a signal is there when the signal
is. On other processors `MPI_Win_sync` is the fence on both sides of each signal.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError, MismatchError, ranks
from mpips.collectives.recorder.ring import WORD

POISON_BYTES = 4096
PROGRAM_ENDED, CLOSED = 1, 2
DEPARTURES = {0: "its process has ended", PROGRAM_ENDED: "its program has ended", CLOSED: "it has closed its store"}
"""How a rank has left, by the word that it has written before."""
DESCRIPTORS = 512
DESCRIPTOR_BYTES = 1024
HEAD_WORDS = 16
HEAD_BYTES = HEAD_WORDS * 8
TEXT_BYTES = DESCRIPTOR_BYTES - HEAD_BYTES
LAST_TOKEN = (1 << 32) - DESCRIPTORS  # then tokens begin anew, each at the same place of the area; higher ones are none
DIFFERENT = "the ranks call different collectives, and must call the same"
PLACE_WORDS = 12


class ArrayPlace(NamedTuple):
    """The place of an array of a rank: five integers as `arena.Region` has them, all 0 where it is not shared, and its
    address. The address is in the rank's own memory, 0 where others cannot reach it."""

    pid: int = 0
    fd: int = 0
    inode: int = 0
    offset: int = 0
    nbytes: int = 0
    address: int = 0

    @property
    def shared(self) -> bool:
        return self.pid != 0


class Descriptor(NamedTuple):
    """The call that a rank brings, and for each array of it where x and where out is."""

    text: str
    places: tuple[tuple[ArrayPlace, ArrayPlace], ...] = ()
    digest: int = 0
    """Of the whole text, of which the descriptor holds TEXT_BYTES."""


class Descriptors:
    """The descriptors in the areas of all ranks, of which this rank puts its own. `names`: the ranks in the user's
    communicator."""

    def __init__(self, areas: Sequence[NDArray[np.uint8]], rank: int, names: Sequence[int]) -> None:
        self._areas, self._rank, self.names = areas, rank, tuple(names)
        self.put = 0
        """Descriptors that this rank has put. One stays readable until DESCRIPTORS more have been put."""
        self._known: dict[tuple[int, int], Descriptor] = {}
        self._many: dict[int, NDArray[np.int64]] = {}

    def publish(
        self, descriptor: Descriptor, many: NDArray[np.int64] | None = None, place: ArrayPlace | None = None
    ) -> int:
        """Put a descriptor there and give back its token. The places of more than one array lie in `many`, which the
        others find at `place`."""
        token = self.put % LAST_TOKEN + 1
        self.put += 1
        whole = descriptor.text.encode()
        raw = whole[:TEXT_BYTES]
        descriptor = descriptor._replace(text=raw.decode(errors="replace"), digest=digest(whole))
        words = np.zeros(HEAD_WORDS, np.uint64)
        words[:4] = token, descriptor.digest, len(raw), len(descriptor.places)
        if many is not None:
            words[4:10] = place or ArrayPlace()
        elif descriptor.places:
            words[4:16] = np.array(descriptor.places[0], np.uint64).ravel()
        area, at = self._areas[self._rank], token % DESCRIPTORS * DESCRIPTOR_BYTES
        area[at : at + HEAD_BYTES] = words.view(np.uint8)
        area[at + HEAD_BYTES : at + HEAD_BYTES + len(raw)] = np.frombuffer(raw, np.uint8)
        self._many.pop(self._before(token), None)
        if many is not None:
            self._many[token] = many
        self._keep(self._rank, token, descriptor)
        return token

    def readable(self, put: int) -> bool:
        """Return whether the descriptor that was the `put`th of this rank is still there."""
        return put > self.put - DESCRIPTORS

    def read(self, rank: int, token: int, attach: Callable[[ArrayPlace], NDArray[np.uint8]]) -> Descriptor:
        """Return what that token of a rank stands for. CollectiveError if DESCRIPTORS more were put meanwhile."""
        known = self._known.get((rank, token))
        if known is None:
            area, at = self._areas[rank], token % DESCRIPTORS * DESCRIPTOR_BYTES
            words = area[at : at + HEAD_BYTES].view(np.uint64).tolist()
            if words[0] != token:
                raise CollectiveError(f"the descriptor of rank {self.names[rank]} has been overwritten")
            text = bytes(area[at + HEAD_BYTES : at + HEAD_BYTES + words[2]]).decode(errors="replace")
            places = words[4:16] if words[3] == 1 else []
            if words[3] > 1:
                places = attach(ArrayPlace(*words[4:10])).view(np.int64).tolist()
            known = Descriptor(text, _pairs(places), words[1])
            self._keep(rank, token, known)
        return known

    def compare(self, descriptors: Sequence[Descriptor]) -> None:
        """MismatchError, the same on all ranks, unless all descriptors are of the same call."""
        if any(descriptor.digest != descriptors[0].digest for descriptor in descriptors):
            texts = {name: descriptor.text for name, descriptor in zip(self.names, descriptors)}
            raise MismatchError(disagreement(texts))

    def _keep(self, rank: int, token: int, descriptor: Descriptor) -> None:
        self._known[rank, token] = descriptor
        self._known.pop((rank, self._before(token)), None)

    @staticmethod
    def _before(token: int) -> int:
        """The token whose place this one takes."""
        return (token - 1 - DESCRIPTORS) % LAST_TOKEN + 1


def _pairs(words: Sequence[int]) -> tuple[tuple[ArrayPlace, ArrayPlace], ...]:
    starts = range(0, len(words), PLACE_WORDS)
    return tuple((ArrayPlace(*words[at : at + 6]), ArrayPlace(*words[at + 6 : at + 12])) for at in starts)


def digest(text: bytes) -> int:
    """Return what ranks compare in place of the text."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def disagreement(texts: Mapping[int, str]) -> str:
    """The sentence for ranks that call with different arguments."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(texts):
        by_text.setdefault(texts[rank], []).append(rank)
    parts = "; ".join(f"{ranks(numbers)}: {text}" for text, numbers in by_text.items())
    more = " (texts that are alike here differ further on)" if len(by_text) == 1 else ""
    return f"{DIFFERENT}: {parts}{more}"


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
        identity: int = 1,
    ) -> None:
        self.rank, self.size, self.areas, self.pids = rank, len(areas), areas, pids
        self.crowded = self.size > cores
        """Whether ranks share cores: each meeting then costs as many switches."""
        self.roomy = 2 * self.size <= cores
        """Whether each rank has a core for communication beside the one on which it computes."""
        self.identity = identity
        """The same number on all ranks of the node, and no other memory's."""
        self.reachable = reachable
        """Whether every rank can reach the others' own memory (`process_memory`)."""
        self.poison_fd = poison_fd
        self.words = [area[:LINE_BYTES].data.cast("B").cast(WORD) for area in areas]
        rows = areas[0][ROWS_AT : area_bytes(self.size)].reshape(4, -1)[:, : self.size * 8]
        even, odd, even_phase, odd_phase = (row.data.cast(WORD) for row in rows)
        self.rows = Rows((even, odd), (even_phase, odd_phase))
        self.fence: Callable[[], None] | None = None if fence is None else fence.Sync
        self._window = fence
        self._buffers: list[NDArray[np.uint8]] = []
        grain = 4096 if self.size <= STAGE_BYTES // 4096 else LINE_BYTES
        self.block_bytes = min(BLOCK_BYTES, STAGE_BYTES // self.size // grain * grain)

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
        """Return where `rank` puts its vector of an even, or odd, operation."""
        start = SLOTS_AT + parity * SLOT_BYTES
        return self.areas[rank][start : start + SLOT_BYTES]

    def stage_in(self, rank: int, parity: int, owner: int) -> NDArray[np.uint8]:
        """Return where `rank` puts its share of what `owner` is to reduce."""
        start = STAGES_AT + (parity * self.size + owner) * self.block_bytes
        return self.areas[rank][start : start + self.block_bytes]

    def stage_out(self, rank: int, third: int) -> NDArray[np.uint8]:
        """Return where `rank` puts what it has reduced."""
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
        clear()
        if self._window is not None:
            self._window.Unlock_all()
            self._window.Free()

    def abandon(self) -> None:
        """Leave an operation when nobody reads this rank's area any more."""
        os.close(self.poison_fd)


def area_bytes(size: int) -> int:
    """Return the bytes of a rank's area on a node of so many ranks."""
    return ROWS_AT + 4 * (-(-size * 8 // LINE_BYTES) * LINE_BYTES)


_closed: list[NodeMemory] = []
"""Whose areas others may still read."""


def clear() -> None:
    """Forget closed areas that all ranks have left."""
    _closed[:] = [
        memory for memory in _closed if not memory.areas[memory.rank][CLOSED_AT : CLOSED_AT + memory.size].all()
    ]
