"""Record an equation once, as a list of operations: for NumPy with no array too many, and as the text of a kernel.

An equation is called with symbols in place of arrays; NumPy's functions of them are recorded. It then runs as NumPy
calls that write into a few blocks (`Tape.run`), or as a loop over elements (`Tape.loop`). Operations that every
processor rounds alike become part of a kernel; an equation with others (exp, power) is left to NumPy.

A kernel's arguments are weights, arrays of state, gradients and numbers, all 1-D. In its text `w_all` is an array, `w_`
the part of it that an inner loop covers, and `w` an element. 16-bit floats come as their bits, and are computed in as
float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Array = np.ndarray
Function = Callable[..., Any]
"""Of NumPy, of elements or arrays: `np.add`, `np.where`."""

TEXTS = {
    "add": "{} + {}",
    "subtract": "{} - {}",
    "multiply": "{} * {}",
    "divide": "{} / {}",
    "negative": "-{}",
    "positive": "{}",
    "square": "{0} * {0}",
    "absolute": "abs({})",
    "sqrt": "np.sqrt({})",
    "sign": "one if {0} > zero else (-one if {0} < zero else (zero if {0} == zero else {0}))",
    "greater": "{} > {}",
    "greater_equal": "{} >= {}",
    "less": "{} < {}",
    "less_equal": "{} <= {}",
    "equal": "{} == {}",
    "not_equal": "{} != {}",
    "isnan": "{0} != {0}",
    "isfinite": "{0} - {0} == zero",
    "logical_and": "{} and {}",
    "logical_or": "{} or {}",
    "logical_not": "not {}",
    "logical_xor": "{} != {}",
    "bitwise_and": "{} and {}",
    "bitwise_or": "{} or {}",
    "invert": "not {}",
    "bitwise_xor": "{} != {}",
    "where": "{1} if {0} else {2}",
}
"""What a kernel computes for each function, in Python's words; NumPy and LLVM give the same bits.

