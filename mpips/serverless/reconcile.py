"""How workers become alike again when an epoch has ended: each says what it has, and those behind take it over.

A round may have ended on some workers and not on others. All have the same sums, so whoever has completed a round has
the right value and state: the lowest rank of those with the most rounds gives them to everybody. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mpips.keys.key import Name
from mpips.serverless.replica import Replica


class Standing(msgspec.Struct, array_like=True):
    """What one worker has of one key."""

    name: Name
    size: int
    dtype: str
    round: int
    """Rounds that it has completed."""
    torn: bool
    """Whether the last change of it broke off."""
    step: int
    state: list[str] | None
    """Dtypes of the arrays of the optimizer's state; None where there is none yet."""


def standing(replica: Replica) -> Standing:
    """What this worker has of a key."""
    key = replica.key
    state = None if replica.state is None else [array.dtype.name for array in replica.state]
    return Standing(key.name, key.size, key.dtype.name, key.round, replica.updating, replica.step, state)


class Having(msgspec.Struct, array_like=True):
    """What one worker has: its settings, after so many changes of them, and its keys."""

    changes: int
    settings: bytes
    keys: list[Standing]


class Source(msgspec.Struct):
    """From whom all take a key: `standing` is what that worker has. `rank` -1: all have the same already."""

    rank: int
    standing: Standing
    torn: bool


def settings_from(having: Sequence[Having]) -> int:
    """The lowest rank of those that have made the most changes of settings."""
    return max(range(len(having)), key=lambda rank: (having[rank].changes, -rank))


def sources(having: Sequence[Having]) -> dict[Name, Source]:
    """Of every key that all workers have, in rank 0's order, from whom to take it."""
    tables = [{standing.name: standing for standing in one.keys} for one in having]
    found: dict[Name, Source] = {}
    for name, first in tables[0].items():
        if all(name in table and _alike(table[name], first) for table in tables):
            found[name] = _source([table[name] for table in tables], [one.changes for one in having])
    return found


def _alike(one: Standing, other: Standing) -> bool:
    return (one.size, one.dtype) == (other.size, other.dtype)


def _source(standings: Sequence[Standing], changes: Sequence[int]) -> Source:
    def order(rank: int) -> tuple[bool, int, int, int]:
        standing = standings[rank]
        return not standing.torn, standing.round, changes[rank], -rank

    best = max(range(len(standings)), key=order)
    chosen = standings[best]
    same = all(each == chosen for each in standings) and len(set(changes)) == 1
    return Source(-1 if same and not chosen.torn else best, chosen, chosen.torn)
