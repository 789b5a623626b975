"""Record an equation once as a list of operations, to run them by NumPy with few arrays, or to write a kernel.

The equation is called with symbols in place of arrays, and the NumPy functions that it calls on symbols are recorded.
The recording then runs as NumPy calls that write into a few blocks of memory (`Tape.run`), or becomes a loop over
elements (`Tape.loop`), the text of a kernel. A kernel has only operations that every processor rounds in the same way.
An equation with other operations (exp, power) is left to NumPy.

The arguments of a kernel are weights, arrays of state, gradients and numbers, all 1-D. In the text of a kernel, `w_all`
is the whole array of weights, `w_` the part of it that an inner loop covers, and `w` an element. 16-bit floats are
passed as their bits (uint16) and computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

Array = np.ndarray
# an elementwise function of NumPy, such as `np.add` or `np.where`
Function = Callable[..., Any]

# NumPy function -> the expression that a kernel computes for it; NumPy and LLVM give the same bits for all of these.
#
# maximum and minimum are missing. Which of 0.0 and -0.0 is larger depends on the processor, and even on the position in
# an array.
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
# functions whose operands must be bools in a kernel
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


# A sample element. To find the dtype of a result, its operation is run on sample elements.
ONE = np.float32(1)


class Untraceable(TypeError):
    """The equation depends on the values of its arguments, or calls a function that cannot be recorded.

    The equation itself is then called at every update.
    """


class TracedOperation(NamedTuple):
    """`result = function(inputs)`, where inputs and result are indices (see `Tape`). If `function` is None, a copy."""

    function: Function | None
    inputs: tuple[int, ...]
    result: int


class Tape:
    """A recorded equation.

    Each value in the equation has an index: 0 is the weight and 1 the gradient. Then follow the arrays of state, the
    numbers of the step, and the constants and results in the order of their appearance.
    """

    def __init__(self, equation: Callable[..., Any], slots: int, numbers: int) -> None:
        """Record `equation(w, g, state, numbers)`.

        Args:
            slots: The number of arrays of state that the equation takes and returns.
            numbers: The number of numbers that the equation takes.

        Raises:
            Untraceable: The equation cannot be recorded.
            TypeError: The equation does not return a weight and `slots` arrays of state.
        """
        self.slots = slots
        self.operations: list[TracedOperation] = []
        # constants in the equation, in the order in which they follow the numbers of the step
        self.constants: list[float] = []
        # indices of the values that are scalars: the numbers of the step, then the constants
        self.scalars = list(range(2 + slots, 2 + slots + numbers))
        # indices of the values that are bools
        self.truths: set[int] = set()
        self._next = 2 + slots + numbers
        # repr of a constant -> its index. The key is the repr, because 0.0 and -0.0 are equal.
        self._constant: dict[str, int] = {}
        w, g, *others = (Symbol(self, value) for value in range(self._next))
        try:
            given = equation(w, g, tuple(others[:slots]), tuple(others[slots:]))
        except Exception as error:
            # The equation may have used a method that symbols lack. If the equation itself is wrong, it raises the same
            # error again when it is called with arrays.
            raise Untraceable(str(error)) from error
        # indices of the new weight and the new arrays of state
        self.results = [self.value_of(one) for one in pair(given, slots)]
        self.program = placed(self)

    def value_of(self, operand: object) -> int:
        """Return the index of an operand, which is a symbol or a constant. A new constant gets the next free index."""
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
        """Record an operation and return the symbol of its result."""
        inputs = tuple(map(self.value_of, operands))
        with np.errstate(all="ignore"):
            sample = function(*[one.sample if isinstance(one, Symbol) else one for one in operands])
        if sample.dtype.kind not in "bf" or (function is np.where and inputs[0] not in self.truths):
            raise Untraceable(f"{function.__name__} gives {sample.dtype.name}, or chooses by what is no bool")
        self.operations.append(TracedOperation(function, inputs, self._next))
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
        """Update a block in place.

        Args:
            numbers: The numbers of the step, then the constants, in the working dtype.
            blocks: `program.blocks` arrays to compute in, as long as `w`.
            masks: `program.masks` arrays of bools, as long as `w`.
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
        """Return lines of Python that compute an element's new w, s0, s1, ... from w, g, s0, s1, ... and c0, c1, ...

        Return None if NumPy and LLVM might round an operation differently.
        """
        names = {0: "w", 1: "g", **{2 + slot: f"s{slot}" for slot in range(self.slots)}}
        names |= {value: f"c{number}" for number, value in enumerate(self.scalars)}
        lines = []
        for function, inputs, result in self.operations:
            assert function is not None
            name = function.__name__
            of_bools = name in OF_BOOLS
            wanted = [of_bools or name == "where", *[of_bools] * (len(inputs) - 1)]
            if name not in TEXTS or [value in self.truths for value in inputs] != wanted:
                # This also refuses sums of bools, whose types differ between NumPy and Python.
                return None
            names[result] = f"v{result}"
            lines.append(f"{names[result]} = {TEXTS[name].format(*[names[one] for one in inputs])}")
        targets = ["w", *[f"s{slot}" for slot in range(self.slots)]]
        return [*lines, f"{', '.join(targets)} = {', '.join(names[value] for value in self.results)}"]