Without maximum and minimum: which of 0.0 and -0.0 is larger depends on the processor, and on the place in an array.
"""
OF_BOOLS = (
    "logical_and",
    "logical_or",
    "logical_not",
    "logical_xor",
    "bitwise_and",
    "bitwise_or",
    "invert",
    "bitwise_xor",
)
"""Those whose operands are true or false in a kernel."""


ONE = np.float32(1)
"""A weight, a gradient, a number."""


class Untraceable(TypeError):
    """The equation looks at values, or calls what cannot be recorded: it is run as it stands."""


class Operation(NamedTuple):
    """`result = function(inputs)`, of numbered values. `function` None: copy."""

    function: Function | None
    inputs: tuple[int, ...]
    result: int


class Tape:
    """A recorded equation. Its values: 0 the weight, 1 the gradient, the state, numbers, then constants and results."""

    def __init__(self, equation: Callable[..., Any], slots: int, numbers: int) -> None:
        """Record `equation(w, g, state, numbers)`, of so many arrays of state and numbers.

        Raises Untraceable where it cannot be recorded, and TypeError where it gives back something else than a weight
        and the arrays of state.
        """
        self.slots = slots
        self.operations: list[Operation] = []
        self.constants: list[float] = []
        """Numbers that stand in the equation, in the order in which they follow those of a step."""
        self.scalars = list(range(2 + slots, 2 + slots + numbers))
        """Values that are numbers: those of a step, then the constants."""
        self.truths: set[int] = set()
        """Values that are true or false."""
        self._next = 2 + slots + numbers
        self._constant: dict[str, int] = {}
        w, g, *others = (Symbol(self, value) for value in range(self._next))
        try:
            given = equation(w, g, tuple(others[:slots]), tuple(others[slots:]))
        except Exception as error:  # of what symbols do not have; where it is the equation's own fault it comes again
            raise Untraceable(str(error)) from error
        self.results = [self.value_of(one) for one in pair(given, slots)]
        """The values of the new weight and state."""
        self.program = placed(self)

    def value_of(self, operand: object) -> int:
        """Return the number of the value that an operand is."""
        if isinstance(operand, Symbol):
            if operand.tape is not self:
                raise Untraceable("it has a value of another equation")
            return operand.value
        if not isinstance(operand, (int, float, np.number, np.bool_)):
            raise Untraceable(f"it has a {type(operand).__name__} among its operands")
        number = float(operand)
        if repr(number) not in self._constant:
            self._constant[repr(number)] = self._next
            self.constants.append(number)
            self.scalars.append(self._next)
            self._next += 1
        return self._constant[repr(number)]

    def record(self, function: Function, operands: Sequence[object]) -> Symbol:
        """Note an operation; return its result."""
        inputs = tuple(map(self.value_of, operands))
        with np.errstate(all="ignore"):
            sample = function(*[one.sample if isinstance(one, Symbol) else one for one in operands])
        if sample.dtype.kind not in "bf" or (function is np.where and inputs[0] not in self.truths):
            raise Untraceable(f"{function.__name__} gives {sample.dtype.name}, or chooses by what is no bool")
        self.operations.append(Operation(function, inputs, self._next))
        if sample.dtype.kind == "b":
            self.truths.add(self._next)
        self._next += 1
        return Symbol(self, self._next - 1, sample)

    def run(
        self,
        w: Array,
        g: Array,
        state: Sequence[Array],
        numbers: Sequence[Any],
        blocks: Sequence[Array],
        masks: Sequence[Array],
    ) -> None:
        """Update a block in place. `numbers`: those of the step, then the constants, of the working dtype.

        `blocks` and `masks` (of bools): as many as `program` says, of the length of w.
        """
        places = [w, g, *state, *numbers, *blocks, *reversed(masks)]
        for function, inputs, result in self.program.steps:
            if function is None:
                places[result][...] = places[inputs[0]]
            elif function is np.where:
                np.copyto(places[result], places[inputs[2]])
                np.copyto(places[result], places[inputs[1]], where=places[inputs[0]])
            else:
                function(*[places[place] for place in inputs], out=places[result])

    def loop(self) -> list[str] | None:
        """Return lines that compute the new w and s0, s1, ... of an element from w, g, s0, ... and c0, c1, ...; None
        where NumPy and LLVM might round some of it differently."""
        names = {0: "w", 1: "g", **{2 + slot: f"s{slot}" for slot in range(self.slots)}}
        names |= {value: f"c{number}" for number, value in enumerate(self.scalars)}
        lines = []
        for function, inputs, result in self.operations:
            assert function is not None
            name = function.__name__
            of_bools = name in OF_BOOLS
            wanted = [of_bools or name == "where", *[of_bools] * (len(inputs) - 1)]
            if name not in TEXTS or [value in self.truths for value in inputs] != wanted:
                return None  # also sums of bools: NumPy and Python take them in different types
            names[result] = f"v{result}"
            lines.append(f"{names[result]} = {TEXTS[name].format(*[names[one] for one in inputs])}")
        targets = ["w", *[f"s{slot}" for slot in range(self.slots)]]
        return [*lines, f"{', '.join(targets)} = {', '.join(names[value] for value in self.results)}"]


def pair(given: Any, slots: int) -> list[object]:
    """Return the new weight and state that an equation gave back, in one list; TypeError for another thing."""
    try:
        weight, state = given
        results = [weight, *state]
    except (TypeError, ValueError):
        results = []
    if len(results) != 1 + slots:
        raise TypeError(f"an equation gives back (weight, ({slots} arrays of state)), not {given!r}")
    return results


class Symbol(NDArrayOperatorsMixin):
    """A value in an equation that is being recorded."""

    def __init__(self, tape: Tape, value: int, sample: np.generic = ONE) -> None:
        """`sample`: an element of it, of its dtype."""
        self.tape, self.value, self.sample = tape, value, sample

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> Symbol:
        if method != "__call__" or options or ufunc.nout != 1:
            raise Untraceable(f"it calls {ufunc.__name__}.{method} with {', '.join(options) or 'several results'}")
        if ufunc is np.power and not isinstance(inputs[1], Symbol) and inputs[1] in (2, 0.5):  # as `**` of arrays does
            return self.tape.record(np.square if inputs[1] == 2 else np.sqrt, inputs[:1])
        return self.tape.record(ufunc, inputs)

    def __array_function__(
        self, function: Function, types: object, args: Sequence[Any], kwargs: Mapping[str, object]
    ) -> Symbol:
        if function is np.where and len(args) == 3 and not kwargs:
            return self.tape.record(np.where, args)
        if function is np.clip and len(args) == 3 and not kwargs:
            return np.minimum(np.maximum(args[0], args[1]), args[2])
        raise Untraceable(f"it calls numpy.{function.__name__}")

    def __bool__(self) -> bool:
        raise Untraceable("it asks whether a value is true")

    def __float__(self) -> float:
        raise Untraceable("it asks for a value")

    def __array__(self, *args: object, **kwargs: object) -> Array:
        raise Untraceable("it asks for an array")


class Program(NamedTuple):
    """Operations on places: weight, gradient, state, numbers, constants, so many blocks; masks lie from the end."""

    steps: list[Operation]
    blocks: int
    masks: int


class _Blocks:
    """Places that are taken and given back, of one kind."""

    def __init__(self, first: int, step: int) -> None:
        self.first, self._step = first, step
        self.count = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self.count += 1
        return self.first + (self.count - 1) * self._step

    def give(self, place: int) -> None:
        self._free.append(place)


def placed(tape: Tape) -> Program:
    """Give each result of a tape a place: where an input lies that nobody needs any more, else a block."""
    fixed = 2 + tape.slots
    targets = [0, *range(2, fixed)]
    goal = dict(zip(tape.results, targets))
    place = {value: value for value in range(fixed)}
    place |= {value: fixed + i for i, value in enumerate(tape.scalars)}
    last = {value: at for at, operation in enumerate(tape.operations) for value in operation.inputs}
    last |= dict.fromkeys(tape.results, len(tape.operations))
    blocks, masks = _Blocks(fixed + len(tape.scalars), 1), _Blocks(-1, -1)
    steps = []
    for at, (function, values, result) in enumerate(tape.operations):
        inputs = tuple(place[value] for value in values)
        dying = {place[value] for value in values if last[value] == at and value not in tape.scalars and value != 1}
        able = [one for one in dying if one >= 0]
        if function is np.where:  # its second choice is written first, and over that its first
            able = [one for one in able if one == inputs[2] != inputs[1]]
        if result in tape.truths:
            place[result] = masks.take()
        elif goal.get(result) in able:
            place[result] = goal[result]
        else:
            place[result] = max(able) if able else blocks.take()
        steps.append(Operation(function, inputs, place[result]))
        for one in dying - {place[result]}:
            if one < 0 or one >= blocks.first:
                (masks if one < 0 else blocks).give(one)
    astray = [(target, value) for target, value in zip(targets, tape.results) if place[value] != target]
    for _, value in astray:
        if place[value] in targets:  # where another result goes
            block = blocks.take()
            steps.append(Operation(None, (place[value],), block))
            place[value] = block
    steps += [Operation(None, (place[value],), target) for target, value in astray]
    return Program(steps, blocks.count, masks.count)


# ---- the text of a kernel: a loop over elements, over a sum, or over rows of a table; `lines` are those of `Tape.loop`


TILE = 1024
"""Elements of several gradients that are summed before weights are updated by them: they stay in a core's first cache.
"""
LONG_TILE, MANY_PARTS = 16 * 1024, 5
"""Elements for so many gradients: memory is read in longer runs, and the sum stays in the second cache."""
READ_AT_ONCE = 8
"""Gradients that one loop adds: LLVM compares no more arrays before it takes several elements at once."""
WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}
"""Dtypes of weights that kernels know, and what they compute in."""


def update_text(tape: Tape, lines: Sequence[str], dtype: str) -> str:
    """Return the kernel that updates by one gradient."""
    return "\n".join(
        [
            *_head(tape, dtype, ["g0"], []),
            *[f"    {name}_ = {name}_all" for name in [*_arrays(tape), "g0"]],
            "    for i in range(w_.size):",
            f"        g = {_widened('g0_[i]', dtype)}",
            *_update(tape, lines, dtype, "        "),
        ]
    )


def sum_text(tape: Tape, lines: Sequence[str], dtype: str, parts: int) -> str:
    """Return the kernel that updates by the sum of gradients, added from first to last."""
    tile = TILE if parts < MANY_PARTS else LONG_TILE
    gradients, adding = _gradients(parts), []
    total = _widened("g0_[i]", dtype)
    for number, gradient in enumerate(gradients[1:], 1):
        total = _added(total, f"{gradient}_[i]", dtype)
        if number % READ_AT_ONCE == 0 or number == parts - 1:
            adding += ["        for i in range(w_.size):", f"            total[i] = {total}"]
            total = "total[i]"
    return "\n".join(
        [
            *_head(tape, dtype, gradients, []),
            f"    total = np.empty({tile}, np.{WIDE[dtype]})",
            f"    for start in range(0, w_all.size, {tile}):",
            f"        stop = min(start + {tile}, w_all.size)",
            *[f"        {name}_ = {name}_all[start:stop]" for name in [*_arrays(tape), *gradients]],
            *adding,
            "        for i in range(w_.size):",
            "            g = total[i]",
            *_update(tape, lines, dtype, "            "),
        ]
    )


def rows_text(tape: Tape, lines: Sequence[str], dtype: str, parts: int) -> str:
    """Return the kernel that updates rows of a table by the sum of gradients of some rows each.

    More arguments follow: `columns`, the elements of a row, and `r0, ...`, the rows of each gradient, ascending.
    """
    gradients, adding, least = _gradients(parts), [], []
    for number, gradient in enumerate(gradients):
        rows, at = f"r{number}", f"k{number}"
        least += [f"        if {at} < {rows}.size:", f"            row = min(row, {rows}[{at}])"]
        total = _added("total[i]", "g_[i]", dtype) if number else _widened("g_[i]", dtype)
        adding += [
            f"        if {at} < {rows}.size and {rows}[{at}] == row:",
            f"            g_ = {gradient}_all[{at} * columns : ({at} + 1) * columns]",
            "            for i in range(columns):",
            f"                total[i] = {total}",
            f"            {at} += 1",
            *([] if number else ["        else:", "            total[:] = 0"]),
        ]
    return "\n".join(
        [
            *_head(tape, dtype, gradients, ["columns", *[f"r{number}" for number in range(parts)]]),
            f"    total = np.empty(columns, np.{WIDE[dtype]})",
            *[f"    k{number} = 0" for number in range(parts)],
            "    while True:",
            "        row = w_all.size",
            *least,
            "        if row == w_all.size:",
            "            break",
            *adding,
            *[f"        {name}_ = {name}_all[row * columns : (row + 1) * columns]" for name in _arrays(tape)],
            "        for i in range(columns):",
            "            g = total[i]",
            *_update(tape, lines, dtype, "            "),
        ]
    )


def _arrays(tape: Tape) -> list[str]:
    """Return the names of what is updated."""
    return ["w", *[f"s{slot}" for slot in range(tape.slots)]]


def _gradients(parts: int) -> list[str]:
    return [f"g{part}" for part in range(parts)]


def _head(tape: Tape, dtype: str, gradients: Sequence[str], more: Sequence[str]) -> list[str]:
    arguments = [*[f"{name}_all" for name in [*_arrays(tape), *gradients]], "c", *more]
    return [
        f"def kernel({', '.join(arguments)}):",
        f"    one, zero = np.{WIDE[dtype]}(1), np.{WIDE[dtype]}(0)",
        *[f"    c{i} = c[{i}]" for i in range(len(tape.scalars))],
    ]


def _update(tape: Tape, lines: Sequence[str], dtype: str, indent: str) -> list[str]:
    """Return the lines that update element i by the gradient `g`."""
    states = _arrays(tape)[1:]
    narrow = f"narrow_{dtype}" if "16" in dtype else ""
    update = [
        f"w = {_widened('w_[i]', dtype)}",
        *[f"{name} = {name}_[i]" for name in states],
        *lines,
        f"w_[i] = {narrow}(w)",
        *[f"{name}_[i] = {name}" for name in states],
    ]
    return [*[indent + line for line in update], ""]


def _widened(element: str, dtype: str) -> str:
    """Return what an element is computed in as."""
    return f"widen_{dtype}({element})" if "16" in dtype else element


def _added(total: str, element: str, dtype: str) -> str:
    """Return the sum, rounded to the dtype."""
    added = f"{total} + {_widened(element, dtype)}"
    return f"widen_{dtype}(narrow_{dtype}({added}))" if "16" in dtype else f"({added})"
