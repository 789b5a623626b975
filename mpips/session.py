"""A worker's side of the servers: pushes of units, as generators that yield whenever they have to wait.

On a node, a push is a frame that says where the payload lies: in the caller's own array if that was made by
`mpips.empty`, else in the unit's outbox, which the worker fills while the server reads behind it.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.node import arena
from mpips.buffers import FRAME_COST
from mpips.hearing import Task
from mpips.keys import Key, Part
from mpips.lines import Repeated
from mpips.messages import Coding, Op
from mpips.outbox import Outbox
from mpips.pulls import Pulls

Array = NDArray[Any]
INTERRUPTS = 1000  # in what completes a push that was interrupted
FAILURES = (ValueError, TypeError, RuntimeError)
"""What one of several tasks may raise while the others go on."""


class Session(Pulls):
    """Lines to all servers and the units behind them. One thread."""

    def push_long(self, key: Key, array: Array, priority: int) -> Task:
        """Push where the short way (`mpips.short`) does not do. Nothing is begun before the first step."""
        flat = array.reshape(-1)
        payloads = [(part, flat[part.start : part.stop]) for part in key.pushes]
        before = key.round
        try:
            round_ = self.begin(key)
            yield from self.push(key, round_, payloads, priority, True)
        except BaseException as error:
            if key.round != before:
                self.break_off(key, key.round, key.pushes, error)
            raise

    def push(
        self, key: Key, round_: int, payloads: Sequence[tuple[Part, Array]], priority: int, wait: bool,
        own: bool = False,
    ) -> Task:  # fmt: skip
        """Contribute 1-D arrays to a round of parts of the key.

        With `wait` it ends when the arrays may be overwritten. `own`: they stay as they are until the server has read
        them (the caller sees to that), so they are read in place if they can be.
        """
        here = [(part, values) for part, values in payloads if part.line.local]
        if len(here) == len(payloads):
            return self._push_here(key, round_, here, priority, wait, own)
        given = {part.number: values for part, values in payloads if not part.line.local}
        sends = [
            self._payloads.send(
                key, part, given[part.number].view(np.uint8), round_, Op.PUSH, priority, alone=not own
            )
            for part in self._turned(part for part, _ in payloads if not part.line.local)
        ]
        return together([*sends, self._push_here(key, round_, here, priority, wait, own)])

    def _push_here(
        self, key: Key, round_: int, payloads: Sequence[tuple[Part, Array]], priority: int, wait: bool, own: bool
    ) -> Task:
        """`push` to servers of this node. Who raises on the way withdraws from the parts that he has not come to."""
        waits: list[Part] = []
        copies: list[tuple[Part, Array]] = []
        try:
            for part, values in payloads:
                region = arena.locate(values) if own or values.nbytes > self._layout.options.small_bytes else None
                if region is None:
                    copies.append((part, values))
                    continue
                part.line.post(Op.PUSH, part.number, round_, region, priority=priority)
                part.said = round_
                waits.append(part)
            for part, _ in copies:
                while part.words[part.mine] < round_ - 1:
                    self.check(key, round_)
                    yield False
            self.copy_in(key, round_, copies, priority)
        except BaseException as error:
            self.break_off(key, round_, [part for part, _ in payloads], error)
            raise
        if wait and not own:
            for part in waits:
                while part.words[part.mine] < round_:
                    self.check(key, round_)
                    yield False

    def copy_in(self, key: Key, round_: int, payloads: Sequence[tuple[Part, Array]], priority: int) -> None:
        """Contribute copies of 1-D arrays to a round of parts on this node, whose servers have read all rounds before;
        ends when the arrays may be overwritten, and waits for no other worker (see `outbox`). Where it breaks off,
        `said` tells which have been told of theirs; those get all that they count on."""
        grows: list[tuple[Outbox, Array]] = []
        try:
            for part, values in payloads:
                outbox = part.outbox or self.outbox(key, part)
                if part.blocks == 1:
                    outbox.slots[...] = values
                else:
                    outbox.begin(round_)
                    grows.append((outbox, values))
                part.copy.post(round_, priority)  # type: ignore[union-attr]
                part.said = round_
            fill(grows)
        except BaseException:
            fill_at_last(grows)
            raise

    def push_coded(
        self, key: Key, round_: int, part: Part, payload: Array, coding: Coding, priority: int, count: int = 0,
        alone: bool = True,
    ) -> Task:  # fmt: skip
        """Contribute a compressed or row-sparse payload (uint8) to a round of a part; ends when it may be forgotten."""
        if part.line.local:
            shared = payload if arena.locate(payload) else arena.empty(payload.size, np.uint8)
            shared[...] = payload
            region = arena.locate(shared)
            assert region is not None
            part.line.post(Op.PUSH, part.number, round_, region, coding, priority, aux=count)
            part.said = round_
            part.kept = shared  # until the next one: that waits until this one has been read
            return
        yield from self._payloads.send(key, part, payload, round_, Op.PUSH, priority, coding, count, alone)

    def outbox(self, key: Key, part: Part) -> Outbox:
        """A part's outbox, which is made where there is none yet."""
        if part.outbox is None:
            size = part.stop - part.start
            outbox = Outbox(part.words, size, part.blocks, part.block_elements, key.dtype)
            region, coding = (outbox.plain, Coding.PLAIN) if part.blocks == 1 else (outbox.growing, Coding.GROWING)
            part.copy = Repeated(part.line, part.number, region, coding)
            part.outbox = outbox
        return part.outbox

    def set(self, pairs: Iterable[tuple[Key, Array]]) -> Task:
        """Give keys their first values; for one worker, before anybody uses them."""
        parts = ((key, part, flat[part.start : part.stop]) for key, flat in pairs for part in key.parts)
        return self.in_window((self._set_part(*part), part[2].nbytes) for part in parts)

    def in_window(self, tasks: Iterable[tuple[Task, int]]) -> Task:
        """Run tasks side by side, so many of them as servers keep the bytes of, given with each, for a worker."""
        waiting = iter(tasks)
        room = self._layout.options.chunks_in_flight * self._layout.options.chunk_bytes
        running: deque[tuple[Task, int]] = deque()
        following = next(waiting, None)
        try:
            while following is not None or running:
                while following is not None and (not running or following[1] + FRAME_COST <= room):
                    running.append((following[0], following[1] + FRAME_COST))
                    room -= running[-1][1]
                    following = next(waiting, None)
                self.listen()
                before = len(running)
                for _ in range(before):
                    task, cost = running.popleft()
                    if goes_on(task):
                        running.append((task, cost))
                    else:
                        room += cost
                if running:
                    yield len(running) < before
        finally:
            for task, _ in running:
                task.close()

    def _set_part(self, key: Key, part: Part, values: Array) -> Task:
        if part.local:
            part.stored[...] = values  # type: ignore[index]
            return
        part.granted = False
        yield from self._payloads.send(key, part, values.view(np.uint8), 0, Op.SET, 0)
        while not part.granted:
            yield False


