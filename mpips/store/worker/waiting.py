"""Find workers that wait in vain: for a push of one that has closed the store, or that waits for all in another call.

A worker that closes says how often it has pushed each key and table. A worker that waits for all says the same of those
that nothing under way pushes any more. Another worker that needs one push more compares, and names both. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from mpips.store.keys.key import Key, Name
from mpips.store.roles import Layout
from mpips.store.runtime.rendezvous import data_of
from mpips.store.worker.interface import KnownTable

CLOSE = "close"
"""The call in which it says so."""


def pushes_of(keys: Mapping[Name, Key | KnownTable]) -> bytes:
    """Return how often this worker has pushed each key and table."""
    return msgspec.msgpack.encode([(name, key.round) for name, key in keys.items()])


def waits_for_closed(
    words: Sequence[bytes], keys: Mapping[Name, Key | KnownTable], pushing: Sequence[Name] = ()
) -> str:
    """Return whose next push a worker with these keys and tables of a synchronous store waits for though that one
    closes; "" where none. `words`: of each worker. `pushing`: keys of a push that is not counted yet."""
    for rank, word in enumerate(words):
        data = data_of(word, CLOSE)
        for name, count in msgspec.msgpack.decode(data, type=list[tuple[Name, int]]) if data else ():
            if name in keys and keys[name].round + (name in pushing) > count:
                one = f"{keys[name].noun} {name!r}"
                return f"rank {rank} has closed the store after {count} pushes of {one}, and this needs another"
    return ""


class WaitingWorker(msgspec.Struct, array_like=True):
    """Tell how far a worker is that waits in the call `what`."""

    what: str
    sums: int
    """Without servers: sums that it has begun, of all keys."""
    rounds: list[tuple[Name, int]]
    """With servers: how often it has pushed each key and table that nothing under way pushes."""


class Blocked(NamedTuple):
    """Tell what this worker's program waits for.

    `call` ("": a collective of its client), in which it has begun so many `sums`; with servers, of each key and table
    the round that needs the others; and whether it blocks in a collective."""

    call: str
    sums: int
    rounds: Mapping[Name, int]
    inside: bool


def describe(what: str, sums: int, pushed: Iterable[Key | KnownTable]) -> bytes:
    """Return a `WaitingWorker` as bytes. `pushed`: what nothing under way pushes."""
    return msgspec.msgpack.encode(WaitingWorker(what, sums, [(one.name, one.round) for one in pushed]))


def needed(key: Key, call: str) -> int:
    """Return the round of the key to which all have to push before the call ends.

    A push of which the servers have yet to read the round before waits for that one.
    """
    early = call.startswith("push ") and not all(
        shard.local and shard.consumed() >= key.round - 1 for shard in key.pushes
    )
    return key.round - early


def why_in_vain(mine: Blocked, layout: Layout, others: Mapping[int, bytes]) -> str:
    """Return why this worker waits in vain, "" where it may not. `others`: what workers say that wait in a meeting."""
    for rank, word in others.items():
        theirs = msgspec.msgpack.decode(word, type=WaitingWorker)
        if call := waits_for(mine, layout, rank, theirs):
            return (
                f"rank {rank} waits in {theirs.what} for all workers, and rank {layout.rank} in {call} for rank "
                f"{rank}: let all make these calls in the same order"
            )
    return ""


def waits_for(mine: Blocked, layout: Layout, rank: int, theirs: WaitingWorker) -> str:
    """Return the call in which this worker waits for a push that a worker which stands there has not made, or ""."""
    if not layout.num_servers:
        return mine.call if theirs.sums < mine.sums else ""
    fellow = layout.kind.startswith("mpi_") and any(
        layout.rank in range(*client) and rank in range(*client) for client in layout.clients
    )
    if mine.inside and not fellow:
        return ""
    if layout.asynchronous and not fellow:
        return ""  # servers hold nobody back for a worker that waits for all
    for name, count in theirs.rounds:
        if mine.rounds.get(name, 0) > count:
            return mine.call or f"push of key {name!r}"
    return ""
