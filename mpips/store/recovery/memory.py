"""A server's memory for units, which outlives the server, and the ledger, which tells other ranks where each unit is.

A server writes a ledger of its units into its own memory, which the other ranks of its node map while the server lives.
The ledger has two slots for its text. So if a server is killed while it writes one slot, the other slot is left. Each
text names its generation. If that generation never began, because a process died first, the text is ignored.

`UnitMemory` makes units, with undo copies if the store survives deaths. `Ledger` records where the units are. With
`NodeMemory` every rank of a node keeps the memory of the node's servers mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import CollectiveError
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.arena import Region, SparseFile
from mpips.optimizers.base import state_dtypes
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Array
from mpips.store.recovery import undo
from mpips.store.recovery.plan import OwnerInventory, UnitCopy, dtype_names
from mpips.store.recovery.undo import AvailableRound, Undo, words_of
from mpips.store.roles import Layout
from mpips.store.server.unit import Unit
from mpips.store.transport import frames
from mpips.store.transport.frames import Created, UnitCard, dtype_of

SLOT_WORDS = 4
# Words of a slot: the number of the text (0 while it is being written), its generation, its offset in the server's
# shared memory segment, and its size.
SEQUENCE, GENERATION, OFFSET, NBYTES = range(SLOT_WORDS)
SLOTS = 2
HEADER_WORDS = SLOTS * SLOT_WORDS + 2
# Words after the slots: descriptor and inode of the sparse file with the memory of services; zeros without such a file.
FILE_WORDS = slice(SLOTS * SLOT_WORDS, HEADER_WORDS)


class LedgerEntry(msgspec.Struct, array_like=True):
    """The entry of one unit in a ledger: the unit's description, and the places of its memory.

    A place is an offset in the server's shared memory segment.

    Attributes:
        words: Place of the unit's progress words. Word 1 + i counts pushes of contributor i.
        undo: Place of the words of the unit's undo copy.
        rows: The memory for row numbers in the undo copy: its place, and the number of row numbers that it can hold.
        arrays: For the values and each array of state: dtype, place, place of its undo copy.
    """

    key: int | str
    dtype: str
    start: int
    stop: int
    row_elements: int
    contributors: tuple[int, ...]
    words: int
    undo: int
    rows: tuple[int, int]
    arrays: list[tuple[str, int, int]]


class LedgerText(msgspec.Struct, array_like=True):
    """The text of a ledger. It describes everything that a server has.

    Attributes:
        settings: See `encode_settings`.
        services: Name of a service -> its `Service.ledger_entry`.
    """

    units: list[LedgerEntry]
    settings: bytes
    services: dict[str, bytes] = {}


class Ledger:
    """A server's own ledger. From it, other ranks learn after the server's death where its units are.

    Args:
        file: The file that holds the memory of the server's services.
    """

    def __init__(self, file: SparseFile | None = None) -> None:
        self._memory = arena.empty(HEADER_WORDS, np.uint64)
        self._memory[...] = 0
        if file is not None:
            self._memory[FILE_WORDS] = file.region[1:3]
        self._slots = memoryview(self._memory)  # type: ignore[arg-type]
        self._texts: list[Array | None] = [None] * SLOTS
        self._written = 0
        self.region = arena.region_of(self._memory)

    def offset(self, array: Array) -> int:
        """Return the offset of an array in the segment. Raises CollectiveError if it is in another segment."""
        region = arena.locate(array)
        if region is None or region[:3] != self.region[:3]:
            raise CollectiveError("a server's arrays lie in more than one segment: give the node fewer ranks")
        return region.offset

    def publish(self, ledger: LedgerText, generation: int) -> None:
        """Write a new text into the ledger. It is valid once `generation` has begun."""
        text = msgspec.msgpack.encode(ledger)
        memory = arena.empty(len(text), np.uint8)
        memory[...] = np.frombuffer(text, np.uint8)
        slot = min(range(SLOTS), key=lambda slot: self._slots[slot * SLOT_WORDS + SEQUENCE])
        at, self._written = slot * SLOT_WORDS, self._written + 1
        words = self._slots
        # The slot is invalid while it is being written.
        words[at + SEQUENCE] = 0
        words[at + GENERATION], words[at + OFFSET], words[at + NBYTES] = generation, self.offset(memory), len(text)
        # This makes the new text valid. Until now the text in the other slot was the valid one.
        words[at + SEQUENCE] = self._written
        self._texts[slot] = memory

    def attempt(self, generation: int) -> None:
        """Discard texts that were published in earlier attempts to begin this generation."""
        for at in range(0, SLOTS * SLOT_WORDS, SLOT_WORDS):
            if self._slots[at + GENERATION] >= generation:
                self._slots[at + SEQUENCE] = 0


def read_ledger(segment: NDArray[np.uint8], region: Region, generation: int) -> LedgerText | None:
    """Return the newest text in a server's ledger that is older than `generation`, or None if there is none.

    Args:
        region: The place of the ledger's header.
    """
    header = segment[region.offset : region.offset + 8 * SLOTS * SLOT_WORDS].view(np.uint64).reshape(SLOTS, SLOT_WORDS)
    texts = [slot for slot in header.tolist() if slot[SEQUENCE] and slot[GENERATION] < generation]
    if not texts:
        return None
    last = max(texts, key=lambda slot: slot[SEQUENCE])
    data = segment[last[OFFSET] : last[OFFSET] + last[NBYTES]]
    return msgspec.msgpack.decode(data.tobytes(), type=LedgerText)


def undo_of(segment: NDArray[np.uint8], entry: LedgerEntry) -> Undo:
    """Return the undo copy of another server's unit. The segment of that server must be mapped."""
    size = entry.stop - entry.start

    def view(offset: int, count: int, dtype: np.dtype) -> Array:
        return segment[offset : offset + count * dtype.itemsize].view(dtype)

    first = [view(array, size, dtype_of(name)) for name, array, _ in entry.arrays]
    second = [view(copy, size, dtype_of(name)) for name, _, copy in entry.arrays]
    rows = view(entry.rows[0], entry.rows[1], np.dtype(np.int64)) if entry.rows[1] else None
    words = view(entry.undo, words_of(len(entry.contributors)), np.dtype(np.uint64))
    return Undo(first, second, memoryview(words), rows, entry.row_elements)  # type: ignore[arg-type]


