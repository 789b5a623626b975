"""A unit is copied between two updates, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from mpips.store.remote.transfers import TRIES, snapshot


class Words:
    """A word that is another one at every look; the last of them stays."""

    def __init__(self, *values: int) -> None:
        self._values = list(values)

    def __getitem__(self, index: int) -> int:
        assert index == 0
        return self._values.pop(0) if len(self._values) > 1 else self._values[0]


@pytest.mark.parametrize(
    "values, good",
    [((4,), True), ((4, 5, 6), True), ((5, 6), True), ((5,), False), (tuple(range(0, 4 * TRIES, 2)), False)],
)
def test_a_copy_counts_where_no_update_came_meanwhile(values: tuple[int, ...], good: bool) -> None:
    out = np.zeros(3)
    assert snapshot(Words(*values), np.ones(3), out) == good
    assert not good or (out == 1).all()
