"""Consensus: workers of a DistributedOptimizer check that all make the same step, with the same hyperparameters.

Each worker contributes a row of numbers to one allgather: its call, the number of its steps, whether a gradient has
overflowed, a digest of the hyperparameters, and masks that tell which parameters have a gradient. If the rows do not
fit together, all workers raise the same error. At that point nothing has been sent to the store, and the store can
still be used. In an asynchronous store with several clients, a worker compares its steps only with the workers of its
own client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

import mpips.collectives as collectives
from mpips.collectives.agreement import Items, describe_calls, difference
from mpips.collectives.clock import Clock
from mpips.collectives.errors import CollectiveError, of_caller
from mpips.store.runtime.rendezvous import call_of
from mpips.torch.lockstep import CHECK_STEPS, UNEXPLAINED, digest, gather_difference, gather_rows
from mpips.torch.optimizer.exchange import AgreedStep, find_unlike, group_numbers, warn_soon
from mpips.torch.state import broadcast_values, worker_collectives
from mpips.torch.tensors import bytes_of

if TYPE_CHECKING:
    from mpips.store.api import KVStore

# Calls that all workers make together. Workers send each other the index of a call in this tuple.
CALLS = ("step", "DistributedOptimizer", "set_parameters", "state_dict", "load_state_dict", "save", "load")
# Positions of the numbers at the start of a row, before the masks: index in CALLS, number of steps made,
# `Brought.cleared`, number of changes of parameters since the last step, `Brought.overflow`, and digest of the
# hyperparameters. HEAD is the count of these numbers.
CALL, STEPS, CLEARED, CHANGED, OVERFLOW, DIGEST, HEAD = range(7)
# reported as the number of zero_grad calls by a worker that has just joined and does not know this number
UNKNOWN = -1
# If a worker has been in another call of the store for this long, we assume that it will not join this call.
ELSEWHERE_SECONDS = 0.2


class Brought(NamedTuple):
    """A worker's report to the other workers before a step."""

    # True if GradScaler has found an infinity or a NaN in the gradients
    overflow: bool = False
    # the scale of GradScaler, or None in a program without one
    scale: float | None = None
    # number of zero_grad calls since the last step
    cleared: int = UNKNOWN


