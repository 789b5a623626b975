"""Compute the first values of rows from their ids alone: with a counter-based random generator, or by a function.

A random value depends on the table's key (a hash of seed and table name), the id and the column (SplitMix64):

    word(key, id, column) = mix(mix(id ^ key) + (column + 1) * golden ratio)

So the first values of a row are equal, bit by bit, at any time and on any server. The integers are exact. The
arithmetic that makes floats of them (`uniforms`, `normals`) uses only +, -, *, / and square roots, which every
processor rounds in the same way. The logarithms of different C libraries could differ in the last bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mpips.collectives.errors import of_caller
from mpips.collectives.kernels.function import Compiled, compiled, narrow
from mpips.collectives.kernels.quiet import quiet
from mpips.optimizers.base import working_dtype
from mpips.store.keys.row_sums import CONSTANTS, GOLDEN, Ids, Places, mixed
from mpips.tables.kernels import ROWS
from mpips.tables.messages import MakeTable

if TYPE_CHECKING:
    from mpips.collectives.kernels.compiler import mixed64

F = TypeVar("F", bound=Callable[[Ids], Any])
Array = NDArray[Any]
# Number of values that are computed at a time. With 8 bytes for each value they fit into the cache.
MADE_AT_ONCE = 1 << 14
# Rule -> the middle part of the normal distribution from which values are drawn, as a probability. The range of two
# standard deviations around the mean has the probability 0.95449974. A slightly smaller number is used, so that no
# rounding error gives a value outside of this range.
SHARES = {"normal": 1.0, "truncated_normal": 0.9544997}
# Peter Acklam's rational approximation of the inverse of the normal distribution function (2003), whose relative error
# is below 1.15e-9: numerator and denominator for the middle, then for the tails. Each denominator ends with + 1.
COEFFICIENTS = (
    (-3.969683028665376e01, 2.209460984245205e02, -2.759285104469687e02)
    + (1.383577518672690e02, -3.066479806614716e01, 2.506628277459239e00),
    (-5.447609879822406e01, 1.615858368580409e02, -1.556989798598866e02, 6.680131188771972e01, -1.328068155288572e01),
    (-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e00)
    + (-2.549732539343734e00, 4.374664141464968e00, 2.938163982698783e00),
    (7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e00, 3.754408661907416e00),
)
# name -> function of ids that the program has registered
_FUNCTIONS: dict[str, Callable[[Ids], Any]] = {}


@dataclass(frozen=True)
class Init:
    """A rule for first values. Made by `mpips.uniform`, `normal`, `truncated_normal` and `constant`.

    Attributes:
        rule: "uniform", "normal", "truncated_normal", or the name of a registered function.
        mean: The mean of the values.
        spread: The standard deviation, or half the width of a uniform distribution. 0 for a constant.
    """

    rule: str
    mean: float = 0.0
    spread: float = 0.0

    def __repr__(self) -> str:
        """Return the call that makes an equal rule, or the name of the function. Error messages show this text."""
        if self.rule == "uniform":
            return f"mpips.uniform({self.spread!r})" if self.spread else f"mpips.constant({self.mean!r})"
        return f"mpips.{self.rule}({self.mean!r}, {self.spread!r})" if self.rule in LOOPS else self.rule

    @property
    def most(self) -> float:
        """The largest possible magnitude of a value. (Normal values differ from the mean by at most 8.3 deviations.)"""
        return abs(self.mean) + self.spread * {"uniform": 1, "truncated_normal": 2}.get(self.rule, 9)


def uniform(bound: float) -> Init:
    """Return a rule for a table's first values: spread evenly over [-bound, bound].

    `uniform(0)` gives zeros.

    Raises:
        ValueError: `bound` is not a finite number >= 0.
    """
    return Init("uniform", 0.0, _number("uniform", "bound", bound, least=0))


def normal(mean: float = 0.0, std: float = 0.05) -> Init:
    """Return a rule for a table's first values: normally distributed.

    Args:
        mean: The mean.
        std: The standard deviation.

    Raises:
        ValueError: An argument is not a finite number, or `std` is negative.
    """
    return Init("normal", _number("normal", "mean", mean), _number("normal", "std", std, least=0))


def truncated_normal(mean: float = 0.0, std: float = 0.05) -> Init:
    """Return a rule for a table's first values: normally distributed, but within [mean - 2 std, mean + 2 std].

    Args:
        mean: The mean.
        std: The standard deviation of the distribution from which values farther than 2 std from the mean are left out.

    Raises:
        ValueError: An argument is not a finite number, or `std` is negative.
    """
    name = "truncated_normal"
    return Init(name, _number(name, "mean", mean), _number(name, "std", std, least=0))


def constant(value: float) -> Init:
    """Return a rule for a table's first values: all are `value`.

    Raises:
        ValueError: `value` is not a finite number.
    """
    return Init("uniform", _number("constant", "value", value))


def register_init(function: F) -> F:
    """Register a function that computes the first values of rows from their ids. Use `register_init` as a decorator.

    Put the function before `mpips.create`: servers and spares run the script up to that call, and so also register the
    function. Only its name is sent to them. Then pass the function to `kv.table` as `init`.

    The function takes int64 ids (k,), which may repeat, and returns an array (k, dim) of finite numbers. Servers call
    it when they make rows, and servers and workers call it for pulled ids that have no row. So it must accept every id
    that the program uses. Each row must depend on its id alone, bit by bit: not on the other ids of the call, on the
    process or on the time. (A matrix product does not promise that, because BLAS may add in another order for more
    rows.) `kv.table` calls it once with the id 0 as a test.

    Raises:
        TypeError: `function` is not a function with a name.
        ValueError: Another function of the program, or a rule of mpips, has the name.

    Example:
        >>> @mpips.register_init
        ... def halves(ids):
        ...     return np.repeat(ids[:, None] / 2, 3, axis=1)
        >>> halves(np.array([4])).tolist()
        [[2.0, 2.0, 2.0]]
    """
    name = getattr(function, "__name__", "")
    if not (callable(function) and name.isidentifier()):
        raise of_caller(TypeError(f"register_init({function!r}): give a function with a name, made by def"))
    other = _FUNCTIONS.get(name, function)
    same = (other.__module__, other.__qualname__) == (function.__module__, function.__qualname__)
    # If a function is defined inside another one, each call defines it again, with the same name but perhaps other
    # results.
    if name in LOOPS or not (other is function or (same and "<locals>" not in function.__qualname__)):
        taken = "a rule of mpips" if name in LOOPS else f"another function, {other.__module__}.{other.__qualname__}"
        raise of_caller(ValueError(f"register_init: {name!r} is {taken}: choose another name"))
    _FUNCTIONS[name] = function
    return function


def checked(name: str, init: object) -> Init:
    """Return the rule that table `name` gets as `init`. Raises ValueError if it is neither a rule nor registered."""
    if isinstance(init, Init):
        return init
    function = getattr(init, "__name__", "")
    if callable(init) and _FUNCTIONS.get(function) is init:
        return Init(function)
    rules = "mpips.uniform, mpips.normal, mpips.truncated_normal or mpips.constant"
    if init in (uniform, normal, truncated_normal, constant):
        cure = f"call it: mpips.{function}(...)"
    elif callable(init):
        cure = "put @mpips.register_init above it, before mpips.create"
    else:
        cure = f"give {rules}, or a function"
    raise ValueError(f"table {name!r}: init={init!r}: {cure}")


def key_of(seed: int, table: str) -> int:
    """Return a 64-bit key. Tables with different keys have different first values."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest(), "little")


