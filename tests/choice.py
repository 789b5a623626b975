"""Decorators for tests with many parameters, which choose the combinations that `make test` runs.

The other combinations are marked `full`. As in `parametrize`, a name may stand for several parameters:
`pairwise(**{"kind, options": KINDS}, size=[1, 3])`. A value may be a `pytest.param` with marks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = tuple[int, ...]


def pairwise(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Run the test with every combination of values. `make test` covers every pair of values of two parameters."""
    return _parametrize(axes, lambda sizes: covering(sizes, 2))


def once(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Run the test with every combination of values. `make test` covers every single value."""
    return _parametrize(axes, lambda sizes: covering(sizes, 1))


def first(count: int, /, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Run the test with every combination of values. `make test` runs the first `count` combinations."""
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
    """Join several `pytest.param` into one. Mark it `full` unless it is `chosen`."""
    marks = [mark for param in params for mark in param.marks]
    arguments = [value for param in params for value in param.values]
    return pytest.param(*arguments, marks=marks if chosen else [*marks, pytest.mark.full])


def covering(sizes: Sequence[int], strength: int) -> set[Row]:
    """Return a small set of rows in which any `strength` columns have every combination of their values.

    Column c has the numbers below sizes[c]. The result depends only on the arguments. The choice is greedy: it goes
    through all rows in the order of a Latin square, and takes first those rows in which the most combinations are new.
    """
    columns = list(combinations(range(len(sizes)), min(strength, len(sizes))))
    rows = sorted(product(*map(range, sizes)), key=lambda row: [(a - b) % n for a, b, n in zip(row, (0, *row), sizes)])
    missing = {(c, tuple(row[i] for i in c)) for row in rows for c in columns}
    chosen: set[Row] = set()
    for new in range(len(columns), 0, -1):
        for row in rows:
            new_combinations = {(c, tuple(row[i] for i in c)) for c in columns} & missing
            if len(new_combinations) >= new:
                chosen.add(row)
                missing -= new_combinations
    return chosen
