"""Detect deadlocks: one worker waits for a push by another worker that closes the store or waits in a collective call.

A worker that closes the store reports how often it has pushed each key, and each collection of a service. A worker in a
collective call also reports these numbers, but not for keys and collections that one of its running operations may
still push. A worker that needs one more push compares these numbers with its own, and raises an error that names both
calls. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from mpips.store.keys.key import Key, Name, Pushed
from mpips.store.roles import Layout
from mpips.store.runtime.rendezvous import data_of

# the name of the collective call in which workers close the store
CLOSE = "close"


def pushes_of(pushed: Mapping[Name, Pushed]) -> bytes:
    """Encode how often this worker has pushed each key and collection."""
    return msgspec.msgpack.encode([(name, each.round) for name, each in pushed.items()])


def waits_for_closed(words: Sequence[bytes], pushed: Mapping[Name, Pushed], pushing: Sequence[Name] = ()) -> str:
    """Find a worker that closes a synchronous store although this worker needs another push by that worker.

    Return an error message, or "" if there is no such worker.

    Args:
        words: The last message of each worker in a rendezvous.
        pushed: This worker's keys and collections.
        pushing: Keys of a push that this worker is making and has not counted yet.
    """
    for rank, word in enumerate(words):
        data = data_of(word, CLOSE)
        for name, count in msgspec.msgpack.decode(data, type=list[tuple[Name, int]]) if data else ():
            if name in pushed and pushed[name].round + (name in pushing) > count:
                label = f"{pushed[name].noun} {name!r}"
                return f"rank {rank} has closed the store after {count} pushes of {label}, and this needs another"
    return ""


class WaitingWorker(msgspec.Struct, array_like=True):
    """How often a worker that waits in the collective call `what` has pushed."""

    what: str
    # in a store without servers: the number of sums that the worker has begun, over all keys
    sums: int
    # in a store with servers: (name, number of pushes) of keys and collections that no unfinished operation pushes
    rounds: list[tuple[Name, int]]


class Blocked(NamedTuple):
    """The wait that blocks this worker's program."""

    # the blocked call; "" stands for a collective among the members of this worker's client
    call: str
    # the number of sums that this worker has begun
    sums: int
    # in a store with servers: key or collection -> the round that other workers have to push
    rounds: Mapping[Name, int]
    # True if this worker is blocked inside a collective
    inside: bool


def describe(what: str, sums: int, pushed: Iterable[Pushed]) -> bytes:
    """Encode a `WaitingWorker`. `pushed` are the keys and collections that no unfinished operation pushes."""
    return msgspec.msgpack.encode(WaitingWorker(what, sums, [(each.name, each.round) for each in pushed]))


def needed(key: Key, call: str) -> int:
    """Return the round of the key that all workers must have pushed before the call can end.

    This is the key's current round, with one exception: a push, while the servers have not read this worker's previous
    push of the key. Such a push waits only for the previous round.
    """
    early = call.startswith("push ") and not all(
        shard.local and shard.consumed() >= key.round - 1 for shard in key.pushes
    )
    return key.round - early


def why_in_vain(own: Blocked, layout: Layout, others: Mapping[int, bytes]) -> str:
    """Return an error message that names the two calls of a deadlock, or "" if there is no deadlock.

    `others`: rank of a worker -> the encoded `WaitingWorker` of that worker.
    """
    for rank, word in others.items():
        other = msgspec.msgpack.decode(word, type=WaitingWorker)
        if call := waits_for(own, layout, rank, other):
            return (
                f"rank {rank} waits in {other.what} for all workers, and rank {layout.rank} in {call} for rank "
                f"{rank}: let all make these calls in the same order"
            )
    return ""


def waits_for(own: Blocked, layout: Layout, rank: int, other: WaitingWorker) -> str:
    """Return the call in which this worker waits for a push that worker `rank` has not made, or ""."""
    if not layout.num_servers:
        return own.call if other.sums < own.sums else ""
    fellow = layout.kind.startswith("mpi_") and any(
        layout.rank in range(*client) and rank in range(*client) for client in layout.clients
    )
    if own.inside and not fellow:
        return ""
    if layout.asynchronous and not fellow:
        # In an asynchronous store, other workers can continue while a worker waits for all of them.
        return ""
    for name, count in other.rounds:
        if own.rounds.get(name, 0) > count:
            return own.call or f"push of key {name!r}"
    return ""
