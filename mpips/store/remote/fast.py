"""The fast path of plain arrays within a node: one straight-line function for a push, one for a pull, bound at `init`.

The fast path is a short-cut of the general path (`transfers.Push` and `transfers.Pull`). It handles keys whose servers
are all on this node and whose pushes are not compressed, while no other operation is running. So it needs no task, no
messages and no compressor. The docstring of `worker.route` says how much time this saves.

A call of the fast path waits only for a moment. If it finishes in that time, it returns None. Otherwise it returns a
task of the general path that does the rest (`SlowPath`).

A server keeps *words* (counters) in memory that workers of its node read: word 0 counts the blocks that it has summed,
and one word for each worker counts the pushes of that worker that it has read. A *shard* is the part of a key on one
server.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives.fabric import arena
from mpips.collectives.fabric.tasks import Task
from mpips.store.keys.key import Array, Fast, Key
from mpips.store.remote.link import ServerLink
from mpips.store.remote.members import label
from mpips.store.remote.transfers import Pull, Push, snapshot
from mpips.store.roles import Layout
from mpips.store.transport.outbox import InPlacePushes, RepeatedPush

YIELDS = 500


def spin_until(words: memoryview, word: int, count: int) -> bool:
    """Poll a server's counter `words[word]` until it has reached `count`. Return False after YIELDS polls in vain."""
    for _ in range(YIELDS):
        if words[word] >= count:
            return True
        os.sched_yield()
    return False


class SlowPath:
    """The general path of a key, to which a fast path falls back when it cannot finish at once.

    Args:
        flag: `flag[0]` becomes nonzero when the generation ends.
    """

    def __init__(self, flag: memoryview, link: ServerLink, push: Push, pull: Pull) -> None:
        self.flag = flag
        self.link = link
        self.copy_in = push.copy_in
        self._push = push
        self._pull = pull

    def push(self, key: Key, array: Array, priority: int) -> Task[None]:
        """Contribute to the key's next round. Nothing happens before the task's first step."""
        return self._push.push_part(key, 0, array.reshape(-1), priority, key.pushes)

    def pull(self, key: Key, out: Array) -> Task[None]:
        return self._pull.pull_part(key, out.reshape(-1), key.shards)

    def wait_until_read(self, key: Key) -> Task[None]:
        """Wait until the servers have read this worker's last push of the key."""
        return self._push.wait_until_read(key.round, key.pushes)

    def then_pull(self, key: Key, push: Task[None], out: Array) -> Task[None]:
        """Finish the push `push`, then pull into `out`."""
        yield from push
        yield from self.pull(key, out)


class FastRoute:
    """Base class of the fast paths of a key. See `keys.key.Fast`.

    Subclasses implement post(), wait_until_read() and pull(). Each returns None when it is done, or a task to run if it
    would have to wait.
    """

    __slots__ = ("_key", "_slow_path")

    def __init__(self, slow_path: SlowPath, key: Key) -> None:
        self._slow_path = slow_path
        self._key = key

    def post(self, array: Array, priority: int) -> Task[None] | None:
        raise NotImplementedError

    def wait_until_read(self) -> Task[None] | None:
        raise NotImplementedError

    def pull(self, out: Array) -> Task[None] | None:
        raise NotImplementedError

    def push(self, array: Array, priority: int) -> Task[None] | None:
        left = self.post(array, priority)
        return self.wait_until_read() if left is None else left

    def pushpull(self, array: Array, out: Array, priority: int) -> Task[None] | None:
        """Push, then pull.

        There is no wait between push and pull: once the result can be read, the server must have read the array.
        """
        left = self.post(array, priority)
        return self.pull(out) if left is None else self._slow_path.then_pull(self._key, left, out)


