"""An operation that goes as usual, as one flat function: put, enter, meet, and take, or go through a program.

Where ranks share a core, the caches have lost what a call runs through whenever it is this rank's turn, so it should
run through little. The function has all that it needs at hand; it is made from text, so that a few numbers can be put
and taken by lines of their own in place of loops over steps. The text for operations of even and of odd number differs
in the names that end in `_{p}`. For four ranks that sum one number:

    def usual(call):
        operation = room.operation + 1
        if token <= room.spent or operation > MOST_OPERATIONS:
            return call.afresh()
        if operation & 1:
            mine_1[0] = x[0]
            try:
                room.operation = operation
                row_1[rank] = operation << 32 | token
                wanted = operation * ones + others
                ...
            except BaseException as error:
                call.break_off(error)
                raise
            out[0] = part0_1[0] + part1_1[0]
            ...
        else:
            ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from textwrap import indent
from typing import Any, NamedTuple, Protocol, TypeAlias

from collectives.transport.program import Program, Step

Turns: TypeAlias = "tuple[Sequence[Step], Sequence[Step]]"
"""Steps of an operation with an even number, and of one with an odd."""
NOTHING: Turns = ((), ())
MOST_OPERATIONS = (1 << 32) - 1  # then their numbers begin anew


class Coming(Protocol):
    """A call where it does not go as usual."""

    def afresh(self) -> Iterator[None]:
        """Enter with another card; the steps that are left."""

    def met(self) -> Iterator[None]:
        """The steps after this rank has entered."""

    def break_off(self, error: BaseException) -> None:
        """`error` was raised since this rank has entered."""

    def behind(self, program: Program, done: int) -> Iterator[None]:
        """The others do not keep up in that phase of the program; the steps that are left."""

    def broken_off(self, program: Program, end: int, error: BaseException) -> BaseException:
        """`error` was raised in the program, which ends with phase `end`; what to raise."""


Usual: TypeAlias = "Callable[[Any], Iterator[None] | None]"
"""Called with a `Coming`."""


class Lines(NamedTuple):
    """Lines of Python, and what the names in them stand for."""

    text: str
    names: dict[str, Any]


NO_LINES = Lines("", {})


def loop(name: str, turns: Turns) -> Lines:
    """Step after step."""
    if not any(turns):
        return NO_LINES
    text = f"for function, arguments in {name}_{{p}}:\n    function(*arguments)\n"
    return Lines(text, {f"{name}_{p}": steps for p, steps in enumerate(turns)})


def through(program: Program) -> Lines:
    """Phase after phase, in each of which all meet again."""
    phases = tuple(tuple(phase) for phase in program.phases)
    return Lines(_PHASES, {"program": program, "phases": phases, "count": len(phases), "last": program.last})


def usual(puts: Lines, takes: Lines, fenced: bool, **names: Any) -> Usual:
    """An operation in which the others bring what they always bring and come soon; `names` as in `_MEETING` and
    `_PHASES`. It gives back None, or the steps that are left where somebody brings something else or is late."""
    every = {**names, **puts.names, **takes.names, "MOST_OPERATIONS": MOST_OPERATIONS, "read": int.from_bytes}
    function: Usual = _maker(puts.text, takes.text, fenced, tuple(every))(*every.values())
    return function


@cache
def _maker(puts: str, takes: str, fenced: bool, names: tuple[str, ...]) -> Callable[..., Any]:
    text = (puts + _MEETING + takes).replace("FENCE", "fence()" if fenced else "")
    even, odd = (indent(text.format(p=p), " " * 12) for p in (0, 1))
    made: dict[str, Any] = {}
    exec(f"def make({', '.join(names)}):\n{_USUAL.format(even=even, odd=odd)}", made)
    make: Callable[..., Any] = made["make"]
    return make


_USUAL = """
    def usual(call):
        operation = room.operation + 1
        if token <= room.spent or operation > MOST_OPERATIONS:
            return call.afresh()
        if operation & 1:
{odd}
        else:
{even}
        return None
    return usual
"""

_MEETING = """
try:
    room.operation = operation
    FENCE
    row_{p}[rank] = operation << 32 | token
    wanted = operation * ones + others
    seen = read(row_{p}, order)
    if seen != wanted:
        looks = 0
        while seen != wanted:
            looks += 1
            if looks > alone:
                if looks > most or seen & numbers == wanted - others:
                    return call.met()
                sched_yield()
            seen = read(row_{p}, order)
    FENCE
except BaseException as error:
    call.break_off(error)
    raise
"""

_PHASES = """
phase = room.phase
end = phase + count
try:
    done = 0
    for before, after in phases:
        for function, arguments in before:
            function(*arguments)
        done += 1
        room.phase = phase = phase + 1
        FENCE
        row = progress[phase & 1]
        row[rank] = phase
        for function, arguments in after:
            function(*arguments)
        wanted = phase * each
        if read(row, order) != wanted:
            looks = 0
            while read(row, order) != wanted:
                looks += 1
                if looks > alone:
                    if looks > most:
                        return call.behind(program, done)
                    sched_yield()
        FENCE
    for function, arguments in last:
        function(*arguments)
except BaseException as error:
    raise call.broken_off(program, end, error) from None
"""