class FirstValues:
    """Writes the first values of a table's rows. Raises ValueError if the table's function is not registered here."""

    def __init__(self, card: MakeTable) -> None:
        self._card = card
        self._init = init = Init(card.init, card.mean, card.bound)
        self._function = None if init.rule in LOOPS else _FUNCTIONS.get(init.rule)
        if init.rule not in LOOPS and self._function is None:
            raise ValueError(
                f"table {card.table!r} has first values by the function {init.rule!r}, which is not known here: put "
                "@mpips.register_init above it, before mpips.create in the script that servers run, too"
            )
        self._key = np.array([card.key], np.uint64)
        if init.rule == "uniform":
            self._numbers = np.array([2 * init.spread / (1 << 53), init.spread - init.mean])
        elif self._function is None:
            every = (number for part in COEFFICIENTS for number in part)
            self._numbers = np.array([init.mean, init.spread, SHARES[init.rule], *every])

    @property
    def loops(self) -> Sequence[Compiled]:
        """The compiled loops that `write` calls."""
        return () if self._function is not None else (LOOPS[self._init.rule],)

    def write(self, rows: Array, at: Places, ids: Ids) -> None:
        """Write the first values of ids into the array `rows` (n, dim), at the indices `at`."""
        if not len(ids):
            return
        if self._function is not None:
            rows[at] = self._call(self._function, ids, rows.dtype)
        elif not LOOPS[self._init.rule](rows.reshape(-1), ids, at, self._key, self._numbers, self._card.dim):
            for piece, values in first_rows(self._card.key, self._init, ids, self._card.dim, rows.dtype):
                rows[at[piece]] = values

    def _call(self, function: Callable[[Ids], Any], ids: Ids, dtype: np.dtype) -> Array:
        what = f"table {self._card.table!r}: the function {self._init.rule!r} of init"
        wanted, some = (len(ids), self._card.dim), f"{len(ids)} ids, the first {ids[0]}"
        try:
            # Give the function a copy, because error messages below name ids, and the function might change its
            # argument.
            values = np.asarray(function(ids.copy()))
        except Exception as error:
            raise ValueError(f"{what} failed for {some}: {type(error).__name__}: {error}") from error
        # Check against the dtype in which rows are updated, because NumPy would allow complex numbers to become
        # bfloat16.
        if values.shape != wanted or not np.can_cast(values.dtype, working_dtype(dtype), "same_kind"):
            raise ValueError(
                f"{what} returned {values.dtype.name} of shape {values.shape} for {some}, which need {dtype.name} of "
                f"shape {wanted}: return a row for each id"
            )
        with np.errstate(all="ignore"):
            rows: Array = values.astype(dtype)
        if not (fine := np.isfinite(rows)).all():
            row, column = np.argwhere(~fine)[0]
            raise ValueError(
                f"{what} returned {values[row, column]} for id {ids[row]}, which is {rows[row, column]} in "
                f"{dtype.name}: return finite numbers"
            )
        return rows


