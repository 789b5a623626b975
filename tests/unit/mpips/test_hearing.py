"""What a worker raises of what servers say has failed, whenever it hears it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from collectives.errors import CollectiveError, StallError
from mpips.hearing import Hearing
from mpips.keys import Key, Part
from mpips.messages import FRAME, Frame, Op


class Spoken:
    """A line on which the test speaks for the server."""

    local = True

    def __init__(self):
        self.frames, self.texts, self.refused = [], {}, []

    def fails(self, round_, text, timed_out=False, unit=0):
        fields = dict.fromkeys(Frame._fields, 0) | {"op": Op.FAILED, "unit": unit, "round": round_}
        fields["flags"] = int(timed_out)
        self.texts[len(self.texts)] = text
        self.frames.append(FRAME.pack(*Frame(**(fields | {"token": len(self.texts) - 1}))))

    def waiting(self):
        return bool(self.frames)

    def read(self):
        frames, self.frames = self.frames, []
        return frames

    def body(self, frame):
        return self.texts[frame.token].encode()

    def post_body(self, body, op, unit, round_):
        self.refused.append((op, unit, round_, body.decode()))


@pytest.fixture
def store():
    line = Spoken()
    hearing = Hearing(SimpleNamespace(rank=0, num_servers=1, groups=lambda: [[0]]), [line])
    part = Part(0, 0, 0, 5, line, (0, 1), 5, 1)
    key = Key("w", (5,), np.dtype(float), [part], [part])
    hearing.add(key)
    return hearing, key, line


def first_of_two_failed(store):
    """Two rounds have begun; the first has failed, and was raised."""
    hearing, key, line = store
    hearing.begin(key)
    hearing.begin(key)
    line.fails(1, "first\0call 1")
    with pytest.raises(CollectiveError, match="first"):
        hearing.check(key)
    return store


def test_an_error_stands_for_all_rounds_so_far_whenever_the_others_fail(store):
    hearing, key, line = first_of_two_failed(store)
    line.fails(2, "second\0call 2")
    hearing.begin(key)
    hearing.check(key)
    line.fails(3, "third\0call 3")
    with pytest.raises(CollectiveError, match="third"):
        hearing.check(key)


def test_a_push_that_raises_stands_for_what_failed_before_too(store):
    hearing, key, line = store
    hearing.begin(key)
    line.fails(1, "first\0call 1")
    hearing.begin(key)
    hearing.check(key, key.round)  # it comes to its own round
    line.fails(2, "second\0call 2")
    with pytest.raises(CollectiveError, match="first"):
        hearing.check(key, key.round)
    hearing.check(key)


def test_a_round_that_has_waited_too_long_is_raised_by_a_later_push(store):
    hearing, key, line = first_of_two_failed(store)
    line.fails(2, "has waited", timed_out=True)
    hearing.begin(key)
    with pytest.raises(StallError, match="has waited"):
        hearing.check(key, key.round)


@pytest.mark.parametrize("heard_first", [True, False])
def test_what_the_same_bad_call_made_fail_is_withdrawn_with_its_sentence(store, heard_first):
    """Of another key, on a server that may not have heard of the bad call yet and tells the others what it hears."""
    hearing, key, line = store
    part = Part(1, 0, 0, 5, line, (0, 1), 5, 1)
    other = Key("v", (5,), np.dtype(float), [part], [part])
    hearing.add(other)
    hearing.begin(key)
    hearing.begin(other)
    line.fails(1, "bad\0call 1")
    if heard_first:
        line.fails(1, "bad\0call 1", unit=1)
    with pytest.raises(CollectiveError, match="bad"):
        hearing.check(key)
    if not heard_first:
        line.fails(1, "bad\0call 1", unit=1)
    hearing.listen()
    hearing.withdraw(other, 1, [part])
    assert line.refused == [(Op.REFUSE, 1, 1, "bad\0call 1")]
