"""What a store raises when its epoch has ended: `mpips.runtime.errors`."""

from __future__ import annotations

import pytest

import mpips
from collectives import CollectiveError, MismatchError, StallError
from mpips.runtime.errors import of_kind


@pytest.mark.parametrize(
    "error, kind, others",
    [
        (CollectiveError("x"), mpips.EpochError, (CollectiveError, RuntimeError)),
        (MismatchError("x"), mpips.EpochMismatchError, (MismatchError, ValueError)),
        (StallError("x"), mpips.EpochStallError, (StallError, TimeoutError)),
        (KeyError("x"), mpips.EpochError, ()),
    ],
)
def test_an_error_of_collectives_is_an_epoch_error_of_its_kind(error, kind, others):
    made = of_kind(error)
    assert type(made) is kind and str(made) == str(error) and isinstance(made, (mpips.EpochError, *others))
    assert type(of_kind(made)) is kind and str(of_kind(made, "y")) == "y"
    assert all(isinstance(made, other) for other in others)
