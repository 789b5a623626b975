"""Ranks of a DataParallel agree before they train; then a token shows who skipped a step or has another learning rate.

`agree` compares once, and says in words what differs first. `Lockstep` counts what a rank's program does between two
exchanges. Its token travels beside the gradients, so all ranks see a difference before anybody uses them.
`WeightWatch` compares the parameters now and then, and `check_frozen` which of them require gradients.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from pathlib import PurePath
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import msgspec
import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import mpips.collectives as collectives
from mpips.collectives.communicator import communicator
from mpips.collectives.errors import of_caller, warn
from mpips.torch.tensors import sparse_parameters

BITS = 24
"""Of a token."""
NUMBERS = ("lr", "weight_decay", "momentum", "betas", "alpha")
"""Numbers of an optimizer's groups that are compared."""
MOST_STEPS = 16
"""Optimizer steps between two exchanges that are compared one by one."""
NORM_TOLERANCE = 1e-3
"""Difference allowed between norms of a parameter, relative to the larger: processors round unlike."""
CHECK_STEPS = 128
"""Steps between two comparisons of parameters, beside the steps 1, 2, 4, 8, ..."""
MOVED = 1e-5
"""Relative difference of a parameter's norms at two moments of one rank, above which its program has moved it."""
PASSES_BY_HAND = 32
"""Backward passes without a step of an optimizer, after which the program is taken to step by hand."""
ABSENT = -1.0
"""Stands in place of a norm that was not taken."""
UNEXPLAINED = "ranks differ in what they have done, and no word of theirs says in what (a fault of mpips: report it)"
"""Said where what ranks compare differs, and the words for it do not: nobody goes on."""
MOST_NUMBERS = 16
"""Numbers of a tensor or an array that `content` tells one by one."""
PAIRED = {
    "DataParallel": "DataParallel with an optimizer of PyTorch's",
    "DistributedOptimizer": "mpips.torch.DistributedOptimizer with the model itself",
    "hvd.DistributedOptimizer": "hvd.DistributedOptimizer with the model itself",
}
"""What averages gradients, and beside what it is used."""
Items = Sequence[tuple[str, str]]
"""Things, such as "parameter 'weight'", and what they are: "float32(2, 3)". No thing comes twice."""


# ---- before training


_averaging: WeakKeyDictionary[object, tuple[str, frozenset[int]]] = WeakKeyDictionary()
"""By whom gradients are averaged over ranks, what it is called, and of which parameters."""


def claim_gradients(owner: object, what: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Note that `owner` averages these parameters' gradients. ValueError where something else than a `what` does."""
    named = list(named)
    for other, ids in list(_averaging.values()):
        for name, parameter in named:
            if other != what and id(parameter) in ids:
                raise of_caller(
                    ValueError(
                        f"{what}: gradients of parameter {name!r} are averaged by {other} already, and one is enough: "
                        f"use {PAIRED[other]}, or {PAIRED[what]}"
                    )
                )
    _averaging[owner] = what, frozenset(id(parameter) for _, parameter in named)


def release_gradients(owner: object) -> None:
    """Note that `owner` averages gradients no more."""
    _averaging.pop(owner, None)


def model_items(module: torch.nn.Module, buckets: str | float, algorithm: str) -> Items:
    """Return what all ranks must have alike: names, types, shapes and strides of tensors, and the arguments."""

    sparse = sparse_parameters(module)

    def kind(tensor: Tensor) -> str:
        order = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
        return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}{order}"

    return [
        *(
            (f"parameter {name!r}", kind(p) + ", frozen" * (not p.requires_grad) + ", sparse" * (p in sparse))
            for name, p in module.named_parameters()
        ),
        *((f"buffer {name!r}", kind(buffer)) for name, buffer in module.named_buffers()),
        ("buckets", repr(buckets)),
        ("algorithm", repr(algorithm)),
        ("module", type(module).__name__),
    ]


def agree(
    items: Items, comm: MPI.Intracomm, what: str, cure: str = "give all ranks the same", unlike: bool = False
) -> None:
    """Raise MismatchError on all ranks, with one sentence, unless all bring the same. Collective, blocking.

    `unlike`: ranks are known to differ, so they raise even if all bring the same items.
    """
    if found := gather_difference(items, comm, what) or (UNEXPLAINED if unlike else ""):
        with communicator(comm).failing(what):
            raise collectives.MismatchError(f"{what}: {found}: {cure}")


