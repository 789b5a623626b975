"""Sum one key or a list straight through one collective, in a store without servers; the sums in steps beside compute.

The fast paths serve plain arrays while nothing else is under way and nothing is compressed. A worker that goes the
general path meanwhile takes part in the same collective. Bits depend on neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives.api import begin
from mpips.collectives.communicator import Communicator
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.group import OverlapError
from mpips.collectives.plan import Plan
from mpips.store.keys.arguments import packed, runs, unpack
from mpips.store.keys.key import Array, Key, Name, label
from mpips.store.keys.row_sparse import RowSparse, unpacked
from mpips.store.keys.row_sparse import packed as packed_rows
from mpips.store.replicated.replica import Replica
from mpips.store.runtime.generation import Generation


def flat(array: Array) -> Array:
    """1-D; the array itself where it is that already, as collectives know it again."""
    return array if array.ndim == 1 else array.reshape(-1)


class Fast:
    """The route of one key (`keys.key.Fast`). Nothing is ever left to be waited for."""

    __slots__ = ("_flag", "_generation", "_label", "_replica", "_sums")
    lists = False

    def __init__(self, replica: Replica, sums: Sums, generation: Generation) -> None:
        self._replica, self._sums, self._generation, self._flag = replica, sums, generation, generation.flag
        self._label = label("push", [replica.key.name])

    def push(self, array: Array, priority: int) -> None:
        """Sum, then update."""
        replica = self._replica
        if replica.state is None:
            replica.prepare()
        total = replica.room()
        self._sums.one(array, total, self._label)
        replica.take_sum(total)

    post = push

    def wait_until_read(self) -> None:
        """Nobody reads the array after the push."""

    def pull(self, out: Array) -> None:
        """Copy what is stored."""
        if self._flag[0]:
            self._generation.check()
        flat(out)[...] = self._replica.value

    def pushpull(self, array: Array, out: Array, priority: int) -> None:
        """Both."""
        self.push(array, priority)
        flat(out)[...] = self._replica.value


class Lists:
    """The route of several keys of one call: one collective for all of them. `replicas`: by name, as they are now."""

    def __init__(self, replicas: Mapping[Name, Replica], sums: Sums, generation: Generation) -> None:
        self._replicas, self._sums, self._generation = replicas, sums, generation
        self._labels: dict[tuple[Name, ...], str] = {}

    def push(self, keys: Sequence[Key], arrays: Sequence[Array], priority: int) -> None:
        """Contribute to all keys. Arrays are C-contiguous, of their keys' shapes and dtypes."""
        replicas, text = self._prepared(keys)
        totals = [replica.room() for replica in replicas]
        if len(keys) == 1:
            self._sums.one(arrays[0], totals[0], text)
        else:
            self._sums.many(arrays, totals, text)
        for replica, total in zip(replicas, totals):
            replica.take_sum(total)

    def pull(self, keys: Sequence[Key], outs: Sequence[Array]) -> None:
        """Copy what is stored."""
        self._generation.check()
        for key, out in zip(keys, outs):
            flat(out)[...] = self._replicas[key.name].value

    def pushpull(self, keys: Sequence[Key], arrays: Sequence[Array], outs: Sequence[Array], priority: int) -> None:
        """Both. The sums go into `outs`, which may be `arrays`, on their way, but for results that overlap arrays."""
        if len(keys) > 1:
            replicas, text = self._prepared(keys)
            blocks = blocks_of(replicas)
            try:
                self._sums.many(arrays, outs, text, blocks)
            except OverlapError:  # nothing has been sent
                pass
            else:
                take_from(replicas, outs, blocks)
                return
        self.push(keys, arrays, priority)
        self.pull(keys, outs)

    def _prepared(self, keys: Sequence[Key]) -> tuple[list[Replica], str]:
        replicas = [self._replicas[key.name] for key in keys]
        for replica in replicas:
            if replica.state is None:
                replica.prepare()
        names = tuple([key.name for key in keys])
        text = self._labels.get(names)
        if text is None:
            text = self._labels[names] = label("push", names)
        return replicas, text


def blocks_of(replicas: Sequence[Replica]) -> Blocks:
    """Return where a collective of several keys leaves this worker's blocks of the sums; None where it is to leave
    none."""
    blocks = [replica.block_room() for replica in replicas]
    return blocks if any(block is not None for block in blocks) else None


def take_from(replicas: Sequence[Replica], outs: Sequence[Array], blocks: Blocks) -> None:
    """Sums lie in `outs`, and this worker's blocks of some in `blocks`: update, and write to `outs` what is stored."""
    for number, (replica, out) in enumerate(zip(replicas, outs)):
        if blocks is not None and blocks[number] is not None:
            replica.take_block()
            continue
        total = flat(out)
        replica.take_sum(total)
        if replica.optimizer is not None:
            total[...] = replica.value


SUMS = "reproducible"
"""The algorithm: however keys are cut, or put together in lists, every element is added up in the same order."""
Blocks: TypeAlias = "Sequence[Array | None] | None"
"""Of each of several arrays where this worker's block of the sum goes, too, if anywhere."""


