"""Where a push goes: on a node a frame and an outbox, or the caller's own array; to other nodes messages.

A push contributes to a round of a key's shards. It is a task that yields whenever it has to wait.

On a node, a push is a frame that says where the payload lies: in the caller's own array if that was made by
`mpips.empty`, else in the shard's outbox, which the worker fills while the server reads behind it. To another node the
payload goes as messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.fabric import arena
from mpips.compression import Residuals
from mpips.store.keys.key import Key
from mpips.store.keys.shard import Shard
from mpips.store.remote.link import Link
from mpips.store.roles import Layout
from mpips.store.runtime.tasks import Task, together
from mpips.store.transport.frames import Coding, Flush, Op
from mpips.store.transport.outbox import fill

Array = NDArray[Any]


class Push:
    """One worker's contributions. Whoever runs a task hears the servers meanwhile (`Link.hearing`).

    `residuals`: of compression, by numbers of shards; None where pushes are not compressed.
    """

    def __init__(self, layout: Layout, link: Link) -> None:
        self._layout, self._link = layout, link
        self._small_bytes = layout.options.small_bytes
        self.residuals: Residuals | None = None

    def whole(self, key: Key, flat: Array, priority: int, wait: bool = True) -> Task[None]:
        """Contribute `flat` (1-D, all elements) to the key's next round; `wait` as in `part`."""
        key.round += 1
        yield from self.part(key, key.round, flat, priority, key.pushes, wait=wait)

    def part(
        self, key: Key, round_: int, values: Array, priority: int, shards: Sequence[Shard], base: int = 0,
        wait: bool = True, own: bool = False,
    ) -> Task[None]:  # fmt: skip
        """Contribute to a round of some shards. `values`, 1-D, holds the key's elements from `base` on.

        With `wait` it is over when `values` may be overwritten. `own`: they stay as they are until the servers have
        read them (the caller sees to that), so they are read in place if they can be.
        """
        payloads = [(shard, values[shard.start - base : shard.stop - base]) for shard in shards]
        if self.residuals is not None and key.floats:
            yield from together([self._compressed(key, round_, *payload, priority) for payload in payloads])
            return
        here = [payload for payload in payloads if payload[0].local]
        if len(here) == len(payloads):
            yield from self._here(key, round_, here, priority, wait, own)
            return
        given = {shard.number: part for shard, part in payloads}
        sends = [
            self._link.sender.send(key, shard, given[shard.number].view(np.uint8), round_, priority)
            for shard in self._link.turned(shard for shard in shards if not shard.local)
        ]
        yield from together([*sends, self._here(key, round_, here, priority, wait, own)])

    def read(self, round_: int, shards: Sequence[Shard]) -> Task[None]:
        """Wait until the servers have read this worker's contributions up to `round_`."""
        for shard in shards:
            while shard.consumed() < round_:
                yield False

    def settle(self, keys: Sequence[Key]) -> Task[None]:
        """Wait until the servers have read this worker's contributions, and where asynchronous, applied them."""
        if self._layout.asynchronous:
            for server in range(self._layout.num_servers):
                yield from self._link.request(server, Flush())
            return
        for key in keys:
            yield from self.read(key.round, key.pushes)

    def waits(self, keys: Sequence[Key]) -> None:
        """This worker's program has waited long for what it has called of these keys: the servers look for circles."""
        if not self._layout.asynchronous:
            for key in keys:
                for shard in key.shards:
                    if not shard.local or shard.words[0] < key.round * shard.blocks:
                        shard.line.post(Op.WAITS, shard.number, key.round)

    def coded(
        self, key: Key, round_: int, shard: Shard, payload: Array, coding: Coding, priority: int, count: int = 0
    ) -> Task[None]:
        """Contribute a compressed or row-sparse payload (uint8) to a round of a shard, whose server has read the round
        before; over when the payload may be forgotten. `count`: its rows."""
        if not shard.local:
            yield from self._link.sender.send(key, shard, payload, round_, priority, coding, count)
            return
        shared = payload if arena.locate(payload) else arena.empty(payload.size, np.uint8)
        shared[...] = payload
        shard.kept = shared  # until the next one, which waits until this one has been read
        region = arena.locate(shared)
        assert region is not None
        shard.line.post(Op.PUSH, shard.number, round_, region, coding, priority, aux=count)

    def copy_in(self, key: Key, round_: int, payloads: Sequence[tuple[Shard, Array]], priority: int) -> None:
        """Contribute copies of 1-D arrays to a round of shards of this node, whose servers have read all rounds before.
        When it ends the arrays may be overwritten; it waits for no other worker. Where it is interrupted, the link
        fills what servers count on (`Link.filling`)."""
        growing = self._link.filling
        for shard, values in payloads:
            outbox = shard.outbox or self._link.outbox(key, shard)
            if shard.blocks == 1:
                outbox.slots[...] = values
            else:
                outbox.begin(round_)
                growing.append((outbox, values))
            shard.copy.post(round_, priority)  # type: ignore[union-attr]
        if growing:
            fill(growing)
            growing.clear()

    def _here(
        self, key: Key, round_: int, payloads: Sequence[tuple[Shard, Array]], priority: int, wait: bool, own: bool
    ) -> Task[None]:
        """Contribute plain elements to servers of this node."""
        lent: list[Shard] = []
        copies: list[tuple[Shard, Array]] = []
        for shard, values in payloads:
            region = arena.locate(values) if own or values.nbytes > self._small_bytes else None
            if region is None:
                copies.append((shard, values))
            else:
                shard.line.post(Op.PUSH, shard.number, round_, region, priority=priority)
                lent.append(shard)
        yield from self.read(round_ - 1, [shard for shard, _ in copies])
        self.copy_in(key, round_, copies, priority)
        if wait and not own:
            yield from self.read(round_, lent)

    def _compressed(self, key: Key, round_: int, shard: Shard, values: Array, priority: int) -> Task[None]:
        """Contribute what the compressor makes of a shard's elements."""
        assert self.residuals is not None
        yield from self.read(round_ - 1, [shard])
        payload = self.residuals.payload(shard.number, values, key.name, shard.start)
        yield from self.coded(key, round_, shard, payload, Coding.COMPRESSED, priority)