def gather_difference(items: Items, comm: MPI.Intracomm, what: str, first: int = 0) -> str:
    """Return the first difference between all ranks' items, as `difference` does. Collective, blocking."""
    word = np.frombuffer(msgspec.msgpack.encode(items), np.uint8)
    sizes = gather_rows(np.array([word.size]), comm, what)[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: word.size] = word
    rows = zip(gather_rows(padded, comm, what), sizes.tolist())
    every = [msgspec.msgpack.decode(row[:size].tobytes(), type=list[tuple[str, str]]) for row, size in rows]
    return difference(every, first)


def difference(every: Sequence[Items], first: int = 0) -> str:
    """Return in words the first difference between rank `first` and those behind it, "" where there is none. Pure."""
    known = dict(every[0])
    for rank, items in enumerate(every, first):
        theirs = dict(items)
        for thing, kind in every[0]:
            if thing not in theirs:
                return f"rank {rank} has no {thing}, which rank {first} has"
            if theirs[thing] != kind:
                return f"{thing} is {kind} on rank {first} and {theirs[thing]} on rank {rank}"
        for other in theirs:
            if other not in known:
                return f"rank {first} has no {other}, which rank {rank} has"
        for thing, other in zip(known, theirs):
            if other != thing:
                return f"rank {first} has {thing} where rank {rank} has {other}"
    return ""


def content(value: object) -> Any:
    """Return the contents of a value as plain data, which is equal on ranks whose values are equal.

    There is no address and no hash in it, which Python makes anew in each process. 1, 1.0 and a tensor of 1 become the
    same number; lists and tuples become lists. A value whose contents are unknown, such as a function, becomes its name
    or that of its type.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (complex, np.complexfloating)):
        return str(complex(value))
    if isinstance(value, Number):
        return _content_of_number(value)
    if isinstance(value, Tensor):
        return _content_of_tensor(value)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.size <= MOST_NUMBERS or value.dtype.hasobject:
            return content(value.tolist())
        return f"{value.dtype}{value.shape} with digest {digest(np.ascontiguousarray(value).tobytes()):x}"
    if isinstance(value, Mapping):
        named = {key if isinstance(key, str) else repr(content(key)): one for key, one in value.items()}
        return {name: content(named[name]) for name in sorted(named)}
    if isinstance(value, Set):
        return sorted((content(one) for one in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [content(one) for one in value]
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes with digest {digest(bytes(value)):x}"
    if isinstance(value, (torch.dtype, torch.device, np.dtype, PurePath)):
        return str(value)
    if isinstance(value, functools.partial):
        return [content(value.func), content(value.args), content(value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        return [content(type(value)), {field.name: content(getattr(value, field.name)) for field in fields(value)}]
    kind: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(kind, '__module__', None)}.{kind.__qualname__}"  # methods of types in C have no module


def _content_of_number(value: Any) -> float | str:
    """Return a real number as a float, as text where it does not fit into one."""
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return str(value)
    if isinstance(value, int) and int(number) != value:
        return str(int(value))
    return number + 0.0 if number == number else math.nan  # -0.0 becomes 0.0


def _content_of_tensor(tensor: Tensor) -> Any:
    """Return a tensor's numbers in float64, where they can be read."""
    try:
        given = tensor.detach()
        given = given if given.layout is torch.strided else given.to_dense()
        given = torch.view_as_real(given.resolve_conj()) if given.is_complex() else given
        return content(given.to("cpu", torch.float64).numpy())
    except (RuntimeError, TypeError):  # it has none, as a tensor of the device "meta"
        return f"{tensor.dtype}{tuple(tensor.shape)} on {tensor.device}"


def digest(data: bytes) -> int:
    """Return 56 bits that are equal for equal bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())


def gather_rows(row: np.ndarray, comm: MPI.Intracomm, what: str) -> np.ndarray:
    """Return all ranks' rows, which have one length. Collective, blocking."""
    rows = np.empty((comm.size, row.size), row.dtype)
    collectives.allgather(row, comm, out=rows, label=what)
    return rows


# ---- in every step


