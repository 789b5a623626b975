"""A worker's side of the servers: pushes and pulls of units, as generators that yield whenever they have to wait.

On a node, a pull reads the server's memory behind the server's progress, block by block while it is still in cache, and
a push is a frame that says where the payload lies: in the caller's own array if that was made by `mpips.empty`, else in
the unit's outbox, which the worker fills while the server reads behind it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives import arena
from collectives.arena import Region
from collectives.errors import CollectiveError, StallError
from mpips import messages
from mpips.keys import Failure, Key, Part
from mpips.layout import Layout
from mpips.lines import TAG_FRAME, Line
from mpips.messages import Coding, Frame, Op
from mpips.remote import ALONG, pull_tag, push_tag

Array = NDArray[Any]
Task = Generator[None, None, None]
HEADER = 64
GOODBYE_SECONDS = 5.0  # a server that has ended says nothing any more
EVENTS = 256  # bad calls remembered


class Session:
    """Lines to all servers and the units behind them. One thread."""

    def __init__(self, layout: Layout, lines: list[Line]) -> None:
        self._layout, self.lines = layout, lines
        self._small = layout.options.small_bytes
        self._names: dict[int | str, Key] = {}
        self._parts: dict[int, tuple[Key, Part]] = {}
        self.all_local = all(line.local for line in lines)
        self._answers: dict[int, tuple[bytes, bool]] = {}
        self._tokens = 0
        self._events: deque[str] = deque(maxlen=EVENTS)
        self._discarded: list[tuple[list[Any], Array]] = []
        self.warn: Callable[[str], None] = lambda text: None

    def add(self, key: Key) -> None:
        self._names[key.name] = key
        for part in key.parts:
            self._parts[part.number] = key, part

    def remove(self, key: Key) -> None:
        del self._names[key.name]
        for part in key.parts:
            del self._parts[part.number]

    def key(self, name: int | str) -> Key | None:
        """The key of that name."""
        return self._names.get(name)

    def part(self, number: int) -> Part:
        """The unit of that number."""
        return self._parts[number][1]

    def for_each_key(self, do: Callable[[Key], None]) -> None:
        for key in self._names.values():
            do(key)

    # ---- frames from servers

    def listen(self) -> None:
        """Take in what servers have said."""
        # One look at MPI for all servers of other nodes: each costs as much as everything else here.
        heard = not self.all_local and self._layout.world.Iprobe(tag=TAG_FRAME)
        for line in self.lines:
            if (heard or line.local) and line.waiting():
                for fields in line.read():
                    self._hear(line, Frame._make(fields))

    def _hear(self, line: Line, frame: Frame) -> None:
        if frame.op == Op.ANSWER:
            self._answers[frame.token] = line.body(frame), bool(frame.flags)
            return
        key, part = self._parts[frame.unit]
        if frame.op == Op.CONSUMED:
            part.told = max(part.told, frame.round)
            if not frame.round:
                part.granted = True
        elif frame.op == Op.GRANT:
            part.granted = True
        elif frame.op == Op.CREDIT:
            part.credits.append(frame.aux)
        elif frame.op == Op.FAILED:
            text, _, event = line.body(frame).decode().partition("\0")
            if event in self._events:
                key.excused = max(key.excused, frame.round)
            if frame.round > key.excused:
                key.failed.setdefault(frame.round, Failure(text, event, bool(frame.flags)))
        elif frame.op == Op.WARNING:
            self.warn(line.body(frame).decode())

    def check(self, key: Key) -> None:
        """Raise what made a round of the key fail, once."""
        self.listen()
        if key.failed:
            due = sorted(round_ for round_ in key.failed if round_ <= key.round)
            if due:
                failure = key.failed[due[0]]
                key.excused = max(key.excused, due[-1])
                for round_ in due:
                    del key.failed[round_]
                self._raised(failure.event)
                raise (StallError if failure.timed_out else CollectiveError)(failure.text)

    def _raised(self, event: str) -> None:
        """What else fails because of the same bad call is known."""
        if event:
            self._events.append(event)
            for key in self._names.values():
                for round_ in [round_ for round_, failure in key.failed.items() if failure.event == event]:
                    key.excused = max(key.excused, round_)
                    del key.failed[round_]

    # ---- pushing

    def push_long(self, key: Key, array: Array, priority: int) -> Task:
        """Push where the short way (`mpips.short`) does not do."""
        flat = array.reshape(-1)
        payloads = [(part, flat[part.start : part.stop]) for part in key.pushes]
        return self.push(key, self.begin(key), payloads, priority, True)

    def begin(self, key: Key, alone: bool = True) -> int:
        """Count the next push of the key and return its round. A worker that acts `alone` raises here what has already
        made the round fail; in a client all go through the collectives first."""
        key.round += 1
        if alone and key.failed and key.round in key.failed:
            failure = key.failed[key.round]
            self._refuse(key, failure.text, failure.event)
            self.check(key)
        return key.round

    def push(
        self, key: Key, round_: int, payloads: Sequence[tuple[Part, Array]], priority: int, wait: bool,
        own: bool = False,
    ) -> Task:  # fmt: skip
        """Contribute 1-D arrays to a round of parts of the key.

        With `wait` it ends when the arrays may be overwritten. `own`: they stay as they are until the server has read
        them (the caller sees to that), so they are read in place if they can be.
        """
        waits: list[Part] = []
        grows: list[tuple[Part, Array]] = []
        sends = [self._send(key, part, values, round_, priority) for part, values in payloads if not part.line.local]
        if sends:
            yield from together(self._turned(sends))
        for part, values in payloads:
            if not part.line.local:
                continue
            region = arena.locate(values) if own or values.nbytes > self._small else None
            if region is not None:
                part.line.post(Op.PUSH, part.number, round_, region, priority=priority)
                waits.append(part)
                continue
            self.outbox(key, part)
            while part.words[part.mine] < round_ - 1:
                self.check(key)
                yield
            if part.blocks == 1:
                part.copy[...] = values  # type: ignore[index]
                part.line.post(Op.PUSH, part.number, round_, part.plain, priority=priority)
            else:
                part.filled[0] = (round_ - 1) * part.blocks
                part.line.post(Op.PUSH, part.number, round_, part.growing, Coding.GROWING, priority)
                grows.append((part, values))
        if grows:
            self._fill(grows)
        if wait and not own:
            for part in waits:
                while part.words[part.mine] < round_:
                    self.check(key)
                    yield

    def _turned(self, items: list[Any]) -> list[Any]:
        """The items from another one on for every worker, so that not all use the link of the same server first."""
        first = self._layout.rank * len(items) // self._layout.num_workers
        return items[first:] + items[:first]

    def push_coded(
        self, key: Key, round_: int, part: Part, payload: Array, coding: Coding, priority: int, count: int = 0
    ) -> Task:
        """Contribute a compressed or row-sparse payload (uint8) to a round of a part; ends when it may be forgotten."""
        if part.line.local:
            shared = payload if arena.locate(payload) else arena.empty(payload.size, np.uint8)
            shared[...] = payload
            region = arena.locate(shared)
            assert region is not None
            part.line.post(Op.PUSH, part.number, round_, region, coding, priority, aux=count)
            part.kept = shared  # until the next one: that waits until this one has been read
            return
        server = self._layout.server_rank(part.server)
        region = Region(0, 0, 0, 0, payload.size)
        part.line.post(Op.PUSH, part.number, round_, region, coding, priority, aux=count, flags=ALONG)
        request = self._layout.world.Isend(payload, server, push_tag(part.number))
        while not request.Test():
            yield

    def drained(self, key: Key, round_: int, parts: Sequence[Part], alone: bool = True) -> Task:
        """Wait until the servers have read this worker's contributions up to `round_`; `alone` as in `begin`."""
        for part in parts:
            while part.consumed() < round_:
                if alone:
                    self.check(key)
                else:
                    self.listen()
                yield

    def outbox(self, key: Key, part: Part) -> Array:
        """The copy in a part's outbox, which is made where there is none yet."""
        if part.copy is not None:
            return part.copy
        part.outbox = arena.empty(HEADER + (part.stop - part.start) * key.dtype.itemsize, np.uint8)
        part.copy = part.outbox[HEADER:].view(key.dtype)
        part.filled = memoryview(part.outbox[:8].view(np.uint64))  # type: ignore[arg-type]
        growing, plain = arena.locate(part.outbox), arena.locate(part.copy)
        assert growing is not None
        assert plain is not None
        part.growing, part.plain = growing, plain
        return part.copy

    def _fill(self, grows: list[tuple[Part, Array]]) -> None:
        """Copy into outboxes block by block, in turns over the servers, each block counted as soon as it is there."""
        for block in range(max((part.blocks for part, _ in grows), default=0)):
            for part, values in grows:
                if block >= part.blocks:
                    continue
                start, stop = block * part.block_elements, (block + 1) * part.block_elements
                part.copy[start:stop] = values[start:stop]  # type: ignore[index]
                part.filled[0] += 1

    def _send(self, key: Key, part: Part, values: Array, round_: int, priority: int, op: Op = Op.PUSH) -> Task:
        """Send a plain payload to another node; ends when it may be overwritten."""
        comm = self._layout.world
        server = self._layout.server_rank(part.server)
        data = values.view(np.uint8)
        region = Region(0, 0, 0, 0, data.size)
        if part.blocks == 1:
            part.line.post(op, part.number, round_, region, priority=priority, flags=ALONG)
            sends = [comm.Isend(data, server, push_tag(part.number))]
        else:
            part.credits.clear()
            part.line.post(op, part.number, round_, region, priority=priority)
            sends = []
            size = part.block_elements * values.itemsize
            left = part.blocks
            while left:
                while part.credits:
                    start = part.credits.pop(0) * size
                    sends.append(comm.Isend(data[start : start + size], server, push_tag(part.number)))
                    left -= 1
                if left:
                    self.check(key)
                    yield
        while sends:
            while sends and sends[0].Test():
                sends.pop(0)
            if sends:
                yield

    def refuse(self, key: Key, sentence: str, event: str) -> None:
        """Tell the servers that this worker cannot contribute to the key's round, which then fails for all others; the
        caller raises by itself."""
        key.failed.pop(key.round, None)
        key.excused = key.round
        self._refuse(key, sentence, event)

    def _refuse(self, key: Key, sentence: str, event: str) -> None:
        body = f"{sentence}\0{event}".encode()
        for part in key.pushes:
            part.line.post_body(body, Op.REFUSE, part.number, key.round)

    # ---- pulling

    def exchange(self, key: Key, push: Task, flat: Array, parts: Sequence[Part]) -> Task:
        """Do `push`, a contribution to parts of the key, and pull them. Other nodes are asked for the answer as soon as
        the payload is under way: behind the payloads of parts that follow, the question would wait in the link."""
        asked = False
        try:
            for _ in push:
                if not asked:
                    asked = True
                    for part in parts:
                        if not part.local:
                            part.line.post(Op.PULL, part.number, key.round)
                yield
        except CollectiveError:
            if asked:
                self._discard(key, parts)
            raise
        yield from self.pull(key, flat, parts, asked)

    def _discard(self, key: Key, parts: Sequence[Part]) -> None:
        """Take answers that nobody waits for any more, so that they are not taken for later ones."""
        from mpi4py import MPI

        self._discarded = [(requests, data) for requests, data in self._discarded if not MPI.Request.Testall(requests)]
        for part in parts:
            if not part.local:
                data = np.empty(part.stop - part.start, key.dtype)
                self._discarded.append((self._receives(part, data), data))

    def pull(self, key: Key, flat: Array, parts: Sequence[Part], asked: bool = False) -> Task:
        """Read parts of the key into `flat` (1-D, the key's size) after this worker's pushes; ends when it is there.
        `asked`: servers on other nodes have been asked already."""
        if self._layout.asynchronous or not self.all_local:
            direct = [part for part in parts if part.line.local and not self._layout.asynchronous]
            distant = [part for part in parts if part not in direct]
            if direct:
                yield from self._follow(key, flat, direct)
            if distant:
                yield from self._ask(key, flat, distant, asked)
        else:
            yield from self._follow(key, flat, parts)

    def _follow(self, key: Key, flat: Array, parts: Sequence[Part]) -> Task:
        """Copy what the servers have finished, behind them. Nothing is overwritten before this worker's next push."""
        before = key.round - 1
        copied = [0] * len(parts)
        left = len(parts)
        while left:
            moved = False
            for index, part in enumerate(parts):
                done = copied[index]
                if done >= part.blocks:
                    continue
                there = min(part.words[0] - before * part.blocks, part.blocks)
                if there <= done:
                    continue
                size = part.block_elements
                start, stop = done * size, min(there * size, part.stop - part.start)
                flat[part.start + start : part.start + stop] = part.stored[start:stop]  # type: ignore[index]
                copied[index] = there
                left -= there == part.blocks
                moved = True
            if not moved:
                self.check(key)
                yield
        self.check(key)

    def _ask(self, key: Key, flat: Array, parts: list[Part], asked: bool) -> Task:
        """Read units that must not change meanwhile: on a node under a grant, from other nodes as messages."""
        receives = []
        for part in self._turned(parts):
            part.granted = False
            if not part.local:
                receives += self._receives(part, flat[part.start : part.stop])
            if part.local or not asked:
                part.line.post(Op.PULL, part.number, key.round if part.mine >= 0 else 0)
        waiting = [part for part in parts if part.local]
        patient = self._layout.asynchronous  # a push that failed does not keep the server from granting
        while waiting or receives:
            if patient:
                self.listen()
            else:
                self.check(key)
            for part in waiting:
                if part.granted:
                    flat[part.start : part.stop] = part.stored
                    part.line.post(Op.RELEASE, part.number)
            waiting = [part for part in waiting if not part.granted]
            receives = _pending(receives)
            if waiting or receives:
                yield
        self.check(key)

    def _receives(self, part: Part, values: Array) -> list[Any]:
        data = values.view(np.uint8)
        size = part.block_elements * values.itemsize
        server = self._layout.server_rank(part.server)
        return [
            self._layout.world.Irecv(data[start : start + size], server, pull_tag(part.number))
            for start in range(0, max(data.size, 1), size)
        ]

    # ---- rare things

    def set(self, key: Key, flat: Array) -> Task:
        """Give the key its first value; for one worker, before anybody uses it."""
        for part in key.parts:
            values = flat[part.start : part.stop]
            part.granted = False
            if part.local:
                part.stored[...] = values  # type: ignore[index]
                continue
            yield from self._send(key, part, values, 0, 0, Op.SET)
            while not part.granted:
                self.listen()
                yield

    def request(self, server: int, request: Any) -> Generator[None, None, Any]:
        """Ask one server something typed and return its answer; ValueError with the server's sentence if it refuses."""
        self._tokens += 1
        token = self._tokens
        self.lines[server].post_body(messages.encode(request), Op.CONTROL, token=token)
        while token not in self._answers:
            self.listen()
            yield
        data, failed = self._answers.pop(token)
        if failed:
            raise ValueError(data.decode())
        return messages.decode_answer(data)

    def goodbye(self) -> None:
        """Tell all servers that this worker has finished, and take in what those of other nodes have still said.

        Whatever stayed would be found by the next store: MPI gives a communicator's number to another one.
        """
        for line in self.lines:
            line.post(Op.BYE)
        talking = [line for line in self.lines if not line.local]
        until = time.monotonic() + GOODBYE_SECONDS
        while talking and time.monotonic() < until:
            talking = [line for line in talking if not self._last_words(line)]
            time.sleep(1e-4)

    @staticmethod
    def _last_words(line: Line) -> bool:
        """Read what there is; whether the server has said goodbye."""
        frames = [Frame._make(fields) for fields in line.read()]
        for frame in frames:
            if frame.op in (Op.ANSWER, Op.FAILED, Op.WARNING):
                line.body(frame)
        return any(frame.op == Op.BYE for frame in frames)


def _pending(requests: list[Any]) -> list[Any]:
    """Those that have not ended; one look at MPI for all of them."""
    if not requests or not (ended := type(requests[0]).Testsome(requests)):
        return requests
    return [request for index, request in enumerate(requests) if index not in ended]


def together(tasks: list[Task]) -> Task:
    """Run tasks side by side; when one has failed the others still run to their end, so that no peer waits for them."""
    failure = None
    while tasks:
        left = []
        for task in tasks:
            try:
                next(task)
                left.append(task)
            except StopIteration:
                pass
            except (ValueError, TypeError, RuntimeError) as error:
                failure = failure or error
        tasks = left
        if tasks:
            yield
    if failure is not None:
        raise failure
