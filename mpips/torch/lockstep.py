"""Check that the ranks of a DataParallel have the same model, and later that they run the same steps.

`agree` compares the models once, before training, and its error names the first difference. `Lockstep` records the
passes and optimizer steps that a rank makes between two exchanges of gradients. A digest of this record, the token,
travels with the gradients, so every rank learns of a difference before it uses the gradients. Now and then
`WeightWatch` compares the parameters, and `check_frozen` compares which parameters require gradients.
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
from mpips.collectives.agreement import SAME_VALUES, Items, difference
from mpips.collectives.communicator import communicator
from mpips.collectives.errors import of_caller, warn
from mpips.torch.tensors import sparse_parameters

# number of bits of a token
BITS = 24
# the hyperparameters of an optimizer's parameter groups that ranks compare
NUMBERS = ("lr", "weight_decay", "momentum", "betas", "alpha")
# The hyperparameters of at most this many steps after an exchange are compared. Later steps are only counted.
MOST_STEPS = 16
# The norms of a parameter on two ranks may differ by this share, because processors round differently.
NORM_TOLERANCE = 1e-3
# Parameters are compared after backward passes 1, 2, 4, 8, ... and after each multiple of this number.
CHECK_STEPS = 128
# If a parameter's norm on one rank changes by more than this share between two of the moments at which `WeightWatch`
# takes norms, the program itself has changed the parameter.
MOVED = 1e-5
# After this many backward passes without an optimizer step, we assume that the program updates weights by hand.
PASSES_BY_HAND = 32
# the value of a norm that was not taken
ABSENT = -1.0
# The error for tokens that differ although the items that they were computed from are equal. It stops all ranks.
UNEXPLAINED = "ranks differ in what they have done, and no word of theirs says in what (a fault of mpips: report it)"
# `content` lists the numbers of a tensor or array that has at most this many. It takes a digest of a larger one.
MOST_NUMBERS = 16
# class that averages gradients -> advice for a program that combines it with another such class
PAIRED = {
    "DataParallel": "DataParallel with an optimizer of PyTorch's",
    "DistributedOptimizer": "mpips.torch.DistributedOptimizer with the model itself",
    "hvd.DistributedOptimizer": "hvd.DistributedOptimizer with the model itself",
}


# ---- before training


# object that averages gradients -> (name of its class, ids of the parameters)
_averaging: WeakKeyDictionary[object, tuple[str, frozenset[int]]] = WeakKeyDictionary()


def claim_gradients(owner: object, what: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Note that `owner` averages these parameters' gradients from now on.

    Raises ValueError if an object of another class than `what` already averages the gradient of one of the parameters.
    """
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
    """Note that `owner` does not average gradients any more."""
    _averaging.pop(owner, None)


def model_items(module: torch.nn.Module, buckets: str | float, algorithm: str) -> Items:
    """Return the items that must be the same on all ranks.

    These are the names, dtypes, shapes and strides of the model's tensors, and the arguments of DataParallel.
    """

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


def agree(items: Items, comm: MPI.Intracomm, what: str, cure: str = SAME_VALUES, unlike: bool = False) -> None:
    """Raise the same MismatchError on all ranks unless they all pass the same items. Collective, blocking.

    Args:
        items: This rank's pairs of a name and a value.
        comm: The ranks that compare.
        what: Name of the operation, which begins the error message.
        cure: What the user should do, which ends the error message.
        unlike: True if the ranks are known to differ, so that an error is raised even if all items are the same.
    """
    if sentence := gather_difference(items, comm, what) or (UNEXPLAINED if unlike else ""):
        with communicator(comm).failing(what):
            raise collectives.MismatchError(f"{what}: {sentence}: {cure}")


