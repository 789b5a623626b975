"""What ranks raise when they bring unlike things to a meeting: `mpips.store.runtime.rendezvous`."""

from __future__ import annotations

import contextlib

import msgspec
import pytest

from mpips import StoreError
from mpips.store.runtime import rendezvous


class Table:
    """Ranks that come to a meeting, one after the other."""

    def __init__(self, ranks):
        self.words = []
        for what, items, refusal in ranks:
            with contextlib.suppress(EOFError):
                rendezvous.agree(self, what, items, refusal)

    def meet(self, payload, what, everybody=False):
        self.words.append(payload)
        raise EOFError


class Full:
    """A meeting to which all have come."""

    def __init__(self, words):
        self.words = words

    def meet(self, payload, what, everybody=False):
        return self.words


def met(*ranks):
    """What a rank hears that meets these."""
    rendezvous.agree(Full(Table(ranks).words), "anything")


A, B = [("a", "float32(3,)")], [("b", "float32(3,)")]


@pytest.mark.parametrize(
    "ranks, error, sentence",
    [
        ([("init", A, None), ("init", B, None)], ValueError, "init: rank 0 gives key 'a', rank 1 key 'b' in its place"),
        ([("init", A, None), ("init", [("a", "int8(3,)")], None)], ValueError,
         "init: key 'a' is float32(3,) on rank 0 and int8(3,) on rank 1"),
        ([("init", A, None), ("init", A + B, None)], ValueError, "init: rank 0 gives 1 keys, rank 1 gives 2"),
        ([("init", [], None), ("barrier", [], None)], ValueError,
         "rank 0 calls init, rank 1 calls barrier: all make this call together"),
        ([("init", A, None), ("init", [], ValueError("no"))], ValueError, "rank 1: no"),
        ([("init", [], TypeError("no"))] * 2, TypeError, "no"),
        ([("init", [], TypeError("no")), ("init", [], ValueError("nor this"))], ValueError, "rank 0: no"),
        ([("init", [(1, "x")], None), ("init", [("1", "x")], None)], ValueError,
         "init: rank 0 gives key 1, rank 1 key '1' in its place"),
    ],
)  # fmt: skip
def test_what_differs_is_one_sentence(ranks, error, sentence):
    with pytest.raises(error) as caught:
        met(*ranks)
    assert str(caught.value) == sentence and caught.value.of_caller and type(caught.value) is error


def test_ranks_that_agree_learn_the_data_of_all():
    table = Table([])
    for data in (b"x", b"", b"zz"):
        with pytest.raises(EOFError):
            rendezvous.agree(table, "save", A, data=data)
    assert rendezvous.agree(Full(table.words), "save", A) == [b"x", b"", b"zz"]


def test_an_attempt_gives_the_value_or_the_refusal():
    assert rendezvous.attempt(lambda: 3) == (3, None)
    value, refusal = rendezvous.attempt(lambda: int("x"))
    assert value is None and isinstance(refusal, ValueError)


def test_the_end_of_an_generation_is_no_refusal():
    def ended():
        raise StoreError("over")

    with pytest.raises(StoreError):
        rendezvous.attempt(ended)


def test_an_error_without_words_has_a_name():
    with pytest.raises(ValueError, match="rank 1: ValueError"):
        met(("init", A, None), ("init", [], ValueError()))


def test_words_are_no_pickles():
    table = Table([("init", A, None)])
    assert msgspec.msgpack.decode(table.words[0])[0] == "init"
