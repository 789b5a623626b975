"""The ledger of a server: where its units lie, for those who outlive it.

A server writes it into its own memory, and the other ranks of its node map that while it lives. There are two slots, so
that an end in the middle of writing leaves the older text. Each text says of which generation it is. That of a
generation which never began, because somebody died before, does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from collectives.errors import CollectiveError
from collectives.fabric import arena
from collectives.fabric.arena import Region
from mpips.store.recovery.memory.undo import WORDS, Undo
from mpips.store.transport.frames import dtype_of

Array = NDArray[Any]
SLOT_WORDS = 4
SEQUENCE, GENERATION, OFFSET, NBYTES = range(SLOT_WORDS)
"""Of a slot: the number of the text, 0 while it changes; its generation; where it lies in the segment."""
SLOTS = 2


class Entry(msgspec.Struct, array_like=True):
    """One unit: what it is, and where its memory begins in the server's segment."""

    key: int | str
    dtype: str
    start: int
    stop: int
    row_elements: int
    contributors: tuple[int, ...]
    words: int
    """What its workers look at: word 1 + i counts pushes of contributor i."""
    journal: int
    """The words of its undo copy."""
    rows: tuple[int, int]
    """Room for numbers of rows: where, and how many."""
    arrays: list[tuple[str, int, int]]
    """Dtype of the values and of each array of state, where it is, and where its copy is."""


class Book(msgspec.Struct, array_like=True):
    """All that a server has."""

    units: list[Entry]
    settings: bytes
    """Its optimizers and its compression, see `recovery.settings`."""


class Ledger:
    """A server's own ledger."""

    def __init__(self) -> None:
        self._memory = arena.empty(SLOTS * SLOT_WORDS, np.uint64)
        self._memory[...] = 0
        self._slots = memoryview(self._memory)  # type: ignore[arg-type]
        self._texts: list[Array | None] = [None] * SLOTS
        self._written = 0
        region = arena.locate(self._memory)
        assert region is not None
        self.region: Region = region

    def offset(self, array: Array) -> int:
        """Where an array begins in the segment. CollectiveError where it lies in another one."""
        region = arena.locate(array)
        if region is None or region[:3] != self.region[:3]:
            raise CollectiveError("a server's arrays lie in more than one segment: give the node fewer ranks")
        return region.offset

    def publish(self, book: Book, generation: int) -> None:
        """From now on this is what the server has, once that generation has begun."""
        text = msgspec.msgpack.encode(book)
        memory = arena.empty(len(text), np.uint8)
        memory[...] = np.frombuffer(text, np.uint8)
        slot = min(range(SLOTS), key=lambda slot: self._slots[slot * SLOT_WORDS + SEQUENCE])
        at, self._written = slot * SLOT_WORDS, self._written + 1
        words = self._slots
        words[at + SEQUENCE] = 0
        words[at + GENERATION], words[at + OFFSET], words[at + NBYTES] = generation, self.offset(memory), len(text)
        words[at + SEQUENCE] = self._written
        self._texts[slot] = memory

    def attempt(self, generation: int) -> None:
        """An attempt to begin that generation: what an earlier one has published for it does not count."""
        for at in range(0, SLOTS * SLOT_WORDS, SLOT_WORDS):
            if self._slots[at + GENERATION] >= generation:
                self._slots[at + SEQUENCE] = 0


def read(segment: NDArray[np.uint8], region: Region, generation: int) -> Book | None:
    """What the owner of a segment had when the last generation before `generation` was over; its header lies in
    `region`."""
    header = segment[region.offset : region.offset + 8 * SLOTS * SLOT_WORDS].view(np.uint64).reshape(SLOTS, SLOT_WORDS)
    texts = [slot for slot in header.tolist() if slot[SEQUENCE] and slot[GENERATION] < generation]
    if not texts:
        return None
    last = max(texts, key=lambda slot: slot[SEQUENCE])
    data = segment[last[OFFSET] : last[OFFSET] + last[NBYTES]]
    return msgspec.msgpack.decode(data.tobytes(), type=Book)


def entry(
    ledger: Ledger, key: int | str, start: int, undo: Undo, words: Array, contributors: tuple[int, ...]
) -> Entry:  # fmt: skip
    """What the ledger says of a unit."""
    values = undo.arrays[0]
    rows = (0, 0) if undo.rows is None else (ledger.offset(undo.rows), len(undo.rows))
    arrays = [
        (array.dtype.name, ledger.offset(array), ledger.offset(copy))
        for array, copy in zip(undo.arrays, undo.copies, strict=True)
    ]
    return Entry(
        key, values.dtype.name, start, start + values.size, undo.row_elements, contributors, ledger.offset(words),
        ledger.offset(np.asarray(undo.words)), rows, arrays,
    )  # fmt: skip


def undo_of(segment: NDArray[np.uint8], entry: Entry) -> Undo:
    """The memory of a unit, in a segment that is mapped here."""
    size = entry.stop - entry.start

    def at(offset: int, count: int, dtype: Any) -> Array:
        kind = np.dtype(dtype)
        return segment[offset : offset + count * kind.itemsize].view(kind)

    first = [at(array, size, dtype_of(name)) for name, array, _ in entry.arrays]
    second = [at(copy, size, dtype_of(name)) for name, _, copy in entry.arrays]
    rows = at(entry.rows[0], entry.rows[1], np.int64) if entry.rows[1] else None
    return Undo(first, second, memoryview(at(entry.journal, WORDS, np.uint64)), rows, entry.row_elements)  # type: ignore[arg-type]


def told(segment: NDArray[np.uint8], entry: Entry) -> Sequence[int]:
    """How many pushes of each contributor the server has told of."""
    words = segment[entry.words : entry.words + 8 * (1 + len(entry.contributors))].view(np.uint64)
    return [int(word) for word in words[1:]]
