"""How the next generation of a store begins: with all ranks, or with none.

All say first that they go on (`runtime.generation.Succession`). Where the store survives deaths, it goes on with the
ranks that live. One may die meanwhile: then all is put back, and tried again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

from mpi4py import MPI

from collectives.errors import CollectiveError, StallError
from collectives.network.drain import sweep
from mpips.store.recovery.shrink import DONE, FAILED, attempt
from mpips.store.runtime.errors import LostError, StoreError, of_kind, uninterrupted
from mpips.store.runtime.generation import FREEING_SECONDS, NEVER, Generation

T = TypeVar("T")


def renew(generation: Generation, rebuild: Callable[[], T], grow: bool = False) -> T | None:
    """Begin the next generation, and return what `rebuild` does in it. Collective over all ranks of the store,
    blocking: the layout's communicators are new ones (`Layout.again`), and what was sent on the old ones is dropped.

    Where the store survives deaths, `rebuild` may be called in several attempts. Nothing that it needs may go before
    this returns. If a worker asks for it by `grow`, spares that are left become workers.

    StoreError on a worker where another closes the store instead, or what is left does not suffice; elsewhere None.
    StoreStallError where one has not come within the limits; a later call waits on for it.
    """
    if generation.over is None:
        generation.end("recover", CollectiveError(f"rank {generation.rank} calls recover"))
    layout, succession = generation.layout, generation.succession
    limits = generation.limits if layout.is_worker else NEVER
    try:
        while not (why := succession.wait_until_all_would(limits)):
            with uninterrupted():
                if not (why := succession.wait_until_all_go(limits)) and (begun := _begin(generation, rebuild, grow)):
                    return begun[0]
    except StallError as error:
        raise of_kind(error) from None
    if layout.is_worker:
        raise StoreError(f"{why}: the store cannot be recovered")
    return None


def _begin(generation: Generation, rebuild: Callable[[], T], grow: bool) -> list[T]:
    return _attempt(generation, rebuild, grow) if generation.layout.survives else _with_all(generation, rebuild)


def _with_all(generation: Generation, rebuild: Callable[[], T]) -> list[T]:
    """Begin it on the same ranks; what `rebuild` has returned."""
    old = copy.copy(generation.layout)
    generation.layout.again(old.world)
    old.part()
    generation.advance()
    sweep(FREEING_SECONDS)
    return [rebuild()]


def _attempt(generation: Generation, rebuild: Callable[[], T], grow: bool) -> list[T]:
    """Begin it on the ranks that live; [] where one has died meanwhile. What was before stays until all have come
    through, and is put back where not."""
    layout, old, put_back = generation.layout, copy.copy(generation.layout), generation.put_back()

    def make(left: MPI.Intracomm) -> T:
        layout.again(left, grow)
        generation.advance()
        with generation.failing("recover"):
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
