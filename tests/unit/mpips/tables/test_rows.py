"""Rows of a table on a server: first values, the index of ids, sums and updates, against plain dictionaries."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpips.store.keys.row_sums import distinct, owners_of, sum_into, summed
from mpips.tables import halves, places
from mpips.tables.client import deal
from mpips.tables.initial import first_rows, key_of, uniform
from mpips.tables.row_optimizers import ROW_OPTIMIZERS, create
from mpips.tables.rows import TableRows
from tests.mpi.mpips.reference_table import ReferenceTable, plainly_mixed
from tests.unit.mpips.tables.cards import card_of

IDS = st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9)


def rows_of(ids: np.ndarray, dim: int = 4, dtype: Any = np.float32, key: int = 1) -> np.ndarray:
    return np.concatenate([rows for _, rows in first_rows(key, uniform(0.5), ids, dim, dtype)])


def test_first_values_depend_on_key_id_and_column_alone() -> None:
    ids = np.arange(-30_000, 30_000)
    whole = rows_of(ids)
    order = np.random.default_rng(1).permutation(len(ids))
    assert (rows_of(ids[order]) == whole[order]).all()
    assert (rows_of(ids, dim=2) == whole[:, :2]).all()
    assert (rows_of(ids[5:6])[0] == whole[5]).all()
    others = [rows_of(ids, key=key_of(*which)) for which in ((0, "a"), (0, "b"), (1, "a"))]
    assert (others[0] != others[1]).mean() > 0.99 and (others[0] != others[2]).mean() > 0.99


def test_first_values_stay_as_they_are() -> None:
    found = rows_of(np.array([0, -1, 2**63 - 1]), 2, np.float64, key_of(7, "users")).reshape(-1)
    again = []
    mask = 2**64 - 1
    for one in (0, -1, 2**63 - 1):
        for column in (1, 2):
            stream = plainly_mixed((one & mask) ^ key_of(7, "users"))
            word = plainly_mixed((stream + column * 0x9E3779B97F4A7C15) & mask)
            again.append((word >> 11) * (1.0 / 2**53) - 0.5)
    assert found.tolist() == again


@pytest.mark.parametrize("ids", [np.arange(100_000), np.arange(100_000) << 40, -np.arange(100_000) * 64])
def test_first_values_are_spread_evenly(ids: np.ndarray) -> None:
    values = rows_of(ids, 2, np.float64)
    assert np.abs(values).max() <= 0.5
    counts = np.histogram(values, 64, (-0.5, 0.5))[0]
    expected = values.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 6 * np.sqrt(2 * 63)  # chi-squared, six deviations
    assert abs(np.corrcoef(values[:, 0], values[:, 1])[0, 1]) < 0.02
    assert abs(np.corrcoef(values[1:, 0], values[:-1, 0])[0, 1]) < 0.02


@pytest.mark.parametrize("ids", [np.arange(90_000), np.arange(90_000) << 32, np.arange(90_000) * 1024])
def test_owners_share_rows_evenly(ids: np.ndarray) -> None:
    counts = np.bincount(owners_of(ids, 3), minlength=3)
    assert abs(counts / 30_000 - 1).max() < 0.03


def merged(ids: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = distinct(ids)
    once, total = np.empty(len(found.ids), np.int64), np.empty((len(found.ids), gradients.shape[1]), gradients.dtype)
    sum_up = halves.sum_into if gradients.itemsize == 2 else sum_into
    sum_up(total, gradients, deal(found, [0], [0], once))
    return once, total


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from(sorted(ROW_OPTIMIZERS)),
    st.integers(1, 9),
    st.sampled_from([("float32", "nearest"), *itertools.product(("float16", "bfloat16"), ("nearest", "stochastic"))]),
)
def test_rounds_equal_a_serial_dictionary(
    rounds: list[list[list[int]]], optimizer: str, dim: int, kind: tuple[str, str]
) -> None:
    key, random, (dtype, rounding) = key_of(0, "t"), np.random.default_rng(3), kind
    table = TableRows(card_of(dim, dtype, optimizer, key, rate=0.1, stochastic=rounding == "stochastic"))
    expected = ReferenceTable("t", dim, dtype, 0.5, optimizer, rounding=rounding)
    for step, workers in enumerate(rounds):
        pushes = [(np.array(ids, np.int64), random.standard_normal((len(ids), dim)).astype(dtype)) for ids in workers]
        expected.push(pushes)
        sum_up = halves.summed if "16" in dtype else summed
        table.update(*sum_up([merged(*push) for push in pushes]), step + 1)
        ids = np.unique(np.concatenate([ids for ids, _ in pushes]))
        assert table.pull(ids).tobytes() == expected.pull(ids).tobytes()
    assert table.count == len(expected.rows)


@pytest.mark.parametrize("dtype, largest", [("float16", 65504.0), ("bfloat16", 3e38)])
@pytest.mark.parametrize("stochastic", [False, True])
def test_an_update_that_leaves_the_range_of_half_rows_is_an_error(dtype: str, largest: float, stochastic: bool) -> None:
    """float32 represents the new row of float16, but not that of bfloat16."""
    card = card_of(2, dtype, bound=0.0, rate=1.0, stochastic=stochastic)
    table, silent = TableRows(card, checks_finite=True), TableRows(card)
    ids, gradients = np.array([4, 9]), np.array([[1, 2], [3, -largest]], np.float32)
    for rows in (table, silent):
        rows.update(ids, gradients, 1)
        assert np.isfinite(rows.pull(ids)).all()
    silent.update(ids, gradients, 2)
    assert not np.isfinite(silent.pull(ids)[1, 1])
    with pytest.raises(FloatingPointError, match=rf"a value of the row of id 9 is inf in {dtype}: look at"):
        table.update(ids, gradients, 2)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(IDS, max_size=12), min_size=1, max_size=25),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([0, 1, 4, 9]),
    st.integers(0, 24),
    st.integers(0, 24),
    st.integers(0, 24),
)
def test_rows_are_dropped_as_a_dictionary_drops_them(
    rounds: list[list[int]], evict: int, limit: int, moved_at: int, restored_at: int, frozen_at: int
) -> None:
    key, random = key_of(0, "t"), np.random.default_rng(3)

    def made() -> TableRows:
        return TableRows(card_of(2, "float32", "adam", key, rate=0.1, evict=evict), limit)

    frozen, then = None, dict[str, np.ndarray]()
    table, expected = made(), ReferenceTable("t", 2, np.float32, 0.5, "adam", evict=evict, limit=limit)
    for step, ids in enumerate(rounds):
        push = np.array(ids, np.int64), random.standard_normal((len(ids), 2)).astype(np.float32)
        expected.push([push])
        table.update(*merged(*push), step + 1)
        every = np.unique(np.array([one for part in rounds for one in part], np.int64))
        assert table.pull(every).tobytes() == expected.pull(every).tobytes()
        assert (table.count, table.evicted) == (len(expected.rows), len(expected.evicted))
        if step == frozen_at:
            frozen, then = table.freeze(), table.freeze().read(0, 10**6)
        if step == restored_at:  # as where another process takes over the arrays
            table.positions.restore(table.positions.top)
        if step == moved_at:  # as a file that was saved moves them
            table, before = made(), table
            parts = before.freeze().read(0, 10**6)
            table.put_rows({name: array[::-1] for name, array in parts.items()})
            table.evicted = before.evicted
    if frozen is not None:  # nothing of that moment has changed
        assert frozen.count == len(then["ids"])
        parts = [frozen.read(start, start + 3) for start in range(0, frozen.top, 3)]
        assert all((np.concatenate([part[name] for part in parts]) == then[name]).all() for name in then if parts)


def test_a_full_machine_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "SEEN_BYTES", 1 << 10)
    table = TableRows(card_of(2, "float32"), limit=5)
    first = np.arange(5)
    table.update(first, np.ones((5, 2), np.float32), 1)
    rows = table.pull(first)
    monkeypatch.setattr(places, "free_memory", lambda: 0)
    many = np.arange(1000)
    with pytest.raises(MemoryError, match=r"no memory for 995 rows .* beside the 5 that are there"):
        table.update(many, np.ones((len(many), 2), np.float32), 2)
    assert table.count == 5 and table.pull(first).tobytes() == rows.tobytes()
    table.update(np.arange(5, 10), np.ones((5, 2), np.float32), 2)  # in the places of others
    assert (table.count, table.evicted) == (5, 5)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([(1, 0), (3, 0), (0, 700), (0, 5000), (4, 3000)]),
    st.sampled_from(["age", "count"]),
)
def test_many_rows_come_and_go(seed: int, life: tuple[int, int], by: str) -> None:
    random, (evict, limit) = np.random.default_rng(seed), life
    table = TableRows(card_of(1, "float64", bound=0.0, rate=1.0, evict=evict, evict_by=by), limit)
    alive: dict[int, list[int]] = {}  # of each id the update that named it last, and how many have
    most = 0
    for step in range(1, 40):
        ids = np.unique(random.zipf(1.2, int(random.integers(0, 4000))) % 20_000 - 7)
        table.update(ids, -np.ones((len(ids), 1)), step)
        for one in ids.tolist():
            alive[one] = [step, alive.get(one, [0, 0])[1] + 1]
        most = max(most, len(alive))
        order = sorted(alive, key=lambda one: (alive[one][1] if by == "count" else 0, alive[one][0], one))
        order = [one for one in order if not (evict and alive[one][0] <= step - evict)]
        alive = {one: alive[one] for one in (order[-limit:] if limit else order)}
        assert table.count == len(alive)
        assert table.pull(np.arange(-7, 20_000))[:, 0].sum() == sum(count for _, count in alive.values())
    every = np.array(sorted(alive), np.int64)
    assert table.pull(every)[:, 0].tolist() == [alive[one][1] for one in every.tolist()]
    assert table.nbytes <= (table.row_bytes + 24 + 12 + 8) * most + 100_000  # dropped rows' memory is used again


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=12), st.integers(0, 2**32), st.booleans())
def test_the_index_finds_every_row_while_it_grows(sizes: list[int], seed: int, dense: bool) -> None:
    random = np.random.default_rng(seed)
    table = TableRows(card_of(1, "float64"))
    seen: set[int] = set()
    for size in sizes:
        ids = np.unique(random.integers(0, 9000, size) if dense else random.integers(-(2**63), 2**63 - 1, size))
        assert (table.pull(ids) == rows_of(ids, 1, np.float64, 5)).all()
        table.update(ids, np.zeros((len(ids), 1)), 1)
        seen.update(ids.tolist())
        every = np.array(sorted(seen))
        assert (table.pull(every) == rows_of(every, 1, np.float64, 5)).all()
        assert table.count == len(seen)


@pytest.mark.parametrize("name", sorted(ROW_OPTIMIZERS))
def test_bits_of_a_row_do_not_depend_on_others(name: str) -> None:
    random, optimizer = np.random.default_rng(1), create(name, {"learning_rate": 0.1})
    for dim in (1, 3, 8, 33, 128):
        rows = random.standard_normal((50, dim)).astype(np.float32)
        state = [np.abs(random.standard_normal((50, width))).astype(np.float32) for width in optimizer.widths(dim)]
        counts, gradients = random.integers(1, 9, 50).astype(np.int32), random.standard_normal((50, dim))
        gradients = gradients.astype(np.float32)
        single = [(rows[i : i + 1].copy(), [array[i : i + 1].copy() for array in state]) for i in range(50)]
        optimizer.update(rows, gradients, state, counts, 1)
        for i, (row, its_state) in enumerate(single):
            optimizer.update(row, gradients[i : i + 1], its_state, counts[i : i + 1], 1)
            assert row.tobytes() == rows[i].tobytes()
            assert all(mine.tobytes() == array[i].tobytes() for mine, array in zip(its_state, state))


@pytest.mark.parametrize("bound", [-1, float("nan"), float("inf"), "wide", None])
def test_a_bad_bound_is_refused(bound: Any) -> None:
    with pytest.raises(ValueError, match="give a finite number >= 0"):
        uniform(bound)


@pytest.mark.parametrize(
    "name, options, sentence",
    [
        ("rprop", {}, "the known ones are sgd, adagrad, row_adagrad, adam"),
        (None, {}, "unknown optimizer None"),
        ("sgd", {"learning_rate": -1}, "give a number >= 0"),
        ("adam", {"beta1": 1}, "give a number in"),
        ("adagrad", {"momentum": 1}, "it takes those of optimizer 'adagrad': learning_rate, epsilon"),
    ],
)
def test_a_bad_optimizer_is_refused(name: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ValueError, TypeError), match=sentence):
        create(name, options)