def gather_difference(items: Items, comm: MPI.Intracomm, what: str, first: int = 0) -> str:
    """Gather all ranks' items and return a description of the first difference, or "". Collective, blocking.

    The description numbers the ranks of `comm` from `first`.
    """
    word = np.frombuffer(msgspec.msgpack.encode(items), np.uint8)
    sizes = gather_rows(np.array([word.size]), comm, what)[:, 0]
    padded = np.zeros(sizes.max(), np.uint8)
    padded[: word.size] = word
    rows = zip(gather_rows(padded, comm, what), sizes.tolist())
    every = [msgspec.msgpack.decode(row[:size].tobytes(), type=list[tuple[str, str]]) for row, size in rows]
    return difference(dict(enumerate(every, first)))


def content(value: object) -> Any:
    """Convert a value to plain data, such that equal values on different ranks give equal data.

    The result contains no memory address and no hash, because these differ from process to process. 1, 1.0 and a tensor
    of 1 become the same number. Lists and tuples become lists. A value without accessible contents becomes its own name
    (a function, for example) or the name of its type.
    """
    # Handle plain numbers first: this function is called for all hyperparameters in every step, and most are numbers.
    if type(value) is float or type(value) is int:
        return _content_of_number(value)
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
        named = {key if isinstance(key, str) else repr(content(key)): item for key, item in value.items()}
        return {name: content(named[name]) for name in sorted(named)}
    if isinstance(value, Set):
        return sorted((content(item) for item in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [content(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes with digest {digest(bytes(value)):x}"
    if isinstance(value, (torch.dtype, torch.device, np.dtype, PurePath)):
        return str(value)
    if isinstance(value, functools.partial):
        return [content(value.func), content(value.args), content(value.keywords)]
    if is_dataclass(value) and not isinstance(value, type):
        return [content(type(value)), {field.name: content(getattr(value, field.name)) for field in fields(value)}]
    kind: Any = value if hasattr(value, "__qualname__") else type(value)
    # Methods of types written in C have no __module__.
    return f"{getattr(kind, '__module__', None)}.{kind.__qualname__}"


def _content_of_number(value: Any) -> float | str:
    """Return a real number as a float, or as text if a float cannot hold it."""
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return str(value)
    if isinstance(value, int) and int(number) != value:
        return str(int(value))
    # Adding 0.0 turns -0.0 into 0.0.
    return number + 0.0 if number == number else math.nan


def _content_of_tensor(tensor: Tensor) -> Any:
    """Return a tensor's numbers in float64, or a description of a tensor that cannot be read."""
    try:
        given = tensor.detach()
        given = given if given.layout is torch.strided else given.to_dense()
        given = torch.view_as_real(given.resolve_conj()) if given.is_complex() else given
        return content(given.to("cpu", torch.float64).numpy())
    # A tensor on the device "meta" has no values.
    except (RuntimeError, TypeError):
        return f"{tensor.dtype}{tuple(tensor.shape)} on {tensor.device}"


def digest(data: bytes) -> int:
    """Return a hash of 56 bits. Unlike `hash`, it gives the same result in every process."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest())


def gather_rows(row: np.ndarray, comm: MPI.Intracomm, what: str) -> np.ndarray:
    """Gather one row from each rank into a matrix. All rows must have the same length. Collective, blocking."""
    rows = np.empty((comm.size, row.size), row.dtype)
    collectives.allgather(row, comm, out=rows, label=what)
    return rows


# ---- in every step


class Lockstep:
    """Counts the forward passes, backward passes and optimizer steps of one model on this rank."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_begin_step))
            _hooks.append(register_optimizer_step_post_hook(_end_step))
        # True during a backward pass, when gradients are not averaged yet
        self.in_backward = False
        self.weights = WeightWatch(parameters)
        self._parameters = frozenset(map(id, parameters))
        self._forwards = 0
        self._backwards = 0
        # number of backward passes that have raised
        self._failed = 0
        # steps since the last exchange: (class of the optimizer, hyperparameters of each of its groups)
        self._steps: list[tuple[str, list[dict[str, Any]]]] = []
        # number of steps after the first MOST_STEPS
        self._more_steps = 0
        # optimizer -> (number of its groups when it was last examined, whether it has parameters of this model)
        self._known: WeakKeyDictionary[Optimizer, tuple[int, bool]] = WeakKeyDictionary()
        _all.add(self)

    def count_forward(self) -> Callable[[], None]:
        """Count a forward pass.

        Return a function that counts the backward pass of this forward pass when it is called for the first time.
        """
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
        """Count an optimizer's step, if the optimizer has parameters of this model.

        Raises RuntimeError during a backward pass, because the gradients are not averaged yet.
        """
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
        """After an exchange, forget the steps. Keep the forward passes, because their backward passes may still run."""
        self._steps.clear()
        self._more_steps = 0
        self.weights.begin_anew()

    def clear(self) -> None:
        """Forget everything, after ranks that made different numbers of steps have received the same parameters."""
        self.weights.has_stepped = True
        self._forwards = self._backwards = self._failed = 0
        self.begin_anew()

    def token(self) -> int:
        """Return BITS bits that are equal on ranks that made the same passes and steps since the last exchange."""
        done = self._forwards - self._backwards, self._failed, self._more_steps, self._steps
        return digest(msgspec.msgpack.encode(done)) & (1 << BITS) - 1

    def items(self) -> Items:
        """Return the values that the token is computed from, as text for an error message."""
        every = [
            ("the number of forward passes without a backward pass", str(self._forwards - self._backwards)),
            ("the number of backward passes that raised", str(self._failed)),
            ("the number of optimizer steps since the last backward pass", str(len(self._steps) + self._more_steps)),
        ]
        for number, (name, groups) in enumerate(self._steps, 1):
            every.append((f"the optimizer of step {number} since the last backward pass", name))
            every.append((f"the number of {name}'s groups" + f" in step {number}" * (number > 1), str(len(groups))))
            for group, numbers in enumerate(groups):
                every += [
                    (f"{key} of {name}'s group {group}" + f" in step {number}" * (number > 1), repr(value))
                    for key, value in numbers.items()
                ]
        return every


_all: WeakSet[Lockstep] = WeakSet()
# handles of the hooks that count the steps of all optimizers in this process
_hooks: list[Any] = []
# optimizers whose step is under way: more than one if a step calls the step of another optimizer
_stepping: list[Optimizer] = []


def _begin_step(optimizer: Optimizer, args: object, keywords: object) -> None:
    # The optimizer of a step that raised is still in the list, but its method is no longer on the call stack.
    _stepping[:] = [other for other in _stepping if other is not optimizer and _is_caller(other)]
    _stepping.append(optimizer)


def _end_step(optimizer: Optimizer, args: object, keywords: object) -> None:
    _stepping.remove(optimizer)
    # Count only outermost steps. ZeroRedundancyOptimizer, for example, calls the step of an inner optimizer, whose
    # parameters differ between ranks.
    if not _stepping:
        for lockstep in list(_all):
            lockstep.count_step(optimizer)


def _is_caller(optimizer: Optimizer) -> bool:
    """True if a method of the optimizer is on the call stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


# ---- from time to time


def is_due(number: int) -> bool:
    """True if parameters are compared after backward pass `number`, counted from 1."""
    return number & (number - 1) == 0 or number % CHECK_STEPS == 0


def check_frozen(named: Iterable[tuple[str, Tensor]], comm: MPI.Intracomm, what: str, known: Container[Tensor]) -> None:
    """Raise MismatchError on all ranks if they differ in which parameters require a gradient. Collective, blocking.

    `known` are the parameters that the model had when it was wrapped. MismatchError is also raised if another parameter
    requires a gradient.
    """
    named = list(named)
    for name, parameter in named:
        if parameter.requires_grad and parameter not in known:
            with communicator(comm).failing(what):
                raise collectives.MismatchError(
                    f"{what}: parameter {name!r} is not known to DataParallel: wrap the model when it is complete"
                )
    every = gather_rows(np.array([parameter.requires_grad for _, parameter in named], np.uint8), comm, what)
    if (every != every[0]).any():
        names = [f"parameter {name!r}" for name, _ in named]
        kinds = [["trained" if needs else "frozen" for needs in row] for row in every]
        unlike = difference({rank: [*zip(names, row)] for rank, row in enumerate(kinds)})
        with communicator(comm).failing(what):
            raise collectives.MismatchError(f"{what}: {unlike}: freeze it on all ranks, or on none")


class WeightWatch:
    """Compares the norms of the parameters between ranks at two moments.

    One moment is after an optimizer step, the other is before the next forward pass. In a correct program, all ranks
    have equal weights at least at one of them. At other times a rank may have changed its weights temporarily, as
    sharpness-aware minimization, MAML and weight noise do. So it is an error only if ranks differ at both moments.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        eps = np.array([torch.finfo(parameter.dtype).eps for parameter in self._parameters])
        self._tolerances = np.maximum(NORM_TOLERANCE, 4 * eps)
        # True if the next backward pass that follows a step must compare the norms
        self.due = False
        # True if the next comparison repeats one that found a difference
        self._repeats = False
        self._has_warned = False
        # True once a PyTorch optimizer has made a step. It stays False in a program that updates weights by hand, where
        # we cannot know when a step has ended.
        self.has_stepped = False
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget the norms after an exchange of gradients."""
        self._after_step: list[float] = []
        self._before_forward: list[float] = []

    def note_step(self) -> None:
        """Take the norms after the first step since the last exchange, if a comparison is due."""
        self.has_stepped = True
        if self.due and not self._after_step:
            self._after_step, self._before_forward = self._norms(), []

    def note_forward(self) -> None:
        """Take the norms before the first forward pass that follows an optimizer step, if a comparison is due."""
        if self.due and not self._before_forward and (self._after_step or not self.has_stepped):
            self._before_forward = self._norms()

    def compare(self, number: int, names: Mapping[Tensor, str], comm: MPI.Intracomm, what: str) -> None:
        """Compare the norms, if that is due and a step was made before backward pass `number`. Collective, blocking.

        All ranks must have made the same number of steps. They all raise MismatchError if a parameter differs at both
        moments.

        If the program changes weights outside of optimizer steps, or has made no step in PASSES_BY_HAND passes, rank 0
        warns once instead: the ranks may be equal at a moment that we do not check, or differ only by rounding.
        """
        if not self.due or (not self._after_step and (self.has_stepped or number < PASSES_BY_HAND)):
            return
        absent = [ABSENT] * len(self._parameters)
        own = np.array([self._after_step or absent, self._before_forward or absent, self._norms()])
        every = gather_rows(own.ravel(), comm, what).reshape(comm.size, *own.shape)
        # moment (after the step, before the forward pass, now) -> whether every rank has taken its norms
        known = (every != ABSENT).all(axis=(0, 2))
        # (rank, moment, parameter) -> whether the norm differs from rank 0's. Of the first two moments, only those at
        # which every rank has taken its norms.
        far = ~np.isclose(every, every[0], rtol=self._tolerances, atol=1e-30, equal_nan=True)[:, :2][:, known[:2]]
        # A rank that has changed its weights between the step and the forward pass differs only at the second moment.
        # If it keeps the change, its norms differ at both moments of the next pass. So the next pass compares again.
        self.due = self._repeats = not self._repeats and bool(far.any())
        if not known[:2].any() or not far.all(axis=1).any():
            return
        rank, place = map(int, np.argwhere(far.all(axis=1))[0])
        every = every[:, known]
        name, norms = names.get(self._parameters[place], "?"), every[:, 0, place]
        differ = f"parameter {name!r} has norm {norms[0]:.6g} on rank 0 and {norms[rank]:.6g} on rank {rank}"
        # If no rank's norms change between the three moments, the program changes weights only in optimizer steps. A
        # difference between ranks then shows that their models have drifted apart, which is an error.
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
