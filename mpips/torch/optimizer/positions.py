"""Where workers stand in their programs when one of them has died, and where a new one goes on. Pure.

All workers make the same steps, and the same collective calls between two steps, such as `save`. One worker may be done
with a call in which a death finds another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Position(msgspec.Struct, array_like=True, frozen=True):
    """Where one worker stands."""

    steps: int
    """Steps that it has made."""
    calls: int
    """Collective calls that it has begun since."""
    pushes: bool
    """Whether it is in the next step."""
    new: bool
    """Whether it has just taken a dead worker's place, and has nothing yet."""


class Meeting(NamedTuple):
    """What workers learn from their positions."""

    giver: int
    """The lowest worker that is not new: new ones take what they need from it."""
    resumed: int
    """The step at which new workers go on."""
    has_made: bool
    """Whether the others have made that step already: what came of it is what a new worker begins with."""
    done: int
    """How many of the calls since the last step are over, though perhaps not on all workers."""
    refusal: str
    """Why they cannot go on; "" where they can."""


def meet(positions: Sequence[Position], synchronous: bool) -> Meeting:
    """From the positions of all workers after a death. In a synchronous store all have made equally many steps."""
    there = [position for position in positions if not position.new]
    giver = next((rank for rank, position in enumerate(positions) if not position.new), -1)
    if not there:
        return Meeting(giver, 0, False, 0, "no worker is left that has the parameters and the optimizer's state: begin "
                       "again, from a checkpoint")  # fmt: skip
    steps, calls = min(position.steps for position in there), max(position.calls for position in there)
    if not synchronous:
        return Meeting(giver, max(steps - 1, 0), False, 0, "")
    if any(position.pushes for position in there):
        return Meeting(giver, steps, False, calls, "")
    if not steps:
        early = "a worker has died before the first step, in a call that a new worker does not make: begin again"
        return Meeting(giver, 0, False, max(calls - 1, 0), early if calls and len(there) < len(positions) else "")
    return Meeting(giver, steps - 1, True, max(calls - 1, 0), "")