def announced_pushes(segment: NDArray[np.uint8], entry: LedgerEntry) -> Sequence[int]:
    """Return for each contributor the number of its pushes that the server has counted in the unit's progress words."""
    words = segment[entry.words : entry.words + 8 * (1 + len(entry.contributors))].view(np.uint64)
    return [int(word) for word in words[1:]]


T = TypeVar("T")


class LastGeneration(Generic[T]):
    """A value as it was at the end of the last generation. All attempts to begin the next generation get this value."""

    def __init__(self) -> None:
        self._value: T | None = None
        self._generation = -1

    def get_or_save(self, generation: int, now: T) -> T:
        """Return the saved value. In the first attempt to begin this generation, first save `now` as this value."""
        if generation > self._generation or self._value is None:
            self._value, self._generation = now, generation
        return self._value

    def forget(self) -> None:
        """Drop the value, because the next generation has begun."""
        self._value = None


class NodeMemory:
    """The mapped memory of this node's servers in one generation, in a store that survives deaths.

    Args:
        regions: Rank of a server -> the place of its ledger.
    """

    def __init__(self, regions: Mapping[int, Region] | None = None) -> None:
        # rank of a server -> (its segment, the place of its ledger in the segment)
        self._mapped: dict[int, tuple[NDArray[np.uint8], Region]] = {}
        # rank of a server -> the file with the memory of its services
        self._files: dict[int, SparseFile] = {}
        for rank, region in (regions or {}).items():
            try:
                segment = arena.segment(region)
                header = segment[region.offset : region.offset + 8 * HEADER_WORDS].view(np.uint64)
                fd, inode = (int(word) for word in header[FILE_WORDS])
                if inode:
                    self._files[rank] = SparseFile.opened(Region(region.pid, fd, inode, 0, 0))
                self._mapped[rank] = segment, region
            except CollectiveError:
                # The server is in another container. MPI can share memory with it, but this process cannot map the
                # server's memory.
                continue
        # (rank of a server, generation) -> what `read_ledger` has returned
        self._ledgers: dict[tuple[int, int], LedgerText | None] = {}

    @property
    def ranks(self) -> list[int]:
        """The ranks of the servers whose memory is mapped."""
        return list(self._mapped)

    def described(self, layout: Layout, generation: int) -> list[int]:
        """Return the dead servers whose memory this rank describes to all other ranks.

        The lowest rank that is left on a node describes all dead servers of the node. Other ranks do not describe any
        server.
        """
        before = layout.before
        assert before is not None
        own = before.origin[layout.rank]
        lowest = own == min(old for old in before.origin if before.nodes[old] == before.nodes[own])
        dead = [rank for rank in self._mapped if rank in before.lost and before.nodes[rank] == before.nodes[own]]
        return [rank for rank in dead if lowest and self._ledger(rank, generation) is not None]

    def owners(self, layout: Layout, generation: int) -> list[OwnerInventory]:
        """Return the inventories of the dead servers that this rank describes: each lists the units of one server."""
        ledgers = [(rank, self._ledger(rank, generation)) for rank in self.described(layout, generation)]
        return [
            OwnerInventory(rank, False, ledger.settings, self._copies(rank, ledger, layout.asynchronous))
            for rank, ledger in ledgers
            if ledger is not None
        ]

    def service_of(self, owner: int, service: str, generation: int) -> tuple[SparseFile, bytes]:
        """Return the file of a server whose memory is mapped, and the ledger entry of its service.

        The entry is b"" if the service was empty.
        """
        ledger = self._ledger(owner, generation)
        assert ledger is not None
        return self._files[owner], ledger.services.get(service, b"")

    def arrays_of(self, owner: int, index: int, before: bool, generation: int) -> list[Array]:
        """Return the values and optimizer state of a unit of a server whose memory is mapped.

        They are those of the newest round, or if `before`, those of the round before it.
        """
        ledger = self._ledger(owner, generation)
        assert ledger is not None
        return undo_of(self._mapped[owner][0], ledger.units[index]).arrays_at(before)

    def _ledger(self, rank: int, generation: int) -> LedgerText | None:
        if (rank, generation) not in self._ledgers:
            self._ledgers[rank, generation] = read_ledger(*self._mapped[rank], generation)
        return self._ledgers[rank, generation]

    def _copies(self, rank: int, ledger: LedgerText, asynchronous: bool) -> list[UnitCopy]:
        segment = self._mapped[rank][0]
        copies = []
        for entry in ledger.units:
            undo = undo_of(segment, entry)
            rounds = undo.available_rounds()
            counts = undo.pushes(announced_pushes(segment, entry)) if asynchronous else []
            if asynchronous:
                # In an asynchronous store the round of a unit is the largest number of pushes of any contributor.
                rounds = [AvailableRound(max(counts, default=0), rounds[0].step)]
            states = [dtype for dtype, _, _ in entry.arrays[1:]]
            pushes = list(zip(entry.contributors, counts))
            copies.append(UnitCopy(entry.key, entry.start, entry.stop, rounds, undo.torn, states, pushes))
        return copies