def fill(grows: Sequence[tuple[Outbox, Array]]) -> None:
    """Copy what is not there yet into outboxes block by block, in turns over the servers and, where workers share a
    core, over them, so that a server finds every worker's block in the cache."""
    while left := [item for item in grows if not item[0].full]:
        for outbox, values in left:
            outbox.put(values)
            os.sched_yield()


def fill_at_last(grows: Sequence[tuple[Outbox, Array]]) -> None:
    """`fill`, though interrupts come meanwhile: the servers, which sum behind it, count on all of it."""
    for _ in range(INTERRUPTS):
        try:
            fill(grows)
        except BaseException:
            continue
        return


def goes_on(task: Task) -> bool:
    """Take a task one step further; whether it has not ended."""
    for _ in task:
        return True
    return False


def together(tasks: Sequence[Task]) -> Task:
    """Run tasks side by side; when one has failed the others still run to their end, so that no peer waits for them.
    Of several failures the first task's is raised, whichever came first, as other ranks raise the same."""
    failures: dict[int, Exception] = {}
    running = list(enumerate(tasks))
    try:
        while running:
            left, moved = [], False
            for index, task in running:
                try:
                    moved |= bool(next(task))
                    left.append((index, task))
                except StopIteration:
                    pass
                except FAILURES as error:
                    failures[index] = error
            moved |= len(left) < len(running)
            running = left
            if running:
                yield moved
    finally:
        for _, task in running:
            task.close()
    if failures:
        raise failures[min(failures)]
