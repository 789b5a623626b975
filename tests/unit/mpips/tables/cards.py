"""Descriptions of tables for tests."""

from __future__ import annotations

from typing import Any

from mpips.tables.messages import MakeTable
from mpips.tables.row_optimizers import create, encode


def card_of(
    dim: int,
    dtype: str,
    optimizer: str = "sgd",
    key: int = 5,
    bound: float = 0.5,
    rate: float = 0.01,
    numbers: dict[str, Any] | None = None,
    **life: Any,
) -> MakeTable:
    """Describe table "t". `numbers`: of the optimizer. `life`: other fields, such as `evict`."""
    made = create(optimizer, {"learning_rate": rate, **(numbers or {})})
    return MakeTable("t", dim, dtype, key, bound, *encode(made), **life)
