"""Define an optimizer: a frozen record of numbers with `init` and `update`.

`equation.Equation` makes one of an equation, and there is what applies any.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from mpips.collectives.errors import did_you_mean

State = Sequence[np.ndarray]
"""An optimizer's arrays for n weights, of shape (n,), an element of each for every weight."""


@runtime_checkable
class RateSchedule(Protocol):
    """A number that depends on the step: a frozen record with `at`. See `mpips.optimizers.schedules`."""

    def at(self, step: int) -> float:
        """Return the number for update `step` of a key, counted from 1."""


@runtime_checkable
class Optimizer(Protocol):
    """A frozen dataclass of numbers with these two methods; `mpips.optimizers.register` makes it known by its name.

    An element's update depends on that element of weights, gradient and state alone. A server then updates a shard
    interval by interval, on several threads at once, and gets the bits of an update of the whole.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def init(self, weights: np.ndarray) -> State:
        """Return state for `weights` (1-D, n elements, any float dtype): arrays of shape (n,), of any dtypes."""

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """One update in place: `weights` and the arrays of `state` change, `gradient` does not.

        All are 1-D, contiguous, of one length: whole arrays or the same interval of each. `gradient` has the dtype of
        `weights`. `step` counts the updates of the key from 1.
        """


LEAST, MOST = -(2**63), 2**63 - 1
"""Of whole numbers: what messages between ranks and files hold."""
O = TypeVar("O", bound=Optimizer)  # noqa: E741
Value = Any
"""In an equation: an array, an element of one, or what stands for it while the equation is recorded."""
Values = Sequence[Any]
Updated = tuple[Value, Values]
"""An equation's result: the new weight, and the new arrays of state."""
Number = float | RateSchedule
"""A number that stays, or one that depends on the step."""


def at(number: Number, step: int) -> float:
    """Return the number itself, or the schedule's for this step; ValueError where that is not finite."""
    if isinstance(number, (float, int)):
        return number
    try:
        value = number.at(step)
    except OverflowError:
        value = math.inf
    if not math.isfinite(value):
        raise ValueError(f"{number!r} gives {value} at step {step}, which is no finite number")
    return value


def initial(optimizer: Optimizer, weights: np.ndarray) -> list[np.ndarray]:
    """Return `optimizer.init(weights)`; ValueError unless all are arrays of the weights' shape (n,)."""
    state = list(optimizer.init(weights))
    for array in state:
        if getattr(array, "shape", None) != weights.shape:
            raise ValueError(
                f"{type(optimizer).__name__}.init gave {getattr(array, 'shape', array)!r} for weights {weights.shape}: "
                f"each array of state needs an element for every weight"
            )
    return state


def state_dtypes(optimizer: Optimizer | None, dtype: np.dtype) -> list[np.dtype]:
    """Return what the arrays of state are of, for weights of a dtype; of no optimizer there are none."""
    return [] if optimizer is None else [array.dtype for array in optimizer.init(np.zeros(1, dtype))]


def check(
    record: Any, *, scheduled: Sequence[str] = (), at_least_zero: Sequence[str] = (), below_one: Sequence[str] = ()
) -> None:
    """Make every field of a frozen dataclass a finite float or a bool; for its `__post_init__`.

    `scheduled`: fields that may hold a RateSchedule instead. `at_least_zero`, `below_one`: fields that must be >= 0, or
    in [0, 1). Raises ValueError, which names class, field and value.
    """
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if field.name in scheduled and isinstance(value, RateSchedule) and not isinstance(value, type):
            continue
        object.__setattr__(record, field.name, _number(record, field.name, value))
    for name in at_least_zero:
        if not isinstance(value := getattr(record, name), RateSchedule) and value < 0:
            raise ValueError(f"{type(record).__name__}({name}={value}): give a number >= 0")
    for name in below_one:
        if not 0 <= (value := getattr(record, name)) < 1:
            raise ValueError(f"{type(record).__name__}({name}={value}): give a number in [0, 1)")


def _number(record: object, name: str, value: Any) -> float | bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        cure = f"a number, not a {type(value).__name__}" if isinstance(value, (str, bytes)) else "a finite number"
        raise ValueError(f"{type(record).__name__}({name}={value!r}): give {cure}")
    return number


def options(kind: type) -> list[str]:
    """Return the names of the options of a class of optimizers or schedules."""
    return [field.name for field in dataclasses.fields(kind) if field.init]


def known(kind: type, given: Sequence[str] | dict[str, Any]) -> None:
    """Raise TypeError, which lists the known options, if `kind` lacks one of those given."""
    if unknown := sorted(set(given) - set(options(kind))):
        have = ", ".join(options(kind)) or "none"
        perhaps = did_you_mean(unknown[0], options(kind)) if len(unknown) == 1 else ""
        raise TypeError(f"{kind.__name__} has no option {', '.join(unknown)}{perhaps}; it has {have}")


def changed(optimizer: O, **numbers: Any) -> O:
    """Return the optimizer with other numbers, checked as always; the state that it keeps stays valid.

    Raises TypeError for an option that it lacks. Raises ValueError for a bad value, for an option in the class's
    `fixed`, and where it would keep another number of arrays (SGD from `momentum=0` to 0.9).
    """
    kind = type(optimizer)
    if not numbers:
        raise TypeError(f"no number to change: {kind.__name__} has {', '.join(options(kind)) or 'none'}")
    known(kind, numbers)
    other = dataclasses.replace(optimizer, **numbers)
    for name in numbers:
        if isinstance(value := getattr(other, name), RateSchedule):
            at(value, 1)
    for name in set(numbers) & set(getattr(kind, "fixed", ())):
        if getattr(other, name) != getattr(optimizer, name):
            raise ValueError(
                f"{kind.__name__} keeps its state in terms of {name}: "
                "set_optimizer changes it and begins the state anew"
            )
    probe = np.zeros(1, np.float32)
    before, after = len(optimizer.init(probe)), len(other.init(probe))
    if before != after:
        words = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
        raise ValueError(
            f"{kind.__name__} with {words} keeps {after} arrays of state, and {before} are there: "
            f"set_optimizer changes that and begins the state anew"
        )
    return other


def unlike(saved: Optimizer, given: Optimizer, leave: Collection[str] = ()) -> str:
    """Return what differs between the optimizer of a checkpoint and that of a program, in words; "" where nothing does.

    `leave`: numbers that may differ."""
    if type(saved) is not type(given):
        return f"the optimizer is {type(saved).__name__} in the checkpoint and {type(given).__name__} in the program"
    numbers = [(name, getattr(saved, name), getattr(given, name)) for name in options(type(saved)) if name not in leave]
    differing = [(name, there, here) for name, there, here in numbers if there != here]
    told = [f"{name} is {there!r} in the checkpoint and {here!r} in the program" for name, there, here in differing]
    return "; ".join(told)


def working_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of an update and its state: float32 for 16-bit floats, otherwise the dtype itself."""
    if dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if dtype.kind != "f":
        raise TypeError(f"an optimizer needs float weights, not {dtype.name}; store a float array or set no optimizer")
    return dtype


def zeros(weights: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
    """Return `count` arrays of zeros like `weights` in the working dtype, where they lie (host or GPU)."""
    dtype = working_dtype(weights.dtype)
    if isinstance(weights, np.ndarray):
        return tuple(np.zeros(weights.size, dtype) for _ in range(count))
    return tuple(np.zeros_like(weights, dtype) for _ in range(count))
