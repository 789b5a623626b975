"""First values: the distributions, what they depend on, and functions of ids."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest

import mpips
from mpips.tables import initial
from mpips.tables.initial import Init, key_of
from mpips.tables.make import card_of
from mpips.tables.messages import TableOptions
from mpips.tables.row_optimizers import RowSGD
from mpips.tables.rows import TableRows
from tests.mpi.mpips.reference_table import plainly_mixed

NORMAL, TRUNCATED = mpips.normal(-0.25, 2.0), mpips.truncated_normal(-0.25, 2.0)


def rows_of(init: Init, ids: np.ndarray, dim: int = 4, dtype: str = "float64", seed: int = 0) -> np.ndarray:
    options = TableOptions(dim, dtype, init, RowSGD(), seed, None, None, None)
    return TableRows(card_of("t", options)).pull(ids)


@pytest.mark.parametrize("init", [NORMAL, TRUNCATED])
def test_values_depend_on_seed_id_and_column_alone(init: Init) -> None:
    ids = np.arange(-3000, 3000)
    whole = rows_of(init, ids)
    order = np.random.default_rng(1).permutation(len(ids))
    assert (rows_of(init, ids[order]) == whole[order]).all()
    assert (rows_of(init, ids, dim=2) == whole[:, :2]).all()
    assert (rows_of(init, ids[5:6])[0] == whole[5]).all()
    assert (rows_of(init, ids, seed=1) != whole).mean() > 0.99
    assert (rows_of(init, ids, dtype="float32") == whole.astype(np.float32)).all()


def test_normal_values_are_the_inverse_of_the_distribution() -> None:
    """Of the same random words, in Python's arithmetic."""
    ids, found = [0, -1, 2**63 - 1, *range(300)], []
    for one in ids:
        word = plainly_mixed(plainly_mixed((one % 2**64) ^ key_of(0, "t")) + 0x9E3779B97F4A7C15 & 2**64 - 1)
        found.append(NormalDist(-0.25, 2.0).inv_cdf(((word >> 12) + 0.5) / 2**52))
    assert np.allclose(rows_of(NORMAL, np.array(ids), 1)[:, 0], found, rtol=0, atol=2e-8)


@pytest.mark.parametrize("share", [1.0, 0.9544997])
def test_far_values_are_exact_enough(share: float) -> None:
    words = np.array([0, 1, 2, 1000, 2**40, 2**52 - 1], np.uint64) << np.uint64(12)
    words = np.concatenate([words, np.linspace(0, 2**64 - 2049, 1001).astype(np.uint64)])
    parts = (((int(word) >> 12) + 0.5) / 2**52 - 0.5 for word in words.tolist())
    # The lower half, where 0.5 + q is exact.
    expected = [NormalDist().inv_cdf(0.5 - abs(q * share)) * (-1 if q > 0 else 1) for q in parts]
    found = initial.normals(words, share)
    assert np.allclose(found, expected, rtol=2e-9, atol=2e-9)
    assert abs(found).max() < (2 if share < 1 else 8.3)


@pytest.mark.parametrize("ids", [np.arange(50_000), np.arange(50_000) << 40, -np.arange(50_000) * 64])
def test_normal_values_are_spread_normally(ids: np.ndarray) -> None:
    normal, cut = ((rows_of(init, ids, 2) + 0.25) / 2 for init in (NORMAL, TRUNCATED))
    edges = np.array([NormalDist().inv_cdf(number / 64) for number in range(1, 64)])
    counts = np.bincount(np.searchsorted(edges, normal.reshape(-1)), minlength=64)
    expected = normal.size / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 6 * np.sqrt(2 * 63)  # chi-squared, six deviations
    assert abs(np.corrcoef(normal[:, 0], normal[:, 1])[0, 1]) < 0.03
    assert abs(np.corrcoef(normal[1:, 0], normal[:-1, 0])[0, 1]) < 0.03
    assert abs(cut).max() <= 2 and abs(cut.mean()) < 0.02 and abs(cut.std() - 0.8796) < 0.01


def test_constants_are_exact() -> None:
    for dtype in ("float32", "float64"):
        assert (rows_of(mpips.constant(0.1), np.arange(99), dtype=dtype) == np.dtype(dtype).type(0.1)).all()


@pytest.fixture
def registered() -> Any:
    before = dict(initial._FUNCTIONS)
    yield mpips.register_init
    initial._FUNCTIONS.clear()
    initial._FUNCTIONS.update(before)