class Lockstep:
    """Counts one rank's forward passes and optimizer steps for the model with these parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_begin_step))
            _hooks.append(register_optimizer_step_post_hook(_end_step))
        self.in_backward = False
        """True where a backward pass is under way, whose gradients are not yet those of all ranks."""
        self.weights = WeightWatch(parameters)
        self._parameters = frozenset(map(id, parameters))
        self._forwards = self._backwards = self._failed = 0
        self._steps: list[tuple[str, list[dict[str, Any]]]] = []
        self._more_steps = 0
        self._known: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        _all.add(self)

    def count_forward(self) -> Callable[[], None]:
        """Count a forward pass. Return what counts its backward pass, the first time that it is called."""
        self._forwards += 1
        left = [1]

        def count_backward() -> None:
            self._backwards += left[0]
            left[0] = 0

        return count_backward

    def count_failure(self) -> None:
        """Count a backward pass that has raised."""
        self._failed += 1

    def count_step(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step where it has parameters of the model. RuntimeError within a backward pass."""
        groups = optimizer.param_groups
        count, ours = self._known.get(optimizer, (-1, False))
        if count != len(groups):
            ours = any(id(parameter) in self._parameters for group in groups for parameter in group["params"])
            self._known[optimizer] = (len(groups), ours)
        if not ours:
            return
        if self.in_backward:
            why = "has raised in the middle" if torch._C._current_graph_task_id() < 0 else "has not ended"
            raise of_caller(
                RuntimeError(
                    f"{type(optimizer).__name__}.step: backward {why}, and gradients are this "
                    "rank's alone: step when backward has returned"
                )
            )
        self.weights.note_step()
        if len(self._steps) == MOST_STEPS:
            self._more_steps += 1
            return
        numbers = [{name: content(group[name]) for name in NUMBERS if name in group} for group in groups]
        self._steps.append((type(optimizer).__name__, numbers))

    def begin_anew(self) -> None:
        """Forget the steps, after an exchange. Forward passes may still have their backward pass."""
        self._steps.clear()
        self._more_steps = 0
        self.weights.begin_anew()

    def clear(self) -> None:
        """Forget all: ranks are alike again, which may have made unlike numbers of steps."""
        self.weights.has_stepped = True
        self._forwards = self._backwards = self._failed = 0
        self.begin_anew()

    def token(self) -> int:
        """Return BITS bits that are equal on ranks whose programs did the same."""
        done = self._forwards - self._backwards, self._failed, self._more_steps, self._steps
        return digest(msgspec.msgpack.encode(done)) & (1 << BITS) - 1

    def items(self) -> Items:
        """Return in words what the token stands for."""
        found = [
            ("the number of forward passes without a backward pass", str(self._forwards - self._backwards)),
            ("the number of backward passes that raised", str(self._failed)),
            ("the number of optimizer steps since the last backward pass", str(len(self._steps) + self._more_steps)),
        ]
        for number, (name, groups) in enumerate(self._steps, 1):
            found.append((f"the optimizer of step {number} since the last backward pass", name))
            found.append((f"the number of {name}'s groups" + f" in step {number}" * (number > 1), str(len(groups))))
            for group, numbers in enumerate(groups):
                found += [
                    (f"{key} of {name}'s group {group}" + f" in step {number}" * (number > 1), repr(value))
                    for key, value in numbers.items()
                ]
        return found


_all: WeakSet[Lockstep] = WeakSet()
_hooks: list[Any] = []
"""By which each optimizer's step in this process is counted."""
_stepping: list[Optimizer] = []
"""Optimizers whose step is under way: one may run another inside."""


def _begin_step(optimizer: Optimizer, args: object, keywords: object) -> None:
    # Others whose step is no caller have raised.
    _stepping[:] = [other for other in _stepping if other is not optimizer and _is_caller(other)]
    _stepping.append(optimizer)


def _end_step(optimizer: Optimizer, args: object, keywords: object) -> None:
    _stepping.remove(optimizer)
    if not _stepping:  # one that ZeroRedundancyOptimizer runs has other parameters on every rank
        for lockstep in list(_all):
            lockstep.count_step(optimizer)