def in_steps(plan: Plan) -> Task[None]:
    """Go on with a collective that has begun, until it is over."""
    while not plan.test():
        yield False
    plan.wait()


class Sums:
    """Collectives over one communicator of workers, `home`. Arrays are C-contiguous; `outs` may be the arrays
    themselves. Workers that block and workers that go in steps take part in the same collective."""

    def __init__(self, home: Communicator, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, home.rank, home.size
        self.one_node = home.size > 1 and home.nodes == 1
        """Whether there are other workers, all on this node."""
        self.begun, self.text = 0, ""
        """Sums that this worker has begun, and the last one."""

    def one(self, array: Array, out: Array, text: str) -> None:
        """out = the sum of all workers' arrays. Collective, blocking."""
        self.begun, self.text = self.begun + 1, text
        collectives.allreduce(array, self.comm, algorithm=SUMS, out=None if out is array else out, label=text)

    def many(self, arrays: Sequence[Array], outs: Sequence[Array], text: str, blocks: Blocks = None) -> None:
        """Sum each array, all at once; this worker's block of each sum goes into `blocks`, too."""
        self.begun, self.text = self.begun + 1, text
        out = None if all(map(is_, arrays, outs)) else outs
        collectives.grouped_allreduce(arrays, self.comm, algorithm=SUMS, out=out, label=text, blocks=blocks)

    def task(
        self, arrays: Sequence[Array], outs: Sequence[Array], text: str, direct: bool, blocks: Blocks = None
    ) -> Task[None]:
        """`one` or `many`, beside compute unless `direct`."""
        single = len(arrays) == 1
        if direct and single:
            self.one(arrays[0], outs[0], text)
        elif direct:
            self.many(arrays, outs, text, blocks)
        else:
            self.begun, self.text = self.begun + 1, text
            in_place = all(map(is_, arrays, outs))
            if single:
                out = None if in_place else outs[0]
                plan = begin("allreduce", arrays[0], self.comm, algorithm=SUMS, out=out, label=text)
            else:
                every = None if in_place else list(outs)
                plan = begin(
                    "grouped_allreduce", list(arrays), self.comm, algorithm=SUMS, out=every, label=text, blocks=blocks
                )
            yield from in_steps(plan)

    def broadcast_one(self, array: Array, root: int, text: str) -> None:
        """The root's array, on all workers. Collective, blocking."""
        collectives.broadcast(array, self.comm, root, label=text)

    def broadcast(self, arrays: Sequence[Array], root: int, text: str, direct: bool) -> Task[None]:
        """`broadcast_one` of several, beside compute unless `direct`. Small ones travel together."""
        for run in runs(array.nbytes for array in arrays):
            vector = packed(arrays[run])
            if direct:
                self.broadcast_one(vector, root, text)
            else:
                yield from in_steps(begin("broadcast", vector, self.comm, root=root, label=text))
            unpack(vector, arrays[run])

    def gather(self, x: Array, out: Array | None, text: str, direct: bool) -> Task[None]:
        """All workers' blocks, on all: x -> out; without `out` this worker's is in x already."""
        if direct:
            collectives.allgather(x, self.comm, out=out, label=text)
        else:
            yield from in_steps(begin("allgather", x, self.comm, out=out, label=text))


class RowSums:
    """Rows of all workers.

    Rows travel in two allgathers: how many bytes each worker brings, then the bytes, in blocks as long as the longest.
    All workers add the rows in the order of the workers.
    """

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._sizes = np.zeros(sums.size, np.int64)
        self._mine = np.zeros(1, np.int64)
        self._blocks = np.empty(0, np.uint8)

    def gather(self, key: Key, rows: RowSparse, direct: bool) -> Task[list[RowSparse]]:
        """Return all workers' rows of the key, until the next call. Collective; `direct`: it may block."""
        text = label("push of rows", [key.name])
        self._sums.begun, self._sums.text = self._sums.begun + 1, text
        mine = packed_rows(rows.merged())
        self._mine[0] = mine.size
        yield from self._sums.gather(self._mine, self._sizes, text, direct)
        sizes = self._sizes.tolist()
        block = _round_up(max(sizes))
        blocks = self._room(block)
        rank = self._sums.rank
        blocks[rank * block : rank * block + mine.size] = mine
        yield from self._sums.gather(blocks, None, text, direct)
        pieces = [blocks[start * block : start * block + size] for start, size in enumerate(sizes)]
        return [unpacked(piece, key.shape, key.dtype) for piece in pieces]

    def _room(self, block: int) -> Array:
        """Return a block for each worker; the same memory again, so that collectives know it."""
        size = block * len(self._sizes)
        if self._blocks.size < size:
            self._blocks = np.empty(size, np.uint8)
        return self._blocks[:size]


def _round_up(size: int) -> int:
    """Return the bytes of a block: of few lengths, so that there are few collectives to be prepared."""
    return max(64, 1 << (size - 1).bit_length())
