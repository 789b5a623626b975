"""Push a worker's keys to the servers and pull them back, as tasks that yield while they wait.

The part of a key on one server is called a *shard* by workers, and a *unit* by the server. A *frame* is a small message
of fixed layout.

If worker and server are on the same node, the data is in memory that both share:

- A push is a frame that tells the server where the data is. An array that the caller has made by `mpips.empty` is in
  shared memory, and the server reads the array itself. The data of other arrays, and of small ones, is first copied
  into the shard's *outbox*, a shared buffer, block by block. The server reads each block while the worker copies the
  next block.
- A pull in a synchronous store copies each block from the server's memory once the server has finished that block.
- A pull in an asynchronous store must not read a unit while the server updates it, and there are two ways to avoid
  this. `snapshot` copies a unit of one block without asking, and tries again if an update has disturbed the copy. In
  all other cases (longer units, too many disturbed copies, stores with the option `staleness`) the worker asks the
  server, which keeps the unit unchanged until the worker has read it.

If worker and server are on different nodes, the data of pushes and pulls travels as MPI messages (`link.Sender`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.fabric import arena
from mpips.collectives.fabric.requests import cut_bytes
from mpips.collectives.fabric.tasks import Task, run_together
from mpips.compression import Residuals
from mpips.store.keys.key import Array, Key, Name, Shard
from mpips.store.remote.link import ServerLink
from mpips.store.roles import Layout
from mpips.store.transport.frames import Coding, Flush, GetVersions, Op
from mpips.store.transport.outbox import fill
from mpips.store.transport.pending import MessageGroup


class Push:
    """The pushes of one worker to servers.

    The methods return tasks. The code that runs a task also handles messages from servers between its steps
    (`Operations.hearing`). `residuals` holds the parts of gradients that compression has held back, by shard number. It
    is None if pushes are not compressed.
    """

    def __init__(self, layout: Layout, link: ServerLink) -> None:
        self._layout = layout
        self._link = link
        self._small_bytes = layout.options.small_bytes
        self.residuals: Residuals | None = None

    def push_part(
        self,
        key: Key,
        round_: int,
        values: Array,
        priority: int,
        shards: Sequence[Shard],
        base: int = 0,
        wait: bool = True,
        own: bool = False,
    ) -> Task[None]:
        """Contribute to a round of some shards.

        Args:
            round_: The round, or 0 for the key's next round.
            values: The key's elements from index `base` on, 1-D.
            wait: If True, the task is over only when `values` may be overwritten.
            own: True if the caller leaves `values` unchanged until the servers have read them. Then servers of this
                node read `values` directly.
        """
        if not round_:
            key.round = round_ = key.round + 1
        payloads = [(shard, values[shard.start - base : shard.stop - base]) for shard in shards]
        if self.residuals is not None and key.floats:
            yield from run_together([self._compressed(key, round_, *payload, priority) for payload in payloads])
            return
        here = [payload for payload in payloads if payload[0].local]
        if len(here) == len(payloads):
            yield from self._push_here(key, round_, here, priority, wait, own)
            return
        given = {shard.number: part for shard, part in payloads}
        tasks = [
            self._link.sender.send(key, shard, given[shard.number].view(np.uint8), round_, priority)
            for shard in self._link.from_own_server(shard for shard in shards if not shard.local)
        ]
        if here:
            tasks.append(self._push_here(key, round_, here, priority, wait, own))
        yield from run_together(tasks)

    def wait_until_read(self, round_: int, shards: Sequence[Shard]) -> Task[None]:
        """Wait until the servers have read this worker's contributions up to and including round `round_`."""
        for shard in shards:
            while shard.consumed() < round_:
                yield False

    def settle(self, keys: Sequence[Key], meets: bool = False) -> Task[None]:
        """Wait until the servers have read this worker's contributions to the keys.

        In an asynchronous store, wait until the servers have applied everything that this worker has contributed.

        Args:
            meets: True if this worker waits for all other workers afterwards. As this worker pushes nothing during
                that wait, the servers then do not make other workers wait for its pushes.
        """
        if self._layout.asynchronous:
            for line in self._link.lines if meets else ():
                line.post(Op.MEETS)
            for server in range(self._layout.num_servers):
                yield from self._link.request(server, Flush())
            return
        for key in keys:
            yield from self.wait_until_read(key.round, key.pushes)

    def tell_wait(self, keys: Sequence[Key]) -> None:
        """Tell servers that the program has waited long in a call of these keys.

        The servers then look for workers that wait for one another in a circle.
        """
        if not self._layout.asynchronous:
            for key in keys:
                for shard in key.shards:
                    if not shard.local or shard.words[0] < key.round * shard.blocks:
                        shard.line.post(Op.WAITS, shard.number, key.round)

    def push_coded(
        self, key: Key, round_: int, shard: Shard, payload: Array, coding: Coding, priority: int
    ) -> Task[None]:
        """Contribute a compressed or row-sparse payload (uint8) to a round of a shard.

        The server must have read this worker's push of the previous round. The task is over when the caller may free
        the payload.
        """
        if not shard.local:
            yield from self._link.sender.send(key, shard, payload, round_, priority, coding)
            return
        # Keep the payload until the next push, because the server may read it until then. The next push waits for the
        # server.
        shard.kept = payload
        if not arena.locate(payload):
            shard.kept = arena.empty(payload.size, np.uint8)
            shard.kept[...] = payload
        shard.line.post(Op.PUSH, shard.number, round_, arena.region_of(shard.kept), coding, priority)

    def copy_in(self, key: Key, round_: int, payloads: Sequence[tuple[Shard, Array]], priority: int) -> None:
        """Contribute copies of 1-D arrays to a round of shards on this node.

        The servers must have read this worker's pushes of all earlier rounds. Does not wait for other workers. When the
        function returns, the arrays may be overwritten. If an interrupt stops it, `ServerLink.quiesce` fills the
        outboxes that servers already read.
        """
        growing = self._link.filling
        for shard, values in payloads:
            outbox = shard.outbox or self._link.outbox(key, shard)
            if shard.blocks == 1:
                outbox.slots[...] = values
            else:
                outbox.begin(round_)
                growing.append((outbox, values))
            shard.outbox_push.post(round_, priority)  # type: ignore[union-attr]
        if growing:
            fill(growing)
            growing.clear()

    def _push_here(
        self, key: Key, round_: int, payloads: Sequence[tuple[Shard, Array]], priority: int, wait: bool, own: bool
    ) -> Task[None]:
        """Contribute uncompressed elements to servers of this node."""
        lent: list[Shard] = []
        copies: list[tuple[Shard, Array]] = []
        for shard, values in payloads:
            region = arena.locate(values) if own or values.nbytes > self._small_bytes else None
            if region is None:
                copies.append((shard, values))
            else:
                shard.line.post(Op.PUSH, shard.number, round_, region, priority=priority)
                lent.append(shard)
        yield from self.wait_until_read(round_ - 1, [shard for shard, _ in copies])
        self.copy_in(key, round_, copies, priority)
        if wait and not own:
            yield from self.wait_until_read(round_, lent)

    def _compressed(self, key: Key, round_: int, shard: Shard, values: Array, priority: int) -> Task[None]:
        """Compress a shard's elements and contribute them."""
        assert self.residuals is not None
        yield from self.wait_until_read(round_ - 1, [shard])
        payload = self.residuals.payload(shard.number, values, key.name, shard.start)
        yield from self.push_coded(key, round_, shard, payload, Coding.COMPRESSED, priority)


