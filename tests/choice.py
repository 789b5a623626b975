"""Which combinations of parameters `make test` runs: enough that any two values meet; all others are marked `full`.

A name may stand for several parameters, as in `parametrize`: `pairwise(**{"kind, options": KINDS}, size=[1, 3])`. A
value that is a `pytest.param` brings its marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Every combination of these parameters. In `make test` any two values of two of them meet at least once."""
    return _parametrize(axes, lambda sizes: covering(sizes, 2))


def once(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Every combination of these parameters. In `make test` each value is there at least once."""
    return _parametrize(axes, lambda sizes: covering(sizes, 1))


def first(count: int, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Every combination of these parameters. In `make test` the first `count` of them."""
    return _parametrize(axes, lambda sizes: set([*product(*map(range, sizes))][:count]))


def _parametrize(axes: Mapping[str, Iterable[Any]], choice: Callable[[list[int]], set[Row]]) -> pytest.MarkDecorator:
    lists = [[_param(value, "," in name) for value in values] for name, values in axes.items()]
    sizes = [len(values) for values in lists]
    chosen = choice(sizes)
    rows = product(*map(range, sizes))
    params = [_joined([values[i] for values, i in zip(lists, row)], row in chosen) for row in rows]
    return pytest.mark.parametrize(",".join(axes), params)


def _param(value: Any, several: bool) -> Any:
    if isinstance(value, type(pytest.param())):
        return value
    return pytest.param(*value) if several else pytest.param(value)


def _joined(params: Sequence[Any], chosen: bool) -> Any:
    """One `pytest.param` of several."""
    marks = [mark for param in params for mark in param.marks]
    arguments = [value for param in params for value in param.values]
    return pytest.param(*arguments, marks=marks if chosen else [*marks, pytest.mark.full])


def covering(sizes: Sequence[int], strength: int) -> set[Row]:
    """A small set of rows in which any `strength` columns hold every combination of their values.

    Column c holds numbers below sizes[c]. The same sizes always give the same rows. The choice is greedy: first rows of
    which every combination is new, in the order of a Latin square, then others.
    """
    columns = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    rows = sorted(product(*map(range, sizes)), key=lambda row: [(a - b) % n for a, b, n in zip(row, (0, *row), sizes)])
    missing = {(c, tuple(row[i] for i in c)) for row in rows for c in columns}
    chosen: set[Row] = set()
    for new in range(len(columns), 0, -1):
        for row in rows:
            found = {(c, tuple(row[i] for i in c)) for c in columns} & missing
            if len(found) >= new:
                chosen.add(row)
                missing -= found
    return chosen
