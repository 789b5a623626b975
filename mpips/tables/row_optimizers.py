"""The optimizers of table rows: they compute new rows from rows, gradients and state.

The bits of a row depend only on the row, its state and its gradient, not on the other rows of the call. Schedules of
the learning rate count updates of the table. Adam's bias corrections count updates of the row, so that they are right
even for a row that is rarely updated.

`weight_decay` is decoupled, as in AdamW (Loshchilov, Hutter 2019): an update first multiplies the row by
1 - learning_rate * weight_decay. Rows that an update does not name do not decay. Before the update, a gradient whose
Euclidean norm over the row is larger than `clipnorm` is scaled down to this norm. 0 means no clipping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import did_you_mean
from mpips.collectives.kernels.quiet import quiet
from mpips.optimizers.base import Number, RateSchedule, at, check
from mpips.optimizers.registry import decode_numbers, encode_numbers
from mpips.tables import kernels
from mpips.tables.index import Positions
from mpips.tables.messages import TableOptions

Array = NDArray[Any]
# For each beta at most this many powers are kept.
MOST_POWERS = 1 << 20
# beta -> 1 - beta^t for t from 0 on
_POWERS: dict[float, Array] = {}


class RowOptimizer:
    """An update rule for rows. Subclasses are frozen dataclasses, whose fields are the hyperparameters."""

    # True if the optimizer needs the number of updates of each row
    counts_updates: ClassVar[bool] = False
    # hyperparameters that cannot be changed while the optimizer keeps its state
    fixed: ClassVar[Sequence[str]] = ()
    # the compiled loop that `update_at` calls
    kernel: ClassVar[kernels.Compiled]
    # the largest norm of a row's gradient; `clipped` scales larger gradients down before an update; 0: no limit
    clipnorm: float

    def widths(self, dim: int) -> Sequence[int]:
        """Return the length of each state array for one row of `dim` values. State starts at zero."""
        raise NotImplementedError

    def numbers(self, step: int) -> Sequence[float]:
        """Return the numbers that the compiled loop reads in update `step` of the table."""
        raise NotImplementedError

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        """Update rows (k, dim) and their state (k, width) in place.

        Args:
            updates: int32 (k,). For each row, the number of its updates, including this one. None unless
                `counts_updates`.
            step: The number of this update of the table, counted from 1.
        """
        raise NotImplementedError

    def update_at(
        self,
        places: Positions,
        values: Array,
        gradients: Array,
        state: Sequence[Array],
        updates: Array | None,
        step: int,
        streams: NDArray[np.uint64],
    ) -> bool:
        """Update the rows at positions `places` of a table's arrays with the compiled loop.

        The resulting bits are those of `update`.

        Return False, with nothing changed, if the compiled loop is not available.

        Args:
            streams: How rows of float16 and bfloat16 are rounded (see `halves.round_into`).
        """
        corrections = () if updates is None else self.corrections(updates, gradients.dtype)
        numbers = np.array(self.numbers(step), gradients.dtype)
        flat = _flat(values, *state, gradients)
        return bool(self.kernel(*flat, places, streams, *corrections, numbers, values.shape[1]))

    def corrections(self, updates: Array, dtype: np.dtype) -> Sequence[Array]:
        """Return arrays that the compiled loop reads for rows with these numbers of updates."""
        raise NotImplementedError


@dataclass(frozen=True)
class RowSGD(RowOptimizer):
    """w = w - learning_rate * gradient. No state."""

    learning_rate: Number = 0.01
    weight_decay: float = 0.0
    clipnorm: float = 0.0
    kernel = kernels.sgd

    def __post_init__(self) -> None:
        check(self, scheduled=["learning_rate"], at_least_zero=["learning_rate", "weight_decay", "clipnorm"])

    def widths(self, dim: int) -> Sequence[int]:
        return ()

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        number = rows.dtype.type
        rows *= number(_kept(self, step))
        rows -= gradients * number(at(self.learning_rate, step))

    def numbers(self, step: int) -> Sequence[float]:
        return at(self.learning_rate, step), _kept(self, step)


@dataclass(frozen=True)
class Adagrad(RowOptimizer):
    """accumulator = accumulator + gradient^2;  w = w - learning_rate * gradient / (sqrt(accumulator) + epsilon).

    Each value of a row has its own accumulator.
    """

    learning_rate: Number = 0.01
    epsilon: float = 1e-10
    weight_decay: float = 0.0
    clipnorm: float = 0.0
    kernel = kernels.adagrad

    def __post_init__(self) -> None:
        positive = ["learning_rate", "epsilon", "weight_decay", "clipnorm"]
        check(self, scheduled=["learning_rate"], at_least_zero=positive)

    def widths(self, dim: int) -> Sequence[int]:
        return (dim,)

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        state[0][...] += self._squares(gradients)
        number = rows.dtype.type
        below = np.sqrt(state[0]) + number(self.epsilon)
        # If epsilon is 0 and all gradients so far are zeros, `below` is 0. Divide by 1 instead, which leaves the row
        # unchanged.
        rows *= number(_kept(self, step))
        rows -= gradients * number(at(self.learning_rate, step)) / np.where(below == 0, number(1), below)

    def numbers(self, step: int) -> Sequence[float]:
        return at(self.learning_rate, step), self.epsilon, _kept(self, step)

    def _squares(self, gradients: Array) -> Array:
        return gradients * gradients


@dataclass(frozen=True)
class RowAdagrad(Adagrad):
    """Adagrad with one accumulator for each row. An update adds the mean of gradient^2 over the row to it."""

    kernel = kernels.row_adagrad

    def widths(self, dim: int) -> Sequence[int]:
        return (1,)

    def _squares(self, gradients: Array) -> Array:
        return _mean_of_squares(gradients)


@dataclass(frozen=True)
class ElementwiseAdam(RowOptimizer):
    """Adam (Kingma, Ba 2015) for rows. The bias corrections of a row use t, the number of updates of this row:

    m = beta1 * m + (1 - beta1) * gradient;  v = beta2 * v + (1 - beta2) * gradient^2;
    w = w - learning_rate * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon).
    """

    learning_rate: Number = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clipnorm: float = 0.0
    counts_updates = True
    kernel = kernels.adam

    def __post_init__(self) -> None:
        check(
            self,
            scheduled=["learning_rate"],
            at_least_zero=["learning_rate", "epsilon", "weight_decay", "clipnorm"],
            below_one=["beta1", "beta2"],
        )

    def widths(self, dim: int) -> Sequence[int]:
        return (dim, dim)

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        assert updates is not None
        (first, second), number = state, rows.dtype.type
        first[...] = first * number(self.beta1) + gradients * number(1 - self.beta1)
        second[...] = second * number(self.beta2) + self._squares(gradients) * number(1 - self.beta2)
        correct1, correct2 = (one[:, None] for one in self.corrections(updates, rows.dtype))
        below = np.sqrt(second / correct2) + number(self.epsilon)
        rate = number(at(self.learning_rate, step))
        rows *= number(_kept(self, step))
        rows -= first / correct1 * rate / np.where(below == 0, number(1), below)

    def numbers(self, step: int) -> Sequence[float]:
        betas = self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        return *betas, at(self.learning_rate, step), self.epsilon, _kept(self, step)

    def corrections(self, updates: Array, dtype: np.dtype) -> Sequence[Array]:
        """Return 1 - beta1^t and 1 - beta2^t for each number of updates t."""
        return [_one_minus_powers(beta, updates).astype(dtype) for beta in (self.beta1, self.beta2)]

    def _squares(self, gradients: Array) -> Array:
        return gradients * gradients


@dataclass(frozen=True)
class RowAdam(ElementwiseAdam):
    """Adam with one v for each row, as FBGEMM's `partial_rowwise_adam`: v averages the mean of gradient^2 over the row.

    m has a number for each value of the row, as in Adam.
    """

    kernel = kernels.row_adam

    def widths(self, dim: int) -> Sequence[int]:
        return (dim, 1)

    def _squares(self, gradients: Array) -> Array:
        return _mean_of_squares(gradients)


@dataclass(frozen=True)
class FTRL(RowOptimizer):
    """FTRL-Proximal (McMahan et al. 2013, Algorithm 1). Each value of a row has its own z and n, which begin at 0:

    sigma = (sqrt(n + gradient^2) - sqrt(n)) / learning_rate;
    z = z + gradient - sigma * w;  n = n + gradient^2;
    w = 0 if |z| <= l1, otherwise -(z - sign(z) * l1) / ((beta + sqrt(n)) / learning_rate + l2).

    `learning_rate` is the paper's alpha. z is a sum of terms that were divided by the learning rate, so the rate cannot
    change while z is kept, and it cannot be a schedule. `l2` takes the place of weight decay.
    """

    fixed = ("learning_rate",)
    learning_rate: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    clipnorm: float = 0.0
    kernel = kernels.ftrl

    def __post_init__(self) -> None:
        if isinstance(self.learning_rate, RateSchedule):
            raise ValueError(
                f"FTRL(learning_rate={self.learning_rate!r}): its state depends on the rate: give a number"
            )
        check(self, at_least_zero=["learning_rate", "beta", "l1", "l2", "clipnorm"])
        if not self.learning_rate:
            raise ValueError("FTRL(learning_rate=0.0): gradients are divided by the rate: give a number above 0")

    def widths(self, dim: int) -> Sequence[int]:
        return (dim, dim)

    def update(self, rows: Array, gradients: Array, state: Sequence[Array], updates: Array | None, step: int) -> None:
        (z, n), number = state, rows.dtype.type
        alpha, l1 = number(self.learning_rate), number(self.l1)
        total = n + gradients * gradients
        z += gradients - (np.sqrt(total) - np.sqrt(n)) / alpha * rows
        n[...] = total
        below = (number(self.beta) + np.sqrt(total)) / alpha + number(self.l2)
        # `below` is 0 if beta and l2 are 0 and the square of every gradient so far is too small for the dtype.
        solved = (np.copysign(l1, z) - z) / np.where(below == 0, number(1), below)
        rows[...] = np.where(np.abs(z) <= l1, number(0), solved)

    def numbers(self, step: int) -> Sequence[float]:
        return self.learning_rate, self.beta, self.l1, self.l2


@quiet
def clipped(gradients: Array, clipnorm: float) -> Array:
    """Return gradients (k, dim) after scaling each row whose Euclidean norm is above `clipnorm` down to that norm.

    Norms are computed in float64, so that the squares of large float32 gradients do not overflow.
    """
    dim = gradients.shape[1]
    out = np.empty_like(gradients)
    if kernels.clip(*_flat(out, gradients), np.array([clipnorm]), dim):
        return out
    wide = gradients.astype(np.float64)
    norms = np.sqrt(np.add.reduce(wide * wide, axis=1, keepdims=True))
    out[...] = wide * (clipnorm / np.where(norms > clipnorm, norms, clipnorm))
    return out


def _kept(optimizer: RowSGD | Adagrad | ElementwiseAdam, step: int) -> float:
    """Return the factor by which one update multiplies a row for weight decay."""
    return 1 - at(optimizer.learning_rate, step) * optimizer.weight_decay


def _mean_of_squares(gradients: Array) -> Array:
    """Return the mean of gradient^2 over each row, (k, 1)."""
    squares = gradients * gradients
    return np.add.reduce(squares, axis=1, keepdims=True) / squares.dtype.type(squares.shape[1])


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
ROW_OPTIMIZERS: dict[str, Any] = {
    "sgd": RowSGD,
    "adagrad": Adagrad,
    "row_adagrad": RowAdagrad,
    "adam": ElementwiseAdam,
    "row_adam": RowAdam,
    "ftrl": FTRL,
}


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
    """Return encoded hyperparameters after changing some of them. Raises ValueError or TypeError like `create`.

    Raises ValueError if the optimizer's state depends on a number that would change.
    """
    have = [field.name for field in dataclasses.fields(ROW_OPTIMIZERS[name])]
    if unknown := sorted(set(numbers) - {*have}):
        of_table = [word for word in unknown if word in TableOptions._fields]
        why = f"; {', '.join(of_table)} of a table cannot change" if of_table else ""
        raise TypeError(f"optimizer {name!r} has no argument {', '.join(unknown)}: it takes {', '.join(have)}{why}")
    other = encode(create(name, decode_numbers(options) | numbers))[1]
    if fixed(name, options) != fixed(name, other):
        raise ValueError(
            f"optimizer {name!r} keeps its state in terms of {', '.join(fixed(name, options))}, which cannot change: "
            "leave it out"
        )
    return other


def fixed(name: str, options: bytes) -> dict[str, Any]:
    """Return the hyperparameters on which the optimizer's state depends, so that they cannot change, by name."""
    made = decode(name, options)
    return {field: getattr(made, field) for field in made.fixed}


def decode(name: str, options: bytes) -> RowOptimizer:
    """Make the optimizer that `encode` has encoded."""
    return create(name, decode_numbers(options))
