"""How a worker reads keys from the servers.

On a node, a synchronous pull reads the server's memory behind the server's progress, block by block while it is still
in cache; an asynchronous one between two updates (`snapshot`), or, of many blocks or with `staleness`, when the server
has granted it. Servers of other nodes answer in messages.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpips.hearing import Hearing, Task
from mpips.keys import Key, Part
from mpips.messages import Op
from mpips.payloads import pending

Array = NDArray[Any]
TRIES = 4


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


class Pulls(Hearing):
    """Pulls of units, as generators that yield whenever they have to wait."""

    def exchange(self, key: Key, push: Task, flat: Array, parts: Sequence[Part]) -> Task:
        """Do `push`, a contribution to parts of the key, and pull them. Other nodes are asked for the answer as soon as
        the payload is under way: behind the payloads of parts that follow, the question would wait in the link."""
        asked = False
        try:
            for moved in push:
                if not asked:
                    asked = True
                    for part in parts:
                        if not part.local:
                            part.line.post(Op.PULL, part.number, key.round)
                yield moved
        except BaseException:
            for part in parts if asked else ():
                if not part.local:
                    self._payloads.swallow(part, self._payloads.blocks(part, flat[part.start : part.stop]))
            raise
        yield from self.pull(key, flat, parts, asked)

    def pull(self, key: Key, flat: Array, parts: Sequence[Part], asked: bool = False) -> Task:
        """Read parts of the key into `flat` (1-D, the key's size) after this worker's pushes; ends when it is there.
        `asked`: servers on other nodes have been asked already."""
        if self._layout.asynchronous or not self.all_local:
            direct = [part for part in parts if part.line.local and not self._layout.asynchronous]
            distant = [part for part in parts if part not in direct]
            if direct:
                yield from self._follow(key, flat, direct)
            if self._layout.asynchronous and self._layout.options.staleness < 0:
                distant = yield from self._between_updates(key, flat, distant)
            if distant:
                yield from self._ask(key, flat, distant, asked)
        else:
            yield from self._follow(key, flat, parts)

    def _follow(self, key: Key, flat: Array, parts: Sequence[Part]) -> Task:
        """Copy what the servers have finished, behind them. Nothing is overwritten before this worker's next push."""
        before = key.round - 1
        copied = [0] * len(parts)
        left, moved = len(parts), False
        while left:
            went_on, moved = moved, False
            for index, part in enumerate(parts):
                done = copied[index]
                if done >= part.blocks:
                    continue
                there = min(part.words[0] - before * part.blocks, part.blocks)
                if there < part.enough(done):
                    continue
                size = part.block_elements
                start, stop = done * size, min(there * size, part.stop - part.start)
                flat[part.start + start : part.start + stop] = part.stored[start:stop]  # type: ignore[index]
                copied[index] = there
                left -= there == part.blocks
                moved = True
            if not moved:
                self.check(key)
                yield went_on
        self.check(key)

    def _between_updates(
        self, key: Key, flat: Array, parts: Sequence[Part]
    ) -> Generator[bool | None, None, list[Part]]:
        """Read units of one block on this node after this worker's pushes; those that are left."""
        left = []
        for part in parts:
            if not part.local or part.blocks > 1:
                left.append(part)
                continue
            while part.mine >= 0 and part.words[part.mine] < key.round:
                self.listen()
                yield False
            if not snapshot(part.words, part.stored, flat[part.start : part.stop]):  # type: ignore[arg-type]
                left.append(part)
        self.listen()
        self.check(key)
        return left

    def _ask(self, key: Key, flat: Array, parts: list[Part], asked: bool) -> Task:
        """Read units that must not change meanwhile: on a node under a grant, from other nodes as messages."""
        coming: list[tuple[Part, list[Any], list[Array]]] = []
        for part in self._turned(parts):
            part.granted = False
            if not part.local:
                slices = self._payloads.blocks(part, flat[part.start : part.stop])
                coming.append((part, self._payloads.receive(part, slices), slices))
            if part.local or not asked:
                part.line.post(Op.PULL, part.number, key.round if part.mine >= 0 else 0)
        waiting = [part for part in parts if part.local]
        receives = [request for _, requests, _ in coming for request in requests]
        patient = self._layout.asynchronous  # a push that failed does not keep the server from granting
        try:
            while left := len(waiting) + len(receives):
                if patient:
                    self.listen()
                else:
                    self.check(key)
                for part in waiting:
                    if part.granted:
                        flat[part.start : part.stop] = part.stored
                        part.line.post(Op.RELEASE, part.number)
                waiting = [part for part in waiting if not part.granted]
                receives = pending(receives)
                if waiting or receives:
                    yield len(waiting) + len(receives) < left
        finally:
            self._give_up(waiting, coming if receives else [])
        self.check(key)

    def pull_rows(self, key: Key, row: int, wanted: Sequence[tuple[Part, Array, Array]]) -> Task:
        """Read rows of `row` elements after this worker's pushes: (part, numbers within it, where to)..."""
        coming: list[tuple[Part, list[Any], list[Array]]] = []
        waiting: list[tuple[Part, Array, Array]] = []
        for part, numbers, table in wanted:
            round_ = key.round if part.mine >= 0 else 0
            if part.local:
                waiting.append((part, numbers, table))
                part.granted = False
                if self._layout.asynchronous:
                    part.line.post(Op.PULL, part.number, round_)
                continue
            step = max(1, part.block_elements // row)
            slices = [table[at : at + step].reshape(-1).view(np.uint8) for at in range(0, len(numbers), step)]
            coming.append((part, self._payloads.receive(part, slices), slices))
            part.line.post_body(numbers.tobytes(), Op.PULL_ROWS, part.number, round_)
        receives = [request for _, requests, _ in coming for request in requests]
        try:
            while left := len(waiting) + len(receives):
                if self._layout.asynchronous:
                    self.listen()
                else:
                    self.check(key)
                waiting = [item for item in waiting if not self._take_rows(key, row, *item)]
                receives = pending(receives)
                if waiting or receives:
                    yield len(waiting) + len(receives) < left
        finally:
            granting = [part for part, _, _ in waiting] if self._layout.asynchronous else []
            self._give_up(granting, coming if receives else [])
        self.check(key)

    def _give_up(self, waiting: Sequence[Part], coming: Sequence[tuple[Part, list[Any], list[Array]]]) -> None:
        """End what this worker has asked for and waits for no more: units to be granted, and messages."""
        for part in waiting:
            part.given_up += not part.granted
            part.line.post(Op.RELEASE, part.number)
        for part, requests, slices in coming:
            self._payloads.give_up(part, requests, slices)

    def _take_rows(self, key: Key, row: int, part: Part, numbers: Array, table: Array) -> bool:
        """Copy rows out of a server's memory on this node, if they may be read now."""
        if self._layout.asynchronous:
            ready = part.granted
        else:
            ready = part.words[0] >= key.round * part.blocks
        if ready:
            assert part.stored is not None
            table[...] = part.stored.reshape(-1, row)[numbers]
            if self._layout.asynchronous:
                part.line.post(Op.RELEASE, part.number)
        return ready

    def _turned(self, parts: Iterable[Part]) -> list[Part]:
        """The parts from another server on for every worker, so that not all use the link of the same server first.
        What one server has stays in order: it can answer the first part when that has come from everybody."""
        first = self._layout.rank * self._layout.num_servers // self._layout.num_workers
        return sorted(parts, key=lambda part: (part.server - first) % self._layout.num_servers)
