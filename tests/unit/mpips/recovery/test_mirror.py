"""What a mirror keeps: the last two complete versions of each unit, whatever is cut off."""

from __future__ import annotations

import numpy as np

from mpips.store.recovery.membership import Before
from mpips.store.recovery.mirror import MirroredUnits, VersionSent
from mpips.store.recovery.plan import UnitCopy, copies_of
from mpips.store.recovery.undo import AvailableRound

PLACE = ("w", 3, 10)
BEFORE = Before((0, 1, 2), (3,), 2, 2, (0, 1, 2, 3), ((0, 1), (1, 2)), (0, 1))
"""Server rank 3 has died; this is server rank 2."""


def sent(round_, continues=True, step=None, dtypes=("float32",), torn=False, place=PLACE):
    rounds = [AvailableRound(round_, step), *([AvailableRound(round_ - 1, None)] if continues else [])]
    return VersionSent(round_, UnitCopy(*place, rounds, torn, list(dtypes[1:])), list(dtypes), [])


def put(copies, message, value, generation=0):
    """A version comes, whole."""
    copy = copies.of((message.unit.key, message.unit.start, message.unit.stop))
    arrays = copy.allocate(message)
    for array in arrays:
        array[...] = value
    copy.add_version(message, arrays, generation)


def found(copies):
    """By place, each round with its first element."""
    owners = copies.owners(BEFORE, 2)
    return {
        (unit.key, unit.start, unit.stop): {
            round_: float(copies.arrays_of(index, bool(before))[0][0]) for before, (round_, _) in enumerate(unit.rounds)
        }
        for owner in owners
        for index, unit in enumerate(owner.units)
    }


def test_the_last_two_rounds_can_be_had():
    copies = MirroredUnits()
    for round_ in range(1, 5):
        put(copies, sent(round_), round_)
        assert found(copies) == {PLACE: {n: float(n) for n in range(max(1, round_ - 1), round_ + 1)}}


def test_a_version_that_is_cut_off_leaves_the_last_whole_one():
    copies = MirroredUnits()
    for round_ in range(1, 4):
        put(copies, sent(round_), round_)
    for array in copies.of(PLACE).allocate(sent(4)):
        array[...] = 99
    assert found(copies) == {PLACE: {3: 3.0}}


def test_two_versions_need_the_memory_of_two():
    copies, seen = MirroredUnits(), set()
    for round_ in range(1, 9):
        put(copies, sent(round_, continues=round_ > 4), round_)
        seen.add(copies.of(PLACE).versions[0].arrays[0].ctypes.data)
    assert len(seen) == 2


def test_there_is_no_way_back_over_values_from_outside():
    copies = MirroredUnits()
    put(copies, sent(1), 1)
    put(copies, sent(2), 2)
    put(copies, sent(2, continues=False, torn=True), 7)
    assert found(copies) == {PLACE: {2: 7.0}}
    assert copies.owners(BEFORE, 2)[0].units[0].torn


def test_state_begins_and_ends():
    copies = MirroredUnits()
    put(copies, sent(1), 1)
    put(copies, sent(2, step=1, dtypes=["float32", "float64"]), 2)
    (unit,) = copies.owners(BEFORE, 2)[0].units
    assert unit.rounds == [(2, 1), (1, None)] and unit.states == ["float64"]
    assert [len(copies.arrays_of(0, before)) for before in (False, True)] == [2, 1]


def test_copies_are_offered_where_a_server_has_died():
    copies = MirroredUnits()
    assert copies.owners(BEFORE, 2) == []
    put(copies, sent(1), 1)
    (owner,) = copies.owners(BEFORE, 2)
    assert owner.owner == copies_of(2) < 0 and owner.is_mirror and not owner.live
    assert copies.owners(BEFORE._replace(lost=(1,)), 2) == copies.owners(None, 2) == []


def test_in_the_next_generation_copies_stay_until_all_is_sent_anew():
    copies, other, gone = MirroredUnits(), ("v", 0, 5), ("u", 0, 5)
    for place in (PLACE, other, gone):
        for round_ in (1, 2, 3):
            put(copies, sent(round_, place=place), round_)
    copies.begin({"w": 2, "v": 3})
    assert found(copies) == {PLACE: {2: 2.0}, other: {3: 3.0}}
    put(copies, sent(3), 8, generation=1)
    assert found(copies) == {PLACE: {3: 8.0, 2: 2.0}, other: {3: 3.0}}
    copies.drop_before(1)
    assert found(copies) == {PLACE: {3: 8.0, 2: 2.0}}


def test_asynchronous_copies_have_no_history_to_be_of():
    copies = MirroredUnits()
    put(copies, sent(5, continues=False), 5)
    copies.begin(None)
    assert found(copies) == {PLACE: {5: 5.0}}


def test_what_nobody_uses_is_forgotten():
    copies = MirroredUnits()
    put(copies, sent(1), 1)
    copies.forget([PLACE, ("never", 0, 1)])
    assert found(copies) == {} and np.size(copies.of(PLACE).allocate(sent(1))[0]) == 7