class OneBlock(FastRoute):
    """The fast path of a key that is one block on one server, in a synchronous store."""

    lists = True
    __slots__ = (
        "_copy",
        "_flag",
        "_in_place",
        "_lent",
        "_line",
        "_mine",
        "_shard",
        "_stored",
        "_words",
    )

    def __init__(self, slow_path: SlowPath, key: Key, small_bytes: int) -> None:
        shard = key.shards[0]
        assert shard.stored is not None
        super().__init__(slow_path, key)
        self._flag = slow_path.flag
        self._shard = shard
        self._words = shard.words
        self._mine = shard.mine
        self._line = shard.line
        self._lent = InPlacePushes([shard]) if key.nbytes > small_bytes else None
        self._stored = shard.stored.reshape(key.shape)
        self._in_place = False
        self._copy: Array | None = None

    def post(self, array: Array, priority: int) -> Task[None] | None:
        key = self._key
        # Until the server has read the previous push, it may still read the outbox or the array of that push.
        if self._flag[0] or self._words[self._mine] != key.round:
            return self._slow_path.push(key, array, priority)
        pushes = self._lent.of(array) if self._lent is not None else None
        if pushes:
            self._in_place = True
            push = pushes[0]
        else:
            self._in_place = False
            copy = self._copy
            if copy is None:
                copy = self._room()
            copy[...] = array
            push = self._shard.outbox_push
        key.round = round_ = key.round + 1
        push.post(round_, priority)
        return None

    def wait_until_read(self) -> Task[None] | None:
        if not self._in_place or spin_until(self._words, self._mine, self._key.round):
            return None
        return self._slow_path.wait_until_read(self._key)

    def pull(self, out: Array) -> Task[None] | None:
        key = self._key
        # If the server has sent a message, such as a warning, the general path handles it.
        if self._flag[0] or not spin_until(self._words, 0, key.round) or self._line.waiting():
            return self._slow_path.pull(key, out)
        out[...] = self._stored
        return None

    def _room(self) -> Array:
        """Return the shard's outbox as an array of the key's shape. The first call makes the outbox."""
        self._copy = self._slow_path.link.outbox(self._key, self._shard).slots.reshape(self._key.shape)
        return self._copy


class OneBlockAsync(OneBlock):
    """The fast path of a key that is one block, in an asynchronous store. No pull waits for another worker there."""

    __slots__ = ()

    def post(self, array: Array, priority: int) -> Task[None] | None:
        # The server waits for no other worker before it reads this push. So a short wait is mostly enough.
        spin_until(self._words, self._mine, self._key.round)
        return super().post(array, priority)

    def pull(self, out: Array) -> Task[None] | None:
        key = self._key
        there = not self._flag[0] and spin_until(self._words, self._mine, key.round) and not self._line.waiting()
        if there and snapshot(self._words, self._stored, out):
            return None
        return self._slow_path.pull(key, out)


class Blocks(FastRoute):
    """The fast path of a key of several blocks, perhaps on several servers."""

    lists = True
    __slots__ = ("_flag", "_in_place", "_lent", "_mine", "_small", "_stored")

    def __init__(self, slow_path: SlowPath, key: Key, small_bytes: int) -> None:
        super().__init__(slow_path, key)
        self._flag = slow_path.flag
        self._small = key.nbytes <= small_bytes
        self._mine = [(shard.words, shard.mine) for shard in key.pushes]
        self._stored: list[tuple[Any, ...]] = [
            (one.words, one.stored, one.start, one.stop, one.blocks, one.block_elements, one.line, one.enough)
            for one in key.shards
        ]
        self._lent = InPlacePushes(key.shards)
        self._in_place = False

    def post(self, array: Array, priority: int) -> Task[None] | None:
        key = self._key
        round_ = key.round
        if self._flag[0]:
            return self._slow_path.push(key, array, priority)
        for words, mine in self._mine:
            if words[mine] != round_:
                return self._slow_path.push(key, array, priority)
        pushes = None if self._small else self._lent.of(array)
        self._in_place = bool(pushes)
        key.round = round_ = round_ + 1
        if pushes:
            for push in pushes:
                push.post(round_, priority)
        else:
            flat = array.reshape(-1)
            payloads = [(shard, flat[shard.start : shard.stop]) for shard in key.shards]
            self._slow_path.copy_in(key, round_, payloads, priority)
        return None

    def wait_until_read(self) -> Task[None] | None:
        key = self._key
        for words, mine in self._mine if self._in_place else ():
            if words[mine] < key.round and not spin_until(words, mine, key.round):
                return self._slow_path.wait_until_read(key)
        return None

    def pull(self, out: Array) -> Task[None] | None:
        key = self._key
        if self._flag[0]:
            return self._slow_path.pull(key, out)
        flat, earlier = out.reshape(-1), key.round - 1
        for words, stored, start, stop, blocks, size, line, enough in self._stored:
            before, done = earlier * blocks, 0
            while done < blocks:
                needed = before + enough(done)
                if words[0] < needed and not spin_until(words, 0, needed):
                    return self._slow_path.pull(key, flat)
                there = words[0] - before
                # If the whole shard is ready at the first look, copy it with one statement.
                if there == blocks and not done:
                    flat[start:stop] = stored
                else:
                    first, last = done * size, there * size
                    flat[start + first : min(start + last, stop)] = stored[first:last]
                done = there
            if line.waiting():
                return self._slow_path.pull(key, flat)
        return None

    def pushpull(self, array: Array, out: Array, priority: int) -> Task[None] | None:
        # If the arrays overlap, writing the first elements of the result may destroy later elements of `array` that
        # servers still have to read. In that case wait for the push.
        apart = out is array or not np.may_share_memory(array, out)
        left = self.post(array, priority) if apart else self.push(array, priority)
        return self.pull(out) if left is None else self._slow_path.then_pull(self._key, left, out)


