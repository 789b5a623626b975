"""Write an optimizer as one equation of an element: Numba compiles it, NumPy runs it in blocks; the bits are the same.

    update(w, g, state, step)         docs/why/kernels.md tells the way
      1. numbers(step)                the step's numbers, in the working dtype
      2. equation(w, g, state, ...)   recorded once (`trace`), not called again
      3. a kernel over all elements   where the engine has compiled it (`collectives.kernels.engine`)
      4. else NumPy's calls           block by block, so that all arrays stay in cache between two of them

`update_by_sum` and `Updater` apply any optimizer. Of another than an equation NumPy adds gradients before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, TypeGuard

import numpy as np

from mpips.collectives import log
from mpips.collectives.kernels import engine
from mpips.collectives.kernels.quiet import quietly
from mpips.collectives.kernels.sums import add_parts
from mpips.optimizers import trace
from mpips.optimizers.base import Optimizer, State, Updated, Value, Values, working_dtype, zeros
from mpips.optimizers.trace import Tape, Untraceable, pair

BLOCK_BYTES = 384 * 1024
"""Bytes of one array that a block covers."""
LOG = log.get("mpips.kernels")
TRIAL = 2
"""Weights on which an optimizer's options are tried: no kernel is asked for."""
MOST_PARTS = 64
"""Gradients that one kernel sums; of more, the first are summed before."""
MOST_ROW_PARTS = 8
"""Gradients of rows that one kernel sums."""

_local = threading.local()