def _is_caller(optimizer: Optimizer) -> bool:
    """Return whether a method of the optimizer is among the callers."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# ---- now and then


def is_due(number: int) -> bool:
    """Return whether backward pass `number`, counted from 1, is one after which parameters are compared."""
    return number & (number - 1) == 0 or number % CHECK_STEPS == 0


def check_frozen(named: Iterable[tuple[str, Tensor]], comm: MPI.Intracomm, what: str, known: Container[Tensor]) -> None:
    """Raise MismatchError on all ranks where a parameter requires a gradient on some of them only, or requires one and
    is not `known`. Collective, blocking."""
    named = list(named)
    for name, parameter in named:
        if parameter.requires_grad and parameter not in known:
            with communicator(comm).failing(what):
                raise collectives.MismatchError(
                    f"{what}: parameter {name!r} is not known to DataParallel: wrap the model when it is complete"
                )
    every = gather_rows(np.array([parameter.requires_grad for _, parameter in named], np.uint8), comm, what)
    for rank, place in np.argwhere(every != every[0]):
        frozen, other = (rank, 0) if every[0, place] else (0, rank)
        with communicator(comm).failing(what):
            raise collectives.MismatchError(
                f"{what}: parameter {named[place][0]!r} requires a gradient on rank {other} and none on rank {frozen}: "
                "freeze it on all ranks, or on none"
            )


class WeightWatch:
    """Compares parameters' norms of all ranks, as they were after an optimizer's step and before the next forward pass.

    At any other moment each rank may have moved its own, to move them back later, as sharpness-aware minimization,
    MAML and noise on weights do. Such a program has them alike at one of the two moments, if not at both: so ranks are
    at fault where they differ at both.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        eps = np.array([torch.finfo(parameter.dtype).eps for parameter in self._parameters])
        self._tolerances = np.maximum(NORM_TOLERANCE, 4 * eps)
        self.due = False
        """True where the next backward pass with a step before it compares."""
        self._repeats = self._has_warned = False
        self.has_stepped = False
        """True once an optimizer of PyTorch's has made a step. A program that steps by hand tells no moment of it."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the norms, after an exchange."""
        self._after_step: list[float] = []
        self._before_forward: list[float] = []

    def note_step(self) -> None:
        """Take the norms after the first step since the last exchange."""
        self.has_stepped = True
        if self.due and not self._after_step:
            self._after_step, self._before_forward = self._norms(), []

    def note_forward(self) -> None:
        """Take the norms before the first forward pass that follows that step."""
        if self.due and not self._before_forward and (self._after_step or not self.has_stepped):
            self._before_forward = self._norms()

    def compare(self, number: int, names: Mapping[Tensor, str], comm: MPI.Intracomm, what: str) -> None:
        """Raise MismatchError on all ranks where they differ at both moments in backward pass `number`. Collective,
        blocking, where it is due and a step was made before; ranks have made as many steps.

        Rank 0 warns instead, once, where the program moves weights without an optimizer's step, or has made none in
        PASSES_BY_HAND passes: the ranks may be alike at a moment that nobody sees, or differ by rounding.
        """
        if not self.due or (not self._after_step and (self.has_stepped or number < PASSES_BY_HAND)):
            return
        absent = [ABSENT] * len(self._parameters)
        mine = np.array([self._after_step or absent, self._before_forward or absent, self._norms()])
        every = gather_rows(mine.ravel(), comm, what).reshape(comm.size, *mine.shape)
        known = (every != ABSENT).all(axis=(0, 2))
        far = ~np.isclose(every, every[0], rtol=self._tolerances, atol=1e-30, equal_nan=True)[:, :2][:, known[:2]]
        # What one rank has changed between a step and a forward pass is found in the pass after this one.
        self.due = self._repeats = not self._repeats and bool(far.any())
        if not known[:2].any() or not far.all(axis=1).any():
            return
        rank, place = map(int, np.argwhere(far.all(axis=1))[0])
        every = every[:, known]
        name, one, other = names.get(self._parameters[place], "?"), every[0, 0, place], every[rank, 0, place]
        differ = f"parameter {name!r} has norm {one:.6g} on rank 0 and {other:.6g} on rank {rank}"
        if self.has_stepped and np.allclose(every, every[:, :1], rtol=MOVED, atol=0, equal_nan=True):
            with communicator(comm).failing(what):
                raise collectives.MismatchError(
                    f"{what}: {differ}: let all ranks step on the gradients of DataParallel, with the same numbers"
                )
        if comm.rank == 0 and not self._has_warned:
            warn(
                f"{what}: {differ}, and the program moves weights itself: unless each rank puts its own back (from a "
                "copy, as sums round), let all ranks step on the gradients of DataParallel"
            )
        self._has_warned = True

    def _norms(self) -> list[float]:
        with torch.no_grad():
            return [float(norm) for norm in torch._foreach_norm(self._parameters)]
