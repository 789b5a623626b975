"""What a rank tells who watches its job: records, one in a message. Times are of CLOCK_MONOTONIC, which a machine
shares."""

from __future__ import annotations

import msgspec

CHAOS = "_MPIPS_CHAOS"
"""Names, in the environment of a watched job, the folder with the plan and the socket. All its processes carry it."""
PLAN, SOCKET = "plan.json", "ranks"


class Here(msgspec.Struct, tag=True, frozen=True):
    """It is there, or has another role now. `host`: what its machine is called."""

    rank: int
    role: str
    host: str


class Made(msgspec.Struct, tag=True, frozen=True):
    """It has a store: as worker `worker` of `workers`."""

    time: float
    rank: int
    worker: int
    workers: int


class Reached(msgspec.Struct, tag=True, frozen=True):
    """It is at the point of fault `fault` of the plan."""

    time: float
    rank: int
    fault: int


class Recovered(msgspec.Struct, tag=True, frozen=True):
    """`recover` has returned: all keys stand at `step`; None where they do not stand at one."""

    time: float
    rank: int
    worker: int
    workers: int
    step: int | None


class Note(msgspec.Struct, tag=True, frozen=True):
    """What its program has noted. `value` is None where that was no number; `digest` stands for its bits."""

    time: float
    rank: int
    worker: int
    workers: int
    step: int
    value: float | None
    digest: str


Told = Here | Made | Reached | Recovered | Note
