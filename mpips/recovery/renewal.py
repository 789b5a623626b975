"""How the next epoch of a store begins: with all ranks, or with none.

All say first that they go on (`runtime.parting`). Where the store survives deaths, it goes on with the ranks that live.
One may die meanwhile: then all is put back, and tried again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from collectives.errors import CollectiveError, StallError
from collectives.network.drain import sweep
from mpips.recovery.shrink import DONE, FAILED, attempt
from mpips.runtime.breaking import uninterrupted
from mpips.runtime.epoch import FREEING_SECONDS, Epoch
from mpips.runtime.errors import EpochError, LostError, of_kind
from mpips.runtime.parting import NEVER

T = TypeVar("T")


def renew(epoch: Epoch, rebuild: Callable[[], T], grow: bool = False) -> T | None:
    """Begin the next epoch, and return what `rebuild` does in it. Collective over all ranks of the store, blocking: the
    layout's communicators are new ones (`Layout.again`), and what was sent on the old ones is dropped.

    Where the store survives deaths, `rebuild` may be called in several attempts. Nothing that it needs may go before
    this returns. If a worker asks for it by `grow`, spares that are left become workers.

    EpochError on a worker where another closes the store instead, or what is left does not suffice; elsewhere None.
    EpochStallError where one has not come within the limits; a later call waits on for it.
    """
    if epoch.over is None:
        epoch.end("recover", CollectiveError(f"rank {epoch.rank} calls recover"))
    layout, parting = epoch.layout, epoch.parting
    limits = epoch.limits if layout.is_worker else NEVER
    try:
        while not (why := parting.would(limits)):
            with uninterrupted():
                if not (why := parting.goes(limits)) and (begun := _begin(epoch, rebuild, grow)):
                    return begun[0]
    except StallError as error:
        raise of_kind(error) from None
    if layout.is_worker:
        raise EpochError(f"{why}: the store cannot be recovered")
    return None


def _begin(epoch: Epoch, rebuild: Callable[[], T], grow: bool) -> list[T]:
    return _attempt(epoch, rebuild, grow) if epoch.layout.survives else _with_all(epoch, rebuild)


def _with_all(epoch: Epoch, rebuild: Callable[[], T]) -> list[T]:
    """Begin it on the same ranks; what `rebuild` has returned."""
    old = copy.copy(epoch.layout)
    epoch.layout.again(old.world)
    old.part()
    epoch.advance()
    sweep(FREEING_SECONDS)
    return [rebuild()]


def _attempt(epoch: Epoch, rebuild: Callable[[], T], grow: bool) -> list[T]:
    """Begin it on the ranks that live; [] where one has died meanwhile. What was before stays until all have come
    through, and is put back where not."""
    layout, old, put_back = epoch.layout, copy.copy(epoch.layout), epoch.put_back()

    def make(left: MPI.Intracomm) -> T:
        layout.again(left, grow)
        epoch.advance()
        with epoch.failing("recover"):
            return rebuild()

    verdict, results, error = attempt(old.world, make)
    if verdict == DONE:
        old.abandon() if layout.lost else old.free()
        sweep()
        return results
    if layout.world is not old.world:
        layout.abandon()
    vars(layout).update(vars(old))
    put_back()
    if verdict == FAILED:
        raise error or LostError("recover: another rank could not go on, as its own error says")
    return []
