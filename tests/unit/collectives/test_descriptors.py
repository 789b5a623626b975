"""What ranks bring, and how it is compared: `collectives.fabric.layout`."""

from __future__ import annotations

import numpy as np
import pytest

from collectives import CollectiveError, MismatchError
from collectives.fabric import layout
from collectives.fabric.layout import (
    DESCRIPTOR_BYTES,
    DESCRIPTORS,
    LAST_TOKEN,
    TEXT_BYTES,
    ArrayPlace,
    Descriptor,
    Descriptors,
)


@pytest.fixture
def ranks():
    """The descriptors of two ranks, 5 and 7 in the user's communicator."""
    areas = [np.zeros(DESCRIPTORS * DESCRIPTOR_BYTES, np.uint8) for _ in range(2)]
    return [Descriptors(areas, rank, (5, 7)) for rank in range(2)]


def attach(place):
    raise AssertionError("there is one array")


def test_a_card_is_read_as_it_was_put(ranks):
    places = ((ArrayPlace(1, 2, 3, 4, 5, 1 << 63), ArrayPlace(address=7)),)
    token = ranks[0].publish(Descriptor("reduce of 3 bytes äöü", places))
    read = ranks[1].read(0, token, attach)
    assert read.places == places and read.text == "reduce of 3 bytes äöü"
    assert read.places[0][0].shared and not read.places[0][1].shared


def test_the_places_of_many_arrays_lie_elsewhere(ranks):
    pairs = tuple((ArrayPlace(1, 2, 3, at, 8), ArrayPlace()) for at in range(5))
    many = np.array(pairs, np.int64)
    token = ranks[0].publish(Descriptor("many", pairs), many, ArrayPlace(9, 9, 9, 9, many.nbytes))
    found = ranks[1].read(0, token, lambda place: many.reshape(-1).view(np.uint8) if place.pid == 9 else None)
    assert found.places == pairs


def test_long_texts_that_are_the_same_are_the_same(ranks):
    text = "x" * (3 * TEXT_BYTES)
    tokens = [rank.publish(Descriptor(text)) for rank in ranks]
    for rank in ranks:
        rank.compare([rank.read(other, token, attach) for other, token in enumerate(tokens)])


def test_texts_that_differ_behind_what_a_card_holds_differ_on_all_ranks(ranks):
    texts = ["x" * TEXT_BYTES + end for end in "ab"]
    tokens = [rank.publish(Descriptor(text)) for rank, text in zip(ranks, texts)]
    told = []
    for rank in ranks:
        with pytest.raises(MismatchError, match="differ further on") as error:
            rank.compare([rank.read(other, token, attach) for other, token in enumerate(tokens)])
        told.append(str(error.value))
    assert told[0] == told[1] and "ranks 5, 7" in told[0]


def test_a_text_that_is_cut_within_a_letter_gives_one_sentence(ranks):
    texts = ["x" * (TEXT_BYTES - 1) + "ä", "y"]
    tokens = [rank.publish(Descriptor(text)) for rank, text in zip(ranks, texts)]
    told = set()
    for rank in ranks:
        with pytest.raises(MismatchError) as error:
            rank.compare([rank.read(other, token, attach) for other, token in enumerate(tokens)])
        told.add(str(error.value))
    assert len(told) == 1


@pytest.mark.parametrize("before", [0, 100, LAST_TOKEN - 3, LAST_TOKEN - DESCRIPTORS])
def test_a_card_stays_until_as_many_have_been_put_as_there_are_places(ranks, before):
    ranks[0].put = before
    token, put = ranks[0].publish(Descriptor("first")), ranks[0].put
    for number in range(DESCRIPTORS - 1):
        ranks[0].publish(Descriptor(f"{number}"))
    assert ranks[0].readable(put)
    assert ranks[1].read(0, token, attach).text == "first"
    ranks[0].publish(Descriptor("last"))
    assert not ranks[0].readable(put)
    reader = Descriptors(ranks[1]._areas, 1, (5, 7))
    with pytest.raises(CollectiveError, match="descriptor of rank 5 has been overwritten"):
        reader.read(0, token, attach)


def test_tokens_begin_anew_and_stand_for_the_new_cards(ranks):
    ranks[0].put = LAST_TOKEN - 2
    tokens = [ranks[0].publish(Descriptor(f"call {number}")) for number in range(4)]
    assert tokens == [LAST_TOKEN - 1, LAST_TOKEN, 1, 2]
    assert [ranks[1].read(0, token, attach).text for token in tokens] == [f"call {number}" for number in range(4)]


def test_a_token_that_has_come_round_is_not_taken_for_the_old_card(ranks, monkeypatch):
    monkeypatch.setattr(layout, "LAST_TOKEN", 2 * DESCRIPTORS)
    for number in range(5 * DESCRIPTORS):
        token = ranks[0].publish(Descriptor(f"call {number}"))
        assert ranks[1].read(0, token, attach).text == f"call {number}"
        assert ranks[0].read(0, token, attach).text == f"call {number}"


def test_what_is_known_of_others_does_not_grow(ranks):
    for number in range(3 * DESCRIPTORS):
        ranks[1].read(0, ranks[0].publish(Descriptor(f"call {number}")), attach)
    assert len(ranks[0]._known) <= DESCRIPTORS and len(ranks[1]._known) <= DESCRIPTORS
