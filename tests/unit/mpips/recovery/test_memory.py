"""The ledger tells what the last generation had that began; what is read there are the server's own arrays."""

from __future__ import annotations

import os

import numpy as np
import pytest

from collectives import CollectiveError
from collectives.fabric import arena
from mpips.optimizers import SGD, Adam, Groups
from mpips.store.recovery import memory as ledger
from mpips.store.recovery import undo as undos
from mpips.store.recovery.memory import (
    SEQUENCE,
    SLOT_WORDS,
    SLOTS,
    LastGeneration,
    Ledger,
    LedgerText,
    NodeMemory,
    UnitMemory,
)
from mpips.store.server.sources import Elements
from mpips.store.server.state import SynchronousState
from mpips.store.transport.frames import UnitCard


def text(name):
    return LedgerText([], name.encode())


def read(one, generation):
    book = ledger.read_ledger(arena.segment(one.region), one.region, generation)
    return None if book is None else book.settings.decode()


def test_there_is_nothing_before_anything_is_published():
    assert read(Ledger(), 1) is None


def test_the_last_text_counts_and_what_is_for_an_generation_that_never_began_does_not():
    one = Ledger()
    for name in "abc":
        one.publish(text(name), 0)
        assert read(one, 1) == name
    for attempt in "de":
        one.attempt(1)
        one.publish(text(attempt), 1)
        assert (read(one, 1), read(one, 2)) == ("c", attempt)
    one.publish(text("f"), 1)
    assert read(one, 2) == "f"


@pytest.mark.parametrize("again", [False, True])
def test_an_end_in_the_middle_of_writing_leaves_the_older_text(again):
    one = Ledger()
    one.publish(text("older"), 0)
    if again:
        one.publish(text("old"), 0)
    words = one._slots
    slot = min(range(SLOTS), key=lambda slot: words[slot * SLOT_WORDS + SEQUENCE])
    words[slot * SLOT_WORDS + SEQUENCE] = 0  # as it is while a text is written
    assert read(one, 1) == ("old" if again else "older")


def test_memory_in_another_segment_is_refused():
    with pytest.raises(CollectiveError, match="more than one segment"):
        Ledger().offset(np.zeros(3))


def server(optimizer, **cards):
    """A server with these keys, of so many float32 elements, and its ledger."""
    one = Ledger()
    memory, groups = UnitMemory(one), Groups(optimizer)
    made = memory.make(
        [UnitCard(number, key, "float32", 0, size, 1, 4, (0,)) for number, (key, size) in enumerate(cards.items())],
        groups,
    )[0]
    state = SynchronousState(optimizers=groups)
    for unit in made:
        unit.stored[...] = 1
        state.create(unit)
    memory.publish(made, b"", 0)
    return one, memory, state


def test_what_is_read_are_the_servers_own_arrays():
    one, _, state = server(Adam(0.1), w=10, v=3, empty=0)
    for _ in range(2):
        for unit in state.units.values():
            state.pushed(unit, 0, Elements(np.full(unit.stored.size, 2, np.float32)), 0, 0.0)
        while state.work()[0]:
            pass
    book = ledger.read_ledger(arena.segment(one.region), one.region, 1)
    for entry, unit in zip(book.units, state.units.values(), strict=True):
        undo = ledger.undo_of(arena.segment(one.region), entry)
        assert undo.available_rounds() == [(2, 2), (1, 1)]
        mine = [unit.stored, *unit.state]
        assert all(np.array_equal(a, b) for a, b in zip(undo.arrays_at(False), mine, strict=True))
        undo.go_back()
        assert undo.available_rounds() == [(1, 1)]
        assert all(np.array_equal(a, b) for a, b in zip(undo.arrays_at(False), mine, strict=True))


@pytest.mark.parametrize("rows", [[1], [3, 0]])
def test_a_round_of_all_elements_can_be_undone_after_one_of_rows(rows):
    stored = np.arange(40, dtype=np.float32)
    undo = undos.new(stored, 4, [], memoryview(np.zeros(undos.words_of(1), np.uint64)))
    undo.open()
    undo.keep_old_rows(np.array(rows))
    stored.reshape(-1, 4)[rows] += 100
    undo.close(None)
    before = stored.copy()
    undo.open()
    undo.keep_old(0, len(stored))
    stored += 1000
    undo.close(None)
    assert np.array_equal(undo.arrays_at(True)[0], before)
    undo.go_back()
    assert np.array_equal(stored, before) and undo.available_rounds() == [(1, None)]


def test_another_optimizer_begins_anew_and_there_is_no_way_back():
    _, _, state = server(SGD(0.1, momentum=0.5), w=10)
    unit = state.units[0]
    state.pushed(unit, 0, Elements(np.ones(10, np.float32)), 0, 0.0)
    state.work()
    state.set_optimizer(Adam(0.1))
    assert unit.undo.available_rounds() == [(1, None)] and len(unit.undo.state) == 2
    state.pushed(unit, 0, Elements(np.ones(10, np.float32)), 0, 0.0)
    state.work()
    assert unit.undo.available_rounds() == [(2, 1), (1, None)]


@pytest.mark.parametrize("torn", [True, False])
def test_values_from_outside_leave_no_way_back(torn):
    _, _, state = server(None, w=10)
    unit = state.units[0]
    state.pushed(unit, 0, Elements(np.ones(10, np.float32)), 0, 0.0)
    state.work()
    unit.note_overwrite(torn)
    assert unit.undo.available_rounds() == [(1, None)] and unit.undo.torn == torn


def test_memory_of_a_process_that_cannot_be_mapped_is_not_there():
    region = arena.locate(arena.empty(8))._replace(inode=1, pid=os.getppid())
    assert NodeMemory({3: region}).ranks == []


def test_every_attempt_finds_what_was_there_before_the_first():
    last = LastGeneration()
    assert [last.get_or_save(1, "old"), last.get_or_save(1, "attempt"), last.get_or_save(1, "another")] == ["old"] * 3
    last.forget()
    assert last.get_or_save(2, "new") == "new"
    assert last.get_or_save(3, "newer") == "newer"  # nobody said that generation 2 has begun, but it has ended
