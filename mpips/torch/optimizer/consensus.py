"""What the workers of a DistributedOptimizer tell each other before each step and each call that all make.

A few words each, in one allgather: which call, after how many steps, which parameters have a gradient, whether one has
overflowed, and a digest of the numbers that are to be equal. Where they differ, all raise one sentence, nothing has
been sent, and the store goes on. Workers of an asynchronous store tell those of their own client at a step.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

import collectives
from collectives.errors import CollectiveError, of_caller
from collectives.fabric.wait import Limits
from mpips.store.api import KVStore
from mpips.store.runtime.generation import Generation
from mpips.store.runtime.rendezvous import call_of
from mpips.torch.agreement import Items, difference
from mpips.torch.optimizer.exchange import Step, among
from mpips.torch.process_group.tensors import data

CALLS = ("step", "DistributedOptimizer", "set_parameters", "state_dict", "load_state_dict", "save", "load")
CALL, STEPS, CLEARED, CHANGED, OVERFLOW, DIGEST, HEAD = range(7)
"""Numbers that stand before the masks: which of `CALLS`, after how many steps, `Brought.cleared`, how often parameters
were changed since the last step, `Brought.overflow`, and a digest of what is to be equal."""
UNKNOWN = -1
ELSEWHERE_SECONDS = 0.2
"""So long another worker has been in a call of the store before that counts as a fault."""
WARN_SECONDS = 10.0
"""After so long a worker of an asynchronous store warns that others have not come to a call of all."""
ALL = "all workers make each call of a DistributedOptimizer together"


class Brought(NamedTuple):
    """What this worker brings to a step."""

    overflow: bool = False
    """Whether GradScaler has found an infinity or a NaN in its gradients."""
    scale: float | None = None
    """Of GradScaler."""
    cleared: int = UNKNOWN
    """How often it has called `zero_grad` since its last step."""


class Consensus:
    """One worker's part. `numbers`: what is to be equal on all workers, beside their parameters."""

    def __init__(
        self, store: KVStore, parameters: Sequence[Tensor], keys: Sequence[str], numbers: Callable[[], Items]
    ) -> None:
        self._store, self._parameters, self._keys, self._numbers = store, parameters, keys, numbers
        self._mask = -(-len(parameters) // 8)
        self._row = np.zeros(8 * HEAD + 8 * -(-2 * self._mask // 8), np.uint8)
        self._head, self._masks = self._row[: 8 * HEAD].view(np.int64), self._row[8 * HEAD :]
        self._rows = self._row[None]
        self._digested: tuple[Items, int] = [], 0
        self._versions = 0
        self.note()

    def note(self) -> None:
        """The parameters are now those of the others."""
        self._versions = self._counted()

    def see_call(self, call: str, steps: int) -> None:
        """Raise on all workers unless all make this call, in a synchronous store after equally many steps. Collective,
        blocking."""
        settings, layout = self._store.settings, self._store.layout
        if layout.asynchronous:
            with impatient(settings.generation):
                settings.agree(call, self._numbers() if call == CALLS[1] else (), noun="setting")
        elif layout.num_workers > 1:
            assert layout.workers is not None
            self._meet(layout.workers, call, steps, Brought())

    def agree(self, steps: int, brought: Brought) -> Step:
        """What the workers of this step have; they raise unless it is the same step, with equal numbers. Collective
        over them, blocking."""
        grads = [parameter.grad for parameter in self._parameters]
        used = [grad is not None for grad in grads]
        sparse = [grad is not None and grad.is_sparse for grad in grads]
        skipped, changed, comm = brought.overflow, self._counted() != self._versions, self._together()
        if comm is not None:
            size = self._mask
            self._masks[:size], self._masks[size : 2 * size] = np.packbits(used), np.packbits(sparse)
            rows = self._meet(comm, "step", steps, brought)
            heads = rows[:, : 8 * HEAD].view(np.int64)
            skipped = bool(heads[:, OVERFLOW].any())
            if not self._store.layout.asynchronous:
                changed = bool(heads[:, CHANGED].all())  # equal to those of a worker that has not changed any
            masks = rows[:, 8 * HEAD :]
            if (masks != self._masks).any():
                either = np.bitwise_or.reduce(masks, axis=0)
                used = np.unpackbits(either[:size], count=len(used)).astype(bool).tolist()
                sparse = np.unpackbits(either[size:], count=len(used)).astype(bool).tolist()
        return Step([False] * len(used) if skipped else used, sparse, skipped, changed)

    # ---- inside

    def _together(self) -> MPI.Intracomm | None:
        """The workers that make each step together; None where this one makes its steps alone."""
        layout = self._store.layout
        whole = not layout.asynchronous or len(layout.clients) == 1
        comm = layout.workers if whole else layout.client
        return comm if comm is not None and comm.size > 1 else None

    def _meet(self, comm: MPI.Intracomm, call: str, steps: int, brought: Brought) -> NDArray[np.uint8]:
        """Everybody's words, in rank order; raises where they do not fit together."""
        is_step, counts = call == CALLS[0], not self._store.layout.asynchronous
        items = self._items(brought) if is_step or call == CALLS[1] else []  # others may be there to make them equal
        self._head[:] = (
            CALLS.index(call), steps if counts else 0, brought.cleared if counts else UNKNOWN,
            self._counted() - self._versions if counts and is_step else 0, brought.overflow, self._digest(items),
        )  # fmt: skip
        if len(self._rows) != comm.size:
            self._rows = np.empty((comm.size, self._row.size), np.uint8)
        what = f"step {steps + 1}" if is_step else call
        with self._hearing(what, comm):
            collectives.allgather(self._row, comm, out=self._rows)
        heads = self._rows[:, : 8 * HEAD].view(np.int64)
        if (heads != self._head).any():
            first = self._store.rank - comm.rank
            if sentence := unlike(heads.tolist(), first):
                raise of_caller(RuntimeError(sentence))
            if (heads[:, CHANGED] != heads[0, CHANGED]).any():
                self._see_parameters(comm, what)
            if (heads[:, DIGEST] != heads[0, DIGEST]).any():
                self._see_items(comm, what, items, first)
        return self._rows

    def _see_parameters(self, comm: MPI.Intracomm, what: str) -> None:
        """Some workers have changed parameters: ValueError where these differ."""
        mine = np.array([_checksum(data(p.detach().contiguous()).tobytes()) for p in self._parameters])
        every = np.empty((comm.size, mine.size), np.int64)
        with self._hearing(what, comm):
            collectives.allgather(mine, comm, out=every)
        for rank, place in np.argwhere(every != every[0]):
            raise of_caller(ValueError(
                f"{what}: parameter {self._keys[place]!r} is not the same on rank 0 and rank {rank}: where the program "
                "changes parameters, call set_parameters() on all workers, which then have rank 0's"
            ))  # fmt: skip

    def _see_items(self, comm: MPI.Intracomm, what: str, items: Items, first: int) -> None:
        """ValueError: the items of some workers differ."""
        word = np.frombuffer(msgspec.msgpack.encode(items), np.uint8)
        sizes = np.zeros(comm.size, np.int64)
        with self._hearing(what, comm):
            collectives.allgather(np.array([word.size]), comm, out=sizes)
            padded, words = np.zeros(sizes.max(), np.uint8), np.empty((comm.size, sizes.max()), np.uint8)
            padded[: word.size] = word
            collectives.allgather(padded, comm, out=words)
        told = [row[:size].tobytes() for row, size in zip(words, sizes.tolist())]
        every = [msgspec.msgpack.decode(word, type=list[tuple[str, str]]) for word in told]
        raise of_caller(ValueError(
            f"{what}: {difference(every, first)}: give all workers the same, and average over them what it is computed "
            "from, such as a loss"
        ))  # fmt: skip

    def _items(self, brought: Brought) -> Items:
        items = self._numbers()
        if brought.scale is not None and not self._store.layout.survives:  # a spare's scaler begins anew
            items = [*items, ("GradScaler's scale", repr(brought.scale))]
        return items

    def _digest(self, items: Items) -> int:
        if items != self._digested[0]:
            self._digested = items, _checksum(msgspec.msgpack.encode(items))
        return self._digested[1]

    def _counted(self) -> int:
        """How often the parameters have been changed in place."""
        return sum([parameter._version for parameter in self._parameters])

    @contextmanager
    def _hearing(self, what: str, comm: MPI.Intracomm) -> Iterator[None]:
        """Collectives within end, with the generation, where another worker is in a call of the store."""
        generation, since = self._store.settings.generation, math.inf
        needs = generation.needs

        def see_elsewhere() -> None:
            nonlocal since
            needs()
            calls = [(rank, call) for rank, word in enumerate(generation.words()) if (call := call_of(word))]
            since = min(since, time.monotonic()) if calls else math.inf
            if calls and time.monotonic() > since + ELSEWHERE_SECONDS:
                other, call = calls[0]
                mine = f"rank {self._store.rank} is in {what} of a DistributedOptimizer"
                raise CollectiveError(f"rank {other} calls {call} of the store, and {mine}: {ALL}")

        generation.needs = see_elsewhere
        try:
            with among(self._store.layout, generation, f"{what} of a DistributedOptimizer", comm):
                yield
        finally:
            generation.needs = needs


def unlike(heads: Sequence[Sequence[int]], first: int = 0) -> str:
    """Why workers cannot make a call together, from the words of all; "" where they can. Their ranks are counted from
    `first`. Pure."""
    for rank, head in enumerate(heads, first):
        if (head[CALL], head[STEPS]) != (heads[0][CALL], heads[0][STEPS]):
            return f"rank {first} calls {_said(heads[0])}, rank {rank} calls {_said(head)}: {ALL}"
    known = [(rank, head[CLEARED]) for rank, head in enumerate(heads, first) if head[CLEARED] != UNKNOWN]
    for rank, count in known:
        if count != known[0][1]:
            one, before = known[0]
            return (f"step {heads[0][STEPS] + 1}: since its last step rank {one} has called zero_grad() "
                    f"{_times(before)} and rank {rank} {_times(count)}, so one has left out a step: make each on all "
                    "workers; one without a batch calls zero_grad() and step() alone, and counts as zero")  # fmt: skip
    return ""


@contextmanager
def impatient(generation: Generation) -> Iterator[None]:
    """Who waits for all workers of an asynchronous store within, warns soon: they may never come."""
    before = generation.limits
    generation.limits = Limits(min(before.stall_seconds, WARN_SECONDS), before.timeout_seconds)
    try:
        yield
    finally:
        generation.limits = before


def _said(head: Sequence[int]) -> str:
    return f"{CALLS[head[CALL]]} after {head[STEPS]} step{'s' * (head[STEPS] != 1)}"


def _times(count: int) -> str:
    return f"{count} time{'s' * (count != 1)}"


def _checksum(word: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(word, digest_size=7).digest())