class Equation:
    """Base of optimizers whose update of an element is one equation of it, its gradient, its state and numbers.

    A class gives `equation`, and where it needs them `slots` and `numbers`. It is a frozen dataclass.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    slots: ClassVar[int] = 0
    """Arrays of state, which have an element for every weight. A property where options decide it."""

    def numbers(self, step: int) -> Sequence[float]:
        """Return the numbers of a step, counted from 1; as many in every step."""
        return ()

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        """Return the new weight and the new state: (w, (s0, ...)).

        All are of the working dtype: float32 for 16-bit weights. Write it with operators and NumPy's functions of
        elements, and change nothing in place. Options decide by `if`, elements by `np.where`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs an equation")

    def init(self, weights: np.ndarray) -> State:
        """Return `slots` arrays of zeros like `weights`, float32 for 16-bit weights."""
        return zeros(weights, self.slots)

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """Update weights and state in place, as `Optimizer.update` says.

        Raises ValueError or TypeError before anything changes, unless weights and gradient are alike, 1-D and
        contiguous, `state` has `slots` arrays of their shape, and `step` is at least 1.
        """
        self.update_by_sum(weights, (gradient,), state, step)

    def update_by_sum(self, weights: np.ndarray, parts: Sequence[np.ndarray], state: State, step: int) -> None:
        """Update by the sum of gradients, added from first to last; each sum is rounded to the weights' dtype."""
        _see(weights, parts, state, self.slots, step)
        if len(parts) > MOST_PARTS:
            early = len(parts) - MOST_PARTS + 1
            parts = [total_of(parts[:early], "early total"), *parts[early:]]
        way = _way(self, weights.dtype, len(parts), ask=weights.size > TRIAL)
        numbers = way.numbers(self, step)
        if _run_kernel(way, weights, parts, state, numbers):
            return
        if way.tape is not None:  # moments underflow: no kernel says so either
            quietly(_run_blocks, self, way, weights, parts, state, numbers)
        else:  # the program's own function, which is to raise what the program lets NumPy raise
            _run_blocks(self, way, weights, parts, state, numbers)

    def update_rows(
        self, table: np.ndarray, rows: Sequence[np.ndarray], parts: Sequence[np.ndarray], state: State, step: int
    ) -> bool:
        """Update rows of a table, and of its state, by the sum of gradients, where a kernel is there: return whether.

        Args:
            table: weights, (n, ...), C-contiguous.
            rows: of each gradient its rows, int64 (k,), ascending, each once, all in [0, n). Not looked at.
            parts: one or more gradients, (k, ...), C-contiguous, of the table's dtype. Where the first has no such
                row, it counts as 0.
        """
        weights = table.reshape(-1)
        _see(weights, (), state, self.slots, step)
        alike = all(part.flags.c_contiguous and part.dtype == table.dtype for part in parts)
        if len(parts) > MOST_ROW_PARTS or not alike:
            return False
        way = _way(self, table.dtype, len(parts), ask=table.size > TRIAL, by_rows=True)
        numbers = way.numbers(self, step)
        gradients = [part.reshape(-1) for part in parts]
        return _run_kernel(way, weights, gradients, state, numbers, weights.size // len(table), *rows)

    def prepare(self, dtype: np.dtype, parts: int = 1) -> engine.Kernel | None:
        """Ask for the kernel of weights of this dtype and sums of so many gradients, so that it is there in time.

        Return it, or None where NumPy serves in any case. Not blocking; `engine.settle` waits for it.
        """
        return _way(self, dtype, min(parts, MOST_PARTS), ask=True).kernel if dtype.name in trace.WIDE else None


class _Way(NamedTuple):
    """An optimizer's recorded equation, None where it cannot be recorded, and the kernel of that."""

    dtype: np.dtype
    """The working dtype."""
    tape: Tape | None
    constants: Sequence[float]
    kernel: engine.Kernel | None
    each: int
    """The numbers of every step."""

    def numbers(self, optimizer: Equation, step: int) -> list[float]:
        """Return the numbers of a step, then the constants; ValueError where they are not as many as in step 1."""
        given = optimizer.numbers(step)
        if len(given) != self.each:
            raise ValueError(
                f"{type(optimizer).__name__}.numbers gives {len(given)} numbers in step {step} and {self.each} in "
                "step 1: give as many in every step"
            )
        return [*given, *self.constants]


def _way(optimizer: Equation, dtype: np.dtype, parts: int, ask: bool, by_rows: bool = False) -> _Way:
    """Return how an optimizer updates weights of a dtype, or rows of them; without `ask` no kernel is asked for."""
    try:
        return _known_way(optimizer, dtype, parts, ask, by_rows)
    except TypeError as error:
        if "unhashable" not in str(error):
            raise
        return _known_way.__wrapped__(optimizer, dtype, parts, ask, by_rows)


@functools.lru_cache(maxsize=512)
def _known_way(optimizer: Equation, dtype: np.dtype, parts: int, ask: bool, by_rows: bool = False) -> _Way:
    wide, each = working_dtype(dtype), len(optimizer.numbers(1))
    try:
        tape = Tape(optimizer.equation, optimizer.slots, each)
    except Untraceable as error:
        LOG.info("the equation of %s is left to NumPy: %s", type(optimizer).__name__, error)
        return _Way(wide, None, (), None, each)
    lines = tape.loop()
    if lines is None:
        LOG.info(
            "the equation of %s is left to NumPy: of some operations a kernel might give other bits",
            type(optimizer).__name__,
        )
    if lines is None or dtype.name not in trace.WIDE or not ask:
        return _Way(wide, tape, tape.constants, None, each)
    stored = "uint16" if dtype.itemsize == 2 else dtype.name
    types = [f"{stored}[]", *[f"{wide.name}[]"] * tape.slots, *[f"const {stored}[]"] * parts, f"{wide.name}[]"]
    name = f"{type(optimizer).__name__} of {parts} {dtype.name}{' by rows' if by_rows else ''}"
    if by_rows:
        types += ["int64", *["const int64[]"] * parts]
        text = trace.rows_text(tape, lines, dtype.name, parts)
    elif parts == 1:
        text = trace.update_text(tape, lines, dtype.name)
    else:
        text = trace.sum_text(tape, lines, dtype.name, parts)
    return _Way(wide, tape, tape.constants, engine.kernel(name, text, types), each)


def _run_kernel(
    way: _Way,
    weights: np.ndarray,
    parts: Sequence[np.ndarray],
    state: State,
    numbers: Sequence[float],
    *more: object,
) -> bool:
    """Update by the kernel; False where none is there, or it cannot take these arrays. Nothing has changed then."""
    call = None if way.kernel is None else way.kernel.call_for(parts[0].size)
    if call is None or not isinstance(weights, np.ndarray):
        return False
    arrays = [weights, *state, *parts]
    if way.dtype != weights.dtype:
        arrays = [weights.view(np.uint16), *state, *[part.view(np.uint16) for part in parts]]
    try:
        call(*arrays, np.array(numbers, way.dtype), *more)
    except TypeError:  # before it runs: arrays that are not aligned, state of another dtype
        return False
    return True


def _run_blocks(
    optimizer: Equation,
    way: _Way,
    weights: np.ndarray,
    parts: Sequence[np.ndarray],
    state: State,
    numbers: Sequence[float],
) -> None:
    """Update block by block with NumPy's calls."""
    dtype, tape = way.dtype, way.tape
    # As 0-d arrays: NumPy would convert a Python number again in every pass. A GPU's functions take no host arrays.
    prepared: list[Any] = [np.array(number, dtype) for number in numbers]
    if not isinstance(weights, np.ndarray):
        prepared = [dtype.type(number) for number in numbers]
    length = min(BLOCK_BYTES // dtype.itemsize, weights.size)
    blocks, masks = (
        ([], [])
        if tape is None
        else (
            [_block(f"block {i}", dtype, length, weights) for i in range(tape.program.blocks)],
            [_block(f"mask {i}", np.dtype(bool), length, weights) for i in range(tape.program.masks)],
        )
    )
    for start in range(0, weights.size, max(1, length)):
        part = slice(start, start + length)
        w, g = weights[part], total_of([one[part] for one in parts], "total")
        narrow = w
        if weights.dtype != dtype:
            w, wide = _block("weights", dtype, w.size, w), _block("gradient", dtype, w.size, w)
            w[...], wide[...] = narrow, g
            g = wide
        slots = [array[part] for array in state]
        if tape is None:
            _run_untraced(optimizer, w, g, slots, prepared)
        else:
            tape.run(w, g, slots, prepared, [one[: w.size] for one in blocks], [one[: w.size] for one in masks])
        if narrow is not w:
            quietly(narrow.__setitem__, ..., w)


def _run_untraced(
    optimizer: Equation, w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], numbers: Sequence[Any]
) -> None:
    """Call the equation itself on a block: it looks at values, or calls what cannot be recorded."""
    g = g.view()
    g.flags.writeable = False
    results = pair(optimizer.equation(w.copy(), g, [array.copy() for array in state], numbers), len(state))
    for array, result in zip((w, *state), results):
        array[...] = result


def total_of(parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Return the sum of arrays, added from first to last, in this thread's block of that name; of one the same."""
    if len(parts) == 1:
        return parts[0]
    total = _block(name, parts[0].dtype, parts[0].size, parts[0])
    add_parts(parts, total)
    return total


def _see(weights: np.ndarray, parts: Sequence[np.ndarray], state: State, slots: int, step: int) -> None:
    for gradient in parts:
        if gradient.shape != weights.shape or gradient.dtype != weights.dtype or weights.ndim != 1:
            raise ValueError(
                f"update needs two 1-D arrays alike, not weights {weights.dtype.name}{weights.shape} "
                f"and gradient {gradient.dtype.name}{gradient.shape}"
            )
        if not (weights.flags.c_contiguous and gradient.flags.c_contiguous):
            raise ValueError("update needs contiguous weights and gradient; pass contiguous views")
    if len(state) != slots or any(s.shape != weights.shape for s in state):
        raise ValueError(
            f"update needs state of {slots} arrays of shape {weights.shape}, not {[s.shape for s in state]}; "
            "take them from init(weights)"
        )
    if step < 1:
        raise ValueError(f"step counts updates from 1, not {step}")


def _block(name: str, dtype: np.dtype, length: int, like: np.ndarray) -> np.ndarray:
    """Return a block of this thread's memory where `like` lies, on the host or a GPU.

    The same name, dtype and place give the same memory again."""
    buffers: dict[Any, np.ndarray] = _local.__dict__
    block = buffers.get((name, dtype, type(like)))
    if block is None or block.size < length:
        block = np.empty_like(like, dtype, shape=(max(length, BLOCK_BYTES // max(4, dtype.itemsize)),))
        buffers[name, dtype, type(like)] = block
    return block[:length]


# ---- any optimizer


def prepare(optimizer: Optimizer | None, dtype: np.dtype, parts: int = 1) -> None:
    """Ask for what updates weights of this dtype by the sum of `parts` gradients, so that it is there in time."""
    if isinstance(optimizer, Equation):
        optimizer.prepare(dtype, parts)


def update_by_sum(
    optimizer: Optimizer, weights: np.ndarray, parts: Sequence[np.ndarray], state: State, step: int
) -> None:
    """Update in place by the sum of gradients, added from first to last; each sum is rounded to the weights' dtype."""
    if is_fused(optimizer):
        optimizer.update_by_sum(weights, parts, state, step)
    else:
        optimizer.update(weights, total_of(parts, "gradients"), state, step)


def is_fused(optimizer: Optimizer) -> TypeGuard[Equation]:
    """Return whether its updates are those of its equation."""
    return isinstance(optimizer, Equation) and type(optimizer).update is Equation.update


class Updater:
    """An optimizer with its states and step count, for a list of arrays that it updates in place.

    `parameters`: C-contiguous float arrays of any shapes; kept, not copied. The paper's `SGD.Update(params, grads)`.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[np.ndarray]) -> None:
        for number, array in enumerate(parameters):
            if not array.flags.c_contiguous or not array.flags.writeable:
                raise ValueError(f"array {number} of shape {array.shape} must be contiguous and writable")
        self.optimizer = optimizer
        self.step = 0
        self._weights = [array.reshape(-1) for array in parameters]
        self.states = [optimizer.init(weights) for weights in self._weights]
        """The optimizer's arrays of every parameter, each (elements,): live, for checkpoints."""
        for array in parameters:
            prepare(optimizer, array.dtype)

    def update(self, gradients: Sequence[np.ndarray]) -> None:
        """Update every array with its gradient, of the same shape; for Elastic2, its centre."""
        if len(gradients) != len(self._weights):
            raise ValueError(f"{len(gradients)} gradients for {len(self._weights)} arrays")
        self.step += 1
        for weights, gradient, state in zip(self._weights, gradients, self.states):
            self.optimizer.update(weights, np.ascontiguousarray(gradient).reshape(-1), state, self.step)