class UnitMemory:
    """The memory of a server's units.

    Args:
        ledger: The server's ledger if the store survives deaths, otherwise None. With a ledger, units have undo copies.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        self.ledger = ledger

    def make(
        self, cards: Sequence[UnitCard], groups: Groups, adopted: Mapping[int, Unit] | None = None
    ) -> tuple[list[Unit], Created]:
        """Make one unit at round 0 for each card, in the order of the cards. Also return where workers find the units.

        Args:
            cards: Descriptions of the units.
            groups: The optimizers of keys.
            adopted: Number of a new unit -> the old unit whose memory the new unit takes over.
        """
        adopted = adopted or {}
        fresh = [card for card in cards if card.number not in adopted]
        itemsizes = [frames.dtype_of(card.dtype).itemsize for card in fresh]
        first_bytes, nbytes = frames.arrange(fresh, itemsizes)
        memory = arena.empty(nbytes, np.uint8)
        places = dict(zip([card.number for card in fresh], first_bytes, strict=True))
        first_words, count = frames.arrange_words(cards)
        words = _zeros(count)
        ends = np.cumsum([0, *(words_of(len(card.contributors)) for card in cards)])
        undo_words = _zeros(int(ends[-1]))
        units = []
        for index, (card, word) in enumerate(zip(cards, first_words, strict=True)):
            progress = memoryview(words[word : word + 1 + len(card.contributors)])  # type: ignore[arg-type]
            own_undo = memoryview(undo_words[ends[index] : ends[index + 1]])  # type: ignore[arg-type]
            old = adopted.get(card.number)
            kept: Undo | None = None
            if old is None:
                at, dtype = places[card.number], frames.dtype_of(card.dtype)
                stored = memory[at : at + (card.stop - card.start) * dtype.itemsize].view(dtype)
                if self.ledger is not None:
                    states = state_dtypes(groups.of(card.key), stored.dtype)
                    kept = undo.new(stored, card.row_elements, states, own_undo)
            else:
                stored, was = old.stored, old.undo
                # The new unit gets new words, because the old words must stay valid until the next generation begins.
                if was is not None:
                    kept = Undo(was.arrays, was.copies, own_undo, was.rows, was.row_elements)
            unit = Unit(
                card.number,
                card.key,
                stored,
                progress,
                card.contributors,
                card.block_elements,
                card.row_elements,
                card.start,
                kept,
            )
            unit.optimizer = groups.of(card.key)
            units.append(unit)
        return units, Created(arena.region_of(words), [arena.region_of(unit.stored) for unit in units])

    def publish(
        self, units: Iterable[Unit], settings: bytes, generation: int, services: Mapping[str, bytes] | None = None
    ) -> None:
        """Write this server's content at the beginning of `generation` into the ledger.

        For `services` see `LedgerText`.
        """
        if self.ledger is None:
            return
        offset = self.ledger.offset
        entries = []
        for unit in units:
            kept = unit.undo
            assert kept is not None
            arrays = [
                (array.dtype.name, offset(array), offset(copy))
                for array, copy in zip(kept.arrays, kept.copies, strict=True)
            ]
            entries.append(
                LedgerEntry(
                    unit.key,
                    unit.stored.dtype.name,
                    unit.start,
                    unit.start + unit.stored.size,
                    kept.row_elements,
                    unit.contributors,
                    offset(np.asarray(unit.words)),
                    offset(np.asarray(kept.words)),
                    (0, 0) if kept.rows is None else (offset(kept.rows), len(kept.rows)),
                    arrays,
                )
            )
        self.ledger.publish(LedgerText(entries, settings, dict(services or {})), generation)


def describe_unit(unit: Unit, asynchronous: bool) -> UnitCopy:
    """Describe a unit of a living server."""
    stop = unit.start + unit.stored.size
    if unit.undo is not None and not asynchronous:
        rounds = unit.undo.available_rounds()
    else:
        round_ = max(unit.done, default=0) if asynchronous else unit.round
        rounds = [AvailableRound(round_, unit.stands_at)]
    state = unit.undo.state if unit.undo is not None else unit.state or ()
    pushes = list(zip(unit.contributors, unit.done)) if asynchronous else []
    return UnitCopy(unit.key, unit.start, stop, rounds, unit.torn, dtype_names(state), pushes)


def arrays_of_unit(unit: Unit, before: bool) -> list[Array]:
    """Return the values and optimizer state of a living server's unit.

    They are those of the newest round, or if `before`, those of the round before it.
    """
    if unit.undo is not None:
        return unit.undo.arrays_at(before)
    return [unit.stored, *(unit.state or ())]


def _zeros(count: int) -> Array:
    words = arena.empty(max(count, 8), np.uint64)
    words[...] = 0
    return words
