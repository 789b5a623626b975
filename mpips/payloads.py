"""Payloads between a worker and servers of other nodes, on the worker's side: messages out of arrays and into them.

Whatever a server has begun to receive is sent, and whatever it has yet to answer is received, even where the round has
failed meanwhile: nothing stays pending that a later call could take for its own. What is sent in place of blocks that
the worker keeps back is empty; where the server still counts on them, the worker withdraws its contribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.node.arena import Region
from mpips.buffers import FRAME_COST, Window
from mpips.keys import Key, Part
from mpips.layout import Layout
from mpips.messages import Coding, Op
from mpips.remote import ALONG
from mpips.tags import pull_tag, push_tag

Array = NDArray[Any]
Task = Generator[bool | None, None, None]


class Payloads:
    """One worker's messages with payloads. `check(key, since)` hears servers and raises what made a round of the key
    fail, `listen` only hears; `withdraw(key, round, parts, error)` as in `Hearing`."""

    def __init__(
        self, layout: Layout, check: Callable[[Key, int], None], listen: Callable[[], None],
        withdraw: Callable[[Key, int, Sequence[Part], BaseException | None], None],
    ) -> None:  # fmt: skip
        self._layout, self._check, self._listen, self._withdraw = layout, check, listen, withdraw
        self._discarded: list[tuple[list[Any], Any]] = []
        """Messages that nobody waits for, and their memory."""
        self._windows = [Window() for _ in range(layout.num_servers)]
        self._lines: dict[tuple[int, int | str], deque[object]] = {}
        """A place for each part of a key that waits to be sent to a server."""
        self._stored = [0] * layout.num_servers
        self._senders = sum(map(len, layout.groups()))

    def stored(self, server: int, nbytes: int) -> None:
        """A server keeps so many bytes of keys more."""
        self._stored[server] += nbytes

    # ---- out

    def send(
        self, key: Key, part: Part, data: Array, round_: int, op: Op, priority: int, coding: Coding = Coding.PLAIN,
        count: int = 0, alone: bool = True,
    ) -> Task:  # fmt: skip
        """Send a payload (uint8) to another node; ends when it may be overwritten. What is one message goes unasked,
        behind earlier parts of its key, if the server has room for it; all else as the server asks for it, block by
        block. What has failed is raised here by a worker that acts `alone`; in a client all members raise it in their
        next pull."""
        part.said = round_
        region = Region(0, 0, 0, 0, data.size)
        blocks = part.blocks if coding == Coding.PLAIN else 1
        if blocks == 1 and not (yield from self._turn(key, part, data, round_, alone)):
            return
        if blocks == 1 and self._admits(part, data):
            self._windows[part.server].add(key.name, part.settled, round_, data.size)
            part.line.post(op, part.number, round_, region, coding, priority, count, flags=ALONG)
            yield from self._sent([self._isend(part, data)], data)
            return
        size = data.size if blocks == 1 else part.block_elements * key.dtype.itemsize
        sends: list[Any] = []
        part.sending = round_
        part.line.post(op, part.number, round_, region, coding, priority, count)
        try:
            while len(sends) < blocks:
                moved = bool(part.credits)
                for block in part.credits:
                    sends.append(self._isend(part, data[block * size : (block + 1) * size]))
                part.credits.clear()
                if len(sends) < blocks:
                    if self._has_failed(key, round_, alone):
                        self._give_up_sending(key, part, round_, sends, data, None)
                        return
                    yield moved
        except BaseException as error:
            self._give_up_sending(key, part, round_, sends, data, error)
            raise
        finally:
            part.sending = -1
            self.decline(part)
        yield from self._sent(sends, data)

    def _turn(self, key: Key, part: Part, data: Array, round_: int, alone: bool) -> Generator[bool | None, None, bool]:
        """Wait until the server has room, behind earlier parts of the key, which it reads without this one: so they end
        in turn, and are answered while later ones come. Behind another key's, workers could wait for each other. False
        where the round has failed meanwhile."""
        window, line = self._windows[part.server], self._lines.setdefault((part.server, key.name), deque())
        place = object()
        line.append(place)
        try:
            while line[0] is not place or (not self._admits(part, data) and window.holds(key.name)):
                if self._has_failed(key, round_, alone):
                    self._withdraw(key, round_, [part], None)  # a failed round, too, ends when all have come to it
                    return False
                yield False
        except BaseException as error:
            self._withdraw(key, round_, [part], error)
            raise
        finally:
            line.remove(place)
            if not line:
                del self._lines[part.server, key.name]
        return True

    def _has_failed(self, key: Key, round_: int, alone: bool) -> bool:
        """Hear the servers; whether the round has failed. What failed is raised by a worker that acts `alone`."""
        self._check(key, round_) if alone else self._listen()
        return 0 < round_ <= key.excused or round_ in key.failed

    def _give_up_sending(
        self, key: Key, part: Part, round_: int, sends: list[Any], data: Array, error: BaseException | None
    ) -> None:
        self._discard(sends, data)
        if part.failed < round_:  # else the server has no use for it
            self._withdraw(key, round_, [part], error)

    def _admits(self, part: Part, data: Array) -> bool:
        """Whether the payload may go to its server unasked: this worker may have its share of what lies there under
        way, or two messages: one is on the link while the word that the other has been read is on its way."""
        options = self._layout.options
        share = max(self._stored[part.server] // self._senders, 2 * (options.chunk_bytes + FRAME_COST))
        most = min(options.chunks_in_flight * options.chunk_bytes, share)
        return self._windows[part.server].admits(data.size, most)

    def _isend(self, part: Part, data: Array) -> Any:
        return self._layout.world.Isend(data, self._layout.server_rank(part.server), push_tag(part.number))

    def _sent(self, sends: list[Any], data: Array) -> Task:
        """Wait until MPI has taken the messages out of `data`."""
        try:
            left = len(sends)
            while sends := pending(sends):
                yield len(sends) < left
                left = len(sends)
        finally:
            if sends:
                self._discard(sends, data)

    def decline(self, part: Part) -> None:
        """Send nothing for blocks of a failed round: the server has begun to receive them."""
        nothing = np.empty(0, np.uint8)
        for _ in part.credits:
            self._discard([self._isend(part, nothing)], nothing)
        part.credits.clear()

    # ---- in

    def blocks(self, part: Part, values: Array) -> list[Array]:
        """What each message of an answer holds."""
        data = values.view(np.uint8)
        size = part.block_elements * values.itemsize
        return [data[start : start + size] for start in range(0, max(data.size, 1), size)]

    def receive(self, part: Part, slices: Sequence[Array]) -> list[Any]:
        server = self._layout.server_rank(part.server)
        return [self._layout.world.Irecv(data, server, pull_tag(part.number)) for data in slices]

    def give_up(self, part: Part, requests: list[Any], slices: Sequence[Array]) -> None:
        """Let what the server has yet to answer come to other memory: the caller's is his again."""
        status, cancelled = MPI.Status(), 0
        for request in reversed(requests):  # what comes meanwhile belongs to an earlier one
            if request:
                request.Cancel()
                request.Wait(status)
                cancelled += status.Is_cancelled()
        self.swallow(part, slices[len(slices) - cancelled :])

    def swallow(self, part: Part, slices: Sequence[Array]) -> None:
        """Take messages of an answer that nobody waits for any more, lest they be taken for those of a later one."""
        memory = [np.empty_like(data) for data in slices]
        self._discard(self.receive(part, memory), memory)

    def _discard(self, requests: list[Any], data: Any) -> None:
        """Messages that nobody waits for: their memory is kept until they have ended."""
        self._discarded = [item for item in self._discarded if not MPI.Request.Testall(item[0])]
        self._discarded.append((requests, data))


def pending(requests: list[Any]) -> list[Any]:
    """Those that have not ended; one look at MPI for all of them."""
    if not requests or not (ended := MPI.Request.Testsome(requests)):
        return requests
    return [request for index, request in enumerate(requests) if index not in ended]