def test_a_function_gives_first_values_of_its_ids(registered: Callable[..., Any]) -> None:
    @registered
    def halves(ids: np.ndarray) -> np.ndarray:
        given.append(ids)
        return np.stack([ids, ids / 2], axis=1)

    given: list[np.ndarray] = []
    ids = np.array([4, -3, 10**6])
    table = TableRows(card_of("t", TableOptions(2, "float32", Init("halves"), RowSGD(1.0), 0, None, None, None)))
    assert table.pull(ids).tolist() == [[4, 2], [-3, -1.5], [10**6, 5 * 10**5]]
    table.update(ids[:2], np.ones((2, 2), np.float32), 1)
    assert table.pull(ids).tolist() == [[3, 1], [-4, -2.5], [10**6, 5 * 10**5]]
    assert not any(np.shares_memory(ids, each) for each in given)
    assert initial.checked("t", halves) == Init("halves")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("given", ["int64", "float16", "bfloat16", "float32", "float64"])
def test_a_function_gives_first_values_of_half_rows(registered: Callable[..., Any], dtype: str, given: str) -> None:
    @registered
    def thirds(ids: np.ndarray) -> np.ndarray:
        return np.stack([ids, ids / 3], axis=1).astype(given)

    ids = np.array([1, -4, 1000])
    found = rows_of(Init("thirds"), ids, 2, dtype)
    assert found.dtype == dtype
    assert found.tobytes() == thirds(ids).astype(dtype).tobytes()


def test_a_function_that_gives_complex_numbers_is_refused(registered: Callable[..., Any]) -> None:
    @registered
    def complex_ones(ids: np.ndarray) -> np.ndarray:
        return np.ones((len(ids), 2), np.complex64)

    for dtype in ("float16", "bfloat16", "float32"):
        with pytest.raises(ValueError, match=f"returned complex64 of shape .* for 1 ids, the first 0, .*need {dtype}"):
            rows_of(Init("complex_ones"), np.arange(1), 2, dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("value", [np.inf, np.nan, 7e4])
def test_a_function_that_gives_no_finite_numbers_is_refused(
    registered: Callable[..., Any], dtype: str, value: float
) -> None:
    @registered
    def odd(ids: np.ndarray) -> np.ndarray:
        return np.where(ids[:, None] == 8, [1.0, value], 0.5)

    ids = np.array([3, 8, 4])
    if value == 7e4 and dtype != "float16":
        assert rows_of(Init("odd"), ids, 2, dtype)[1, 1] == np.float64(value).astype(dtype)
        return
    sentence = f"table 't': the function 'odd' of init returned {value} for id 8, which is (inf|nan) in {dtype}"
    with pytest.raises(ValueError, match=sentence):
        rows_of(Init("odd"), ids, 2, dtype)


def test_a_function_that_is_not_known_is_refused(registered: Callable[..., Any]) -> None:
    def zeros(ids: np.ndarray) -> np.ndarray:
        return np.zeros((len(ids), 4))

    with pytest.raises(ValueError, match=r"put @mpips.register_init above it, before mpips.create"):
        initial.checked("t", zeros)
    with pytest.raises(ValueError, match=r"by the function 'zeros', which is not known here"):
        rows_of(Init("zeros"), np.arange(3))
    registered(zeros)
    assert not rows_of(Init("zeros"), np.arange(3)).any()
    with pytest.raises(
        ValueError,
        match=r"returned float64 of shape \(3, 4\) for 3 ids, the first 0, which need float64 of shape \(3, 5\)",
    ):
        rows_of(Init("zeros"), np.arange(3), dim=5)


def test_one_name_stands_for_one_function(registered: Callable[..., Any]) -> None:
    def made(number: int) -> Callable[[np.ndarray], np.ndarray]:
        def give(ids: np.ndarray) -> np.ndarray:
            return np.full((len(ids), 1), number)

        return give

    first = registered(made(1))
    assert registered(first) is first
    with pytest.raises(ValueError, match=r"'give' is another function, .*: choose another name"):
        registered(made(2))
    first.__name__ = "uniform"
    with pytest.raises(ValueError, match=r"'uniform' is a rule of mpips: choose another name"):
        registered(first)
    for wrong in (lambda ids: ids, "halves", 3):
        with pytest.raises(TypeError, match="give a function with a name"):
            registered(wrong)


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: mpips.normal(std=-1), "normal.std=-1.: give a finite number >= 0"),
        (lambda: mpips.normal(float("nan")), "normal.mean=nan.: give a finite number"),
        (lambda: mpips.truncated_normal(std="wide"), "truncated_normal.std='wide'.: give a finite number >= 0"),  # type: ignore[arg-type]
        (lambda: mpips.constant(float("inf")), "constant.value=inf.: give a finite number"),
        (lambda: initial.checked("t", 0.5), "init=0.5: give mpips.uniform, mpips.normal, .*, or a function"),
        (lambda: initial.checked("t", np.zeros), "put @mpips.register_init above it"),
    ],
)
def test_bad_first_values_are_refused(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()