TRIES = 4
# One read: (shard, row numbers, output). If the row numbers are None, the whole shard is read, and the output is 1-D.
# Otherwise the output has the shape (number of rows, elements of a row).
Part = tuple[Shard, NDArray[np.int64] | None, Array]


def snapshot(words: memoryview, stored: Array, out: Array) -> bool:
    """Copy a unit of an asynchronous store without asking its server.

    Return False if updates have disturbed TRIES copies.

    `words[0]` is odd while the server writes an update. Each update increases it.
    """
    for _ in range(TRIES):
        before = words[0]
        if not before & 1:
            out[...] = stored
            if words[0] == before:
                return True
        os.sched_yield()
    return False


class Pull:
    """One worker's reads from servers.

    The methods return tasks. The code that runs a task also handles messages from servers between its steps
    (`Operations.hearing`).
    """

    def __init__(self, layout: Layout, link: ServerLink) -> None:
        self._link = link
        self._asynchronous = layout.asynchronous
        # True if a worker may read a unit of an asynchronous store between two updates, without asking the server
        self._between = layout.asynchronous and layout.options.staleness < 0

    def pull_part(self, key: Key, out: Array, shards: Sequence[Shard], asked: bool = False) -> Task[None]:
        """Read shards of the key into `out`, after this worker's pushes.

        Args:
            out: 1-D, of the whole key's size.
            asked: True if servers of other nodes have already been asked for these shards.
        """
        if self._asynchronous:
            behind, rest = [], shards
        else:
            behind, rest = [shard for shard in shards if shard.local], [shard for shard in shards if not shard.local]
        if behind:
            yield from self._follow(key, out, behind)
        if self._between:
            rest = yield from self._between_updates(key, out, rest)
        if rest:
            parts = [(shard, None, out[shard.start : shard.stop]) for shard in self._link.from_own_server(rest)]
            yield from self.ask(key, parts, asked)

    def exchange(self, key: Key, push: Task[None], out: Array, shards: Sequence[Shard]) -> Task[None]:
        """Run `push`, which contributes to these shards, and pull the shards.

        The worker asks servers of other nodes for their answers as soon as it has begun to send. A later request would
        have to wait behind the payloads of later pushes.
        """
        asked = False
        for moved in push:
            if not asked:
                asked = True
                for shard in shards:
                    if not shard.local:
                        shard.line.post(Op.PULL, shard.number, key.round)
            yield moved
        yield from self.pull_part(key, out, shards, asked)

    def versions(self, keys: Sequence[Key]) -> Task[list[int]]:
        """Return for each key of an asynchronous store the number of pushes that all of its shards contain.

        The counters of servers on this node are read from memory. Servers of other nodes are asked, and answer at once.
        """
        distant: dict[int, list[int]] = {}
        for key in keys:
            for shard in key.shards:
                if not shard.local:
                    distant.setdefault(shard.server, []).append(shard.number)
        asked = [(units, self._link.post_request(server, GetVersions(units))) for server, units in distant.items()]
        told: dict[int, int] = {}
        for units, token in asked:
            told.update(zip(units, (yield from self._link.wait_for_answer(token)).counts))
        return [
            min(sum(shard.words[1:]) if shard.local else told[shard.number] for shard in key.shards) for key in keys
        ]

    def whole(self, key: Key, out: Array, found: dict[Name, int]) -> Task[None]:
        """Read all shards of a key of an asynchronous store at one version. Write that version into `found`.

        1. Ask the servers to hold all shards, so that the shards no longer change.
        2. Release shards that contain fewer pushes than others, until they have caught up. They always catch up,
           because every push goes to all shards.
        3. Read all shards.

        Two workers that read at the same time cannot block each other, because both release shards in step 2.
        """
        shards = self._link.from_own_server(key.shards)
        for shard in shards:
            self._hold(shard, 0)
        behind = shards
        while behind:
            while any(shard.held < 0 for shard in behind):
                yield False
            found[key.name] = most = max(shard.held for shard in shards)
            behind = [shard for shard in shards if shard.held < most]
            for shard in behind:
                shard.line.post(Op.RELEASE, shard.number)
                self._hold(shard, most)
        coming = []
        for shard in shards:
            if shard.local:
                out[shard.start : shard.stop] = shard.stored
            else:
                slices = cut_bytes(out[shard.start : shard.stop], shard.block_elements * out.itemsize)
                coming.append(self._link.sender.receive(shard, slices))
                shard.line.post(Op.PULL, shard.number)
            shard.line.post(Op.RELEASE, shard.number)
        while coming := [exchange for exchange in coming if exchange.pending()]:
            yield False

    def _hold(self, shard: Shard, pushes: int) -> None:
        """Ask the server to keep a shard unchanged as soon as it contains `pushes` pushes."""
        shard.held = -1
        shard.line.post(Op.HOLD, shard.number, pushes)

    def ask(self, key: Key, parts: Sequence[Part], asked: bool = False) -> Task[None]:
        """Read shards or rows, so that they contain this worker's earlier pushes.

        A worker reads the memory of servers on its node, and receives messages from other servers. In an asynchronous
        store a server on this node first has to grant the read, so that its memory does not change meanwhile.

        Args:
            parts: The shards or rows to read.
            asked: True if servers of other nodes have already been asked.
        """
        waiting: list[Part] = []
        coming: list[MessageGroup] = []
        for shard, rows, out in parts:
            round_ = 0 if self._asynchronous and shard.mine < 0 else key.round
            shard.granted = False
            if shard.local:
                waiting.append((shard, rows, out))
                if self._asynchronous:
                    shard.line.post(Op.PULL, shard.number, round_)
            elif rows is None:
                coming.append(self._link.sender.receive(shard, cut_bytes(out, shard.block_elements * out.itemsize)))
                if not asked:
                    shard.line.post(Op.PULL, shard.number, round_)
            else:
                step = max(1, shard.block_elements // out.shape[1])
                slices = [out[at : at + step].reshape(-1).view(np.uint8) for at in range(0, len(rows), step)]
                coming.append(self._link.sender.receive(shard, slices))
                shard.line.post_body(rows.tobytes(), Op.PULL_ROWS, shard.number, round_)
        left = len(parts)
        while waiting or coming:
            waiting = [part for part in waiting if not self._take(key, *part)]
            coming = [exchange for exchange in coming if exchange.pending()]
            left, before = len(waiting) + len(coming), left
            if left:
                yield left < before

    def _follow(self, key: Key, out: Array, shards: Sequence[Shard]) -> Task[None]:
        """Copy blocks as the servers finish them. Servers overwrite no block before this worker's next push."""
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
        """Read the units on this node that have one block, after this worker's pushes.

        Return the shards that were not read.
        """
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

    def _take(self, key: Key, shard: Shard, rows: NDArray[np.int64] | None, out: Array) -> bool:
        """Copy a shard, or some of its rows, from the memory of a server on this node.

        Return False if it is not ready.
        """
        ready = shard.granted if self._asynchronous else shard.words[0] >= key.round * shard.blocks
        if ready:
            assert shard.stored is not None
            out[...] = shard.stored if rows is None else shard.stored.reshape(-1, out.shape[1])[rows]
            if self._asynchronous:
                shard.line.post(Op.RELEASE, shard.number)
        return ready
