"""What a store raises when its epoch has ended."""

from __future__ import annotations

from collectives.errors import KINDS, CollectiveError, MismatchError, StallError, kind_of


class EpochError(CollectiveError):
    """The epoch of a store has ended: every rank raises the same sentence, now and at every later call.

    `kv.recover()` begins the next epoch.
    """


class LostError(EpochError):
    """The store, or the training, cannot go on: what is left of it does not suffice. All raise it, and it is not tried
    again."""


class EpochMismatchError(EpochError, MismatchError):
    """The epoch has ended because ranks made calls that do not fit together."""


class EpochStallError(EpochError, StallError):
    """The epoch has ended because a wait exceeded `timeout_seconds`."""


_EPOCH_KINDS: tuple[type[EpochError], ...] = (EpochError, EpochMismatchError, EpochStallError)
assert len(_EPOCH_KINDS) == len(KINDS), "one for each kind that travels between ranks"


def of_kind(error: BaseException, text: str = "") -> EpochError:
    """The EpochError for an error of `collectives`, or of the store: with `text`, or else with its own sentence."""
    return _EPOCH_KINDS[kind_of(error)](text or str(error))
