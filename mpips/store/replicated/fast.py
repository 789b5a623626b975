"""The fast paths of a store without servers, for one key and for a list of keys, and the collectives behind all sums.

The fast paths are for plain arrays, and are used while no other operation is in progress and pushes are not compressed.
One worker may be on the fast path while another is on the general path: they run the same collective together, and the
result has the same bits on either path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import TypeAlias

from mpi4py import MPI

import mpips.collectives as collectives
from mpips.collectives.api import begin
from mpips.collectives.communicator import Communicator
from mpips.collectives.fabric.tasks import Task
from mpips.collectives.group import OverlapError
from mpips.collectives.plan import Plan
from mpips.store.keys.arguments import packed, runs, unpack
from mpips.store.keys.key import Array, Key, Name, label
from mpips.store.replicated.replica import Replica
from mpips.store.runtime.generation import Generation


def flat(array: Array) -> Array:
    """Return a 1-D view of the array, or the array itself if it is 1-D.

    Collectives find a cached plan by the identity of the array, so a 1-D array must not be replaced by a new view.
    """
    return array if array.ndim == 1 else array.reshape(-1)


class ReplicaFastPath:
    """The fast path of one key (`keys.key.Fast`).

    Each call finishes its work before it returns, so it never returns a task.
    """

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


class ReplicaLists:
    """The fast path of a call for several keys, in one collective.

    `replicas` is the live mapping of all replicas by name.
    """

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
        """Push, then pull into `outs`, which may be `arrays`.

        Sums go directly into `outs` unless these overlap other arrays.
        """
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
    """Return a list: for each replica, memory for this worker's block of the sum, or None if it needs no block.

    Return None instead of a list if no replica needs a block.
    """
    blocks = [replica.block_room() for replica in replicas]
    return blocks if any(block is not None for block in blocks) else None


def take_from(replicas: Sequence[Replica], outs: Sequence[Array], blocks: Blocks) -> None:
    """Complete a round of each replica, and leave its new value in the array of `outs` for this replica.

    Before the call, this array holds the sum of the round. If `blocks` has a buffer for the replica, that buffer holds
    this worker's block of the sum instead. Then the array is not written, and the value stays spread over the workers
    (see `replica`).
    """
    for number, (replica, out) in enumerate(zip(replicas, outs)):
        if blocks is not None and blocks[number] is not None:
            replica.take_block()
            continue
        total = flat(out)
        replica.take_sum(total)
        if replica.optimizer is not None:
            total[...] = replica.value


# The algorithm of all sums. The workers' contributions to an element are added in the same order, however keys are
# split or grouped into lists.
SUMS = "reproducible"
# For each array, the buffer for this worker's block of the sum, or None if the array needs no block. If no array needs
# a block, the whole is None.
Blocks: TypeAlias = "Sequence[Array | None] | None"


def in_steps(plan: Plan) -> Task[None]:
    """A task that runs a collective that has begun, until it has finished."""
    while not plan.test():
        yield False
    plan.wait()


class Sums:
    """Collectives among the workers. Arrays are C-contiguous, and `outs` may be the arrays themselves.

    One worker may run a collective in a blocking call while another runs the same collective in steps, as a task.

    Args:
        home: The record that `collectives` keeps for `comm`.
    """

    def __init__(self, home: Communicator, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = home.rank
        self.size = home.size
        # True if there are other workers, and all are on this node
        self.one_node = home.size > 1 and home.nodes == 1
        # number of sums that this worker has begun, and the label of the last one
        self.begun = 0
        self.text = ""

    def begin(self, text: str) -> None:
        """Count a sum that this worker begins."""
        self.begun, self.text = self.begun + 1, text

    def one(self, array: Array, out: Array, text: str) -> None:
        """Sum all workers' arrays into out. Collective, blocking."""
        self.begin(text)
        collectives.allreduce(array, self.comm, algorithm=SUMS, out=None if out is array else out, label=text)

    def many(self, arrays: Sequence[Array], outs: Sequence[Array], text: str, blocks: Blocks = None) -> None:
        """Sum several arrays at once. Also write this worker's block of each sum into `blocks`."""
        self.begin(text)
        out = None if all(map(is_, arrays, outs)) else outs
        collectives.grouped_allreduce(arrays, self.comm, algorithm=SUMS, out=out, label=text, blocks=blocks)

    def task(
        self, arrays: Sequence[Array], outs: Sequence[Array], text: str, direct: bool, blocks: Blocks = None
    ) -> Task[None]:
        """A task that runs `one` or `many`: blocking if `direct`, else in steps, while the program computes."""
        single = len(arrays) == 1
        if direct and single:
            self.one(arrays[0], outs[0], text)
        elif direct:
            self.many(arrays, outs, text, blocks)
        else:
            self.begin(text)
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
        """A task that runs `broadcast_one` for several arrays: blocking if `direct`, else in steps.

        Small arrays are sent together.
        """
        for run in runs(array.nbytes for array in arrays):
            vector = packed(arrays[run])
            if direct:
                self.broadcast_one(vector, root, text)
            else:
                yield from in_steps(begin("broadcast", vector, self.comm, root=root, label=text))
            unpack(vector, arrays[run])

    def gather(self, x: Array, out: Array | None, text: str, direct: bool) -> Task[None]:
        """A task that gathers the workers' blocks `x` into `out`, on all workers: blocking if `direct`, else in steps.

        If `out` is None, the task works in place: `x` has room for all blocks, and already holds this worker's block.
        """
        if direct:
            collectives.allgather(x, self.comm, out=out, label=text)
        else:
            yield from in_steps(begin("allgather", x, self.comm, out=out, label=text))
