"""Pulls: how a worker reads keys from the servers, as tasks that yield whenever they have to wait.

On a node, a synchronous pull reads the server's memory behind the server's progress, block by block while it is still
in cache. An asynchronous one reads between two updates (`snapshot`), or, of many blocks or with `staleness`, when the
server has granted it. Servers of other nodes answer in messages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.store.keys.key import Key
from mpips.store.keys.shard import Shard
from mpips.store.remote.link import Link
from mpips.store.roles import Layout
from mpips.store.runtime.tasks import Task
from mpips.store.transport.frames import Op
from mpips.store.transport.messages import MessageGroup, cut_bytes

Array = NDArray[Any]
TRIES = 4
Rows = tuple[Shard, NDArray[np.int64], Array]
"""A shard, numbers of rows within it, and where these go, (rows, elements of one)."""


def snapshot(words: Any, stored: Array, out: Array) -> bool:
    """Copy a unit of an asynchronous store, whose `words[0]` is odd while an update is being written and another number
    after it; False where updates came between, several times."""
    for _ in range(TRIES):
        before = words[0]
        if not before & 1:
            out[...] = stored
            if words[0] == before:
                return True
        os.sched_yield()
    return False


class Pull:
    """One worker's reads. Whoever runs a task hears the servers meanwhile (`Link.hearing`)."""

    def __init__(self, layout: Layout, link: Link) -> None:
        self._link, self._asynchronous = link, layout.asynchronous
        self._between = layout.asynchronous and layout.options.staleness < 0
        """Whether an asynchronous unit may be read between two updates, unasked."""

    def part(self, key: Key, out: Array, shards: Sequence[Shard], asked: bool = False) -> Task[None]:
        """Read shards of the key into `out` (1-D, the key's size) after this worker's pushes; over when it is there.
        `asked`: servers of other nodes have been asked already."""
        if self._asynchronous:
            behind, rest = [], shards
        else:
            behind, rest = [shard for shard in shards if shard.local], [shard for shard in shards if not shard.local]
        if behind:
            yield from self._follow(key, out, behind)
        if self._between:
            rest = yield from self._between_updates(key, out, rest)
        if rest:
            yield from self._ask(key, out, rest, asked)

    def exchange(self, key: Key, push: Task[None], out: Array, shards: Sequence[Shard]) -> Task[None]:
        """Do `push`, a contribution to these shards, and pull them. Servers of other nodes are asked for the answer as
        soon as the payload is under way: behind payloads that follow, the question would wait in the link."""
        asked = False
        for moved in push:
            if not asked:
                asked = True
                for shard in shards:
                    if not shard.local:
                        shard.line.post(Op.PULL, shard.number, key.round)
            yield moved
        yield from self.part(key, out, shards, asked)

    def rows(self, key: Key, row: int, wanted: Sequence[Rows]) -> Task[None]:
        """Read rows of `row` elements after this worker's pushes."""
        waiting: list[Rows] = []
        coming: list[MessageGroup] = []
        for shard, numbers, table in wanted:
            round_ = key.round if shard.mine >= 0 else 0
            shard.granted = False
            if not shard.local:
                step = max(1, shard.block_elements // row)
                slices = [table[at : at + step].reshape(-1).view(np.uint8) for at in range(0, len(numbers), step)]
                coming.append(self._link.sender.receive(shard, slices))
                shard.line.post_body(numbers.tobytes(), Op.PULL_ROWS, shard.number, round_)
                continue
            waiting.append((shard, numbers, table))
            if self._asynchronous:
                shard.line.post(Op.PULL, shard.number, round_)
        left = len(wanted)
        while waiting or coming:
            waiting = [rows for rows in waiting if not self._take_rows(key, row, *rows)]
            coming = [exchange for exchange in coming if exchange.pending()]
            left, before = len(waiting) + len(coming), left
            if left:
                yield left < before

    def _follow(self, key: Key, out: Array, shards: Sequence[Shard]) -> Task[None]:
        """Copy what the servers have finished, behind them. Nothing is overwritten before this worker's next push."""
        before = key.round - 1
        copied = [0] * len(shards)
        left, moved = len(shards), False
        while left:
            went_on, moved = moved, False
            for index, shard in enumerate(shards):
                done = copied[index]
                if done >= shard.blocks:
                    continue
                there = min(shard.words[0] - before * shard.blocks, shard.blocks)
                if there < shard.enough(done):
                    continue
                size = shard.block_elements
                start, stop = done * size, min(there * size, shard.stop - shard.start)
                out[shard.start + start : shard.start + stop] = shard.stored[start:stop]  # type: ignore[index]
                copied[index] = there
                left -= there == shard.blocks
                moved = True
            if not moved:
                yield went_on

    def _between_updates(self, key: Key, out: Array, shards: Sequence[Shard]) -> Task[Sequence[Shard]]:
        """Read units of one block on this node after this worker's pushes; those that are left."""
        left = []
        for shard in shards:
            if not shard.local or shard.blocks > 1:
                left.append(shard)
                continue
            while shard.mine >= 0 and shard.words[shard.mine] < key.round:
                yield False
            if not snapshot(shard.words, shard.stored, out[shard.start : shard.stop]):  # type: ignore[arg-type]
                left.append(shard)
        return left

    def _ask(self, key: Key, out: Array, shards: Sequence[Shard], asked: bool) -> Task[None]:
        """Read units that must not change meanwhile: on a node under a grant, from other nodes as messages."""
        sender, coming = self._link.sender, list[MessageGroup]()
        for shard in self._link.turned(shards):
            shard.granted = False
            if not shard.local:
                slices = cut_bytes(out[shard.start : shard.stop], shard.block_elements * out.itemsize)
                coming.append(sender.receive(shard, slices))
            if shard.local or not asked:
                shard.line.post(Op.PULL, shard.number, key.round if shard.mine >= 0 else 0)
        waiting = [shard for shard in shards if shard.local]
        left = len(shards)
        while waiting or coming:
            for shard in waiting:
                if shard.granted:
                    out[shard.start : shard.stop] = shard.stored
                    shard.line.post(Op.RELEASE, shard.number)
            waiting = [shard for shard in waiting if not shard.granted]
            coming = [exchange for exchange in coming if exchange.pending()]
            left, before = len(waiting) + len(coming), left
            if left:
                yield left < before

    def _take_rows(self, key: Key, row: int, shard: Shard, numbers: NDArray[np.int64], table: Array) -> bool:
        """Copy rows out of a server's memory on this node, if they may be read now."""
        ready = shard.granted if self._asynchronous else shard.words[0] >= key.round * shard.blocks
        if ready:
            assert shard.stored is not None
            table[...] = shard.stored.reshape(-1, row)[numbers]
            if self._asynchronous:
                shard.line.post(Op.RELEASE, shard.number)
        return ready
