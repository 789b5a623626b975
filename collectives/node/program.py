"""What a rank does in one collective over shared memory: steps between meetings, bound to the ranks' arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from collectives.arrays import Vector
from collectives.call import Call
from collectives.operations import scale

Step: TypeAlias = "tuple[Any, tuple[Any, ...]]"
Turns: TypeAlias = "tuple[Sequence[Step], Sequence[Step]]"
NOTHING: Turns = ((), ())
SHORT_BYTES = 128 << 10  # up to here bytes are copied without `numpy.copyto`, which begins later but lets threads run


class Window(NamedTuple):
    """A part of the whole vector that is somewhere in memory: elements [first, first + vector.size)."""

    vector: Vector
    first: int = 0

    def part(self, start: int, stop: int) -> Vector:
        return self.vector[start - self.first : stop - self.first]


class Phase(NamedTuple):
    """Work before this rank says it is done with the phase, and work after that needs nobody."""

    before: tuple[Step, ...]
    after: tuple[Step, ...] = ()


class Program(NamedTuple):
    """What a rank does in one operation, bound to its arrays and the others'."""

    phases: tuple[Phase, ...] = ()
    """Once all have entered; each ends with a meeting. Ranks touch each other's arrays in the first alone."""
    last: Turns = NOTHING
    """At the end, where there is nobody to meet any more: of even and of odd operations."""


def merged(programs: Sequence[Program]) -> Program:
    """Programs of the same number of phases as one: what they do in a phase is done in one."""
    phases = tuple(
        Phase(tuple(s for phase in every for s in phase.before), tuple(s for phase in every for s in phase.after))
        for every in zip(*(program.phases for program in programs))
    )
    return Program(phases)


def perform(steps: Sequence[Step]) -> None:
    """Take the steps, one after the other."""
    for function, arguments in steps:
        function(*arguments)


def same(a: Vector, b: Vector) -> bool:
    """Whether they begin at the same place in memory."""
    return bool(a.__array_interface__["data"][0] == b.__array_interface__["data"][0])


def copy(to: Vector, source: Vector) -> Iterator[Step]:
    """A copy, where there is anything to copy."""
    if not to.size or same(to, source):
        return
    if to.nbytes <= SHORT_BYTES:
        yield to.view(np.uint8).data.__setitem__, (slice(None), source.view(np.uint8).data)
    else:
        yield np.copyto, (to, source)


def combine(call: Call, parts: Sequence[Vector], total: Vector, scratch: Vector) -> Iterator[Step]:
    """total = the reduction of all parts in their order, of which one may be `total` itself; `scratch` is as long."""
    if not total.size:
        return
    if len(parts) == 1:
        yield from copy(total, parts[0])
    else:
        assert call.operation is not None
        add = call.operation.into
        first, *others = parts
        for index, part in enumerate(others, 2):
            unread = any(same(later, total) for later in parts[index:])
            to = scratch[: total.size] if unread else total
            yield add, (first, part, to)
            first = to
    if call.operation is not None and call.operation.is_mean:
        yield scale(total, call.p)
