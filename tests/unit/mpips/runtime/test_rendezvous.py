"""What ranks raise when they bring unlike things to a meeting: `mpips.store.runtime.rendezvous`."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from mpips import StoreError
from mpips.store.runtime.rendezvous import agree, attempt


class Table:
    """Ranks that come to a meeting one after the other, and then one that finds all words there."""

    def __init__(self, *ranks):
        self.words, self.full = [], False
        for what, items, refusal, *data in ranks:
            with contextlib.suppress(EOFError):
                agree(self, what, items, refusal, data=b"".join(data))
        self.full = True

    def meet(self, payload, what, everybody=False):
        if self.full:
            return self.words
        self.words.append(payload)
        raise EOFError


A, B = [("a", "float32(3,)")], [("b", "float32(3,)")]


@pytest.mark.parametrize(
    "ranks, error, sentence",
    [
        ([("init", A, None), ("init", B, None)], ValueError, "init: rank 0 gives key 'a', rank 1 key 'b' in its place"),
        (
            [("init", A, None), ("init", [("a", "int8(3,)")], None)],
            ValueError,
            "init: key 'a' is float32(3,) on rank 0 and int8(3,) on rank 1",
        ),
        ([("init", A, None), ("init", A + B, None)], ValueError, "init: rank 0 gives 1 keys, rank 1 gives 2"),
        (
            [("init", [], None), ("barrier", [], None)],
            ValueError,
            "rank 0 calls init, rank 1 calls barrier: all make this call together",
        ),
        ([("init", A, None), ("init", [], ValueError("no"))], ValueError, "rank 1: no"),
        ([("init", A, None), ("init", [], ValueError())], ValueError, "rank 1: ValueError"),
        ([("init", [], TypeError("no"))] * 2, TypeError, "no"),
        ([("init", [], TypeError("no")), ("init", [], ValueError("nor this"))], ValueError, "rank 0: no"),
        (
            [("init", [(1, "x")], None), ("init", [("1", "x")], None)],
            ValueError,
            "init: rank 0 gives key 1, rank 1 key '1' in its place",
        ),
    ],
)
def test_all_raise_one_sentence_where_ranks_differ(ranks, error, sentence):
    with pytest.raises(error) as caught:
        agree(Table(*ranks), "anything")
    assert str(caught.value) == sentence and caught.value.of_caller and type(caught.value) is error


def test_ranks_that_agree_learn_the_data_of_all():
    table = Table(("save", A, None, b"x"), ("save", A, None), ("save", A, None, b"zz"))
    assert agree(table, "save", A) == [b"x", b"", b"zz"]
    assert msgspec.msgpack.decode(table.words[0])[0] == "save"  # no pickle


def test_an_attempt_gives_the_value_or_the_refusal():
    assert attempt(lambda: 3) == (3, None)
    value, refusal = attempt(lambda: int("x"))
    assert value is None and isinstance(refusal, ValueError)
    with pytest.raises(StoreError):  # the end of a generation is no refusal
        attempt(lambda: (_ for _ in ()).throw(StoreError("over")))
