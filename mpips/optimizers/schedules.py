"""Schedules of learning rates, and the optimizers of a store's keys (`Groups`).

A schedule gives a learning rate for each update of a key. Updates count from 1.

    kv.set_optimizer("sgd", momentum=0.9, learning_rate=Chained((Warmup(0.1, 500), Cosine(0.1, 9500)), until=(500,)))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpips.optimizers.base import Optimizer, RateSchedule, changed

Name = int | str


class Groups:
    """The optimizers of a store's keys. A change that raises leaves everything as it was.

    Attributes:
        default: The optimizer of all keys without an optimizer of their own, or None.
        own: Key -> its own optimizer.
    """

    def __init__(self, default: Optimizer | None = None, own: Mapping[Name, Optimizer] | None = None) -> None:
        self.default = default
        self.own: dict[Name, Optimizer] = dict(own or {})

    def of(self, key: Name) -> Optimizer | None:
        """Return the optimizer of a key. None means that the key's value becomes the sum of the pushed values."""
        return self.own.get(key, self.default)

    def set(self, optimizer: Optimizer, keys: Iterable[Name] | None = None) -> None:
        """Set the optimizer of these keys. Without `keys`, set it for all keys, including those created later."""
        if keys is None:
            self.default, self.own = optimizer, {}
        else:
            self.own.update(dict.fromkeys(keys, optimizer))

    def update(self, numbers: Mapping[str, Any], keys: Iterable[Name] | None = None) -> None:
        """Change numbers, such as the learning rate, in the optimizers of these keys. If `keys` is None, of all keys.

        Raises the errors of `base.changed`, and ValueError if a key has no optimizer yet.
        """
        if keys is None:
            if self.default is None and not self.own:
                raise ValueError("there is no optimizer to update: call set_optimizer first")
            default = None if self.default is None else changed(self.default, **numbers)
            own = {key: changed(optimizer, **numbers) for key, optimizer in self.own.items()}
            self.default, self.own = default, own
            return
        own = dict(self.own)
        for key in keys:
            optimizer = self.of(key)
            if optimizer is None:
                raise ValueError(f"key {key!r} has no optimizer to update: call set_optimizer first")
            own[key] = changed(optimizer, **numbers)
        self.own = own

    def forget(self, keys: Iterable[Name]) -> None:
        """Forget keys that were removed. If a key with such a name is created again, it has the default optimizer."""
        for key in keys:
            self.own.pop(key, None)

    def __bool__(self) -> bool:
        """True if any key has an optimizer."""
        return self.default is not None or bool(self.own)


@dataclass(frozen=True)
class Constant:
    """The same rate at every step."""

    rate: float

    def __post_init__(self) -> None:
        _rates(self, "rate")

    def at(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class StepDecay:
    """A rate that is multiplied by `factor` after every `every` steps.

        rate * factor^((step - 1) // every)

    >>> schedule = mpips.optimizers.StepDecay(0.1, every=30, factor=0.5)
    >>> schedule.at(30), schedule.at(31)
    (0.1, 0.05)
    """

    rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _rates(self, "rate", "factor")
        _steps(self, "every")

    def at(self, step: int) -> float:
        return self.rate * self.factor ** ((step - 1) // self.every)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `rate` at step 1 down to `end` after `steps` steps, and `end` from then on.

    This is the schedule of Loshchilov and Hutter (2017):

        end + (rate - end) * (1 + cos(pi * min(step - 1, steps) / steps)) / 2

    >>> schedule = mpips.optimizers.Cosine(0.1, steps=1000)
    >>> schedule.at(1), round(schedule.at(501), 6), schedule.at(1001)
    (0.1, 0.05, 0.0)
    """

    rate: float
    steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        _rates(self, "rate", "end")
        _steps(self, "steps")

    def at(self, step: int) -> float:
        done = min(step - 1, self.steps) / self.steps
        return self.end + (self.rate - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Warmup:
    """A straight line from `start` at step 0 to `rate` at step `steps`, and `rate` from then on (Goyal et al. 2017).

        start + (rate - start) * min(step, steps) / steps

    >>> mpips.optimizers.Warmup(0.1, steps=500).at(250)
    0.05
    """

    rate: float
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        _rates(self, "rate", "start")
        _steps(self, "steps")

    def at(self, step: int) -> float:
        if step >= self.steps:
            return self.rate
        return self.start + (self.rate - self.start) * step / self.steps


@dataclass(frozen=True)
class Chained:
    """Several schedules, one after another. Each schedule counts its own steps from 1.

    Args:
        schedules: The schedules, in order.
        until: The last step of each schedule but the last, ascending.

    >>> from mpips.optimizers import Chained, Cosine, Warmup
    >>> Chained((Warmup(0.1, 500), Cosine(0.1, 9500)), until=(500,)).at(501)
    0.1
    """

    schedules: tuple[RateSchedule, ...]
    until: tuple[int, ...]

    def __post_init__(self) -> None:
        chain, until = _sequence(self, "schedules"), _sequence(self, "until")
        for schedule in chain:
            if not isinstance(schedule, RateSchedule) or isinstance(schedule, type):
                raise ValueError(f"Chained(schedules={chain!r}): give schedules, as Constant(0.1), not {schedule!r}")
        object.__setattr__(self, "schedules", chain)
        object.__setattr__(self, "until", tuple(_whole(self, "until", step) for step in until))
        if len(self.until) + 1 != len(chain) or list(self.until) != sorted(set(self.until)):
            raise ValueError(
                f"Chained(until={self.until}) with {len(chain)} schedules: give ascending steps, one fewer than those"
            )

    def at(self, step: int) -> float:
        begin = 0
        for schedule, end in zip(self.schedules, self.until):
            if step <= end:
                return schedule.at(step - begin)
            begin = end
        return self.schedules[-1].at(step - begin)


def _rates(record: object, *names: str) -> None:
    """Make each of these fields a finite float of at least 0. Raises ValueError that names the field."""
    for name in names:
        value = getattr(record, name)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{type(record).__name__}({name}={value!r}): give a finite number >= 0")
        object.__setattr__(record, name, number)


def _steps(record: object, name: str) -> None:
    object.__setattr__(record, name, _whole(record, name, getattr(record, name)))


def _whole(record: object, name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{type(record).__name__}({name}={value!r}): steps are whole numbers from 1")
    return number


def _sequence(record: object, name: str) -> tuple[Any, ...]:
    value = getattr(record, name)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{type(record).__name__}({name}={value!r}): give a tuple")
    return tuple(value)
