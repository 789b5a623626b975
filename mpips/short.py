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

from collectives import arena
from collectives.arena import Region
from mpips.lines import SharedLine
from mpips.messages import FRAME, Op
from mpips.pulls import snapshot

if TYPE_CHECKING:
    from mpips.keys import Key, Part
    from mpips.session import Session

Array = NDArray[Any]
Task = Generator[bool | None, None, None]
Again = Callable[[bytes, int], None]
YIELDS = 500
PUSH = int(Op.PUSH)


class Short(Protocol):
    """Pushes and pulls of one key."""

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


class Frames:
    """The packed frames that push an array of node-shared memory; kept, as a training loop pushes the same again."""

    __slots__ = ("_frames", "_last", "_parts", "_priority")

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._last: Callable[[], Array | None] = lambda: None
        self._priority = 0
        self._frames: list[tuple[Again, bytes]] = []

    def of(self, array: Array, priority: int) -> list[tuple[Again, bytes]]:
        """For every part how to post its frame, and the frame; empty where the array lies elsewhere."""
        if self._last() is not array or self._priority != priority:
            region = arena.locate(array)
            size = array.itemsize
            self._frames = [] if region is None else [
                packed(part, region._replace(
                    offset=region.offset + part.start * size, nbytes=(part.stop - part.start) * size
                ), priority)
                for part in self._parts
            ]  # fmt: skip
            self._last, self._priority = weakref.ref(array), priority
        return self._frames


def packed(part: Part, region: Region, priority: int) -> tuple[Again, bytes]:
    """A push of the part: how to post it, and the frame but for its round."""
    assert isinstance(part.line, SharedLine)
    return part.line.again, FRAME.pack(PUSH, 0, 0, priority, part.number, 0, 0, *region, 0)


def apart(array: Array, out: Array) -> bool:
    """Whether a result may be written to `out` while servers still read later elements of `array`."""
    return out is array or not np.may_share_memory(array, out)


class OneBlock:
    """A key that is one block on one server."""

    __slots__ = (
        "_copies", "_copy", "_frames", "_key", "_lent", "_line", "_mine", "_part", "_session", "_stored", "_words",
    )  # fmt: skip

    def __init__(self, session: Session, key: Key, part: Part, small_bytes: int) -> None:
        assert part.stored is not None
        self._session, self._key, self._part = session, key, part
        self._words, self._mine, self._line = part.words, part.mine, part.line
        self._frames = Frames([part]) if key.nbytes > small_bytes else None
        self._stored = part.stored.reshape(key.shape)
        self._lent = False
        self._copy: Array | None = None
        self._copies: dict[int, tuple[Again, bytes]] = {}

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
        if not self._lent or came(self._words, self._mine, key.round):
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
        frames = self._frames.of(array, priority) if self._frames is not None else None
        self._lent = bool(frames)
        post, frame = frames[0] if frames else self._copied(array, priority)
        key = self._key
        key.round += 1
        try:
            post(frame, key.round)
        except BaseException as error:
            self._session.break_off(key, key.round, [self._part], error)
            raise

    def _copied(self, array: Array, priority: int) -> tuple[Again, bytes]:
        """How to push a copy of the array, which is made."""
        copy = self._copy
        if copy is None:
            copy = self._copy = self._session.outbox(self._key, self._part).slots.reshape(self._key.shape)
        copy[...] = array
        if priority not in self._copies:
            plain = self._session.outbox(self._key, self._part).plain
            self._copies = {priority: packed(self._part, plain, priority)}
        return self._copies[priority]


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

    __slots__ = ("_frames", "_key", "_session", "_small")

    def __init__(self, session: Session, key: Key, small_bytes: int) -> None:
        self._session, self._key, self._small = session, key, key.nbytes <= small_bytes
        self._frames = Frames(key.parts)

    def push(self, array: Array, priority: int) -> Task | None:
        left = self.post(array, priority)
        return self.read() if left is None else left

    def read(self) -> Task | None:
        key, parts = self._key, self._key.parts
        for part in parts:
            if not came(part.words, part.mine, key.round):
                return self._session.drained(key, key.round, parts)
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

    def pushpull(self, array: Array, out: Array, priority: int) -> Task | None:
        left = self.post(array, priority) if apart(array, out) else self.push(array, priority)
        return self.pull(out) if left is None else then_pull(self._session, self._key, left, out)

    def post(self, array: Array, priority: int) -> Task | None:
        key = self._key
        frames = None if self._small or key.failed else self._frames.of(array, priority)
        if not frames:
            return self._session.push_long(key, array, priority)
        round_ = key.round
        for part in key.parts:
            if part.words[part.mine] != round_:
                return self._session.push_long(key, array, priority)
        key.round = round_ = round_ + 1
        try:
            for post, frame in frames:
                post(frame, round_)
        except BaseException as error:
            self._session.break_off(key, round_, key.parts, error)
            raise
        return None


def then_pull(session: Session, key: Key, push: Task, out: Array) -> Task:
    """A push that takes longer, and the pull after it."""
    yield from push
    yield from session.pull(key, out.reshape(-1), key.parts)
