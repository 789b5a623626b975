"""Combinations of parameters: any two values meet in what `make test` runs, and `make test-all` has all."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.choice import covering, first, once, pairwise


def chosen(params):
    return [param.values for param in params if "full" not in {mark.name for mark in param.marks}]


@pytest.mark.parametrize("sizes", [(6, 6), (13, 2, 3, 3), (2, 2, 2, 2), (9, 5, 5), (4,)])
def test_any_two_values_meet_in_few_rows(sizes):
    rows = covering(sizes, 2)
    for columns in combinations(range(len(sizes)), 2):
        met = {tuple(row[column] for column in columns) for row in rows}
        assert met == set(product(*(range(sizes[column]) for column in columns)))
    assert len(rows) <= 1.5 * prod(sorted(sizes)[-2:])


@pytest.mark.parametrize("sizes", [(6, 6), (13, 2, 3, 3), (4,)])
def test_each_value_is_there_once_at_least(sizes):
    rows = covering(sizes, 1)
    assert all({row[column] for row in rows} == set(range(size)) for column, size in enumerate(sizes))
    assert len(rows) == max(sizes)


def test_all_combinations_are_there_and_those_beyond_the_choice_are_marked():
    decorator = pairwise(a="ab", b=range(3), c=[True, False])
    names, params = decorator.args
    assert names == "a,b,c"
    assert {param.values for param in params} == set(product("ab", range(3), [True, False]))
    assert len(chosen(params)) == 6
    assert pairwise(a="ab", b=range(3), c=[True, False]) == decorator, "the same every time"
    assert len(chosen(once(a="ab", b=range(3)).args[1])) == 3


def test_one_name_may_be_several_and_a_value_may_bring_marks():
    names, params = pairwise(**{"a, b": [("a", 1)]}, c=[pytest.param("x", marks=pytest.mark.gpu), "y"]).args
    assert names == "a, b,c"
    assert [param.values for param in params] == [("a", 1, "x"), ("a", 1, "y")]
    assert [[mark.name for mark in param.marks] for param in params] == [["gpu"], []]


def test_the_first_values_stay():
    _, params = first(2, a=range(4)).args
    assert chosen(params) == [(0,), (1,)]
    assert len(params) == 4
