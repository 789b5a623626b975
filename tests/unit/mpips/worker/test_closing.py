"""What a worker that closes says of its pushes, and who hears from it that another push never comes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from mpips.store.keys.key import Key
from mpips.store.worker import waiting as closing


def keys(**rounds: int) -> dict[str, Key]:
    return {name: Key(name, (3,), np.dtype(np.float32), round_) for name, round_ in rounds.items()}


def word(what: str, data: bytes) -> bytes:
    """What a rank brings to an `agree`, as it goes to the others."""
    return msgspec.msgpack.encode([what, [], "", False, data])


@pytest.mark.parametrize(
    "mine, name",
    [
        ({"a": 3, "b": 5}, ""),
        ({"a": 4, "b": 5}, "a"),
        ({"a": 3, "b": 7}, "b"),
        ({"new": 1}, ""),
    ],
)
def test_who_needs_another_push_is_told_whose(mine, name):
    words = [b"", word(closing.CLOSE, closing.pushes_of(keys(a=3, b=5, new=1)))]
    why = closing.waits_for_closed(words, keys(**mine))
    assert bool(why) == bool(name)
    assert not name or (f"pushes of key {name!r}" in why and why.startswith("rank 1 has closed the store"))


@pytest.mark.parametrize(
    "other",
    [
        b"",
        word("barrier", b"x"),
        msgspec.msgpack.encode(("", [b"", b"1"])),
        msgspec.msgpack.encode([3]),
        b"\xc1",
    ],
)
def test_words_of_other_calls_say_nothing(other):
    assert closing.waits_for_closed([other], keys(a=9)) == ""