class ClientFastPath(FastRoute):
    """The fast path of a key for a member of a client, if the client and all servers are on one node.

    The members sum their arrays by one collective. Rank 0 pushes the sum, and every member reads the result from the
    servers' memory. In one round some members may take this path and others the general path (`push`), because both
    run the same collective.
    """

    lists = False
    __slots__ = ("_comm", "_flag", "_label", "_mine", "_push", "_pushes", "_reading", "_total")

    def __init__(
        self, slow_path: SlowPath, key: Key, comm: MPI.Intracomm, push: Callable[[Key, Array, int], Task[None]]
    ) -> None:
        super().__init__(slow_path, key)
        self._flag = slow_path.flag
        self._comm = comm
        self._push = push
        self._reading = Blocks(slow_path, key, 0)
        self._mine = [(shard.words, shard.mine) for shard in key.pushes]
        self._label = label("push", [key])
        # on rank 0: the client's sum, which the servers read in place
        self._total: Array | None = None
        self._pushes: list[RepeatedPush] = []

    def post(self, array: Array, priority: int) -> Task[None] | None:
        key = self._key
        # Pass on a 1-D array as it is, because collectives find their plan by the array's identity.
        flat = array if array.ndim == 1 else array.reshape(-1)
        if self._flag[0]:
            return self._push(key, flat, priority)
        for words, mine in self._mine:
            if not spin_until(words, mine, key.round):
                return self._push(key, flat, priority)
        out = flat
        if self._mine:
            out = self._room() if self._total is None else self._total
        elif not flat.flags.writeable:
            out = np.empty_like(flat)
        key.round += 1
        collectives.reduce(flat, self._comm, out=out, label=self._label)
        for push in self._pushes:
            push.post(key.round, priority)
        return None

    def wait_until_read(self) -> None:
        """Return at once, because `post` has already added the array to the client's sum."""

    def pull(self, out: Array) -> Task[None] | None:
        return self._reading.pull(out)

    def _room(self) -> Array:
        """Return the array for the sum, and create pushes that the servers read from this array.

        The piece of the key keeps the array. The general path uses it as well.
        """
        piece = self._key.pieces[0]
        if piece.reduced is None:
            piece.reduced = arena.empty(self._key.size, self._key.dtype)
        self._total, self._pushes = piece.reduced, InPlacePushes(self._key.pushes).of(piece.reduced)
        return piece.reduced


def by_itself(slow_path: SlowPath, key: Key, layout: Layout) -> Fast | None:
    """Return the key's fast path on a worker that is not in a client, or None if the key has no fast path."""
    if layout.options.staleness >= 0:
        return None
    if len(key.shards) > 1 or key.shards[0].blocks > 1:
        return None if layout.asynchronous else Blocks(slow_path, key, layout.options.small_bytes)
    return (OneBlockAsync if layout.asynchronous else OneBlock)(slow_path, key, layout.options.small_bytes)


def in_client(
    slow_path: SlowPath, key: Key, layout: Layout, slow: Callable[[Key, Array, int], Task[None]]
) -> Fast | None:
    """Return the key's fast path on a member of a client, or None if the key has no fast path.

    `slow` pushes a key by the general path.
    """
    if layout.options.masters != "one" or not key.size:
        return None
    assert layout.sums is not None
    return ClientFastPath(slow_path, key, layout.sums, slow)
