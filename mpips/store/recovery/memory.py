"""The memory of a server's units, which outlives the server, and the ledger by which others find it.

A server writes a ledger of its units into its own memory, which the other ranks of its node map while it lives. The
ledger has two slots for its text, so that a server killed while it writes one leaves the other. Each text says which
generation it is of. A text of a generation that never began, because somebody died before, does not count.

`UnitMemory` makes units, with undo copies if the store survives deaths (`SurvivingUnit`). `Ledger` says where they lie.
`NodeMemory` is what every rank of a node keeps mapped of them.
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
from mpips.optimizers.base import Optimizer, State, state_dtypes
from mpips.optimizers.schedules import Groups
from mpips.store.keys.key import Array
from mpips.store.recovery import undo
from mpips.store.recovery.plan import Holding, Shelf, dtype_names
from mpips.store.recovery.undo import Undo, with_state, words_of
from mpips.store.roles import Layout
from mpips.store.server.unit import Unit
from mpips.store.transport import frames
from mpips.store.transport.frames import Created, UnitCard, dtype_of
from mpips.tables.journal import Journal
from mpips.tables.plan import TableEntry, attached, holding_of_table

SLOT_WORDS = 4
# Words of a slot: the number of the text (0 while it is being written), its generation, and its offset and size in the
# segment.
SEQUENCE, GENERATION, OFFSET, NBYTES = range(SLOT_WORDS)
SLOTS = 2
HEADER_WORDS = SLOTS * SLOT_WORDS + 2
# After the slots: descriptor and inode of the sparse file with the rows of tables; zeros if there is none.
FILE_WORDS = slice(SLOTS * SLOT_WORDS, HEADER_WORDS)


class LedgerEntry(msgspec.Struct, array_like=True):
    """One unit: what it is, and where its memory lies. Places are offsets in the server's segment.

    Attributes:
        words: The unit's progress words. Word 1 + i counts pushes of contributor i.
        journal: The words of its undo copy.
        rows: Room for row numbers: its place and how many fit.
        arrays: For the values and each array of state: dtype, place, place of its copy.
    """

    key: int | str
    dtype: str
    start: int
    stop: int
    row_elements: int
    contributors: tuple[int, ...]
    words: int
    journal: int
    rows: tuple[int, int]
    arrays: list[tuple[str, int, int]]


class LedgerText(msgspec.Struct, array_like=True):
    """All that a server has. For `settings` see `encode_settings`."""

    units: list[LedgerEntry]
    settings: bytes
    tables: list[TableEntry] = []


class Ledger:
    """A server's own ledger. `file` is where rows of its tables lie."""

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
        """Return the offset of an array in the segment. Raises CollectiveError if it lies in another segment."""
        region = arena.locate(array)
        if region is None or region[:3] != self.region[:3]:
            raise CollectiveError("a server's arrays lie in more than one segment: give the node fewer ranks")
        return region.offset

    def publish(self, book: LedgerText, generation: int) -> None:
        """Write what the server has. It counts once `generation` has begun."""
        text = msgspec.msgpack.encode(book)
        memory = arena.empty(len(text), np.uint8)
        memory[...] = np.frombuffer(text, np.uint8)
        slot = min(range(SLOTS), key=lambda slot: self._slots[slot * SLOT_WORDS + SEQUENCE])
        at, self._written = slot * SLOT_WORDS, self._written + 1
        words = self._slots
        # The slot is invalid while it is being written.
        words[at + SEQUENCE] = 0
        words[at + GENERATION], words[at + OFFSET], words[at + NBYTES] = generation, self.offset(memory), len(text)
        # The text counts from here on. Until then the other slot does.
        words[at + SEQUENCE] = self._written
        self._texts[slot] = memory

    def attempt(self, generation: int) -> None:
        """Drop what an earlier attempt to begin this generation has published."""
        for at in range(0, SLOTS * SLOT_WORDS, SLOT_WORDS):
            if self._slots[at + GENERATION] >= generation:
                self._slots[at + SEQUENCE] = 0


def read_ledger(segment: NDArray[np.uint8], region: Region, generation: int) -> LedgerText | None:
    """Return what the owner of a segment had at the end of the last generation before `generation`, or None.

    The ledger's header lies in `region`.
    """
    header = segment[region.offset : region.offset + 8 * SLOTS * SLOT_WORDS].view(np.uint64).reshape(SLOTS, SLOT_WORDS)
    texts = [slot for slot in header.tolist() if slot[SEQUENCE] and slot[GENERATION] < generation]
    if not texts:
        return None
    last = max(texts, key=lambda slot: slot[SEQUENCE])
    data = segment[last[OFFSET] : last[OFFSET] + last[NBYTES]]
    return msgspec.msgpack.decode(data.tobytes(), type=LedgerText)


