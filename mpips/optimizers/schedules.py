"""Learning rates that change: schedules as data. A schedule's step is the number of a key's update, from 1.

    kv.set_optimizer("sgd", momentum=0.9, learning_rate=Chained((Warmup(0.1, 500), Cosine(0.1, 9500)), until=(500,)))
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpips.optimizers.base import RateSchedule


@dataclass(frozen=True)
class Constant:
    """`rate` at every step."""

    rate: float

    def __post_init__(self) -> None:
        _rates(self, "rate")

    def at(self, step: int) -> float:
        """The rate of this step, from 1."""
        return self.rate


@dataclass(frozen=True)
class StepDecay:
    """`rate` for `every` steps, then `factor` times as much for as many, and so on.

    rate * factor^((step - 1) // every).
    """

    rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _rates(self, "rate", "factor")
        _steps(self, "every")

    def at(self, step: int) -> float:
        """The rate of this step, from 1."""
        return self.rate * self.factor ** ((step - 1) // self.every)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `rate` at step 1 down to `end`, and `end` after `steps` steps (Loshchilov, Hutter 2017):

    end + (rate - end) * (1 + cos(pi * min(step - 1, steps) / steps)) / 2.
    """

    rate: float
    steps: int
    end: float = 0.0

    def __post_init__(self) -> None:
        _rates(self, "rate", "end")
        _steps(self, "steps")

    def at(self, step: int) -> float:
        """The rate of this step, from 1."""
        done = min(step - 1, self.steps) / self.steps
        return self.end + (self.rate - self.end) * (1 + math.cos(math.pi * done)) / 2


@dataclass(frozen=True)
class Warmup:
    """A straight line up from `start` (at step 0) to `rate` at step `steps`, and `rate` from then on:

    start + (rate - start) * min(step, steps) / steps (Goyal et al. 2017).
    """

    rate: float
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        _rates(self, "rate", "start")
        _steps(self, "steps")

    def at(self, step: int) -> float:
        """The rate of this step, from 1."""
        if step >= self.steps:
            return self.rate
        return self.start + (self.rate - self.start) * step / self.steps


@dataclass(frozen=True)
class Chained:
    """One schedule after the other: `schedules[i]` to step `until[i]`, the last one from then on.

    Each counts its own steps from 1. `until` is ascending and one shorter than `schedules`.
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
        """The rate of this step, from 1."""
        begin = 0
        for schedule, end in zip(self.schedules, self.until):
            if step <= end:
                return schedule.at(step - begin)
            begin = end
        return self.schedules[-1].at(step - begin)


def _rates(record: Any, *names: str) -> None:
    """Make each of these fields a finite float >= 0; ValueError names it."""
    for name in names:
        value = getattr(record, name)
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise ValueError(f"{type(record).__name__}({name}={value!r}): give a finite number >= 0")
        object.__setattr__(record, name, number)


def _steps(record: Any, name: str) -> None:
    object.__setattr__(record, name, _whole(record, name, getattr(record, name)))


def _whole(record: Any, name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{type(record).__name__}({name}={value!r}): steps are whole numbers from 1")
    return number


def _sequence(record: Any, name: str) -> tuple[Any, ...]:
    value = getattr(record, name)
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise ValueError(f"{type(record).__name__}({name}={value!r}): give a tuple")
    return tuple(value)
