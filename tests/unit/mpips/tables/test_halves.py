"""A number is rounded to one of two neighbours of 16 bits, with the right probability, also by compiled loops."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from collectives.kernels import engine
from mpips.store.keys.row_sums import mixed
from mpips.tables import kernels
from mpips.tables.halves import NEAREST, round_into, rounded_at_random, streams_of, widened
from tests.mpi.mpips.reference_table import rounded_up_or_down

HALVES = [np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)]


def numbers_of_all_sizes(dtype: np.dtype) -> np.ndarray:
    """float32 numbers from the smallest to the largest, many of them near the edges of a type of 16 bits."""
    random, info = np.random.default_rng(1), np.finfo(np.float32)
    any_bits = random.integers(0, 2**32, 40_000, np.uint32).view(np.float32)
    edges = np.array([0, 1, info.tiny, info.smallest_subnormal, info.max, 65504, 65519.9, 65520, 65536, 2.0**-14])
    near = np.ldexp(random.random(20_000), random.integers(-30, 18, 20_000))
    every = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    return np.concatenate([any_bits, *np.array([edges, -edges], np.float32), near.astype(np.float32), every])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_number_goes_to_one_of_its_neighbours(dtype: np.dtype) -> None:
    x = numbers_of_all_sizes(dtype)
    words = mixed(np.arange(len(x), dtype=np.uint64))
    found, finite = rounded_at_random(x, words, dtype), np.isfinite(x)
    assert found[finite].tobytes() == rounded_up_or_down(x[finite], words[finite], dtype).tobytes()
    exact = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(all="ignore"):  # some NaN are signals
        assert np.array_equal(found[~finite], x[~finite].astype(dtype), equal_nan=True)
        same = rounded_at_random(exact.astype(np.float32), mixed(np.arange(2**16, dtype=np.uint64)), dtype)
        assert np.array_equal(same, exact, equal_nan=True)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_mean_of_rounded_numbers_is_the_number(dtype: np.dtype) -> None:
    count, step = 100_000, float(ml_dtypes.finfo(dtype).eps)
    for share in (0.5, 0.03, 0.9):
        x = np.full((count, 1), -1 - share * step, np.float32)
        values = np.zeros((count, 1), dtype)
        round_into(values, x, streams_of(5, np.arange(count), 3))
        assert set(np.unique(values.astype(np.float64))) == {-1.0, -1 - step}
        assert abs((values.astype(np.float64).mean() + 1) / -step - share) < 6 * np.sqrt(share * (1 - share) / count)


def test_random_numbers_depend_on_key_id_update_and_column_alone() -> None:
    rows = np.full((60, 8), 1.003, np.float32)

    def rounded(key: int, ids: Any, update: int) -> Any:
        values = np.zeros((len(ids), 8), ml_dtypes.bfloat16)
        round_into(values, rows[: len(ids)], streams_of(key, ids, update))
        return values.astype(np.float32)

    ids = np.arange(60) - 30
    first = rounded(1, ids, 7)
    assert (rounded(1, ids[::-1][:9].copy(), 7) == first[::-1][:9]).all()
    for other in (rounded(2, ids, 7), rounded(1, ids, 8), rounded(1, ids + 60, 7)):
        assert (other != first).any()
    assert (first != first[:, :1]).any()


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("stochastic", [False, True])
def test_compiled_loops_round_like_numpy(dtype: np.dtype, stochastic: bool) -> None:
    pytest.importorskip("numba")
    if engine.status().engine != "numba":
        pytest.skip(engine.status().reason)
    x = numbers_of_all_sizes(dtype)
    x = x[~np.isnan(x)].reshape(-1, 1)
    ids, found = np.arange(len(x)) * 7, []
    loops = kernels.widen_rows, kernels.round_rows
    for loop in loops:
        loop.prepare(dtype)
    engine.load_all()
    assert all(loop.ready(np.zeros(1, dtype)) for loop in loops)
    for wanted in (engine.numpy_only, nullcontext):
        values = np.zeros(x.shape, dtype)
        with wanted():
            round_into(values, x, streams_of(3, ids, 2) if stochastic else NEAREST)
            found.append((values.tobytes(), widened(values).tobytes()))
    assert found[0] == found[1]
