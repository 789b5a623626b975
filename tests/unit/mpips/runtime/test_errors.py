"""What a store raises when its generation has ended is also what a caller catches who knows Python's errors alone."""

from __future__ import annotations

import pytest

import mpips


@pytest.mark.parametrize("kind, others", [
    (mpips.StoreError, (mpips.CollectiveError, RuntimeError)),
    (mpips.StoreMismatchError, (mpips.StoreError, mpips.MismatchError, ValueError)),
    (mpips.StoreStallError, (mpips.StoreError, mpips.StallError, TimeoutError)),
])  # fmt: skip
def test_an_error_of_an_generation_is_one_of_collectives_and_of_python(kind, others) -> None:
    assert all(issubclass(kind, other) for other in others)