class Consensus:
    """Compares one worker's calls and hyperparameters with those of the other workers.

    `passes` is the number of backward passes that the program makes before each step.
    """

    def __init__(
        self,
        store: KVStore,
        optimizer: torch.optim.Optimizer,
        passes: int,
        parameters: Sequence[Tensor],
        keys: Sequence[str],
    ) -> None:
        self._store = store
        self._optimizer = optimizer
        self._passes = passes
        self._parameters = parameters
        self._keys = keys
        # number of bytes of a mask, which has one bit for each parameter
        self._mask = -(-len(parameters) // 8)
        # The row that this worker contributes: the head, then two masks (parameters with a gradient, and those whose
        # gradient is sparse), padded to 8 bytes.
        self._row = np.zeros(8 * HEAD + 8 * -(-2 * self._mask // 8), np.uint8)
        self._head = self._row[: 8 * HEAD].view(np.int64)
        self._masks = self._row[8 * HEAD :]
        # the rows of all workers, as of the last comparison
        self._rows = self._row[None]
        # The hyperparameters that were compared last, as items and as a digest. Keeping both saves time, because
        # hyperparameters seldom change.
        self._numbers: tuple[list[dict[str, Any]], Items] = [], []
        self._digested: tuple[Items, int] = [], 0
        # number of calls of note()
        self._notes = 0
        self.note()

    def note(self) -> None:
        """Note that the parameters are now the same as on the other workers.

        PyTorch counts changes of a tensor (`_version`), except changes through `.data`. So now and then a digest of the
        values is also taken, but not in a store that survives deaths. In such a store, a process may die when only some
        of the parameters have been written, and the step is then repeated.
        """
        self._versions = [parameter._version for parameter in self._parameters]
        self._bits = list[int]()
        due = self._notes & (self._notes - 1) == 0 or self._notes % CHECK_STEPS == 0
        if due and not self._store.layout.survives:
            self._bits = self._digest_each()
        self._notes += 1

    def check_call(self, call: str, steps: int) -> None:
        """Raise an error on all workers unless all of them make the call `call`. Collective, blocking.

        In a synchronous store the workers must also have made the same number of steps.
        """
        worker, layout = self._store.worker, self._store.layout
        if layout.asynchronous:
            with warn_soon(worker.generation):
                worker.agree(call, [*self._items(), self._state_item()] if call == CALLS[1] else (), noun="setting")
        elif layout.num_workers > 1:
            assert layout.workers is not None
            self._compare(layout.workers, call, steps, Brought())

    def agree(self, steps: int, brought: Brought) -> AgreedStep:
        """Compare rows with the workers that make this step, and return their combined masks and flags.

        All these workers raise an error unless they make the same step with the same hyperparameters. Collective over
        these workers, blocking.
        """
        grads = [parameter.grad for parameter in self._parameters]
        used = [grad is not None for grad in grads]
        sparse = [grad is not None and grad.is_sparse for grad in grads]
        skipped, (changes, changed) = brought.overflow, self._count_changes()
        layout = self._store.layout
        together = layout.workers if not layout.asynchronous or len(layout.clients) == 1 else layout.client
        if together is not None and together.size > 1:
            size = self._mask
            self._masks[:size], self._masks[size : 2 * size] = np.packbits(used), np.packbits(sparse)
            rows = self._compare(together, "step", steps, brought, changes)
            heads = rows[:, : 8 * HEAD].view(np.int64)
            skipped = bool(heads[:, OVERFLOW].any())
            if not layout.asynchronous and not heads[:, CHANGED].all():
                # A worker that has changed nothing still has the agreed values, and `_compare` has found that the other
                # workers' values are equal to these.
                changed = ""
            masks = rows[:, 8 * HEAD :]
            if (masks != self._masks).any():
                either = np.bitwise_or.reduce(masks, axis=0)
                used = np.unpackbits(either[:size], count=len(used)).astype(bool).tolist()
                sparse = np.unpackbits(either[size:], count=len(used)).astype(bool).tolist()
        return AgreedStep([False] * len(used) if skipped else used, sparse, skipped, changed)

    # ---- inside

    def _compare(
        self, comm: MPI.Intracomm, call: str, steps: int, brought: Brought, changes: int = 0
    ) -> NDArray[np.uint8]:
        """Exchange rows with the workers of `comm`, and check that they can make a call together. Collective, blocking.

        A worker's row has the numbers that are listed at `CALL`, and two masks: which parameters have a gradient, and
        which gradients are sparse. All workers must have the same call, number of steps, number of zero_grad calls and
        hyperparameters. If some workers have changed their parameters more often than others, the parameters must be
        equal as well. The masks and the overflow flag may differ. In an asynchronous store, the numbers of steps and of
        zero_grad calls and the parameters may differ, too.

        Args:
            comm: The workers that make the call together.
            call: The name of the call, one of `CALLS`.
            steps: The number of steps that this worker has made.
            brought: What this worker reports about its gradients.
            changes: How often this worker has changed parameters since the last step.

        Returns:
            The rows of all workers in rank order, uint8 (workers, bytes of a row).

        Raises:
            RuntimeError: The calls, or their numbers, differ. Like the next error, it is raised on all workers.
            ValueError: Hyperparameters or parameters differ.
            CollectiveError: A worker is in a call of the store instead.
        """
        is_step, counts = call == CALLS[0], not self._store.layout.asynchronous
        items: Items = []
        # Hyperparameters are compared only in steps and at the start. In other calls they may differ, because the call
        # may serve to make them equal (load_state_dict).
        if is_step or call == CALLS[1]:
            items = self._items() if is_step else [*self._items(), self._state_item()]
            # In a store that survives deaths, a spare starts with a new scaler, so its scale may differ.
            if brought.scale is not None and not self._store.layout.survives:
                items = [*items, ("GradScaler's scale", repr(brought.scale))]
        if items and items != self._digested[0]:
            self._digested = items, digest(msgspec.msgpack.encode(items))
        self._head[:] = (
            CALLS.index(call),
            steps if counts else 0,
            brought.cleared if counts else UNKNOWN,
            changes if counts else 0,
            brought.overflow,
            self._digested[1] if items else 0,
        )
        if len(self._rows) != comm.size:
            self._rows = np.empty((comm.size, self._row.size), np.uint8)
        what = f"step {steps + 1}" if is_step else call
        with self._within(what, comm):
            collectives.allgather(self._row, comm, out=self._rows)
        heads = self._rows[:, : 8 * HEAD].view(np.int64)
        if (heads == self._head).all():
            return self._rows
        # the rank that the first worker of `comm` has in the store, for error messages
        first = self._store.rank - comm.rank
        if sentence := unlike(heads.tolist(), first):
            raise of_caller(RuntimeError(sentence))
        if (heads[:, CHANGED] != heads[0, CHANGED]).any():
            self._compare_parameters(comm, what)
        if (heads[:, DIGEST] != heads[0, DIGEST]).any():
            with self._within(what, comm):
                unlike_items = gather_difference(items, comm, what, first) or UNEXPLAINED
            raise of_caller(
                ValueError(
                    f"{what}: {unlike_items}: give all workers the same, and average over them what it is computed "
                    "from, such as a loss"
                )
            )
        return self._rows

    def _compare_parameters(self, comm: MPI.Intracomm, what: str) -> None:
        """Raise ValueError if parameters differ between workers by more than rounding.

        This is called when some of the workers have changed their parameters.
        """
        with self._within(what, comm):
            every = gather_rows(np.array(self._digest_each()), comm, what)
            if (every == every[0]).all():
                return
            place = find_unlike(self._parameters, broadcast_values(self._parameters, 0, comm), 64)
            places = gather_rows(np.array([place]), comm, what)[:, 0].tolist()
        for rank, place in enumerate(places):
            if place >= 0:
                raise of_caller(
                    ValueError(
                        f"{what}: parameter {self._keys[place]!r} is not the same on rank 0 and rank {rank}: where the "
                        "program changes parameters, call set_parameters() on all workers, which then have rank 0's"
                    )
                )

    def _items(self) -> Items:
        """Return the hyperparameters, which must be equal on all workers in each step."""
        numbers = [group_numbers(group) for group in self._optimizer.param_groups]
        if numbers != self._numbers[0]:
            kind = type(self._optimizer).__name__
            items = [("the optimizer", kind), ("backward_passes_per_step", str(self._passes))]
            for at, group in enumerate(numbers):
                items += [(f"{name!r} of group {at}", repr(value)) for name, value in group.items()]
            self._numbers = numbers, items
        return self._numbers[1]

    def _state_item(self) -> tuple[str, str]:
        """Return a digest of the wrapped optimizer's state, for comparison between workers."""
        every = [value for p in self._parameters for value in self._optimizer.state.get(p, {}).values()]
        tensors = [bytes_of(value.contiguous()).tobytes() for value in every if isinstance(value, Tensor)]
        return "the optimizer's state", f"{len(tensors)} tensors, digest {digest(b''.join(tensors)):x}"

    def _digest_each(self) -> list[int]:
        return [digest(bytes_of(parameter.detach().contiguous()).tobytes()) for parameter in self._parameters]

    def _count_changes(self) -> tuple[int, str]:
        """Count the program's changes of parameters since `note`.

        Return the count, and the key of a changed parameter or "".
        """
        versions = [parameter._version for parameter in self._parameters]
        changes = [now - before for now, before in zip(versions, self._versions)]
        if self._bits:
            changes = [count or now != before for count, now, before in zip(changes, self._digest_each(), self._bits)]
        return sum(changes), next((key for key, count in zip(self._keys, changes) if count), "")

    @contextmanager
    def _within(self, what: str, comm: MPI.Intracomm) -> Iterator[None]:
        """A context for collectives that must not wait forever for a worker that is in a call of the store instead.

        Such a worker will never join the collective, because the program makes different calls on different workers. If
        a worker has been in a call of the store for ELSEWHERE_SECONDS, the store's generation ends (its life between
        two failures), and all workers raise an error that names both calls.
        """
        generation = self._store.worker.generation
        clock: Clock | None = None

        def check_elsewhere() -> None:
            nonlocal clock
            calls = [(rank, call) for rank, word in enumerate(generation.words()) if (call := call_of(word))]
            clock = (clock or Clock()) if calls else None
            if clock and clock.seconds() > ELSEWHERE_SECONDS:
                other, call = calls[0]
                own = f"{what} of a DistributedOptimizer"
                raise CollectiveError(describe_calls({other: f"{call} of the store", self._store.rank: own}))

        generation.checks.append(check_elsewhere)
        try:
            with worker_collectives(self._store, f"{what} of a DistributedOptimizer", comm):
                yield
        finally:
            generation.checks.remove(check_elsewhere)


def unlike(heads: Sequence[Sequence[int]], first: int = 0) -> str:
    """Return the reason why the workers cannot make a call together, or "" if they can. Pure.

    Args:
        heads: The first HEAD numbers of each worker's row.
        first: The rank of the first worker.
    """
    every = dict(enumerate(heads, first))
    calls = {rank: f"{CALLS[head[CALL]]} after step {head[STEPS]}" for rank, head in every.items()}
    if len(set(calls.values())) > 1:
        return describe_calls(calls)
    thing = "the number of zero_grad() calls since the last step"
    known = {rank: [(thing, str(head[CLEARED]))] for rank, head in every.items() if head[CLEARED] != UNKNOWN}
    if sentence := difference(known):
        return (
            f"step {heads[0][STEPS] + 1}: {sentence}, so one has left out a step: make each on all workers; one "
            "without a batch calls zero_grad() and step() alone, and counts as zero"
        )
    return ""
