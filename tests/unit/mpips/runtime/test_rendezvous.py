"""What counts as a refusal at a meeting, and what as the end of a generation."""

from __future__ import annotations

import pytest

from mpips import StoreError
from mpips.store.runtime.rendezvous import attempt


def test_an_attempt_gives_the_value_or_the_refusal():
    assert attempt(lambda: 3) == (3, None)
    value, refusal = attempt(lambda: int("x"))
    assert value is None and isinstance(refusal, ValueError)
    with pytest.raises(StoreError):  # the end of a generation is no refusal
        attempt(lambda: (_ for _ in ()).throw(StoreError("over")))
