"""The optimizers of table rows: they compute new rows from rows, gradients and state.

The bits of a row depend only on the row, its state and its gradient, not on the other rows of the call. Schedules of
the learning rate count updates of the table. Adam's bias corrections count updates of the row, so that they are right
even for a row that is rarely updated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import did_you_mean
from mpips.optimizers.base import Number, at, check
from mpips.optimizers.registry import decode_numbers, encode_numbers
from mpips.tables import kernels
from mpips.tables.index import Positions
from mpips.tables.messages import TableOptions

Array = NDArray[Any]
# For each beta at most this many powers are kept.
MOST_POWERS = 1 << 20
# beta -> 1 - beta^t for t from 0 on
_POWERS: dict[float, Array] = {}


class RowOptimizer(Protocol):
    """An update rule for rows. Implemented by frozen dataclasses whose fields are the hyperparameters."""

    # True if the optimizer needs the number of updates of each row
    counts_updates: bool
    # the compiled loop that `update_at` calls
    kernel: ClassVar[kernels.Compiled]

    def widths(self, dim: int) -> Sequence[int]:
        """Return the length of each state array for one row of `dim` values. State starts at zero."""

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        """Update rows (k, dim) and their state (k, width) in place.

        Args:
            updates: int32 (k,). For each row the number of its updates, including this one. None unless
                `counts_updates`.
            step: The number of this update of the table, counted from 1.
        """

    def update_at(
        self,
        places: Positions,
        values: Array,
        gradients: Array,
        state: Sequence[Array],
        updates: Array | None,
        step: int,
    ) -> bool:
        """Update the rows at positions `places` of a table's arrays with a compiled loop. Gives the bits of `update`.

        Return False, with nothing changed, if the compiled loop is not available.
        """


@dataclass(frozen=True)
class RowSGD:
    """w = w - learning_rate * gradient. No state."""

    learning_rate: Number = 0.01
    counts_updates = False
    kernel = kernels.sgd

    def __post_init__(self) -> None:
        check(self, scheduled=["learning_rate"], at_least_zero=["learning_rate"])

    def widths(self, dim: int) -> Sequence[int]:
        return ()

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        rows -= gradients * rows.dtype.type(at(self.learning_rate, step))

    def update_at(
        self,
        places: Positions,
        values: Array,
        gradients: Array,
        state: Sequence[Array],
        updates: Array | None,
        step: int,
    ) -> bool:
        numbers = np.array([at(self.learning_rate, step)], values.dtype)
        return bool(self.kernel(*_flat(values, gradients), places, numbers, values.shape[1]))


@dataclass(frozen=True)
class Adagrad:
    """accumulator = accumulator + gradient^2;  w = w - learning_rate * gradient / (sqrt(accumulator) + epsilon).

    Each value of a row has its own accumulator.
    """

    learning_rate: Number = 0.01
    epsilon: float = 1e-10
    counts_updates = False
    kernel = kernels.adagrad

    def __post_init__(self) -> None:
        check(self, scheduled=["learning_rate"], at_least_zero=["learning_rate", "epsilon"])

    def widths(self, dim: int) -> Sequence[int]:
        return (dim,)

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        state[0][...] += self._squares(gradients)
        number = rows.dtype.type
        below = np.sqrt(state[0]) + number(self.epsilon)
        # If epsilon is 0 and only zeros were ever pushed, `below` is 0. Divide by 1 instead, which leaves the row as it
        # is.
        rows -= gradients * number(at(self.learning_rate, step)) / np.where(below == 0, number(1), below)

    def update_at(
        self,
        places: Positions,
        values: Array,
        gradients: Array,
        state: Sequence[Array],
        updates: Array | None,
        step: int,
    ) -> bool:
        numbers, dim = np.array([at(self.learning_rate, step), self.epsilon], values.dtype), values.shape[1]
        return bool(self.kernel(*_flat(values, state[0], gradients), places, numbers, dim))

    def _squares(self, gradients: Array) -> Array:
        return gradients * gradients


@dataclass(frozen=True)
class RowAdagrad(Adagrad):
    """Adagrad with one accumulator for each row. An update adds the mean of gradient^2 over the row to it."""

    kernel = kernels.row_adagrad

    def widths(self, dim: int) -> Sequence[int]:
        return (1,)

    def update_at(
        self,
        places: Positions,
        values: Array,
        gradients: Array,
        state: Sequence[Array],
        updates: Array | None,
        step: int,
    ) -> bool:
        if values.shape[1] > kernels.PAIRWISE:
            return False
        return super().update_at(places, values, gradients, state, updates, step)

    def _squares(self, gradients: Array) -> Array:
        squares = gradients * gradients
        return np.add.reduce(squares, axis=1, keepdims=True) / squares.dtype.type(squares.shape[1])


@dataclass(frozen=True)
class RowAdam:
    """Adam (Kingma, Ba 2015) for rows. The bias corrections of a row use t, the number of updates of this row:

    m = beta1 * m + (1 - beta1) * gradient;  v = beta2 * v + (1 - beta2) * gradient^2;
    w = w - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon).
    """

    learning_rate: Number = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    counts_updates = True
    kernel = kernels.adam

    def __post_init__(self) -> None:
        check(
            self,
            scheduled=["learning_rate"],
            at_least_zero=["learning_rate", "epsilon"],
            below_one=["beta1", "beta2"],
        )

    def widths(self, dim: int) -> Sequence[int]:
        return (dim, dim)

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        assert updates is not None
        (first, second), number = state, rows.dtype.type
        first[...] = first * number(self.beta1) + gradients * number(1 - self.beta1)
        second[...] = second * number(self.beta2) + gradients * gradients * number(1 - self.beta2)
        correct1, correct2 = (one[:, None] for one in self._corrections(updates, rows.dtype))
        below = np.sqrt(second / correct2) + number(self.epsilon)
        rate = number(at(self.learning_rate, step))
        rows -= first / correct1 * rate / np.where(below == 0, number(1), below)

    def update_at(
        self,
        places: Positions,
        values: Array,
        gradients: Array,
        state: Sequence[Array],
        updates: Array | None,
        step: int,
    ) -> bool:
        assert updates is not None
        betas = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        numbers = np.array([*betas, at(self.learning_rate, step), self.epsilon], values.dtype)
        flat, corrections = _flat(values, *state, gradients), self._corrections(updates, values.dtype)
        return bool(self.kernel(*flat, places, *corrections, numbers, values.shape[1]))

    def _corrections(self, counts: Array, dtype: np.dtype) -> list[Array]:
        """Return 1 - beta1^t and 1 - beta2^t for each count t."""
        return [_one_minus_powers(beta, counts).astype(dtype) for beta in (self.beta1, self.beta2)]


def _one_minus_powers(beta: float, counts: Array) -> Array:
    """Return 1 - beta^t for each count t.

    Python computes the powers, because NumPy's vectorised powers may differ in the last bit.
    """
    most = int(counts.max(initial=0))
    if most >= MOST_POWERS:
        some, which = np.unique(counts, return_inverse=True)
        return np.array([1 - beta ** int(count) for count in some])[which]
    have = _POWERS.get(beta, np.zeros(0))
    if most >= len(have):
        more = range(len(have), max(most + 1, 2 * len(have)))
        have = _POWERS[beta] = np.concatenate([have, [1 - beta**count for count in more]])
    return have[counts]


def _flat(*arrays: Array) -> list[Array]:
    return [array.reshape(-1) for array in arrays]


# every row optimizer by the name that users give
ROW_OPTIMIZERS: dict[str, Any] = {"sgd": RowSGD, "adagrad": Adagrad, "row_adagrad": RowAdagrad, "adam": RowAdam}


def create(name: object, options: dict[str, Any]) -> RowOptimizer:
    """Make the optimizer with this name and these hyperparameters.

    Raises ValueError for an unknown name or a bad value, and TypeError for an unknown option. The message lists the
    known names or options.
    """
    kind = ROW_OPTIMIZERS.get(name) if isinstance(name, str) else None
    if kind is None:
        perhaps = did_you_mean(name, ROW_OPTIMIZERS)
        known = ", ".join(ROW_OPTIMIZERS)
        raise ValueError(f"unknown optimizer {name!r} of a table{perhaps}: the known ones are {known}")
    if unknown := sorted(set(options) - {field.name for field in dataclasses.fields(kind)}):
        have = ", ".join(field.name for field in dataclasses.fields(kind))
        raise TypeError(
            f"a table has no argument {', '.join(unknown)}: beside its own ({', '.join(TableOptions._fields[1:])}) it "
            f"takes those of optimizer {name!r}: {have}"
        )
    made: RowOptimizer = kind(**options)
    # Raise now if a hyperparameter cannot be encoded, because all of them are sent to servers.
    encode_numbers(options)
    return made


def encode(optimizer: RowOptimizer) -> tuple[str, bytes]:
    """Return the name and the encoded hyperparameters of an optimizer, for messages."""
    name = next(name for name, kind in ROW_OPTIMIZERS.items() if kind is type(optimizer))
    fields = [field.name for field in dataclasses.fields(optimizer)]  # type: ignore[arg-type]
    return name, encode_numbers({field: getattr(optimizer, field) for field in fields})


def changed(name: str, options: bytes, numbers: dict[str, Any]) -> bytes:
    """Return encoded hyperparameters after changing some of them. Raises ValueError or TypeError like `create`."""
    return encode(create(name, decode_numbers(options) | numbers))[1]


def decode(name: str, options: bytes) -> RowOptimizer:
    """Make the optimizer that `encode` has encoded."""
    return create(name, decode_numbers(options))
