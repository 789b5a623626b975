"""What a worker stands at that waits in a call of all workers: so nobody waits for a push of it that cannot come.

A worker that has waited for a moment in a meeting says how often it has pushed what nothing under way pushes any more.
That stays so until all have come. Another one whose program waits in a call that needs one more of these pushes does
not come: both would wait for ever. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from mpips.store.keys.key import Key, Name
from mpips.store.roles import Layout


class Stand(msgspec.Struct, array_like=True):
    """Where a worker is that waits in the call `what`."""

    what: str
    sums: int
    """Without servers: sums that it has begun, of all keys."""
    rounds: list[tuple[Name, int]]
    """With servers: how often it has pushed each key that nothing under way uses."""


class Blocked(NamedTuple):
    """What this worker's program waits for: `call` ("": a collective of its client), in which it has begun so many
    `sums`; with servers, of each key the round that needs the others; and whether it blocks in a collective."""

    call: str
    sums: int
    rounds: Mapping[Name, int]
    inside: bool


def stand(what: str, sums: int, keys: Iterable[Key], used: Collection[Hashable]) -> bytes:
    """Return a `Stand` as bytes; `used`: names that operations under way use."""
    rounds = [(key.name, key.round) for key in keys if key.name not in used]
    return msgspec.msgpack.encode(Stand(what, sums, rounds))


def needed(key: Key, call: str) -> int:
    """Return the round of the key to which all have to push before the call ends.

    A push of which the servers have yet to read the round before waits for that one.
    """
    early = call.startswith("push ") and not all(
        shard.local and shard.consumed() >= key.round - 1 for shard in key.pushes
    )
    return key.round - early


def in_vain(mine: Blocked, layout: Layout, others: Mapping[int, bytes]) -> str:
    """Return why this worker waits in vain, "" where it may not. `others`: what workers say that wait in a meeting."""
    for rank, word in others.items():
        theirs = msgspec.msgpack.decode(word, type=Stand)
        if call := waits_for(mine, layout, rank, theirs):
            return (
                f"rank {rank} waits in {theirs.what} for all workers, and rank {layout.rank} in {call} for rank "
                f"{rank}: let all make these calls in the same order"
            )
    return ""


def waits_for(mine: Blocked, layout: Layout, rank: int, theirs: Stand) -> str:
    """Return the call in which this worker waits for a push that a worker which stands there has not made, or ""."""
    if not layout.num_servers:
        return mine.call if theirs.sums < mine.sums else ""
    fellow = layout.kind.startswith("mpi_") and any(
        layout.rank in range(*client) and rank in range(*client) for client in layout.clients
    )
    if mine.inside and not fellow:
        return ""
    ahead: float = 0
    if layout.asynchronous and not fellow:
        ahead = layout.options.staleness if layout.options.staleness >= 0 else math.inf
    for name, count in theirs.rounds:
        if mine.rounds.get(name, 0) > count + ahead:
            return mine.call or f"push of key {name!r}"
    return ""
