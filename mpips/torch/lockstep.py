"""Ranks of a DataParallel agree before they train; then a token shows who skipped a step or has another learning rate.

`agree` compares once, and says in words what differs first. `Lockstep` counts what a rank's program does between two
exchanges. Its token travels beside the gradients, so all ranks see a difference before anybody uses them.
`check_weights` compares the parameters now and then.
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

import collectives
from collectives.communicator import communicator
from collectives.errors import of_caller
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
FROZEN = -1.0
"""Stands in place of the norm of a parameter that requires no gradient."""
UNEXPLAINED = "ranks differ in what they have done, and no word of theirs says in what (a fault of mpips: report it)"
"""Said where what ranks compare differs, and the words for it do not: nobody goes on."""
MOST_NUMBERS = 16
"""Numbers of a tensor or an array that `content` tells one by one."""
Items = Sequence[tuple[str, str]]
"""Things, such as "parameter 'weight'", and what they are: "float32(2, 3)". No thing comes twice."""


# ---- before training


def model_items(module: torch.nn.Module, buckets: str | float, algorithm: str) -> Items:
    """Return what all ranks must have alike: names, types, shapes and strides of tensors, and the arguments."""

    sparse = sparse_parameters(module)

    def kind(tensor: Tensor) -> str:
        order = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
        return f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}{order}"

    return [
        *((f"parameter {name!r}", kind(p) + ", frozen" * (not p.requires_grad) + ", sparse" * (p in sparse))
          for name, p in module.named_parameters()),
        *((f"buffer {name!r}", kind(buffer)) for name, buffer in module.named_buffers()),
        ("buckets", repr(content(buckets))), ("algorithm", repr(content(algorithm))), ("module", type(module).__name__),
    ]  # fmt: skip


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
    """Return the contents of a value as plain data: equal on ranks whose values are equal, and never an address or a
    hash, which Python makes anew in each process.

    Numbers become floats, also those of tensors and arrays; lists and tuples become lists. A value whose contents are
    unknown, such as a function, becomes its name or that of its type.
    """
    if value is None or isinstance(value, bool) or (type(value) is float and value):
        return value if value == value else math.nan
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
    return f"{kind.__module__}.{kind.__qualname__}"


def _content_of_number(value: Any) -> float | str:
    """Return a real number as a float; as text where it does not fit into one."""
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

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_begin_step))
            _hooks.append(register_optimizer_step_post_hook(_end_step))
        self.in_backward = False
        """True where a backward pass is under way, whose gradients are not yet those of all ranks."""
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
            raise of_caller(RuntimeError(f"{type(optimizer).__name__}.step: backward {why}, and gradients are this "
                                         "rank's alone: step when backward has returned"))  # fmt: skip
        if len(self._steps) == MOST_STEPS:
            self._more_steps += 1
            return
        numbers = [{name: content(group[name]) for name in NUMBERS if name in group} for group in groups]
        self._steps.append((type(optimizer).__name__, numbers))

    def begin_anew(self) -> None:
        """Forget the steps, after an exchange. Forward passes may still have their backward pass."""
        self._steps.clear()
        self._more_steps = 0

    def clear(self) -> None:
        """Forget all: ranks are alike again."""
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


def check_weights(
    named: Iterable[tuple[str, Tensor]], comm: MPI.Intracomm, what: str, known: Container[Tensor]
) -> None:
    """Raise MismatchError on all ranks where parameters are not alike: their norms, and which are frozen.

    So it does where a parameter that requires a gradient is not `known`. Collective, blocking.
    """
    named = list(named)
    names = [name for name, _ in named]
    trained = [(place, parameter) for place, (_, parameter) in enumerate(named) if parameter.requires_grad]
    for place, parameter in trained:
        if parameter not in known:
            with communicator(comm).failing(what):
                raise collectives.MismatchError(f"{what}: parameter {names[place]!r} is not known to DataParallel: "
                                                "wrap the model when it is complete")  # fmt: skip
    norms, tolerances = np.full(len(names), FROZEN), np.full(len(names), NORM_TOLERANCE)
    if trained:
        places = [place for place, _ in trained]
        with torch.no_grad():
            norms[places] = [float(norm) for norm in torch._foreach_norm([parameter for _, parameter in trained])]
        tolerances[places] = [max(NORM_TOLERANCE, 4 * torch.finfo(parameter.dtype).eps) for _, parameter in trained]
    every = gather_rows(norms, comm, what)
    unlike = (every == FROZEN) != (every[0] == FROZEN)
    if unlike.any():
        rank, place = map(int, np.argwhere(unlike)[0])
        frozen, other = (0, rank) if every[0, place] == FROZEN else (rank, 0)
        with communicator(comm).failing(what):
            raise collectives.MismatchError(
                f"{what}: parameter {names[place]!r} requires a gradient on rank {other} and none on rank {frozen}: "
                "freeze it on all ranks, or on none"
            )
    far = ~np.isclose(every, every[0], rtol=tolerances, atol=1e-30, equal_nan=True)
    if not far.any():
        return
    rank, place = map(int, np.argwhere(far)[0])
    with communicator(comm).failing(what):
        raise collectives.MismatchError(
            f"{what}: parameter {names[place]!r} has norm {every[0, place]:.6g} on rank 0 and {every[rank, place]:.6g} "
            f"on rank {rank}: let all ranks step on the gradients of DataParallel, with the same numbers"
        )
