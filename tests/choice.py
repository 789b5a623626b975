"""Which combinations of parameters `make test` runs: enough that any two values meet; all others are marked `full`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def crossed(*axes: Iterable[Any], strength: int = 2) -> list[Any]:
    """Every combination of the values of the axes, for `parametrize`. Those beyond a choice are marked `full`.

    In the choice any two values of different axes meet at least once; with `strength=1` each value is there at least
    once. A value that is a `pytest.param` brings its marks, and may stand for several arguments.
    """
    lists = [list(axis) for axis in axes]
    chosen = covering([len(values) for values in lists], strength)
    return [
        _joined([values[i] for values, i in zip(lists, row)], row in chosen)
        for row in product(*(range(len(values)) for values in lists))
    ]


def first(count: int, values: Iterable[Any]) -> list[Any]:
    """All values, for `parametrize`; those after the first `count` are marked `full`."""
    every = list(values)
    return [_joined([value], number < count) for number, value in enumerate(every)]


def covering(sizes: Sequence[int], strength: int) -> set[tuple[int, ...]]:
    """A small set of rows in which any `strength` columns hold every combination of their values.

    Column c holds numbers below sizes[c]. The same sizes always give the same rows.
    """
    columns = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    rows = sorted(product(*map(range, sizes)), key=lambda row: [(a - b) % n for a, b, n in zip(row, (0, *row), sizes)])
    missing = {(c, tuple(row[i] for i in c)) for row in rows for c in columns}
    chosen: set[tuple[int, ...]] = set()
    for new in range(len(columns), 0, -1):  # a greedy choice: first rows of which every pair is new, then others
        for row in rows:
            found = {(c, tuple(row[i] for i in c)) for c in columns} & missing
            if len(found) >= new:
                chosen.add(row)
                missing -= found
    return chosen


def _joined(values: Sequence[Any], chosen: bool) -> Any:
    """One `pytest.param` of several."""
    marks, arguments = [] if chosen else [pytest.mark.full], []
    for value in values:
        if isinstance(value, type(pytest.param())):
            marks += value.marks
            arguments += value.values
        else:
            arguments.append(value)
    return pytest.param(*arguments, marks=marks)
