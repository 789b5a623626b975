"""The short way of a push and a pull: one key of a synchronous store whose parts are all on this node, uncompressed.

It does what `session.Session` does in the general case, in a fraction of the time, and leaves to the session whatever
has to be waited for longer than a moment. Every call returns what is left to be waited for, or None.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from collectives import arena
from collectives.arena import Region
from mpips.messages import Op

if TYPE_CHECKING:
    from mpips.keys import Key, Part
    from mpips.session import Session

Array = NDArray[Any]
Task = Generator[None, None, None]
YIELDS = 500
PUSH = int(Op.PUSH)


class Short(Protocol):
    """Pushes and pulls of one key."""

    def push(self, array: Array, priority: int) -> Task | None: ...

    def pull(self, out: Array) -> Task | None: ...


def make(session: Session, key: Key, small_bytes: int) -> Short:
    """The short way of a key; arrays up to `small_bytes` are always copied."""
    parts = key.parts
    if len(parts) == 1 and parts[0].blocks == 1:
        return OneBlock(session, key, parts[0], small_bytes)
    return Blocks(session, key, small_bytes)


def came(words: Any, word: int, count: int) -> bool:
    """Wait a moment for a word of the server; whether it came."""
    for _ in range(YIELDS):
        if words[word] >= count:
            return True
        os.sched_yield()
    return False


class Places:
    """Where arrays lie in node-shared memory; remembers the last one, as a training loop pushes the same again."""

    __slots__ = ("_last", "_region")

    def __init__(self) -> None:
        self._last: Callable[[], Array | None] = lambda: None
        self._region: Region | None = None

    def find(self, array: Array) -> Region | None:
        """As `arena.locate`."""
        if self._last() is not array:
            self._region, self._last = arena.locate(array), weakref.ref(array)
        return self._region


class OneBlock:
    """A key that is one block on one server."""

    __slots__ = (
        "_copy", "_in_place", "_key", "_line", "_mine", "_number", "_part", "_places", "_session", "_stored", "_words",
    )  # fmt: skip

    def __init__(self, session: Session, key: Key, part: Part, small_bytes: int) -> None:
        assert part.stored is not None
        self._session, self._key, self._part = session, key, part
        self._words, self._mine, self._number, self._line = part.words, part.mine, part.number, part.line
        self._in_place = key.nbytes > small_bytes
        self._stored = part.stored.reshape(key.shape)
        self._copy: Array | None = None
        self._places = Places()

    def push(self, array: Array, priority: int) -> Task | None:
        key = self._key
        if key.failed or self._words[self._mine] != key.round:
            return self._session.push_long(key, array, priority)
        if self._in_place and (region := self._places.find(array)) is not None:
            key.round = round_ = key.round + 1
            self._line.post(PUSH, self._number, round_, region, 0, priority)
            if came(self._words, self._mine, round_):
                return None
            return self._session.drained(key, round_, [self._part])
        copy = self._copy
        if copy is None:
            copy = self._copy = self._session.outbox(key, self._part).reshape(key.shape)
        copy[...] = array
        key.round = round_ = key.round + 1
        self._line.post(PUSH, self._number, round_, self._part.plain, 0, priority)
        return None

    def pull(self, out: Array) -> Task | None:
        key = self._key
        if not came(self._words, 0, key.round) or self._line.waiting() or key.failed:
            return self._session.pull(key, out.reshape(-1), key.parts)
        out[...] = self._stored
        return None


class Blocks:
    """A key of several blocks, perhaps on several servers."""

    __slots__ = ("_in_place", "_key", "_places", "_session")

    def __init__(self, session: Session, key: Key, small_bytes: int) -> None:
        self._session, self._key, self._in_place = session, key, key.nbytes > small_bytes
        self._places = Places()

    def push(self, array: Array, priority: int) -> Task | None:
        key, parts = self._key, self._key.parts
        region = self._places.find(array) if self._in_place else None
        if region is None or key.failed or any(part.words[part.mine] != key.round for part in parts):
            return self._session.push_long(key, array, priority)
        key.round = round_ = key.round + 1
        itemsize = key.dtype.itemsize
        for part in parts:
            place = (*region[:3], region.offset + part.start * itemsize, (part.stop - part.start) * itemsize)
            part.line.post(PUSH, part.number, round_, place, 0, priority)
        for part in parts:
            if not came(part.words, part.mine, round_):
                return self._session.drained(key, round_, parts)
        return None

    def pull(self, out: Array) -> Task | None:
        key = self._key
        flat = out.reshape(-1)
        for part in key.parts:
            before, done, size = (key.round - 1) * part.blocks, 0, part.block_elements
            while done < part.blocks:
                if not came(part.words, 0, before + done + 1) or key.failed:
                    return self._session.pull(key, flat, key.parts)
                there = min(part.words[0] - before, part.blocks)
                stop = min(part.start + there * size, part.stop)
                flat[part.start + done * size : stop] = part.stored[done * size : stop - part.start]  # type: ignore[index]
                done = there
            if part.line.waiting():
                return self._session.pull(key, flat, key.parts)
        return None
