"""A table as a serial dictionary of rows, in plain NumPy and row by row: what tests compare a store's tables with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpips.store.tables.admission import Chance
from mpips.store.tables.initial import first_rows, key_of, owners_of


def sgd(row: Any, gradient: Any, state: dict[str, Any], step: int) -> Any:
    return row - gradient * row.dtype.type(0.1)


def row_adagrad(row: Any, gradient: Any, state: dict[str, Any], step: int) -> Any:
    number = row.dtype.type
    state["sum"] = state.get("sum", number(0)) + np.add.reduce(gradient * gradient) / number(len(row))
    return row - gradient * number(0.1) / (np.sqrt(state["sum"]) + number(1e-10))


def adagrad(row: Any, gradient: Any, state: dict[str, Any], step: int) -> Any:
    number = row.dtype.type
    state["sum"] = state.get("sum", np.zeros_like(row)) + gradient * gradient
    return row - gradient * number(0.1) / (np.sqrt(state["sum"]) + number(1e-10))


def adam(row: Any, gradient: Any, state: dict[str, Any], step: int) -> Any:
    number = row.dtype.type
    count = state["count"] = state.get("count", 0) + 1
    first = state["first"] = state.get("first", np.zeros_like(row)) * number(0.9) + gradient * number(1 - 0.9)
    squares = gradient * gradient * number(1 - 0.999)
    second = state["second"] = state.get("second", np.zeros_like(row)) * number(0.999) + squares
    below = np.sqrt(second / number(1 - 0.999**count)) + number(1e-8)
    return row - first / number(1 - 0.9**count) * number(0.1) / below


UPDATES: dict[str, Callable[..., Any]] = {
    "sgd": sgd, "row_adagrad": row_adagrad, "adagrad": adagrad, "adam": adam,
}  # fmt: skip


def plainly_mixed(word: int) -> int:
    """SplitMix64's finalizer, in Python's whole numbers."""
    mask = 2**64 - 1
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & mask
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & mask
    return word ^ (word >> 31)


class ReferenceTable:
    """Rows in a dictionary, all with learning rate 0.1; gradients are summed from zero, from first to last.

    `evict`, `limit`, `admit`: as `KVStore.table` says; 0: none. `servers`: how many share the limits."""

    def __init__(
        self, name: str, dim: int, dtype: Any, bound: float, optimizer: str, seed: int = 0, evict: int = 0,
        limit: int = 0, servers: int = 1, admit: Any = None,
    ) -> None:  # fmt: skip
        self._evict, self._limit, self._servers, self._admit = evict, limit, servers, admit
        self.touched: dict[int, int] = {}
        self.evicted: list[int] = []
        self.counts: dict[int, int] = {}
        self._counted: dict[int, int] = {}  # by id the update that has counted last
        self.refused = 0
        self.dim, self.dtype, self._bound = dim, np.dtype(dtype), bound
        self._key, self._update = key_of(seed, name), UPDATES[optimizer]
        self.rows: dict[int, Any] = {}
        self._state: dict[int, dict[str, Any]] = {}
        self._step = 0

    def pull(self, ids: Any) -> Any:
        flat = [self._row(int(one)) for one in ids.reshape(-1)]
        return np.array(flat, self.dtype).reshape(*ids.shape, self.dim)

    def push(self, pushes: Sequence[tuple[Any, Any]]) -> None:
        """One round: (ids, gradients) of each worker."""
        self._step += 1
        total: dict[int, Any] = {}
        for ids, gradients in pushes:
            own: dict[int, Any] = {}
            for one, gradient in zip(ids.reshape(-1).tolist(), gradients.reshape(-1, self.dim)):
                own[one] = own[one] + gradient if one in own else gradient
            for one, gradient in own.items():
                total[one] = total[one] + gradient if one in total else gradient
        refused = {one for one in total if one not in self.rows} - self._admitted({*total} - {*self.rows})
        self.refused += len(refused)
        for one, gradient in total.items():
            if one in refused:
                continue
            state = self._state.setdefault(one, {})
            self.rows[one] = self._update(self._row(one), gradient, state, self._step)
            self.touched[one] = self._step
        self._drop()

    def _drop(self) -> None:
        due = self._due(self.touched, self._limit)
        for one in due:
            del self.rows[one], self._state[one], self.touched[one]
        self.evicted += due

    def _due(self, touched: dict[int, int], limit: int) -> set[int]:
        due = {one for one, step in touched.items() if self._evict and step <= self._step - self._evict}
        for server in range(self._servers if limit else 0):
            share = limit // self._servers + (server < limit % self._servers)
            here = [one for one in touched if one not in due and self._owner(one) == server]
            here.sort(key=lambda one: (touched[one], one))
            due.update(here[: max(0, len(here) - share)])
        return due

    def _admitted(self, new: set[int]) -> set[int]:
        """Which of the ids without a row, all of which this update names, get one."""
        if isinstance(self._admit, Chance):
            return {one for one in new if self._lucky(one, self._admit.probability)}
        if self._admit is None:
            return new
        for one in new:
            self.counts[one], self._counted[one] = self.counts.get(one, 0) + 1, self._step
        for one in self._due(self._counted, self._admit.remember):
            del self.counts[one], self._counted[one]
        reached = {one for one in new if self.counts.get(one, 0) >= self._admit.times}
        for one in reached:
            del self.counts[one], self._counted[one]
        return reached

    def _lucky(self, one: int, probability: float) -> bool:
        stream = plainly_mixed((one % 2**64) ^ self._key ^ 0x5851F42D4C957F2D)
        return plainly_mixed((stream + self._step * 0x9E3779B97F4A7C15) % 2**64) < probability * 2**64

    def _owner(self, one: int) -> int:
        return int(owners_of(np.array([one], np.int64), self._servers)[0])

    def _row(self, one: int) -> Any:
        if one in self.rows:
            return self.rows[one]
        ((_, rows),) = first_rows(self._key, self._bound, np.array([one], np.int64), self.dim, self.dtype)
        return rows[0]
