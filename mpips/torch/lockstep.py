"""See that all ranks make the same steps: what a rank's program did between two exchanges, as a token beside gradients.

A rank that leaves a step out, or steps with another learning rate, has a token of its own. All ranks see that in the
same exchange, before anybody uses its gradients.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Container, Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import collectives
from collectives.communicator import communicator
from collectives.errors import of_caller
from mpips.torch import agreement
from mpips.torch.agreement import Items

BITS = 24
"""Of a token."""
NUMBERS = ("lr", "weight_decay", "momentum", "betas", "alpha")
"""What is compared of an optimizer's groups."""
MOST = 16
"""Optimizer steps between two exchanges that are compared one by one."""
APART = 1e-3
"""How far the norms of a parameter may be apart, relative to the larger: processors of several kinds round unlike."""
FROZEN = -1.0
"""Stands in place of the norm of a parameter that requires no gradient."""

_all: WeakSet[Lockstep] = WeakSet()
_within: list[Optimizer] = []
"""Optimizers whose step is under way: one may run another inside."""


class Lockstep:
    """Counts one rank's forward passes and optimizer steps for the model with these parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        _listen()
        self.within = False
        """Whether a backward pass is under way, whose gradients are not yet those of all ranks."""
        self._parameters = frozenset(map(id, parameters))
        self._made = self._used = self._failed = 0
        self._steps: list[tuple[str, tuple[Any, ...]]] = []
        self._more = 0
        self._known: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        _all.add(self)

    def forward(self) -> Callable[[], None]:
        """Count a forward pass. Return what counts its backward pass, the first time that it is called."""
        self._made += 1
        left = [1]

        def used() -> None:
            self._used += left[0]
            left[0] = 0

        return used

    def fail(self) -> None:
        """Count a backward pass that has raised."""
        self._failed += 1

    def clear(self) -> None:
        """Forget all: ranks are alike again."""
        self._made = self._used = self._failed = 0
        self.next()

    def next(self) -> None:
        """Begin anew after an exchange. Forward passes may still have their backward pass."""
        self._steps.clear()
        self._more = 0

    def token(self) -> int:
        """Return BITS bits that are equal on ranks whose programs did the same."""
        steps = tuple([(zlib.crc32(name.encode()), numbers) for name, numbers in self._steps])
        word = hash((self._made - self._used, self._failed, self._more, steps))
        return (word ^ word >> BITS ^ word >> 2 * BITS) & (1 << BITS) - 1

    def items(self) -> Items:
        """Return the same in words."""
        found = [
            ("the number of forward passes without a backward pass", str(self._made - self._used)),
            ("the number of backward passes that raised", str(self._failed)),
            ("the number of optimizer steps since the last backward pass", str(len(self._steps) + self._more)),
        ]
        for number, (name, groups) in enumerate(self._steps, 1):
            found.append((f"the optimizer of step {number} since the last backward pass", name))
            for group, numbers in enumerate(groups):
                found += [
                    (f"{key} of {name}'s group {group}" + f" in step {number}" * (number > 1), repr(value))
                    for key, value in zip(NUMBERS, numbers)
                ]
        return found

    def note(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step where it has parameters of the model. RuntimeError within a backward pass."""
        groups = optimizer.param_groups
        count, ours = self._known.get(optimizer, (-1, False))
        if count != len(groups):
            ours = any(id(parameter) in self._parameters for group in groups for parameter in group["params"])
            self._known[optimizer] = (len(groups), ours)
        if not ours:
            return
        if self.within:
            why = "has raised in the middle" if torch._C._current_graph_task_id() < 0 else "has not ended"
            raise of_caller(RuntimeError(f"{type(optimizer).__name__}.step: backward {why}, and gradients are this "
                                         "rank's alone: step when backward has returned"))  # fmt: skip
        if len(self._steps) == MOST:
            self._more += 1
            return
        self._steps.append((type(optimizer).__name__, tuple([_numbers(group) for group in groups])))


def see_alike(named: Iterable[tuple[str, Tensor]], comm: MPI.Intracomm, what: str, known: Container[Tensor]) -> None:
    """Raise MismatchError on all ranks where a parameter's norm differs between them, where it is frozen on some of
    them alone, and where one that requires a gradient is not `known`. Collective, blocking."""
    named = list(named)
    names = [name for name, _ in named]
    trained = [(place, parameter) for place, (_, parameter) in enumerate(named) if parameter.requires_grad]
    for place, parameter in trained:
        if parameter not in known:
            with communicator(comm).failing(what):
                raise collectives.MismatchError(f"{what}: parameter {names[place]!r} is not known to DataParallel: "
                                                "wrap the model when it is complete")  # fmt: skip
    norms, apart = np.full(len(names), FROZEN), np.full(len(names), APART)
    if trained:
        places = [place for place, _ in trained]
        with torch.no_grad():
            norms[places] = [float(norm) for norm in torch._foreach_norm([parameter for _, parameter in trained])]
        apart[places] = [max(APART, 4 * torch.finfo(parameter.dtype).eps) for _, parameter in trained]
    every = agreement.gathered(norms, comm)
    unlike = (every == FROZEN) != (every[0] == FROZEN)
    if unlike.any():
        rank, place = map(int, np.argwhere(unlike)[0])
        frozen, other = (0, rank) if every[0, place] == FROZEN else (rank, 0)
        with communicator(comm).failing(what):
            raise collectives.MismatchError(
                f"{what}: parameter {names[place]!r} requires a gradient on rank {other} and none on rank {frozen}: "
                "freeze it on all ranks, or on none"
            )
    off = ~np.isclose(every, every[0], rtol=apart, atol=1e-30, equal_nan=True)
    if not off.any():
        return
    rank, place = map(int, np.argwhere(off)[0])
    with communicator(comm).failing(what):
        raise collectives.MismatchError(
            f"{what}: parameter {names[place]!r} has norm {every[0, place]:.6g} on rank 0 and {every[rank, place]:.6g} "
            f"on rank {rank}: let all ranks step on the gradients of DataParallel, with the same numbers"
        )


def _numbers(group: dict[str, Any]) -> tuple[Any, ...]:
    found = [group.get(name) or 0 for name in NUMBERS]
    return tuple([float(value) if isinstance(value, Tensor) else value for value in found])


def _listen() -> None:
    """Hear of every optimizer's step in this process."""
    if not _heard:
        _heard.append(register_optimizer_step_pre_hook(_begin))
        _heard.append(register_optimizer_step_post_hook(_end))


_heard: list[Any] = []


def _begin(optimizer: Optimizer, args: Any, keywords: Any) -> None:
    _within[:] = [other for other in _within if other is not optimizer and _runs(other)]  # others have raised
    _within.append(optimizer)


def _end(optimizer: Optimizer, args: Any, keywords: Any) -> None:
    _within.remove(optimizer)
    if not _within:  # one that ZeroRedundancyOptimizer runs has other parameters on every rank
        for lockstep in list(_all):
            lockstep.note(optimizer)


def _runs(optimizer: Optimizer) -> bool:
    """Return whether a method of the optimizer is among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
