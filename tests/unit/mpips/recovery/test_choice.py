"""At which round keys stand, and from whose memory: whole keys, one round for all of them, the living first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpips.store.recovery.plan import Holding, KeyCard, Shelf, copies_of, find, parts_by_server

SIZE = 10


def shelf(owner, *units, live=True):
    return Shelf(owner, live, b"", list(units))


def unit(start, stop, *rounds, key="w", torn=False):
    return Holding(key, start, stop, [(round_, round_) for round_ in rounds], torn, [])


def found(*shelves, names="w", size=SIZE, synchronous=True):
    cards = [KeyCard(name, (size,), "float32") for name in names]
    return find(cards, [size] * len(cards), shelves, synchronous)


def test_shards_that_were_a_round_further_go_back():
    seen = found(shelf(4, unit(0, 6, 3, 2)), shelf(5, unit(6, 10, 2), live=False))
    assert seen.step == 2 and seen.keys["w"].round == 2 and not seen.keys["w"].torn
    assert [(part.owner, part.before) for part in seen.keys["w"].parts] == [(4, True), (5, False)]


def test_all_keys_go_back_to_one_step():
    seen = found(shelf(4, unit(0, 10, 3, 2), unit(0, 10, 2, 1, key="v"), unit(0, 10, 0, key="u")), names="wvu")
    assert seen.step == 2
    assert {name: one.round for name, one in seen.keys.items()} == {"w": 2, "v": 2, "u": 0}


def test_a_first_step_that_was_not_made_by_all_keys_begins_anew():
    seen = found(shelf(4, unit(0, 10, 1, 0), unit(0, 10, 0, key="v")), names="wv")
    assert seen.step == 0 and {one.round for one in seen.keys.values()} == {0}


def test_keys_that_cannot_stand_at_one_step_stand_at_their_own():
    seen = found(shelf(4, unit(0, 10, 9, 8), unit(0, 10, 2, 1, key="v")), names="wv")
    assert seen.step is None and {name: one.round for name, one in seen.keys.items()} == {"w": 9, "v": 2}


def test_a_key_without_a_common_round_is_torn():
    seen = found(shelf(4, unit(0, 6, 5, 4)), shelf(5, unit(6, 10, 2, 1)))
    assert seen.keys["w"].torn and seen.keys["w"].round == 5 and seen.step is None
    assert not any(part.before for part in seen.keys["w"].parts)


def test_a_key_of_which_a_part_is_nowhere_is_lost():
    seen = found(shelf(4, unit(0, 6, 5), unit(0, 10, 5, key="v")), names="wv")
    assert seen.lost == ["w"] and list(seen.keys) == ["v"]


def test_asynchronous_shards_stand_each_at_its_own():
    seen = found(shelf(4, unit(0, 6, 5)), shelf(5, unit(6, 10, 2)), synchronous=False)
    assert seen.keys["w"].round == 5 and not seen.keys["w"].torn and seen.step is None


def test_an_empty_key_is_had_from_anybody():
    seen = found(shelf(4, unit(0, 0, 1)), size=0)
    assert seen.keys["w"].parts[0].owner == 4 and seen.keys["w"].round == 1


def test_where_keys_lay_is_told_by_server():
    seen = found(shelf(4, unit(0, 3, 1), unit(3, 6, 1)), shelf(5, unit(6, 10, 1)))
    assert parts_by_server(seen.keys, 4) == {"w": [(0, 0, 6), (1, 6, 10)]}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 10), st.integers(0, 2), st.booleans()), max_size=9))
def test_parts_cover_the_key_once_and_the_living_give_what_they_have(units):
    shelves = [
        shelf(owner, unit(start, min(SIZE, start + length), round_), live=live)
        for owner, (start, length, round_, live) in enumerate(units)
    ]
    seen = found(*shelves)
    if "w" not in seen.keys:
        return
    chosen = seen.keys["w"]
    assert [part.start for part in chosen.parts] == [0, *(part.stop for part in chosen.parts)][:-1]
    assert chosen.parts[-1].stop == SIZE
    for part in chosen.parts:
        (holding,) = shelves[part.owner].units
        assert holding.start <= part.start < part.stop <= holding.stop
        assert chosen.torn or holding.standings[0][0] == chosen.round
        here = [one for one in shelves if one.live and one.units[0].start <= part.start < one.units[0].stop
                and (chosen.torn or one.units[0].standings[0][0] == chosen.round)]  # fmt: skip
        assert shelves[part.owner].live or not here


def test_copies_count_only_where_servers_own_memory_is_not_all_there():
    copies = shelf(copies_of(5), unit(0, 6, 3, 2), live=False)
    seen = found(shelf(4, unit(0, 6, 3, 2), live=False), shelf(5, unit(6, 10, 3, 2)), copies)
    assert seen.step == 3 and [part.owner for part in seen.keys["w"].parts] == [4, 5]
    seen = found(shelf(5, unit(6, 10, 4, 3)), copies)
    assert seen.step == 3
    assert [(part.owner, part.before) for part in seen.keys["w"].parts] == [(copies_of(5), False), (5, True)]
    assert found(copies).lost == ["w"]


def test_the_newest_of_two_copies_counts_where_there_are_no_rounds():
    old, new = shelf(copies_of(5), unit(0, 10, 3), live=False), shelf(copies_of(6), unit(0, 10, 4), live=False)
    for shelves in [(old, new), (new, old)]:
        seen = found(*shelves, synchronous=False)
        assert seen.keys["w"].round == 4 and [part.owner for part in seen.keys["w"].parts] == [copies_of(6)]
