"""Every option of a table is an argument of `KVStore.table`, is compared between workers, and reaches the servers."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import mpips
from mpips.tables.make import _checked, card_of
from mpips.tables.messages import TableOptions

FIRST = TableOptions(4, "float16", mpips.uniform(0.5), "sgd", 1, mpips.chance(0.5), 3, 8, "count", "7d")
OTHER = TableOptions(5, "bfloat16", mpips.uniform(0.25), "adam", 2, mpips.seen(2), 4, 9, "score", 60, "stochastic")
STORE: Any = SimpleNamespace(
    layout=SimpleNamespace(num_servers=2), keys={}, collections={}, restored=SimpleNamespace(names=())
)


def test_the_options_are_the_arguments() -> None:
    words = list(inspect.signature(mpips.KVStore.table).parameters)
    assert words == ["self", "name", *TableOptions._fields, "options"]


@pytest.mark.parametrize("field", TableOptions._fields)
def test_another_value_of_an_option_makes_another_table(field: str) -> None:
    first, other = (
        _checked(STORE, "t", options, {}) for options in (FIRST, FIRST._replace(**{field: getattr(OTHER, field)}))
    )
    assert repr(getattr(first, field)) != repr(getattr(other, field))
    assert card_of("t", first) != card_of("t", other)


@pytest.mark.parametrize(
    "span, seconds",
    [("7d", 604_800), ("2w", 1_209_600), ("12h", 43_200), ("1.5m", 90), ("0.5s", 0.5), (3, 3), ("3", 3)],
)
def test_a_span_of_time_has_a_unit_or_is_in_seconds(span: Any, seconds: float) -> None:
    assert card_of("t", _checked(STORE, "t", FIRST._replace(evict_after=span), {})).evict_after == seconds * 10**6


@pytest.mark.parametrize("span", ["", "7x", "d", "-1d", 0, float("nan"), float("inf"), [7]])
def test_a_span_that_is_none_is_refused(span: Any) -> None:
    with pytest.raises(ValueError, match="give a time above 0, such as"):
        _checked(STORE, "t", FIRST._replace(evict_after=span), {})


def test_an_order_needs_a_limit() -> None:
    with pytest.raises(ValueError, match="evict_by='count' says which rows limit= drops first: give limit, too"):
        _checked(STORE, "t", FIRST._replace(limit=None), {})
    with pytest.raises(ValueError, match="evict_by='size': give 'age', 'count' or 'score'"):
        _checked(STORE, "t", FIRST._replace(evict_by="size"), {})
