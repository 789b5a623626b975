"""How workers become alike again when a generation has ended: each says what it has, and others take it over.

A round may have ended on some workers and not on others. All have the same sums, so whoever has completed a round has
the right value and state: the lowest rank of those that have it gives them to those that have not. A worker that has
just begun has nothing, and takes all. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mpips.store.keys.key import Name, Rounds
from mpips.store.recovery.plan import choose
from mpips.store.recovery.undo import Copy
from mpips.store.replicated.replica import Replica


class Stand(msgspec.Struct, array_like=True, frozen=True):
    """A replica after some round: how often the optimizer has updated it, and the dtypes of its state's arrays; None
    where there is none yet."""

    round: int
    step: int
    state: list[str] | None


class Standing(msgspec.Struct, array_like=True, frozen=True):
    """What one worker has of one key."""

    name: Name
    shape: tuple[int, ...]
    dtype: str
    now: Stand
    torn: bool
    """Whether the last change of it broke off."""
    whole: list[Stand]
    """As what it can be had, the newest first."""


def standing(replica: Replica) -> Standing:
    """What this worker has of a key."""
    key = replica.key
    whole = [_stand(copy) for copy in replica.copies()]
    return Standing(key.name, key.shape, key.dtype.name, _stand(replica.now()), replica.updating, whole)


def _stand(copy: Copy) -> Stand:
    return Stand(copy.round, copy.step, None if copy.state is None else [array.dtype.name for array in copy.state])


class Having(msgspec.Struct, array_like=True):
    """What one worker has: its settings, after so many changes of them, and its keys. `fresh`: it has just begun."""

    changes: int
    settings: bytes
    keys: list[Standing]
    fresh: bool = False


class ReplicaSource(msgspec.Struct):
    """From whom workers take a key, to be as `stand` says. `holders` have it, the others do not."""

    rank: int
    standing: Standing
    stand: Stand
    holders: list[int]
    everybody: bool
    """Whether all workers are holders, and nothing has to travel."""


def settings_from(having: Sequence[Having]) -> int:
    """The lowest rank of those that have made the most changes of settings."""
    return max(range(len(having)), key=lambda rank: (not having[rank].fresh, having[rank].changes, -rank))


def sources(having: Sequence[Having]) -> tuple[dict[Name, ReplicaSource], Rounds]:
    """Of every key that all workers have, but for fresh ones, from whom to take it; and at which rounds keys stand."""
    tables = {rank: {each.name: each for each in one.keys} for rank, one in enumerate(having) if not one.fresh}
    first = next(iter(tables.values()), {})
    names = [name for name in first if all(_alike(table.get(name), first[name]) for table in tables.values())]
    available = {name: {stand.round for table in tables.values() for stand in table[name].whole} for name in names}
    chosen = choose({name: rounds for name, rounds in available.items() if rounds}, True)
    found = {
        name: _source({rank: table[name] for rank, table in tables.items()}, having, chosen.rounds.get(name))
        for name in names
    }
    rounds = Rounds({name: source.stand.round for name, source in found.items()})
    rounds.torn = tuple(name for name in names if not available[name])
    rounds.step = None if rounds.torn else chosen.step
    return found, rounds


def _alike(one: Standing | None, other: Standing) -> bool:
    return one is not None and (one.shape, one.dtype) == (other.shape, other.dtype)


def _source(standings: dict[int, Standing], having: Sequence[Having], round_: int | None) -> ReplicaSource:
    """`round_`: None where no worker has the key whole; then all take what the one has that came furthest."""
    stands = {rank: _at(standing, round_) for rank, standing in standings.items()}
    best = max(
        (rank for rank, stand in stands.items() if stand is not None),
        key=lambda rank: (having[rank].changes, standings[rank].now.round, -rank),
    )
    stand = stands[best]
    assert stand is not None
    holders = [
        rank for rank, other in stands.items() if other == stand and having[rank].changes == having[best].changes
    ]
    return ReplicaSource(best, standings[best], stand, holders, len(holders) == len(having) and round_ is not None)


def _at(standing: Standing, round_: int | None) -> Stand | None:
    """What a worker has of a key after this round."""
    if round_ is None:
        return standing.now
    return next((stand for stand in standing.whole if stand.round == round_), None)