def pair(given: Any, slots: int) -> list[object]:
    """Return the new weight and state that an equation returned, in one list. Raises TypeError for anything else."""
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
        """`sample` is an element of the value, with its dtype."""
        self.tape = tape
        self.value = value
        self.sample = sample

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **options: object) -> Symbol:
        if method != "__call__" or options or ufunc.nout != 1:
            raise Untraceable(f"it calls {ufunc.__name__}.{method} with {', '.join(options) or 'several results'}")
        # NumPy's `**` of arrays does the same for these two exponents.
        if ufunc is np.power and not isinstance(inputs[1], Symbol) and inputs[1] in (2, 0.5):
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


class TracedProgram(NamedTuple):
    """The operations of a tape. Their inputs and results are places in a list of arrays, instead of indices of values.

    Places 0, 1, 2, ... are the weight, the gradient, the state, the numbers, the constants, and `blocks` blocks of
    memory. Masks (arrays of bools) have the places -1, -2, ..., because `Tape.run` puts them at the end of its list.
    """

    steps: list[TracedOperation]
    blocks: int
    masks: int


class _Blocks:
    """Assigns places of one kind (blocks or masks), and reuses places that are given back."""

    def __init__(self, first: int, step: int) -> None:
        self.first = first
        self._step = step
        self.count = 0
        self._free: list[int] = []

    def take(self) -> int:
        if self._free:
            return self._free.pop()
        self.count += 1
        return self.first + (self.count - 1) * self._step

    def give(self, place: int) -> None:
        self._free.append(place)


def placed(tape: Tape) -> TracedProgram:
    """Assign a place to each result of a tape: the place of an input that is no longer needed, or else a new block."""
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
        # Tape.run() writes the second choice of np.where first, and then the first choice over it. So the result may
        # only overwrite the second choice.
        if function is np.where:
            able = [one for one in able if one == inputs[2] != inputs[1]]
        if result in tape.truths:
            place[result] = masks.take()
        elif goal.get(result) in able:
            place[result] = goal[result]
        else:
            place[result] = max(able) if able else blocks.take()
        steps.append(TracedOperation(function, inputs, place[result]))
        for one in dying - {place[result]}:
            if one < 0 or one >= blocks.first:
                (masks if one < 0 else blocks).give(one)
    # results that are not in their final place yet: (final place, index of the value)
    astray = [(target, value) for target, value in zip(targets, tape.results) if place[value] != target]
    for _, value in astray:
        # Another result must be written to this place, so this one is moved out of the way first.
        if place[value] in targets:
            block = blocks.take()
            steps.append(TracedOperation(None, (place[value],), block))
            place[value] = block
    steps += [TracedOperation(None, (place[value],), target) for target, value in astray]
    return TracedProgram(steps, blocks.count, masks.count)


# ---- The text of a kernel: a loop over elements, a sum, or the rows of a table. `lines` is the result of `Tape.loop`.


# A kernel sums this many elements of the gradients, and then updates the weights by the sum, which stays in L1 cache.
TILE = 1024
# With MANY_PARTS gradients or more, the kernel sums this many elements: it reads longer runs of memory, and the sum
# stays in L2 cache.
LONG_TILE = 16 * 1024
MANY_PARTS = 5
# Number of gradients that one loop adds. LLVM checks only this many arrays for overlap, and does not vectorize a loop
# over more arrays.
READ_AT_ONCE = 8
# the kernel for rows prefetches the memory of the row that is this many rows ahead
AHEAD = 12
# dtype of weights that kernels can update -> dtype in which they compute
WIDE = {"float16": "float32", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


def update_text(tape: Tape, lines: Sequence[str], dtype: str) -> str:
    """Return the text of the kernel that updates weights by one gradient."""
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
    """Return the text of the kernel that updates weights by the sum of `parts` gradients, added in order."""
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


def rows_text(tape: Tape, lines: Sequence[str], dtype: str) -> str:
    """Return the text of the kernel that updates rows of a table by a row-sparse gradient.

    The kernel takes two more arguments: `columns`, the elements of a row, and `rows`, the row numbers.
    """
    return "\n".join(
        [
            *_head(tape, dtype, ["g0"], ["columns", "rows"]),
            "    for k in range(rows.size):",
            f"        ahead = rows[min(k + {AHEAD}, rows.size - 1)] * columns",
            *[f"        prefetch({name}_all, ahead)" for name in _arrays(tape)],
            "        start, stop = rows[k] * columns, (rows[k] + 1) * columns",
            *[f"        {name}_ = {name}_all[start:stop]" for name in _arrays(tape)],
            "        g_ = g0_all[k * columns : (k + 1) * columns]",
            "        for i in range(columns):",
            f"            g = {_widened('g_[i]', dtype)}",
            *_update(tape, lines, dtype, "            "),
        ]
    )


def _arrays(tape: Tape) -> list[str]:
    """Return the names of the arrays that a kernel updates."""
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
    """Return the expression of an element in the dtype in which the kernel computes."""
    return f"widen_{dtype}({element})" if "16" in dtype else element


def _added(total: str, element: str, dtype: str) -> str:
    """Return the expression of a sum, rounded to the dtype of the weights."""
    added = f"{total} + {_widened(element, dtype)}"
    return f"widen_{dtype}(narrow_{dtype}({added}))" if "16" in dtype else f"({added})"
