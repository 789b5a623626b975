"""The fast paths of a store without servers, for one key and for a list, and the collectives behind all its sums.

The fast paths serve plain arrays while nothing else is under way and pushes are not compressed. A worker that takes the
general path meanwhile takes part in the same collective. The bits of the result do not depend on the path.
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
    """Return the array as 1-D. A 1-D array is returned itself, because collectives find its plan by its identity."""
    return array if array.ndim == 1 else array.reshape(-1)


class Fast:
    """The fast path of one key (`keys.key.Fast`). It always finishes, so it returns no tasks."""

    __slots__ = ("_flag", "_generation", "_label", "_replica", "_sums")
    lists = False

    def __init__(self, replica: Replica, sums: Sums, generation: Generation) -> None:
        self._replica = replica
        self._sums = sums
        self._generation = generation
        self._flag = generation.flag
        self._label = label("push", [replica.key.name])

    def push(self, array: Array, priority: int) -> None:
        replica = self._replica
        if replica.state is None:
            replica.prepare()
        total = replica.room()
        self._sums.one(array, total, self._label)
        replica.take_sum(total)

    post = push

    def wait_until_read(self) -> None:
        """Return at once: nobody reads the array after the push."""

    def pull(self, out: Array) -> None:
        if self._flag[0]:
            self._generation.check()
        flat(out)[...] = self._replica.value

    def pushpull(self, array: Array, out: Array, priority: int) -> None:
        self.push(array, priority)
        flat(out)[...] = self._replica.value


class Lists:
    """The fast path of several keys of one call: one collective for all. `replicas`: by name, as they are now."""

    def __init__(self, replicas: Mapping[Name, Replica], sums: Sums, generation: Generation) -> None:
        self._replicas = replicas
        self._sums = sums
        self._generation = generation
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
        self._generation.check()
        for key, out in zip(keys, outs):
            flat(out)[...] = self._replicas[key.name].value

    def pushpull(self, keys: Sequence[Key], arrays: Sequence[Array], outs: Sequence[Array], priority: int) -> None:
        """Push and pull. Sums go directly into `outs`, which may be `arrays`, unless results overlap other arrays."""
        if len(keys) > 1:
            replicas, text = self._prepared(keys)
            blocks = blocks_of(replicas)
            try:
                self._sums.many(arrays, outs, text, blocks)
            # Nothing has been sent.
            except OverlapError:
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
    """Return memory for this worker's blocks of the sums of several keys. None if no sum is left in blocks."""
    blocks = [replica.block_room() for replica in replicas]
    return blocks if any(block is not None for block in blocks) else None


def take_from(replicas: Sequence[Replica], outs: Sequence[Array], blocks: Blocks) -> None:
    """Complete rounds whose sums are in `outs`, or in blocks. Update, and write the new values to `outs`."""
    for number, (replica, out) in enumerate(zip(replicas, outs)):
        if blocks is not None and blocks[number] is not None:
            replica.take_block()
            continue
        total = flat(out)
        replica.take_sum(total)
        if replica.optimizer is not None:
            total[...] = replica.value


# The algorithm of all sums. However keys are cut or put together in lists, every element is added in the same order.
SUMS = "reproducible"
# for each array, memory for this worker's block of its sum, or None
Blocks: TypeAlias = "Sequence[Array | None] | None"


def in_steps(plan: Plan) -> Task[None]:
    """Run a collective that has begun, step by step, until it is over."""
    while not plan.test():
        yield False
    plan.wait()


class Sums:
    """Collectives among the workers. Arrays are C-contiguous, and `outs` may be the arrays themselves.

    Workers that block and workers that go in steps can take part in the same collective.

    Args:
        home: What `collectives` keeps for `comm`.
    """

    def __init__(self, home: Communicator, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = home.rank
        self.size = home.size
        # True if there are other workers, and all are on this node
        self.one_node = home.size > 1 and home.nodes == 1
        # number of sums that this worker has begun, and the name of the last one
        self.begun = 0
        self.text = ""

    def one(self, array: Array, out: Array, text: str) -> None:
        """Sum all workers' arrays into out. Collective, blocking."""
        self.begun, self.text = self.begun + 1, text
        collectives.allreduce(array, self.comm, algorithm=SUMS, out=None if out is array else out, label=text)

    def many(self, arrays: Sequence[Array], outs: Sequence[Array], text: str, blocks: Blocks = None) -> None:
        """Sum several arrays at once. This worker's block of each sum also goes into `blocks`."""
        self.begun, self.text = self.begun + 1, text
        out = None if all(map(is_, arrays, outs)) else outs
        collectives.grouped_allreduce(arrays, self.comm, algorithm=SUMS, out=out, label=text, blocks=blocks)

    def task(
        self, arrays: Sequence[Array], outs: Sequence[Array], text: str, direct: bool, blocks: Blocks = None
    ) -> Task[None]:
        """Run `one` or `many`: blocking if `direct`, else in steps, during compute."""
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
        """Copy the root's array to all workers. Collective, blocking."""
        collectives.broadcast(array, self.comm, root, label=text)

    def broadcast(self, arrays: Sequence[Array], root: int, text: str, direct: bool) -> Task[None]:
        """Run `broadcast_one` for several arrays: blocking if `direct`, else in steps.

        Small ones travel together.
        """
        for run in runs(array.nbytes for array in arrays):
            vector = packed(arrays[run])
            if direct:
                self.broadcast_one(vector, root, text)
            else:
                yield from in_steps(begin("broadcast", vector, self.comm, root=root, label=text))
            unpack(vector, arrays[run])

    def gather(self, x: Array, out: Array | None, text: str, direct: bool) -> Task[None]:
        """Gather all workers' blocks from x into out, on all workers. Without `out`, in place in x."""
        if direct:
            collectives.allgather(x, self.comm, out=out, label=text)
        else:
            yield from in_steps(begin("allgather", x, self.comm, out=out, label=text))


class RowSums:
    """The rows of all workers.

    Rows travel in two allgathers: first the number of bytes of each worker, then the bytes, in blocks as long as the
    longest. All workers add the rows in the order of the workers.
    """

    def __init__(self, sums: Sums) -> None:
        self._sums = sums
        self._sizes = np.zeros(sums.size, np.int64)
        self._mine = np.zeros(1, np.int64)
        self._blocks = np.empty(0, np.uint8)

    def gather(self, key: Key, rows: RowSparse, direct: bool) -> Task[list[RowSparse]]:
        """Return all workers' rows of the key. Valid until the next call. Collective; `direct`: it may block."""
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
        """Return a block for each worker. The memory is used again, because collectives find their plan by it."""
        size = block * len(self._sizes)
        if self._blocks.size < size:
            self._blocks = np.empty(size, np.uint8)
        return self._blocks[:size]


def _round_up(size: int) -> int:
    """Return the length of a block. There are few different lengths, so that few collectives have to be prepared."""
    return max(64, 1 << (size - 1).bit_length())
