"""The short way of push, pull and pushpull: one key, all parts on this node, uncompressed; in an asynchronous store of
one block, without `staleness`.

It does what `session.Session` does in the general case, in a fraction of the time, and leaves to the session whatever
has to be waited for longer than a moment. Every call returns what is left to be waited for, or None.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from collectives.node import arena
from mpips.lines import Repeated
from mpips.pulls import snapshot

if TYPE_CHECKING:
    from mpips.keys import Key, Part
    from mpips.session import Session

Array = NDArray[Any]
Task = Generator[bool | None, None, None]
YIELDS = 500


class Short(Protocol):
    """Pushes and pulls of one key."""

    lists: bool
    """Whether keys of lists take it, too."""

    def push(self, array: Array, priority: int) -> Task | None: ...

    def post(self, array: Array, priority: int) -> Task | None:
        """Push, but without waiting until the servers have read what they read in place."""
        ...

    def read(self) -> Task | None:
        """Wait until they have, after a `post` that left nothing."""
        ...

    def pull(self, out: Array) -> Task | None: ...

    def pushpull(self, array: Array, out: Array, priority: int) -> Task | None:
        """Read the result behind the servers, while they still sum what follows."""
        ...


def make(session: Session, key: Key, small_bytes: int, asynchronous: bool) -> Short | None:
    """The short way of a key, if it has one; arrays up to `small_bytes` are always copied."""
    parts = key.parts
    if len(parts) > 1 or parts[0].blocks > 1:
        return None if asynchronous else Blocks(session, key, small_bytes)
    return (AnyTime if asynchronous else OneBlock)(session, key, parts[0], small_bytes)


def came(words: Any, word: int, count: int) -> bool:
    """Wait a moment for a word of the server; whether it came."""
    for _ in range(YIELDS):
        if words[word] >= count:
            return True
        os.sched_yield()
    return False


class Lent:
    """The pushes of an array of node-shared memory; kept, as a training loop pushes the same again."""

    __slots__ = ("_last", "_parts", "_pushes")

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._last: Callable[[], Array | None] = lambda: None
        self._pushes: list[Repeated] = []

    def of(self, array: Array) -> list[Repeated]:
        """For every part its push; empty where the array lies elsewhere."""
        if self._last() is not array:
            region = arena.locate(array)
            size = array.itemsize
            pushes = [] if region is None else [
                Repeated(part.line, part.number, region._replace(
                    offset=region.offset + part.start * size, nbytes=(part.stop - part.start) * size
                ))
                for part in self._parts
            ]  # fmt: skip
            last = weakref.ref(array)
            self._last, self._pushes = last, pushes  # at once, whenever an interrupt comes
        return self._pushes


def apart(array: Array, out: Array) -> bool:
    """Whether a result may be written to `out` while servers still read later elements of `array`."""
    return out is array or not np.may_share_memory(array, out)


class OneBlock:
    """A key that is one block on one server."""

    lists = True
    __slots__ = (
        "_copy", "_in_place", "_key", "_lent", "_line", "_mine", "_part", "_session", "_stored", "_words",
    )  # fmt: skip

    def __init__(self, session: Session, key: Key, part: Part, small_bytes: int) -> None:
        assert part.stored is not None
        self._session, self._key, self._part = session, key, part
        self._words, self._mine, self._line = part.words, part.mine, part.line
        self._lent = Lent([part]) if key.nbytes > small_bytes else None
        self._stored = part.stored.reshape(key.shape)
        self._in_place = False
        self._copy: Array | None = None

    def push(self, array: Array, priority: int) -> Task | None:
        left = self.post(array, priority)
        return self.read() if left is None else left

    def post(self, array: Array, priority: int) -> Task | None:
        key = self._key
        if key.failed or self._words[self._mine] != key.round:
            return self._session.push_long(key, array, priority)
        self._post(array, priority)
        return None

    def read(self) -> Task | None:
        key = self._key
        if not self._in_place or came(self._words, self._mine, key.round):
            return None
        return self._session.drained(key, key.round, [self._part])

    def pull(self, out: Array) -> Task | None:
        key = self._key
        if not came(self._words, 0, key.round) or self._line.waiting() or key.failed:
            return self._session.pull(key, out.reshape(-1), key.parts)
        out[...] = self._stored
        return None

    def pushpull(self, array: Array, out: Array, priority: int) -> Task | None:
        left = self.post(array, priority)  # who can read the result knows that the server has read the array
        return self.pull(out) if left is None else then_pull(self._session, self._key, left, out)

    def _post(self, array: Array, priority: int) -> None:
        """Contribute; where the array itself is read, it must stay as it is."""
        pushes = self._lent.of(array) if self._lent is not None else None
        self._in_place = bool(pushes)
        push = pushes[0] if pushes else self._copied(array)
        key = self._key
        key.round += 1
        try:
            push.post(key.round, priority)
        except BaseException as error:
            self._session.break_off(key, key.round, [self._part], error)
            raise

    def _copied(self, array: Array) -> Repeated:
        """The push of a copy of the array, which is made."""
        copy = self._copy
        if copy is None:
            copy = self._copy = self._session.outbox(self._key, self._part).slots.reshape(self._key.shape)
        copy[...] = array
        return self._part.copy  # type: ignore[return-value]


class AnyTime(OneBlock):
    """The same in an asynchronous store, where no pull waits for another worker."""

    __slots__ = ()

    def post(self, array: Array, priority: int) -> Task | None:
        came(self._words, self._mine, self._key.round)  # only the server may be behind
        return super().post(array, priority)

    def pull(self, out: Array) -> Task | None:
        key = self._key
        there = came(self._words, self._mine, key.round) and not (self._line.waiting() or key.failed)
        if there and snapshot(self._words, self._stored, out):
            return None
        return self._session.pull(key, out.reshape(-1), key.parts)


class Blocks:
    """A key of several blocks, perhaps on several servers."""

    lists = True
    __slots__ = ("_in_place", "_key", "_lent", "_mine", "_session", "_small", "_stored")

    def __init__(self, session: Session, key: Key, small_bytes: int) -> None:
        self._session, self._key, self._small = session, key, key.nbytes <= small_bytes
        self._mine = [(part.words, part.mine) for part in key.parts]
        self._stored: list[tuple[Any, ...]] = [
            (part.words, part.stored, part.start, part.stop, part.blocks, part.block_elements, part.line, part.enough)
            for part in key.parts
        ]
        self._lent = Lent(key.parts)
        self._in_place = False

    def push(self, array: Array, priority: int) -> Task | None:
        left = self.post(array, priority)
        return self.read() if left is None else left

    def read(self) -> Task | None:
        key = self._key
        for words, mine in self._mine if self._in_place else ():
            if words[mine] < key.round and not came(words, mine, key.round):
                return self._session.drained(key, key.round, key.parts)
        return None

    def pull(self, out: Array) -> Task | None:
        key = self._key
        flat, earlier = out.reshape(-1), key.round - 1
        for words, stored, start, stop, blocks, size, line, enough in self._stored:
            before, done = earlier * blocks, 0
            while done < blocks:
                needed = before + enough(done)
                if (words[0] < needed and not came(words, 0, needed)) or key.failed:
                    return self._session.pull(key, flat, key.parts)
                there = words[0] - before
                if there == blocks and not done:
                    flat[start:stop] = stored
                else:
                    first, last = done * size, there * size
                    flat[start + first : min(start + last, stop)] = stored[first:last]
                done = there
            if line.waiting():
                return self._session.pull(key, flat, key.parts)
        return None

    def pushpull(self, array: Array, out: Array, priority: int) -> Task | None:
        left = self.post(array, priority) if apart(array, out) else self.push(array, priority)
        return self.pull(out) if left is None else then_pull(self._session, self._key, left, out)

    def post(self, array: Array, priority: int) -> Task | None:
        key = self._key
        round_ = key.round
        if key.failed:
            return self._session.push_long(key, array, priority)
        for words, mine in self._mine:
            if words[mine] != round_:
                return self._session.push_long(key, array, priority)
        pushes = None if self._small else self._lent.of(array)
        self._in_place = bool(pushes)
        key.round = round_ = round_ + 1
        try:
            if pushes:
                for push in pushes:
                    push.post(round_, priority)
            else:
                flat = array.reshape(-1)
                payloads = [(part, flat[part.start : part.stop]) for part in key.parts]
                self._session.copy_in(key, round_, payloads, priority)
        except BaseException as error:
            self._session.break_off(key, round_, key.parts, error)
            raise
        return None


def then_pull(session: Session, key: Key, push: Task, out: Array) -> Task:
    """A push that takes longer, and the pull after it."""
    yield from push
    yield from session.pull(key, out.reshape(-1), key.parts)
