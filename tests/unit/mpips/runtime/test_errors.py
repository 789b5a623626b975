"""What a store raises when its epoch has ended is also what a caller catches who knows Python's errors alone."""

from __future__ import annotations

import pytest

import mpips


@pytest.mark.parametrize("kind, others", [
    (mpips.EpochError, (mpips.CollectiveError, RuntimeError)),
    (mpips.EpochMismatchError, (mpips.EpochError, mpips.MismatchError, ValueError)),
    (mpips.EpochStallError, (mpips.EpochError, mpips.StallError, TimeoutError)),
])  # fmt: skip
def test_an_error_of_an_epoch_is_one_of_collectives_and_of_python(kind, others) -> None:
    assert all(issubclass(kind, other) for other in others)
