"""Compiled loops give tables the bits that NumPy gives them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from collectives.kernels import engine
from mpips.store.keys.row_sums import distinct, owners_of, sum_into, summed
from mpips.tables import halves, initial, kernels
from mpips.tables.client import deal
from mpips.tables.row_optimizers import ROW_OPTIMIZERS
from mpips.tables.rows import TableRows
from tests.unit.mpips.tables.cards import card_of

pytest.importorskip("numba")
if engine.status().engine != "numba":
    pytest.skip(engine.status().reason, allow_module_level=True)

WIDE = range(-(2**63), 2**63, 2**55)


INITS: dict[str, dict[str, Any]] = {
    "uniform": {},
    "normal": {"init": "normal", "mean": 0.1},
    "truncated": {"init": "truncated_normal"},
    "constant": {"bound": 0.0, "mean": -0.3},
}


def rounds(optimizer: str, dim: int, dtype: str, init: str = "uniform", **more: Any) -> Iterator[bytes]:
    """Rows after each of some rounds of three workers with repeated ids, as server 0 of 2 sees them.

    In the last round only one worker pushes."""
    table = TableRows(card_of(dim, dtype, optimizer, 7, rate=0.1, **INITS[init], **more))
    random = np.random.default_rng(5)
    for step in range(1, 5):
        parts = []
        for _ in range(3 if step < 4 else 1):
            ids = np.concatenate([random.integers(-200, 200, 300), random.choice(WIDE, 50)])
            gradients = random.standard_normal((len(ids), dim)).astype(dtype)
            gradients[::7] = -0.0
            found = distinct(ids, 2)
            first = found.per_server[0]
            rows, words = np.zeros((len(found.ids) + 3, dim), dtype), np.zeros(len(found.ids) + 4, np.int64)
            places = deal(found, [0, first + 3], [0, first + 4], words)
            (halves.sum_into if "16" in dtype else sum_into)(rows, gradients, places)
            assert sorted(words[:first].tolist()) == sorted(set(ids[owners_of(ids, 2) == 0].tolist()))
            parts.append((words[:first], rows[:first]))
        table.update(*(halves.summed if "16" in dtype else summed)(parts), step)
        yield table.pull(np.concatenate([np.arange(-210, 210), np.array(WIDE)])).tobytes()


def check_bits(*given: Any, **more: Any) -> None:
    """Check that rounds with compiled loops give the rows that NumPy gives."""
    with engine.numpy_only():
        expected = list(rounds(*given, **more))
    list(rounds(*given, **more))
    engine.load_all()
    assert list(rounds(*given, **more)) == expected


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [1, 3, 8, 33, 128, 130])
@pytest.mark.parametrize("optimizer", sorted(ROW_OPTIMIZERS))
def test_tables_have_the_bits_of_numpy(optimizer: str, dim: int, dtype: str) -> None:
    check_bits(optimizer, dim, dtype)


def decayed_and_clipped(optimizer: str) -> dict[str, Any]:
    more = {"l1": 0.3, "l2": 0.1, "beta": 0.0} if optimizer == "ftrl" else {"weight_decay": 0.3}
    return {"clipnorm": 1.5, **more}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("dim", [1, 11, 128, 130])
@pytest.mark.parametrize("optimizer", sorted(ROW_OPTIMIZERS))
def test_decayed_and_clipped_tables_have_the_bits_of_numpy(optimizer: str, dim: int, dtype: str) -> None:
    check_bits(optimizer, dim, dtype, numbers=decayed_and_clipped(optimizer))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim, stochastic", [(33, False), (33, True), (130, True)])
@pytest.mark.parametrize("optimizer", sorted(ROW_OPTIMIZERS))
def test_half_rows_have_the_bits_of_numpy(optimizer: str, dtype: str, dim: int, stochastic: bool) -> None:
    check_bits(optimizer, dim, dtype, numbers=decayed_and_clipped(optimizer), stochastic=stochastic)
    loops = kernels.merge_halves, kernels.add_rows, ROW_OPTIMIZERS[optimizer].kernel
    assert all(loop.ready(np.zeros(1, dtype)) for loop in loops)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("init", sorted(INITS))
def test_first_values_have_the_bits_of_numpy(init: str, dtype: str) -> None:
    check_bits("sgd", 33, dtype, init)
    loop = initial.first_normals if init in ("normal", "truncated") else initial.first_values
    assert loop.ready(np.zeros(1, dtype))
