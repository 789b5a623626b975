"""What a worker that closes the store says of its pushes, so that nobody waits for one that never comes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from mpips.store.keys.key import Key, Name
from mpips.store.runtime.rendezvous import data_of

CLOSE = "close"
"""The call in which it says so."""


def said(keys: Mapping[Name, Key]) -> bytes:
    """How often this worker has pushed each key."""
    return msgspec.msgpack.encode([(name, key.round) for name, key in keys.items()])


def in_vain(words: Sequence[bytes], keys: Mapping[Name, Key], ahead: int, pushing: Sequence[Name] = ()) -> str:
    """Whose next push a worker with these keys waits for though that one closes; "" where it does for none. `words`: of
    each worker. `ahead`: so many pushes may one be ahead of another. `pushing`: keys of a push that is not counted
    yet."""
    for rank, word in enumerate(words):
        data = data_of(word, CLOSE)
        for name, count in msgspec.msgpack.decode(data, type=list[tuple[Name, int]]) if data else ():
            if name in keys and keys[name].round + (name in pushing) > count + ahead:
                return f"rank {rank} has closed the store after {count} pushes of key {name!r}, and this needs another"
    return ""
