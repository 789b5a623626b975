"""The store's benchmark refuses what cannot be before any rank starts."""

from __future__ import annotations

import click
import pytest

from mpips.bench.__main__ import check

WORDS = {"kind": "dist_sync", "servers": 1, "clients": 1, "masters": "one", "arrays": "empty"}


def test_more_than_memory_holds_is_refused() -> None:
    assert check(2, sizes="1024", **WORDS).counts == [256]
    with pytest.raises(click.UsageError, match="--sizes 500000GB takes at least 2 arrays of 500,000,000,000,000 bytes"):
        check(2, sizes="500000GB", **WORDS)
