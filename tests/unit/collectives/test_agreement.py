"""Ranks that bring different calls or things are told apart, and one sentence says in what they differ."""

from __future__ import annotations

import doctest

import pytest

from collectives import agreement
from collectives.agreement import describe_calls, difference

ONE, TWO = [("a", "1"), ("b", "2")], [("b", "2"), ("a", "1")]


def test_the_examples_give_what_they_say():
    assert doctest.testmod(agreement, optionflags=doctest.NORMALIZE_WHITESPACE) == (0, 2)


@pytest.mark.parametrize(
    ("every", "sentence"),
    [
        ({}, ""),
        ({0: ONE}, ""),
        ({0: ONE, 1: ONE, 2: ONE}, ""),
        ({0: ONE, 1: ONE, 2: [("a", "1"), ("b", "3")]}, "b is 2 on rank 0 and 3 on rank 2"),
        ({7: ONE, 5: [("a", "0"), ("b", "2")]}, "a is 0 on rank 5 and 1 on rank 7"),
        ({0: ONE, 1: ONE[:1]}, "b is 2 on rank 0 and missing on rank 1"),
        ({0: ONE[1:], 1: ONE}, "a is missing on rank 0 and 1 on rank 1"),
        ({0: ONE, 1: TWO}, "rank 0 has a where rank 1 has b"),
        ({0: [*ONE, ("c", "1")], 1: [*ONE, ("d", "1")]}, "rank 0 has c where rank 1 has d"),
        ({0: [], 1: ONE}, "a is missing on rank 0 and 1 on rank 1"),
    ],
)
def test_the_first_difference_is_described(every, sentence):
    assert difference(every) == sentence


def test_ranks_with_one_call_are_named_together():
    calls = {2: "a of 3", 1: "a of 4", 0: "a of 3"}
    assert describe_calls(calls).startswith("ranks 0, 2 call a of 3; rank 1 calls a of 4: ")


def test_calls_whose_beginnings_are_equal_differ_further_on():
    assert (
        describe_calls({0: "x", 1: "x"})
        == "ranks 0, 1 call x (the calls differ further on): let all ranks make the same call"
    )
