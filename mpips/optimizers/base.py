"""The protocol of optimizers: a frozen dataclass of numbers with the methods `init` and `update`.

`equation.Equation` makes an optimizer from one equation. The module `equation` also has functions that apply any
optimizer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import numpy as np

from mpips.collectives.errors import did_you_mean

# an optimizer's arrays for n weights: each has shape (n,), one element for every weight
State = Sequence[np.ndarray]


@runtime_checkable
class RateSchedule(Protocol):
    """A number that depends on the step, such as a learning rate. It is a frozen dataclass with a method `at`.

    `mpips.optimizers.schedules` has the schedules of mpips.
    """

    def at(self, step: int) -> float:
        """Return the number for a step. `step` counts the updates of a key from 1."""


@runtime_checkable
class Optimizer(Protocol):
    """A frozen dataclass of numbers with these two methods. `mpips.optimizers.register` makes it known by its name.

    The update of an element must depend only on that element of weights, gradient and state. A server can then update
    an array interval by interval, on several threads at once, and get the same bits as from one update of the whole.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def init(self, weights: np.ndarray) -> State:
        """Return the first state for 1-D weights of n elements: arrays of shape (n,), of any dtypes.

        The weights may have any float dtype.
        """

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """Update in place: `weights` and the arrays of `state` change, `gradient` does not.

        All arrays are 1-D, contiguous and equally long: whole arrays, or the same interval of each. `gradient` has the
        dtype of `weights`. `step` counts the updates of the key from 1.
        """


# limits of whole numbers: messages between ranks and files hold 64-bit integers
LEAST = -(2**63)
MOST = 2**63 - 1
O = TypeVar("O", bound=Optimizer)  # noqa: E741
# in an equation: an array, an element of it, or a symbol that stands for it while the equation is recorded
Value = Any
Values = Sequence[Any]
# result of an equation: the new weight, and the new arrays of state
Updated = tuple[Value, Values]
# a constant, or a schedule that gives a number for each step
Number = float | RateSchedule


def at(number: Number, step: int) -> float:
    """Return a number as it is, or the value of a schedule at this step.

    Raises ValueError if the schedule's value is not finite.
    """
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
    """Return the arrays of state that `optimizer.init(weights)` creates.

    Raises ValueError unless every array of state has the shape of the weights.
    """
    state = list(optimizer.init(weights))
    for array in state:
        if getattr(array, "shape", None) != weights.shape:
            raise ValueError(
                f"{type(optimizer).__name__}.init gave {getattr(array, 'shape', array)!r} for weights {weights.shape}: "
                f"each array of state needs an element for every weight"
            )
    return state


def state_dtypes(optimizer: Optimizer | None, dtype: np.dtype) -> list[np.dtype]:
    """Return the dtypes of the optimizer's arrays of state for weights of this dtype.

    If `optimizer` is None, the list is empty.
    """
    return [] if optimizer is None else [array.dtype for array in optimizer.init(np.zeros(1, dtype))]


def check(
    record: Any, *, scheduled: Sequence[str] = (), at_least_zero: Sequence[str] = (), below_one: Sequence[str] = ()
) -> None:
    """Check the fields of a frozen dataclass and make each a finite float or a bool. Call it in `__post_init__`.

    Args:
        scheduled: Fields that may hold a RateSchedule instead of a number.
        at_least_zero: Fields that must be at least 0. A schedule in one of them is not checked.
        below_one: Fields that must be in [0, 1).

    Raises:
        ValueError: A field has a wrong value. The message names class, field and value.
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
    """Return the names of the options of an optimizer class or a schedule class."""
    return [field.name for field in dataclasses.fields(kind) if field.init]


def known(kind: type, given: Sequence[str] | dict[str, Any]) -> None:
    """Raise TypeError if the class `kind` lacks an option that is given. The message lists the options of the class."""
    if unknown := sorted(set(given) - set(options(kind))):
        have = ", ".join(options(kind)) or "none"
        perhaps = did_you_mean(unknown[0], options(kind)) if len(unknown) == 1 else ""
        raise TypeError(f"{kind.__name__} has no option {', '.join(unknown)}{perhaps}; it has {have}")


def changed(optimizer: O, **numbers: Any) -> O:
    """Return a copy of the optimizer with some numbers changed. Its arrays of state stay valid.

    Raises:
        TypeError: The optimizer has no such option, or no option was given.
        ValueError: A value is not allowed; or the option is in the class's `fixed`, because the values of the state
            depend on it; or the changed optimizer would need another number of state arrays (SGD from `momentum=0` to
            0.9).
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
        texts = ", ".join(f"{name}={value!r}" for name, value in numbers.items())
        raise ValueError(
            f"{kind.__name__} with {texts} keeps {after} arrays of state, and {before} are there: "
            f"set_optimizer changes that and begins the state anew"
        )
    return other


def unlike(saved: Optimizer, given: Optimizer, leave: Collection[str] = ()) -> str:
    """Describe how the optimizer of a checkpoint differs from the program's. Return "" if they are equal.

    Numbers named in `leave` may differ.
    """
    if type(saved) is not type(given):
        return f"the optimizer is {type(saved).__name__} in the checkpoint and {type(given).__name__} in the program"
    numbers = [(name, getattr(saved, name), getattr(given, name)) for name in options(type(saved)) if name not in leave]
    return "; ".join(
        f"{name} is {before!r} in the checkpoint and {now!r} in the program"
        for name, before, now in numbers
        if before != now
    )


def working_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of updates and state: float32 for weights of 16-bit floats, otherwise `dtype` itself.

    Raises TypeError for weights that are not floats.
    """
    if dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    if dtype.kind != "f":
        raise TypeError(f"an optimizer needs float weights, not {dtype.name}; store a float array or set no optimizer")
    return dtype


def zeros(weights: np.ndarray, count: int) -> tuple[np.ndarray, ...]:
    """Return `count` arrays of zeros of the weights' size, in the working dtype, on the same device (host or GPU)."""
    dtype = working_dtype(weights.dtype)
    if isinstance(weights, np.ndarray):
        return tuple(np.zeros(weights.size, dtype) for _ in range(count))
    return tuple(np.zeros_like(weights, dtype) for _ in range(count))