def first_rows(key: int, init: Init, ids: Ids, dim: int, dtype: np.dtype) -> Iterator[tuple[slice, Array]]:
    """Yield random first values of rows piece by piece, as (slice of `ids`, values (k, dim)).

    Values of float16 and bfloat16 are rounded to float32 first.
    """
    columns = np.arange(1, dim + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    step = max(1, MADE_AT_ONCE // dim)
    for start in range(0, len(ids), step):
        piece = slice(start, start + step)
        streams = mixed(ids[piece].view(np.uint64) ^ np.uint64(key))
        words = mixed(streams[:, None] + columns)
        if init.rule == "uniform":
            values = uniforms(words) * (2 * init.spread / (1 << 53)) - (init.spread - init.mean)
        else:
            values = normals(words, SHARES[init.rule]) * init.spread + init.mean
        yield piece, values.astype(working_dtype(np.dtype(dtype)), copy=False).astype(dtype, copy=False)


def uniforms(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return evenly distributed whole numbers from 0 to 2^53 - 1."""
    return (words >> np.uint64(11)).astype(np.float64)


@quiet
def normals(words: NDArray[np.uint64], share: float) -> NDArray[np.float64]:
    """Return numbers of a normal distribution with mean 0 and deviation 1, from the middle `share` of the distribution.

    Each random word of 64 bits chooses a probability. The number is the approximate inverse of the distribution
    function at this probability.
    """
    middle, below_middle, tail, below_tail = COEFFICIENTS
    q = (((words >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52 - 0.5) * share
    r = q * q
    x = _polynomial(middle, r) * q / (_polynomial(below_middle, r) * r + 1.0)
    in_tail = np.abs(q) > 0.47575
    r = np.sqrt(_minus_logarithms(0.5 - np.abs(q[in_tail])) * 2.0)
    far = _polynomial(tail, r) / (_polynomial(below_tail, r) * r + 1.0)
    x[in_tail] = np.where(q[in_tail] > 0, -far, far)
    return x


def _minus_logarithms(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -log(p) of numbers in (0, 1), by the series of atanh, around the square root of 1/2."""
    m, exponents = np.frexp(p)
    s = (m - 0.7071067811865476) / (m + 0.7071067811865476)
    z, series = s * s, np.zeros_like(s)
    for j in range(17, 0, -2):
        series = series * z + 1.0 / j
    return (0.5 - exponents) * 0.6931471805599453 - s * 2.0 * series


def _polynomial(coefficients: Sequence[float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


@compiled("stored[], const int64[], const int64[], const uint64[], const float64[], int64", ROWS, CONSTANTS)
def first_values(values: Array, ids: Array, rows: Array, key: Array, spread: Array, dim: int) -> int:
    """Write the first values of ids into the rows `rows`.

    Args:
        key: The table's key for first values, as an array with one number.
        spread: The step between two possible values, and minus the smallest value.
    """
    for i in range(ids.size):
        stream = mixed64(np.uint64(ids[i]) ^ key[0])
        v_ = values[rows[i] * dim : (rows[i] + 1) * dim]
        for k in range(v_.size):
            word = mixed64(stream + np.uint64(k + 1) * np.uint64(GOLDEN)) >> np.uint64(11)
            v_[k] = narrow(np.float64(np.int64(word)) * spread[0] - spread[1])
    return 1


@compiled("stored[], const int64[], const int64[], const uint64[], const float64[], int64", ROWS, CONSTANTS)
def first_normals(values: Array, ids: Array, rows: Array, key: Array, numbers: Array, dim: int) -> int:
    """Write normally distributed first values like `normals`. Arguments as in `first_values`.

    Args:
        numbers: Mean, standard deviation and share, then the 21 coefficients (`COEFFICIENTS`).
    """
    for i in range(ids.size):
        stream = mixed64(np.uint64(ids[i]) ^ key[0])
        v_ = values[rows[i] * dim : (rows[i] + 1) * dim]
        for k in range(v_.size):
            word = mixed64(stream + np.uint64(k + 1) * np.uint64(GOLDEN)) >> np.uint64(12)
            q = ((np.float64(np.int64(word)) + 0.5) / 4503599627370496.0 - 0.5) * numbers[2]
            if abs(q) <= 0.47575:
                r, above, below = q * q, numbers[3], numbers[9]
                for j in range(4, 9):
                    above = above * r + numbers[j]
                for j in range(10, 14):
                    below = below * r + numbers[j]
                x = above * q / (below * r + 1.0)
            else:
                m, halvings = 0.5 - abs(q), 0.0
                while m < 0.5:
                    m *= 2.0
                    halvings += 1.0
                s = (m - 0.7071067811865476) / (m + 0.7071067811865476)
                z, series = s * s, 0.0
                for j in range(17, 0, -2):
                    series = series * z + 1.0 / j
                r = np.sqrt(((halvings + 0.5) * 0.6931471805599453 - s * 2.0 * series) * 2.0)
                above, below = numbers[14], numbers[20]
                for j in range(15, 20):
                    above = above * r + numbers[j]
                for j in range(21, 24):
                    below = below * r + numbers[j]
                x = above / (below * r + 1.0)
                if q > 0:
                    x = -x
            v_[k] = narrow(x * numbers[1] + numbers[0])
    return 1


# rule of random first values -> the compiled loop that writes them
LOOPS = {"uniform": first_values, "normal": first_normals, "truncated_normal": first_normals}


def _number(rule: str, argument: str, given: float, least: float = -math.inf) -> float:
    try:
        number = float(given)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise of_caller(
            ValueError(f"{rule}({argument}={given!r}): give a finite number{' >= 0' if least == 0 else ''}")
        )
    return number
