"""Optimizers written as one equation of an element. Numba compiles it or NumPy runs it in blocks, with equal bits.

`update(w, g, state, step)` takes these steps (docs/why/kernels.md explains them):

    1. numbers(step)                the numbers of this step, in the working dtype
    2. equation(w, g, state, ...)   recorded at the first call (`trace`), and not called again
    3. a kernel over all elements   if the engine has loaded one (`collectives.kernels.engine`)
    4. otherwise calls of NumPy     block by block, so that all arrays stay in cache from one call to the next

`update_by_sum` and `Updater` apply any optimizer, including one that is not an `Equation`. For such an optimizer, NumPy
first adds the gradients.
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

# size in bytes of one array's part of a block
BLOCK_BYTES = 384 * 1024
LOG = log.get("mpips.kernels")
# number of weights on which `registry.create` tries an optimizer; no kernel is compiled for this number
TRIAL = 2
# largest number of gradients that one kernel sums; if there are more, NumPy first sums the surplus
MOST_PARTS = 64

_local = threading.local()


class Equation:
    """Base class of optimizers that are written as one equation of an element's weight, gradient and state.

    A subclass is a frozen dataclass that defines `equation`, and if needed `slots` and `numbers`. Register it by
    `mpips.optimizers.register`.

    Attributes:
        slots: Number of arrays of state. Each array has an element for every weight. `slots` may be a property if the
            number depends on options.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    slots: ClassVar[int] = 0

    def numbers(self, step: int) -> Sequence[float]:
        """Return the numbers that the equation needs at this step, such as the learning rate. Steps count from 1.

        The count of the numbers must be equal at every step.
        """
        return ()

    def equation(self, w: Value, g: Value, state: Values, numbers: Values) -> Updated:
        """Return the new weight and the new state: (w, (s0, ...)).

        All values have the working dtype: float32 for 16-bit weights. Write the equation with operators and NumPy's
        elementwise functions, and change nothing in place. Use `if` for conditions on options, and `np.where` for
        conditions on elements.
        """
        raise NotImplementedError(f"{type(self).__name__} needs an equation")

    def init(self, weights: np.ndarray) -> State:
        """Return `slots` arrays of zeros of the weights' size, in float32 for 16-bit weights."""
        return zeros(weights, self.slots)

    def update(self, weights: np.ndarray, gradient: np.ndarray, state: State, step: int) -> None:
        """Update weights and state in place, as `Optimizer.update` says.

        Raises ValueError or TypeError before anything changes, unless weights and gradient are 1-D, contiguous and
        alike in shape and dtype, `state` has `slots` arrays of that shape, and `step` is at least 1.
        """
        self.update_by_sum(weights, (gradient,), state, step)

    def update_by_sum(self, weights: np.ndarray, parts: Sequence[np.ndarray], state: State, step: int) -> None:
        """Update in place by the sum of several gradients.

        The gradients are added in order. Each partial sum is rounded to the weights' dtype. So a kernel and NumPy give
        the same sum.
        """
        _check_arguments(weights, parts, state, self.slots, step)
        if len(parts) > MOST_PARTS:
            early = len(parts) - MOST_PARTS + 1
            parts = [total_of(parts[:early], "early total"), *parts[early:]]
        way = _way(self, weights.dtype, len(parts), ask=weights.size > TRIAL)
        numbers = way.numbers(self, step)
        if _run_kernel(way, weights, parts, state, numbers):
            return
        # Elements of the state may underflow. A kernel does not report this, so NumPy must not report it either.
        if way.tape is not None:
            quietly(_run_blocks, self, way, weights, parts, state, numbers)
        else:
            # This runs the user's own function, in which the user's np.errstate decides what NumPy raises.
            _run_blocks(self, way, weights, parts, state, numbers)

    def update_rows(self, table: np.ndarray, rows: np.ndarray, gradient: np.ndarray, state: State, step: int) -> bool:
        """Update some rows of a table, and of its state, by a row-sparse gradient, if there is a kernel for it.

        Return False, with nothing changed, if there is no such kernel, or if it is not loaded yet.

        Args:
            table: The weights, (n, ...), C-contiguous.
            rows: Row numbers, int64 (k,), without duplicates, all in [0, n). They are not checked. If they ascend, the
                update may be four times as fast.
            gradient: (k, ...), C-contiguous, of the table's dtype.
        """
        weights = table.reshape(-1)
        _check_arguments(weights, (), state, self.slots, step)
        if not gradient.flags.c_contiguous or gradient.dtype != table.dtype:
            return False
        way = _way(self, table.dtype, 1, ask=table.size > TRIAL, by_rows=True)
        numbers = way.numbers(self, step)
        return _run_kernel(way, weights, [gradient.reshape(-1)], state, numbers, weights.size // len(table), rows)

    def prepare(self, dtype: np.dtype, parts: int = 1, elements: int = 0) -> engine.Kernel | None:
        """Load the compiled kernel for weights of this dtype, if it is expected to save more time than loading takes.

        Call this while a program sets up, because loading may block for a second or two. Until the kernel is loaded,
        NumPy does the updates, with the same bits (`collectives.kernels.engine`).

        Args:
            parts: The number of gradients that one update sums.
            elements: The number of weights that one update changes. Larger updates make a kernel more useful.

        Returns:
            The kernel, which may not be loaded yet. None if NumPy does all updates of this dtype.
        """
        kernel = _way(self, dtype, min(parts, MOST_PARTS), ask=True).kernel if dtype.name in trace.WIDE else None
        if kernel is not None:
            kernel.prepare(elements)
        return kernel


class _Way(NamedTuple):
    """An optimizer's recorded equation for weights of one dtype, and the kernel made from it.

    `tape` is None if the equation cannot be recorded. `kernel` is None if NumPy runs the update.
    """

    # the working dtype
    dtype: np.dtype
    tape: Tape | None
    constants: Sequence[float]
    kernel: engine.Kernel | None
    # the count of numbers that the optimizer gives for a step
    each: int

    def numbers(self, optimizer: Equation, step: int) -> list[float]:
        """Return the numbers of a step, followed by the constants of the equation.

        Raises ValueError if the optimizer does not give as many numbers as in step 1.
        """
        numbers = optimizer.numbers(step)
        if len(numbers) != self.each:
            raise ValueError(
                f"{type(optimizer).__name__}.numbers gives {len(numbers)} numbers in step {step} and {self.each} in "
                "step 1: give as many in every step"
            )
        return [*numbers, *self.constants]


def _way(optimizer: Equation, dtype: np.dtype, parts: int, ask: bool, by_rows: bool = False) -> _Way:
    """Return the `_Way` in which an optimizer updates weights, or rows of weights (`by_rows`).

    The `_Way` has a kernel only if `ask` is True. If an optimizer cannot be hashed, because an option is an array or a
    list, its equation is recorded again at every call.
    """
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
        types += ["int64", "const int64[]"]
        text = trace.rows_text(tape, lines, dtype.name)
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
    """Update by the kernel. Return False, with nothing changed, if no kernel can take these arrays."""
    call = None if way.kernel is None else way.kernel.call_for(parts[0].size)
    if call is None or not isinstance(weights, np.ndarray):
        return False
    arrays = [weights, *state, *parts]
    if way.dtype != weights.dtype:
        arrays = [weights.view(np.uint16), *state, *[part.view(np.uint16) for part in parts]]
    try:
        call(*arrays, np.array(numbers, way.dtype), *more)
    except TypeError:
        # The kernel checks its arguments before it runs: arrays may be misaligned, or the state may have another dtype.
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
    """Update block by block, with calls of NumPy."""
    dtype, tape = way.dtype, way.tape
    # The numbers are 0-d arrays, because NumPy would convert a Python number again in every call. On a GPU they are
    # scalars of NumPy, because functions of a GPU take no host arrays.
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
        w, g = weights[part], total_of([array[part] for array in parts], "total")
        narrow = w
        if weights.dtype != dtype:
            w, wide = _block("weights", dtype, w.size, w), _block("gradient", dtype, w.size, w)
            w[...], wide[...] = narrow, g
            g = wide
        slots = [array[part] for array in state]
        if tape is None:
            _run_untraced(optimizer, w, g, slots, prepared)
        else:
            tape.run(w, g, slots, prepared, [array[: w.size] for array in blocks], [array[: w.size] for array in masks])
        if narrow is not w:
            quietly(narrow.__setitem__, ..., w)


def _run_untraced(
    optimizer: Equation, w: np.ndarray, g: np.ndarray, state: Sequence[np.ndarray], numbers: Sequence[Any]
) -> None:
    """Call the equation itself on a block, because it looks at values or calls a function that cannot be recorded."""
    g = g.view()
    g.flags.writeable = False
    results = pair(optimizer.equation(w.copy(), g, [array.copy() for array in state], numbers), len(state))
    for array, result in zip((w, *state), results):
        array[...] = result


def total_of(parts: Sequence[np.ndarray], name: str) -> np.ndarray:
    """Return the sum of arrays, added in order. The result is in this thread's block of memory called `name`.

    A single array is returned itself, not copied.
    """
    if len(parts) == 1:
        return parts[0]
    total = _block(name, parts[0].dtype, parts[0].size, parts[0])
    add_parts(parts, total)
    return total


def _check_arguments(weights: np.ndarray, parts: Sequence[np.ndarray], state: State, slots: int, step: int) -> None:
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
    """Return a block of memory that belongs to this thread, on the device (host or GPU) where `like` is.

    Calls with the same name, dtype and device return the same memory.
    """
    buffers: dict[Any, np.ndarray] = _local.__dict__
    block = buffers.get((name, dtype, type(like)))
    if block is None or block.size < length:
        block = np.empty_like(like, dtype, shape=(max(length, BLOCK_BYTES // max(4, dtype.itemsize)),))
        buffers[name, dtype, type(like)] = block
    return block[:length]


# ---- any optimizer


def prepare(optimizer: Optimizer | None, dtype: np.dtype, parts: int = 1, elements: int = 0) -> None:
    """Load the compiled kernel of an optimizer, as `Equation.prepare` says. Blocking, up to a second or two.

    Does nothing if `optimizer` is None, or is not an `Equation`. Only an `Equation` has a kernel.
    """
    if isinstance(optimizer, Equation):
        optimizer.prepare(dtype, parts, elements)


def update_by_sum(
    optimizer: Optimizer, weights: np.ndarray, parts: Sequence[np.ndarray], state: State, step: int
) -> None:
    """Update in place by the sum of several gradients, added in order.

    Each partial sum is rounded to the weights' dtype.
    """
    if is_fused(optimizer):
        optimizer.update_by_sum(weights, parts, state, step)
    else:
        optimizer.update(weights, total_of(parts, "gradients"), state, step)


def is_fused(optimizer: Optimizer) -> TypeGuard[Equation]:
    """True if the optimizer updates by its equation, so that one kernel can sum gradients and update.

    An `Equation` that overrides `update` is not fused.
    """
    return isinstance(optimizer, Equation) and type(optimizer).update is Equation.update


class Updater:
    """An optimizer with its states and its step count, for a list of arrays that it updates in place.

    This is `SGD.Update(params, grads)` of the MXNET-MPI paper.

    Args:
        optimizer: The optimizer of all arrays.
        parameters: C-contiguous, writable float arrays of any shapes. They are kept, not copied.

    Attributes:
        states: For every parameter the optimizer's arrays of state, each of shape (elements,). These are the arrays
            in use, not copies; checkpoints read and write them.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[np.ndarray]) -> None:
        for number, array in enumerate(parameters):
            if not array.flags.c_contiguous or not array.flags.writeable:
                raise ValueError(f"array {number} of shape {array.shape} must be contiguous and writable")
        self.optimizer = optimizer
        self.step = 0
        self._weights = [array.reshape(-1) for array in parameters]
        self.states = [optimizer.init(weights) for weights in self._weights]
        for array in parameters:
            prepare(optimizer, array.dtype, elements=array.size)

    def update(self, gradients: Sequence[np.ndarray]) -> None:
        """Update every array by its gradient of the same shape. For `Elastic2`, pass the centres as gradients."""
        if len(gradients) != len(self._weights):
            raise ValueError(f"{len(gradients)} gradients for {len(self._weights)} arrays")
        self.step += 1
        for weights, gradient, state in zip(self._weights, gradients, self.states):
            self.optimizer.update(weights, np.ascontiguousarray(gradient).reshape(-1), state, self.step)