def undo_of(segment: NDArray[np.uint8], entry: LedgerEntry) -> Undo:
    """Return the undo copy of a unit in a mapped segment."""
    size = entry.stop - entry.start

    def view(offset: int, count: int, dtype: np.dtype) -> Array:
        return segment[offset : offset + count * dtype.itemsize].view(dtype)

    first = [view(array, size, dtype_of(name)) for name, array, _ in entry.arrays]
    second = [view(copy, size, dtype_of(name)) for name, _, copy in entry.arrays]
    rows = view(entry.rows[0], entry.rows[1], np.dtype(np.int64)) if entry.rows[1] else None
    words = view(entry.journal, words_of(len(entry.contributors)), np.dtype(np.uint64))
    return Undo(first, second, memoryview(words), rows, entry.row_elements)  # type: ignore[arg-type]


def told_pushes(segment: NDArray[np.uint8], entry: LedgerEntry) -> Sequence[int]:
    """Return the number of each contributor's pushes that the server has announced in the unit's words."""
    words = segment[entry.words : entry.words + 8 * (1 + len(entry.contributors))].view(np.uint64)
    return [int(word) for word in words[1:]]


T = TypeVar("T")


class LastGeneration(Generic[T]):
    """A value as it was at the end of the last generation, for all attempts to begin the next one."""

    def __init__(self) -> None:
        self._value: T | None = None
        self._generation = -1

    def before(self, generation: int, now: T) -> T:
        """Return the value from before the first attempt to begin this generation.

        In the first attempt that is `now`.
        """
        if generation > self._generation or self._value is None:
            self._value, self._generation = now, generation
        return self._value

    def forget(self) -> None:
        """Drop the value, because the next generation has begun."""
        self._value = None


class NodeMemory:
    """The mapped memory of those servers of one generation that share this node and keep a ledger.

    Args:
        regions: Rank of a server -> where its ledger lies.
    """

    def __init__(self, regions: Mapping[int, Region] | None = None) -> None:
        # rank of a server -> its segment, and where its ledger lies in it
        self._mapped: dict[int, tuple[NDArray[np.uint8], Region]] = {}
        # rank of a server -> the file with the rows of its tables
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
                # The server is in another container: MPI can share memory with it, but we cannot map it.
                continue
        self._books: dict[tuple[int, int], LedgerText | None] = {}

    @property
    def ranks(self) -> list[int]:
        """The servers whose memory is mapped."""
        return list(self._mapped)

    def shelves(self, layout: Layout, generation: int) -> list[Shelf]:
        """Return what dead servers of this node had, if this is the lowest rank left on the node."""
        before = layout.before
        if before is None:
            return []
        found = []
        for rank in self._mapped:
            # the lowest rank that is left on the node of the server
            here = min(old for old in before.origin if before.nodes[old] == before.nodes[rank])
            if rank in before.lost and here == before.origin[layout.rank]:
                book = self._book(rank, generation)
                if book is not None:
                    units = self._holdings(rank, book, layout.asynchronous)
                    tables = [
                        holding_of_table(entry.card.table, attached(self._files[rank], entry), rank, rank)
                        for entry in book.tables
                    ]
                    found.append(Shelf(rank, False, book.settings, units, tables=tables))
        return found

    def journal(self, owner: int, table: str, generation: int) -> Journal:
        """Return the journal of a table of a server whose memory is mapped."""
        book = self._book(owner, generation)
        assert book is not None
        return attached(self._files[owner], next(entry for entry in book.tables if entry.card.table == table))

    def arrays_of(self, owner: int, index: int, before: bool, generation: int) -> list[Array]:
        """Return values and state of a unit of a mapped server. `before`: as of the round before the newest."""
        book = self._book(owner, generation)
        assert book is not None
        return undo_of(self._mapped[owner][0], book.units[index]).arrays_at(before)

    def _book(self, rank: int, generation: int) -> LedgerText | None:
        if (rank, generation) not in self._books:
            self._books[rank, generation] = read_ledger(*self._mapped[rank], generation)
        return self._books[rank, generation]

    def _holdings(self, rank: int, book: LedgerText, asynchronous: bool) -> list[Holding]:
        segment = self._mapped[rank][0]
        found = []
        for entry in book.units:
            undo = undo_of(segment, entry)
            standings = undo.standings()
            counts = undo.pushes(told_pushes(segment, entry)) if asynchronous else []
            if asynchronous:
                # In an asynchronous store the round of a unit is the largest number of pushes of any contributor.
                standings = [(max(counts, default=0), standings[0][1])]
            states = [dtype for dtype, _, _ in entry.arrays[1:]]
            pushes = list(zip(entry.contributors, counts))
            found.append(Holding(entry.key, entry.start, entry.stop, standings, undo.torn, states, pushes))
        return found


