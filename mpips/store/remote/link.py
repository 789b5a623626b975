"""A worker's end of the lines to all servers: what it says, what it hears, and what is left when the generation
ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from numpy.typing import NDArray

from collectives.errors import warn
from collectives.fabric.tasks import Task, goes_on
from mpips.store.keys.key import Key, Name, Shard
from mpips.store.roles import Layout
from mpips.store.transport import frames
from mpips.store.transport.frames import Coding, Frame, Op
from mpips.store.transport.lines import Line, MessageLine, any_waiting
from mpips.store.transport.outbox import Grows, Outbox, RepeatedPush, fill
from mpips.store.transport.pending import QUIET_SECONDS
from mpips.store.transport.sender import FRAME_COST, Sender

Array = NDArray[Any]
LOOK_SECONDS = 1e-4


class Link:
    """Lines to all servers of one store and the keys behind them. One thread at a time.

    Tasks of the store do not hear servers by themselves: who runs one listens before each step.
    """

    def __init__(self, layout: Layout, lines: list[Line]) -> None:
        self._layout = layout
        self._keys: dict[Name, Key] = {}
        self._shards: dict[int, Shard] = {}
        self._tokens = 0
        self.filling: Grows = []
        """Outboxes that servers have been told of, with what goes there: to be set before they are, emptied after."""
        self._connect(lines)

    def _connect(self, lines: list[Line]) -> None:
        self.lines = lines
        self._distant = [line for line in lines if isinstance(line, MessageLine)]
        self.all_local = not self._distant
        self.sender = Sender(self._layout)
        self._answers: dict[int, tuple[bytes, bool]] = {}
        self.filling.clear()

    def renew(self, lines: list[Line]) -> None:
        """Begin anew over these lines, in the next generation: nothing is under way, and there are no keys."""
        self._keys.clear()
        self._shards.clear()
        self._connect(lines)

    # ---- keys

    def add(self, key: Key) -> None:
        """Hear what servers say of a key, from its first value on."""
        self._keys[key.name] = key
        for shard in key.shards:
            self._shards[shard.number] = shard
            self._count(key, shard, 1)

    def remove(self, key: Key) -> None:
        """A key that nobody uses any more. What is still said of it goes unheard."""
        del self._keys[key.name]
        for shard in key.shards:
            del self._shards[shard.number]
            self._count(key, shard, -1)

    def turned(self, shards: Iterable[Shard]) -> list[Shard]:
        """Shards from another server on for every worker, so that not all use the link of the same server first. What
        one server has stays in order: it can answer the first shard when that has come from everybody."""
        first = self._layout.rank * self._layout.num_servers // self._layout.num_workers
        return sorted(shards, key=lambda shard: (shard.server - first) % self._layout.num_servers)

    def outbox(self, key: Key, shard: Shard) -> Outbox:
        """A shard's outbox, made where there is none yet, with the push of what lies there (`shard.copy`)."""
        if shard.outbox is None:
            size = shard.stop - shard.start
            outbox = Outbox(shard.words, size, shard.blocks, shard.block_elements, key.dtype)
            region, coding = (outbox.plain, Coding.PLAIN) if shard.blocks == 1 else (outbox.growing, Coding.GROWING)
            shard.copy = RepeatedPush(shard.line.repost, shard.number, region, coding)
            shard.outbox = outbox
        made: Outbox = shard.outbox
        return made

    def _count(self, key: Key, shard: Shard, sign: int) -> None:
        self.sender.stored(shard.server, sign * (shard.stop - shard.start) * key.dtype.itemsize)

    # ---- what servers say

    def listen(self) -> None:
        """Take in what servers have said. Blocks nowhere."""
        # One look at MPI for all servers of other nodes: each costs as much as everything else here.
        heard = not self.all_local and any_waiting(self._distant)
        for line in self.lines:
            if (heard or line.local) and line.waiting():
                for data in line.read():
                    self._hear(line, Frame.of(data))

    def _hear(self, line: Line, frame: Frame) -> None:
        if frame.op == Op.ANSWER:
            self._answers[frame.token] = line.body(frame), bool(frame.flags)
        elif frame.op == Op.WARNING:
            warn(line.body(frame).decode())
        elif (shard := self._shards.get(frame.unit)) is None:
            return  # forgotten
        elif frame.op == Op.CONSUMED:
            shard.told = max(shard.told, frame.round)
            shard.granted = shard.granted or not frame.round
        elif frame.op == Op.GRANT:
            shard.granted = True
        elif frame.op == Op.CREDIT:
            shard.credits.append(frame.aux)

    # ---- what servers are asked

    def order(self, server: int, request: frames.Request) -> int:
        """Tell one server something typed; the token for its `answer`."""
        self._tokens += 1
        self.lines[server].post_body(frames.encode(request), Op.CONTROL, token=self._tokens)
        return self._tokens

    def answer(self, token: int) -> Task[Any]:
        """Return what a server answers; ValueError with its sentence if it refuses."""
        self.listen()
        while token not in self._answers:
            yield False
            self.listen()
        data, failed = self._answers.pop(token)
        if failed:
            raise ValueError(data.decode())
        return frames.decode_answer(data)

    def request(self, server: int, request: frames.Request) -> Task[Any]:
        """Ask one server something typed; its answer. ValueError with the server's sentence if it refuses."""
        return (yield from self.answer(self.order(server, request)))

    def set(self, pairs: Iterable[tuple[Key, Array]]) -> Task[None]:
        """Give keys their first values (1-D); for one worker, before anybody uses them. Over when they are there."""
        shards = ((shard, flat[shard.start : shard.stop]) for key, flat in pairs for shard in key.shards)
        return self.in_window((self._set(*part), part[1].nbytes) for part in shards)

    def _set(self, shard: Shard, values: Array) -> Task[None]:
        if not shard.local:
            yield from self.sender.send_first(shard, values)
            return
        assert shard.stored is not None
        shard.stored[...] = values

    def in_window(self, tasks: Iterable[tuple[Task[Any], int]]) -> Task[None]:
        """Run tasks side by side, so many of them as servers keep the bytes of, given with each, for a worker."""
        waiting = iter(tasks)
        room = self._layout.options.chunks_in_flight * self._layout.options.chunk_bytes
        running: deque[tuple[Task[Any], int]] = deque()
        following = next(waiting, None)
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

    def goodbye(self) -> None:
        """Tell all servers that this worker has finished. Waits for nobody."""
        for line in self.lines:
            line.post(Op.BYE)
        for distant in self._distant:
            distant.leave()

    # ---- the end of the generation

    def quiesce(self) -> None:
        """The generation is over: see to it that nobody reads or writes memory that the caller has back.

        Fills the outboxes that servers count on, so that no round is half applied because of an interrupt here; then
        waits until servers of this node have read what was lent, or have stopped, and until messages are over. Blocks
        for some seconds at most. To be called again where an interrupt has ended it.
        """
        if self.filling:
            fill(self.filling)
            self.filling.clear()
        until = time.monotonic() + QUIET_SECONDS
        while _lent(self._keys.values()) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
        self.sender.stop()
        for line in self._distant:
            line.leave()


def _lent(keys: Iterable[Key]) -> bool:
    """Return whether a server of this node may still read what this worker has pushed of keys."""
    pushes: Sequence[tuple[Key, Shard]] = [(key, shard) for key in keys for shard in key.pushes]
    return any(shard.local and shard.consumed() < key.round and not shard.line.stopped() for key, shard in pushes)
