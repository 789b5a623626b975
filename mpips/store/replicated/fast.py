"""The fast routes of a store without servers: one key, or a list, straight through one collective that blocks.

They serve plain arrays while nothing else is under way and nothing is compressed. A worker that goes the general way
meanwhile takes part in the same collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from collectives.group import OverlapError
from mpips.store.keys.key import Key, Name, label
from mpips.store.replicated.replica import Replica
from mpips.store.replicated.sums import Blocks, Sums
from mpips.store.runtime.generation import Generation

Array = NDArray[Any]


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
        replica.take(total)

    post = push

    def read(self) -> None:
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
            replica.take(total)

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
    """Where a collective of several keys leaves this worker's blocks of the sums; None where it is to leave none."""
    blocks = [replica.block_room() for replica in replicas]
    return blocks if any(block is not None for block in blocks) else None


def take_from(replicas: Sequence[Replica], outs: Sequence[Array], blocks: Blocks) -> None:
    """Sums lie in `outs`, and this worker's blocks of some in `blocks`: update, and write to `outs` what is stored."""
    for number, (replica, out) in enumerate(zip(replicas, outs)):
        if blocks is not None and blocks[number] is not None:
            replica.take_block()
            continue
        total = flat(out)
        replica.take(total)
        if replica.optimizer is not None:
            total[...] = replica.value
