"""A table as a serial dictionary of rows, in plain NumPy and row by row: what tests compare a store's tables with."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpips.optimizers.base import at
from mpips.store.checkpoint.file import TensorFile
from mpips.store.keys.row_sums import mixed, owners_of
from mpips.tables.admission import Chance
from mpips.tables.initial import Init, first_rows, key_of, uniform

Numbers = dict[str, Any]
"""Of the optimizer, by the names of its options; what is not there has its default."""


def row_adam(row: Any, gradient: Any, state: dict[str, Any], rate: Any, numbers: Numbers) -> Any:
    return adam(row, gradient, state, rate, numbers, np.add.reduce(gradient * gradient) / row.dtype.type(len(row)))


def ftrl(row: Any, gradient: Any, state: dict[str, Any], rate: Any, numbers: Numbers) -> Any:
    """Algorithm 1 of McMahan et al. 2013, one coordinate after the other."""
    number = row.dtype.type
    beta, l1, l2 = (number(numbers.get(name, default)) for name, default in (("beta", 1), ("l1", 0), ("l2", 0)))
    state.setdefault("z", np.zeros_like(row))
    state.setdefault("n", np.zeros_like(row))
    new = row.copy()
    for i, g in enumerate(gradient):
        n = state["n"][i]
        sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / rate
        z = state["z"][i] = state["z"][i] + (g - sigma * row[i])
        n = state["n"][i] = n + g * g
        signed = l1 if z > 0 else -l1
        new[i] = 0 if abs(z) <= l1 else (signed - z) / ((beta + np.sqrt(n)) / rate + l2)
    return new


def sgd(row: Any, gradient: Any, state: dict[str, Any], rate: Any, numbers: Numbers) -> Any:
    return row - gradient * rate


def row_adagrad(row: Any, gradient: Any, state: dict[str, Any], rate: Any, numbers: Numbers) -> Any:
    number = row.dtype.type
    state["sum"] = state.get("sum", number(0)) + np.add.reduce(gradient * gradient) / number(len(row))
    return row - gradient * rate / (np.sqrt(state["sum"]) + number(numbers.get("epsilon", 1e-10)))


def adagrad(row: Any, gradient: Any, state: dict[str, Any], rate: Any, numbers: Numbers) -> Any:
    state["sum"] = state.get("sum", np.zeros_like(row)) + gradient * gradient
    return row - gradient * rate / (np.sqrt(state["sum"]) + row.dtype.type(numbers.get("epsilon", 1e-10)))


def adam(
    row: Any, gradient: Any, state: dict[str, Any], rate: Any, numbers: Numbers, mean_of_squares: Any = None
) -> Any:
    number, (beta1, beta2) = row.dtype.type, (numbers.get("beta1", 0.9), numbers.get("beta2", 0.999))
    count = state["count"] = state.get("count", 0) + 1
    first = state["first"] = state.get("first", np.zeros_like(row)) * number(beta1) + gradient * number(1 - beta1)
    squares = gradient * gradient if mean_of_squares is None else mean_of_squares
    before = state.get("second", np.zeros_like(squares))
    second = state["second"] = before * number(beta2) + squares * number(1 - beta2)
    below = np.sqrt(second / number(1 - beta2**count)) + number(numbers.get("epsilon", 1e-8))
    return row - first / number(1 - beta1**count) * rate / below


UPDATES: dict[str, Callable[..., Any]] = {
    "sgd": sgd,
    "row_adagrad": row_adagrad,
    "adagrad": adagrad,
    "adam": adam,
    "row_adam": row_adam,
    "ftrl": ftrl,
}


def clipped(gradient: Any, clipnorm: float) -> Any:
    wide = gradient.astype(np.float64)
    norm = np.sqrt(np.add.reduce(wide * wide))
    return (wide * (clipnorm / norm)).astype(gradient.dtype) if clipnorm and norm > clipnorm else gradient


def plainly_mixed(word: int) -> int:
    """SplitMix64's finalizer, in Python's whole numbers."""
    mask = 2**64 - 1
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    return word ^ (word >> 31)


def rounded_up_or_down(row: Any, words: Any, dtype: np.dtype) -> Any:
    """Round a float32 row at random to float16 or bfloat16: find both neighbours of each number, and choose."""
    with np.errstate(over="ignore"):
        near = row.astype(dtype)
    size, bits = np.abs(row.astype(np.float64)), np.abs(near).view(np.uint16)
    # the neighbour that is not above, and the one after it, as bits
    low = bits - (np.abs(near).astype(np.float64) > size)
    a, b = (each.view(dtype).astype(np.float64) for each in (low, low + np.uint16(1)))
    # infinity stands for the power of two behind the largest number
    b = np.where(np.isinf(b), 2.0 ** (16 if dtype.name == "float16" else 128), b)
    up = (size - a) / (b - a) >= 1 - (words >> np.uint64(11)).astype(np.float64) / 2**53
    return (low + up.astype(np.uint16) | np.signbit(row).astype(np.uint16) << np.uint16(15)).view(dtype)


IN_FILES = (
    "rows",
    "_state",
    "touched",
    "counts",
    "_counted",
    "updates",
    "scores",
    "_times",
    "_counted_times",
    "now",
)


class ReferenceTable:
    """Rows in a dictionary; gradients are summed from first to last, those of 16 bits in float32.

    `init`: a rule of first values, or a function of ids; a number: the bound of even ones. `evict`, `limit`, `admit`,
    `evict_by`, `evict_after` (in seconds), `rounding`: as `KVStore.table` says; 0: none. `servers`: how many share the
    limits. `numbers`: of the optimizer."""

    def __init__(
        self,
        name: str,
        dim: int,
        dtype: Any,
        init: Init | float | Callable[[Any], Any],
        optimizer: str,
        seed: int = 0,
        evict: int = 0,
        limit: int = 0,
        servers: int = 1,
        admit: Any = None,
        evict_by: str = "age",
        evict_after: float = 0,
        rounding: str = "nearest",
        **numbers: Any,
    ) -> None:
        self._evict_by, self._after = evict_by, round(evict_after * 10**6)
        self.by_score = evict_by == "score"
        self.scores: dict[int, float] = {}
        self._times: dict[int, int] = {}
        self._counted_times: dict[int, int] = {}
        self.now, self.reasons, self.removed = 0, [0, 0, 0], 0  # microseconds; dropped by age, by time, by limit
        self._stochastic = rounding == "stochastic"
        self._evict, self._limit, self.servers, self._admit = evict, limit, servers, admit
        self.numbers: Numbers = {"learning_rate": 0.1, **numbers}
        self.touched: dict[int, int] = {}
        self.evicted: list[int] = []
        self.counts: dict[int, int] = {}
        self._counted: dict[int, int] = {}  # by id the update that has counted last
        self.refused = 0
        self.dim, self.dtype = dim, np.dtype(dtype)
        self._wide = np.dtype(np.float32) if self.dtype.itemsize == 2 else self.dtype
        self._init = uniform(init) if isinstance(init, (int, float)) else init
        self._key, self._update = key_of(seed, name), UPDATES[optimizer]
        self.rows: dict[int, Any] = {}
        self._state: dict[int, dict[str, Any]] = {}
        self.updates = 0

    def pull(self, ids: Any) -> Any:
        flat = [self._row(int(one)) for one in ids.reshape(-1)]
        return np.array(flat, self.dtype).reshape(*ids.shape, self.dim)

    def save(self) -> Any:
        """Return all that a file of the table holds, for `load`."""
        return copy.deepcopy({name: getattr(self, name) for name in IN_FILES})

    def load(self, saved: Any) -> None:
        vars(self).update(copy.deepcopy(saved))

    def _begin(self, now: int) -> None:
        self.updates += 1
        self.now = max(self.now, now)

    def _name(self, one: int, score: float | None) -> None:
        """An update names the row of this id."""
        self.touched[one], self._times[one] = self.updates, self.now
        self.scores[one] = self.scores.get(one, 0.0) + 1 if score is None else score

    def _forget(self, one: int) -> None:
        for kept in (self.rows, self._state, self.touched, self.scores, self._times):
            kept.pop(one, None)

    def set(self, sets: Sequence[tuple[Any, ...]], now: int = 0) -> None:
        """One round: (ids, values) of each worker, and scores if the table needs them."""
        self._begin(now)
        for ids, values, *scores in sets:
            given = scores[0].reshape(-1).tolist() if scores else [None] * ids.size
            for one, row, score in zip(ids.reshape(-1).tolist(), values.reshape(-1, self.dim), given):
                first = self.touched.get(one) != self.updates
                self.rows[one] = row.copy()
                self._state.setdefault(one, {})
                if first or score is not None:
                    self._name(one, score)
                self.counts.pop(one, None), self._counted.pop(one, None)
        self._drop()

    def remove(self, removed: Sequence[Any], now: int = 0) -> None:
        """One round: ids of each worker."""
        self._begin(now)
        for one in {one for ids in removed for one in ids.reshape(-1).tolist()}:
            self.removed += one in self.rows
            self._forget(one)
            self.counts.pop(one, None), self._counted.pop(one, None)
        self._drop()

    def push(self, pushes: Sequence[tuple[Any, ...]], now: int = 0) -> None:
        """One round: (ids, gradients) of each worker, and scores if the table needs them."""
        self._begin(now)
        latest: dict[int, float] = {}
        for ids, _, *given in pushes:
            latest |= dict(zip(ids.reshape(-1).tolist(), given[0].reshape(-1).tolist())) if given else {}
        total: dict[int, Any] = {}
        for ids, gradients, *_ in pushes:
            own: dict[int, Any] = {}
            for one, gradient in zip(ids.reshape(-1).tolist(), gradients.reshape(-1, self.dim).astype(self._wide)):
                own[one] = own[one] + gradient if one in own else gradient
            for one, gradient in own.items():
                gradient = gradient.astype(self.dtype).astype(self._wide)  # as it travels
                total[one] = total[one] + gradient if one in total else gradient
        refused = {one for one in total if one not in self.rows} - self._admitted({*total} - {*self.rows})
        self.refused += len(refused)
        rate = self._wide.type(at(self.numbers["learning_rate"], self.updates))
        for one, gradient in total.items():
            if one in refused:
                continue
            state, numbers = self._state.setdefault(one, {}), self.numbers
            kept = self._wide.type(1 - at(numbers["learning_rate"], self.updates) * numbers.get("weight_decay", 0))
            gradient = clipped(gradient, numbers.get("clipnorm", 0))
            row = self._update(self._row(one).astype(self._wide) * kept, gradient, state, rate, numbers)
            self.rows[one] = self._rounded(one, row)
            self._name(one, latest.get(one))
        self._drop()

    def _rounded(self, one: int, row: Any) -> Any:
        if not self._stochastic:
            return row.astype(self.dtype)
        stream = plainly_mixed((one % 2**64) ^ self._key ^ 0x2545F4914F6CDD1D)
        stream = plainly_mixed((stream + self.updates * 0x9E3779B97F4A7C15) % 2**64)
        columns = np.arange(1, self.dim + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return rounded_up_or_down(row, mixed(np.uint64(stream) + columns), self.dtype)

    def _drop(self) -> None:
        unused, expired, excess = self._due(self.touched, self._times, self._limit, self._evict_by != "age")
        for number, dropped in enumerate((unused, expired, excess)):
            self.reasons[number] += len(dropped)
            for one in dropped:
                self._forget(one)
            self.evicted += dropped
        self._drop_counts()

    def _drop_counts(self) -> None:
        if self._admit is not None and not isinstance(self._admit, Chance):
            for dropped in self._due(self._counted, self._counted_times, self._admit.remember, False):
                for one in dropped:
                    del self.counts[one], self._counted[one]

    def _due(
        self, touched: dict[int, int], times: dict[int, int], limit: int, scored: bool
    ) -> tuple[set[int], set[int], set[int]]:
        """Which ids go since they were not named for long, by updates and by the clock, and since they are too many."""
        unused = {one for one, step in touched.items() if self._evict and step <= self.updates - self._evict}
        expired = {one for one in touched if self._after and times[one] <= self.now - self._after} - unused
        due, excess = unused | expired, set[int]()
        for server in range(self.servers if limit else 0):
            share = limit // self.servers + (server < limit % self.servers)
            here = [one for one in touched if one not in due and self._owner(one) == server]
            here.sort(key=lambda one: (self.scores[one] if scored else 0, touched[one], one))
            excess.update(here[: max(0, len(here) - share)])
        return unused, expired, excess

    def _admitted(self, new: set[int]) -> set[int]:
        """Which of the ids without a row, all of which this update names, get one."""
        if isinstance(self._admit, Chance):
            return {one for one in new if self._lucky(one, self._admit.probability)}
        if self._admit is None:
            return new
        for one in new:
            self.counts[one], self._counted[one] = self.counts.get(one, 0) + 1, self.updates
            self._counted_times[one] = self.now
        reached = {one for one in new if self.counts[one] >= self._admit.times}
        for one in reached:
            del self.counts[one], self._counted[one]
        return reached

    def _lucky(self, one: int, probability: float) -> bool:
        stream = plainly_mixed((one % 2**64) ^ self._key ^ 0x5851F42D4C957F2D)
        return plainly_mixed((stream + self.updates * 0x9E3779B97F4A7C15) % 2**64) < probability * 2**64

    def _owner(self, one: int) -> int:
        return int(owners_of(np.array([one], np.int64), self.servers)[0])

    def _row(self, one: int) -> Any:
        if one in self.rows:
            return self.rows[one]
        if not isinstance(self._init, Init):
            return np.asarray(self._init(np.array([one])), self.dtype)[0]
        ((_, rows),) = first_rows(self._key, self._init, np.array([one], np.int64), self.dim, self.dtype)
        return rows[0]


class ServingCopy:
    """What a program that serves makes of exported files."""

    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}

    def read(self, path: str) -> int:
        """Return how many rows the file has."""
        with TensorFile(path) as file:
            ids, values, dropped = (file.get(name) for name in ("ids", "values", "dropped"))
            if json.loads(file.metadata["mpips.export"])["since"] == 0:
                self.rows.clear()
        for one in dropped.tolist():
            self.rows.pop(one, None)
        self.rows.update(zip(ids.tolist(), values, strict=True))
        return len(ids)

    def check(self, *expected: ReferenceTable) -> None:
        rows = {one: row.tobytes() for table in expected for one, row in table.rows.items()}
        assert {one: row.tobytes() for one, row in self.rows.items()} == rows
