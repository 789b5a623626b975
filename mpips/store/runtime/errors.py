"""What a store raises when its generation has ended."""

from __future__ import annotations

from collectives.errors import KINDS, CollectiveError, MismatchError, StallError, kind_of


class StoreError(CollectiveError):
    """The generation of a store has ended: every rank raises the same sentence, now and at every later call.

    `kv.recover()` begins the next generation.
    """


class LostError(StoreError):
    """The store, or the training, cannot go on: what is left of it does not suffice. All raise it, and it is not tried
    again."""


class StoreMismatchError(StoreError, MismatchError):
    """The generation has ended because ranks made calls that do not fit together."""


class StoreStallError(StoreError, StallError):
    """The generation has ended because a wait exceeded `timeout_seconds`."""


_GENERATION_KINDS: tuple[type[StoreError], ...] = (StoreError, StoreMismatchError, StoreStallError)
assert len(_GENERATION_KINDS) == len(KINDS), "one for each kind that travels between ranks"


def of_kind(error: BaseException, text: str = "") -> StoreError:
    """The StoreError for an error of `collectives`, or of the store: with `text`, or else with its own sentence."""
    return _GENERATION_KINDS[kind_of(error)](text or str(error))
