"""Every option of a table is an argument of `KVStore.table`, is compared between workers, and reaches the servers."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import mpips
from mpips.tables.make import _checked, card_of
from mpips.tables.messages import TableOptions

FIRST = TableOptions(4, "float16", mpips.uniform(0.5), "sgd", 1, mpips.chance(0.5), 3, 8)
OTHER = TableOptions(5, "bfloat16", mpips.uniform(0.25), "adam", 2, mpips.seen(2), 4, 9, "stochastic")
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