class UnitMemory:
    """The memory of a server's units.

    If there is a `ledger`, the store survives deaths, and each unit has an undo copy.
    """

    def __init__(self, ledger: Ledger | None) -> None:
        self.ledger = ledger

    def make(
        self, cards: Sequence[UnitCard], groups: Groups, adopted: Mapping[int, Unit] | None = None
    ) -> tuple[list[Unit], Created]:
        """Make units at round 0 for these cards, in their order. Also return where workers find them.

        Args:
            adopted: New number of a unit -> an old unit, whose values and state stay where they are.
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
        journals = _zeros(int(ends[-1]))
        units = []
        for index, (card, word) in enumerate(zip(cards, first_words, strict=True)):
            mine = memoryview(words[word : word + 1 + len(card.contributors)])  # type: ignore[arg-type]
            journal = memoryview(journals[ends[index] : ends[index + 1]])  # type: ignore[arg-type]
            old = adopted.get(card.number)
            kept: Undo | None = None
            if old is None:
                at, dtype = places[card.number], frames.dtype_of(card.dtype)
                stored = memory[at : at + (card.stop - card.start) * dtype.itemsize].view(dtype)
                if self.ledger is not None:
                    states = state_dtypes(groups.of(card.key), stored.dtype)
                    kept = undo.new(stored, card.row_elements, states, journal)
            else:
                stored, was = old.stored, old.undo
                # It gets words of its own, because the old ones must stay true until the next generation begins.
                if was is not None:
                    kept = Undo(was.arrays, was.copies, journal, was.rows, was.row_elements)
            unit = (Unit if kept is None else SurvivingUnit)(
                card.number,
                card.key,
                stored,
                mine,
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
        self, units: Iterable[Unit], settings: bytes, generation: int, tables: Sequence[TableEntry] = ()
    ) -> None:
        """Write into the ledger what this server has from `generation` on."""
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
        self.ledger.publish(LedgerText(entries, settings, list(tables)), generation)


def holding_of_unit(unit: Unit, asynchronous: bool) -> Holding:
    """Describe a unit of a living server."""
    stop = unit.start + unit.stored.size
    if unit.undo is not None and not asynchronous:
        standings = unit.undo.standings()
    else:
        round_ = max(unit.done, default=0) if asynchronous else unit.round
        standings = [(round_, unit.stands_at)]
    state = unit.undo.state if unit.undo is not None else unit.state or ()
    pushes = list(zip(unit.contributors, unit.done)) if asynchronous else []
    return Holding(unit.key, unit.start, stop, standings, unit.torn, dtype_names(state), pushes)


def arrays_of_unit(unit: Unit, before: bool) -> list[Array]:
    """Return values and state of a living server's unit. `before`: as of the round before the newest."""
    if unit.undo is not None:
        return unit.undo.arrays_at(before)
    return [unit.stored, *(unit.state or ())]


def _zeros(count: int) -> Array:
    words = arena.empty(max(count, 8), np.uint64)
    words[...] = 0
    return words


class SurvivingUnit(Unit):
    """A unit with an undo copy. Its values and state lie in memory that outlives the process."""

    undo: Undo

    def open_write(self, start: int = 0, stop: int = 0) -> None:
        """Begin to write a round, and keep the round before. Elements [start, stop) are written first."""
        super().open_write()
        self.undo.open()
        if start < stop:
            self.undo.keep_old(start, stop)

    def pass_round(self) -> None:
        """Begin a round that changes no values."""
        self.undo.open()

    def keep_old(self, start: int, stop: int) -> None:
        """Copy what is about to be written."""
        self.undo.keep_old(start, stop)

    def keep_old_rows(self, rows: NDArray[np.int64]) -> None:
        """Copy rows that are about to be written."""
        self.undo.keep_old_rows(rows)

    def give_up(self) -> None:
        """Go back to the last complete round."""
        self.go_back_to(self.undo.undo()[1])

    def go_back_to(self, step: int | None) -> None:
        """Set the optimizer's step to that of the stored values. None: there is no state yet."""
        self.state, self.step = (None, 0) if step is None else (self.undo.state, step)

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Set the optimizer, with memory for its state that outlives the process."""
        super().set_optimizer(optimizer)
        self.undo = with_state(self.undo, state_dtypes(optimizer, self.stored.dtype))

    def begin_state(self, state: State) -> None:
        """Begin with this state, in memory that outlives the process."""
        super().begin_state(self._in_its_memory(state))

    def put_state(self, state: State | None, step: int) -> None:
        """Replace the state. If the server is killed meanwhile, the unit has none."""
        self.undo.note_state(None)
        super().put_state(None if state is None else self._in_its_memory(state), step)
        self.undo.note_state(None if state is None else step)

    def note_overwrite(self, torn: bool) -> None:
        """Note an overwrite from outside, also in memory that outlives the process."""
        super().note_overwrite(torn)
        self.undo.note_overwrite(torn)

    def begin_at(self, round_: int, pushes: Sequence[int] | None, state: State | None, step: int, torn: bool) -> None:
        """Begin a generation at this round, and note it in memory that outlives the process."""
        super().begin_at(round_, pushes, state, step, torn)
        self.undo.begin_at(round_ if pushes is None else 0, self.stands_at, torn)

    def _in_its_memory(self, state: Sequence[Array]) -> State:
        for mine, given in zip(self.undo.state, state, strict=True):
            mine[...] = given
        return self.undo.state
